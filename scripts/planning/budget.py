"""What a run costs beside memory: operations, hours and room on disk."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from configs import TrainConfig
from model import GPT
from scripts.planning.machines import Machine
from training.passes import passes_an_update

DATA = Path(__file__).resolve().parents[2] / "data"
TOKEN_BYTES = 2
KNOWN_TOKENS = {"openwebtext": 9_040_000_000}  # README.md


@dataclass(frozen=True)
class Compute:
    """Of the whole run."""

    updates: int
    tokens: int
    evaluations: int
    flops: float
    """of training, evaluation and measurements of noise"""
    hours: float | None
    """None: not known"""
    gpu_hours: float | None


@dataclass(frozen=True)
class Disk:
    """Bytes. None: not known."""

    dataset: int | None
    dataset_source: str
    checkpoint: int
    checkpoints: int
    """how many there are at the same time"""

    @property
    def total(self) -> int:
        return (self.dataset or 0) + self.checkpoint * self.checkpoints


def compute(
    config: TrainConfig,
    model: GPT,
    machine: Machine,
    processes: int,
    dtype: str,
    utilisation: float,
    tokens_per_second: float | None,
) -> Compute:
    """Operations, and the time they take.

    Args:
        utilisation: share of the machine's peak that is reached.
        tokens_per_second: of one GPU in training, where it was measured; then `utilisation` does not count.
    """
    tokens = config.max_iters * config.total_batch_size * config.block_size
    evaluations = 1 + (config.max_iters // config.eval_interval if config.eval_interval else 0)
    evaluations += bool(config.max_iters and (not config.eval_interval or config.max_iters % config.eval_interval))
    training = passes_an_update(config) * model.flops_per_token() * tokens
    # A third: forward only.
    evaluating = model.flops_per_token() / 3 * validation_tokens(config.dataset) * evaluations
    measurements = config.max_iters // config.log_variance if config.log_variance else 0
    drawn = measurements * config.variance_batches * config.total_batch_size * config.block_size
    evaluating += model.flops_per_token() * drawn  # beside training too
    hours = None
    if tokens_per_second is not None:
        hours = tokens / (tokens_per_second * processes) / 3600
        hours *= 1 + (evaluating / training if training else 0)
    elif machine.peak_flops is not None and dtype != "float32":
        hours = (training + evaluating) / (machine.peak_flops * utilisation * processes) / 3600
    gpu_hours = None if hours is None else hours * processes
    return Compute(config.max_iters, tokens, evaluations, training + evaluating, hours, gpu_hours)


def disk(config: TrainConfig, weights: int, saved: int) -> Disk:
    """Room on disk.

    Args:
        saved: bytes of the optimizer's state in a checkpoint, of all processes together.
    """
    size, source = dataset_bytes(config.dataset)
    # The newest, the best, and the one that is being written before an old one is deleted.
    return Disk(size, source, weights + saved, config.keep_checkpoints + 2)


def dataset_bytes(name: str) -> tuple[int | None, str]:
    """Bytes of a data set's token files, and where that is from."""
    folder = _folder(name)
    if folder is not None:
        if tokens := sum(_split_tokens(folder, split) for split in ("train", "val")):
            return TOKEN_BYTES * tokens, "its meta.json"
        if sizes := [file.stat().st_size for file in folder.glob("*.bin")]:
            return sum(sizes), "its files"
    if name in KNOWN_TOKENS:
        return TOKEN_BYTES * KNOWN_TOKENS[name], "README.md; not prepared here"
    return None, "not prepared here"


def validation_tokens(name: str) -> int:
    """Tokens of the validation file; 0 where that is not known."""
    folder = _folder(name)
    if folder is None:
        return 0
    file = folder / "val.bin"
    return _split_tokens(folder, "val") or (file.stat().st_size // TOKEN_BYTES if file.is_file() else 0)


def _folder(name: str) -> Path | None:
    """As `open_dataset` finds it."""
    candidates = [Path(name)] if os.sep in name else [DATA / name, Path(name)]
    return next((folder for folder in candidates if folder.is_dir()), None)


def _split_tokens(folder: Path, split: str) -> int:
    try:
        tokens = json.loads((folder / "meta.json").read_text(encoding="utf-8"))["splits"][split]["tokens"]
        return tokens if isinstance(tokens, int) else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
