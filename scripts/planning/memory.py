"""The memory of one process, put together from its parts, and the largest micro-batch that it has room for."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from configs import TrainConfig
from scripts.planning.machines import Machine
from scripts.planning.passes import PassCounter, new_model
from scripts.planning.states import OptimizerCounter, OptimizerMemory
from training.device import pick_dtype

FLOAT32 = 4


@dataclass(frozen=True)
class Memory:
    """Bytes of one process at the two moments that can be the highest, by what they are for."""

    backward: dict[str, int]
    step: dict[str, int]

    @property
    def total(self) -> int:
        return max(sum(self.backward.values()), sum(self.step.values()))


class MemoryPlanner:
    """Finds the memory of a config's processes.

    Args:
        config: the run; its optimizer and micro-batch are given to the methods.
        machine: what each process has to itself.
        processes: how many there are.
    """

    def __init__(self, config: TrainConfig, machine: Machine, processes: int) -> None:
        self.machine, self.processes = machine, processes
        self.total_batch_size, self.sums_gradients = config.total_batch_size, config.log_variance > 0
        self.dtype: str = config.dtype
        if config.dtype == "auto":
            self.dtype = "bfloat16" if machine.on_gpu else pick_dtype("auto", torch.device("cpu"))
        with torch.device("meta"):
            self.model = new_model(config)
        self._passes = PassCounter(config, self.dtype, machine.on_gpu, buckets=processes > 1)
        self._optimizers = OptimizerCounter(self.model, machine.on_gpu)

    @property
    def weights(self) -> int:
        """Bytes of the weights, and as many of the gradients."""
        return FLOAT32 * self.model.num_parameters()

    def optimizer(self, config: TrainConfig, sharded: bool) -> OptimizerMemory:
        """Of the process that holds most.

        Raises:
            ConfigError: settings that the optimizer does not have.
        """
        return self._optimizers.count(config, self.processes if sharded else 1)

    def memory(self, batch_size: int, optimizer: OptimizerMemory, checkpoint_copy: int = 0) -> Memory:
        """With micro-batches of `batch_size` sequences.

        Args:
            checkpoint_copy: bytes of a checkpoint on its way to the disk in the same memory (a CPU's).
        """
        accumulation = self.total_batch_size // (batch_size * self.processes)
        buckets = self.weights if self.processes > 1 else 0
        passes = self._passes.count(batch_size, accumulation).peak
        common = {"weights": self.weights, "optimizer state": optimizer.held, "buckets": buckets}
        common |= {"sum of gradients": self.weights} if self.sums_gradients else {}
        common |= {"checkpoint copy": checkpoint_copy, "overhead": self.machine.overhead}
        # Where an evaluation is due, the step is measured against a copy of the weights before it.
        step = {"gradients": self.weights - buckets, "optimizer temporaries": optimizer.temporaries}
        step |= {"copy of the weights": self.weights}
        return Memory(common | passes, common | step)

    def largest_batch(self, fits: Callable[[int], bool]) -> int | None:
        """The largest micro-batch that fits and divides a process's share of the update; None where not even one
        sequence fits."""
        share = self.total_batch_size // self.processes
        small = [number for number in range(1, math.isqrt(share) + 1) if share % number == 0]
        candidates = sorted({*small, *(share // number for number in small)})
        low, high = 0, len(candidates)  # candidates before `low` fit, those from `high` on do not
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if fits(candidates[middle]) else (low, middle)
        return candidates[low - 1] if low else None
