# GPT-2 medium: 354,599,936 parameters.

n_layer = 24
n_head = 16
n_embd = 1024
batch_size = 15  # 8 GPUs accumulate 4 micro-batches an update
min_lr = 6e-5  # published, for every optimizer at this size
lr_1d = 1.5e-3  # published, for the vectors of MARS and Muon
