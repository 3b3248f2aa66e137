# GPT-2 XL on FineWeb-Edu with MARS-Shampoo.
# Muon's learning rate; nothing was published, and it is not tuned (base/mars_shampoo.py).
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/mars_shampoo.py"

learning_rate = 6.67e-3
out_dir = "runs/gpt2_xl_fineweb_mars_shampoo"
