# The optimizers on the source of the Python standard library, each tuned and then run with five seeds; four of them at
# a larger size; and what people asked about the settings. One seed at 600 updates says where the grids lie
# (configs/stdlib_*.py).
#
#   python scripts/study.py configs/studies/stdlib.py --dry-run

ADAMW = dict(config="../stdlib_adamw.py", learning_rates=(1e-3, 2e-3, 4e-3, 8e-3, 1.6e-2))
MARS = dict(config="../stdlib_mars.py", learning_rates=(3e-3, 6e-3, 1.2e-2, 2.4e-2, 4.8e-2), scaled={"lr_1d": 0.5})
SIGNS = (2.5e-4, 5e-4, 1e-3, 2e-3, 4e-3)
MATRICES = (5e-3, 1e-2, 2e-2, 4e-2, 8e-2)
SAME = dict(config="../stdlib_mars.py", around="mars", against="mars", scaled={"lr_1d": 0.5})  # at MARS's best rate

arms = {
    "adamw": ADAMW,
    "adamw-mars-betas": dict(ADAMW, beta1=0.95, beta2=0.99),
    "nadamw": dict(ADAMW, config="../stdlib_nadamw.py"),
    "mars": MARS,
    "mars-gamma0": dict(MARS, gamma=0.0),
    "mars-gamma.1": dict(MARS, gamma=0.1),
    "mars-exact": dict(MARS, config="../stdlib_mars_exact.py"),
    "lion": dict(config="../stdlib_lion.py", learning_rates=SIGNS),
    "mars-lion": dict(config="../stdlib_mars_lion.py", learning_rates=SIGNS),
    "muon": dict(config="../stdlib_muon.py", learning_rates=MATRICES),
    "mars-shampoo": dict(config="../stdlib_mars_shampoo.py", learning_rates=MATRICES),
    # Ablations: one setting changed, at the best learning rate of MARS-AdamW and at its half and double.
    "mars-adamw-betas": dict(SAME, factors=(0.5, 1.0, 2.0), beta1=0.9, beta2=0.95),
    "mars-clip-global": dict(SAME, mars_clip="global"),
    "mars-clip-none": dict(SAME, mars_clip="none"),
    "mars-embedding-adamw": dict(SAME, embedding_adamw=True),
    "mars-1d-undecayed": dict(SAME, weight_decay_1d=0.0),
    "mars-multiplier4": dict(SAME, gradient_multiplier=4.0),
    "mars-multiplier12": dict(SAME, gradient_multiplier=12.0),
    "mars-batch4x": dict(
        MARS, total_batch_size=64, max_iters=150, warmup_iters=15, eval_interval=25, against="adamw-batch4x"
    ),
    "adamw-batch4x": dict(ADAMW, total_batch_size=64, max_iters=150, warmup_iters=15, eval_interval=25),
    "mars-batch.25x": dict(
        MARS,
        batch_size=4,
        total_batch_size=4,
        max_iters=2400,
        warmup_iters=240,
        eval_interval=400,
        against="adamw-batch.25x",
    ),
    "adamw-batch.25x": dict(
        ADAMW, batch_size=4, total_batch_size=4, max_iters=2400, warmup_iters=240, eval_interval=400
    ),
}
baseline = "adamw"
seeds = (5000, 5001, 5002, 5003, 5004)
scaled = {"min_lr": 0.1}
# 3.5M parameters outside the embeddings, 20 tokens each; at the small size's best learning rate, its half and double.
LARGE = dict(n_layer=5, n_head=4, n_embd=240, batch_size=16, total_batch_size=32, max_iters=17_100, warmup_iters=1_000)
sizes = {
    "3.5M": dict(LARGE, eval_interval=950, arms=("adamw", "mars", "muon", "mars-shampoo"), factors=(0.5, 1.0, 2.0))
}
