#!/usr/bin/env python3
"""Lays runs side by side: a table, what it means in sentences, and the loss curves as a figure or a page.

    python scripts/compare.py runs/gpt2-small-adamw runs/gpt2-small-mars
    python scripts/compare.py runs/*-seed*/ --loss 2.9 --html page.html --json results.json
    python scripts/compare.py runs/gpt2-small-*/ --paper gpt2-small --out figure.svg

Everything comes from the `config.json` and `metrics.jsonl` in a run's folder, so runs that are still going can be
compared too. Runs that differ only in their seed are shown as one, with mean and spread. With more than three settings
each is set against the first, so put the baseline first. The parts are in `scripts/comparison/`; docs/comparing.md has
all that can be asked for.
"""

import argparse
import math
import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.comparison import published, report, results, table
from scripts.comparison.groups import Group, make_groups
from scripts.comparison.published import Published
from scripts.comparison.runs import Run, RunError, printable, read_runs
from training.console import fail, flush, prepare, warn

FIGURES = (".png", ".svg", ".pdf")
LEFT = (*FIGURES, ".json", ".csv", ".html")
STDOUT = Path("-")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} (python scripts/compare.py --help lists what is allowed)")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/compare.py",
        description="Table, sentences and loss curves of several runs. Put the baseline first.",
    )
    parser.add_argument("runs", metavar="RUN", nargs="+", type=Path, help="a run's folder (its out_dir)")
    parser.add_argument(
        "--out",
        metavar="FILE",
        type=Path,
        action="append",
        default=[],
        help="where to write the curves, a .png, .svg or .pdf; several are allowed (comparison.png beside the runs, or "
        "here if they lie in several folders)",
    )
    parser.add_argument("--title", help="title of the figure (the data set and sizes)")
    parser.add_argument(
        "--loss", type=loss, action="append", default=[], help="tokens and time to this loss; repeatable"
    )
    parser.add_argument("--paper", metavar="SIZE", help="add what is published: " + ", ".join(published.sizes()))
    for kind, what in (("json", "all results"), ("csv", "all results, a line a number")):
        parser.add_argument(
            f"--{kind}",
            metavar="FILE",
            type=Path,
            nargs="?",
            const=Path(f"comparison.{kind}"),
            help=f"{what}; - prints them and nothing else (without FILE: comparison.{kind} beside the runs)",
        )
    parser.add_argument(
        "--html", metavar="FILE", type=Path, help="a page with curves to hover and zoom, for any browser"
    )
    args = parser.parse_intermixed_args(argv)
    _check(args)
    return args


