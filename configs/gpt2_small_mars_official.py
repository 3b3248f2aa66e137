# GPT-2 small on OpenWebText with MARS-AdamW as the published code does it (base/official_mars.py).
base = "gpt2_small_mars.py", "base/official_mars.py"

out_dir = "runs/gpt2_small_mars_official"
