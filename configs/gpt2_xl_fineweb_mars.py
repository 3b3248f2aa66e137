# GPT-2 XL on FineWeb-Edu with MARS-AdamW, the published recipe.
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/mars.py"

learning_rate = 2e-3
out_dir = "runs/gpt2_xl_fineweb_mars"
