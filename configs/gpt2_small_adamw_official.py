# GPT-2 small on OpenWebText with AdamW as the published code does it (base/official.py).
base = "gpt2_small_adamw.py", "base/official.py"

out_dir = "runs/gpt2_small_adamw_official"
