# GPT-2 small on OpenWebText with Muon, the published recipe (base/muon_published.py has a word on its schedule).
base = "base/openwebtext.py", "base/gpt2_small.py", "base/muon_published.py"

learning_rate = 2e-2
out_dir = "runs/gpt2_small_muon"
