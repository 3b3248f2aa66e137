# The quickstart's model with NAdamW: AdamW with Nesterov momentum. Validation loss after 600 updates by learning rate,
# one seed (minimum a tenth of it): 4e-3 1.802, 8e-3 1.854; smaller rates were not tried.
base = "base/stdlib.py", "base/adamw.py"

optimizer = "nadamw"
learning_rate = 4e-3
min_lr = 4e-4
out_dir = "runs/stdlib_nadamw"
