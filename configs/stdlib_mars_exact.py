# The quickstart's model with exact MARS-AdamW: two gradients an update, so about twice the time.
base = "stdlib_mars.py"

exact = True
out_dir = "runs/stdlib_mars_exact"
