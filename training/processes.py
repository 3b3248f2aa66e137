"""The processes of a run: torchrun's environment, the process group, and gradients averaged over it."""

from __future__ import annotations

import os
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from training.console import flush
from training.device import pick_device

TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Processes:
    """This process among those of its run. With one process nothing here communicates."""

    rank: int
    local_rank: int
    size: int
    device: torch.device

    @classmethod
    def from_environment(cls, device: str) -> Processes:
        """Reads what torchrun sets; without torchrun, one process.

        Args:
            device: auto, cpu, cuda, cuda:N or mps.

        Raises:
            RunError: a device that is not there.
        """
        local_rank, local_size = local_rank_from_environment(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            local_rank=local_rank,
            size=int(os.environ.get("WORLD_SIZE", "1")),
            device=pick_device(device, local_rank, local_size),
        )

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == 0

    @property
    def is_connected(self) -> bool:
        """Whether the process group was joined."""
        return distributed.is_initialized()

    def connect(self) -> None:
        """Joins the process group: nccl for tensors on CUDA, gloo for those in host memory, so that what hosts tell
        each other waits for no device. Waits for all processes."""
        if self.size > 1:
            on_cuda = self.device.type == "cuda"
            backends = "cpu:gloo,cuda:nccl" if on_cuda else "gloo"
            distributed.init_process_group(backends, timeout=TIMEOUT, device_id=self.device if on_cuda else None)

    def close(self) -> None:
        """Leaves the process group."""
        if self.is_connected:
            distributed.destroy_process_group()

    def wrap(self, model: nn.Module) -> nn.Module:
        """The model with gradients averaged over the processes in its last backward pass of an update."""
        if self.size == 1 or self._averages_by_hand:
            return model
        device_ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=device_ids, gradient_as_bucket_view=True)

    def accumulate(self, model: nn.Module, last: bool) -> AbstractContextManager[None]:
        """The context of a micro-batch's forward and backward pass: gradients travel with the last one only."""
        if isinstance(model, DistributedDataParallel) and not last:
            return model.no_sync()
        return nullcontext()

    def clear_gradients(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Makes room for those of the next batch. Those of DistributedDataParallel stay in its buckets: made anew, they
        would lie beside them until the last micro-batch."""
        optimizer.zero_grad(set_to_none=not isinstance(model, DistributedDataParallel))

    def average_gradients(self, model: nn.Module) -> None:
        """Averages gradients on devices that no backend of torch.distributed reaches (MPS), by way of the host."""
        if self.size == 1 or not self._averages_by_hand:
            return
        grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        flat = torch.cat([grad.flatten() for grad in grads]).cpu()
        distributed.all_reduce(flat)
        parts = flat.div_(self.size).split([grad.numel() for grad in grads])
        for grad, part in zip(grads, parts, strict=True):
            grad.copy_(part.view_as(grad))

    def sum(self, values: list[float]) -> list[float]:
        """Each value summed over the processes, in float64."""
        if self.size == 1:
            return values
        tensor = torch.tensor(values, dtype=torch.float64)
        distributed.all_reduce(tensor)
        return tensor.tolist()

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the processes of a tensor in host memory or on CUDA, where the host does not wait for it."""
        if self.size == 1:
            return values
        total = values.clone()
        distributed.all_reduce(total)
        return total / self.size

    def any(self, value: bool) -> bool:
        """Whether one process or more says yes; the same answer on all."""
        return self.sum([float(value)])[0] > 0

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank; anything that can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        distributed.all_gather_object(values, value)
        return values

    @property
    def _averages_by_hand(self) -> bool:
        return self.device.type == "mps"


def leave(status: int) -> NoReturn:
    """Ends the process with an exit status.

    One of several processes ends without Python's finalisation: gloo's threads may still hold tensors then, and abort a
    process that has done all its work (pytorch/pytorch#179291), so that torchrun calls a finished run failed.
    """
    flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(status)
    sys.exit(status)


def local_rank_from_environment() -> int:
    """This process among those of its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))
