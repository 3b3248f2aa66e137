# Vectors on AdamW with settings of their own, as published for MARS and Muon. Every optimizer but AdamW has them here.

betas_1d = (0.9, 0.95)
weight_decay_1d = 0.1
