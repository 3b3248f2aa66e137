# GPT-2 large on OpenWebText with MARS-AdamW as the published code does it (base/official_mars.py).
base = "gpt2_large_mars.py", "base/official_mars.py"

gradient_multiplier = 12.0
out_dir = "runs/gpt2_large_mars_official"
