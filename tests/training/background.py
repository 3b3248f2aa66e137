"""Runs in the background, as tests that interrupt or break them need them."""

import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from tests.conftest import ENVIRONMENT, ROOT, Outcome, Train

FAULTY = Path(__file__).with_name("faulty.py")


class Background:
    """A run that was started, within a `with` block; nothing of it outlives the block.

    Args:
        popen: its first process; torchrun where there are several.
        folder: the run's, by which the others are found: all have `--out_dir=` with it.
    """

    def __init__(self, popen: subprocess.Popen[str], folder: Path) -> None:
        self.popen, self.folder = popen, folder

    def __enter__(self) -> "Background":
        return self

    def __exit__(self, *_: object) -> None:
        for pid in self.processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.kill()
        self.popen.communicate()

    def processes(self) -> dict[int, str | None]:
        """The run's processes that are there now, with their ranks; torchrun has none."""
        found = {}
        for place in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                arguments = (place / "cmdline").read_text().split("\0")
                if f"--out_dir={self.folder}" in arguments:
                    variables = (place / "environ").read_text().split("\0")
                    is_worker = "torch.distributed.run" not in arguments
                    ranks = [entry.removeprefix("RANK=") for entry in variables if entry.startswith("RANK=")]
                    found[int(place.name)] = ranks[0] if ranks and is_worker else None
        return found

    def send(self, number: signal.Signals, to: str) -> None:
        """A signal to the process that was started ("alone", "torchrun"), or to a worker ("0", "1")."""
        if to in ("alone", "torchrun"):
            self.popen.send_signal(number)
        else:
            (pid,) = (pid for pid, rank in self.processes().items() if rank == to)
            os.kill(pid, number)

    def wait_for(self, condition: Callable[[], bool], seconds: float = 60) -> None:
        """Returns when the condition holds."""
        end = time.monotonic() + seconds
        while not condition():
            if self.popen.poll() is not None:
                raise AssertionError(f"ended with {self.popen.returncode}: {self.popen.communicate()}")
            if time.monotonic() > end:
                raise AssertionError(f"not so within {seconds} s")
            time.sleep(0.02)

    def wait_for_update(self, update: int) -> None:
        """Returns when this update is in `metrics.jsonl`."""
        self.wait_for(lambda: any(row["iter"] >= update for row in rows(self.folder) if "train/loss" in row))

    def wait_for_start(self) -> None:
        """Returns when the run says that it runs; what it does next is its first evaluation."""
        self.wait_for((self.folder / "status.json").exists)

    def end(self, within: float) -> Outcome:
        """Waits until all of its processes are gone."""
        end = time.monotonic() + within
        stdout, stderr = self.popen.communicate(timeout=within)
        while left := self.processes():
            assert time.monotonic() < end, f"still there after {within} s: {left}"
            time.sleep(0.02)
        return Outcome(self.popen.returncode, stdout, stderr, self.folder)


def start_torchrun(run_train: Train, *options: str, program: Path) -> Background:
    """A run under a torchrun with other options than those of `run_train.start`.

    Args:
        options: of torchrun, then `--`, then those of the run.
    """
    split = options.index("--")
    folder = run_train.folder("run")
    arguments = [str(program), str(run_train.config), f"--out_dir={folder}", *options[split + 1 :]]
    popen = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *options[:split], *arguments],
        **{"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT, "env": ENVIRONMENT},
    )
    return Background(popen, folder)


def two_hosts(run_train: Train, *overrides: str, program: Path = ROOT / "train.py") -> tuple[Background, Background]:
    """A run of two torchruns with a process each, as on two machines."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        place = f"--rdzv-endpoint=127.0.0.1:{server.getsockname()[1]}"
    torchrun = ("--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", "--rdzv-id=test", place)
    one, other = (start_torchrun(run_train, *torchrun, "--", *overrides, program=program) for _ in range(2))
    return one, other


def broken(run_train: Train, spec: str, *overrides: str, within: float = 60) -> Outcome:
    """A run of two processes under torchrun with a fault."""
    popen = run_train.start(*overrides, f"--fault={spec}", processes=2, program=FAULTY)
    with Background(popen, run_train.folder("run")) as run:
        return run.end(within)


def weights(folder: Path, update: int) -> dict[str, Tensor]:
    """Those of a checkpoint."""
    saved: dict[str, Tensor] = torch.load(folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]
    return saved


def newest(folder: Path) -> int:
    """The update of the newest checkpoint, which is whole and finite."""
    update = max(int(path.stem.removeprefix("iter-")) for path in (folder / "checkpoints").glob("*.pt"))
    assert all(torch.isfinite(weight).all() for weight in weights(folder, update).values())
    return update


def rows(folder: Path) -> list[dict[str, float]]:
    """The whole rows of `metrics.jsonl` so far."""
    path = folder / "metrics.jsonl"
    content = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in content.splitlines(keepends=True) if line.endswith("\n")]


def how_it_stands(folder: Path) -> int:
    """What `scripts/status.py` exits with."""
    status: int = runpy.run_path(str(ROOT / "scripts/status.py"))["main"]([str(folder)])
    return status
