# GPT-2 medium on OpenWebText with MARS-AdamW as the published code does it (base/official_mars.py).
base = "gpt2_medium_mars.py", "base/official_mars.py"

out_dir = "runs/gpt2_medium_mars_official"
