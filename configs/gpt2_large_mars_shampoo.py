# GPT-2 large on OpenWebText with MARS-Shampoo.
# Muon's learning rate; nothing was published, and it is not tuned (base/mars_shampoo.py).
base = "base/openwebtext.py", "base/gpt2_large.py", "base/mars_shampoo.py"

learning_rate = 6.67e-3
out_dir = "runs/gpt2_large_mars_shampoo"
