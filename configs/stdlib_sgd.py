# The quickstart's model with SGD and momentum. Validation loss after 600 updates by learning rate, one seed (minimum a
# tenth of it): 0.3 2.493, 1 2.550; smaller rates were not tried.
base = "base/stdlib.py"

optimizer = "sgd"
beta1 = 0.9
learning_rate = 0.3
min_lr = 3e-2
weight_decay = 0.0
out_dir = "runs/stdlib_sgd"
