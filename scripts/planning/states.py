"""What an optimizer holds in memory, and what it needs for a moment while it steps.

The optimizers themselves are asked: each takes two steps (with the further gradients that its estimator needs) on
parameters of the meta device, which have shapes and no memory. Kernels that are fused on the real device, torch's own
and the compiled ones of MARS, need no room for what comes between, so it is not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.optim import Optimizer

from configs import ConfigError, TrainConfig
from model import GPT
from optim import (
    MARS,
    build_optimizer,
    record_reference_gradient,
    record_snapshot_gradient,
    snapshot_weights,
    take_snapshot,
)
from optim.build import optimizer_bytes
from optim.orthogonal import BATCH
from optim.runner import MANY, Runner
from optim.sharded import ShardedOptimizer
from scripts.planning.ledger import Ledger

STEPS = 2  # after the second one every tensor of a state is there


@dataclass(frozen=True)
class OptimizerMemory:
    """Bytes in one process, the largest of all."""

    held: int
    """between steps"""
    saved: int
    """of `held`, what a checkpoint keeps: without the room for the next reference"""
    temporaries: int
    """during a step, beside `held`"""


class OptimizerCounter:
    """Counts what the optimizers of a model hold.

    Args:
        model: on the meta device; its gradients are set and cleared.
        on_gpu: whether the real device is CUDA, else a CPU.
    """

    def __init__(self, model: GPT, on_gpu: bool) -> None:
        self.model, self.on_gpu = model, on_gpu
        self._parameters: list[Tensor] = list(model.parameters())
        self._grads = {parameter: torch.empty_like(parameter) for parameter in self._parameters}

    def count(self, config: TrainConfig, shares: int = 1) -> OptimizerMemory:
        """Of the process that holds most, where `shares` of them divide the parameters (ZeRO-1).

        Raises:
            ConfigError: settings that the optimizer does not have.
        """
        found = [self._count(config, owned) for owned in self._shares(config, shares)]
        return OptimizerMemory(*(max(getattr(one, name) for one in found) for name in ("held", "saved", "temporaries")))

    def _shares(self, config: TrainConfig, shares: int) -> Iterator[list[Tensor]]:
        """The parameters of each process, as `ShardedOptimizer` deals them out; one of those that get tensors of the
        same groups and shapes."""
        if shares == 1:
            yield self._parameters
            return
        alone: dict[str, Any] = {"get_rank": lambda group=None: 0, "get_world_size": lambda group=None: shares}
        with patch.multiple(distributed, **alone):  # it asks for nothing else until it steps
            sharded = ShardedOptimizer(self._build(config))
            owners = sharded.owners()
        groups = {parameter: index for index, group in enumerate(sharded.param_groups) for parameter in group["params"]}
        seen = set()
        for rank in range(shares):
            owned = [parameter for parameter, owner in owners if owner == rank]
            shapes = frozenset(Counter((groups[parameter], parameter.shape) for parameter in owned).items())
            if owned and shapes not in seen:
                seen.add(shapes)
                yield owned

    def _count(self, config: TrainConfig, owned: list[Tensor]) -> OptimizerMemory:
        optimizer, ledger = self._build(config), Ledger()
        # An optimizer over a weight on a CPU tells whether torch's kernels are fused; they are on CUDA as well.
        fused = bool(build_optimizer(nn.Linear(1, 1), config).param_groups[0].get("fused"))
        for _ in range(STEPS):
            ledger = Ledger()
            with ledger, self._kernels(config, ledger), ledger.paused() if fused else nullcontext():
                self._step(optimizer, config, owned)
        held = optimizer_bytes(optimizer)
        spare = optimizer.spare_bytes if isinstance(optimizer, MARS) else 0
        return OptimizerMemory(held, held - spare, ledger.peak)

    def _step(self, optimizer: Optimizer, config: TrainConfig, owned: list[Tensor]) -> None:
        for parameter in owned:
            parameter.grad = self._grads[parameter]
        if config.estimator == "svrg":
            take_snapshot(optimizer)
            record_snapshot_gradient(optimizer)
            with snapshot_weights(optimizer):
                pass
        if config.exact or config.estimator == "svrg":
            record_reference_gradient(optimizer)
        optimizer.step()
        for parameter in owned:
            parameter.grad = None

    def _build(self, config: TrainConfig) -> Optimizer:
        try:
            optimizer = build_optimizer(self.model, replace(config, compile_optimizer=False))
        except ValueError as error:
            raise ConfigError(str(error)) from None
        for group in optimizer.param_groups:
            if self.on_gpu and group.get("foreach", False) is None:
                group["foreach"] = True  # what torch makes of None on CUDA
        return optimizer

    @contextmanager
    def _kernels(self, config: TrainConfig, ledger: Ledger) -> Iterator[None]:
        """MARS on meta tensors works as it does on the real device."""
        compiles = config.compile_optimizer
        if compiles == "auto":  # as Runner.decide, which would see meta tensors
            compiles = self.on_gpu or sum(parameter.numel() for parameter in self._parameters) >= MANY
        seen = {"update": Runner.update, "reduce": Runner.reduce}
        # On a CPU eager kernels work on pieces, whose temporaries are small.
        hidden = compiles or not self.on_gpu
        kernels: dict[str, Any] = {name: ledger.unseen(run) if hidden else run for name, run in seen.items()}
        with patch.multiple(Runner, **kernels), patch.dict(BATCH, meta=BATCH["cuda" if self.on_gpu else "cpu"]):
            yield
