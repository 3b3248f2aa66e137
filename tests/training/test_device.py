"""What `auto` stands for on a CPU, and how memory is kept there."""

import ctypes
import os
import subprocess
import sys
from typing import Any
from unittest.mock import patch

import pytest
import torch

from configs import TrainConfig
from tests.conftest import ROOT, Train
from training import device
from training.device import keep_freed_memory, pick_dtype, resolve

CPU = torch.device("cpu")


@pytest.mark.parametrize(("instructions", "dtype"), [(True, "bfloat16"), (False, "float32")])
def test_auto_is_bfloat16_only_where_the_cpu_computes_in_it(instructions: bool, dtype: str) -> None:
    with patch.object(torch.cpu, "_is_avx512_bf16_supported", return_value=instructions):
        assert pick_dtype("auto", CPU) == dtype
        assert pick_dtype("float32", CPU) == "float32"
        resolved = resolve(TrainConfig(), CPU)
    assert (resolved.dtype, resolved.compile, resolved.chunked_loss) == (dtype, False, True)


def test_without_onednn_auto_is_float32() -> None:
    with patch.object(torch.backends.mkldnn, "is_available", return_value=False):
        assert pick_dtype("auto", CPU) == "float32"


def test_what_is_said_is_kept() -> None:
    resolved = resolve(TrainConfig(dtype="bfloat16", chunked_loss=False, compile=True), CPU)
    assert (resolved.dtype, resolved.compile, resolved.chunked_loss) == ("bfloat16", True, False)


def test_a_run_in_bfloat16_learns_as_one_in_float32_does(run_train: Train) -> None:
    runs = [run_train(f"--dtype={dtype}", "--max_iters=40", out=dtype) for dtype in ("float32", "bfloat16")]
    first, second = (run.series("train/loss") for run in runs)
    assert first != second
    assert first == pytest.approx(second, abs=0.03)


FAULTS = """
import resource, sys
sys.path.insert(0, {root!r})
import torch
from training.device import keep_freed_memory
if {keep}:
    keep_freed_memory()
def fill():
    for _ in range(20):
        torch.ones(4_000_000)  # 16 MB
fill()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
fill()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


def faults(keep: bool, **environment: str) -> int:
    """Pages of memory that the system had to give for tensors as large as those freed before them."""
    program = FAULTS.format(root=str(ROOT), keep=keep)
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "THP_"))}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=plain | environment)
    return int(done.stdout)


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallopt"), reason="the C library has no mallopt")
def test_memory_of_freed_tensors_is_used_again() -> None:
    usual = faults(keep=False, MALLOC_MMAP_THRESHOLD_="65536")
    assert usual > 10_000
    assert faults(keep=True) < usual / 10
    assert faults(keep=True, MALLOC_MMAP_THRESHOLD_="65536") > usual / 2, "the environment has the last word"


def test_a_c_library_without_mallopt_is_left_alone() -> None:
    class Nothing:
        def __init__(self, *_: Any) -> None: ...

    with patch.object(device.ctypes, "CDLL", Nothing):
        keep_freed_memory()
