# Lion (arXiv 2302.06675) with its authors' betas. For language models the MARS paper published its result alone, and
# nothing was tuned here on GPT-2. Its authors advise a learning rate 3 to 10 times smaller than AdamW's and a decay as
# much larger. Here 5 times, the minimum as well: on white noise AdamW at 6e-4 takes a step of RMS 1.4e-4, a sign at
# 1.2e-4 one of 1.2e-4.
base = "vectors.py"

optimizer = "lion"
beta1 = 0.9
beta2 = 0.99
weight_decay = 0.5
