"""What `scripts/compare.py` is made of: reading runs, the arithmetic of a comparison, its text, its figure."""
