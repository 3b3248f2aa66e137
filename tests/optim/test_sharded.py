"""ZeRO-1: sharded optimizers under torchrun."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from optim.build import BUILDERS


@pytest.mark.parametrize("processes", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_sharded_steps_state_and_resumes_are_the_plain_optimizer_s(processes: int) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    done = subprocess.run(
        [*torchrun, str(Path(__file__).with_name("sharded_worker.py"))],
        capture_output=True,
        text=True,
        timeout=200,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    assert done.stdout.count("done") == processes
    assert set(BUILDERS) < {line.split(":")[0] for line in lines}
