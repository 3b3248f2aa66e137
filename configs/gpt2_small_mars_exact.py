# GPT-2 small on OpenWebText with exact MARS-AdamW: the published recipe, two gradients an update.
base = "gpt2_small_mars.py"

exact = True
out_dir = "runs/gpt2_small_mars_exact"
