"""Replicates: the same path again and again, each time with fresh batches; and the sums that are kept of them.

A gradient has as many elements as the model, so that those of all batches cannot be kept. Kept are, of the few vectors
of a replicate (see `estimates.py`), their sum over the replicates of a group, from which means follow, and the products
with each other within a replicate, which are numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from scripts.noise.estimates import Gradients, Settings, Streams

ESTIMATES, SNAPSHOTS = 0, 1  # sequences of batches
MOST_GROUPS = 8
AT_ONCE = 1 << 16  # elements of vectors that are multiplied in float64 at a time


class Problem(Protocol):
    """Something that has gradients."""

    def gradient(self, weights: Tensor, sequence: int, batch: int) -> Tensor:
        """At weights (size,), on a batch of one of the sequences, from 0; the caller may keep it."""


@dataclass(frozen=True)
class Layout:
    """Which elements of a vector are what: tensors one after another, those of a kind side by side."""

    kinds: tuple[str, ...]
    """of each tensor, such as "matrices" """
    sizes: tuple[int, ...]
    """elements of each tensor"""

    @property
    def names(self) -> tuple[str, ...]:
        """The kinds, each once, in order."""
        return tuple(dict.fromkeys(self.kinds))

    @property
    def parts(self) -> tuple[slice, ...]:
        """Each tensor's elements."""
        ends = torch.tensor(self.sizes).cumsum(0).tolist()
        return tuple(slice(end - size, end) for end, size in zip(ends, self.sizes, strict=True))

    def by_kind(self, values: Tensor) -> Tensor:
        """Values of tensors, (…, tensors), summed by kind, and over all as the last; (…, kinds + 1)."""
        belongs = torch.tensor([[kind == name for name in self.names] + [True] for kind in self.kinds])
        return values.double() @ belongs.double().to(values.device)


@dataclass(frozen=True)
class Sample:
    """What is known of the replicates, in float64 on the CPU. G groups, R replicates, V vectors, T points, K kinds and
    all kinds together as one more."""

    groups: Tensor
    """(R,) the group of each replicate"""
    between: Tensor
    """(K, G, V, G, V) products of the sums over a group"""
    within: Tensor
    """(R, K, V, V) products of a replicate's vectors"""
    squares: Tensor
    """(R, T, K) squared norms of the gradients at the end of the path; their mean is a replicate's last vector"""
    tensor_products: Tensor
    """(R, tensors, V, V) as `within`"""


def sample(
    path: Sequence[Tensor],
    problem: Problem,
    layout: Layout,
    settings: Settings,
    replicates: int,
    progress: Callable[[int], None] = lambda done: None,
) -> Sample:
    """Replicates on a path.

    Args:
        path: weights (size,), where the last are those at which the gradient is estimated.
        progress: told how many replicates are done.
    """
    groups = torch.arange(replicates) % min(replicates, MOST_GROUPS)
    sums: Tensor | None = None
    products, squares = [], []
    for replicate in range(replicates):
        vectors, norms = one_replicate(path, problem, layout, settings, replicate)
        if sums is None:
            sums = vectors.new_zeros(int(groups.max()) + 1, *vectors.shape)
        sums[groups[replicate]] += vectors
        products.append(torch.stack([products_of(vectors[:, part]) for part in layout.parts]))
        squares.append(norms)
        progress(replicate + 1)
    assert sums is not None
    flat = sums.flatten(0, 1)
    between = torch.stack([products_of(flat[:, part]) for part in layout.parts]).unflatten(1, sums.shape[:2])
    tensor_products = torch.stack(products)
    return Sample(
        groups=groups,
        between=layout.by_kind(between.unflatten(3, sums.shape[:2]).movedim(0, -1)).movedim(-1, 0),
        within=layout.by_kind(tensor_products.movedim(1, -1)).movedim(-1, 1),
        squares=layout.by_kind(torch.stack(squares)),
        tensor_products=tensor_products,
    )


def one_replicate(
    path: Sequence[Tensor], problem: Problem, layout: Layout, settings: Settings, replicate: int
) -> tuple[Tensor, Tensor]:
    """The vectors at the end of the path, (V, size), and the squared norms of each tensor's gradient there on each
    batch, (T, tensors) in float64 on the CPU."""
    streams, squares = Streams(settings), []
    snapshot, mean = path[0], None
    renewals = -(-len(path) // settings.interval)
    for i, weights in enumerate(path):
        batch = replicate * len(path) + i
        here = problem.gradient(weights, ESTIMATES, batch)
        at_end = here if i == len(path) - 1 else problem.gradient(path[-1], ESTIMATES, batch)
        before = at_snapshot = None
        if "exact" in settings.forms and i > 0:
            before = problem.gradient(path[i - 1], ESTIMATES, batch)
        if "svrg" in settings.forms:
            if i % settings.interval == 0:
                snapshot, number = weights, replicate * renewals + i // settings.interval
                mean = mean_gradient(problem, snapshot, number, settings.snapshot_batches)
            at_snapshot = here if snapshot is weights else problem.gradient(snapshot, ESTIMATES, batch)
        streams.step(Gradients(here, at_end, before, at_snapshot, mean))
        squares.append(torch.stack([at_end[part].double().square().sum() for part in layout.parts]).cpu())
    return streams.vectors(), torch.stack(squares)


def mean_gradient(problem: Problem, weights: Tensor, number: int, batches: int) -> Tensor:
    """The mean gradient over a snapshot's own batches."""
    total = problem.gradient(weights, SNAPSHOTS, number * batches)
    for batch in range(1, batches):
        total += problem.gradient(weights, SNAPSHOTS, number * batches + batch)
    return total / batches


def products_of(vectors: Tensor) -> Tensor:
    """Products of vectors (V, size) with each other, (V, V) in float64 on the CPU."""
    total = vectors.new_zeros(len(vectors), len(vectors), dtype=torch.float64)
    for part in vectors.split(AT_ONCE, dim=1):
        part = part.double()
        total += part @ part.T
    return total.cpu()


def gradients_needed(points: int, settings: Settings) -> int:
    """How many gradients a replicate takes."""
    count = 2 * points - 1
    if "exact" in settings.forms:
        count += points - 1
    if "svrg" in settings.forms:
        renewals = -(-points // settings.interval)
        count += points - renewals + renewals * settings.snapshot_batches
    return count
