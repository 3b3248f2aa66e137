# The quickstart's MARS-AdamW. Its learning rate was the best of 3e-3, 6e-3 and 1.2e-2 at this size, with one seed.
base = "base/stdlib.py", "base/mars.py"

learning_rate = 1.2e-2
min_lr = 1.2e-3
lr_1d = 6e-3
out_dir = "runs/stdlib_mars"
