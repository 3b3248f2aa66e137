"""A run that goes on from one of its points, and the gradients of its loss at any weights."""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.nn import functional as F

from configs import TrainConfig
from data.batches import TrainingBatches
from data.tokens import Dataset
from model import GPT, GPTConfig
from optim import build_optimizer, learning_rate_at, load_optimizer_state, set_learning_rate
from scripts.noise.sampling import Layout
from training import RunError
from training.ahead import BatchesAhead
from training.checkpoint import CheckpointFolder, read_checkpoint
from training.passes import Passes
from training.processes import Processes
from training.weights import load_initial_weights

START = "start"


@dataclass(frozen=True)
class Point:
    """Where the path begins: a point of a run."""

    config: TrainConfig
    update: int
    """updates done"""
    checkpoint: dict[str, Any] | None
    """None at the start, and where updates have to be made first"""


def points_of(run: Path, at: list[str] | None) -> list[Point]:
    """Points of a run.

    Args:
        run: its folder, or one checkpoint (.pt).
        at: "start" or a number of updates each; None: all checkpoints that are kept.

    Raises:
        RunError: no run there, no such checkpoint, or one that cannot be read.
    """
    if run.suffix == ".pt":
        if at is not None:
            raise RunError(f"--at {' '.join(at)}: {run.absolute()} is a checkpoint already")
        return [_point(read_checkpoint(run.absolute()), run)]
    folder = CheckpointFolder(run.absolute() / "checkpoints", keep=1)
    files = folder.files()
    if not files:
        raise RunError(f"{run.absolute()} holds no run with a checkpoint")
    if at is None:
        return [_point(read_checkpoint(file), file) for file in files]
    points = []
    for which in at:
        if which != START and not (re.fullmatch(r"\d{1,12}", which) and folder.file(int(which)) in files):
            there = ", ".join(str(int(file.stem.removeprefix("iter-"))) for file in files)
            raise RunError(f"--at {which}: {run.absolute()} has {START} and checkpoints {there}")
        file = files[-1] if which == START else folder.file(int(which))
        point = _point(read_checkpoint(file), file)
        points.append(replace(point, update=0, checkpoint=None) if which == START else point)
    return points


def _point(checkpoint: dict[str, Any], file: Path) -> Point:
    try:
        config = TrainConfig(**checkpoint["config"])
    except ValidationError as error:
        key = error.errors()[0]["loc"][0]
        raise RunError(f"{file}: its config has {key}={checkpoint['config'].get(key)!r}, unknown here") from None
    return Point(config, checkpoint["iter"], checkpoint)


