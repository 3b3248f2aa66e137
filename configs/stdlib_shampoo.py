# The quickstart's model with Shampoo (arXiv 1802.09568) on hidden matrices and AdamW on embeddings and vectors.
base = "base/stdlib.py"

optimizer = "shampoo"
beta1 = 0.95
beta2 = 0.99
learning_rate = 2e-2
min_lr = 2e-3
weight_decay = 0.01
lr_1d = 4e-3
betas_1d = (0.9, 0.95)
weight_decay_1d = 0.1
out_dir = "runs/stdlib_shampoo"
