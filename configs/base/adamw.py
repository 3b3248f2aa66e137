# AdamW as published (arXiv 2411.10438): matrices and embeddings decay, vectors do not.

optimizer = "adamw"
beta1 = 0.9
beta2 = 0.95
eps = 1e-8
weight_decay = 0.1
weight_decay_1d = 0.0
lr_1d = None  # that of matrices
