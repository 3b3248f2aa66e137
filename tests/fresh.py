"""Runs of train.py in processes that are as new as those a shell starts, without the seconds that imports take: forked
from a server that has imported train.py and done nothing with it."""

import contextlib
import multiprocessing
import os
import socket
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run_fresh(arguments: Sequence[str], output: Path, processes: int = 1, timeout: float = 120) -> list[int]:
    """Runs `train.main(arguments)` in `processes` new processes that form one run.

    Args:
        output: a folder; process k writes to `stdout-k` and `stderr-k` there.

    Returns:
        the exit status of each; that of a signal is negative.
    """
    workers = start_fresh(arguments, output, processes)
    for worker in workers:
        worker.join(timeout)
        if worker.is_alive():
            for each in workers:
                each.kill()
            raise TimeoutError(f"{arguments}: not done after {timeout} s")
    statuses = [worker.exitcode for worker in workers]
    assert None not in statuses
    return [status for status in statuses if status is not None]


def start_fresh(
    arguments: Sequence[str], output: Path, processes: int = 1
) -> list[multiprocessing.process.BaseProcess]:
    """Starts them and returns at once."""
    os.environ["PYTHONPATH"] = str(ROOT)  # how the server finds train.py
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["train", "torch._inductor"])  # DDP and others import that
    output.mkdir(parents=True, exist_ok=True)
    port = _free_port()
    workers: list[multiprocessing.process.BaseProcess] = []
    for rank in range(processes):
        worker = context.Process(target=_work, args=(list(arguments), output, rank, processes, port))
        worker.start()
        workers.append(worker)
    return workers


def _work(arguments: list[str], output: Path, rank: int, processes: int, port: int) -> None:
    import torch

    import train
    from training.processes import leave

    torch.set_num_threads(1)
    if processes > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(processes)}
        os.environ |= {"LOCAL_WORLD_SIZE": str(processes), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    with (
        (output / f"stdout-{rank}").open("w") as stdout,
        (output / f"stderr-{rank}").open("w") as stderr,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        leave(train.main(arguments))


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port
