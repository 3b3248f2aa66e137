"""The accuracy on HellaSwag: how often a model finds the real ending the most probable one of four."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from data.items import Item
from data.tokenizers import Tokenizer
from scripts.evaluation.scoring import encode_pair, loglikelihoods
from training import RunError
from training.processes import Processes
from training.trained import TrainedModel

DEFINITION = (
    "zero-shot, as in lm-evaluation-harness: after the query and a space, acc takes the ending of the highest "
    "log-likelihood (the sum over its tokens), acc_norm that of the highest log-likelihood divided by the ending's "
    "number of characters (the space not counted)"
)


@dataclass(frozen=True)
class Accuracy:
    """Shares of the items, and their standard errors (of the mean, from the sample's variance)."""

    items: int
    acc: float
    acc_stderr: float | None
    acc_norm: float
    acc_norm_stderr: float | None


def accuracy(
    trained: TrainedModel,
    items: Sequence[Item],
    tokenizer: Tokenizer,
    processes: Processes,
    batch_size: int,
    dtype: str,
    progress: Callable[[int], None] = lambda done: None,
) -> Accuracy:
    """The accuracy on all items, of which each process takes its share; the same on every process.

    Raises:
        RunError: the model computes infinities or NaN.
    """
    mine = items[processes.rank :: processes.size]
    requests = [encode_pair(tokenizer, item.query, f" {ending}") for item in mine for ending in item.endings]
    scores = loglikelihoods(
        trained.model, requests, batch_size=batch_size, device=processes.device, dtype=dtype, progress=progress
    )
    sums = iter(total for total, _ in scores)
    answers = [choose(item, [next(sums) for _ in item.endings]) for item in mine]
    damaged = not all(math.isfinite(total) for total, _ in scores)
    right = [
        float(sum(answer[way] == item.label for answer, item in zip(answers, mine, strict=True))) for way in (0, 1)
    ]
    by_sum, by_length, damaged_processes = processes.sum([*right, float(damaged)])
    if damaged_processes:
        raise RunError(f"{trained.path}: log-likelihoods that are not finite; the run has diverged")
    count = len(items)
    return Accuracy(count, *_mean(by_sum, count), *_mean(by_length, count))


def choose(item: Item, sums: Sequence[float]) -> tuple[int, int]:
    """The endings that acc and acc_norm take, by their log-likelihoods; of equal ones the first."""
    lengths = [len(ending) for ending in item.endings]
    # An ending that was nothing but markup is empty. Divided by 0 characters it is never taken, as in the harness.
    per_character = [total / length if length else -math.inf for total, length in zip(sums, lengths, strict=True)]
    return sums.index(max(sums)), per_character.index(max(per_character))


def _mean(right: float, count: int) -> tuple[float, float | None]:
    share = right / count
    return share, math.sqrt(share * (1 - share) / (count - 1)) if count > 1 else None
