# MARS-AdamW, approximate, as published (arXiv 2411.10438, Algorithm 2 and Tables 10-12). The published code clips c
# tensor by tensor; by the paper's text it is clipped as one vector. Embeddings are stepped like matrices; the published
# code does not decay them.
base = "vectors.py"

optimizer = "mars-adamw"
beta1 = 0.95
beta2 = 0.99
eps = 1e-8
gamma = 0.025
weight_decay = 0.01
mars_clip = "tensor"
mars_first_step = "paper"
