"""What a run writes about itself: its folder, `config.json`, and the lines at its start."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from configs import TrainConfig
from training import RunError, __version__
from training.device import device_name
from training.metrics import format_count
from training.processes import Processes

ROOT = Path(__file__).resolve().parents[1]

# A run goes on only with the model, the batches and the kind of optimizer state that it began with.
FIXED_KEYS = (
    *("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "bias", "scale_attn_by_inverse_layer_idx"),
    *("dataset", "total_batch_size", "seed", "optimizer", "exact", "embedding_adamw", "mars_last_grad"),
)


def check_folder(config: TrainConfig) -> None:
    """Refuses to mix a new run into the folder of another.

    Raises:
        RunError: the folder holds a run and `resume` is not auto, or it cannot be written.
    """
    folder = Path(config.out_dir).absolute()
    checkpoints = folder / "checkpoints"
    if config.resume != "auto" and any((folder / name).exists() for name in ("metrics.jsonl", "config.json")):
        raise RunError(f"{folder} holds a run already; --resume=auto continues it, or choose another --out_dir")
    try:
        checkpoints.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RunError(f"{checkpoints}: cannot be made: {error.strerror}; choose another --out_dir") from None
    for place in (folder, checkpoints):
        if not os.access(place, os.W_OK | os.X_OK):
            raise RunError(f"{place}: no permission to write there; choose another --out_dir")


def check_resume(saved: dict[str, Any], config: TrainConfig, folder: Path) -> None:
    """Holds the config that a run had against the present one.

    Raises:
        RunError: the model, the order of the data or the optimizer's state would change.
    """
    changed = [key for key in FIXED_KEYS if key in saved and saved[key] != getattr(config, key)]
    if changed:
        key = changed[0]
        raise RunError(
            f"{folder.absolute()} was trained with {key}={saved[key]!r}, now it is {getattr(config, key)!r}; "
            f"set --{key}={saved[key]}, or choose another --out_dir"
        )


def changed_settings(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """A line for each key whose value is another one from here on; `out_dir` and `resume` say nothing of the run."""
    now = asdict(config)
    return [
        f"changed     {key}: {saved[key]} until now, {now[key]} from here on"
        for key in now
        if key in saved and key not in ("out_dir", "resume") and saved[key] != now[key]
    ]


def config_of_run(folder: Path) -> dict[str, Any]:
    """What `config.json` says; nothing where it is missing or damaged."""
    try:
        record = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}


def write_config(config: TrainConfig, processes: Processes, parameters: int, data: dict[str, Any]) -> dict[str, Any]:
    """Writes `config.json`: every key of the config as used, and what the run ran on. Returns what it wrote."""
    record = {
        **asdict(config),
        "parameters": parameters,
        "processes": processes.size,
        "gradient_accumulation_steps": config.accumulation_steps(processes.size),
        "tokens_per_update": config.total_batch_size * config.block_size,
        "data": data,
        "command": " ".join(sys.argv),
        "code_version": _code_version(),
        "project_version": __version__,
        "torch_version": torch.__version__,
        "python_version": platform.python_version(),
        "device_name": device_name(processes.device),
        "host": platform.node(),
    }
    path = Path(config.out_dir) / "config.json"
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    temporary.replace(path)
    return record


def start_lines(config: TrainConfig, processes: Processes, record: dict[str, Any], groups: list[str]) -> list[str]:
    """What a run says of itself before it starts."""
    tokens, data = record["tokens_per_update"], record["data"]
    steps, count = record["gradient_accumulation_steps"], f"{processes.size} process{'es' * (processes.size > 1)}"
    bytes_ = f", tokens: {data['tokenizer']}" if data["tokenizer"] else ""
    lines = [
        f"run         {Path(config.out_dir).absolute()}",
        f"model       {record['parameters']:,} parameters: {config.n_layer} layers, {config.n_head} heads, "
        f"width {config.n_embd}, vocabulary {config.vocab_size}",
        f"data        {data['path']}: {format_count(data['train_tokens'])} tokens to train on, "
        f"{format_count(data['val_tokens'])} to validate{bytes_}",
        f"update      {tokens:,} tokens = {config.total_batch_size} sequences x {config.block_size} tokens, "
        f"as {config.batch_size} sequences x {steps} micro-batches x {count}",
        f"length      {config.max_iters:,} updates, {format_count(config.max_iters * tokens)} tokens, "
        f"{config.max_iters * tokens / data['train_tokens']:.2f} times the data",
        f"device      {record['device_name']} ({processes.device}), computing in {config.dtype}, "
        f"{'compiled' if config.compile else 'not compiled'}, torch {record['torch_version']}",
        f"optimizer   {config.optimizer}, warm-up {config.warmup_iters}, minimum lr {config.min_lr:g} "
        f"at update {config.decay_iters:,}",
        *(f"            {group}" for group in groups),
    ]
    if config.decay_iters != config.max_iters:
        lines.append(
            f"note        lr_decay_iters={config.decay_iters} differs from max_iters={config.max_iters}: the learning "
            f"rate {'is still above' if config.decay_iters > config.max_iters else 'stays at'} its minimum at the end"
        )
    if config.warmup_iters >= config.max_iters > 0:
        lines.append(f"note        the run ends within its warm-up of {config.warmup_iters} updates")
    return lines


def _code_version() -> str | None:
    """The git commit of the code, with `-dirty` where it was changed since; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
