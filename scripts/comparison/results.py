"""The comparison for other programs, as JSON and CSV. docs/comparing.md lists the keys.

Every number is the unrounded one behind the printed tables. What is unknown, or not a number, is null.
"""

import csv
import io
import json
import math
from dataclasses import asdict
from typing import Any

from scripts.comparison import analysis, published
from scripts.comparison.curves import loss_at, tokens_to_loss
from scripts.comparison.groups import Group, difference
from scripts.comparison.milestones import MILESTONES, race, reached, seconds
from scripts.comparison.published import Published
from scripts.comparison.runs import Run, printable
from scripts.comparison.statistics import Spread
from scripts.comparison.wording import loss_name, names

Record = dict[str, Any]


def results(groups: list[Group], losses: list[float], paper: Published | None) -> dict[str, Any]:
    """Everything that was computed, as JSON has it."""
    runs = [run for group in groups for run in group.runs]
    run_names = dict(zip(map(id, runs), analysis.short_names(runs), strict=True))
    group_names = names(groups).rows
    milestones = reached(groups)
    compared = [
        (a, name, b, other)
        for a, name in zip(groups, group_names, strict=True)
        for b, other in zip(groups, group_names, strict=True)
        if a is not b and analysis.same_validation_data(a.first, b.first)
    ]
    return _clean(
        {
            "milestones": {name: MILESTONES[name] for name in milestones},
            "runs": [_run(run, run_names[id(run)], milestones, losses) for run in runs],
            "groups": [
                _group(group, name, [run_names[id(run)] for run in group.runs], milestones, losses)
                for group, name in zip(groups, group_names, strict=True)
            ],
            "speed_ups": _speed_ups(compared, losses),
            "paired": [
                {"name": name, "against": other, "tokens": found[2], "seeds": found[1], **asdict(found[0])}
                for a, name, b, other in compared
                if (found := difference(a, b))
            ],
            "paper": [asdict(row) for row in published.against(groups, paper)] if paper else [],
        }
    )


def as_json(values: dict[str, Any]) -> str:
    return json.dumps(values, indent=2, allow_nan=False) + "\n"


def as_csv(values: dict[str, Any]) -> str:
    """A line a number: the list of the JSON it is in, whose, against whom, its key (nested ones with dots), itself."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(("list", "name", "against", "key", "value"))
    for name, tokens in values["milestones"].items():
        writer.writerow(("milestones", name, None, "tokens", tokens))
    for part in ("runs", "groups", "speed_ups", "paired", "paper"):
        for record in values[part]:
            for key, value in _flat(record):
                if key not in ("name", "against"):
                    writer.writerow((part, record["name"], record.get("against"), key, value))
    return text.getvalue()


def _run(run: Run, name: str, milestones: dict[str, int], losses: list[float]) -> Record:
    final, best = analysis.final_loss(run.evals), analysis.best_loss(run.evals)
    sizes = run.data.get("val_tokens"), run.data.get("val_bytes")
    keys = ("optimizer", "seed", "learning_rate", "parameters", "tokens_per_update", "processes", "device_name")
    return {
        "name": name,
        "folder": printable(str(run.folder.resolve())),
        **{key: run.config.get(key) for key in keys},
        "dataset": run.dataset,
        "updates": run.updates,
        "planned_updates": run.max_iters,
        "finished": run.finished,
        "damaged_lines": run.damaged_lines,
        "tokens": run.tokens,
        "seconds": run.time,
        "tokens_per_sec": analysis.throughput(run.tokens_per_sec),
        "unigram_loss": run.unigram_loss,
        "final_loss": final,
        "best_loss": best,
        "final_bits_per_byte": analysis.bits_per_byte(final, *sizes),
        "best_bits_per_byte": analysis.bits_per_byte(best, *sizes),
        "loss_at": {name: loss_at(run.evals, tokens) for name, tokens in milestones.items()},
        "tokens_to_loss": {loss_name(loss): tokens_to_loss(run.evals, loss) for loss in losses},
    }


def _group(group: Group, name: str, runs: list[str], milestones: dict[str, int], losses: list[float]) -> Record:
    reach = {loss_name(loss): tokens_to_loss(group.evals, loss) for loss in losses}
    return {
        "name": name,
        "optimizer": group.first.optimizer,
        "runs": runs,
        "seeds": group.seeds,
        "finished": group.finished,
        "tokens": group.tokens,
        "seconds": group.time,
        "tokens_per_sec": group.throughput,
        "final_loss": _spread(group.final),
        "best_loss": _spread(group.best),
        "loss_at": {name: _spread(group.loss_at(tokens)) for name, tokens in milestones.items()},
        "tokens_to_loss": reach,
        "seconds_to_loss": {loss: seconds(group, tokens) for loss, tokens in reach.items()},
    }


def _spread(value: Spread | None) -> Record | None:
    return asdict(value) if value else None


def _speed_ups(compared: list[tuple[Group, str, Group, str]], losses: list[float]) -> list[Record]:
    """Of each group against each other one: to the other's final loss, or to the given losses."""
    records = []
    for group, name, other, other_name in compared:
        goals: list[tuple[float, float | None]] = [(loss, None) for loss in losses]
        if not losses and group.evaluated and other.evaluated and math.isfinite(other.evals.loss[-1]):
            goals = [(float(other.evals.loss[-1]), float(other.evals.tokens[-1]))]
        for loss, spent in goals:
            result = race(group, other, loss, spent)
            records.append(
                {
                    "name": name,
                    "against": other_name,
                    "loss": loss,
                    "goal": "given" if losses else "final loss of against",
                    "tokens": result.tokens,
                    "against_tokens": result.other_tokens,
                    "speed_up": result.speed_up,
                    "seconds": result.seconds,
                    "against_seconds": result.other_seconds,
                    "time_speed_up": result.time_speed_up,
                }
            )
    return records


def _clean(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _clean(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_clean(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _flat(record: Record, prefix: str = "") -> list[tuple[str, Any]]:
    pairs: list[tuple[str, Any]] = []
    for key, value in record.items():
        if isinstance(value, dict):
            pairs += _flat(value, f"{prefix}{key}.")
        else:
            pairs.append((prefix + key, " ".join(map(str, value)) if isinstance(value, list) else value))
    return pairs
