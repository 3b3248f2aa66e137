"""What a step of an optimizer has to move and to compute, counted."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim import MARS
from optim.clipping import SURELY_SHORT
from optim.orthogonal import BATCH, iteration_dtype

ITERATIONS = 5  # of Newton-Schulz

Gradients = dict[Tensor, Tensor]


def step_bytes(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> int:
    """Bytes that a step has to read and write: the gradient is read; the parameter and each full-sized tensor of its
    state are read and written, but for the exact form's reference, which is read only, and its recording, which reads
    the gradient twice (is it finite?) and writes it once; the matrix of an orthogonal step is written and its direction
    read. Before this the norms are taken."""
    total = norm_bytes(optimizer, gradients, last)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = {k: t.nbytes for k, t in optimizer.state[p].items() if isinstance(t, Tensor) and t.shape == p.shape}
            reference = kept.pop("reference_grad", 0)
            total += gradients[p].nbytes + 2 * p.nbytes + 2 * sum(kept.values()) + 4 * reference
            if group.get("preconditioner") == "shampoo":
                total += 2 * p.numel() * iteration_dtype(p.device).itemsize
    return total


def norm_bytes(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> int:
    """Bytes that MARS reads to find the norms before a step (see optim/clipping.py): the gradient, with the reference
    where the norm of c_t is needed. On a CPU first the gradient alone for a bound, and both only where the bound
    allows a clip."""
    total, bounds = 0, bounds_of_estimates(optimizer, gradients, last)
    for group in optimizer.param_groups if isinstance(optimizer, MARS) else []:
        name = "reference_grad" if group["exact"] else "last_grad"
        clips = group["clip"] != "none" and group["gamma"] != 0
        for p in group["params"]:
            both = gradients[p].nbytes + (optimizer.state[p][name].nbytes if clips else 0)
            if clips and p.device.type == "cpu":
                bound = bounds[p] if group["clip"] == "tensor" else math.hypot(*bounds.values())
                total += gradients[p].nbytes + (both if bound >= SURELY_SHORT else 0)
            else:
                total += both
    return total


def bounds_of_estimates(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> dict[Tensor, float]:
    """Of ||c_t|| for the parameters whose c_t is clipped: (1 + k) ||g_t|| + k ||r_t||."""
    bounds = {}
    for group in optimizer.param_groups:
        if group.get("clip", "none") != "none" and group["gamma"] != 0:
            k = abs(group["gamma"]) * group["betas"][0] / (1 - group["betas"][0])
            for p in group["params"]:
                bounds[p] = (1 + k) * gradients[p].norm().item() + k * last[p].norm().item()
    return bounds


def matrix_chunks(optimizer: Optimizer, device: torch.device) -> Counter[tuple[int, int, int]]:
    """(matrices, short side, long side) of the batches that a step orthogonalises, with how many there are of each."""
    chunks: Counter[tuple[int, int, int]] = Counter()
    for group in optimizer.param_groups:
        if group.get("preconditioner") == "shampoo":
            shapes = Counter((p.shape[0], p.shape[1:].numel()) for p in group["params"])
            for (rows, columns), count in shapes.items():
                together = max(1, BATCH[device.type] // (rows * columns))
                for start in range(0, count, together):
                    chunks[min(together, count - start), min(rows, columns), max(rows, columns)] += 1
    return chunks


def flops(chunks: Counter[tuple[int, int, int]]) -> int:
    """Floating-point operations of the iterations' products: X X^T, G G and P X."""
    return ITERATIONS * sum(
        count * batch * (2 * n * n * m + 2 * n**3 + 2 * n * n * m) for (batch, n, m), count in chunks.items()
    )


def products(chunks: Counter[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A function that makes the products of one iteration of all matrices, into memory that is there."""
    work = []
    for (batch, n, m), count in chunks.items():
        x = (torch.randn(batch, n, m, device=device) / math.sqrt(n * m)).to(dtype)
        gram, polynomial = x.new_zeros(batch, n, n), x.new_zeros(batch, n, n)
        work.append((count, x, gram, polynomial, torch.zeros_like(x)))

    def run() -> None:
        for count, x, gram, polynomial, out in work:
            for _ in range(count):
                torch.bmm(x, x.mT, out=gram)
                torch.bmm(gram, gram, out=polynomial)
                torch.bmm(polynomial, x, out=out)

    return run
