"""scripts/noisy_quadratic.py: the optimizer's error on known gradients against its closed form, and what is printed."""

import json
import math
import runpy
import sys
from dataclasses import astuple
from pathlib import Path

import pytest
import torch

from scripts import noisy_quadratic as nq

ROOT = Path(__file__).resolve().parents[2]
BETA1 = 0.9
NOISE, DRIFT = 2.0, 0.25  # in plain momentum's error, the squared lag is then 1.27 and the variance 0.21
GAMMAS = (0.0, 0.025, 0.4, 1.0)
BOTH_FORMS = [nq.Case(form, gamma) for form in ("approximate", "exact") for gamma in GAMMAS]


def case_id(case: nq.Case) -> str:
    return f"{case.form}-{case.gamma:g}"


@pytest.fixture
def generator() -> torch.Generator:
    return torch.Generator().manual_seed(3)


@pytest.fixture(scope="module")
def rows() -> dict[nq.Case, nq.Row]:
    return {row.case: row for row in nq.compute(BETA1, NOISE, DRIFT, replicas=256, seed=1)}


# --- the recursion and its solution, to rounding ---


@pytest.mark.parametrize("case", BOTH_FORMS, ids=case_id)
def test_the_error_follows_its_recursion_on_an_irregular_drift(case: nq.Case, generator: torch.Generator) -> None:
    """e_t = b e_{t-1} + (1-b) n_t - b (1-gamma) d_t, and in the approximate form + gamma b (n_t - n_{t-1})."""
    quadratic = nq.random_quadratic(generator)
    path = torch.randn(40, nq.COORDINATES, 1, dtype=torch.float64, generator=generator).cumsum(dim=0)
    noise = torch.randn(41, nq.COORDINATES, 3, dtype=torch.float64, generator=generator)
    found = list(nq.errors(case, BETA1, quadratic, path, iter(noise)))
    assert len(found) == len(path)

    true = [quadratic.hessian @ (x - quadratic.minimum) for x in path]
    error = -true[0]
    for t in range(len(path)):
        change = true[t] - true[t - 1] if t > 0 else torch.zeros_like(true[0])
        error = BETA1 * error + (1 - BETA1) * noise[t] - BETA1 * (1 - case.gamma) * change
        if case.form == "approximate" and t > 0:
            error = error + case.gamma * BETA1 * (noise[t] - noise[t - 1])
        torch.testing.assert_close(found[t], error, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("case", BOTH_FORMS, ids=case_id)
def test_the_closed_form_holds_at_every_step(case: nq.Case, generator: torch.Generator) -> None:
    """Replica 0 has no noise, so its error is the lag. Replica s has a noise of 1 on batch s alone, so the rest of its
    error is the weight of that batch, and the squares of the weights add up to the variance."""
    steps = 30
    quadratic = nq.random_quadratic(generator)
    path = nq.straight_path(quadratic, NOISE, DRIFT, steps, generator)
    first, second = (quadratic.gradient(x) for x in path[:2])
    impulses = torch.eye(steps + 2, dtype=torch.float64)[1:, None].expand(-1, nq.COORDINATES, -1)
    for t, error in enumerate(nq.errors(case, BETA1, quadratic, path, iter(impulses)), start=1):
        lag, weights = error[:, :1], error[:, 1:] - error[:, :1]
        torch.testing.assert_close(lag, nq.lag(case.gamma, BETA1, first, second - first, t), rtol=1e-12, atol=1e-12)
        variance = weights.square().sum(dim=1).mean().item()
        assert variance == pytest.approx(nq.variance(case, BETA1, t), abs=1e-12)
        closed = nq.closed_form(case, BETA1, 1.0, first, second - first, t)
        assert closed.mse == pytest.approx(lag.square().mean().item() + variance, rel=1e-12)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_closed_form_settles(gamma: float) -> None:
    """By hand: the approximate form is gamma g_t + (1-gamma) EMA(g), and the weights of an EMA are (1-b) b^k."""
    first, change = torch.ones(1, 1), torch.full((1, 1), 0.1)
    assert nq.lag(gamma, 0.9, first, change).item() == pytest.approx(-9 * (1 - gamma) * 0.1)
    average = 0.1 / 1.9
    assert nq.variance(nq.Case("exact", gamma), 0.9) == pytest.approx(average)
    expected = gamma**2 + 2 * gamma * (1 - gamma) * 0.1 + (1 - gamma) ** 2 * average
    assert nq.variance(nq.Case("approximate", gamma), 0.9) == pytest.approx(expected)


# --- measured on random noise ---


@pytest.mark.parametrize("case", nq.CASES, ids=case_id)
def test_measured_is_the_closed_form(case: nq.Case, rows: dict[nq.Case, nq.Row]) -> None:
    """Within four standard errors, which are those that theory gives.

    Of T steps' average of e_t, the variance is s^2 / T in all cases, as the weights of a batch add up to 1. Its
    replicas and coordinates are independent.
    """
    row = rows[case]
    found, expected, errors = astuple(row.measured), astuple(row.closed), astuple(row.standard_error)
    for name, value, closed, error in zip(("lag^2", "variance", "MSE"), found, expected, errors, strict=True):
        assert abs(value - closed) < 4 * error, name
    assert row.measured.mse == pytest.approx(row.measured.lag_squared + row.measured.variance)

    steps, coordinates, replicas = nq.durations(BETA1)[1], nq.COORDINATES, 256
    of_lag = 1 / (steps * replicas)
    theory = math.sqrt((4 * row.closed.lag_squared * of_lag + 2 * of_lag**2) / coordinates)
    assert row.standard_error.lag_squared == pytest.approx(theory, rel=0.3)
    if case.form != "approximate":  # e_t is then an autoregression with b^k for its correlations
        theory = row.closed.variance * math.sqrt(2 * (1 + BETA1**2) / (1 - BETA1**2) / (steps * replicas * coordinates))
        assert row.standard_error.variance == pytest.approx(theory, rel=0.3)


def test_the_closed_form_of_the_run(rows: dict[nq.Case, nq.Row]) -> None:
    """In units of the noise's variance: lag b/(1-b) drift/noise, squared."""
    plain = rows[nq.PLAIN].closed
    assert plain.lag_squared == pytest.approx((9 * DRIFT / NOISE) ** 2)
    assert plain.variance == pytest.approx(0.1 / 1.9)


def test_exact_with_gamma_one_has_no_lag_and_a_lower_error_than_plain_momentum(rows: dict[nq.Case, nq.Row]) -> None:
    exact, plain = rows[nq.Case("exact", 1.0)], rows[nq.PLAIN]
    assert exact.closed.lag_squared < 1e-9
    assert abs(exact.measured.lag_squared) < 4 * exact.standard_error.lag_squared < 1e-4 * plain.measured.lag_squared
    assert exact.measured.variance == pytest.approx(plain.measured.variance, rel=0.02)
    assert exact.relative + 4 * exact.relative_error < 1
    assert exact.relative == pytest.approx(exact.closed.mse / plain.closed.mse, rel=0.02)


@pytest.mark.parametrize("beta1", [0.5, 0.95])
@pytest.mark.parametrize("gamma", [0.025, 0.4, 1.0])
def test_the_approximate_form_is_better_above_the_crossing_only(beta1: float, gamma: float) -> None:
    def excess(ratio: float) -> float:
        first, change = torch.zeros(1, 1, dtype=torch.float64), torch.full((1, 1), ratio, dtype=torch.float64)
        case = nq.Case("approximate", gamma)
        return (
            nq.closed_form(case, beta1, 1.0, first, change).mse
            - nq.closed_form(nq.PLAIN, beta1, 1.0, first, change).mse
        )

    crossing = nq.crossing(gamma, beta1)
    assert excess(crossing) == pytest.approx(0, abs=1e-12)
    assert excess(0.99 * crossing) > 1e-6
    assert excess(1.01 * crossing) < -1e-6


def test_estimates_from_averages() -> None:
    """Two replicas and two coordinates, worked out: lags 2 and 0, of which the sampling variances are 1 and 0."""
    series = [torch.tensor([[0.0, 4.0], [1.0, -1.0]]), torch.tensor([[2.0, 2.0], [-1.0, 1.0]])]
    mean, square = nq.time_averages(series)
    torch.testing.assert_close(mean, torch.tensor([[1.0, 3.0], [0.0, 0.0]]))
    moments, _ = nq.measured(mean, square)
    assert astuple(moments) == pytest.approx(((4 - 1 + 0) / 2, 3.5 - 1.5, (6 + 1) / 2))


# --- the command ---


def output(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert nq.main([*argv, "--beta1=0.5", "--replicas=64"]) == 0
    return " ".join(capsys.readouterr().out.split())


def test_what_is_said_follows_the_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    crossing = nq.crossing(1.0, 0.5)
    below, above = output(capsys, f"--drift={0.8 * crossing}"), output(capsys, f"--drift={1.5 * crossing}")
    approximate = (
        "Approximate against plain momentum: gamma 0.025 has 95.1 % of the squared lag, 1.03 times the variance"
    )
    assert approximate in below
    assert approximate in above
    for said, verdict in ((below, "a higher error"), (above, "a lower error")):
        assert f"{verdict}. Exact against plain momentum" in said
        assert "gamma 1 has 0.0 % of the squared lag, 1.00 times the variance, a lower error. By" in said
        assert f"above {nq.crossing(0.025, 0.5):.4g} (gamma 0.025) or {crossing:.4g} (gamma 1); here" in said

    still = output(capsys, "--drift=0")
    assert "% of the squared lag" not in still
    assert "gamma 1 has 1.00 times the variance, as large an error. By" in still


def test_script_writes_table_and_json(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "numbers.json"
    settings = ["--beta1=0.5", "--noise=0.01", "--drift=0.01", "--replicas=16", f"--json={path}"]
    monkeypatch.setattr(sys, "argv", ["noisy_quadratic.py", *settings])
    with pytest.raises(SystemExit, match="0"):
        runpy.run_path(str(ROOT / "scripts/noisy_quadratic.py"), run_name="__main__")
    values = json.loads(path.read_text())
    assert (values["beta1"], values["noise"], values["drift"], values["replicas"]) == (0.5, 0.01, 0.01, 16)
    lines = capsys.readouterr().out.split("\n")
    assert max(map(len, lines)) <= nq.WIDTH
    start = next(number for number, line in enumerate(lines) if line.startswith("---"))
    for row, line in zip(values["rows"], lines[start + 1 :], strict=False):
        cells = [f"{row[kind][name]:.4f}" for kind in ("measured", "closed_form") for name in row["measured"]]
        cells = [cell.replace("-0.0000", "0.0000") for cell in cells]
        assert line.split() == [row["form"], f"{row['gamma']:g}", *cells, f"{row['mse_relative_to_plain']:#.3g}"]
    assert values["rows"][0]["closed_form"] == pytest.approx({"lag_squared": 1, "variance": 1 / 3, "mse": 4 / 3})


def test_one_seed_gives_the_same_numbers_and_another_others() -> None:
    def numbers(seed: int) -> list[nq.Row]:
        return nq.compute(0.1, 1.0, 0.1, replicas=8, seed=seed)

    assert numbers(1) == numbers(1)
    assert all(a.measured != b.measured for a, b in zip(numbers(1), numbers(2), strict=True))


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--beta1=1", "--beta1: 1.0 must be a number above 0 and below 1"),
        ("--beta1=0", "--beta1: 0.0 must be"),
        ("--beta1=nan", "--beta1: nan must be"),
        ("--noise=0", "--noise: 0.0 must be a finite number above 0"),
        ("--noise=inf", "--noise: inf must be"),
        ("--drift=-1", "--drift: -1.0 must be a finite number, not negative"),
        ("--drift=much", "--drift: invalid float value: 'much'"),
        ("--replicas=1", "--replicas: 1 must be 2 or more"),
        ("--seed=-1", "--seed: -1 must be from 0 to 2^32 - 1"),
        ("--gama=1", "unrecognized arguments: --gama=1"),
    ],
)
def test_bad_arguments(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert nq.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error
    assert "--help" in error


def test_json_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent" / "numbers.json"
    assert nq.main(["--beta1=0.5", "--replicas=2", "--json", str(path)]) == 2
    assert f"error: {path.resolve()} cannot be written: No such file or directory" in capsys.readouterr().err
