# The quickstart's AdamW. Its learning rate was the best of 1e-3, 2e-3, 4e-3 and 8e-3 at this size, with one seed.
base = "base/stdlib.py", "base/adamw.py"

learning_rate = 4e-3
min_lr = 4e-4
out_dir = "runs/stdlib_adamw"
