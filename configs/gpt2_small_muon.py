# GPT-2 small on OpenWebText with Muon. Its schedule is not the published one (base/muon_published.py).
base = "base/openwebtext.py", "base/gpt2_small.py", "base/muon_published.py"

learning_rate = 2e-2
out_dir = "runs/gpt2_small_muon"
