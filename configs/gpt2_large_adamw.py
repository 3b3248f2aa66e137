# GPT-2 large on OpenWebText with AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_large.py", "base/adamw.py"

learning_rate = 2e-4
out_dir = "runs/gpt2_large_adamw"
