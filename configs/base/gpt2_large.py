# GPT-2 large: 773,582,080 parameters.

n_layer = 36
n_head = 20
n_embd = 1280
batch_size = 5  # 8 GPUs accumulate 12 micro-batches an update
min_lr = 1e-5  # published, for every optimizer at this size
lr_1d = 1e-3  # published, for the vectors of MARS and Muon
