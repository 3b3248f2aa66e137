"""Trains a small GPT on real text, by MARS and by a member's own implementation, each on its own gradients."""

from __future__ import annotations

import argparse
import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import AdamW, Optimizer

from model import GPT, GPTConfig
from optim import MARS, preconditioner
from scripts.unified.family import ADAMW, PLAIN, Member, Rule
from scripts.unified.references import Seen, State

SHAPE = GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=32, vocab_size=256)
BATCH, DATA = 8, 8  # windows of a batch, batches of the data
SNAPSHOT_INTERVAL = 4  # updates, of SVRG

Batch = tuple[Tensor, Tensor]
"""inputs and targets, each (BATCH, block_size)"""


@dataclass(frozen=True)
class Comparison:
    """How far apart two implementations come on the same batches."""

    difference: float
    """largest, over all weights and updates"""
    change: float
    """largest of a weight from its start, by the member's own implementation"""
    rounding: float
    """as `difference`, of its own implementation to itself from weights whose last bits were changed"""
    losses: tuple[float, float]
    """of the first and of the last update, by MARS"""

    @property
    def relative(self) -> float:
        return self.difference / self.change


def compare(member: Member, updates: int, dtype: torch.dtype, seed: int = 1) -> Comparison:
    """Trains by MARS, by the member's own implementation, and by that from weights that differ in their last bits."""
    model, batches = small_gpt(dtype, seed), text_batches(updates + 1, seed)
    start, own, nudged = weights(model), copy.deepcopy(model), with_last_bits_changed(model, seed)
    losses, apart = [], []
    with nullcontext() if member.bfloat16 else orthogonalising_in(dtype):
        for loss, _, _ in zip(
            by_mars(model, member, batches),
            by_its_own(own, member, batches),
            by_its_own(nudged, member, batches),
            strict=True,
        ):
            losses.append(loss)
            apart.append([distance(weights(own), others) for others in (weights(model), start, weights(nudged))])
    difference, change, rounding = torch.tensor(apart, dtype=torch.float64).amax(dim=0).tolist()
    return Comparison(difference, change, rounding, (losses[0], losses[-1]))


def orthogonalising_in(dtype: torch.dtype) -> AbstractContextManager[Any]:
    """MARS meanwhile orthogonalises matrices in this dtype, and not in the one that is fast."""
    return patch.object(preconditioner, "iteration_dtype", lambda device: dtype)


def small_gpt(dtype: torch.dtype, seed: int) -> GPT:
    torch.manual_seed(seed)
    return GPT(SHAPE).to(dtype)


def text_batches(count: int, seed: int) -> list[Batch]:
    """The data, windows of the source of a module of Python's with its bytes as tokens, batch after batch, and over
    again."""
    text = torch.frombuffer(bytearray(Path(argparse.__file__).read_bytes()), dtype=torch.uint8).long()
    generator = torch.Generator().manual_seed(seed)
    length = SHAPE.block_size
    starts = torch.randint(len(text) - length, (DATA, BATCH, 1), generator=generator)
    data = [(text[places], text[places + 1]) for places in starts + torch.arange(length)]
    return [data[number % DATA] for number in range(count)]


def parts(model: GPT, member: Member) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The parameters that the member steps, and those that are left to AdamW."""
    hidden = {id(parameter) for parameter in model.transformer.h.parameters() if parameter.dim() == 2}
    mine = [parameter for parameter in model.parameters() if not member.matrices or id(parameter) in hidden]
    return mine, [parameter for parameter in model.parameters() if member.matrices and id(parameter) not in hidden]


def weights(model: nn.Module) -> list[Tensor]:
    """Copies of all parameters."""
    return [parameter.detach().clone() for parameter in model.parameters()]


def distance(some: list[Tensor], others: list[Tensor]) -> float:
    """The largest difference of two weights; NaN where there is one."""
    return torch.stack([(a - b).abs().max() for a, b in zip(some, others, strict=True)]).max().item()


def with_last_bits_changed(model: GPT, seed: int) -> GPT:
    """A copy whose weights are larger or smaller by a relative 4 eps of their dtype, a few roundings."""
    nudged, generator = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for x in nudged.parameters():
            signs = torch.randint(2, x.shape, generator=generator) * 2 - 1
            x.mul_(1 + 4 * torch.finfo(x.dtype).eps * signs.to(x.dtype))
    return nudged


def backward(model: GPT, batch: Batch) -> float:
    """Puts the gradients of the mean cross-entropy in their places, and gives that; all in the model's dtype."""
    inputs, targets = batch
    model.zero_grad(set_to_none=True)
    loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
    loss.backward()
    return loss.item()


