# GPT-2 XL on FineWeb-Edu with MARS-Lion.
# A tenth of MARS-AdamW's learning rate; nothing was published, and it is not tuned (base/mars_lion.py).
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/mars_lion.py"

learning_rate = 2e-4
out_dir = "runs/gpt2_xl_fineweb_mars_lion"
