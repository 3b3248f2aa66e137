# The quickstart's model with NAdamW: AdamW with Nesterov momentum.
base = "base/stdlib.py", "base/adamw.py"

optimizer = "nadamw"
learning_rate = 4e-3
min_lr = 4e-4
out_dir = "runs/stdlib_nadamw"
