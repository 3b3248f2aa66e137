# GPT-2 medium on OpenWebText with Muon. Its schedule is not the published one (base/muon_published.py).
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/muon_published.py"

learning_rate = 1e-2
out_dir = "runs/gpt2_medium_muon"
