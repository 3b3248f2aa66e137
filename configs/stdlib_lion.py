# The quickstart's model with Lion (arXiv 2302.06675) on matrices and embeddings, AdamW on vectors. Validation loss
# after 600 updates by learning rate, one seed (minimum a tenth of it): 5e-4 2.146, 1e-3 2.127.
base = "base/stdlib.py", "base/lion.py"

learning_rate = 1e-3
min_lr = 1e-4
weight_decay = 0.1
lr_1d = 3e-3
out_dir = "runs/stdlib_lion"
