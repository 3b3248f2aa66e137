#!/usr/bin/env python3
"""Lays runs side by side: a table, what it means in sentences, and the loss curves as a PNG.

    python scripts/compare.py runs/gpt2-small-adamw runs/gpt2-small-mars

Everything comes from the `config.json` and `metrics.jsonl` in a run's folder, so runs that are still going can be
compared too. With more than three runs each is set against the first, so put the baseline first. The parts are in
`scripts/comparison/`: `runs.py` reads, `analysis.py` computes, `table.py` and `report.py` write, `figure.py` draws.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.comparison import report, table
from scripts.comparison.runs import Run, RunError, read_run


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
        metavar="FILE.png",
        type=Path,
        help="where to write the curves (comparison.png beside the runs, or here if they lie in several folders)",
    )
    parser.add_argument("--title", help="title of the figure (the data set and sizes)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        runs = read_runs(args.runs)
        out = args.out or default_out(args.runs)
        if out.suffix.lower() != ".png":
            raise RunError(f"--out {out.resolve()} must end in .png")
        print("\n".join(text(runs)))
        write_figure(runs, args.title, out)
    except RunError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"\nloss curves: {out}")
    return 0


def read_runs(folders: list[Path]) -> list[Run]:
    """Each folder once, in the order given."""
    distinct = {folder.resolve(): folder for folder in reversed(folders)}
    if len(distinct) < len(folders):
        print("warning: a run that was given twice is shown once", file=sys.stderr)
    runs = [read_run(folder) for folder in reversed(distinct.values())]
    for run in runs:
        if run.damaged_lines:
            path = run.folder.resolve() / "metrics.jsonl"
            count = f"{run.damaged_lines} damaged line{'s' if run.damaged_lines > 1 else ''}"
            print(f"warning: {path}: skipped {count} (cut short, or still being written)", file=sys.stderr)
    return runs


def text(runs: list[Run]) -> list[str]:
    """What is printed before the figure is drawn: blocks with an empty line between them."""
    blocks = [table.table(runs), report.notes(runs), report.warnings(runs), report.sentences(runs)]
    lines: list[str] = []
    for block in blocks:
        lines += ([""] if lines and block else []) + block
    return lines


def default_out(folders: list[Path]) -> Path:
    parents = {folder.resolve().parent for folder in folders}
    folder = parents.pop() if len(parents) == 1 else Path.cwd()
    here = Path.cwd()
    return Path(os.path.relpath(folder, here) if folder.is_relative_to(here) else folder) / "comparison.png"


def write_figure(runs: list[Run], title: str | None, out: Path) -> None:
    # Imported late: a mistake in the arguments is told without waiting for matplotlib.
    from scripts.comparison import figure

    try:
        figure.save(figure.draw(runs, title), out)
    except OSError as problem:
        raise RunError(f"{out.resolve()} cannot be written: {problem.strerror or problem}") from None


if __name__ == "__main__":
    sys.exit(main())
