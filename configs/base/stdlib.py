# A GPT of 0.8M parameters on the source of the Python standard library, byte by byte: minutes on a laptop. The learning
# rates of the configs built on this were looked for in float32.

dataset = "stdlib"
vocab_size = 272  # 256 bytes and end-of-text, padded to a multiple of 16
n_layer = 4
n_head = 4
n_embd = 128
block_size = 128
batch_size = 8
total_batch_size = 16
max_iters = 600
warmup_iters = 60
seed = 5000

eval_interval = 100
log_interval = 10
checkpoint_interval = 200
keep_checkpoints = 1
compile = False  # a model this small trains faster than it compiles
