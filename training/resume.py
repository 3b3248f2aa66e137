"""What a run that goes on must have in common with what it was, and what may be new."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from configs import TrainConfig
from training import RunError
from training.checkpoint import CheckpointFolder
from training.folder import read_json
from training.processes import Processes

# A run goes on only with the model, the batches and the kind of optimizer state that it began with. The data set may
# have moved: its content counts (see `data.tokens.Dataset.fingerprint`).
FIXED_KEYS = (
    *("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "bias", "scale_attn_by_inverse_layer_idx"),
    *("total_batch_size", "seed", "optimizer", "exact", "embedding_adamw", "mars_last_grad"),
)
UNLISTED_KEYS = ("out_dir", "resume")  # say nothing of the run


def load_for_resume(
    checkpoints: CheckpointFolder, config: TrainConfig, fingerprint: str, processes: Processes
) -> dict[str, Any] | None:
    """The newest checkpoint, if the run may go on from it with this config and data. None where there is none yet.

    Raises:
        RunError: no checkpoint can be read; the model, the order of the data or the optimizer's state would change;
            the hosts see different checkpoints.
    """
    folder = Path(config.out_dir).absolute()
    saved = checkpoints.load_newest()
    done = saved["iter"] if saved else 0
    if processes.sum([float(done)]) != [float(done * processes.size)]:
        raise RunError(f"{folder} holds other checkpoints on other hosts; all hosts must share the folder")
    if saved is not None:
        _check(saved["config"], saved["data"], config, fingerprint, folder)
    elif record := read_json(folder / "config.json"):
        # Killed before its first checkpoint; what it wrote in metrics.jsonl must come again.
        data = record.get("data")
        _check(record, data.get("fingerprint") if isinstance(data, dict) else None, config, fingerprint, folder)
    return saved


def _check(saved: dict[str, Any], data: str | None, config: TrainConfig, fingerprint: str, folder: Path) -> None:
    for key in FIXED_KEYS:
        if key in saved and saved[key] != getattr(config, key):
            raise RunError(
                f"{folder} was trained with {key}={saved[key]!r}, now it is {getattr(config, key)!r}; "
                f"set --{key}={saved[key]}, or choose another --out_dir"
            )
    if data is not None and data != fingerprint:
        raise RunError(
            f"{folder} was trained on dataset={saved.get('dataset')!r} as it was then; dataset={config.dataset!r} "
            "now holds other tokens; give --dataset= the same ones, or choose another --out_dir"
        )


def changed_settings(saved: dict[str, Any], config: TrainConfig) -> list[str]:
    """A line for each key whose value is another one from here on."""
    now = asdict(config)
    return [
        f"changed     {key}: {saved[key]} until now, {now[key]} from here on"
        for key in now
        if key in saved and key not in UNLISTED_KEYS and saved[key] != now[key]
    ]
