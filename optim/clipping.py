"""The factors that clip gradient estimates to norm 1, and the check that gradients are finite.

A step whose gradients are not all finite, or have a norm that overflows, must change nothing. That has to be known
before the first tensor is updated: so norms come first. On a device they are those of c_t, and stay there: nothing
waits for them. On a CPU, where a value can be read at no cost, the norm of g_t alone (half the memory traffic) mostly
shows that no clip is due, since

    ||c_t|| <= |w| ||g_t|| + |1 - w| ||r_t||,    c_t = w g_t + (1 - w) r_t.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from optim.batch import Batch
from optim.gradients import host_norm
from optim.kernels import estimate_norm
from optim.runner import Runner

SURELY_SHORT = 0.99  # what is bounded by this is below 1, also with last gradients rounded to bfloat16


class Clipping:
    """Finds the factors of each step, and keeps what metrics say of the last one.

    Args:
        sum_over_processes: sums a tensor in place over the processes, where each steps a part of the parameters.
    """

    def __init__(self, sum_over_processes: Callable[[Tensor], None] | None = None) -> None:
        self.sum_over_processes = sum_over_processes
        self.skipped: Tensor | None = None
        """of the last step: whether it changed nothing, since norms of gradients were not finite (0-d)"""
        self.clip_rate: Tensor | None = None
        """of the last step: which share of the vectors that may be clipped was longer than 1 (0-d)"""
        self._norms = WeakTensorKeyDictionary()  # of reference gradients in host memory

    def set_factors(self, batches: list[Batch], run: Runner, device: torch.device, allowed: Tensor | None) -> None:
        """Sets `clips` of every batch.

        Args:
            device: where to gather what concerns all batches.
            allowed: whether the step may change anything at all (0-d bool); None: it may.
        """
        norms_of_grads = [[host_norm(grad) for grad in batch.grads] if _has_bounds(batch) else [] for batch in batches]
        lengths = [
            self._bounds(batch, norms) if _has_bounds(batch) else _lengths(batch, run)
            for batch, norms in zip(batches, norms_of_grads, strict=True)
        ]
        self._sharpen(batches, lengths, run)
        by_clip = {
            clip: [norms for batch, norms in zip(batches, lengths, strict=True) if batch.group["clip"] == clip]
            for clip in ("tensor", "global")
        }
        forbidden = [] if allowed is None else [(~allowed).float().reshape(1)]
        sums = torch.stack(
            [
                _sum([norms.square() for norms in by_clip["global"]], device),
                _sum([torch.ones_like(norms) for norms in by_clip["global"]], device),
                _sum([(norms > 1).float() for norms in by_clip["tensor"]], device),
                _sum([torch.ones_like(norms) for norms in by_clip["tensor"]], device),
                _sum([(~norms.isfinite()).float() for norms in lengths] + forbidden, device),
            ]
        )
        if self.sum_over_processes is not None:
            self.sum_over_processes(sums)
        square, together, clipped, apart, bad = sums.unbind()
        norm, self.skipped = square.sqrt(), bad > 0
        self.clip_rate = (clipped + (norm > 1)) / (apart + (together > 0)).clamp(min=1)

        factors = {"tensor": None, "global": _factor(norm), "none": torch.ones_like(norm)}
        for batch, norms in zip(batches, lengths, strict=True):
            common = factors[batch.group["clip"]]
            clips = _factor(norms) if common is None else common.to(norms).expand(len(norms))
            clips = torch.where(self.skipped.to(norms.device), math.nan, clips)
            batch.clips = list(clips.to(batch.dtype).unbind())
        for batch, grad_norms in zip(batches, norms_of_grads, strict=True):
            self._remember_kept(batch, grad_norms)

    def _remember_kept(self, batch: Batch, grad_norms: list[float]) -> None:
        """Takes note of the norms of the gradients that the step is to keep, where they are known."""
        if batch.flags.keep and batch.device.type == "cpu" and not self.skipped:
            for place, reference in enumerate(batch.references):
                if reference is not None:
                    self._norms[reference] = grad_norms[place] if grad_norms else math.inf

    def all_finite(self, norms: list[Tensor], device: torch.device) -> Tensor:
        """Whether the gradients with these norms, and those of other processes, are finite (0-d)."""
        bad = _sum([(~norm.isfinite()).float().reshape(1) for norm in norms], device)
        if self.sum_over_processes is not None:
            self.sum_over_processes(bad)
        return bad == 0

    def remember(self, reference: Tensor, norm: Tensor) -> None:
        """Takes note of the norm of a reference."""
        if reference.device.type == "cpu":
            self._norms[reference] = norm.item()

    def forget(self, reference: Tensor) -> None:
        """A reference has changed, and its norm is not known."""
        self._norms.pop(reference, None)

    def _bounds(self, batch: Batch, grad_norms: list[float]) -> Tensor:
        """Bounds of ||c_t||, infinite where the norm of the reference is not known, NaN where g_t is not finite."""
        weight = float(batch.weight)
        of_grad, of_reference = abs(weight), abs(1 - weight)
        known = [math.inf if ref is None else self._norms.get(ref, math.inf) for ref in batch.references]
        known = [norm if math.isfinite(norm) else math.inf for norm in known]  # not so where it was not recorded
        pairs = zip(grad_norms, known, strict=True)
        bounds = [of_grad * grad + (of_reference * reference if of_reference else 0.0) for grad, reference in pairs]
        finite = [math.isfinite(norm) for norm in grad_norms]
        return torch.tensor(bounds, dtype=torch.float64).where(torch.tensor(finite), math.nan)

    def _sharpen(self, batches: list[Batch], lengths: list[Tensor], run: Runner) -> None:
        """Replaces bounds that allow a clip by the norms."""
        bounded = [place for place, batch in enumerate(batches) if _has_bounds(batch)]
        together = [place for place, batch in enumerate(batches) if batch.group["clip"] == "global"]
        # Processes that share one norm must not mix bounds and norms in it.
        short = set(together) <= set(bounded) and self.sum_over_processes is None
        short = short and sum(lengths[place].square().sum().item() for place in together) < SURELY_SHORT**2
        for place in bounded:
            if batches[place].group["clip"] == "tensor":
                wanted = (lengths[place] >= SURELY_SHORT).nonzero().flatten().tolist()
            else:
                wanted = [] if short else list(range(len(lengths[place])))
            if wanted:
                lengths[place][wanted] = _lengths(batches[place], run, wanted).to(lengths[place])


def _has_bounds(batch: Batch) -> bool:
    """Whether ||c_t|| can be bounded by what is known of the reference."""
    return batch.device.type == "cpu" and batch.group["clip"] != "none" and batch.corrects


def _lengths(batch: Batch, run: Runner, indices: list[int] | None = None) -> Tensor:
    """||c_t|| of some parameters; without a clip ||g_t||, which is finite where c_t is."""
    indices = list(range(len(batch.grads))) if indices is None else indices
    grads, references = batch.grads, batch.references
    if batch.group["clip"] != "none" and batch.corrects:
        rows = [(grads[index], references[index]) for index in indices]
        return torch.stack(run.reduce(estimate_norm, rows, batch.scalars(), batch.flags))
    if batch.device.type == "cpu":
        return torch.tensor([host_norm(grads[index]) for index in indices], dtype=torch.float64)
    return torch.stack(torch._foreach_norm([grads[index] for index in indices], 2, dtype=batch.dtype))


def norm_of(grad: Tensor) -> Tensor:
    """The norm of a gradient (0-d)."""
    on_host = grad.device.type == "cpu"
    return torch.tensor(host_norm(grad), dtype=torch.float64) if on_host else torch.linalg.vector_norm(grad)


def _factor(norm: Tensor) -> Tensor:
    """What brings a vector of this norm to norm 1, where it is longer."""
    return norm.clamp(min=1).reciprocal()


def _sum(vectors: list[Tensor], device: torch.device) -> Tensor:
    """The sum of all elements, in one dtype whatever theirs: processes add these up."""
    dtype = torch.float32 if device.type == "mps" else torch.float64
    total = torch.zeros((), dtype=dtype, device=device)
    return torch.cat([vector.to(device, dtype) for vector in vectors]).sum() if vectors else total
