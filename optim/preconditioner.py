"""How MARS turns the moving average of its gradient estimate into a direction (arXiv 2411.10438, section 3).

A preconditioner says which tensors it keeps for a parameter and steps a batch of them. Elementwise ones need one kernel
(`kernels.py`); those that look at a whole matrix average first, find the direction, and then apply it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from optim.batch import Batch
from optim.kernels import adamw_step, apply_step, average_step, lion_step, sgd_step
from optim.kronecker import kronecker_direction, new_factors
from optim.orthogonal import BATCH, iteration_dtype, newton_schulz, svd_factor
from optim.runner import Kernel, Runner


@dataclass(frozen=True)
class Preconditioner:
    """One way to a direction."""

    step: Callable[[Batch, Runner], None]
    """updates the parameters of a batch and their state"""
    new_state: Callable[[Tensor], dict[str, Any]] = lambda moment: {}
    """what it keeps for a parameter, beside the first moment (which is given, in the dtype of all moments)"""
    state_names: tuple[str, ...] = ()
    """the keys of that"""
    min_dim: int = 0
    """dimensions that a parameter needs"""
    folds: bool = True
    """whether m_t is all that it needs, so that the last gradient can be folded into the moment"""


def _elementwise(kernel: Kernel, second_moment: bool = False) -> Callable[[Batch, Runner], None]:
    def step(batch: Batch, run: Runner) -> None:
        columns: list[list[Any]] = [batch.parameters, batch.grads, batch.references, batch.moments]
        if second_moment:
            columns.append([state["exp_avg_sq"] for state in batch.states])
        rows = list(zip(*columns, batch.clips, strict=True))
        run.update(kernel, rows, batch.scalars(corrects_first_moment=second_moment), batch.flags)

    return step


def _orthogonal_step(batch: Batch, run: Runner) -> None:
    """MARS-Shampoo (Algorithm 4): the orthogonal factor U V^T of m_t, times sqrt(max(1, rows / columns)), as in the
    published code, so that the root mean square of an output's change does not depend on the shape. Dimensions behind
    the first count as one (the inputs of a convolution)."""
    exact = batch.group["orthogonal"] == "svd"
    factor = svd_factor if exact else newton_schulz
    dtype = batch.dtype if exact else iteration_dtype(batch.device)
    for indices, (rows, columns) in _same_shapes(batch):
        averages = torch.empty(len(indices), rows, columns, dtype=dtype, device=batch.device)
        _average(batch, run, indices, averages, None)
        directions = factor(averages)
        _apply(batch, run, indices, directions, scale=max(1.0, rows / columns) ** 0.5)


def _kronecker_step(batch: Batch, run: Runner) -> None:
    """Shampoo's two-sided preconditioning of m_t, with the statistics of c_t (`kronecker.py`)."""
    for indices, (rows, columns) in _same_shapes(batch):
        averages = torch.empty(len(indices), rows, columns, dtype=batch.dtype, device=batch.device)
        estimates = torch.empty_like(averages)
        _average(batch, run, indices, averages, estimates)
        for place, index in enumerate(indices):
            averages[place] = kronecker_direction(
                averages[place], estimates[place], batch.clips[index], batch.states[index], batch.step, batch.group
            )
        _apply(batch, run, indices, averages, scale=1.0)


def _same_shapes(batch: Batch) -> Iterator[tuple[list[int], tuple[int, int]]]:
    """Indices of parameters that make matrices of one shape, as many as are worked on together, and the shape."""
    by_shape: dict[tuple[int, int], list[int]] = {}
    for index, parameter in enumerate(batch.parameters):
        by_shape.setdefault((parameter.shape[0], parameter.shape[1:].numel()), []).append(index)
    for shape, indices in by_shape.items():
        together = max(1, BATCH.get(batch.device.type, BATCH["cpu"]) // (shape[0] * shape[1]))
        for start in range(0, len(indices), together):
            yield indices[start : start + together], shape


def _average(batch: Batch, run: Runner, indices: list[int], averages: Tensor, estimates: Tensor | None) -> None:
    """m_t of some parameters to `averages` (n, rows, columns), c_t to `estimates` where they are wanted."""
    references, moments = batch.references, batch.moments
    rows = [
        (
            batch.grads[index],
            references[index],
            moments[index],
            averages[place].view(batch.parameters[index].shape),
            None if estimates is None else estimates[place].view(batch.parameters[index].shape),
            batch.clips[index],
        )
        for place, index in enumerate(indices)
    ]
    run.update(average_step, rows, batch.scalars(), batch.flags)


def _apply(batch: Batch, run: Runner, indices: list[int], directions: Tensor, scale: float) -> None:
    """Steps some parameters along `directions` (n, rows, columns)."""
    rows = [
        (batch.parameters[index], direction.reshape(batch.parameters[index].shape), batch.clips[index])
        for index, direction in zip(indices, directions, strict=True)
    ]
    run.update(apply_step, rows, batch.scalars(scale=scale), batch.flags)


PRECONDITIONERS = {
    "adamw": Preconditioner(
        _elementwise(adamw_step, second_moment=True),
        lambda moment: {"exp_avg_sq": torch.zeros_like(moment, memory_format=torch.preserve_format)},
        state_names=("exp_avg_sq",),
        folds=False,  # the second moment is of c_t
    ),
    "lion": Preconditioner(_elementwise(lion_step)),
    "sgd": Preconditioner(_elementwise(sgd_step)),
    "shampoo": Preconditioner(_orthogonal_step, min_dim=2),
    "kronecker": Preconditioner(
        _kronecker_step,
        lambda moment: new_factors(moment.flatten(1)),
        state_names=("factor_left", "factor_right", "root_left", "root_right"),
        min_dim=2,
        folds=False,
    ),
}
