# The MARS paper's Muon: all matrices, embeddings too, on the cosine that its configs name. Its script computes another
# schedule from them (train_muon.py, commits d07f4c9 and e89faee): constant from update 2000 to 98,000, then linear to
# 0. But its published curves are flat over the last 2000 updates, as on a cosine, and do not fall there.
base = "muon.py"

embedding_adamw = False
