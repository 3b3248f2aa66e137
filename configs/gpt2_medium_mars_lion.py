# GPT-2 medium on OpenWebText with MARS-Lion.
# A tenth of MARS-AdamW's learning rate; nothing was published, and it is not tuned (base/mars_lion.py).
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/mars_lion.py"

learning_rate = 3e-4
out_dir = "runs/gpt2_medium_mars_lion"
