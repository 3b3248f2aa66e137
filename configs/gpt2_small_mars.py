# GPT-2 small on OpenWebText with MARS-AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_small.py", "base/mars.py"

learning_rate = 6e-3
out_dir = "runs/gpt2_small_mars"
