# The quickstart's model with MARS-Lion; no hyperparameters for language models were published. Validation loss after
# 600 updates by learning rate, one seed: 2.5e-4 2.128, 5e-4 2.026, 1e-3 2.088, 2e-3 2.546 (minimum 2.5e-5 for the
# first, 5e-5 for the others).
base = "base/stdlib.py", "base/mars_lion.py"

learning_rate = 5e-4
min_lr = 5e-5
lr_1d = 3e-3
out_dir = "runs/stdlib_mars_lion"
