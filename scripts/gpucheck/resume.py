"""Is a run that was stopped and taken up again the same, to the last bit, as one that was not?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scripts.gpucheck.pair import write_data
from scripts.gpucheck.running import PartFailed, Work
from scripts.gpucheck.sizes import SIZES
from training.metrics import read_rows

CONFIG = "configs/gpt2_small_mars.py"
UPDATES, STOP = 6, 3
MODES = {
    "cuda": {"deterministic": "--deterministic=True", "free": "--deterministic=False"},
    "cpu": {"deterministic": "--deterministic=True"},  # there it makes no difference
}


def run_resume(work: Work) -> None:
    """6 updates, and 3 + 3, with the deterministic algorithms and without; these only have to run."""
    modes = MODES[work.device]
    write_data(work.folder / "data", work.device)
    at_once = [
        train(work, mode, name, updates)
        for mode in modes
        for name, updates in (("straight", UPDATES), ("resumed", STOP))
    ]
    work.python(*at_once)
    work.python(*(train(work, mode, "resumed", UPDATES) for mode in modes))
    for mode in modes:
        work.figures[mode] = compare(*(work.folder / f"{mode}-{name}" for name in ("straight", "resumed")))
    found = work.figures["deterministic"]
    if not found["equal"]:
        raise PartFailed(f"not the same bits with {modes['deterministic']}: {found}")


def train(work: Work, mode: str, name: str, updates: int) -> tuple[object, ...]:
    """The command of a run up to an update, from where it stands."""
    return (
        "train.py", CONFIG, f"--out_dir={work.folder / f'{mode}-{name}'}", "--resume=auto",
        MODES[work.device][mode],
        f"--dataset={work.folder / 'data'}", f"--device={work.device}", *SIZES[work.device].resume_model,
        "--batch_size=2", "--total_batch_size=4", f"--max_iters={updates}", f"--lr_decay_iters={UPDATES}",
        "--warmup_iters=1", "--log_interval=1", "--eval_interval=0", "--checkpoint_interval=0",
    )  # fmt: skip


def compare(straight: Path, resumed: Path) -> dict[str, Any]:
    """The largest differences of training losses and of weights, and whether all are equal to the last bit."""
    losses = [[row["train/loss"] for row in read_rows(run / "metrics.jsonl") if "train/loss" in row]
              for run in (straight, resumed)]  # fmt: skip
    weights = [torch.load(run / f"checkpoints/iter-{UPDATES:08}.pt", map_location="cpu")["model"]
               for run in (straight, resumed)]  # fmt: skip
    return {
        "equal": losses[0] == losses[1] and all(same_bits(weights[0][name], weights[1][name]) for name in weights[0]),
        "updates": [len(series) for series in losses],
        "losses": losses,
        "largest_difference_of_losses": max(abs(one - other) for one, other in zip(*losses, strict=True)),
        "largest_difference_of_weights": max(
            (weights[0][name] - weights[1][name]).abs().max().item() for name in weights[0]
        ),
    }


def same_bits(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.int32), other.contiguous().view(torch.int32))
