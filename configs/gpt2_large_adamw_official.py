# GPT-2 large on OpenWebText with AdamW as the published code does it (base/official.py).
base = "gpt2_large_adamw.py", "base/official.py"

gradient_multiplier = 12.0
out_dir = "runs/gpt2_large_adamw_official"
