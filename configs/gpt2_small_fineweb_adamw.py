# GPT-2 small on FineWeb-Edu with AdamW: the settings of OpenWebText, as published.
base = "gpt2_small_adamw.py", "base/fineweb_edu.py"

out_dir = "runs/gpt2_small_fineweb_adamw"
