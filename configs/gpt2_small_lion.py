# GPT-2 small on OpenWebText with Lion.
# A fifth of AdamW's learning rate and minimum; nothing was published, and it is not tuned (base/lion.py).
base = "base/openwebtext.py", "base/gpt2_small.py", "base/lion.py"

learning_rate = 1.2e-4
min_lr = 6e-6
out_dir = "runs/gpt2_small_lion"
