"""What tests of several rooms use."""

import re
from pathlib import Path
from typing import Any

import numpy as np


def write_tokens(folder: Path, train: Any, val: Any) -> Path:
    """A nanoGPT data set."""
    folder.mkdir(parents=True, exist_ok=True)
    np.asarray(train, dtype="<u2").tofile(folder / "train.bin")
    np.asarray(val, dtype="<u2").tofile(folder / "val.bin")
    return folder


def case_name(case: object) -> str:
    """A case as text that is the same in every process: functions without their addresses."""
    return re.sub(r" at 0x\w+", "", str(case))
