"""Runs that differ in nothing but their seed belong together: what is compared are groups, of one run or of several.

Several seeds of one setting give a mean and a spread, and two settings with the same seeds a paired difference: in this
repository a seed fixes the initial weights and the batches of every update, whatever the optimizer.
"""

from collections.abc import Hashable, Mapping
from dataclasses import MISSING, dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np

from configs import TrainConfig
from scripts.comparison import analysis
from scripts.comparison.curves import DIVERGED, Curve, Floats, loss_at, mean_curve
from scripts.comparison.runs import Run
from scripts.comparison.statistics import Difference, Spread, paired_difference, spread

# Keys of a config that change nothing, or only rounding, in what is computed. All others distinguish settings, those
# of the future too: a key that is wrongly counted keeps runs apart, one that is wrongly ignored averages what differs.
NEUTRAL_KEYS = frozenset(
    (
        *("seed", "dataset", "out_dir", "resume", "device", "compile", "deterministic"),  # data: by its tokens, below
        *("batch_size", "shard_optimizer", "compile_optimizer"),
        *("eval_interval", "log_interval", "checkpoint_interval", "keep_checkpoints", "stop_seconds"),
        *(field.name for field in fields(TrainConfig) if field.name.startswith("wandb_")),
    )
)
DEFAULTS = {
    field.name: None if field.default is MISSING else field.default
    for field in fields(TrainConfig)
    if field.name not in NEUTRAL_KEYS
}
SETTING_KEYS = (*DEFAULTS, "parameters", "tokens_per_update")
# Without a value these are what another key says, so both ways of writing it are one setting.
SAME_AS = {"lr_decay_iters": "max_iters", "weight_decay_embedding": "weight_decay", "lr_1d": "learning_rate"}


FURTHER_PART = 0.5  # of the furthest seed's tokens: a seed that has fewer is not averaged with it


@dataclass(frozen=True)
class Group:
    """One or several runs of one setting, each with another seed. A curve or a number of it is the mean of theirs.

    `apart` says why a run is not in the mean of its setting's other seeds; None where it has no others, or is in it.
    """

    runs: tuple[Run, ...]
    apart: str | None = None

    @property
    def first(self) -> Run:
        return self.runs[0]

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get("seed") for run in self.runs]

    @property
    def finished(self) -> bool:
        return all(run.finished for run in self.runs)

    @property
    def evaluated(self) -> bool:
        """Whether all were evaluated at one place after training began."""
        return bool(np.any(self.evals.updates > 0))

    @property
    def evals(self) -> Curve:
        return self._evals[0]

    @property
    def band(self) -> tuple[Floats, Floats]:
        """The lowest and the highest loss of a run at each of the evaluations."""
        losses = self._evals[1]
        return losses.min(axis=0), losses.max(axis=0)

    @cached_property
    def _evals(self) -> tuple[Curve, Floats]:
        return mean_curve([run.evals for run in self.runs])

    @cached_property
    def train(self) -> Curve:
        return self.first.train if len(self.runs) == 1 else mean_curve([run.train for run in self.runs])[0]

    @property
    def updates(self) -> float:
        return min(run.updates for run in self.runs)

    @property
    def tokens(self) -> float:
        return min(run.tokens for run in self.runs)

    @property
    def time(self) -> float:
        return float(np.mean([run.time for run in self.runs]))

    @property
    def final(self) -> Spread | None:
        """Of the last evaluation that all have."""
        return spread([float(loss) for loss in self._evals[1][:, -1]]) if len(self.evals) else None

    @property
    def best(self) -> Spread | None:
        """Of each run's lowest among the evaluations that all have: others would be of other stretches of training."""
        losses = [row[np.isfinite(row)] for row in self._evals[1]]
        return spread([float(row.min()) if len(row) else None for row in losses])

    def loss_at(self, tokens: float) -> Spread | None:
        return spread([loss_at(run.evals, tokens) for run in self.runs])

    @property
    def throughput(self) -> float | None:
        """Tokens a second: the mean of the runs' medians."""
        speed = spread([analysis.throughput(run.tokens_per_sec) for run in self.runs])
        return speed.mean if speed else None


def make_groups(runs: list[Run]) -> list[Group]:
    """The runs by setting, in order of their first ones.

    Alone stays what would spoil the mean of its setting's seeds: a second run of one seed, which tells nothing of the
    spread between seeds, and a run that ended early or has not come as far, which has only the beginning.
    """
    members: dict[Hashable, list[Run]] = {}
    for run in runs:
        members.setdefault(setting(run), []).append(run)
    groups = []
    for together in members.values():
        apart = {id(run): reason for run in together if (reason := _behind(run, together))}
        for place, run in enumerate(together):
            earlier = [other.config.get("seed") for other in together[:place] if id(other) not in apart]
            if id(run) not in apart and run.config.get("seed") in earlier:
                apart[id(run)] = f"seed {run.config.get('seed')} is in it already"
        if mean := tuple(run for run in together if id(run) not in apart):
            groups.append(Group(mean))
        groups += [Group((run,), apart[id(run)]) for run in together if id(run) in apart]
    places = {id(run): place for place, run in enumerate(runs)}
    return sorted(groups, key=lambda group: places[id(group.first)])


def _behind(run: Run, together: list[Run]) -> str | None:
    """Why a run's evaluations are too few to be averaged with those of its setting's other seeds."""
    furthest = max(together, key=_evaluated_tokens)
    if any(other.finished for other in together) and not run.finished:
        return f"it has {run.updates:,.15g} of {run.max_iters:,.15g} updates"
    if _evaluated_tokens(run) < FURTHER_PART * _evaluated_tokens(furthest):
        return "its evaluations do not go as far"
    return None


def _evaluated_tokens(run: Run) -> float:
    return float(run.evals.tokens[-1]) if len(run.evals) else 0.0


def setting(run: Run) -> tuple[str, ...]:
    """What distinguishes settings: the keys that count, and the data."""
    return (*(str(value) for value in setting_values(run.config).values()), analysis.data_key(run))


def setting_values(config: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of a config that count. What an older one lacks had the default's meaning."""
    values = {key: config.get(key, DEFAULTS.get(key)) for key in SETTING_KEYS}
    for key, other in SAME_AS.items():
        values[key] = values[other] if values[key] is None else values[key]
    betas = values["betas_1d"] or (values["beta1"], values["beta2"])
    return values | {"betas_1d": list(betas) if isinstance(betas, tuple | list) else betas}


def difference(a: Group, b: Group) -> tuple[Difference, list[Any], float] | None:
    """a - b in validation loss over the seeds that both have, the seeds, and after how many tokens: at the last
    evaluation that all of these runs have. None with fewer than two seeds.
    """
    seeds = [seed for seed in a.seeds if seed in b.seeds]
    pairs = [(a.runs[a.seeds.index(seed)], b.runs[b.seeds.index(seed)]) for seed in seeds]
    if len(seeds) < 2 or not analysis.same_validation_data(a.first, b.first):
        return None
    runs = [run for pair in pairs for run in pair]
    tokens = sorted(set.intersection(*({float(t) for t in run.evals.tokens} for run in runs)))
    if not tokens or tokens[-1] <= 0:
        return None
    losses = [[float(run.evals.loss[run.evals.tokens == tokens[-1]][0]) for run in pair] for pair in pairs]
    if np.max(losses) >= DIVERGED:
        return None
    result = paired_difference([a for a, _ in losses], [b for _, b in losses])
    return (result, seeds, tokens[-1]) if result else None
