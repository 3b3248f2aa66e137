# Muon with Nesterov momentum and without decay, as published in the MARS paper's comparison (arXiv 2411.10438).
base = "vectors.py"

optimizer = "muon"
beta1 = 0.95
weight_decay = 0.0
