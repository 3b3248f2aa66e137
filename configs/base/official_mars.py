# What the published code of MARS does beside: c is clipped tensor by tensor, the first reference gradient is zero, and
# embeddings do not decay.
base = "official.py"

mars_clip = "tensor"
mars_first_step = "official"
weight_decay_embedding = 0.0
