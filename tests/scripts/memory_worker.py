"""Runs train.py in this process and prints, as its last line, the bytes by which the run raised the peak of resident
memory above what a tiny run before it had left: `python tests/scripts/memory_worker.py TRAIN_ARGUMENTS`.

The tiny run, of one process, imports all that training imports, late, and lets libraries set up what they keep.
Checkpoints are not
written: their copy in host memory is no part of an update.
"""

import gc
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import train
from training.checkpoint import CheckpointFolder

TINY = {"n_layer": 1, "n_head": 2, "n_embd": 32, "vocab_size": 64, "block_size": 64}
TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")


def memory(key: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def main(arguments: list[str]) -> int:
    CheckpointFolder.save = lambda self, checkpoint: None  # type: ignore[method-assign]
    out_dir = next(argument for argument in arguments if argument.startswith("--out_dir="))
    tiny = [f"--{key}={value}" for key, value in TINY.items()]
    shared = {name: os.environ.pop(name) for name in TORCHRUN if name in os.environ}
    if status := train.main([*arguments, *tiny, f"{out_dir}-tiny-{shared.get('RANK', '0')}"]):
        return status
    os.environ.update(shared)
    gc.collect()
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    status = train.main(arguments)
    print(memory("VmHWM") - before, flush=True)
    return status


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)
