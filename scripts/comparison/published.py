"""The published curves and values (`paper/values.json` names their sources), and how runs here compare with them."""

import csv
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from scripts.comparison import recipe
from scripts.comparison.analysis import short_names
from scripts.comparison.curves import Curve, loss_at
from scripts.comparison.groups import Group
from scripts.comparison.milestones import MILESTONES
from scripts.comparison.runs import Run
from scripts.comparison.wording import names

FOLDER = Path(__file__).parent / "paper"
COLUMNS = (*MILESTONES, "best")
MOST_DEPARTURES = 12  # of a run from its recipe that a warning names
OPTIMIZERS = {
    **{"adamw": "AdamW", "muon": "Muon", "lion": "Lion", "mars-lion": "MARS-Lion"},
    **{"mars-adamw": "MARS-AdamW", "mars-adamw-exact": "MARS-AdamW, exact"},
}


@dataclass(frozen=True)
class PublishedCurve:
    optimizer: str
    curve: Curve  # without times
    older_recipe: bool

    @property
    def label(self) -> str:
        return f"{OPTIMIZERS[self.optimizer]}, published" + (" (older recipe)" if self.older_recipe else "")


@dataclass(frozen=True)
class Published:
    """One size. `losses` has, of each optimizer, what is published of COLUMNS."""

    name: str
    data: str
    val_tokens: int | None
    parameters: int
    tokens_per_update: int
    losses: dict[str, dict[str, float]]
    read_off: bool  # the losses are of the curves, not of a table
    curves: list[PublishedCurve]

    def points(self, groups: list[Group]) -> dict[str, Curve]:
        """The table's values, by label, of MARS-AdamW where its curve is of an older recipe, and of the groups'
        optimizers that have no curve at all.
        """
        drawn = {curve.optimizer for curve in self.curves if not curve.older_recipe}
        wanted = {curve.optimizer for curve in self.curves} | {published_name(group.first) for group in groups}
        found = {}
        for optimizer, losses in self.losses.items():
            known = [column for column in losses if column in MILESTONES]
            if optimizer in wanted - drawn and known:
                tokens = np.array([MILESTONES[column] for column in known], dtype=np.float64)
                loss = np.array([losses[column] for column in known])
                unknown = np.full(len(known), np.nan)
                label = f"{OPTIMIZERS[optimizer]}, published table"
                found[label] = Curve(tokens / self.tokens_per_update, tokens, unknown, loss)
        return found


def sizes() -> dict[str, str]:
    """What can be asked for, and which one it is."""
    known = list(_values()["sizes"])
    return {name: name for name in known} | {name.removeprefix("gpt2-"): name for name in known}


def load(name: str) -> Published:
    """One of `sizes()`."""
    values = _values()
    size = values["sizes"][sizes()[name]]
    curves = [
        PublishedCurve(optimizer, _curve(column), column in values["older_recipe"])
        for optimizer, column in size["curves"].items()
    ]
    losses = size["losses"] or {curve.optimizer: _losses(curve.curve) for curve in curves}
    return Published(
        *(sizes()[name], size["data"], size["val_tokens"], size["parameters"], values["tokens_per_update"]),
        losses={optimizer: _with_best(known) for optimizer, known in losses.items()},
        read_off=not size["losses"],
        curves=curves,
    )


def _values() -> dict[str, Any]:
    values: dict[str, Any] = json.loads((FOLDER / "values.json").read_text(encoding="utf-8"))
    return values


def _curve(column: str) -> Curve:
    with (FOLDER / "curves.csv").open(encoding="utf-8", newline="") as file:
        rows = [(float(row["step"]), float(row[column])) for row in csv.DictReader(file) if row[column]]
    updates, loss = np.array(rows).T
    # Tokens by the recipe: the file's are rounded.
    return Curve(updates, updates * _values()["tokens_per_update"], np.full(len(rows), np.nan), loss)


def _losses(curve: Curve) -> dict[str, float]:
    known = {name: loss for name, tokens in MILESTONES.items() if (loss := loss_at(curve, tokens)) is not None}
    return known | {"best": float(curve.loss.min())}