def by_mars(model: GPT, member: Member, batches: list[Batch]) -> Iterator[float]:
    """Makes an update on each batch but the last, and yields its loss."""
    mine, others = parts(model, member)
    groups = [{"params": mine}] + ([{"params": others, "preconditioner": "adamw"} | PLAIN | ADAMW] if others else [])
    optimizer = MARS(groups, **member.settings)
    for t, (batch, following) in enumerate(pairwise(batches)):
        if member.settings.get("exact"):
            backward(model, following)
            optimizer.record_reference_gradient()
        if member.settings.get("estimator") == "svrg":
            if t % SNAPSHOT_INTERVAL == 0:
                optimizer.take_snapshot()
                for each in batches[:DATA]:
                    backward(model, each)
                    optimizer.record_snapshot_gradient()
            with optimizer.snapshot_weights():
                backward(model, batch)
            optimizer.record_reference_gradient()
        loss = backward(model, batch)
        optimizer.step()
        yield loss


def by_its_own(model: GPT, member: Member, batches: list[Batch]) -> Iterator[float]:
    """The same by the member's own implementation."""
    mine, others = parts(model, member)
    adamw = AdamW(others, **ADAMW) if others else None
    if isinstance(member.own, Rule):
        losses = by_rule(model, mine, member.own, batches)
    else:
        losses = by_optimizer(model, mine, member.own, batches)
    for loss in losses:
        if adamw is not None:
            adamw.step()
        yield loss


def by_optimizer(
    model: GPT, mine: list[nn.Parameter], own: Callable[..., Optimizer], batches: list[Batch]
) -> Iterator[float]:
    """Steps some parameters by an optimizer of torch; the gradients of the last batch are those of all."""
    optimizer = own(mine)
    for batch in batches[:-1]:
        loss = backward(model, batch)
        optimizer.step()
        yield loss


def by_rule(model: GPT, mine: list[nn.Parameter], rule: Rule, batches: list[Batch]) -> Iterator[float]:
    """The same by a rule. A second gradient is taken at old weights, as the papers say, so these are kept."""
    states: list[State] = [{} for _ in mine]
    old, references, mean = weights(model), None, None
    for t, batch in enumerate(batches[:-1]):
        now = weights(model)
        if rule.second == "snapshot" and t % SNAPSHOT_INTERVAL == 0:
            old, mean = now, mean_gradients_at(model, now, batches[:DATA], mine)
        if rule.second:
            references = gradients_at(model, old, batch, mine)[1]
        loss, gradients = gradients_at(model, now, batch, mine)
        columns = [parameter.detach() for parameter in mine], gradients, references or gradients, mean or gradients
        seen = [Seen(t + 1, *tensors) for tensors in zip(*columns, strict=True)]
        results = [rule.step(each, state) for each, state in zip(seen, states, strict=True)]
        put(mine, [x for x, _ in results])
        states = [state for _, state in results]
        if rule.second != "snapshot":
            old, references = now, gradients
        yield loss


def mean_gradients_at(model: GPT, values: list[Tensor], batches: list[Batch], mine: list[nn.Parameter]) -> list[Tensor]:
    """The means of some gradients over batches with these weights."""
    columns = zip(*(gradients_at(model, values, batch, mine)[1] for batch in batches), strict=True)
    return [torch.stack(column).mean(dim=0) for column in columns]


def gradients_at(
    model: GPT, values: list[Tensor], batch: Batch, mine: list[nn.Parameter]
) -> tuple[float, list[Tensor]]:
    """The loss and some gradients with these weights, which are then the model's."""
    put(model.parameters(), values)
    return backward(model, batch), [parameter.grad for parameter in mine if parameter.grad is not None]


@torch.no_grad()
def put(parameters: Iterable[Tensor], values: list[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)
