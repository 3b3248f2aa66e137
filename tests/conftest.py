"""Small data sets, and runs of train.py on them."""

import contextlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import train
from tests.fresh import run_fresh
from tests.helpers import write_tokens

ROOT = Path(__file__).resolve().parents[1]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}
VOCABULARY = 64

# A model that makes an update in milliseconds.
TINY_CONFIG = f"""
vocab_size = {VOCABULARY}
n_layer = 2
n_head = 2
n_embd = 32
block_size = 16
batch_size = 4
total_batch_size = 8
max_iters = 6
warmup_iters = 2
learning_rate = 1e-2
min_lr = 1e-3
eval_interval = 3
log_interval = 1
checkpoint_interval = 0
device = "cpu"
dtype = "float32"
compile = False
"""


@pytest.fixture
def dataset(tmp_path: Path) -> Path:
    """Text-like tokens: a random walk, so that there is something to learn."""
    steps = np.random.default_rng(0).integers(-2, 3, size=6000)
    tokens = np.cumsum(steps) % VOCABULARY
    return write_tokens(tmp_path / "data", tokens[:5000], tokens[5000:])


@pytest.fixture
def config(tmp_path: Path, dataset: Path) -> Path:
    """A config file for the data set."""
    path = tmp_path / "tiny.py"
    path.write_text(TINY_CONFIG + f"dataset = {str(dataset)!r}\nout_dir = {str(tmp_path / 'run')!r}\n")
    return path


@dataclass
class Outcome:
    """How a run of train.py ended and what it left."""

    status: int
    stdout: str
    stderr: str
    folder: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    def series(self, key: str) -> list[float]:
        return [row[key] for row in self.rows if key in row]


class Train:
    """Runs train.py with a config: in this process, or under torchrun where `processes` is given."""

    def __init__(self, config: Path, root: Path) -> None:
        self.config, self.root = config, root

    def folder(self, out: str) -> Path:
        """The out_dir that a run with this name has."""
        return self.root / out

    def __call__(
        self, *overrides: str, out: str = "run", processes: int | None = None, path: Path | None = None
    ) -> Outcome:
        folder = self.folder(out)
        arguments = self._arguments(overrides, out, path)
        if processes is None:
            stdout, stderr = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(stdout), contextlib.redirect_stderr(stderr):
                status = train.main(arguments)
            return Outcome(status, stdout.getvalue(), stderr.getvalue(), folder)
        done = subprocess.run(
            self._command(arguments, processes), capture_output=True, text=True, timeout=120, cwd=ROOT, env=ENVIRONMENT
        )
        return Outcome(done.returncode, done.stdout, done.stderr, folder)

    def fresh(self, *overrides: str, out: str = "run", processes: int = 1, timeout: float = 120) -> Outcome:
        """In new processes, one run together, without torchrun. The status is the highest."""
        logs = self.root / "logs" / out
        statuses = run_fresh(self._arguments(overrides, out, None), logs, processes, timeout)
        texts = ["".join((logs / f"{name}-{k}").read_text() for k in range(processes)) for name in ("stdout", "stderr")]
        return Outcome(max(statuses, key=abs), *texts, self.folder(out))

    def start(
        self, *overrides: str, out: str = "run", processes: int | None = None, program: Path = ROOT / "train.py"
    ) -> subprocess.Popen[str]:
        """Starts a run as a shell would, alone or under torchrun, and returns at once."""
        command = self._command(self._arguments(overrides, out, None), processes, program)
        return subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=ENVIRONMENT
        )

    def _arguments(self, overrides: Sequence[str], out: str, path: Path | None) -> list[str]:
        return [str(path or self.config), f"--out_dir={self.folder(out)}", *overrides]

    @staticmethod
    def _command(arguments: list[str], processes: int | None, program: Path = ROOT / "train.py") -> list[str]:
        torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
        return [sys.executable, *(torchrun if processes else []), str(program), *arguments]


@pytest.fixture
def run_train(config: Path, tmp_path: Path) -> Iterator[Train]:
    """train.py with the tiny config; runs go to folders of `tmp_path`. All compute with one thread, so that a run in
    this process can equal one in another to the last bit."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Train(config, tmp_path)
    torch.set_num_threads(threads)
