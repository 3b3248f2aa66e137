"""Two ways of making the same updates of a GPT, each in a process of its own, since the allocator is a process's.

The plain way is that of a first reading of nanoGPT on the device: float32, no compiler, attention matrices and logits
written out, AdamW not fused. The other one is what `train.py` does with the settings that `auto` stands for.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from itertools import count, pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

import model
from configs import TrainConfig
from data.batches import TrainingBatches
from data.tokens import TokenStream
from model import GPT, GPTConfig
from optim import build_optimizer, clip_gradients, learning_rate_at, set_learning_rate
from training.ahead import BatchesAhead
from training.device import autocast, keep_freed_memory, peak_flops, resolve, synchronize, to_device
from training.environment import DEFAULTS, set_defaults
from training.processes import Processes

PARTS = ("data", "forward", "backward", "sync", "clipping", "optimizer", "logging")
"""of an update. `sync`: what several processes wait for gradients of the others, once all of theirs are on their way"""


@dataclass(frozen=True)
class Way:
    """How updates are made."""

    name: str
    plain: bool
    settings: dict[str, Any]
    """keys of the config, over those of the benchmark"""
    clip: Callable[..., Tensor]
    """clips the gradients to a norm, which it gives"""


PLAIN = Way("plain", True, {"dtype": "float32", "compile": False, "chunked_loss": False}, clip=nn.utils.clip_grad_norm_)
OURS = Way("ours", False, {}, clip=clip_gradients)
OURS_FLOAT32 = Way("ours, float32", False, {"dtype": "float32"}, clip=nn.utils.clip_grad_norm_)
"""Clips as the plain way does: torch's norm of 19M elements in float32 may be off by a thousandth, and what is to be
seen is the model's arithmetic."""


@dataclass
class Seat:
    """A process's place among those that make updates together."""

    rank: int = 0
    processes: int = 1
    meeting: Path | None = None
    """a file that is not there yet, through which they find each other; for several"""


@dataclass
class Updates:
    """What a number of updates took, and what they gave."""

    seconds: list[dict[str, float]]
    """of each update, by part"""
    losses: list[float]


@dataclass(frozen=True)
class Setting:
    """What a way was resolved to, and what it costs."""

    config: dict[str, Any]
    parameters: int
    flops_per_token: int
    peak_flops: float | None
    first_update: float
    """seconds of the first update, compilation included"""


