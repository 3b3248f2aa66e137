# GPT-2 small on FineWeb-Edu with Lion: the settings of OpenWebText.
# Nothing was published for this data set, and nothing is tuned.
base = "gpt2_small_lion.py", "base/fineweb_edu.py"

out_dir = "runs/gpt2_small_fineweb_lion"
