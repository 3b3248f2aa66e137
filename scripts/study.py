#!/usr/bin/env python3
"""Makes the runs of a study, as many at once as there is room for, and tells what came of them.

    python scripts/study.py configs/studies/smoke.py --dry-run      # the runs, what is done, how long the rest takes
    python scripts/study.py configs/studies/smoke.py                # makes them, or goes on; then table, plots, JSON
    python scripts/study.py configs/studies/smoke.py --report       # from what is there

Each run is a train.py of its own in runs/studies/STUDY/RUN, with its log. Ctrl-C or SIGTERM stops them all, saved; the
same command goes on. Several may work on one study at once. The exit status is 0 when all is done, 1 when a run has
failed, 2 for an error that you can mend, 75 when there is more to do. docs/studies.md says how to declare one.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import ConfigError
from scripts.studying.declaration import load_study
from scripts.studying.outcome import as_json, outcomes, table
from scripts.studying.pool import STOPPED, Pool, Slot, Store, cpu_slots, gpu_slots
from scripts.studying.progress import Display, estimate
from scripts.studying.thin import thin
from training.console import fail, prepare

STUDIES = Path(__file__).resolve().parents[1] / "runs" / "studies"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (python scripts/study.py --help lists what is allowed)")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(prog="python scripts/study.py", description=__doc__, allow_abbrev=False,
                    formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("study", metavar="STUDY.py", type=Path)
    parser.add_argument("--runs", metavar="FOLDER", type=Path, help="where the runs lie (runs/studies/STUDY)")
    parser.add_argument("--devices", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda where it is")
    parser.add_argument("--workers", metavar="N", type=_count, help="runs at once; on GPUs one each at most")
    parser.add_argument("--threads", metavar="N", type=_count, help="of each run, instead of what the study says")
    parser.add_argument("--only", metavar="PATTERN", action="append", help="only runs with such names, as in a shell")
    parser.add_argument("--no-wait", action="store_true", help="end where the rest is at work in other processes")
    parser.add_argument("--dry-run", action="store_true", help="list the runs and how long they take, run nothing")
    parser.add_argument("--report", action="store_true", help="table, plots, JSON from what is there, run nothing")
    parser.add_argument("--json", metavar="FILE", type=Path, help="the JSON (outcome.json beside the runs)")
    parser.add_argument("--out", metavar="FOLDER", type=Path, help="for the plots (beside the runs)")
    parser.add_argument("--thin", metavar="FOLDER", type=Path, help="copy what --report needs, small, and end")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{text} must be 1 or more")
    return number


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        study = load_study(args.study)
        store = Store(study, args.runs or STUDIES / study.name)
        for cell in store.plan().cells:
            _ = cell.config  # what a run would refuse is told before the first one starts
        if args.thin:
            print(f"{thin(store, args.thin)} runs: {args.thin}")
            return 0
        code = 0 if args.report else work(store, args)
        if not args.dry_run:
            report(store, args)
        return code
    except ConfigError as error:
        fail(str(error))
        return 2
    except OSError as error:
        fail(f"{error.filename}: {error.strerror}")
        return 2


def work(store: Store, args: argparse.Namespace) -> int:
    """Makes the runs, or lists them. Returns the exit status."""
    slots = places(args.devices, args.workers, args.threads or store.study.threads)
    display = Display(len(slots))
    pool = Pool(store, slots, args.only or ["*"], not args.no_wait, display.tell, display.look)
    pool.plan = store.plan()
    chosen, wanted = pool.chosen(), pool.wanted()
    if args.dry_run:
        for cell in chosen:
            print(f"{store.state(cell).kind:9} {cell.name}")
    rest = estimate(store, pool.plan, wanted, chosen)
    print(f"{len(chosen) - len(wanted)} of {len(chosen)} runs done; {rest.text(len(slots))}", flush=True)
    if args.dry_run:
        return 0
    code = pool.run()
    display.clear()
    for cell, why in pool.failed.items():
        fail(f"{cell.name}: {why}")
    if code == STOPPED:
        print("there is more to do; the same command goes on")
    return code


def places(devices: str, workers: int | None, threads: int) -> list[Slot]:
    """Places for runs: GPUs, or the CPUs that this process may use."""
    if devices != "cpu":
        import torch  # takes seconds

        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        gpus = named.split(",")[:count] if named else [str(gpu) for gpu in range(count)]
        if gpus:
            return gpu_slots(gpus[: workers or len(gpus)], threads)
        if devices == "cuda":
            raise ConfigError("--devices cuda: torch sees no GPU here")
    return cpu_slots(workers or max(1, len(os.sched_getaffinity(0)) // threads), threads)


def report(store: Store, args: argparse.Namespace) -> None:
    """Prints the table; writes plots and JSON."""
    from scripts.comparison.figure import save  # matplotlib takes seconds
    from scripts.studying.figures import draw_final, draw_tuning

    found, title, out = outcomes(store), store.study.title or store.study.name, args.out or store.folder
    print("\n" + "\n".join(table(found)))
    path = args.json or out / "outcome.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(as_json(store, found), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    shown = [each for each in found if any(loss is not None for loss in each.tuning.losses)]
    drawn = {"tuning.png": draw_tuning(shown, title), "final.png": draw_final(shown, title)} if shown else {}
    for name, figure in drawn.items():
        save(figure, out / name)
        print(f"plot: {out / name}")
    print(f"results: {path}")


if __name__ == "__main__":
    prepare()
    sys.exit(main())