class Trainer:
    """A model that is trained in one of the ways.

    Args:
        way: how.
        config: the benchmark's.
        tokens: a file of training tokens.
        seat: its place among the processes that make updates together; several are for a CPU.
    """

    def __init__(self, way: Way, config: TrainConfig, tokens: Path, seat: Seat) -> None:
        self.plain, self.clip = way.plain, way.clip
        self.device = torch.device("cuda", 0) if config.device == "cuda" else torch.device("cpu")
        self.config = resolve(replace(config, **way.settings), self.device)
        if self.device.type == "cpu" and not way.plain:
            keep_freed_memory()
        if self.device.type == "cuda" and self.config.dtype != "float32":
            torch.set_float32_matmul_precision("high")
        self._before = resident("VmRSS") if self.device.type == "cpu" else 0
        torch.manual_seed(config.seed)
        sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
        self.model = GPT(GPTConfig(**sizes), bool(self.config.chunked_loss)).to(self.device)
        if self.config.compile:
            self.model.compile()
        self.processes = Processes(seat.rank, seat.rank, seat.processes, self.device)
        self.parallel = self.model if seat.processes == 1 else self._join(seat)
        self.optimizer: torch.optim.Optimizer = build_optimizer(self.model, self.config)
        if way.plain:
            groups = [{**group, "fused": False, "foreach": False} for group in self.optimizer.param_groups]
            self.optimizer = AdamW(groups)
        batches = TrainingBatches(
            TokenStream([tokens]),
            block_size=config.block_size,
            batch_size=config.batch_size,
            accumulation=1,
            rank=seat.rank,
            processes=seat.processes,
            seed=config.seed,
            vocab_size=config.vocab_size,
        )
        # Ours are made by a thread, as train.py has it, which goes on until the process ends.
        ahead = BatchesAhead(batches, ((update, 0) for update in count(1)), self.device)
        self.batches = batches if way.plain else ahead.__enter__()
        self.update = 0
        self.first_update = sum(self.run(1).seconds[0].values())

    def _join(self, seat: Seat) -> nn.Module:
        """The model with gradients averaged over the processes: as DistributedDataParallel does by itself, or as
        `train.py` has it."""
        distributed.init_process_group(
            "gloo", init_method=f"file://{seat.meeting}", rank=seat.rank, world_size=seat.processes
        )
        parallel = DistributedDataParallel(self.model) if self.plain else self.processes.wrap(self.model)
        assert isinstance(parallel, DistributedDataParallel)
        parallel.register_comm_hook(None, lambda _, bucket: self._send(bucket))
        return parallel

    def _send(self, bucket: distributed.GradBucket) -> torch.futures.Future[Tensor]:
        """Sends a bucket of gradients, and keeps the time: in the end the last one's."""
        self.sent = self._now()
        assert distributed.group.WORLD is not None
        return allreduce_hook(distributed.group.WORLD, bucket)

    def run(self, updates: int) -> Updates:
        """Makes the next updates."""
        with explicit_attention() if self.plain else nullcontext():
            made = [self._update() for _ in range(updates)]
        return Updates([seconds for seconds, _ in made], [loss for _, loss in made])

    def setting(self) -> Setting:
        return Setting(
            config=asdict(self.config),
            parameters=self.model.num_parameters(),
            flops_per_token=self.model.flops_per_token(),
            peak_flops=peak_flops(self.device, self.config.dtype),
            first_update=self.first_update,
        )

    def peak_memory(self) -> int:
        """Bytes: on CUDA of tensors; on a CPU of the process, above what it held before there was a model. Counts from
        the last call on."""
        if self.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            return peak
        peak = resident("VmHWM") - self._before
        Path("/proc/self/clear_refs").write_text("5")
        return peak

    def _update(self) -> tuple[dict[str, float], float]:
        self.update += 1
        stamps = [self._now()]
        inputs, targets = (to_device(part, self.device) for part in self.batches.micro_batch(self.update, 0))
        stamps.append(self._now())
        with autocast(self.device, self.config.dtype):
            loss = self.parallel(inputs, targets)
        stamps.append(self._now())
        self.sent = math.inf
        loss.backward()
        end = self._now()
        stamps += [min(self.sent, end), end]
        norm = self.clip(self.model.parameters(), self.config.grad_clip)
        stamps.append(self._now())
        config = self.config
        rate = learning_rate_at(self.update, config.learning_rate, config.min_lr, config.warmup_iters, config.max_iters)
        set_learning_rate(self.optimizer, rate)
        self.optimizer.step()
        if self.plain:
            self.optimizer.zero_grad(set_to_none=True)
        else:
            self.processes.clear_gradients(self.parallel, self.optimizer)
        stamps.append(self._now())
        printed = torch.stack([loss.detach(), norm])
        if self.processes.size > 1:
            distributed.all_reduce(printed)
        value, _ = (printed / self.processes.size).tolist()
        stamps.append(self._now())
        return {part: end - start for part, (start, end) in zip(PARTS, pairwise(stamps), strict=True)}, value

    def _now(self) -> float:
        synchronize(self.device)
        return time.perf_counter()


@contextmanager
def explicit_attention() -> Iterator[None]:
    """Attention with its matrices in memory."""

    def attend(query: Tensor, key: Tensor, value: Tensor, scale: float, dropout: float) -> Tensor:
        scores = query @ key.transpose(-1, -2) * scale
        past = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
        weights = scores.masked_fill(~past, -torch.inf).softmax(dim=-1)
        return nn.functional.dropout(weights, dropout) @ value

    with patch.object(model, "attend", attend):
        yield


def serve(way: Way, config: TrainConfig, tokens: Path, seat: Seat, threads: int | None, connection: Any) -> None:
    """A process that trains in one way: takes the names and arguments of `Trainer`'s methods, gives their results."""
    if threads is not None:
        torch.set_num_threads(threads)
    try:
        trainer = Trainer(way, config, tokens, seat)
        connection.send(None)
        while (request := connection.recv()) is not None:
            name, arguments = request
            method: Callable[..., Any] = getattr(trainer, name)
            connection.send(method(*arguments))
    except Exception as error:
        connection.send(error)
        raise


def resident(key: str) -> int:
    """VmRSS or VmHWM of this process, in bytes; 0 where /proc does not say."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:")), 0)


@contextmanager
def environment_of(way: Way) -> Iterator[None]:
    """For a process that is started meanwhile: what `train.py` sets before torch is loaded, or nothing of it."""
    with patch.dict(os.environ):
        for name in DEFAULTS if way.plain else ():
            os.environ.pop(name, None)
        if not way.plain:
            set_defaults()
        yield
