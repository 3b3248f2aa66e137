#!/usr/bin/env python3
"""Measures on a model of one's own what MARS claims: that its estimate of the gradient has less variance.

    python scripts/gradient_noise.py runs/stdlib_mars --at start 300 [--json FILE] [--plot FILE]
    python scripts/gradient_noise.py configs/stdlib_mars.py [--updates 300] [--key=value ...]
    python scripts/gradient_noise.py FILE.json [FILE.json ...] --plot FILE      what was measured before, once more

From each point of a run (a checkpoint, or the start) the run goes on for some updates, with its own optimizer and
batches. On this path of weights, which is then fixed, all estimates are made again and again from fresh batches, which
training never sees: the spread of the replicates is an estimate's variance, and the distance of their mean to the true
gradient at the end of the path its bias. All estimates see the same batches. The true gradient is a mean over all
batches of all replicates. Without the clip of c, dropout and autocast.

What is fixed is left out: in training the path itself depends on the batches. docs/variance.md says what was found, and
how it is computed; the parts are in `scripts/noise/`.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

import torch

from configs import load_config
from data.tokens import open_dataset
from scripts.evaluation.command import Parser, number
from scripts.noise.course import Course, LossGradient, Point, points_of
from scripts.noise.estimates import DEFAULT_CASES, FORMS, Settings, parse_cases
from scripts.noise.report import EXPLANATION, lines_of, summary
from scripts.noise.sampling import gradients_needed, sample
from scripts.noise.statistics import ALL, Analysis, Tree
from training import RunError
from training.console import prepare, say
from training.device import keep_freed_memory
from training.errors import report
from training.folder import read_json, write_json
from training.processes import Processes, leave

TIME_CONSTANTS = 3  # points of a path, in units of 1 / (1 - beta1)
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/gradient_noise.py",
        usage="%(prog)s RUN [--at start|UPDATE ...] [...] | CONFIG.py [--updates N] [--key=value ...] | FILE.json ...",
        description="Bias, variance and error of gradient estimates and of their moving averages, at points of a run.",
        epilog="CONFIG.py: a run that is made here, of which nothing is kept; --key=value as of train.py. Its path "
        "begins at the initial weights, or after --updates.",
    )
    count = number(int, 1, 10**9)
    parser.add_argument("source", nargs="+", type=Path, metavar="RUN|CONFIG.py|FILE.json")
    parser.add_argument("--at", nargs="+", metavar="WHICH", help="start or updates (default: all checkpoints)")
    parser.add_argument("--updates", type=count, metavar="N", help="of CONFIG.py: updates before the path (default: 0)")
    parser.add_argument(
        "--estimates", nargs="+", metavar="FORM:GAMMA",
        help=f"FORM is one of {', '.join(FORMS)} (default: {' '.join(f'{c.form}:{c.gamma:g}' for c in DEFAULT_CASES)})",
    )  # fmt: skip
    parser.add_argument("--replicates", type=number(int, 4, 10**6), default=8, metavar="N", help="default: 8")
    parser.add_argument(
        "--points", type=number(int, 2, 10**6), metavar="N",
        help=f"of the path (default: {TIME_CONSTANTS} / (1 - beta1) or a little more, so that it ends midway between "
        "renewals of a reference)",
    )  # fmt: skip
    parser.add_argument("--average", type=number(float, 0.0, 1.0), metavar="B", help="beta1 of m (default: the run's)")
    parser.add_argument(
        "--interval", type=count, default=10, metavar="N",
        help="updates between renewals of the reference and of SVRG's snapshot (default: 10)",
    )  # fmt: skip
    parser.add_argument(
        "--snapshot_batches", type=count, default=10, metavar="N",
        help="batches of the gradient at SVRG's snapshot (default: 10)",
    )  # fmt: skip
    parser.add_argument("--noise_seed", type=number(int, 0, 2**32 - 1), default=1, help="of the fresh batches")
    parser.add_argument(
        "--data", metavar="NAME_OR_FOLDER", help="where the run's data set is now (default: where it was)"
    )
    parser.add_argument("--precision", choices=DTYPES, default="float32", help="of all gradients (default: float32)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there; after each point")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw there (.png, .svg, .pdf)")
    args, args.overrides = parser.parse_known_args(argv)
    check(parser, args)
    return args


def check(parser: Parser, args: argparse.Namespace) -> None:
    """Raises RunError for options that do not go together."""
    kinds = {path.suffix for path in args.source}
    if len(args.source) > 1 and kinds != {".json"}:
        parser.error("one run or config at a time; only earlier results, FILE.json, can be several")
    if args.overrides and kinds != {".py"}:
        parser.error(f"unrecognized arguments: {' '.join(args.overrides)}")
    if args.at is not None and kinds & {".py", ".json"}:
        parser.error("--at is for a run; a config has --updates")
    if args.updates is not None and kinds != {".py"}:
        parser.error("--updates is for a config; a run has --at")
    if args.average == 1:
        parser.error("--average 1.0: must be below 1")
    try:
        args.cases = DEFAULT_CASES if args.estimates is None else parse_cases(args.estimates)
    except ValueError as error:
        parser.error(f"--estimates {error}")
    for name in ("json", "plot"):
        file: Path | None = getattr(args, name)
        if file is not None and (not file.absolute().parent.is_dir() or file.is_dir()):
            parser.error(f"--{name} {file.absolute()}: must be a file in a folder that is there")
    if args.plot is not None and args.plot.suffix not in (".png", ".svg", ".pdf"):
        parser.error(f"--plot {args.plot}: must end in .png, .svg or .pdf")


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for an error that the user can mend, 1 for others, 130 when interrupted."""
    prepare()
    try:
        args = arguments(argv)
        points: list[Tree] = []
        if args.source[0].suffix == ".json":
            points = [point for file in args.source for point in earlier(file)]
            for point in points:
                say("\n".join([*lines_of(point), ""]))
        else:
            processes = Processes.from_environment(args.device)
            if processes.size > 1:
                raise RunError("one process measures; start it without torchrun")
            if processes.device.type == "cpu":
                keep_freed_memory()
            for start in starts(args):
                points.append(measure(start, args, processes))
                say("\n".join([*lines_of(points[-1]), ""]))
                if args.json is not None:
                    write_json(args.json.absolute(), {"torch": torch.__version__, "points": points})
        say("\n".join([EXPLANATION, *summary(points)]))
        if args.plot is not None:
            from scripts.noise.figure import write

            write(points, args.plot)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, None, asked_to_stop=False)
    return 0


