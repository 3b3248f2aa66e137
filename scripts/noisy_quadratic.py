#!/usr/bin/env python3
"""How far the moving average of MARS is from the true gradient, on a quadratic where both are known.

    python scripts/noisy_quadratic.py

f(x) = 1/2 (x - a)^T H (x - a), so grad f(x) = H (x - a); batch xi gives g(x, xi) = grad f(x) + n(xi), with n of
mean 0 and variance s^2 in each coordinate. The iterates x_t follow a path laid down beforehand, whatever the optimizer
does, on which the true gradient changes by d_t = grad f(x_t) - grad f(x_{t-1}). `optim.MARS` itself (lr 0, no clip)
makes m_t = b m_{t-1} + (1-b) c_t, c_t = g_t + gamma b/(1-b) (g_t - r_t) (arXiv 2411.10438, Algorithm 1; b is beta1).

The error e_t = m_t - grad f(x_t), with the reference r_t written out:

    exact        r_t = grad f(x_{t-1}) + n_t      e_t = b e_{t-1} + (1-b) n_t - b (1-gamma) d_t
    approximate  r_t = grad f(x_{t-1}) + n_{t-1}  e_t = the same + gamma b (n_t - n_{t-1})

from e_0 = -grad f(x_1), since m_0 = 0; the first step makes no correction, so d_1 = 0 and n_0 = n_1. Solved for a
constant d, with the mean of e_t called the lag:

    lag, both forms        -b^t grad f(x_1) - (1-gamma) b (1 - b^(t-1)) / (1-b) d
    variance, exact        s^2 (1-b)/(1+b) (1 - b^(2t))
    variance, approximate  s^2 (h^2 + (1-gamma)^2 (1-b)/(1+b) (b^2 - b^(2t-2)) + b^(2t-2) (1-b-gamma)^2),  t > 1

h = gamma + (1-gamma)(1-b) is the weight of n_t, (1-gamma)(1-b) b^k that of n_{t-k} and b^(t-1) (1-b-gamma) that of
n_1: m_t = gamma g_t + (1-gamma) EMA_b(g), but for the first step. In the limit of t the approximate variance is
s^2 (gamma^2 + 2 gamma (1-gamma)(1-b) + (1-gamma)^2 (1-b)/(1+b)), that of plain momentum (gamma = 0) plus
s^2 2 b gamma (1-b + b gamma)/(1+b); its squared lag is less by d^2 gamma (2-gamma) b^2/(1-b)^2. The two are equal at

    d^2 / s^2 = 2 (1-b)^2 (1-b + b gamma) / (b (1+b) (2-gamma)).

Exact with gamma = 1 is STORM (arXiv 1905.10018): no lag at plain momentum's variance. Noise that does not depend on x
is the most favourable case for the exact form, as it cancels in g_t - r_t; noise that does would add
gamma b (n(x_t, xi_t) - n(x_{t-1}, xi_t)) to e_t.
"""

import argparse
import itertools
import json
import math
import sys
import textwrap
from collections.abc import Iterable, Iterator
from dataclasses import asdict, astuple, dataclass
from pathlib import Path
from typing import NoReturn

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from optim import MARS
from training.console import fail

COORDINATES = 8
SETTLED = 1e-5  # averages start when what is left of the first gradient, b^t, is below this
TIME_CONSTANTS = 30  # averages go over this many times 1 / (1 - b) steps
WIDTH = 110


@dataclass(frozen=True)
class Case:
    form: str  # plain, approximate or exact
    gamma: float


PLAIN = Case("plain", 0.0)
CASES = (PLAIN, *(Case(form, gamma) for form in ("approximate", "exact") for gamma in (0.025, 1.0)))


@dataclass(frozen=True)
class Moments:
    """Mean squared error and its two parts, each a mean over the coordinates."""

    lag_squared: float
    variance: float
    mse: float


@dataclass(frozen=True)
class Row:
    """A case, in units of the noise's variance. Standard errors are over the replicas."""

    case: Case
    measured: Moments
    standard_error: Moments
    closed: Moments
    relative: float
    """MSE relative to plain momentum's on the same noise"""
    relative_error: float
    """standard error of that"""


