# The quickstart's model with Muon on hidden matrices and AdamW on embeddings and vectors, as its authors advise.
# Validation loss after 600 updates by learning rate, one seed (minimum 1e-3): 2e-2 1.573, 4e-2 1.529, 8e-2 1.947. Twice
# the rate here is at the edge.
base = "base/stdlib.py"

optimizer = "muon"
beta1 = 0.95
learning_rate = 2e-2
min_lr = 1e-3
weight_decay = 0.0
lr_1d = 4e-3
betas_1d = (0.9, 0.95)
weight_decay_1d = 0.1
out_dir = "runs/stdlib_muon"
