# GPT-2 XL on FineWeb-Edu with AdamW, the published recipe.
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/adamw.py"

learning_rate = 2e-4
out_dir = "runs/gpt2_xl_fineweb_adamw"
