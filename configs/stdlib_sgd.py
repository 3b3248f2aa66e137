# The quickstart's model with SGD and momentum.
base = "base/stdlib.py"

optimizer = "sgd"
beta1 = 0.9
learning_rate = 0.3
min_lr = 3e-2
weight_decay = 0.0
out_dir = "runs/stdlib_sgd"
