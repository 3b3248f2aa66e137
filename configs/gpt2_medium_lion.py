# GPT-2 medium on OpenWebText with Lion.
# A fifth of AdamW's learning rate and minimum; nothing was published, and it is not tuned (base/lion.py).
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/lion.py"

learning_rate = 6e-5
min_lr = 1.2e-5
out_dir = "runs/gpt2_medium_lion"
