"""Devices and the numbers they compute in."""

from __future__ import annotations

import ctypes
import os
import platform
import re
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from configs import TrainConfig
from training import RunError

Dtype = Literal["auto", "float32", "bfloat16", "float16"]
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h

# Dense bfloat16/float16 tensor-core rates with float32 accumulation, from NVIDIA's data sheets, in operations a second.
# The first name that is part of the device's name counts.
PEAK_FLOPS = {"B200": 2250e12, "H200": 989e12, "H100 PCIe": 756e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12}


def pick_device(name: str, local_rank: int, local_size: int) -> torch.device:
    """The device of a process.

    Args:
        name: auto, cpu, cuda, cuda:N or mps.
        local_rank, local_size: this process and their number on this host.

    Raises:
        RunError: a device that is not there, or of another kind.
    """
    if not re.fullmatch(r"auto|cpu|mps|cuda(:\d{1,3})?", name):
        raise RunError(f"--device={name}: allowed are auto, cpu, cuda, cuda:N and mps")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(name)
    if device.type == "mps" and not torch.backends.mps.is_available():
        raise RunError("--device=mps: torch sees no MPS device here; --device can be cpu or auto")
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if not torch.cuda.is_available() or (device.index or 0) >= count:
        raise RunError(f"--device={name}: torch {torch.__version__} sees {count} CUDA devices here; cpu works anywhere")
    if local_size > count:
        raise RunError(f"{local_size} processes on a host with {count} CUDA devices; use --nproc_per_node={count}")
    if local_size > 1 and device.index is not None:
        raise RunError(f"--device={name} with {local_size} processes: use --device=cuda, each takes its own")
    device = torch.device("cuda", local_rank if device.index is None else device.index)
    torch.cuda.set_device(device)
    return device


def pick_dtype(name: Dtype, device: torch.device) -> Dtype:
    """The numbers of the forward and backward pass: `name`, or for auto what suits the device."""
    if name != "auto":
        return name
    if device.type == "cuda":
        return "bfloat16" if torch.cuda.is_bf16_supported(including_emulation=False) else "float16"
    return "bfloat16" if device.type == "cpu" and cpu_has_bfloat16() else "float32"


def cpu_has_bfloat16() -> bool:
    """Whether the CPU multiplies matrices of bfloat16 by instructions of its own (AVX-512 BF16, AMX); elsewhere torch
    computes them in float32 in small parts, slower than float32 itself."""
    return torch.backends.mkldnn.is_available() and torch.cpu._is_avx512_bf16_supported()


def resolve(config: TrainConfig, device: torch.device) -> TrainConfig:
    """The config with every `auto` replaced by what it stands for on a device."""
    return replace(
        config,
        device=device.type,
        dtype=pick_dtype(config.dtype, device),
        compile=device.type == "cuda" if config.compile == "auto" else config.compile,
        chunked_loss=device.type == "cpu" if config.chunked_loss == "auto" else config.chunked_loss,
    )


def keep_freed_memory() -> None:
    """Has the C library keep the memory of freed tensors for the next ones, as CUDA's allocator does. glibc gives large
    blocks back to the system, and takes as long to get them again, page by page, as to compute what is in them.

    Does nothing where the C library is another one, or the environment says how it is to allocate.
    """
    if any(name.startswith(("MALLOC_", "GLIBC_TUNABLES", "LD_PRELOAD")) for name in os.environ):
        return
    with suppress(AttributeError, OSError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 2**31 - 1)


def set_determinism(wanted: bool) -> None:
    """Has torch, cuBLAS and the compiler choose the same algorithms each time, or lets them choose freely. To be called
    before the device computes anything."""
    if wanted != torch.are_deterministic_algorithms_enabled():  # setting it imports the compiler
        torch.use_deterministic_algorithms(wanted)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # a debugging aid
    if wanted:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        os.environ.setdefault("TORCHINDUCTOR_DETERMINISTIC", "1")


def autocast(device: torch.device, dtype: str) -> AbstractContextManager[None]:
    """The context of the forward pass."""
    return torch.autocast(device.type, DTYPES[dtype], enabled=dtype != "float32")


def to_device(tensor: Tensor, device: torch.device) -> Tensor:
    """A tensor of the host on the device. Only copies to CUDA run beside what follows, from memory pinned for them:
    elsewhere a copy that has not ended could read memory that is in use again."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def synchronize(device: torch.device) -> None:
    """Waits until the device has done all that it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def device_name(device: torch.device) -> str:
    """The device as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu" and (cpuinfo := Path("/proc/cpuinfo")).exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        if names:
            return names[0]
    return platform.processor() or platform.machine()


def peak_flops(device: torch.device, dtype: str) -> float | None:
    """Floating-point operations a second that the device could reach; None where that is not known."""
    if device.type != "cuda" or dtype == "float32":
        return None
    name = torch.cuda.get_device_name(device)
    return next((flops for key, flops in PEAK_FLOPS.items() if key in name), None)
