# The smallest study: minutes of one core become seconds. It shows that everything works, not which optimizer is better.
#
#   python scripts/study.py configs/studies/smoke.py

arms = {
    "adamw": dict(config="../stdlib_adamw.py", learning_rates=(4e-3, 8e-3)),
    "mars-adamw": dict(config="../stdlib_mars.py", learning_rates=(6e-3, 1.2e-2), scaled={"lr_1d": 0.5}),
    "mars-gamma0": dict(config="../stdlib_mars.py", around="mars-adamw", gamma=0.0, against="mars-adamw"),
}
baseline = "adamw"
seeds = (5000, 5001, 5002)
scaled = {"min_lr": 0.1}
extend = 1

# --- keys of all runs ---
n_layer = 2
n_embd = 32
block_size = 32
max_iters = 20
warmup_iters = 4
eval_interval = 10
log_interval = 1
checkpoint_interval = 0
