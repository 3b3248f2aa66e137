# GPT-2 large on OpenWebText with Muon, the published recipe (base/muon_published.py has a word on its schedule).
base = "base/openwebtext.py", "base/gpt2_large.py", "base/muon_published.py"

learning_rate = 6.67e-3
out_dir = "runs/gpt2_large_muon"
