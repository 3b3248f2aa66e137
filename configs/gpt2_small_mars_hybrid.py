# GPT-2 small on OpenWebText with MARS-Shampoo on hidden matrices, MARS-AdamW on embeddings and AdamW on vectors.
# The learning rates are those of gpt2_small_mars_shampoo.py and gpt2_small_mars.py; nothing was published, and it is
# not tuned (base/mars_hybrid.py).
base = "base/openwebtext.py", "base/gpt2_small.py", "base/mars_hybrid.py"

learning_rate = 2e-2
lr_embedding = 6e-3
out_dir = "runs/gpt2_small_mars_hybrid"
