"""Runs the kernels of a step over many tensors, compiled where that pays.

On a CPU one compiled function serves tensors of every size, one after another: it spreads each over the cores. On
CUDA one compiled graph serves all tensors of a batch. Without a compiler, and for few parameters, the same functions
run eagerly; on a CPU in pieces that stay in the cache.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from optim.estimator import Scalars, compute_dtype
from optim.in_place import in_place
from optim.kernels import Flags

Row = Sequence[Tensor | None]
Kernel = Callable[..., Any]

PIECE = 2**17  # elements that an eager kernel works on at a time on a CPU, so that its temporaries stay in the cache
GRAPHS = 64  # of one kernel: for its flags, and on a device for each set of shapes that are stepped together
MANY = 2**23  # parameters from which on a CPU the seconds of compilation pay


class Runner:
    """Calls a kernel with each of many rows of tensors.

    The tensors of a row have one number of elements, but for 0-d ones, which serve all elements; a kernel sees them
    flat on a CPU and whole elsewhere. What follows the rows is the same for all.

    Args:
        compile: whether to compile; None: on CUDA, and on a CPU where there are many parameters.
    """

    def __init__(self, compile: bool | None) -> None:
        self.compile = compile

    def decide(self, parameters: Sequence[Tensor]) -> None:
        """Settles whether to compile for these parameters, where it was left open."""
        if self.compile is None:
            on_cuda = any(parameter.is_cuda for parameter in parameters)
            on_cpu = all(parameter.device.type == "cpu" for parameter in parameters)
            self.compile = on_cuda or (on_cpu and sum(parameter.numel() for parameter in parameters) >= MANY)

    def update(self, kernel: Kernel, rows: Sequence[Row], scalars: Scalars, flags: Flags) -> None:
        """Runs an elementwise kernel, which updates tensors in place."""
        done = self._compiled(kernel, rows, scalars, flags)
        for row in rows[len(done) :]:
            eager = kernel if flags.guarded else in_place(kernel, row)
            for piece in _pieces(row):
                eager(*piece, scalars, flags)

    def reduce(self, kernel: Kernel, rows: Sequence[Row], scalars: Scalars, flags: Flags) -> list[Tensor]:
        """Runs a kernel that makes one norm of a row, 0-d."""
        done = self._compiled(kernel, rows, scalars, flags)
        norms = ([kernel(*piece, scalars, flags) for piece in _pieces(row)] for row in rows[len(done) :])
        return [*done, *(torch.linalg.vector_norm(torch.stack(parts)) for parts in norms)]

    def _compiled(self, kernel: Kernel, rows: Sequence[Row], scalars: Scalars, flags: Flags) -> list[Any]:
        """The results of the first rows, up to the first one that cannot be had by a compiled kernel."""
        if not self.compile or not rows:
            return []
        from torch._dynamo.exc import BackendCompilerFailed  # takes a second, which only those pay who compile

        results: list[Any] = []
        packed = _pack(scalars, rows[0])
        try:
            with torch._dynamo.config.patch(recompile_limit=GRAPHS):
                if _at_once(packed):
                    return _compile_all(kernel)(rows, packed, flags)
                function = _compile_each(kernel)
                for row in rows:
                    flat = _flat(row)
                    if flat is not None and _size(row) > 1:  # a size of 1 would be compiled for itself
                        # As `.data` a view has no base, whose shape would be another reason to compile anew.
                        flat = [None if tensor is None else tensor.data for tensor in flat]
                        results.append(function(*flat, packed, flags))
                    else:
                        results.append(kernel(*row, scalars, flags))
        except BackendCompilerFailed as error:  # before it has run, so that no tensor was changed
            self.compile = False
            warnings.warn(
                "optim: torch.compile does not work here, so that steps run eagerly and take several times as long: "
                f"{str(error).splitlines()[0]} (on a CPU it needs a C++ compiler: apt install g++)",
                stacklevel=2,
            )
        return results


@cache
def _compile_each(kernel: Kernel) -> Kernel:
    # Whether threads share a tensor must not depend on the size of the first one that was compiled for, in this process
    # or in another one that left the kernel in torch's cache on disk.
    return torch.compile(kernel, dynamic=True, options={"cpp.dynamic_threads": True})


@cache
def _compile_all(kernel: Kernel) -> Kernel:
    def run(rows: Sequence[Row], scalars: Tensor, flags: Flags) -> list[Any]:
        return [kernel(*row, scalars, flags) for row in rows]

    # Recompilations are counted for a code object: each kernel gets its own.
    run.__code__ = run.__code__.replace(co_name=f"all_{kernel.__name__}")
    return torch.compile(run, dynamic=False)


def _at_once(packed: Tensor) -> bool:
    """Whether one graph serves all rows."""
    return packed.device.type != "cpu"


def _pack(scalars: Scalars, row: Row) -> Tensor:
    """The scalars as one tensor beside a row's, in the dtype of arithmetic."""
    assert row[0] is not None
    device, dtype = row[0].device, compute_dtype(row[0].dtype)
    on_cuda = device.type == "cuda"
    there = {place: value for place, value in enumerate(scalars) if isinstance(value, Tensor) and not value.is_cpu}
    here = [0.0 if place in there else value for place, value in enumerate(scalars)]
    # From pinned memory the copy does not wait for the device.
    packed = torch.tensor(here, dtype=dtype, pin_memory=on_cuda).to(device, non_blocking=on_cuda)
    for place, value in there.items():
        packed[place].copy_(value)
    return packed


def _size(row: Row) -> int:
    assert row[0] is not None
    return row[0].numel()


def _flat(row: Row) -> Row | None:
    """The row with its full tensors as one-dimensional views; None where a layout does not allow that."""
    if not all(tensor is None or tensor.is_contiguous() for tensor in row):
        return None
    return [tensor.view(-1) if tensor is not None and tensor.dim() > 0 else tensor for tensor in row]


def _pieces(row: Row) -> Sequence[Row]:
    """The row cut into pieces for a CPU; whole where it is short, lies elsewhere, or has a layout of its own."""
    if _size(row) <= PIECE or row[0] is None or row[0].device.type != "cpu" or (flat := _flat(row)) is None:
        return [row]
    count = -(-_size(row) // PIECE)
    cut = [tensor.split(PIECE) if tensor is not None and tensor.dim() > 0 else [tensor] * count for tensor in flat]
    return list(zip(*cut, strict=True))
