# What the published code does beside its configs, for those who want to match it rather than the paper. First what all
# of its scripts do:
#
# - The loss is not divided by the accumulation steps, so that the gradient is that many times the mean before it is
#   clipped: 4 for small and medium, 12 for large, on the 8 GPUs of its README. `gradient_multiplier` is that factor,
#   whatever the number of GPUs.
# - Update k has the learning rate of update k - 1 here: the first one 0; and there are 100,001.
#
# Vectors decay by 0.1 under MARS and not under AdamW: base/mars.py and base/adamw.py have that already.
# No switch makes its batches (they differ between its scripts, and depend on the number of GPUs and on the evaluations)
# or its validation (200 random batches; here the whole file).

gradient_multiplier = 4.0  # the configs of large have 12.0
first_lr_zero = True
max_iters = 100_001
lr_decay_iters = 100_000
