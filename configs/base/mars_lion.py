# MARS-Lion. For language models nothing was published but its results, and nothing was tuned here on GPT-2. A sign is
# larger than AdamW's direction, so Lion's rule (arXiv 2302.06675) is a smaller learning rate and a decay as much
# larger. Here 10 times: on white noise MARS-AdamW at 6e-3 takes a step of RMS 6.4e-4, and so does a sign at 6.4e-4.
# On the small model of stdlib_mars_lion.py the best rate was a twelfth of MARS-AdamW's.
base = "mars.py"

optimizer = "mars-lion"
weight_decay = 0.1
