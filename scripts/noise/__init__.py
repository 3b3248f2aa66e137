"""What `scripts/gradient_noise.py` is made of: estimates of a gradient along a path, their moments, table, figure."""
