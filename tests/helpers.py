"""What tests of several rooms use."""

from pathlib import Path
from typing import Any

import numpy as np


def write_tokens(folder: Path, train: Any, val: Any) -> Path:
    """A nanoGPT data set."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(train, dtype="<u2").tofile(folder / "train.bin")
    np.asarray(val, dtype="<u2").tofile(folder / "val.bin")
    return folder
