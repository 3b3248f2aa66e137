# MARS-Shampoo on hidden matrices. For language models nothing was published, and nothing was tuned here on GPT-2. Its
# direction is as large as Muon's (they are one method: docs/optimizers.md, "Identities"), so the learning rates are
# Muon's published ones; on the small model of stdlib_mars_shampoo.py and stdlib_muon.py the best rates were equal too.
# Rate times decay is what it is for AdamW and MARS-AdamW as published. Embeddings are on AdamW, as Muon's authors
# advise; the published code would step them like matrices: embedding_adamw=False.
base = "mars.py"

optimizer = "mars-shampoo"
weight_decay = 3e-3
embedding_adamw = True