class ArgumentError(Exception):
    """Arguments that cannot be used; the message is for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (python scripts/noisy_quadratic.py --help lists what is allowed)")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/noisy_quadratic.py",
        description="Error of MARS's moving average against the true gradient of a noisy quadratic.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--beta1", type=float, default=0.95, help="decay of m; the time grows as 1 / (1 - beta1)")
    parser.add_argument("--noise", type=float, default=1.0, help="standard deviation of a gradient's coordinate")
    parser.add_argument("--drift", type=float, default=0.015, help="change of the true gradient in a step, rms")
    parser.add_argument("--replicas", type=int, default=512, help="independent copies")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the numbers there")
    args = parser.parse_args(argv)
    for name, allowed, good in (
        ("beta1", "a number above 0 and below 1", 0 < args.beta1 < 1),
        ("noise", "a finite number above 0", 0 < args.noise < math.inf),
        ("drift", "a finite number, not negative", 0 <= args.drift < math.inf),
        ("replicas", "2 or more", args.replicas >= 2),
        ("seed", "from 0 to 2^32 - 1", 0 <= args.seed < 2**32),
    ):
        if not good:
            parser.error(f"argument --{name}: {getattr(args, name)} must be {allowed}")
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        rows = compute(args.beta1, args.noise, args.drift, args.replicas, args.seed)
        print("\n".join(text(rows, args.beta1, args.noise, args.drift, args.replicas)))
        if args.json:
            write_json(args.json, rows, args)
    except ArgumentError as error:
        fail(str(error))
        return 2
    return 0


def compute(beta1: float, noise: float, drift: float, replicas: int, seed: int) -> list[Row]:
    """A row for each of CASES, all with the same path and noise."""
    generator = torch.Generator().manual_seed(seed)
    quadratic = random_quadratic(generator)
    path = straight_path(quadratic, noise, drift, sum(durations(beta1)), generator)
    first, second = quadratic.gradient(path[0]), quadratic.gradient(path[1])
    rows: list[Row] = []
    plain = torch.empty(0)
    for case in CASES:
        batches = noise_of_batches((COORDINATES, replicas), noise, seed + 1)
        settled = itertools.islice(errors(case, beta1, quadratic, path, batches), durations(beta1)[0], None)
        mean, square = time_averages(error / noise for error in settled)
        squared = square.mean(dim=0)
        plain = squared if case == PLAIN else plain
        relative = (squared.mean() / plain.mean()).item()
        row = Row(
            case,
            *measured(mean, square),
            closed=closed_form(case, beta1, 1.0, first / noise, (second - first) / noise),
            relative=relative,
            relative_error=error_of_mean((squared - relative * plain) / plain.mean()),
        )
        rows.append(row)
    return rows


def durations(beta1: float) -> tuple[int, int]:
    """Steps before the averages and steps that they go over."""
    return math.ceil(math.log(SETTLED) / math.log(beta1)), math.ceil(TIME_CONSTANTS / (1 - beta1))


@dataclass(frozen=True)
class Quadratic:
    """f(x) = 1/2 (x - a)^T H (x - a)."""

    hessian: Tensor
    """H, (coordinates, coordinates)"""
    minimum: Tensor
    """a, (coordinates, 1)"""

    def gradient(self, x: Tensor) -> Tensor:
        """grad f of each column of x, (coordinates, any)."""
        return self.hessian @ (x - self.minimum)


def random_quadratic(generator: torch.Generator) -> Quadratic:
    """Eigenvalues from 0.1 to 10 in random directions, float64."""
    normal = torch.randn(COORDINATES, COORDINATES + 1, dtype=torch.float64, generator=generator)
    directions = torch.linalg.qr(normal[:, 1:]).Q
    eigenvalues = torch.logspace(-1, 1, COORDINATES, dtype=torch.float64)
    return Quadratic((directions * eigenvalues) @ directions.T, normal[:, :1])


def straight_path(quadratic: Quadratic, noise: float, drift: float, steps: int, generator: torch.Generator) -> Tensor:
    """x_1 to x_steps at a constant velocity, (steps, coordinates, 1): the true gradient starts at an rms of `noise` and
    changes by an rms of `drift` a step."""
    gradients = torch.randn(2, COORDINATES, 1, dtype=torch.float64, generator=generator)
    gradients /= gradients.square().mean(dim=1, keepdim=True).sqrt()
    start, velocity = torch.linalg.solve(quadratic.hessian, gradients)
    times = torch.arange(steps, dtype=torch.float64).view(-1, 1, 1)
    return quadratic.minimum + noise * start + drift * times * velocity


def noise_of_batches(shape: tuple[int, int], scale: float, seed: int) -> Iterator[Tensor]:
    """n(xi) of batch after batch without end: normal, independent in all coordinates and replicas."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield torch.randn(shape, dtype=torch.float64, generator=generator) * scale


