# GPT-2 XL on FineWeb-Edu with Lion.
# A fifth of AdamW's learning rate and minimum; nothing was published, and it is not tuned (base/lion.py).
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/lion.py"

learning_rate = 4e-5
min_lr = 2e-6
out_dir = "runs/gpt2_xl_fineweb_lion"
