"""Figures of a run, and whether two runs can be set against each other."""

import json
import math

import numpy as np

from scripts.comparison.curves import Curve, Floats
from scripts.comparison.runs import Run, printable

# The first rows are slower than the rest: compilation, warm caches, a cold disk.
WARMUP_ROWS = 5


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
    try:
        return loss / math.log(2) * (val_tokens / val_bytes)
    except OverflowError:
        return None


def throughput(tokens_per_sec: Floats) -> float | None:
    """Median tokens a second of the rows after the first few; of the later half where there are only few."""
    rows = tokens_per_sec[min(WARMUP_ROWS, len(tokens_per_sec) // 2) :]
    rows = rows[np.isfinite(rows)]
    return float(np.median(rows)) if len(rows) else None


def short_names(runs: list[Run]) -> list[str]:
    """The end of each folder's path, as short as tells the runs apart."""
    parts = [tuple(map(printable, run.folder.resolve().parts)) for run in runs]
    longest = max(len(p) for p in parts)
    names: list[str] = []
    for depth in range(1, longest + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            break
    return names


def same_validation_data(a: Run, b: Run) -> bool:
    """Whether losses of the two can be set against each other at all: equally many tokens of one tokenizer, and one
    name or, since the same data may lie in another folder, one fingerprint. Without numbers of tokens the name
    has to do.
    """
    same_name = a.dataset == b.dataset
    if a.data.get("val_tokens") is None or b.data.get("val_tokens") is None:
        return a.data.get("val_tokens") == b.data.get("val_tokens") and same_name
    if any(a.data.get(key) != b.data.get(key) for key in ("val_tokens", "tokenizer")):
        return False
    return same_name or (a.data.get("fingerprint") == b.data.get("fingerprint") is not None)


def same_speed_conditions(a: Run, b: Run) -> bool:
    """Whether seconds of the two can be set against each other."""
    return all(a.config.get(key) == b.config.get(key) for key in ("device_name", "processes"))


def data_key(run: Run) -> str:
    """What tells whether two runs learn from the same tokens and are evaluated on the same."""
    known = [run.data.get(key) for key in ("val_tokens", "tokenizer", "train_tokens")]
    return json.dumps([*known, run.data.get("fingerprint") or run.dataset], sort_keys=True, default=str)
