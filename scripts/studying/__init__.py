"""What `scripts/study.py` is made of: the declaration, the plan of runs, the pool that makes them, the outcome."""
