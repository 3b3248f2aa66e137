"""What a run writes about itself at its start: `config.json`, `starts.jsonl`, and lines on the console."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from configs import TrainConfig
from training import __version__
from training.console import say
from training.device import device_name
from training.folder import write_json
from training.metrics import format_count
from training.processes import Processes

ROOT = Path(__file__).resolve().parents[1]


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
    write_json(Path(config.out_dir) / "config.json", record)
    return record


def announce(
    config: TrainConfig,
    processes: Processes,
    update: int,
    changed: list[str],
    *,
    parameters: int,
    data: dict[str, Any],
    groups: list[str],
) -> dict[str, Any]:
    """Writes `config.json`, a line of `starts.jsonl` (`config.json` has the settings of the last start only), and the
    lines that a run prints at its start.

    Args:
        update: updates done before.
        changed: a line for each setting that is new.
        parameters: of the model.
        data: what `Dataset.describe` says.
        groups: a line for each group of the optimizer.

    Returns:
        what `config.json` has.
    """
    record = write_config(config, processes, parameters, data)
    keys = ("command", "code_version", "torch_version", "host", "device_name", "processes")
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    line = {"iter": update, "time": now, **{key: record[key] for key in keys}, "changed": changed}
    with (Path(config.out_dir) / "starts.jsonl").open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")
    lines = start_lines(config, processes, record, groups)
    start = [f"going on after update {update}"] if update > 0 else []
    say("\n".join([*lines, *start, *changed]))
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
    lines.append(f"resume      {_exactness(config, processes)}")
    if config.decay_iters != config.max_iters:
        lines.append(
            f"note        lr_decay_iters={config.decay_iters} differs from max_iters={config.max_iters}: the learning "
            f"rate {'is still above' if config.decay_iters > config.max_iters else 'stays at'} its minimum at the end"
        )
    if config.warmup_iters >= config.max_iters > 0:
        lines.append(f"note        the run ends within its warm-up of {config.warmup_iters} updates")
    return lines


def _exactness(config: TrainConfig, processes: Processes) -> str:
    """What a resume can promise."""
    if processes.device.type == "cpu":
        return "exact to the last bit, with the same processes, micro-batch and machine"
    if config.deterministic and processes.device.type == "cuda":
        return (
            "exact to the last bit as far as torch can be deterministic, with the same processes, micro-batch and "
            "machine; slower, most of all the backward pass of attention"
        )
    return "exact in data and state, not in the last bits; --deterministic=True asks torch for those too, and is slower"


def _code_version() -> str | None:
    """The git commit of the code, with `-dirty` where it was changed since; None outside a repository."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
