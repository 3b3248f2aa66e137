"""What a GPU would run, on a CPU: kernels that are guarded, one graph for all tensors of a batch, and norms first."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import nn

from optim import MARS
from optim.estimator import Scalars
from optim.kernels import Flags, adamw_step, apply_step, average_step, lion_step, sgd_step
from optim.runner import Runner, _compile_all

SCALARS = Scalars(gamma=0.1, boost=1.9, rate=0.1, rate2=0.01, root_scale=3.0, eps=1e-8, step_size=1e-2, decay=0.99)
COLUMNS = {adamw_step: 5, lion_step: 4, sgd_step: 4, average_step: 4, apply_step: 2}


def rows_for(kernel: Any, clip: float) -> list[tuple[torch.Tensor | None, ...]]:
    generator = torch.Generator().manual_seed(0)
    rows = []
    for shape in [(6, 4), (5,), (3, 2, 2)]:
        tensors = [torch.randn(shape, generator=generator).abs() for _ in range(COLUMNS[kernel])]
        if kernel is not average_step:
            tensors[0] = nn.Parameter(tensors[0])
        extra = (None,) if kernel is average_step else ()
        rows.append((*tensors, *extra, torch.tensor(clip)))
    return rows


def flags(guarded: bool) -> Flags:
    return Flags(keep=True, folded=False, guarded=guarded)


@pytest.mark.parametrize("kernel", list(COLUMNS), ids=lambda kernel: kernel.__name__)
@torch.no_grad()
def test_a_guarded_kernel_changes_nothing_where_the_clip_says_so(kernel: Any) -> None:
    for clip in (0.5, math.nan):
        rows, plain = rows_for(kernel, clip), rows_for(kernel, 0.5)
        before = copy.deepcopy(rows)
        for row, other in zip(rows, plain, strict=True):
            kernel(*row, SCALARS, flags(guarded=True))
            kernel(*other, SCALARS, flags(guarded=False))
        for row, other, old in zip(rows, plain, before, strict=True):
            # What `average_step` hands on (its fourth tensor) is not looked at then.
            count = 3 if kernel is average_step else COLUMNS[kernel]
            for a, b, c in list(zip(row, other, old, strict=True))[:count]:
                assert torch.equal(a, c if math.isnan(clip) else b)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("kernel", list(COLUMNS), ids=lambda kernel: kernel.__name__)
@torch.no_grad()
def test_one_graph_for_all_tensors_of_a_batch(kernel: Any) -> None:
    torch.compiler.reset()
    rows, plain = rows_for(kernel, 0.5), rows_for(kernel, 0.5)
    _compile_all(kernel)(rows, torch.tensor(SCALARS), flags(guarded=True))
    for row, other in zip(rows, plain, strict=True):
        kernel(*other, SCALARS, flags(guarded=False))
        for a, b in zip(row, other, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize("clip", ["tensor", "global", "none"])
def test_norms_of_a_device_clip_as_bounds_on_a_cpu_do(monkeypatch: pytest.MonkeyPatch, clip: str) -> None:
    """Norms of c_t taken at once, against those that a bound by known norms mostly spares."""
    results = []
    for bounded in (True, False):
        if not bounded:
            monkeypatch.setattr("optim.clipping._has_bounds", lambda batch: False)
        generator = torch.Generator().manual_seed(0)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in [(6, 4), (5, 3), (4, 4)]]
        optimizer = MARS(params, lr=1e-2, gamma=0.4, clip=clip)
        rates = []
        for step in range(8):
            for place, parameter in enumerate(params):
                scale = (0.02, 0.15, 0.3)[place] * (1 + step % 3) * (0.3 if clip == "global" else 1.0)
                parameter.grad = torch.randn(parameter.shape, generator=generator) * scale
            optimizer.step()
            rates.append(optimizer.metrics().get("mars/clip_rate", torch.tensor(math.nan)).item())
        results.append((params, rates))
    for a, b in zip(results[0][0], results[1][0], strict=True):
        torch.testing.assert_close(a, b)
    assert results[0][1] == pytest.approx(results[1][1], nan_ok=True)
    assert clip == "none" or 0 < sum(results[0][1]) < 8


@pytest.mark.parametrize("clip", [0.5, 1.0])
@pytest.mark.parametrize("corrects", [True, False])
@torch.no_grad()
def test_an_eager_adamw_is_the_kernel_however_it_is_cut_and_shared(clip: float, corrects: bool) -> None:
    shape = (701, 303)  # more than a piece
    row = [torch.rand(shape, generator=torch.Generator().manual_seed(seed)) for seed in range(5)]
    row[2][:3, :7] = math.nan  # unknown
    if not corrects:
        row[2] = None  # type: ignore[call-overload]
    row.append(torch.tensor(clip))
    whole = copy.deepcopy(row)
    adamw_step(*whole, SCALARS, flags(guarded=False))
    threads, results = torch.get_num_threads(), []
    for number in (1, 2, 3):
        torch.set_num_threads(number)
        results.append(copy.deepcopy(row))
        Runner(False).update(adamw_step, [results[-1]], SCALARS, flags(guarded=False))
    torch.set_num_threads(threads)
    for place, expected in enumerate(whole):
        if expected is not None:
            torch.testing.assert_close(results[0][place], expected, rtol=1e-6, atol=1e-7)
            assert all(torch.equal(result[place], results[0][place]) for result in results)


def test_an_eager_kernel_in_pieces_is_the_kernel() -> None:
    shape = (700, 300)  # more than a piece
    rows = [(*(torch.rand(shape) for _ in range(4)), torch.tensor(0.5))]
    whole = copy.deepcopy(rows)
    Runner(False).update(lion_step, rows, SCALARS, flags(guarded=False))
    lion_step(*whole[0], SCALARS, flags(guarded=False))
    for a, b in zip(rows[0], whole[0], strict=True):
        assert torch.equal(a, b)


def test_a_backward_pass_through_old_values_is_still_an_error() -> None:
    weight = nn.Parameter(torch.randn(3, 3))
    x = torch.randn(3, 3, requires_grad=True)
    loss = (x @ weight).square().sum()
    weight.grad = torch.ones_like(weight)
    MARS([weight], lr=1e-2).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_many_shapes_on_a_device_are_not_too_many_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch.compile gives up on a function, without an error, after so many graphs of it."""
    import torch._dynamo

    compile = torch.compile
    monkeypatch.setattr(torch, "compile", lambda function, **options: compile(function, backend="eager", **options))
    monkeypatch.setattr("optim.runner._at_once", lambda packed: True)
    _compile_all.cache_clear()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    params = [nn.Parameter(torch.randn(4, columns)) for columns in range(2, 14)]
    for optimizer in (
        MARS(params, lr=1e-2, preconditioner="shampoo", compile=True),
        MARS(params, lr=1e-2, compile=True),
    ):
        for _ in range(2):
            for parameter in params:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
    frames = torch._dynamo.utils.counters["frames"]
    assert frames["total"] == frames["ok"] >= 12
    _compile_all.cache_clear()
