"""The loss of a trained model on prepared data sets, as training computes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from data import DataError
from data.batches import EvaluationBatches
from data.tokens import Dataset, open_dataset
from scripts.comparison.analysis import bits_per_byte
from training import RunError
from training.evaluation import validation_loss
from training.processes import Processes
from training.trained import TrainedModel

ANY_VOCABULARY = 1 << 16  # of uint16 tokens


@dataclass(frozen=True)
class Loss:
    """Over the whole validation file."""

    data: Path
    tokens: int
    loss: float
    """nats a token"""
    perplexity: float
    bits_per_byte: float | None
    """None where meta.json does not say how many bytes the file's text has"""


def open_validation(name: str, trained: TrainedModel) -> Dataset:
    """Opens a data set for a model.

    Raises:
        DataError: it is missing or damaged.
        RunError: its tokens are not the model's.
    """
    dataset = open_dataset(name, trained.model.config.block_size, ANY_VOCABULARY)
    theirs, rows = dataset.meta.get("tokenizer"), trained.model.config.vocab_size
    if None not in (theirs, trained.tokenizer) and theirs != trained.tokenizer:
        raise RunError(
            f"{dataset.path}: its tokens are {theirs}, those of {trained.path} {trained.tokenizer}; prepare the text "
            f"again with --tokenizer {trained.tokenizer}"
        )
    try:
        dataset.val.check_vocabulary(rows)
    except DataError:
        raise RunError(
            f"{dataset.path}: it has tokens that {trained.path} does not know, whose vocab_size is {rows}; choose a "
            "data set of the run's own tokenizer with --data"
        ) from None
    return dataset


def measure(trained: TrainedModel, dataset: Dataset, processes: Processes, batch_size: int, dtype: str) -> Loss:
    """The loss on a data set's validation file, each token but the first predicted once; the same on every process."""
    config = trained.model.config
    batches = EvaluationBatches(
        dataset.val,
        block_size=config.block_size,
        batch_size=batch_size,
        rank=processes.rank,
        processes=processes.size,
        vocab_size=config.vocab_size,
    )
    loss = validation_loss(trained.model, batches, processes, dtype)
    assert loss is not None, "nothing asked it to stop"
    if not math.isfinite(loss):
        raise RunError(f"{trained.path}: a loss of {loss} on {dataset.path}; the run has diverged")
    facts = dataset.meta.get("splits", {}).get("val", {})
    bits = bits_per_byte(loss, len(dataset.val), facts.get("bytes"))
    perplexity = math.exp(loss) if loss < 700 else math.inf
    return Loss(dataset.path, len(dataset.val), loss, perplexity, bits)