class Course:
    """The run: its weights after each update, with its own optimizer and batches, in float32.

    Args:
        point: where it begins; a point after the start without a checkpoint is reached from the start.
        data: of the run.
        processes: one.

    Raises:
        RunError: a run with dropout, or whose data is not `data`.
    """

    def __init__(self, point: Point, data: Dataset, processes: Processes) -> None:
        self.config = replace(point.config, dtype="float32")
        if self.config.dropout > 0:
            raise RunError(f"dropout={self.config.dropout:g}: noise is measured with dropout 0 only")
        torch.manual_seed(self.config.seed)  # as train.py does
        self.model = new_model(self.config).to(processes.device)
        try:
            self.optimizer = build_optimizer(self.model, self.config)
        except ValueError as error:
            raise RunError(str(error)) from None
        self.update = 0
        if point.checkpoint is not None:
            if point.checkpoint["data"] != data.fingerprint():
                raise RunError(f"{data.path} holds other tokens than the run was trained on; give --data the same ones")
            self.model.load_state_dict(point.checkpoint["model"])
            load_optimizer_state(self.optimizer, point.checkpoint["optimizer"])
            self.update = point.update
        elif self.config.init_from is not None:
            load_initial_weights(self.model, self.config.init_from, processes)
        batches = BatchesAhead(batches_of(self.config, data, self.config.seed), iter(()), processes.device)
        scaler = torch.amp.GradScaler(processes.device.type, enabled=False)
        self._passes = Passes(self.config, processes, self.model, self.optimizer, scaler, batches)
        while self.update < point.update:
            self.advance()

    @property
    def layout(self) -> tuple[list[str], Layout]:
        """The parameters' names, kind after kind, and what their elements are in a vector."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        found = [(p, group["name"]) for group in self.optimizer.param_groups for p in group["params"]]
        kinds, sizes = tuple(kind for _, kind in found), tuple(parameter.numel() for parameter, _ in found)
        return [names[id(parameter)] for parameter, _ in found], Layout(kinds, sizes)

    def path(self, points: int) -> list[Tensor]:
        """The weights now and after each of the next updates, as vectors in host memory.

        Raises:
            RunError: they are not finite any more.
        """
        path = [self._weights()]
        while len(path) < points:
            self.advance()
            path.append(self._weights())
        if not path[-1].isfinite().all():
            raise RunError(f"update {self.update}: the weights are not finite; the run diverges")
        return path

    def advance(self) -> None:
        """An update, as train.py makes it."""
        config, self.update = self.config, self.update + 1
        rate = config.learning_rate, config.min_lr, config.warmup_iters, config.decay_iters, config.first_lr_zero
        set_learning_rate(self.optimizer, learning_rate_at(self.update, *rate))
        self._passes.gradient(self.update)
        self.optimizer.step()
        self._passes.clear()

    def _weights(self) -> Tensor:
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        return torch.cat([parameter.detach().flatten() for parameter in parameters]).cpu()


class LossGradient:
    """The gradient of a run's loss, at any weights, on batches that its training never sees.

    Args:
        config: of the run.
        data: whose training tokens are read.
        names: parameters, in the order of their elements in a vector.
        dtype: of all arithmetic.
        seed: of the batches.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: Dataset,
        names: list[str],
        device: torch.device,
        dtype: torch.dtype,
        seed: int,
    ) -> None:
        self.multiplier, self.device, self.dtype = config.gradient_multiplier, device, dtype
        self.model = new_model(config).to(device, dtype)
        parameters = [dict(self.model.named_parameters())[name] for name in names]
        self._weights = torch.cat([parameter.detach().flatten() for parameter in parameters])
        self._gradient = torch.zeros_like(self._weights)
        start = 0
        for parameter in parameters:  # the model computes in these two vectors
            part = slice(start, start + parameter.numel())
            parameter.data = self._weights[part].view_as(parameter)
            parameter.grad = self._gradient[part].view_as(parameter)
            start = part.stop
        # A stream for each sequence, by a seed of its own.
        seeds = np.random.SeedSequence([config.seed, seed]).generate_state(2, np.uint64) >> np.uint64(1)
        self.sequences = [batches_of(config, data, int(own)) for own in seeds]

    def gradient(self, weights: Tensor, sequence: int, batch: int) -> Tensor:
        """See `sampling.Problem`."""
        batches = self.sequences[sequence]
        self._weights.copy_(weights)
        self._gradient.zero_()
        for step in range(batches.accumulation):
            inputs, targets = (part.to(self.device) for part in batches.micro_batch(batch + 1, step))
            logits = self.model(inputs)  # the model's own loss computes in float32
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
            (loss / batches.accumulation * self.multiplier).backward()
        return self._gradient.clone()


def new_model(config: TrainConfig) -> GPT:
    """The model of a run, with weights from torch's generator."""
    return GPT(GPTConfig(**{field.name: getattr(config, field.name) for field in fields(GPTConfig)}))


def batches_of(config: TrainConfig, data: Dataset, seed: int) -> TrainingBatches:
    """The batches of a run in one process, or of another seed.

    Raises:
        ConfigError: its micro-batch does not divide its batch.
    """
    return TrainingBatches(
        data.train,
        block_size=config.block_size,
        batch_size=config.batch_size,
        accumulation=config.accumulation_steps(1),
        rank=0,
        processes=1,
        seed=seed,
        vocab_size=config.vocab_size,
    )
