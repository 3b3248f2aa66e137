"""What a run that goes on must have in common with what it was, and what may be new."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from configs import TrainConfig
from optim.kinds import METHOD_KEYS
from training import RunError
from training.checkpoint import CheckpointFolder
from training.folder import read_json
from training.processes import Processes

# A run goes on only with the model, the batches and the kind of optimizer state that it began with. The data set may
# have moved: its content counts (see `data.tokens.Dataset.fingerprint`).
FIXED_KEYS = (
    *("n_layer", "n_head", "n_embd", "block_size", "vocab_size", "dropout", "bias", "scale_attn_by_inverse_layer_idx"),
    *("init_from", "total_batch_size", "seed", "optimizer", "estimator", "exact", "embedding_adamw"),
    "mars_last_grad",
    *METHOD_KEYS,
)
UNLISTED_KEYS = ("out_dir", "resume")  # say nothing of the run
# These may change without changing what the run computes, but for rounding. max_iters does if it sets the decay.
NEUTRAL_KEYS = (
    *("max_iters", "lr_decay_iters", "eval_interval", "log_interval", "checkpoint_interval", "keep_checkpoints"),
    *("log_variance", "variance_batches"),
    *("max_bad_updates", "stop_seconds", "batch_size", "shard_optimizer", "device", "compile", "compile_optimizer"),
    *("deterministic", "wandb_log", "wandb_project", "wandb_run_name", "wandb_group", "wandb_job_type", "wandb_tags"),
    *("wandb_x_axis", *UNLISTED_KEYS),
)


@dataclass(frozen=True)
class Resume:
    """What a run goes on from."""

    saved: dict[str, Any] | None
    """the checkpoint; None where there is none yet"""
    changed: list[str]
    """a line for each setting whose value is another one from here on"""
    other_course: bool
    """whether updates come out differently than with the settings until now"""


def load_for_resume(
    checkpoints: CheckpointFolder, config: TrainConfig, fingerprint: str, processes: Processes
) -> Resume:
    """The newest checkpoint, if the run may go on from it with this config and data.

    Raises:
        RunError: no checkpoint can be read; the model, the order of the data or the optimizer's state would change;
            the hosts see different checkpoints.
    """
    folder = Path(config.out_dir).absolute()
    try:
        saved = checkpoints.load_newest()
    except RunError as error:
        raise RunError(f"{error}; choose another --out_dir") from None
    done = saved["iter"] if saved else 0
    if processes.sum([float(done)]) != [float(done * processes.size)]:
        raise RunError(f"{folder} holds other checkpoints on other hosts; all hosts must share the folder")
    if saved is not None:
        before, data = saved["config"], saved["data"]
    else:  # a start, or killed before the first checkpoint: config.json has what its rows were computed with
        before = read_json(folder / "config.json")
        data = before["data"].get("fingerprint") if isinstance(before.get("data"), dict) else None
    _check(before, data, config, fingerprint, folder)
    changed = _changed_settings(before, config)
    lines = [f"changed     {key}: {old} until now, {new} from here on" for key, (old, new) in changed.items()]
    return Resume(saved, lines, _is_other_course(before, config, set(changed)))


def _check(saved: dict[str, Any], data: str | None, config: TrainConfig, fingerprint: str, folder: Path) -> None:
    for key in FIXED_KEYS:
        if key in saved and _written(saved[key]) != _written(getattr(config, key)):
            raise RunError(
                f"{folder} was trained with {key}={saved[key]!r}, now it is {getattr(config, key)!r}; "
                f"set --{key}={saved[key]}, or choose another --out_dir"
            )
    if data is not None and data != fingerprint:
        raise RunError(
            f"{folder} was trained on dataset={saved.get('dataset')!r} as it was then; dataset={config.dataset!r} "
            "now holds other tokens; give --dataset= the same ones, or choose another --out_dir"
        )


def _changed_settings(saved: dict[str, Any], config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The settings that had another value: that value, and the present one."""
    now = asdict(config)
    return {
        key: (saved[key], now[key])
        for key in now
        if key in saved and key not in UNLISTED_KEYS and _written(saved[key]) != _written(now[key])
    }


def _written(value: Any) -> str:
    """As in config.json, which makes lists of tuples."""
    return json.dumps(value)


def _is_other_course(saved: dict[str, Any], config: TrainConfig, changed: set[str]) -> bool:
    if changed - set(NEUTRAL_KEYS):
        return True
    over_updates = isinstance(config.gamma, str) and not config.gamma.startswith("adaptive")
    if over_updates and "max_iters" in changed:  # a schedule over max_iters
        return True
    decay = saved.get("lr_decay_iters") or saved.get("max_iters")
    return bool(changed) and decay != config.decay_iters