def errors(case: Case, beta1: float, quadratic: Quadratic, path: Tensor, batches: Iterator[Tensor]) -> Iterator[Tensor]:
    """e_t for t = 1, 2, …, from the optimizer itself.

    Args:
        path: x_t, (steps, coordinates, 1); every replica follows it.
        batches: n(xi_t), each (coordinates, replicas), for one batch more than there are steps.

    Yields:
        (coordinates, replicas)
    """
    batch = next(batches)
    x = nn.Parameter(torch.zeros_like(batch))
    exact = case.form == "exact"
    optimizer = MARS([x], lr=0.0, betas=(beta1, 0.99), gamma=case.gamma, exact=exact, clip="none", first_step="paper")
    for position, next_batch in zip(path, batches, strict=False):
        with torch.no_grad():
            x.copy_(position)
        true = quadratic.gradient(x.detach())
        if exact:
            x.grad = true + next_batch
            optimizer.record_reference_gradient()
        x.grad = true + batch
        optimizer.step()
        yield optimizer.state[x]["exp_avg"] - true
        batch = next_batch


def time_averages(series: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Of e_t and of e_t^2, each shaped like e_t."""
    count, total, total_square = 0, torch.tensor(0.0), torch.tensor(0.0)
    for error in series:
        count, total, total_square = count + 1, total + error, total_square + error.square()
    return total / count, total_square / count


def measured(mean: Tensor, square: Tensor) -> tuple[Moments, Moments]:
    """Estimates without bias, and their standard errors, from averages of e_t and of e_t^2, (coordinates, replicas)."""
    coordinates, replicas = mean.shape
    lag = mean.mean(dim=1, keepdim=True)
    of_lag = mean.var(dim=1, keepdim=True) / replicas  # its sampling variance, by which its square is too large
    squared = square.mean(dim=0)
    spread = (square - 2 * lag * mean + lag.square()).mean(dim=0)
    lag_squared = (lag.square() - of_lag).mean().item()
    mse = squared.mean().item()
    lag_error = ((4 * max(lag_squared, 0.0) * of_lag + 2 * of_lag.square()).mean() / coordinates).sqrt().item()
    return (
        Moments(lag_squared, mse - lag_squared, mse),
        Moments(lag_error, error_of_mean(spread), error_of_mean(squared)),
    )


def error_of_mean(values: Tensor) -> float:
    """Standard error of the mean of independent values, (replicas,)."""
    return (values.std() / len(values) ** 0.5).item()


def closed_form(case: Case, beta1: float, noise: float, first: Tensor, change: Tensor, t: float = math.inf) -> Moments:
    """The moments at step t for grad f(x_1) = `first` and d = `change`, both (coordinates, 1)."""
    lag_squared = lag(case.gamma, beta1, first, change, t).square().mean().item()
    of_noise = noise**2 * variance(case, beta1, t)
    return Moments(lag_squared, of_noise, lag_squared + of_noise)


def lag(gamma: float, beta1: float, first: Tensor, change: Tensor, t: float = math.inf) -> Tensor:
    """Mean of e_t, shaped like `first`."""
    return -(beta1**t) * first - (1 - gamma) * beta1 * (1 - beta1 ** (t - 1)) / (1 - beta1) * change


def variance(case: Case, beta1: float, t: float = math.inf) -> float:
    """Variance of e_t for noise of variance 1."""
    b, gamma = beta1, case.gamma
    of_mean = (1 - b) / (1 + b)
    if case.form != "approximate" or t == 1:
        return of_mean * (1 - b ** (2 * t))
    newest = gamma + (1 - gamma) * (1 - b)
    oldest = b ** (t - 1) * (1 - b - gamma)
    return newest**2 + (1 - gamma) ** 2 * of_mean * (b**2 - b ** (2 * t - 2)) + oldest**2


def crossing(gamma: float, beta1: float) -> float:
    """drift / noise above which the approximate form has a lower MSE than plain momentum, for 0 < gamma < 2."""
    b = beta1
    return (1 - b) * math.sqrt(2 * (1 - b + b * gamma) / (b * (1 + b) * (2 - gamma)))


def text(rows: list[Row], beta1: float, noise: float, drift: float, replicas: int) -> list[str]:
    """What is printed: what was computed, the table, and what it shows."""
    before, steps = durations(beta1)
    lines = [
        "Error of m_t against the true gradient, in units of the noise's variance.",
        f"beta1 {beta1:g}, drift / noise {drift / noise:.4g}; averages over {COORDINATES} coordinates, "
        f"{replicas} replicas and {steps} steps (after {before}).",
        "",
        *table(rows),
        "",
    ]
    for sentence in sentences(rows, beta1, drift / noise):
        lines += textwrap.wrap(sentence, WIDTH)
    return lines


def table(rows: list[Row]) -> list[str]:
    """A line a case, with decimals enough for four digits of the lowest error."""
    decimals = max(0, 3 - math.floor(math.log10(min(row.closed.mse for row in rows))))
    width = max(10, decimals + 5)
    names = "".join(f"{name:>{width}}" for name in ("lag^2", "variance", "MSE"))
    lines = [
        f"{'':19}  {'measured':>{3 * width}}  {'closed form':>{3 * width}}  {'MSE relative':>14}",
        f"{'form':12}{'gamma':>7}  {names}  {names}  {'to plain':>14}",
    ]
    lines.append("-" * len(lines[-1]))
    for row in rows:
        groups = [
            # Adding 0 makes -0 positive.
            "".join(f"{round(value, decimals) + 0.0:{width}.{decimals}f}" for value in astuple(moments))
            for moments in (row.measured, row.closed)
        ]
        lines.append(f"{row.case.form:12}{row.case.gamma:7g}  {groups[0]}  {groups[1]}  {row.relative:#14.3g}")
    return lines


def sentences(rows: list[Row], beta1: float, ratio: float) -> list[str]:
    """Each form against plain momentum, where the approximate form is better, and how well the closed form holds."""
    lines = []
    for form, of_form in itertools.groupby(rows[1:], lambda row: row.case.form):
        parts = "; ".join(against_plain(row, rows[0]) for row in of_form)
        lines.append(f"{form.capitalize()} against plain momentum: {parts}.")
    gammas = [row.case.gamma for row in rows if row.case.form == "approximate"]
    where = " or ".join(f"{crossing(gamma, beta1):.4g} (gamma {gamma:g})" for gamma in gammas)
    lines.append(
        "By the closed form the approximate error is below plain momentum's where drift / noise is above "
        f"{where}; here it is {ratio:.4g}."
    )
    off = [
        abs(found - expected) / error
        for row in rows
        for found, expected, error in zip(*map(astuple, (row.measured, row.closed, row.standard_error)), strict=True)
    ]
    lines.append(f"Measured and closed form differ by at most {max(off):.1f} standard errors.")
    return lines


def against_plain(row: Row, plain: Row) -> str:
    """What is left of the lag, what becomes of the variance, and whose error is lower (by three standard errors)."""
    times = f"{row.measured.variance / plain.measured.variance:.2f} times the variance"
    if plain.closed.lag_squared > 0.01 * plain.closed.variance:
        share = 100 * row.measured.lag_squared / plain.measured.lag_squared
        times = f"{round(share, 1) + 0.0:.1f} % of the squared lag, {times}"
    if abs(row.relative - 1) <= 3 * row.relative_error + 1e-9:
        verdict = "as large an error"
    else:
        verdict = "a lower error" if row.relative < 1 else "a higher error"
    return f"gamma {row.case.gamma:g} has {times}, {verdict}"


def write_json(path: Path, rows: list[Row], args: argparse.Namespace) -> None:
    settings = {name: getattr(args, name) for name in ("beta1", "noise", "drift", "replicas", "seed")}
    values = {
        **settings,
        "coordinates": COORDINATES,
        "steps": durations(args.beta1)[1],
        "unit": "noise variance",
        "rows": [
            {
                "form": row.case.form,
                "gamma": row.case.gamma,
                "measured": asdict(row.measured),
                "standard_error": asdict(row.standard_error),
                "closed_form": asdict(row.closed),
                "mse_relative_to_plain": row.relative,
                "crossing": crossing(row.case.gamma, args.beta1) if row.case.form == "approximate" else None,
            }
            for row in rows
        ],
    }
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as problem:
        raise ArgumentError(f"{path.resolve()} cannot be written: {problem.strerror or problem}") from None


if __name__ == "__main__":
    sys.exit(main())
