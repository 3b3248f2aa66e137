# GPT-2 medium on OpenWebText with MARS-AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/mars.py"

learning_rate = 3e-3
out_dir = "runs/gpt2_medium_mars"
