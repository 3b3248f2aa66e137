"""What the numbers of a benchmark were measured on."""

from __future__ import annotations

import os

import torch

from training.device import device_name


def machine(device: str) -> str:
    """Processor, cores, torch and threads."""
    name = device_name(torch.device(device, 0) if device == "cuda" else torch.device("cpu"))
    return f"{name}, {os.cpu_count()} cores, torch {torch.__version__}, {torch.get_num_threads()} threads"
