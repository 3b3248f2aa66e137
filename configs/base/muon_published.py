# The MARS paper's Muon: all matrices, embeddings too. Its script computes the learning rate otherwise than its config
# says (train_muon.py, commits d07f4c9 and e89faee): constant from update 2000 to 98,000, then linear to 0. There is no
# such schedule here: it is the cosine of the other optimizers.
base = "muon.py"

embedding_adamw = False
