# GPT-2 small on OpenWebText with MARS-Shampoo.
# Muon's learning rate; nothing was published, and it is not tuned (base/mars_shampoo.py).
base = "base/openwebtext.py", "base/gpt2_small.py", "base/mars_shampoo.py"

learning_rate = 2e-2
out_dir = "runs/gpt2_small_mars_shampoo"
