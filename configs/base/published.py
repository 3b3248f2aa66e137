# What every published language-model run of the MARS paper shares (arXiv 2411.10438, Tables 10-12): 100,000 updates of
# 480 x 1024 tokens, 49.15B in all.

vocab_size = 50304
block_size = 1024
total_batch_size = 480
max_iters = 100_000
warmup_iters = 2000
grad_clip = 1.0
dropout = 0.0
bias = False
scale_attn_by_inverse_layer_idx = True
seed = 5000

eval_interval = 1000
log_interval = 10
checkpoint_interval = 1000
