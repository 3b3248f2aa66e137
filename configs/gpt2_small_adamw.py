# GPT-2 small on OpenWebText with AdamW, the published recipe.
base = "base/openwebtext.py", "base/gpt2_small.py", "base/adamw.py"

learning_rate = 6e-4
out_dir = "runs/gpt2_small_adamw"
