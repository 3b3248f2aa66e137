"""The plan of a run, and the table of all optimizers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from configs import ConfigError, TrainConfig
from optim.build import BUILDERS
from optim.kinds import METHOD_KEYS
from scripts.planning.budget import Compute, Disk, compute, disk
from scripts.planning.machines import MACHINES, Machine
from scripts.planning.memory import Memory, MemoryPlanner
from scripts.planning.states import OptimizerMemory


@dataclass(frozen=True)
class Settings:
    """What is asked beside the config."""

    gpu: str
    gpus: int = 1
    nodes: int | None = None
    utilisation: float = 0.4
    tokens_per_second: float | None = None
    margin: float = 0.1

    @property
    def machine(self) -> Machine:
        return MACHINES[self.gpu]

    @property
    def usable(self) -> int | None:
        """Bytes of a GPU that a plan may use; None: not known."""
        memory = self.machine.memory
        return None if memory is None else int(memory * (1 - self.margin))


@dataclass(frozen=True)
class Plan:
    """Of one run. Bytes, operations, hours."""

    settings: Settings
    parameters: int
    dtype: str
    accumulation: int
    memory: Memory
    """with the config's micro-batch and setting of ZeRO-1"""
    fits: bool | None
    """None: the machine's memory is not known"""
    state: int
    """of the optimizer, of all parameters"""
    state_sharded: int
    """of the process that holds most with ZeRO-1"""
    largest_batch: int | None
    largest_total: int | None
    """bytes with the largest micro-batch that fits"""
    compute: Compute
    disk: Disk
    host_copy: int
    """bytes of host memory in which the main process holds a checkpoint while it is being written"""


@dataclass(frozen=True)
class Row:
    """An optimizer in the table; of a GPU, plain and with ZeRO-1."""

    optimizer: str
    state: int = 0
    state_sharded: int = 0
    total: int = 0
    total_sharded: int = 0
    largest_batch: int | None = None
    largest_batch_sharded: int | None = None
    problem: str | None = None
    """why the config cannot have this optimizer"""


@cache
def _planner(config: TrainConfig, gpu: str, gpus: int) -> MemoryPlanner:
    return MemoryPlanner(config, MACHINES[gpu], gpus)


def make_plan(config: TrainConfig, settings: Settings) -> Plan:
    """The plan of a run.

    Raises:
        ConfigError: the config does not allow this number of GPUs, or its optimizer these settings.
    """
    machine, usable = settings.machine, settings.usable
    accumulation = config.accumulation_steps(settings.gpus)
    planner = _planner(config, settings.gpu, settings.gpus)
    plain, sharded = planner.optimizer(config, False), planner.optimizer(config, True)
    used = sharded if config.shard_optimizer else plain
    saved = planner.weights + plain.saved
    copy = 0 if machine.on_gpu else saved

    def total(batch_size: int) -> int:
        return planner.memory(batch_size, used, copy).total

    memory = planner.memory(config.batch_size, used, copy)
    largest = None if usable is None else planner.largest_batch(lambda batch: total(batch) <= usable)
    return Plan(
        settings=settings,
        parameters=planner.model.num_parameters(),
        dtype=planner.dtype,
        accumulation=accumulation,
        memory=memory,
        fits=None if usable is None else memory.total <= usable,
        state=plain.held,
        state_sharded=sharded.held,
        largest_batch=largest,
        largest_total=None if largest is None else total(largest),
        compute=compute(
            config,
            planner.model,
            machine,
            settings.gpus,
            planner.dtype,
            settings.utilisation,
            settings.tokens_per_second,
        ),
        disk=disk(config, planner.weights, plain.saved),
        host_copy=saved,
    )


def make_rows(config: TrainConfig, settings: Settings) -> Iterator[Row]:
    """A row for every optimizer, and for those that have them the exact form and the config's estimator, with the
    config's other settings; but each as it is by itself, where the config says what steps a kind of parameters."""
    for name in BUILDERS:
        plain: dict[str, Any] = {"optimizer": name, "estimator": "recursive", "exact": False}
        plain |= {} if name == config.optimizer else dict.fromkeys(METHOD_KEYS)
        yield _row(name, config, replace(config, **plain), settings)
        others: dict[str, dict[str, Any]] = {"exact": {"exact": True}}
        if config.estimator != "recursive":
            others[config.estimator] = {"estimator": config.estimator}
        for label, form in others.items():
            variant = plain | {"mars_last_grad": "full"} | form
            row = _row(f"{name}, {label}", config, replace(config, **variant), settings)
            if row.problem is None:
                yield row


def _row(label: str, config: TrainConfig, variant: TrainConfig, settings: Settings) -> Row:
    planner, usable = _planner(config, settings.gpu, settings.gpus), settings.usable
    try:
        plain, sharded = planner.optimizer(variant, False), planner.optimizer(variant, True)
    except ConfigError as problem:
        return Row(label, problem=str(problem))
    copy = 0 if settings.machine.on_gpu else planner.weights + plain.saved

    def total(optimizer: OptimizerMemory, batch_size: int = config.batch_size) -> int:
        return planner.memory(batch_size, optimizer, copy).total

    def largest(optimizer: OptimizerMemory) -> int | None:
        return None if usable is None else planner.largest_batch(lambda batch: total(optimizer, batch) <= usable)

    return Row(label, plain.held, sharded.held, total(plain), total(sharded), largest(plain), largest(sharded))
