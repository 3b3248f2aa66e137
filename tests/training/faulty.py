"""train.py with something broken in it: `faulty.py CONFIG.py [--key=value ...] --fault=KIND,UPDATE,RANK [--deferred]`;
RANK may be `all`; --deferred reads losses as late as on CUDA. In a test's own process, `with fault(...)`."""

import math
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from torch import Tensor

import train
from model import GPT
from training.ahead import BatchesAhead
from training.processes import leave

MESSAGE = "the disk of this test is gone"


@contextmanager
def fault(kind: str, updates: Collection[int], rank: int | None = None) -> Iterator[None]:
    """Breaks the batches of some updates.

    Args:
        kind: raise, kill (the process, by SIGKILL), sleep (a minute), nan-loss (with a gradient as it should be) or
            inf-gradient (with a loss as it should be).
        updates: whose batches.
        rank: on this process only; None: on all.
    """
    whole_batch, whole_forward = BatchesAhead.micro_batch, GPT.forward
    bad = False

    def micro_batch(batches: BatchesAhead, update: int, step: int, *draw: int) -> tuple[Tensor, Tensor]:
        nonlocal bad
        bad = not draw and update in updates and rank in (None, batches.batches.rank)
        if bad and kind == "raise":
            raise RuntimeError(MESSAGE)
        if bad and kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if bad and kind == "sleep":
            time.sleep(60)
        return whole_batch(batches, update, step, *draw)

    def forward(model: GPT, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        loss = whole_forward(model, tokens, targets)
        if bad and model.training and targets is not None:
            if kind == "nan-loss":
                loss = loss + math.nan
            if kind == "inf-gradient":
                loss.register_hook(lambda grad: grad * math.inf)
        return loss

    with mock.patch.object(BatchesAhead, "micro_batch", micro_batch), mock.patch.object(GPT, "forward", forward):
        yield


def main(arguments: list[str]) -> int:
    """As that of train.py."""
    (spec,) = (argument.removeprefix("--fault=") for argument in arguments if argument.startswith("--fault="))
    kind, update, rank = spec.split(",")
    rest = [argument for argument in arguments if not argument.startswith("--fault=") and argument != "--deferred"]
    defers = (lambda *_: True) if "--deferred" in arguments else train.defers
    with mock.patch.object(train, "defers", defers), fault(kind, {int(update)}, None if rank == "all" else int(rank)):
        return train.main(rest)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
