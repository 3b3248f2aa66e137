"""How runs stand: `python scripts/status.py RUN [RUN ...]`.

Prints a line for each run's folder. The exit status is that of the run in the worst state:

    0   finished
    75  stopped by a signal; the same command with --resume=auto goes on
    3   running
    1   failed, killed, or not started yet; the last checkpoint is as it was

so that a script that runs torchrun, whose own status is 1 for anything but success, can decide what to do next.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.folder import is_locked, read_status

STATUS = {"finished": 0, "stopped": 75, "running": 3, "failed": 1, "killed": 1, "not started": 1}
TAIL = 4096  # bytes; more than the last row of metrics.jsonl
WORST = ("failed", "killed", "not started", "running", "stopped", "finished")


def main(arguments: list[str]) -> int:
    """Prints the lines and returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    states = []
    for run in parser.parse_args(arguments).runs:
        status = read_status(run)
        state = state_of(run, status.get("state"))
        states.append(state)
        details = [progress(run, status, state), checkpoint_of(run), status.get("reason"), status.get("time")]
        print(f"{run}: {state}; " + "; ".join(part for part in details if isinstance(part, str) and part))
    return STATUS[min(states, key=WORST.index)]


def state_of(run: Path, recorded: object) -> str:
    """The state that `status.json` records; killed where no process has the folder any more and none said why."""
    if recorded == "running" and is_locked(run) is False:
        return "killed"
    return recorded if isinstance(recorded, str) and recorded in STATUS else "not started"


def progress(run: Path, status: dict[str, object], state: str) -> str:
    """The updates done: at the end as recorded, on the way as far as the last row says."""
    updates, last = [status.get("iter")], status.get("max_iters")
    if state in ("running", "killed"):
        with suppress(OSError, ValueError, IndexError, RecursionError), (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL))
            row = json.loads(file.read().splitlines()[-1])
            updates.append(row.get("iter") if isinstance(row, dict) else None)
    known = [update for update in updates if isinstance(update, int)]
    return f"{max(known):,} of {last:,} updates" if known and isinstance(last, int) else ""


def checkpoint_of(run: Path) -> str:
    """The newest checkpoint's name."""
    names = sorted((path.name for path in (run / "checkpoints").glob("iter-*.pt")), key=lambda name: (len(name), name))
    return f"last checkpoint {names[-1]}" if names else "no checkpoint"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
