# GPT-2 medium on OpenWebText with AdamW as the published code does it (base/official.py).
base = "gpt2_medium_adamw.py", "base/official.py"

out_dir = "runs/gpt2_medium_adamw_official"