def earlier(file: Path) -> list[Tree]:
    """What was measured before.

    Raises:
        RunError: not a file that this script wrote.
    """
    points = read_json(file).get("points")
    if not isinstance(points, list) or not all(isinstance(p, dict) and "kinds" in p for p in points):
        raise RunError(f"{file.absolute()} is not a JSON file of this script")
    return points


def starts(args: argparse.Namespace) -> list[Point]:
    """Where paths begin."""
    source = args.source[0]
    if source.suffix == ".py":
        points = [Point(load_config(source, args.overrides), args.updates or 0, None)]
    else:
        points = points_of(source, args.at)
    return [replace(p, config=replace(p.config, dataset=args.data or p.config.dataset)) for p in points]


def measure(start: Point, args: argparse.Namespace, processes: Processes) -> Tree:
    """All figures of a point."""
    config = start.config
    settings = Settings(
        forms=tuple(form for form in FORMS if any(case.form == form for case in args.cases)),
        beta1=config.beta1 if args.average is None else args.average,
        interval=args.interval,
        snapshot_batches=args.snapshot_batches,
    )
    count = args.points or default_points(settings)
    with closing(open_dataset(config.dataset, config.block_size, config.vocab_size)) as data:
        course = Course(start, data, processes)
        names, layout = course.layout
        path = course.path(count)
        problem = LossGradient(config, data, names, processes.device, DTYPES[args.precision], args.noise_seed)
        tell = Progress(f"update {course.update}", args.replicates, gradients_needed(count, settings))
        found = sample(path, problem, layout, settings, args.replicates, tell)
    analysis = Analysis(found, layout, settings, args.cases, config.total_batch_size)
    sizes = {
        name: sum(n for kind, n in zip(layout.kinds, layout.sizes, strict=True) if kind == name)
        for name in layout.names
    }
    return {
        "name": name_of(config.out_dir, args.source[0]),
        "start": start.update,
        "update": course.update,
        "points": count,
        "replicates": args.replicates,
        "batches": args.replicates * count,
        "sequences": config.total_batch_size,
        "block_size": config.block_size,
        **asdict(settings),
        "noise_seed": args.noise_seed,
        "precision": args.precision,
        "device": processes.device.type,
        "config": asdict(config),
        "sizes": sizes | {ALL: sum(layout.sizes)},
        "expected": analysis.expected(),
        "kinds": analysis.result(),
    }


def default_points(settings: Settings) -> int:
    """So many that little weight is older, and the last midway between renewals, where a reference has its mean age."""
    enough = max(2, math.ceil(round(TIME_CONSTANTS / (1 - settings.beta1), 6)))
    if not {"reference", "svrg"} & set(settings.forms):
        return enough
    middle = settings.interval - settings.interval // 2
    return -(-(enough - middle) // settings.interval) * settings.interval + middle


def name_of(out_dir: str, source: Path) -> str:
    return source.stem if source.suffix == ".py" else Path(out_dir).name


class Progress:
    """Says after the first replicate how long the others will take."""

    def __init__(self, what: str, replicates: int, gradients: int) -> None:
        self.what, self.replicates, self.begun = what, replicates, time.perf_counter()
        say(f"{what}: {replicates} replicates of {gradients} gradients each")

    def __call__(self, done: int) -> None:
        if done == 1 < self.replicates:
            left = (time.perf_counter() - self.begun) * (self.replicates - 1)
            say(f"{self.what}: about {left:,.0f} s left")


if __name__ == "__main__":
    leave(main())
