"""Processes and devices."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import ROOT
from training import RunError
from training.device import peak_flops, pick_device, pick_dtype
from training.metrics import format_count, format_duration
from training.processes import Processes

# What a device that no backend reaches (MPS) does with its gradients; the CPU stands in for it.
BY_HAND = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import torch
from training.processes import Processes, leave
found = Processes.from_environment("cpu")
processes = Processes(found.rank, found.local_rank, found.size, torch.device("mps"))
processes.connect()
model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 2))
assert processes.wrap(model) is model
for parameter in list(model.parameters())[:-1]:
    parameter.grad = torch.full_like(parameter, 1.0 + 2 * processes.rank)
processes.average_gradients(model)
assert all((parameter.grad == 2.0).all() for parameter in list(model.parameters())[:-1])
assert list(model.parameters())[-1].grad is None
assert processes.sum([1.0, processes.rank]) == [2.0, 1.0]
assert processes.any(processes.rank == 1) and not processes.any(False)
processes.close()
print("averaged\\n", end="")
leave(0)
"""


def test_gradients_are_averaged_where_ddp_cannot(tmp_path: Path) -> None:
    script = tmp_path / "by_hand.py"
    script.write_text(BY_HAND)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run([*torchrun, str(script)], capture_output=True, text=True, timeout=120)
    assert done.stdout.count("averaged") == 2, done.stderr


def test_without_torchrun_there_is_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    processes = Processes.from_environment("cpu")
    processes.connect()
    assert (processes.rank, processes.size, processes.is_main, processes.is_connected) == (0, 1, True, False)
    assert processes.any(True)
    assert not processes.any(False)
    processes.close()


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    """With torch's answers replaced by those of other machines."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    assert pick_device("auto", 3, 4) == torch.device("cuda", 3)
    assert pick_device("cuda:2", 0, 1) == torch.device("cuda", 2)
    assert pick_device("cpu", 1, 2) == torch.device("cpu")
    with pytest.raises(RunError, match="8 processes on a host with 4 CUDA devices"):
        pick_device("auto", 0, 8)
    with pytest.raises(RunError, match="each takes its own"):
        pick_device("cuda:0", 0, 2)
    with pytest.raises(RunError, match="cuda:4"):
        pick_device("cuda:4", 0, 1)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    assert pick_device("auto", 0, 1) == torch.device("cpu")
    with pytest.raises(RunError, match="sees 0 CUDA devices"):
        pick_device("cuda", 0, 1)
    with pytest.raises(RunError, match="no MPS"):
        pick_device("mps", 0, 1)


def test_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert pick_dtype("float16", cpu) == "float16"
    for has_bfloat16, expected in ((True, "bfloat16"), (False, "float16")):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation, has=has_bfloat16: has)
        assert pick_dtype("auto", cuda) == expected
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 80GB HBM3")
    assert peak_flops(cuda, "bfloat16") == 989e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H100 PCIe")
    assert peak_flops(cuda, "bfloat16") == 756e12
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    assert peak_flops(cuda, "bfloat16") is None
    assert peak_flops(cuda, "float32") is None
    assert peak_flops(cpu, "bfloat16") is None


def test_wording_of_numbers() -> None:
    assert [format_count(n) for n in (950, 31_456, 1.23e6, 124_373_760, 49.152e9)] == [
        *("950", "31.46k", "1.23M", "124.4M", "49.15B")
    ]
    assert [format_duration(s) for s in (7, 754.4, 18_367, 3 * 86400 + 14_706)] == [
        *("0:07", "12:34", "5:06:07", "3d 4:05:06")
    ]


@pytest.mark.parametrize(("processes", "finalised"), [("1", True), ("2", False)])
def test_one_of_several_processes_ends_without_finalisation(processes: str, finalised: bool) -> None:
    """Gloo's threads abort about one in thirty processes there, after all their work is done."""
    code = "import atexit, training.processes as p; atexit.register(print, 'finalised'); print('done'); p.leave(3)"
    environment = os.environ | {"WORLD_SIZE": processes}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT, env=environment
    )
    assert (done.returncode, done.stdout.split()) == (3, ["done", "finalised"] if finalised else ["done"])
