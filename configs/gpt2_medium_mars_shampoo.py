# GPT-2 medium on OpenWebText with MARS-Shampoo.
# Muon's learning rate; nothing was published, and it is not tuned (base/mars_shampoo.py).
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/mars_shampoo.py"

learning_rate = 1e-2
out_dir = "runs/gpt2_medium_mars_shampoo"
