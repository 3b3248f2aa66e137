# The quickstart's model with Muon on hidden matrices and AdamW on embeddings and vectors, as its authors advise.
# Validation loss after 600 updates by learning rate, one seed (minimum 1e-3): 2e-2 1.573, 4e-2 1.529, 8e-2 1.947. Twice
# the rate here is at the edge.
base = "base/stdlib.py", "base/muon.py"

learning_rate = 2e-2
min_lr = 1e-3
lr_1d = 4e-3
out_dir = "runs/stdlib_muon"
