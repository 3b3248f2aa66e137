# GPT-2 large on OpenWebText with Lion.
# A fifth of AdamW's learning rate and minimum; nothing was published, and it is not tuned (base/lion.py).
base = "base/openwebtext.py", "base/gpt2_large.py", "base/lion.py"

learning_rate = 4e-5
min_lr = 2e-6
out_dir = "runs/gpt2_large_lion"
