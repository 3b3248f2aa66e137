# GPT-2 XL: 1,556,840,000 parameters. It was published on FineWeb-Edu only. The micro-batch is the published one;
# scripts/plan.py finds 59 GB of an H100's 80 for MARS-AdamW, and room for 6. Not yet tried on a GPU.

n_layer = 48
n_head = 25
n_embd = 1600
batch_size = 5  # 8 GPUs accumulate 12 micro-batches an update
min_lr = 1e-5  # published, for every optimizer at this size
lr_1d = 1e-3  # published, for the vectors of MARS
