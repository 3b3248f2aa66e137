"""What several seeds say: mean and spread, and whether a difference is more than chance."""

import math
from dataclasses import dataclass

import numpy as np

# Student's t: the 0.975 quantile for 1, 2, … degrees of freedom (any statistical table).
T_QUANTILES = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228),
    *(2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086),
    *(2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042),
)


@dataclass(frozen=True)
class Spread:
    """Mean and sample standard deviation (divisor n - 1; None for a single value) of n values."""

    mean: float
    sd: float | None
    n: int


def spread(values: list[float | None]) -> Spread | None:
    """None where there is no value, or where one of them is unknown: a mean of the others would be of other runs."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    sd = float(np.std(known, ddof=1)) if len(known) > 1 else None
    return Spread(float(np.mean(known)), sd, len(known))


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences, with its 95 % confidence interval for normally distributed differences."""

    mean: float
    sd: float
    n: int
    low: float
    high: float

    @property
    def more_than_chance(self) -> bool:
        return self.low > 0 or self.high < 0


def paired_difference(a: list[float], b: list[float]) -> Difference | None:
    """a - b, pair by pair. None with fewer than two pairs or with a value that is not a number.

    Beyond 30 degrees of freedom the quantile of 30 is used, which makes the interval up to 4 % too wide.
    """
    differences = np.subtract(a, b)
    n = len(differences)
    if n < 2 or not np.isfinite(differences).all():
        return None
    mean, sd = float(differences.mean()), float(differences.std(ddof=1))
    half = T_QUANTILES[min(n - 1, len(T_QUANTILES)) - 1] * sd / math.sqrt(n)
    return Difference(mean, sd, n, mean - half, mean + half)
