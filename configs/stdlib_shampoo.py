# The quickstart's model with Shampoo (arXiv 1802.09568) on hidden matrices and AdamW on embeddings and vectors.
# Validation loss after 600 updates by learning rate, one seed (minimum 1e-3): 5e-3 2.272, 2e-2 2.061, 8e-2 1.784;
# larger rates were not tried.
base = "base/stdlib.py", "base/vectors.py"

optimizer = "shampoo"
beta1 = 0.95
beta2 = 0.99
learning_rate = 8e-2
min_lr = 1e-3
weight_decay = 0.01
lr_1d = 4e-3
out_dir = "runs/stdlib_shampoo"
