"""The machine that the figures are of."""

from __future__ import annotations

import os
import platform
import subprocess
from typing import Any

import torch

from training.device import device_name


def gpu_is_there() -> bool:
    return torch.cuda.is_available()


def machine(device: str) -> dict[str, Any]:
    """GPU, driver and versions, or on a CPU its name. None where something is not there."""
    has_gpu = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if has_gpu else None
    return {
        "name": device_name(torch.device("cuda", 0) if has_gpu else torch.device("cpu")),
        "memory": properties.total_memory if properties else None,
        "capability": f"{properties.major}.{properties.minor}" if properties else None,
        "driver": _driver() if has_gpu else None,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if has_gpu else None,
        "triton": _triton(),
        "python": platform.python_version(),
        "cores": os.cpu_count(),
    }


def _driver() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def _triton() -> str | None:
    try:
        import triton
    except ImportError:
        return None
    return str(triton.__version__)
