"""Whether a run was made by a published recipe, and on the published data.

The recipes are this repository's own configs, `configs/gpt2_*.py`, and `configs/gpt2_*_official.py` for runs that match
the published code rather than the paper: none of their values is written here again.
"""

from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

from configs import TrainConfig, load_config
from scripts.comparison.groups import setting_values
from scripts.comparison.runs import Run, printable
from scripts.comparison.wording import exact, rate

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
TOKENIZER = "gpt2"  # of every published run
ENDINGS = {"mars-adamw": "mars", "mars-adamw-exact": "mars_exact", "mars-lion": "mars_lion"}
# What no recipe fixes: the number format depends on the machine, and a run without faults has no bad updates. Sizes are
# told by the number of parameters and of tokens an update.
FREE_KEYS = {"optimizer", "dtype", "max_bad_updates", "total_batch_size"}
# What other optimizers do not read.
KEYS_OF = {
    "mars": ("gamma", "exact", "mars_", "estimator", "reference_interval", "snapshot_"),
    "shampoo": ("shampoo_",),
}
CALLED = {"parameters": "parameters", "tokens_per_update": "tokens an update"}
CALLED |= {"max_iters": "planned updates", "learning_rate": "learning rate"}


@cache
def configs(size: str, optimizer: str) -> tuple[TrainConfig, ...]:
    """The published recipe and, where there is one, that of the published code; empty where nothing is published."""
    stem = f"{size.replace('-', '_')}_{ENDINGS.get(optimizer, optimizer)}"
    paths = [CONFIGS / f"{stem}.py", CONFIGS / f"{stem}_official.py"]
    return tuple(load_config(path) for path in paths if path.is_file())


def departures(run: Run, size: str, optimizer: str, parameters: int) -> list[str]:
    """Each setting that differs from the nearest recipe, with the recipe's value in brackets. What a config lacks is
    unknown and not counted.
    """
    found = [_departures(run, config, parameters) for config in configs(size, optimizer)]
    return min(found, key=len, default=[])


def _departures(run: Run, config: TrainConfig, parameters: int) -> list[str]:
    sizes = {"parameters": parameters, "tokens_per_update": config.total_batch_size * config.block_size}
    ours, theirs = setting_values(run.config), setting_values(asdict(config) | sizes)
    keys = dict.fromkeys((*CALLED, *theirs))  # the most telling ones first
    return [
        f"{CALLED.get(key, key)} {_text(ours[key])} ({_text(theirs[key])})"
        for key in keys
        if _said(run.config, key, asdict(config)) and _counts(key, config.optimizer) and ours[key] != theirs[key]
    ]


def _said(config: dict[str, Any], key: str, theirs: dict[str, Any]) -> bool:
    """Whether a key has a value of its own in one of the two: None is another key's value, told there."""
    return key in config and not (config[key] is None and theirs.get(key) is None)


def _counts(key: str, optimizer: str) -> bool:
    if key in FREE_KEYS:
        return False
    return not any(key.startswith(keys) and family not in optimizer for family, keys in KEYS_OF.items())


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return printable(str(value))
    return rate(value) if isinstance(value, float) else f"{value:,}"


def other_data(run: Run, size: str, val_tokens: int | None) -> str | None:
    """How the run's data differ from those of the published size, or None where they are the same.

    Args:
        run: whose data are asked for.
        size: the published size.
        val_tokens: in its validation data; None where that is not known: then the name has to do.
    """
    reasons = []
    if (tokenizer := run.data.get("tokenizer")) and tokenizer != TOKENIZER:
        reasons.append(f"tokenizer {tokenizer} ({TOKENIZER})")
    ours, (config, *_) = run.number_of_tokens("val"), configs(size, "adamw")
    if val_tokens is not None and ours != val_tokens:
        reasons.append(f"{exact(ours)} validation tokens ({exact(val_tokens)})")
    if val_tokens is None and run.dataset != config.dataset:
        reasons.append(f"data set {run.dataset or 'unknown'} ({config.dataset})")
    return "other data: " + ", ".join(reasons) if reasons else None
