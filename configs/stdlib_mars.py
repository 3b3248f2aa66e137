# The quickstart's MARS-AdamW. Validation loss after 600 updates by learning rate, one seed (minimum a tenth of it,
# lr_1d half of it): 3e-3 1.983, 6e-3 1.873, 1.2e-2 1.872, 2.4e-2 2.064. The published rate is as good as any.
base = "base/stdlib.py", "base/mars.py"

learning_rate = 6e-3
min_lr = 6e-4
lr_1d = 3e-3
out_dir = "runs/stdlib_mars"
