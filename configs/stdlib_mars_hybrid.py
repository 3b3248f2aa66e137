# The quickstart's model with MARS-Shampoo on hidden matrices, MARS-AdamW on embeddings and AdamW on vectors, at the
# learning rates of stdlib_mars_shampoo.py and stdlib_mars.py; not tuned. Validation loss after 600 updates, one seed:
# 1.607, and 1.581 with embeddings on plain AdamW (stdlib_mars_shampoo.py, in the same hour with one thread).
base = "base/stdlib.py", "base/mars_hybrid.py"

learning_rate = 2e-2
min_lr = 1e-3
weight_decay = 0.01
lr_embedding = 6e-3
lr_1d = 4e-3
out_dir = "runs/stdlib_mars_hybrid"
