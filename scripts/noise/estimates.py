"""Estimates of the gradient along a path of weights x_1 … x_T, each as a combination of a few vectors.

Every estimate is the gradient plus a multiple of a correction e_i, and is averaged (b is beta1):

    c_i = g_i + a e_i        m_i = b m_{i-1} + (1-b) c_i, m_0 = 0, divided by 1 - b^T at the end, as Adam does

    form          e_i                     a               source
    approximate   g_i - g_{i-1}           gamma b/(1-b)   arXiv 2411.10438, Algorithm 1 (g_i: gradient at x_i, batch i)
    exact         g_i - g(x_{i-1}, i)     gamma b/(1-b)   the same; gamma 1 is STORM, arXiv 1905.10018
    reference     g_ref - g_i             gamma           the mean of the last tau gradients, renewed after every tau
    svrg          mu - g(x_s, i)          gamma           Johnson & Zhang 2013: x_s was x_i at the last renewal, mu is
                                                          the mean gradient there over batches of its own

with e_1 = 0, and no correction by a reference before there is one. So the last c and m of every form and gamma are
known from the last e and the moving average of e, one pair of vectors a form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

FORMS = ("approximate", "exact", "reference", "svrg")
GRADIENT, TO_END = "gradient", "to end"  # streams that every form needs


@dataclass(frozen=True)
class Case:
    """A form and its gamma. "plain" is the gradient itself, and its moving average plain momentum."""

    form: str
    gamma: float

    def __str__(self) -> str:
        return self.form if self == PLAIN else f"{self.form} {self.gamma:g}"


PLAIN = Case("plain", 0.0)
DEFAULT_CASES = (
    *(Case(form, gamma) for form in ("approximate", "exact") for gamma in (0.025, 0.1, 0.5, 1.0)),
    *(Case("reference", gamma) for gamma in (0.3, 0.7, 0.9)),
    *(Case("svrg", gamma) for gamma in (0.5, 1.0)),
)


@dataclass(frozen=True)
class Settings:
    """What the estimates have in common."""

    forms: tuple[str, ...]
    """those of FORMS that are wanted"""
    beta1: float
    """decay of the moving average"""
    interval: int = 10
    """points between renewals of the reference and of the snapshot"""
    snapshot_batches: int = 10
    """batches of the mean gradient at a snapshot"""

    @property
    def streams(self) -> tuple[str, ...]:
        """Names of the vectors that are averaged along the path."""
        return (GRADIENT, *self.forms, TO_END)

    @property
    def vectors(self) -> int:
        """How many vectors `Streams.vectors` gives."""
        return 2 * len(self.streams) + 1


@dataclass(frozen=True)
class Gradients:
    """All gradients of a point x_i of the path, each (size,)."""

    here: Tensor
    """at x_i, on batch i"""
    at_end: Tensor
    """at x_T, on batch i"""
    before: Tensor | None = None
    """at x_{i-1}, on batch i; for "exact", from the second point on"""
    at_snapshot: Tensor | None = None
    """at x_s, on batch i; for "svrg" """
    snapshot_mean: Tensor | None = None
    """mu; for "svrg" """


class Streams:
    """The gradient, the corrections, and what is still missing of the gradient at the end of the path: newest values
    and moving averages.

    Args:
        settings: of the estimates.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings, self.steps = settings, 0
        self._values: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}
        self._reference: Tensor | None = None
        self._sum = torch.empty(0)  # of the gradients since the last renewal
        self._sum_at_end = torch.empty(0)

    def step(self, gradients: Gradients) -> None:
        """Goes on by a point."""
        last = self._values.get(GRADIENT)
        self.steps += 1
        g, zero = gradients.here, torch.zeros_like(gradients.here)
        self._values = {GRADIENT: g, TO_END: gradients.at_end - g}
        for form in self.settings.forms:
            self._values[form] = zero
        self._correct("approximate", g, last)
        self._correct("exact", g, gradients.before)
        self._correct("reference", self._reference, g)
        self._correct("svrg", gradients.snapshot_mean, gradients.at_snapshot)
        rate = 1 - self.settings.beta1
        for name, value in self._values.items():
            self._averages[name] = torch.lerp(self._averages.get(name, zero), value, rate)
        self._collect(gradients)

    def vectors(self) -> Tensor:
        """At the end: the newest values, the averages (without the bias of m_0 = 0), and the mean gradient at the end
        of the path over all batches; (settings.vectors, size)."""
        rows = [self._values[name] for name in self.settings.streams]
        rows += [self._averages[name] / (1 - self.settings.beta1**self.steps) for name in self.settings.streams]
        return torch.stack([*rows, self._sum_at_end / self.steps])

    def _correct(self, form: str, left: Tensor | None, right: Tensor | None) -> None:
        if form in self.settings.forms and left is not None and right is not None:
            self._values[form] = left - right

    def _collect(self, gradients: Gradients) -> None:
        first = self.steps == 1
        self._sum_at_end = gradients.at_end.clone() if first else self._sum_at_end.add_(gradients.at_end)
        if "reference" not in self.settings.forms:
            return
        begins = (self.steps - 1) % self.settings.interval == 0
        self._sum = gradients.here.clone() if begins else self._sum.add_(gradients.here)
        if self.steps % self.settings.interval == 0:
            self._reference = self._sum / self.settings.interval


