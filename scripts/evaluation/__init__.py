"""What `scripts/evaluate.py` and `scripts/sample.py` are made of: scores of texts, sampled tokens."""
