"""From the products that were kept of the replicates to bias, variance and error of every estimate.

u is an estimate, t the true gradient; replicates are independent. The mean of products u · w over all pairs of
different replicates estimates E u · E w, and that over each replicate with itself E (u · w). So no square is too large
because few replicates make a noisy mean, and one that is zero comes out negative about as often as positive.

    bias, the lag of an average    |E u - t|^2
    variance                       E |u - E u|^2
    mean squared error             E |u - t|^2, the sum of both
    cosine                         E u · t / sqrt(E |u|^2 |t|^2)
    noise scale                    B tr(Sigma) / |t|^2, Sigma the covariance of the gradient of B sequences
                                   (McCandlish et al. 2018, arXiv 1812.06162, "simple")

Standard errors are from a jackknife over groups of replicates: all is computed again without each of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scripts.noise.estimates import PLAIN, Case, Combinations, Settings, on_white_noise
from scripts.noise.sampling import Layout, Sample

ALL = "all"
SINGLE, AVERAGE = "c", "m"
CLIP = 1.0  # the norm to which MARS clips c
Tree = dict[str, Any]  # of numbers


@dataclass(frozen=True)
class Products:
    """Means of products of the vectors, each (V, V)."""

    of_means: Tensor
    """E v · E w"""
    means_of: Tensor
    """E (v · w)"""

    def square_of_mean(self, u: Tensor) -> float:
        return (u @ self.of_means @ u).item()

    def variance(self, u: Tensor) -> float:
        return (u @ (self.means_of - self.of_means) @ u).item()

    def cosine(self, u: Tensor, t: Tensor) -> float:
        norms = (u @ self.means_of @ u).item() * self.square_of_mean(t)
        return (u @ self.of_means @ t).item() / math.sqrt(norms) if norms > 0 else math.nan


class Analysis:
    """What is to be found out about a sample.

    Args:
        cases: beside plain.
        sequences: B, of a batch.
    """

    def __init__(self, sample: Sample, layout: Layout, settings: Settings, cases: Sequence[Case], sequences: int):
        self.sample, self.layout, self.settings, self.sequences = sample, layout, settings, sequences
        self.cases = (PLAIN, *(case for case in cases if case != PLAIN))
        self.combinations = Combinations(settings)

    def result(self) -> Tree:
        """By kind of parameters, with all together as the last: every figure as {"value", "error"}, with None for what
        has no meaning (a cosine to a gradient that is lost in the noise)."""
        every = torch.arange(int(self.sample.groups.max()) + 1)
        whole = self._by_kind(every)
        without = [self._by_kind(every[every != left_out]) for left_out in every]
        return with_errors(whole, without)

    def expected(self) -> Tree:
        """Variances of c and m by case, in units of the plain gradient's, if the noise of a batch were the same along
        the whole path."""
        products = on_white_noise(self.settings, self.sample.squares.shape[1])
        variances = {
            name: {str(case): (u @ products @ u).item() for case, u in self._estimates(averaged)}
            for name, averaged in ((SINGLE, False), (AVERAGE, True))
        }
        return {
            name: {case: {"variance": v, "relative_variance": v / of[str(PLAIN)]} for case, v in of.items()}
            for name, of in variances.items()
        }

    def _by_kind(self, groups: Tensor) -> Tree:
        chosen = torch.isin(self.sample.groups, groups)
        return {name: self._of_kind(index, groups, chosen) for index, name in enumerate((*self.layout.names, ALL))}

    def _of_kind(self, kind: int, groups: Tensor, chosen: Tensor) -> Tree:
        count = int(chosen.sum())
        own = self.sample.within[chosen, kind].sum(dim=0)
        total = self.sample.between[kind][groups][:, :, groups].sum(dim=(0, 2))
        products = Products((total - own) / (count * (count - 1)), own / count)
        return {
            "gradient": self._gradient(products, self.sample.squares[chosen, :, kind]),
            SINGLE: self._rows(products, averaged=False, clipped=self._clip_rates(kind, chosen)),
            AVERAGE: self._rows(products, averaged=True),
            "best": {name: self._best(products, name == AVERAGE) for name in (SINGLE, AVERAGE)},
        }

    def _gradient(self, products: Products, squares: Tensor) -> Tree:
        """Of the gradient at the end of the path; squares (R, T)."""
        points = squares.shape[1]
        truth = self.combinations.truth()
        # The mean of a replicate's T gradients has a T-th of their variance beside the square of the true gradient.
        mean_square = (truth @ products.means_of @ truth).item()
        noise = (squares.mean().item() - mean_square) * points / (points - 1)
        square = products.square_of_mean(truth)
        norms = squares.sqrt().flatten()
        mean, deviation = norms.mean().item(), norms.std().item()
        return {
            "norm": math.sqrt(square) if square > 0 else math.nan,
            "noise": noise,
            "noise_scale": self.sequences * noise / square if square > 0 else math.nan,
            "norms_mean": mean,
            "norms_deviation": deviation,
            "norms_variation": deviation / mean,
        }

    def _rows(self, products: Products, averaged: bool, clipped: dict[str, float] | None = None) -> Tree:
        rows: Tree = {}
        target = self.combinations.target(averaged)
        for case, u in self._estimates(averaged):
            bias, variance = products.square_of_mean(u - target), products.variance(u)
            rows[str(case)] = row = {"bias_squared": bias, "variance": variance, "mse": bias + variance}
            plain = rows[str(PLAIN)]
            row["relative_bias_squared"] = bias / plain["mse"]  # to the error: the plain gradient has no bias
            row["relative_variance"] = variance / plain["variance"]
            row["relative_mse"] = row["mse"] / plain["mse"]
            row["cosine"] = products.cosine(u, self.combinations.truth())
            if clipped is not None:
                row["clip_rate"] = clipped[str(case)]
        return rows

    def _best(self, products: Products, averaged: bool) -> Tree:
        """The gamma of least error, a parabola in gamma, of each form, and that error relative to plain's."""
        target, best = self.combinations.target(averaged), {}
        for form in self.settings.forms:
            left, middle, right = (
                products.square_of_mean(u - target) + products.variance(u)
                for u in (self.combinations.estimate(Case(form, gamma), averaged) for gamma in (-1.0, 0.0, 1.0))
            )
            slope, curvature = (right - left) / 2, (right + left) / 2 - middle
            gamma = -slope / (2 * curvature) if curvature > 0 else math.nan
            best[form] = {"gamma": gamma, "relative_mse": (middle + slope * gamma / 2) / middle}
        return best

    def _clip_rates(self, kind: int, chosen: Tensor) -> dict[str, float]:
        """The share of tensors of a kind, of all replicates, whose c is longer than 1."""
        names = (*self.layout.names, ALL)
        tensors = torch.tensor([names[kind] in (ALL, name) for name in self.layout.kinds])
        products = self.sample.tensor_products[chosen][:, tensors]
        return {
            str(case): (torch.einsum("v,rtvw,w->rt", u, products, u) > CLIP**2).double().mean().item()
            for case, u in self._estimates(averaged=False)
        }

    def _estimates(self, averaged: bool) -> list[tuple[Case, Tensor]]:
        return [(case, self.combinations.estimate(case, averaged)) for case in self.cases]


def with_errors(whole: Tree, without: Sequence[Tree]) -> Tree:
    """Each number of a tree with its jackknife error; `without` has the tree without each of the groups."""
    result: Tree = {}
    for key, value in whole.items():
        parts = [tree[key] for tree in without]
        if isinstance(value, dict):
            result[key] = with_errors(value, parts)
        else:
            error = math.sqrt((len(parts) - 1) * torch.tensor(parts, dtype=torch.float64).var(correction=0).item())
            result[key] = {"value": finite(value), "error": finite(error)}
    return result


def finite(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None
