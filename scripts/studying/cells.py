"""A cell of a study: one run of train.py, where it lies and how it stands."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from configs import ConfigError, TrainConfig, load_config
from scripts.comparison.analysis import final_loss
from scripts.comparison.runs import Run, RunError, read_run
from scripts.comparison.wording import rate
from scripts.studying.declaration import Study
from training.folder import read_json, read_status

ROOT = Path(__file__).resolve().parents[2]
# Keys that may differ from what the study says without a result being another one.
FREE_KEYS = frozenset(
    ("out_dir", "resume", "device", "stop_seconds", "checkpoint_interval", "keep_checkpoints", "wandb_log")
)
DEFAULTS = json.loads(json.dumps({each.name: each.default for each in fields(TrainConfig)}))
DIVERGED = "loss or gradient norm was not finite"  # how the error of such a run begins


@dataclass(frozen=True)
class Cell:
    """One run: an arm at a size with a learning rate and a seed."""

    study: Study = field(compare=False, repr=False)
    size: str | None  # None: the first size
    arm: str
    learning_rate: float
    seed: int

    @property
    def name(self) -> str:
        """Of its folder."""
        size = f"{self.size}-" if self.size is not None else ""
        return f"{size}{self.arm}-lr{rate(self.learning_rate)}-seed{self.seed}"

    @property
    def config_path(self) -> Path:
        return self.study.path.parent / self.study.arms[self.arm].config

    @property
    def settings(self) -> dict[str, Any]:
        """Keys of TrainConfig on top of the arm's config: the study's, the size's, the arm's, in this order."""
        study, arm = self.study, self.study.arms[self.arm]
        size = study.sizes[self.size].settings if self.size is not None else {}
        scaled = {key: factor * self.learning_rate for key, factor in (study.scaled | arm.scaled).items()}
        own = {"learning_rate": self.learning_rate, "seed": self.seed}
        return scaled | study.settings | size | arm.settings | own

    @property
    def arguments(self) -> list[str]:
        """The settings as train.py takes them."""
        return [f"--{key}={_as_text(value)}" for key, value in self.settings.items()]

    @cached_property
    def config(self) -> TrainConfig:
        """What train.py will read.

        Raises:
            ConfigError: it would refuse that.
        """
        try:
            return load_config(self.config_path, self.arguments)
        except ConfigError as error:
            raise ConfigError(f"{self.study.path}: {self.name}: {error}") from None

    def command(self, folder: Path, device: str) -> list[str]:
        """The arguments of Python, to be given in the repository's root."""
        path = self.config_path.resolve()
        path = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        return ["train.py", str(path), *self.arguments, f"--device={device}", f"--out_dir={folder}", "--resume=auto"]


@dataclass(frozen=True)
class State:
    """How a cell's folder stands.

    `kind` is "new" (nothing there), "begun", "finished", "diverged" (it ended because losses were not finite, which is
    a result), or "other" (the folder holds a run of other settings, which `problem` names).
    """

    kind: str
    run: Run | None = None
    loss: float | None = None
    """validation loss at the end in nats per token; infinite where it diverged; None as long as it is not done"""
    problem: str | None = None

    @property
    def done(self) -> bool:
        return self.loss is not None


def state_of(cell: Cell, folder: Path) -> State:
    """Reads a cell's folder."""
    recorded = read_json(folder / "config.json")
    if not recorded:
        return State("new")
    if problem := difference_of(cell.config, recorded):
        where = folder.absolute()
        return State("other", problem=f"{where} holds a run with {problem}; move it away, or rename the arm")
    try:
        run = read_run(folder)
    except RunError:
        return State("begun")
    status = read_status(folder)
    if status.get("state") == "finished" and run.finished:
        loss = final_loss(run.evals)
        if loss is not None:
            return State("finished", run, loss if np.isfinite(loss) else np.inf)
    if status.get("state") == "failed" and str(status.get("reason")).startswith(DIVERGED):
        return State("diverged", run, np.inf)
    return State("begun", run)


def difference_of(config: TrainConfig, recorded: dict[str, Any]) -> str | None:
    """The first setting in which a run differs from what its cell says; None where all are equal. Where the cell says
    auto, the run has what that came to; what a thinned config.json lacks has the default."""
    for key, value in json.loads(json.dumps(asdict(config))).items():
        if key in FREE_KEYS or key.startswith("wandb_") or value == "auto":
            continue
        found = recorded.get(key, DEFAULTS[key])
        if found != value:
            return f"{key}={found}, where the study says {value}"
    return None


def _as_text(value: Any) -> str:
    return ",".join(map(str, value)) if isinstance(value, tuple | list) else str(value)
