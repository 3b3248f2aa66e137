# GPT-2 large on OpenWebText with MARS-Lion.
# A tenth of MARS-AdamW's learning rate; nothing was published, and it is not tuned (base/mars_lion.py).
base = "base/openwebtext.py", "base/gpt2_large.py", "base/mars_lion.py"

learning_rate = 2e-4
out_dir = "runs/gpt2_large_mars_lion"
