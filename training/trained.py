"""A trained model, read back from its run."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from model import GPT, GPTConfig
from training import RunError
from training.checkpoint import CheckpointFolder, check_finite, read_checkpoint
from training.folder import read_json

BYTES, GPT2 = "bytes", "gpt2"
TOKENS = {BYTES: 257, GPT2: 50257}  # ids that a tokenizer knows; a model's rows above them are padding


@dataclass(frozen=True)
class TrainedModel:
    """A model in evaluation mode, and where it is from."""

    model: GPT
    settings: dict[str, Any]
    """the config of the run that trained it, as its checkpoint has it"""
    update: int
    """updates that made it"""
    path: Path
    """the checkpoint"""
    tokenizer: str | None
    """bytes or gpt2; None where neither the run nor the vocabulary tells"""

    @property
    def tokens(self) -> int:
        """Ids that stand for text: [0, tokens). Those above are padding of the vocabulary."""
        return min(TOKENS.get(self.tokenizer or "", self.model.config.vocab_size), self.model.config.vocab_size)


def load_trained(run: Path, which: str = "last", device: torch.device | str = "cpu") -> TrainedModel:
    """Reads the model of a run.

    Args:
        run: a run's folder, or one checkpoint of it (a .pt file).
        which: of a folder's checkpoints: last, best, or the number of updates.
        device: where the model is to be.

    Raises:
        RunError: no run there, no such checkpoint, none that can be read, or weights that are not finite.
    """
    if run.suffix == ".pt":
        path = run.resolve()
        folder = path.parent.parent
        checkpoint = read_checkpoint(path)
    else:
        folder = run.absolute()
        path, checkpoint = _choose(folder, which)
    try:
        check_finite(checkpoint["model"])
    except RunError as error:
        raise RunError(f"{path}: {error}; the run has diverged") from None
    settings = checkpoint["config"]
    sizes = {field.name: settings[field.name] for field in fields(GPTConfig) if field.name in settings}
    model = GPT(GPTConfig(**sizes))
    try:
        model.load_state_dict(checkpoint["model"])
    except RuntimeError:
        raise RunError(f"{path}: its weights do not have the sizes of its config") from None
    model.to(device).eval()
    return TrainedModel(model, settings, checkpoint["iter"], path, _tokenizer(folder, model.config.vocab_size))


def _choose(folder: Path, which: str) -> tuple[Path, dict[str, Any]]:
    if not (folder / "checkpoints").is_dir():
        raise RunError(f"{folder} holds no run: no folder checkpoints/ in it")
    checkpoints = CheckpointFolder(folder / "checkpoints", keep=1)
    if which in ("last", "best"):
        newest = checkpoints.load_newest()
        if newest is None:
            raise RunError(f"{folder}: no checkpoint yet; checkpoint_interval says when the run saves")
        update = newest["iter" if which == "last" else "best_iter"]
        path = checkpoints.file(update)
        return path, newest if update == newest["iter"] else read_checkpoint(path)
    if not re.fullmatch(r"\d{1,12}", which):
        raise RunError(f"checkpoint {which!r}: expected last, best or a number of updates")
    path = checkpoints.file(int(which))
    if not path.exists():
        there = ", ".join(str(int(file.stem.removeprefix("iter-"))) for file in checkpoints.files()) or "none"
        raise RunError(f"{path} is missing; checkpoints there: {there}")
    return path, read_checkpoint(path)


def _tokenizer(folder: Path, vocab_size: int) -> str | None:
    """What the run's data set recorded; else GPT-2's for a vocabulary that is its own, as of nanoGPT's data."""
    data = read_json(folder / "config.json").get("data")
    recorded = data.get("tokenizer") if isinstance(data, dict) else None
    if recorded in TOKENS:
        return str(recorded)
    return GPT2 if recorded is None and TOKENS[GPT2] <= vocab_size < TOKENS[GPT2] + 128 else None
