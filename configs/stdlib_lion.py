# The quickstart's model with Lion (arXiv 2302.06675) on matrices and embeddings, AdamW on vectors.
base = "base/stdlib.py"

optimizer = "lion"
beta1 = 0.9
beta2 = 0.99
learning_rate = 5e-4
min_lr = 5e-5
weight_decay = 0.1
lr_1d = 3e-3
betas_1d = (0.9, 0.95)
weight_decay_1d = 0.1
out_dir = "runs/stdlib_lion"
