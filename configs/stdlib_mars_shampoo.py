# The quickstart's model with MARS-Shampoo on hidden matrices and AdamW on the rest; no hyperparameters for language
# models were published. Validation loss after 600 updates by learning rate, one seed: 1e-2 1.705, 2e-2 1.579,
# 4e-2 1.548, 8e-2 1.928 (minimum 1e-3, for the last 8e-3). Twice the rate here is at the edge.
base = "base/stdlib.py", "base/mars_shampoo.py"

learning_rate = 2e-2
min_lr = 1e-3
weight_decay = 0.01
lr_1d = 4e-3
out_dir = "runs/stdlib_mars_shampoo"
