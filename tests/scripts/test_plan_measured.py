"""scripts/plan.py against the measured peak of memory of real runs, on a CPU. What it prints is in docs/planning.md."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from configs import load_config
from scripts.planning.machines import MACHINES
from scripts.planning.memory import MemoryPlanner
from tests.helpers import write_tokens

WORKER = Path(__file__).with_name("memory_worker.py")

SHAPES = {
    "4 x 512": {"n_layer": 4, "n_head": 8, "n_embd": 512, "block_size": 256, "vocab_size": 16384, "batch_size": 4},
    "12 x 384": {"n_layer": 12, "n_head": 6, "n_embd": 384, "block_size": 512, "vocab_size": 4096, "batch_size": 4},
    "2 x 1024": {"n_layer": 2, "n_head": 16, "n_embd": 1024, "block_size": 256, "vocab_size": 32768, "batch_size": 2},
}
SHAPES["short"] = {"n_layer": 4, "n_head": 12, "n_embd": 768, "block_size": 32, "vocab_size": 1024, "batch_size": 1}
SEQUENCES = {"4 x 512": 8, "12 x 384": 4, "2 x 1024": 4, "short": 2}
EXACTLY, SHARDED = ("mars-adamw", "--exact=true"), ("mars-adamw", "--shard_optimizer=true")
TWO = [("adamw",), ("adamw", "--batch_size=2"), (*SHARDED, "--batch_size=2")]
# Processes, shape, optimizer: each shape, and each kind of state and of working memory, at least once. In "short" the
# step needs more than the backward pass.
CASES = [
    (1, "4 x 512", ("muon",)),
    (1, "12 x 384", ("adamw",)),
    (1, "2 x 1024", EXACTLY),
    (1, "2 x 1024", ("mars-lion",)),
    *((1, "short", (name,)) for name in ("mars-shampoo", "nadamw")),
    (1, "short", ("shampoo", "--n_layer=2", "--max_iters=1")),  # its roots take long, and are found in the first update
    # DDP makes new buckets after the first update, whose pages are touched in the second.
    *((2, "4 x 512", (*how, "--max_iters=3")) for how in TWO),
]
MEASURED_CONFIG = """
learning_rate, min_lr, beta2 = 1e-4, 0.0, 0.99
max_iters, eval_interval, checkpoint_interval = 2, 0, 0
device, dtype, compile, compile_optimizer = "cpu", "float32", False, False
"""


@pytest.fixture
def measured_config(tmp_path: Path) -> Path:
    data = write_tokens(tmp_path / "data", np.arange(20000) % 64, np.arange(600) % 64)
    path = tmp_path / "measured.py"
    path.write_text(MEASURED_CONFIG + f"dataset = {str(data)!r}\nwarmup_iters = 0\n")
    return path


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak of memory is read from /proc")
@pytest.mark.parametrize(("processes", "shape", "optimizer"), CASES)
def test_the_peak_is_that_of_a_real_run(
    processes: int, shape: str, optimizer: tuple[str, ...], measured_config: Path
) -> None:
    sizes = SHAPES[shape] | {"total_batch_size": SEQUENCES[shape]}
    overrides = [*(f"--{key}={value}" for key, value in sizes.items()), f"--optimizer={optimizer[0]}", *optimizer[1:]]
    config = load_config(measured_config, overrides)
    planner = MemoryPlanner(config, MACHINES["cpu"], processes)
    memory = planner.memory(config.batch_size, planner.optimizer(config, config.shard_optimizer))
    predicted = memory.total - MACHINES["cpu"].overhead
    measured = measured_peak([str(measured_config), *overrides], measured_config.parent / "run", processes)
    row = [str(processes), shape, " ".join(optimizer), f"{predicted / 1e6:,.0f}", f"{measured / 1e6:,.0f}"]
    print("\n| " + " | ".join([*row, f"{predicted / measured:.3f}"]) + " |")  # docs/planning.md
    assert predicted == pytest.approx(measured, rel=0.15)


def measured_peak(arguments: list[str], out_dir: Path, processes: int) -> int:
    """Bytes of the process that needs most."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    # So that memory goes back to the system when a tensor is freed, and what is measured is tensors, not malloc's gaps.
    environment = {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"} | os.environ
    command = [sys.executable, str(WORKER), *arguments, f"--out_dir={out_dir}"]
    running = []
    for rank in map(str, range(processes)):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes)}
        place = names | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        running.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment | place
            )
        )
    try:
        ends = [process.communicate(timeout=240) for process in running]
    finally:
        for process in running:
            process.kill()
    assert [process.returncode for process in running] == [0] * processes, ends
    return max(int(stdout.splitlines()[-1]) for stdout, _ in ends)
