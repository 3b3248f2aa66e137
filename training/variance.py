"""The noise of a run's gradients, and what the optimizer's estimates make of it, measured while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.optim import Optimizer

from optim import watch_estimates
from training.metrics import TrainingClock
from training.processes import Processes

ESTIMATES = ("gradient", "corrected", "average")  # g_t, and c_t and m_t as `watch_estimates` has them
PIECE = 2**20  # elements that are seen in float64 at a time


class GradientNoise:
    """One measurement, at the weights before an update: `add` each of M gradients on batches of their own, then make
    the update's step within `watch`.

    The mean of the M gradients stands for the true gradient G. What its own variance adds to a square or a product is
    taken off, so that these have no bias. In all 4 bytes a parameter are held. Time spent here is not the clock's.

    Args:
        parameters: of the model; whole, and with the same gradients, on every process.
        clock: of training; runs.
    """

    def __init__(self, parameters: Iterable[Tensor], clock: TrainingClock) -> None:
        self._sums = {parameter: torch.zeros_like(parameter, requires_grad=False) for parameter in parameters}
        self._clock, self._seconds = clock, 0.0
        self._squares: list[Tensor] = []  # of the norms of the gradients
        self._seen: dict[str, Tensor] = {}  # of each estimate e: e * e, e * sum of gradients, elements
        self._factor = torch.tensor(1.0)

    @contextmanager
    def timed(self) -> Iterator[None]:
        """Stops training's clock, for what belongs to the measurement."""
        self._clock.stop()
        start = time.perf_counter()
        yield
        self._seconds += time.perf_counter() - start
        self._clock.start()

    @torch.no_grad()
    def add(self, scale: float) -> None:
        """Takes the parameters' present gradients, which are `scale` times too long."""
        grads = [(total, parameter.grad) for parameter, total in self._sums.items() if parameter.grad is not None]
        self._squares.append(torch.stack([_inner(grad, grad) for _, grad in grads]).sum() / scale**2)
        for total, grad in grads:
            total.add_(grad, alpha=1 / scale)

    @contextmanager
    def watch(
        self, optimizer: Optimizer, grad_norm: Tensor, grad_clip: float, allowed: bool | Tensor
    ) -> Iterator[None]:
        """Compares the update's gradient, and the estimates of the step within the `with` block, with G.

        All are measured in units of the gradient before `clip_gradients`: the factor of this update's clip is taken
        out of each. (That of the optimizer's own clip, and of earlier updates' clips, stays in the average.)

        Args:
            grad_norm: before `clip_gradients`, 0-d.
            grad_clip: the norm that it clips to; 0: none.
            allowed: whether the step is made; the figures are NaN otherwise.
        """
        factor = (grad_norm / grad_clip).clamp(min=1) if grad_clip > 0 else torch.ones_like(grad_norm)
        self._factor = torch.where(torch.as_tensor(allowed, device=factor.device), factor, math.nan)
        for parameter in self._sums:
            if parameter.grad is not None:
                self._see("gradient", parameter, parameter.grad)
        with watch_estimates(optimizer, self._see):
            yield

    @torch.no_grad()
    def _see(self, name: str, parameter: Tensor, estimate: Tensor) -> None:
        with self.timed():
            square, product = _inner(estimate, estimate), _inner(estimate, self._sums[parameter])
            sums = torch.stack([square, product, torch.full_like(square, parameter.numel())])
            self._seen[name] = self._seen[name] + sums if name in self._seen else sums

    def figures(self, processes: Processes, batch_size: int) -> dict[str, float]:
        """What a row of metrics has of it; the same on every process. To be called on all.

        `variance/noise` is tr(Sigma), the expected squared error of the gradient of one update, and `variance/signal`
        |G|^2, both without bias; `variance/noise_scale` their ratio times the batch size, the simple noise scale of
        McCandlish et al. (arXiv 1812.06162) in sequences. `variance/NAME_error` is |e - G|^2 / tr(Sigma) of an
        estimate e, and `variance/NAME_cosine` its cosine to G. NaN where one divides by what came out negative.

        Args:
            batch_size: sequences of an update.
        """
        with self.timed():
            count = len(self._squares)
            squares = torch.stack(self._squares).cpu().double()
            mean_square = torch.stack([_inner(total, total) for total in self._sums.values()]).sum().item() / count**2
            noise = (squares.sum().item() - count * mean_square) / (count - 1)
            signal = mean_square - noise / count
            mean, deviation = squares.sqrt().mean().item(), squares.sqrt().std().item()
            figures = {
                "variance/noise_scale": batch_size * _ratio(noise, signal),
                "variance/noise": noise,
                "variance/signal": signal,
                "variance/grad_norm_mean": mean,
                "variance/grad_norm_std": deviation,
                "variance/grad_norm_cv": _ratio(deviation, mean),
            }
            factor, elements = self._factor.item(), sum(parameter.numel() for parameter in self._sums)
            for name in ESTIMATES:
                sums = processes.sum(self._seen[name].tolist() if name in self._seen else [0.0, 0.0, 0.0])
                holders = sums[2] / elements  # 1 where processes share the optimizer's state, else all
                if holders == 0:
                    continue
                square, product = sums[0] * factor**2 / holders, sums[1] * factor / (count * holders)
                error = square - 2 * product + mean_square - noise / count
                figures[f"variance/{name}_error"] = _ratio(error, noise)
                figures[f"variance/{name}_cosine"] = _ratio(product, math.sqrt(square * max(signal, 0.0)))
        return figures | {"variance_seconds": round(self._seconds, 3)}


def _inner(a: Tensor, b: Tensor) -> Tensor:
    """The inner product of two tensors of one shape (0-d), in float64 where the device has it: an error of float32 may
    be more than the noise of a large batch."""
    dtype = torch.float32 if a.device.type == "mps" else torch.float64
    pairs = zip(a.flatten().split(PIECE), b.flatten().split(PIECE), strict=True)
    return torch.stack([torch.dot(x.to(dtype), y.to(dtype)) for x, y in pairs]).sum()


def _ratio(value: float, by: float) -> float:
    return value / by if by > 0 else math.nan
