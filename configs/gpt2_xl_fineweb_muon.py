# GPT-2 XL on FineWeb-Edu with Muon. Nothing was published at this size, and nothing is tuned: GPT-2 large's
# learning rate, since those of AdamW and MARS are the same at both sizes.
base = "base/published.py", "base/fineweb_edu.py", "base/gpt2_xl.py", "base/muon_published.py"

learning_rate = 6.67e-3
out_dir = "runs/gpt2_xl_fineweb_muon"
