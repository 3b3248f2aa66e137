"""Steps of optimizers on the tensors of GPT-2, timed in turn with those of fused AdamW."""

from __future__ import annotations

import gc
import statistics
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.optim import Optimizer

from configs import TrainConfig
from model import GPT
from optim import MARS, build_optimizer, clip_gradients, optimizer_metrics, record_reference_gradient
from optim.orthogonal import iteration_dtype
from scripts.benchmarking.counting import ITERATIONS, Gradients, flops, matrix_chunks, products, step_bytes

WARM_UP = 2  # steps: compilation, and with the second one every tensor of the state
SEQUENCES, TOKENS = 2, 64  # of a batch
UPDATES = ("adamw", "record", "step")  # of what is timed: what a run does with a gradient after it took the norm
BASELINE = TrainConfig(learning_rate=1e-9, min_lr=0.0, compile_optimizer=True)  # parameters stay where they are


@dataclass(frozen=True)
class Row:
    """What was found of an optimizer. Medians, in seconds; "adamw" and "copy" are from between its own steps."""

    method: str
    seconds: float
    """of a step; exact: with the recording of a reference gradient; with --norms: each with the norm before it"""
    adamw_seconds: float
    ratio: float
    ratio_of_minima: float
    copy_seconds: float
    """of a copy of all gradients"""
    bytes_per_parameter: float
    gigabytes_per_second: float
    copy_share: float
    """bytes per second relative to the copy's"""
    clip_rate: float | None
    """share of the tensors (or of the one vector) that were clipped, a mean over the steps"""
    record_in_copies: float | None
    """exact: time of the recording, in copies of all gradients"""
    operations: int
    """floating-point operations of the Newton-Schulz iterations' products"""
    products_dtype: str | None
    products_share: float | None
    """operations a second of the whole step relative to those of the products alone"""
    times: dict[str, list[float]]


class Bench:
    """A model with its gradients on two batches, and fused AdamW over it."""

    def __init__(self, model: GPT, repeat: int, takes_norms: bool = False) -> None:
        self.model, self.repeat, self.takes_norms = model, repeat, takes_norms
        self.device = next(model.parameters()).device
        pairs = [self._gradients() for _ in range(2)]
        self.norms = [norm for _, norm in pairs]
        """of the gradients before they were clipped"""
        self.gradients = [gradients for gradients, _ in pairs]
        self.copies = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        self.baseline = build_optimizer(model, BASELINE)

    def _gradients(self) -> tuple[Gradients, float]:
        """Gradients on a batch, clipped to norm 1 together, and their norm before."""
        tokens = torch.randint(self.model.config.vocab_size, (SEQUENCES, TOKENS + 1), device=self.device)
        self.model.zero_grad()
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = clip_gradients(self.model.parameters(), BASELINE.grad_clip).item()
        return {p: p.grad for p in self.model.parameters() if p.grad is not None}, norm

    def row(self, name: str, config: TrainConfig) -> Row:
        """Measures a method, whose state is freed before the next one."""
        gc.collect()
        if config.compile_optimizer:
            torch.compiler.reset()  # as in a run of its own: few variants of a kernel
        optimizer = self.baseline if name == "adamw" else build_optimizer(self.model, config)
        chunks = matrix_chunks(optimizer, self.device)
        times, clip_rates = self._times(optimizer, config.exact, chunks)
        medians = {key: statistics.median(values) for key, values in times.items()}
        copied = 2 * sum(copy.nbytes for copy in self.copies.values())
        moved = step_bytes(optimizer, *self.gradients) / 2 + step_bytes(optimizer, *reversed(self.gradients)) / 2
        if self.takes_norms and not isinstance(optimizer, MARS):
            moved += copied / 2
        rate = moved / medians["step"]
        return Row(
            method=name,
            seconds=medians["step"],
            adamw_seconds=medians["adamw"],
            ratio=medians["step"] / medians["adamw"],
            ratio_of_minima=min(times["step"]) / min(times["adamw"]),
            copy_seconds=medians["copy"],
            bytes_per_parameter=moved / sum(p.numel() for p in self.copies),
            gigabytes_per_second=rate / 1e9,
            copy_share=rate / (copied / medians["copy"]),
            clip_rate=statistics.mean(clip_rates) if clip_rates else None,
            record_in_copies=medians["record"] / medians["copy"] if config.exact else None,
            operations=flops(chunks),
            products_dtype=str(iteration_dtype(self.device)).removeprefix("torch.") if chunks else None,
            products_share=ITERATIONS * medians["iteration"] / medians["step"] if chunks else None,
            times=times,
        )

    def _times(
        self, optimizer: Optimizer, exact: bool, chunks: Counter[tuple[int, int, int]]
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Seconds of steps and of what they are set against, in turn, without the warm-up; clip rates of the steps."""
        parts: dict[str, Callable[[], object]] = {"adamw": self.baseline.step, "copy": self._copy}
        if exact:
            parts["record"] = lambda: record_reference_gradient(optimizer)
        if optimizer is not self.baseline:
            parts["step"] = optimizer.step
        if chunks:
            parts["iteration"] = products(chunks, iteration_dtype(self.device), self.device)
        turns: list[dict[str, float]] = []
        clip_rates: list[float] = []
        for turn in range(WARM_UP + self.repeat):
            seconds, norms = dict[str, float](), dict[str, float]()
            for part, run in parts.items():
                # Exact: the reference is of the other batch too, so that the correction is not zero.
                for parameter, grad in self.gradients[int(part == "record") if exact else turn % 2].items():
                    parameter.grad = grad
                before = self._seconds(self._take_norm) if self.takes_norms and part in UPDATES else 0.0
                seconds[part] = self._seconds(run)
                norms[part] = before
            if exact:
                seconds["step"] += seconds["record"] + norms["record"]
            for part in {"adamw", "step"} & set(seconds):
                seconds[part] += norms[part]
            turns.append({"step": seconds["adamw"]} | seconds)
            clip_rates += [value.item() for key, value in optimizer_metrics(optimizer).items() if "clip_rate" in key]
        return {part: [seconds[part] for seconds in turns[WARM_UP:]] for part in turns[0]}, clip_rates[WARM_UP:]

    def _take_norm(self) -> None:
        clip_gradients(self.model.parameters(), 0.0)

    def _copy(self) -> None:
        for parameter, copy in self.copies.items():
            copy.copy_(self.gradients[0][parameter])

    def _seconds(self, run: Callable[[], object]) -> float:
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        with torch.no_grad():
            run()
        wait()
        return time.perf_counter() - start