class Combinations:
    """Each estimate, and the truth, as the factors of the rows of `Streams.vectors`; each (vectors,), float64."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    def estimate(self, case: Case, averaged: bool) -> Tensor:
        """The last c, or m."""
        factors = self._row(GRADIENT, averaged)
        if case.form == "plain":
            return factors
        beta1 = self.settings.beta1
        boost = beta1 / (1 - beta1) if case.form in ("approximate", "exact") else 1.0
        return factors + case.gamma * boost * self._row(case.form, averaged)

    def target(self, averaged: bool) -> Tensor:
        """What the plain estimate would be with all its batches at the end of the path. Its mean is the true gradient
        there, and most of its noise is that of the estimates, so that a bias is seen in the difference."""
        return self._row(GRADIENT, averaged) + self._row(TO_END, averaged)

    def truth(self) -> Tensor:
        """The mean gradient at the end of the path over all batches."""
        return torch.eye(self.settings.vectors, dtype=torch.float64)[-1]

    def _row(self, stream: str, averaged: bool) -> Tensor:
        streams = self.settings.streams
        return torch.eye(self.settings.vectors, dtype=torch.float64)[streams.index(stream) + averaged * len(streams)]


def on_white_noise(settings: Settings, points: int) -> Tensor:
    """Products of the vectors with each other, (vectors, vectors), where a batch's gradient is the same wherever it is
    taken, and is noise of variance 1 that no other batch shares: every batch is a coordinate of its own."""
    batches = torch.eye(points + -(-points // settings.interval), dtype=torch.float64)
    streams = Streams(settings)
    for i in range(points):
        mean = batches[points + i // settings.interval] / settings.snapshot_batches**0.5
        streams.step(Gradients(batches[i], batches[i], batches[i], batches[i], mean))
    vectors = streams.vectors()
    return vectors @ vectors.T


def parse_cases(texts: Sequence[str]) -> tuple[Case, ...]:
    """Cases from FORM:GAMMA.

    Raises:
        ValueError: a text of another form; the message says what is allowed.
    """
    cases = []
    for text in texts:
        form, _, gamma = text.partition(":")
        try:
            case = Case(form, float(gamma))
        except ValueError:
            case = Case("", 0.0)
        if case.form not in FORMS or not abs(case.gamma) < 1e6:
            raise ValueError(f"{text!r} must be FORM:GAMMA, such as exact:0.025, with FORM one of {', '.join(FORMS)}")
        cases.append(case)
    return tuple(dict.fromkeys(cases))
