# GPT-2 medium on OpenWebText with AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/adamw.py"

learning_rate = 3e-4
out_dir = "runs/gpt2_medium_adamw"
