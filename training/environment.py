"""What torch and its libraries read from the environment when they are loaded. To be set before torch is imported."""

from __future__ import annotations

import os

DEFAULTS = {
    # On a CPU, a thread that waits for the others spins before it sleeps: by OpenMP's default so long that a run slows
    # tenfold when another program uses one of the cores.
    "GOMP_SPINCOUNT": "5000",
    # Large tensors of a CPU in pages of 2 MB, which take less time to get.
    "THP_MEM_ALLOC_ENABLE": "1",
}


def set_defaults() -> None:
    """Sets those that the environment does not say itself."""
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
