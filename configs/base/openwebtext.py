# The published schedule on OpenWebText: python data/prepare.py openwebtext

base = "published.py"

dataset = "openwebtext"
