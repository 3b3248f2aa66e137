# GPT-2 medium on OpenWebText with Muon, the published recipe (base/muon_published.py has a word on its schedule).
base = "base/openwebtext.py", "base/gpt2_medium.py", "base/muon_published.py"

learning_rate = 1e-2
out_dir = "runs/gpt2_medium_muon"