def loss(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError
    return value


def _check(args: argparse.Namespace) -> None:
    """Refuses what would be found out only after minutes of reading, and settles where files go."""
    args.runs = without_files(args.runs)
    args.title = args.title and "\n".join(map(printable, args.title.split("\n")))
    folder = default_folder(args.runs)
    args.only_data = STDOUT in (args.json, args.csv)
    args.out = args.out or ([] if args.only_data else [folder / "comparison.png"])
    for out in args.out:
        if out.suffix.lower() not in FIGURES:
            raise RunError(f"--out {out.resolve()} must end in .png, .svg or .pdf")
    for kind, allowed in (("json", ".json"), ("csv", ".csv"), ("html", ".html")):
        path = getattr(args, kind)
        if path is None or (path == STDOUT and kind != "html"):
            continue
        if path.suffix.lower() != allowed:
            hint = "; RUN arguments stand before it" if path.is_dir() else ""
            raise RunError(f"--{kind} {path.resolve()} must end in {allowed}{hint}")
        if path == Path(f"comparison.{kind}"):
            setattr(args, kind, folder / path)
    if args.json == STDOUT and args.csv == STDOUT:
        raise RunError("--json - and --csv - cannot both go to standard output; name a file for one of them")
    if args.paper is not None and args.paper not in published.sizes():
        raise RunError(f"--paper {args.paper} is not known; known are {', '.join(published.sizes())}")


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        paper = published.load(args.paper) if args.paper else None
        runs = read(args.runs)
        groups = make_groups(runs)
        if not args.only_data:
            print("\n".join(text(groups, args.loss, paper)))
        written = [("loss curves", out) for out in args.out]
        if args.out:
            write_figures(groups, args.title, paper, args.out)
        if args.json or args.csv:
            values = results.results(groups, args.loss, paper)
            for path, form in ((args.json, results.as_json), (args.csv, results.as_csv)):
                if path == STDOUT:
                    print(form(values), end="")
                elif path:
                    write(path, form(values))
                    written.append(("results", path))
        if args.html:
            write_page(groups, args, paper)
            written.append(("page", args.html))
        if not args.only_data:
            print("\n" + "\n".join(f"{what}: {printable(str(path))}" for what, path in written))
        sys.stdout.flush()
    except RunError as error:
        fail(printable(str(error)))
        return 2
    except BrokenPipeError:  # the reader, `head` for one, has seen enough
        flush()
        return 1
    except OSError as problem:  # of files all are RunErrors
        flush()
        fail(f"standard output cannot be written: {problem.strerror or problem}")
        return 2
    return 0


def without_files(runs: list[Path]) -> list[Path]:
    """Without the files that a comparison leaves beside the runs, which `runs/*` names too."""
    files = [path for path in runs if path.suffix.lower() in LEFT and path.is_file()]
    if not files or len(files) == len(runs):
        return runs
    warn(f"no runs, so not read: {', '.join(printable(str(path)) for path in files)}")
    return [path for path in runs if path not in files]


def read(folders: list[Path]) -> list[Run]:
    """Each folder once, in the order given."""
    distinct = {folder.resolve(): folder for folder in reversed(folders)}
    if len(distinct) < len(folders):
        warn("a run that was given twice is shown once")
    runs = read_runs(list(reversed(distinct.values())))
    for run in runs:
        if run.damaged_lines:
            path = run.folder.resolve() / "metrics.jsonl"
            count = f"{run.damaged_lines} damaged line{'s' if run.damaged_lines > 1 else ''}"
            warn(f"{printable(str(path))}: skipped {count} (cut short, or still being written)")
    return runs


def text(groups: list[Group], losses: list[float], paper: Published | None) -> list[str]:
    """What is printed before the figure is drawn: blocks with an empty line between them."""
    blocks = [
        *(table.table(groups), report.notes(groups), report.warnings(groups)),
        *(report.sentences(groups), report.losses_table(groups, losses)),
        published.lines(groups, paper) if paper else [],
    ]
    lines: list[str] = []
    for block in blocks:
        lines += ([""] if lines and block else []) + block
    return lines


def default_folder(folders: list[Path]) -> Path:
    """The folder that holds all the runs, or the present one."""
    parents = {folder.resolve().parent for folder in folders}
    folder = parents.pop() if len(parents) == 1 else Path.cwd()
    here = Path.cwd()
    return Path(os.path.relpath(folder, here) if folder.is_relative_to(here) else folder)


def write_figures(groups: list[Group], title: str | None, paper: Published | None, outs: list[Path]) -> None:
    # Imported late: a mistake in the arguments is told without waiting for matplotlib.
    from scripts.comparison import figure

    drawn = figure.draw(groups, title, paper)
    for out in outs:
        try:
            figure.save(drawn, out)
        except OSError as problem:
            raise RunError(f"{out.resolve()} cannot be written: {problem.strerror or problem}") from None


def write_page(groups: list[Group], args: argparse.Namespace, paper: Published | None) -> None:
    from scripts.comparison import page

    write(args.html, page.page(groups, args.title, args.loss, paper))


def write(path: Path, content: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as problem:
        raise RunError(f"{path.resolve()} cannot be written: {problem.strerror or problem}") from None


if __name__ == "__main__":
    prepare()
    sys.exit(main())