def _with_best(losses: dict[str, float]) -> dict[str, float]:
    """The published value at 50B is the lowest one of the run."""
    return losses | ({"best": losses["50B"]} if "50B" in losses and "best" not in losses else {})


def published_name(run: Run) -> str:
    return run.optimizer + ("-exact" if run.config.get("exact") and run.optimizer.startswith("mars") else "")


@dataclass(frozen=True)
class Against:
    """A group against the published values of its optimizer, by column; only what both have has a difference, and
    nothing where the data are others.
    """

    name: str
    optimizer: str
    published: dict[str, float]
    ours: dict[str, float]
    difference: dict[str, float]
    other_data: str | None = None  # how the group's data differ from the published ones


def against(groups: list[Group], paper: Published) -> list[Against]:
    """Every group whose optimizer has published values."""
    rows = []
    for group, name in zip(groups, names(groups).rows, strict=True):
        optimizer = published_name(group.first)
        theirs = paper.losses.get(optimizer)
        if not theirs:
            continue
        found = {column: group.loss_at(tokens) for column, tokens in MILESTONES.items()}
        if group.finished:  # until then its lowest loss is nothing to set against that of a whole run
            found["best"] = group.best
        ours = {column: value.mean for column, value in found.items() if value and math.isfinite(value.mean)}
        both = {column: ours[column] - theirs[column] for column in COLUMNS if column in ours and column in theirs}
        other_data = recipe.other_data(group.first, paper.name, paper.val_tokens)
        rows.append(Against(name, optimizer, theirs, ours, {} if other_data else both, other_data))
    return rows


def lines(groups: list[Group], paper: Published) -> list[str]:
    """The table: of each group what is published, what it has here, and the difference."""
    rows = against(groups, paper)
    width = max([len(row.name) for row in rows] + [3])
    text = [f"Against the published {paper.name} on {paper.data}:", ""]
    text.append(" ".ljust(width + 12) + "".join(column.rjust(9) for column in COLUMNS))
    for row in rows:
        for what, values, form in (
            ("published", row.published, ".3f"),
            ("here", row.ours, ".3f"),
            ("difference", row.difference, "+.3f"),
        ):
            cells = "".join((format(values[c], form) if c in values else "-").rjust(9) for c in COLUMNS)
            text.append(f"{row.name if what == 'published' else '':<{width}}  {what:<10}{cells}")
    if not rows:
        text[-1] = f"none of these optimizers has a published value; known are {', '.join(paper.losses)}"
    foreign = [f"warning: no difference for {row.name}: {row.other_data}." for row in rows if row.other_data]
    return [*text, "", *foreign, *_notes(paper), *_departures(groups, paper)]


def _notes(paper: Published) -> list[str]:
    if paper.read_off:
        return ["Published values are read off plots, to about 0.003, and of single evaluations on 200 random batches."]
    notes = [
        "warning: the published 50B is the lowest of about 100 evaluations on 200 random batches each"
        " (standard deviation about .006 to .010), below what the whole validation file gives at the end:"
        " expect a little more here."
    ]
    if any(curve.older_recipe for curve in paper.curves):
        notes.append(
            "The published MARS curve in the figure is of an older recipe; differences are to the table's values."
        )
    if any(values["best"] != values.get("50B", values["best"]) for values in paper.losses.values() if "best" in values):
        notes.append("best: published in the paper's text, of other runs than the table of its code repository.")
    return notes


def _departures(groups: list[Group], paper: Published) -> list[str]:
    """A warning for the runs that were not made by the published recipe, one for all that depart in the same way."""
    found: dict[str, list[str]] = {}
    runs = [run for group in groups for run in group.runs]
    for run, name in zip(runs, short_names(runs), strict=True):
        if differing := recipe.departures(run, paper.name, published_name(run), paper.parameters):
            shown = ", ".join(differing[:MOST_DEPARTURES])
            more = len(differing) - MOST_DEPARTURES
            found.setdefault(shown + (f" and {more} more" if more > 0 else ""), []).append(name)
    return [f"warning: not the published recipe: {', '.join(owners)}: {how}." for how, owners in found.items()]
