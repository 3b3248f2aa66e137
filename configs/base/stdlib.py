# A GPT of 0.8M parameters on the source of the Python standard library, byte by byte: minutes on a laptop. In
# float32 on every CPU, as the learning rates of the configs built on this were looked for: bfloat16 was 10 to 20 %
# faster, with losses of 1.901 instead of 1.890 (AdamW) and 1.884 instead of 1.873 (MARS-AdamW), one seed each.

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
dtype = "float32"
