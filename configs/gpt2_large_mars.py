# GPT-2 large on OpenWebText with MARS-AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_large.py", "base/mars.py"

learning_rate = 2e-3
out_dir = "runs/gpt2_large_mars"
