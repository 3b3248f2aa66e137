#!/usr/bin/env python3
"""The family of optimizers that `optim.MARS` spans, as a table that runs.

    python scripts/unified_view.py [--updates 40] [--dtype float32] [--json FILE]

Each known optimizer is made twice: by settings of `optim.MARS`, and by torch or a plain rule written from its paper
(`scripts/unified/references.py`). Both train a small GPT on the same batches of real text, each on its own gradients,
and the table shows the largest difference of a weight between them in any update.

Equal means equal up to rounding. How far rounding can drive two runs apart is measured: the own implementation is also
held against itself from weights that differ in their last bits (by 4 eps, a few roundings). Each update rounds anew, so
a difference of up to as many times that as there are updates counts as none. This is judged in float64 alone: in
float32 an average next to zero may well take another sign, which Lion makes a step of lr. The exit status is 1 where a
member differs from its own implementation, or a near relation does not.
"""

import argparse
import json
import os
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tensors this small are not worth sharing

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from optim import MARS
from scripts.evaluation.command import Parser
from scripts.unified.family import Member, members
from scripts.unified.training import BATCH, DATA, SHAPE, Comparison, compare
from training import RunError
from training.console import fail

WIDTH = 120
SETTINGS = ("direction", "form", "gamma", "b1", "b2", "clip", "first")
HEADS = ("optimizer", *SETTINGS, "own", "absolute", "relative", "rounding")
TEXTS = {0, 1, 2, 6, 7, 8}  # columns that are set flush left


@dataclass(frozen=True)
class Row:
    """A member, and what was found."""

    member: Member
    found: Comparison
    updates: int

    @property
    def equal(self) -> bool:
        """Whether the two implementations agree up to rounding; not where there is a NaN."""
        found = self.found
        return found.difference <= self.updates * found.rounding + self.member.tolerance * found.change

    def as_json(self) -> dict[str, Any]:
        member, found = self.member, self.found
        return {
            "name": member.name,
            "settings": member.settings,
            "reference": member.reference,
            "how": member.how,
            **asdict(found),
            "relative": found.relative,
            "equal": self.equal,
            "expected": member.equal,
        }


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/unified_view.py",
        description="The family of optimizers that optim.MARS spans, each beside an implementation of its own.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--updates", type=int, default=40, help="that both make")
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64", help="of weights and gradients")
    parser.add_argument("--seed", type=int, default=1, help="of weights and batches")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    args = parser.parse_args(argv)
    for name, allowed, good in (
        ("updates", "2 or more", args.updates >= 2),
        ("seed", "from 0 to 2^32 - 1", 0 <= args.seed < 2**32),
    ):
        if not good:
            parser.error(f"argument --{name}: {getattr(args, name)} must be {allowed}")
    if args.json and not args.json.resolve().parent.is_dir():
        parser.error(f"argument --json: there is no folder {args.json.resolve().parent}")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
    except RunError as error:
        fail(str(error))
        return 2
    dtype = getattr(torch, args.dtype)
    rows = [Row(member, compare(member, args.updates, dtype, args.seed), args.updates) for member in members()]
    print("\n".join(text(rows, args)))
    if args.json:
        settings = {"updates": args.updates, "dtype": args.dtype, "seed": args.seed, "torch": torch.__version__}
        args.json.write_text(json.dumps(settings | {"rows": [row.as_json() for row in rows]}, indent=2) + "\n")
    return int(args.dtype == "float64" and any(row.equal != row.member.equal for row in rows))


def text(rows: list[Row], args: argparse.Namespace) -> Iterator[str]:
    """What was done, the table, how the settings follow, and whether all is as it should be."""
    yield (
        f"A GPT of {SHAPE.n_layer} layers and width {SHAPE.n_embd}, {args.updates} updates of {BATCH} x "
        f"{SHAPE.block_size} bytes of Python source ({DATA} batches, over and over), {args.dtype}."
    )
    yield from textwrap.wrap(
        "own: torch's optimizer, or a rule of scripts/unified/references.py; absolute: the largest difference of a "
        "weight; relative: to the largest change of one; rounding: of the own implementation to itself, from weights 4 "
        "eps off.",
        WIDTH,
    )
    yield ""
    yield from table([HEADS, *map(cells, rows)])
    yield ""
    for row in rows:
        matrices = "; hidden matrices, the rest by AdamW" if row.member.matrices else ""
        yield from textwrap.wrap(f"{row.member.name}: {row.member.how}{matrices}.", WIDTH, subsequent_indent="  ")
    if args.dtype == "float64":
        yield ""
        yield from verdict(rows)


def table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Heads, a line, and the rest, in columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for number, row in enumerate(rows):
        texts = enumerate(zip(row, widths, strict=True))
        yield "  ".join(f"{cell:{width}}" if at in TEXTS else f"{cell:>{width}}" for at, (cell, width) in texts)
        if number == 0:
            yield "-" * (sum(widths) + 2 * len(widths) - 2)


def cells(row: Row) -> tuple[str, ...]:
    settings = MARS([torch.zeros(1, 1)], **row.member.settings).defaults
    corrects, (b1, b2) = settings["gamma"] != 0, settings["betas"]
    recursive = "exact" if settings["exact"] else "approx."
    form = {"recursive": recursive, "reference": "mean", "svrg": "svrg"}[settings["estimator"]] if corrects else "plain"
    return (
        row.member.name,
        settings["preconditioner"],
        form,
        f"{settings['gamma']:.3g}",
        f"{b1:g}",
        f"{b2:g}" if settings["preconditioner"] == "adamw" else "-",
        settings["clip"],
        settings["first_step"] if form == recursive else "-",
        row.member.reference,
        f"{row.found.difference:.1e}",
        f"{row.found.relative:.1e}",
        f"{row.found.rounding:.1e}",
    )


def verdict(rows: list[Row]) -> Iterator[str]:
    """Which are equal and which are not, and where that is not as it should be."""
    equal = [row for row in rows if row.equal]
    worst = max((row.found.relative for row in equal), default=0.0)
    yield f"{len(equal)} of {len(rows)} are equal up to rounding (a relative difference of {worst:.0e} at most)."
    others = [row.member.name for row in rows if not row.equal and not row.member.equal]
    if others:
        yield f"Not equal, as is to be expected: {', '.join(others)}."
    for row in rows:
        if row.equal != row.member.equal:
            yield f"{row.member.name}: {'equal' if row.equal else 'NOT EQUAL'}, which it should{' not' * row.equal} be."


if __name__ == "__main__":
    sys.exit(main())
