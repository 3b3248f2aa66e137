# Hybrid preconditioning: MARS-Shampoo on hidden matrices, MARS-AdamW on embeddings, AdamW on vectors. Nothing was
# published for it, and it is not tuned: each part has the settings that it has by itself, in mars_shampoo.py, mars.py
# and vectors.py beside this file.
base = "mars_shampoo.py"

embedding_adamw = False  # True would be plain AdamW
preconditioner_embeddings = "adamw"
weight_decay_embedding = 0.01  # MARS-AdamW's
