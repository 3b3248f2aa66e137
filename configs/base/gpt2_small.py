# GPT-2 small: 124,373,760 parameters.

n_layer = 12
n_head = 12
n_embd = 768
batch_size = 15  # fits a GPU of 80 GB; 8 of them accumulate 4 micro-batches an update
min_lr = 3e-5  # published, for every optimizer at this size
lr_1d = 3e-3  # published, for the vectors of MARS and Muon
