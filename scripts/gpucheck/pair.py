"""GPT-2 small with AdamW and with MARS-AdamW on the same random tokens: speed, memory, losses."""

from __future__ import annotations

import math
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import torch

from configs import load_config
from scripts.gpucheck.running import ROOT, PartFailed, Work
from scripts.gpucheck.sizes import SIZES, micro_batch
from scripts.planning.machines import MACHINES
from scripts.planning.memory import MemoryPlanner
from training.folder import read_json
from training.metrics import read_rows

MEASURED_TRAIN = "scripts/gpucheck/measured_train.py"
CONFIGS = {"adamw": "configs/gpt2_small_adamw.py", "mars-adamw": "configs/gpt2_small_mars.py"}
GPT2_TOKENS = 50257
WARM_START = 0.6  # of a run's time beside its updates, relative to that of the first one, which had nothing compiled
FASTER_THAN_MEASURED = 0.9  # of the time that is left, so much is planned for
FEWEST = 10  # updates of which a speed can be said


def write_data(folder: Path, device: str) -> float:
    """A data set of independent tokens whose frequencies fall as those of words do (Zipf). Returns the entropy of a
    token in nats: the loss that cannot be beaten but by learning the file by heart."""
    sizes, chance = SIZES[device], np.random.default_rng(0)
    shares = 1 / np.arange(3, GPT2_TOKENS + 3)
    shares /= shares.sum()
    steps, ids = np.cumsum(shares), chance.permutation(GPT2_TOKENS).astype("<u2")
    folder.mkdir()
    for name, count in (("train", sizes.train_tokens), ("val", sizes.val_tokens)):
        ranks = np.searchsorted(steps, chance.random(count, dtype=np.float32)).clip(max=GPT2_TOKENS - 1)
        ids[ranks].tofile(folder / f"{name}.bin")
    return float(-(shares * np.log(shares)).sum())


def run_pair(work: Work) -> None:
    """AdamW for a few updates, to see how fast the GPU is; then both for as many as there is time for."""
    sizes, figures = SIZES[work.device], work.figures
    figures["entropy"] = write_data(work.folder / "data", work.device)
    memory = torch.cuda.get_device_properties(0).total_memory if work.device == "cuda" else None
    batch = micro_batch(work.device, memory)
    trial = sizes.trial_updates
    figures["trial"] = first = train(work, "adamw", "trial", batch, batch, trial)
    sequences, updates = choose_length(work, first, batch)
    figures |= {"batch_size": batch, "total_batch_size": sequences, "updates": updates}
    for optimizer in CONFIGS:
        figures[optimizer] = train(work, optimizer, optimizer, batch, sequences, updates)
    adamw, mars = (figures[optimizer] for optimizer in CONFIGS)
    figures["mars_time_to_adamw_time"] = adamw["tokens_per_second"] / mars["tokens_per_second"]
    for run in (adamw, mars):
        before, after = run["val_loss"]
        if not (math.isfinite(after) and after < before):
            raise PartFailed(f"the validation loss went from {before} to {after}")
    if updates < sizes.updates:
        figures["note"] = f"time for {updates} updates only, not {sizes.updates}"


def train(work: Work, optimizer: str, name: str, batch: int, sequences: int, updates: int) -> dict[str, Any]:
    """A run of train.py, and its figures."""
    out, figures_file = work.folder / name, work.folder / f"{name}.json"
    settings = [
        f"--dataset={work.folder / 'data'}",
        f"--device={work.device}",
        *SIZES[work.device].model,
        f"--batch_size={batch}",
        f"--total_batch_size={sequences}",
        f"--max_iters={updates}",
        f"--warmup_iters={max(1, updates // 10)}",
        f"--log_interval={max(1, updates // 20)}",
        "--eval_interval=0",
        "--checkpoint_interval=0",
    ]
    work.python((MEASURED_TRAIN, figures_file, CONFIGS[optimizer], f"--out_dir={out}", *settings))
    figures = run_figures(read_rows(out / "metrics.jsonl")) | read_json(figures_file)
    figures["planned"] = planned_memory(optimizer, settings, work.device)
    measured = figures["peak_allocated"]
    return figures | {"planned_to_measured": figures["planned"] / measured if measured else None}


def run_figures(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Of a run's metrics. Speeds are medians without the first quarter of the rows, in which all is compiled."""
    train_rows, val_rows = ([row for row in rows if key in row] for key in ("train/loss", "val/loss"))
    steady = train_rows[1 + len(train_rows) // 4 :]
    return {
        "tokens_per_second": statistics.median(row["tokens_per_sec"] for row in steady),
        "mfu": statistics.median(row["mfu"] for row in steady) if "mfu" in steady[0] else None,
        "seconds_to_update_1": train_rows[0]["time"],
        "seconds_of_updates": train_rows[-1]["time"],
        "train_loss": [train_rows[0]["train/loss"], train_rows[-1]["train/loss"]],
        "val_loss": [val_rows[0]["val/loss"], val_rows[-1]["val/loss"]],
    }


def choose_length(work: Work, trial: dict[str, Any], batch: int) -> tuple[int, int]:
    """Sequences of an update, and updates, so that two runs end in the part's time."""
    sizes, rate = SIZES[work.device], trial["tokens_per_second"]
    trial_tokens = sizes.trial_updates * batch * sizes.block_size
    beside = WARM_START * max(0.0, trial["seconds"] - trial_tokens / rate)
    tokens = max(0.0, FASTER_THAN_MEASURED * work.seconds_left / len(CONFIGS) - beside) * rate
    sequences = int(tokens / (sizes.updates * sizes.block_size))
    if sequences >= batch:
        return min(sequences, sizes.most_sequences) // batch * batch, sizes.updates
    updates = int(tokens / (batch * sizes.block_size))
    if updates < FEWEST:
        raise PartFailed(f"no time for {FEWEST} updates of {batch} sequences; the trial took {trial['seconds']:.0f} s")
    return batch, updates


# --- what scripts/plan.py says beforehand ---


def planned_memory(optimizer: str, settings: list[str], device: str) -> int:
    """Bytes of tensors at the highest moment, without what is taken before the first of them."""
    config, machine = load_config(ROOT / CONFIGS[optimizer], settings), MACHINES[gpu_key(device)]
    planner = MemoryPlanner(config, machine, 1)
    return planner.memory(config.batch_size, planner.optimizer(config, False)).total - machine.overhead


def gpu_key(device: str) -> str:
    """A machine of scripts/plan.py of this one's kind: which GPU it is makes no difference to the memory."""
    return "cpu" if device == "cpu" else "h100"
