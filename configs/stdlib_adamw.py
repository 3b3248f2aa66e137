# The quickstart's AdamW. Validation loss after 600 updates by learning rate, one seed (minimum a tenth of it, 2 CPU
# cores, Python 3.11's library): 1e-3 2.125, 2e-3 1.974, 4e-3 1.890, 8e-3 1.883. A larger rate is not clearly better.
base = "base/stdlib.py", "base/adamw.py"

learning_rate = 4e-3
min_lr = 4e-4
out_dir = "runs/stdlib_adamw"
