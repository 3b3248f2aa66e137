"""The arithmetic of a comparison: pure functions of curves and runs.

The question behind it is the one of the MARS paper (arXiv 2411.10438): how many tokens does one optimizer need to
reach the loss at which another ended? Evaluations are sparse, so the answer is read off the straight line
between the two evaluations around the first crossing.
"""

import json
import math
from collections import defaultdict

import numpy as np

from scripts.comparison.runs import Curve, Floats, Run

# The first rows are slower than the rest: compilation, warm caches, a cold disk.
WARMUP_ROWS = 5

# What distinguishes one setting from another. A list of what counts, not of what doesn't: a config also holds
# paths, names and dates, which would make every run a setting of its own.
SETTING_KEYS = (
    *("optimizer", "learning_rate", "min_lr", "beta1", "beta2", "weight_decay", "grad_clip", "warmup_iters"),
    *("lr_decay_iters", "max_iters", "gamma", "exact", "mars_clip", "mars_first_step", "lr_1d", "betas_1d"),
    *("weight_decay_1d", "gradient_multiplier", "dropout", "parameters", "tokens_per_update", "block_size"),
)


def tokens_to_loss(evals: Curve, loss: float) -> float | None:
    """Tokens until the loss is first reached from above, or None where it never is."""
    curve = evals.finite()
    return crossing(curve.tokens, curve.loss, loss)


def crossing(x: Floats, y: Floats, level: float) -> float | None:
    """Where y first comes down to the level, by straight lines between points; x[0] where it starts there."""
    reached = np.flatnonzero(y <= level)
    if len(reached) == 0:
        return None
    after = int(reached[0])
    if after == 0:
        return float(x[0])
    before = after - 1
    part = (y[before] - level) / (y[before] - y[after])
    return float(x[before] + part * (x[after] - x[before]))


def final_loss(evals: Curve) -> float | None:
    """The last evaluation's loss: not a number where the run diverged, None where there is no evaluation."""
    return float(evals.loss[-1]) if len(evals) else None


def best_loss(evals: Curve) -> float | None:
    finite = evals.finite()
    return float(finite.loss.min()) if len(finite) else None


def bits_per_byte(loss: float | None, val_tokens: object, val_bytes: object) -> float | None:
    """Nats per token as bits per byte of text, which no longer depends on the tokenizer. None where unknown."""
    if loss is None or not isinstance(val_tokens, int) or not isinstance(val_bytes, int) or val_bytes <= 0:
        return None
    return loss / math.log(2) * val_tokens / val_bytes


def throughput(tokens_per_sec: Floats) -> float | None:
    """Median tokens a second of the rows after the first few; of the later half where there are only few."""
    rows = tokens_per_sec[min(WARMUP_ROWS, len(tokens_per_sec) // 2) :]
    rows = rows[np.isfinite(rows)]
    return float(np.median(rows)) if len(rows) else None


def smooth(values: Floats, window: int) -> Floats:
    """The mean of the `window` values around each one, fewer at the ends. What is not a number is left out."""
    half = window // 2
    known = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(known, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(known)])
    places = np.arange(len(values))
    first, last = np.maximum(places - half, 0), np.minimum(places + half + 1, len(values))
    number = counts[last] - counts[first]
    mean = (sums[last] - sums[first]) / np.maximum(number, 1)
    # A gap stays a gap: a mean of its neighbours would hide that the run diverged there.
    return np.where(known, mean, np.nan)


def short_names(runs: list[Run]) -> list[str]:
    """The end of each folder's path, as short as tells the runs apart."""
    parts = [run.folder.resolve().parts for run in runs]
    longest = max(len(p) for p in parts)
    names: list[str] = []
    for depth in range(1, longest + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def same_validation_data(a: Run, b: Run) -> bool:
    """Whether losses of the two can be set against each other at all."""
    return _validation_key(a) == _validation_key(b)


def same_speed_conditions(a: Run, b: Run) -> bool:
    """Whether seconds of the two can be set against each other."""
    return all(a.config.get(key) == b.config.get(key) for key in ("device_name", "processes"))


def _validation_key(run: Run) -> str:
    if run.data.get("val_tokens") is None:
        return str(run.dataset)
    return json.dumps([run.data["val_tokens"], run.data.get("tokenizer")], sort_keys=True)


def one_seed_each(runs: list[Run]) -> bool:
    """Whether no setting was run with a second seed, so that nothing tells a difference from chance."""
    seeds = defaultdict(set)
    for run in runs:
        setting = [str(run.config.get(key)) for key in SETTING_KEYS]
        seeds[(*setting, _validation_key(run))].add(str(run.config.get("seed")))
    return all(len(s) == 1 for s in seeds.values())
