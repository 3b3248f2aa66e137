#!/usr/bin/env python3
"""What scripts/gpu_check.sh runs: on a machine with one NVIDIA GPU, all that has to be measured or checked on one.

    bash scripts/gpu_check.sh [--device cuda|cpu] [--minutes 8] [--parts NAME,NAME] [OUT.json]

Each part has a share of the minutes and what earlier parts left of theirs; one that needs longer is cut off and says
so, and the others go on. The JSON is written anew after each part. The exit status is 0 only if every part succeeded.
The parts are in `scripts/gpucheck/`.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from scripts.gpucheck.machine import gpu_is_there, machine
from scripts.gpucheck.parts import PARTS, Part
from scripts.gpucheck.report import figure_lines, part_line
from scripts.gpucheck.running import Outcome, Work, perform
from training.console import fail, say
from training.folder import write_json

ROOT = Path(__file__).resolve().parents[1]
SPARE = 12.0  # seconds of the minutes that no part has: the start and the end of the script itself


class ArgumentError(Exception):
    """Arguments that cannot be used; the message is for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (bash scripts/gpu_check.sh --help lists what is allowed)")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    names = [part.name for part in PARTS]
    parser = Parser(prog="bash scripts/gpu_check.sh", description="Measures and checks on one GPU, in minutes.")
    parser.add_argument("out", metavar="OUT.json", nargs="?", type=Path, help="default: runs/gpu_check.json")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda", help="cpu: a trial of the script itself")
    parser.add_argument("--minutes", metavar="M", type=float, default=8.0, help="for everything (default: 8)")
    parser.add_argument(
        "--parts", metavar="NAMES", default=",".join(names), help="of these (default: all), with commas"
    )
    args = parser.parse_args(argv)
    args.parts = args.parts.split(",")
    if unknown := [name for name in args.parts if name not in names]:
        parser.error(f"argument --parts: {unknown[0]!r} is none of {', '.join(names)}")
    if not 1 <= args.minutes <= 600:
        parser.error(f"argument --minutes: {args.minutes:g} must be 1 or more, 600 at most")
    if args.out is None:
        args.out = ROOT / "runs" / "gpu_check.json"
        args.out.parent.mkdir(exist_ok=True)
    if not args.out.absolute().parent.is_dir():
        parser.error(f"argument OUT.json: there is no folder {args.out.absolute().parent}")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0; 1 where a part did not succeed; 2 for an error that the user can mend."""
    start = time.monotonic()
    try:
        args = arguments(argv)
        if args.device == "cuda" and not gpu_is_there():
            raise ArgumentError("torch finds no CUDA device here; --device cpu tries the script without one")
        record: dict[str, Any] = {
            "command": " ".join(sys.argv),
            "started": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "device": args.device,
            "minutes": args.minutes,
            "machine": machine(args.device),
        }
        say(describe(record["machine"]))
        outcomes: list[Outcome] = []
        chosen = [part for part in PARTS if part.name in args.parts]
        with tempfile.TemporaryDirectory(prefix="gpu_check-") as folder:
            for outcome in run_parts(chosen, args.device, Path(folder), start, args.minutes * 60 - SPARE):
                outcomes.append(outcome)
                say(part_line(outcome))
                write(args.out, record, outcomes, time.monotonic() - start)
    except ArgumentError as error:
        fail(str(error))
        return 2
    say("\n".join(["", *(line for outcome in outcomes for line in figure_lines(outcome)), "", f"written: {args.out}"]))
    return 0 if all(outcome.succeeded for outcome in outcomes) else 1


def run_parts(parts: list[Part], device: str, folder: Path, start: float, seconds: float) -> Iterator[Outcome]:
    """Yields the outcome of each part; all of them end within `seconds` of `start`."""
    # Its own caches of compiled code, so that "time to the first update" is that of a machine's first run.
    caches = {"TORCHINDUCTOR_CACHE_DIR": folder / "inductor", "TRITON_CACHE_DIR": folder / "triton"}
    environment = os.environ | {name: str(path) for name, path in caches.items()}
    scale = seconds / sum(part.share for part in parts)
    for place, part in enumerate(parts):
        later = scale * sum(other.share for other in parts[place + 1 :])
        (folder / part.name).mkdir()
        work = Work(device, folder / part.name, start + seconds - later, environment)
        yield perform(part.name, part.run, work)


def write(out: Path, record: dict[str, Any], outcomes: list[Outcome], seconds: float) -> None:
    """The JSON with what is known so far.

    Raises:
        ArgumentError: it cannot be written.
    """
    parts = [asdict(outcome) for outcome in outcomes]
    succeeded = all(outcome.succeeded for outcome in outcomes)
    content = record | {"seconds": round(seconds, 1), "succeeded": succeeded, "parts": parts}
    try:
        write_json(out, content)
    except OSError as problem:
        raise ArgumentError(f"{out.absolute()} cannot be written: {problem.strerror or problem}") from None


def describe(facts: dict[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in facts.items() if value is not None)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # and so ends what it has started
    sys.exit(main())
