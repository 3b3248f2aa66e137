"""scripts/gradient_noise.py: estimates against the optimizer, moments against closed forms, paths against runs."""

import contextlib
import json
import math
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs import load_config
from data.tokens import open_dataset
from optim import MARS
from scripts import gradient_noise, noisy_quadratic
from scripts.noise.course import Course, LossGradient, Point, points_of
from scripts.noise.estimates import (
    FORMS,
    PLAIN,
    Case,
    Combinations,
    Gradients,
    Settings,
    Streams,
    on_white_noise,
)
from scripts.noise.sampling import SNAPSHOTS, Layout, gradients_needed, sample
from scripts.noise.statistics import Analysis, with_errors
from tests.conftest import Train
from tests.helpers import write_tokens
from training.checkpoint import read_checkpoint
from training.processes import Processes

BETA1 = 0.8
SIZE, POINTS, INTERVAL, SNAPSHOT_BATCHES = 48, 13, 4, 3
SETTINGS = Settings(FORMS, BETA1, INTERVAL, SNAPSHOT_BATCHES)
LAYOUT = Layout(("matrices", "vectors"), (32, 16))
CASES = tuple(Case(form, gamma) for form in FORMS for gamma in (0.1, 1.0))


def optimizer_of(case: Case, x: nn.Parameter) -> MARS:
    """The real one, whose weights stay where they are put."""
    settings: dict[str, Any] = {"preconditioner": "sgd", "clip": "none", "exact": case.form == "exact"}
    estimator = case.form if case.form in ("reference", "svrg") else "recursive"
    settings |= {"estimator": estimator, "reference_interval": INTERVAL}
    return MARS([x], lr=0.0, betas=(BETA1, 0.99), gamma=case.gamma, **settings)


# --- estimates ---


@pytest.mark.parametrize("case", CASES, ids=str)
def test_estimates_are_those_of_the_optimizer(case: Case) -> None:
    generator = torch.Generator().manual_seed(1)
    here, before, at_snapshot = torch.randn(3, POINTS, SIZE, dtype=torch.float64, generator=generator)
    of_snapshots = torch.randn(POINTS, SNAPSHOT_BATCHES, SIZE, dtype=torch.float64, generator=generator)
    x = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))
    optimizer, streams, averages = optimizer_of(case, x), Streams(SETTINGS), [torch.zeros(SIZE, dtype=torch.float64)]
    for i in range(POINTS):
        if case.form == "exact":
            x.grad = before[(i + 1) % POINTS].clone()  # at x_i, on the next batch
            optimizer.record_reference_gradient()
        if case.form == "svrg":
            if i % INTERVAL == 0:
                optimizer.take_snapshot()
                for gradient in of_snapshots[i]:
                    x.grad = gradient.clone()
                    optimizer.record_snapshot_gradient()
            x.grad = at_snapshot[i].clone()
            optimizer.record_reference_gradient()
        x.grad = here[i].clone()
        optimizer.step()
        averages.append(optimizer.state[x]["exp_avg"].clone())
        mean = of_snapshots[i // INTERVAL * INTERVAL].mean(dim=0)
        streams.step(Gradients(here[i], here[i], before[i] if i else None, at_snapshot[i], mean))
    vectors, combinations = streams.vectors(), Combinations(SETTINGS)
    average = averages[-1] / (1 - BETA1**POINTS)
    single = (averages[-1] - BETA1 * averages[-2]) / (1 - BETA1)
    torch.testing.assert_close(combinations.estimate(case, averaged=True) @ vectors, average)
    torch.testing.assert_close(combinations.estimate(case, averaged=False) @ vectors, single)


def test_same_noise_along_the_path() -> None:
    """By hand, and where the other script has it, by its closed form."""
    products, combinations = on_white_noise(SETTINGS, POINTS), Combinations(SETTINGS)
    boost = BETA1 / (1 - BETA1)

    def variance(case: Case, averaged: bool) -> float:
        u = combinations.estimate(case, averaged)
        return (u @ products @ u).item()

    for gamma in (0.1, 1.0):
        a = gamma * boost
        assert variance(Case("approximate", gamma), False) == pytest.approx((1 + a) ** 2 + a**2)
        assert variance(Case("exact", gamma), False) == pytest.approx(1)
        assert variance(Case("reference", gamma), False) == pytest.approx((1 - gamma) ** 2 + gamma**2 / INTERVAL)
        assert variance(Case("svrg", gamma), False) == pytest.approx((1 - gamma) ** 2 + gamma**2 / SNAPSHOT_BATCHES)
        for form in ("approximate", "exact"):
            closed = noisy_quadratic.variance(noisy_quadratic.Case(form, gamma), BETA1, POINTS)
            assert variance(Case(form, gamma), True) == pytest.approx(closed / (1 - BETA1**POINTS) ** 2)
    assert variance(PLAIN, False) == pytest.approx(1)
    # Every m of a reference, and of SVRG but for its own batches, is a mean of gradients: it has their sum of weights.
    long = on_white_noise(Settings(("approximate",), BETA1), 200)
    u = Combinations(Settings(("approximate",), BETA1)).estimate(PLAIN, averaged=True)
    assert (u @ long @ u).item() == pytest.approx((1 - BETA1) / (1 + BETA1))


# --- a quadratic with known noise ---


class Quadratic:
    """Gradients A x + n + scale M x on a batch, with n of variance 1 and M, diagonal, of variance 1 in each element."""

    curvature = torch.linspace(0.5, 2.0, SIZE, dtype=torch.float64)

    def __init__(self, scale: float) -> None:
        self.scale = scale
        self.calls: list[tuple[Tensor, int, int]] = []

    def gradient(self, weights: Tensor, sequence: int, batch: int) -> Tensor:
        self.calls.append((weights, sequence, batch))
        generator = torch.Generator().manual_seed(2 * batch + (sequence == SNAPSHOTS))
        noise, slope = torch.randn(2, SIZE, dtype=torch.float64, generator=generator)
        return self.curvature * weights + noise + self.scale * slope * weights


SCALE = 0.7


@pytest.fixture(scope="module")
def path() -> list[Tensor]:
    """Irregular steps."""
    generator = torch.Generator().manual_seed(2)
    steps = 0.4 * torch.randn(POINTS, SIZE, dtype=torch.float64, generator=generator)
    return list(1 + steps.cumsum(dim=0))


@pytest.fixture(scope="module")
def analysis(path: list[Tensor]) -> Analysis:
    found = sample(path, Quadratic(SCALE), LAYOUT, SETTINGS, replicates=240)
    return Analysis(found, LAYOUT, SETTINGS, CASES, sequences=16)


@pytest.fixture(scope="module")
def result(analysis: Analysis) -> dict[str, Any]:
    return analysis.result()


def near(figure: dict[str, Any], expected: float, scale: float | None = None) -> bool:
    """Within five standard errors (which eight groups give to a quarter), that are small on a scale: of the value."""
    assert figure["error"] < 0.1 * (abs(expected) if scale is None else scale)
    return abs(figure["value"] - expected) <= 5 * figure["error"] + 1e-9


def noise_of(*weights: Tensor) -> float:
    """Variance of a sum of SCALE M x over points that share a batch; x given with its factor."""
    return SCALE**2 * sum(weights).square().sum().item()  # type: ignore[union-attr]


@pytest.mark.parametrize("gamma", [0.1, 1.0])
def test_single_estimates_have_their_closed_form(path: list[Tensor], result: dict[str, Any], gamma: float) -> None:
    last, before = path[-1], path[-2]
    truth = Quadratic.curvature * last
    rows, a = result["all"]["c"], gamma * BETA1 / (1 - BETA1)
    renewed = (POINTS - 1) // INTERVAL * INTERVAL
    snapshot, window = path[renewed], path[renewed - INTERVAL : renewed]
    change = (a * Quadratic.curvature * (last - before)).square().sum().item()
    stale = torch.stack([Quadratic.curvature * x - truth for x in window]).mean(dim=0)
    expected = {
        "plain": (0.0, SIZE + noise_of(last)),
        f"approximate {gamma:g}": (
            change,
            ((1 + a) ** 2 + a**2) * SIZE + noise_of((1 + a) * last) + noise_of(a * before),
        ),
        f"exact {gamma:g}": (change, SIZE + noise_of((1 + a) * last, -a * before)),
        f"reference {gamma:g}": (
            gamma**2 * stale.square().sum().item(),
            (1 - gamma) ** 2 * (SIZE + noise_of(last))
            + gamma**2 / INTERVAL**2 * sum(SIZE + noise_of(x) for x in window),
        ),
        f"svrg {gamma:g}": (
            0.0,
            (1 - gamma) ** 2 * SIZE
            + noise_of(last, -gamma * snapshot)
            + gamma**2 / SNAPSHOT_BATCHES * (SIZE + noise_of(snapshot)),
        ),
    }
    for case, (bias, variance) in expected.items():
        assert near(rows[case]["bias_squared"], bias, bias + variance), case
        assert near(rows[case]["variance"], variance), case
        assert near(rows[case]["mse"], bias + variance), case
        mean = truth.square().sum().item()  # cosine: only where there is no bias
        if bias == 0:
            assert near(rows[case]["cosine"], math.sqrt(mean / (mean + variance))), case


@pytest.mark.parametrize("gamma", [0.1, 1.0])
@pytest.mark.parametrize("form", ["plain", "approximate", "exact"])
def test_averages_have_their_closed_form(path: list[Tensor], result: dict[str, Any], form: str, gamma: float) -> None:
    """Each batch has a factor on the gradient at its own point, and one on that at the point before."""
    a = 0.0 if form == "plain" else gamma * BETA1 / (1 - BETA1)
    weights = [(1 - BETA1) * BETA1 ** (POINTS - 1 - i) / (1 - BETA1**POINTS) for i in range(POINTS)]
    mean, variance = torch.zeros(SIZE, dtype=torch.float64), 0.0
    for i, x in enumerate(path):
        own = weights[i] * (1 + a * (i > 0))
        if form == "exact":
            rest = -weights[i] * a * (i > 0)  # on this batch, at the point before
            moved = own * x + (rest * path[i - 1] if i else 0 * x)
            own += rest
        else:
            own -= weights[i + 1] * a if i + 1 < POINTS else 0.0  # as the last gradient of the point after it
            moved = own * x
        mean += Quadratic.curvature * moved
        variance += own**2 * SIZE + noise_of(moved)
    bias = (mean - Quadratic.curvature * path[-1]).square().sum().item()
    row = result["all"]["m"]["plain" if form == "plain" else f"{form} {gamma:g}"]
    assert near(row["bias_squared"], bias, bias + variance)
    assert near(row["variance"], variance)
    assert near(row["mse"], bias + variance)


def test_gradient_noise_and_norms(path: list[Tensor], result: dict[str, Any]) -> None:
    for kind, part in (("matrices", slice(0, 32)), ("vectors", slice(32, 48)), ("all", slice(0, 48))):
        last, figures = path[-1][part], result[kind]["gradient"]
        square = (Quadratic.curvature[part] * last).square().sum().item()
        noise = (1 + SCALE**2 * last.square()).sum().item()
        assert near(figures["norm"], math.sqrt(square))
        assert near(figures["noise"], noise)
        assert near(figures["noise_scale"], 16 * noise / square)
        assert figures["norms_mean"]["value"] ** 2 + figures["norms_deviation"]["value"] ** 2 == pytest.approx(
            square + noise, rel=0.02
        )
        variation = figures["norms_deviation"]["value"] / figures["norms_mean"]["value"]
        assert figures["norms_variation"]["value"] == pytest.approx(variation)


def test_kinds_add_up_and_plain_is_the_unit(result: dict[str, Any]) -> None:
    for name in ("c", "m"):
        for case, row in result["all"][name].items():
            for key in ("bias_squared", "variance", "mse"):
                parts = result["matrices"][name][case][key]["value"] + result["vectors"][name][case][key]["value"]
                assert row[key]["value"] == pytest.approx(parts, abs=1e-9)
            plain = result["all"][name]["plain"]
            assert row["relative_mse"]["value"] == pytest.approx(row["mse"]["value"] / plain["mse"]["value"])
        assert plain["relative_variance"] == {"value": 1.0, "error": 0.0}


def test_the_best_gamma_is_where_the_error_is_least(analysis: Analysis, result: dict[str, Any]) -> None:
    for name in ("c", "m"):
        for form, best in result["all"]["best"][name].items():
            around = [best["gamma"]["value"] + shift for shift in (-0.01, 0.0, 0.01)]
            cases = [Case(form, gamma) for gamma in around]
            again = Analysis(analysis.sample, LAYOUT, SETTINGS, cases, 16).result()["all"][name]
            errors = [again[str(case)]["relative_mse"]["value"] for case in cases]
            assert errors[1] == pytest.approx(best["relative_mse"]["value"])
            assert errors[1] < min(errors[0], errors[2])


def test_clip_rates(analysis: Analysis, result: dict[str, Any]) -> None:
    """Every c of 16 or 32 elements with a noise of 1 is longer than 1; scaled down to a hundredth, none is."""
    assert result["all"]["c"]["plain"]["clip_rate"]["value"] == 1
    small = sample([0.01 * torch.ones(SIZE)] * 3, SmallNoise(), LAYOUT, SETTINGS, replicates=4)
    rows = Analysis(small, LAYOUT, SETTINGS, CASES, 16).result()["all"]["c"]
    assert rows["plain"]["clip_rate"]["value"] == 0


class SmallNoise(Quadratic):
    def __init__(self) -> None:
        super().__init__(0.0)

    def gradient(self, weights: Tensor, sequence: int, batch: int) -> Tensor:
        return 0.01 * super().gradient(weights, sequence, batch)


def test_batches_are_used_once_for_each_point(path: list[Tensor]) -> None:
    """Whatever weights they are looked at with; a snapshot's own batches are others."""
    problem = Quadratic(0.0)
    sample(path, problem, LAYOUT, SETTINGS, replicates=4)
    assert len(problem.calls) == 4 * gradients_needed(POINTS, SETTINGS)
    own = [batch for weights, sequence, batch in problem.calls if sequence != SNAPSHOTS and weights is path[-1]]
    assert sorted(own) == list(range(4 * POINTS))
    renewals = math.ceil(POINTS / INTERVAL)
    snapshots = [batch for _, sequence, batch in problem.calls if sequence == SNAPSHOTS]
    assert sorted(snapshots) == list(range(4 * renewals * SNAPSHOT_BATCHES))


def test_jackknife_of_a_mean() -> None:
    """Is the usual standard error."""
    values = torch.tensor([1.0, 2.0, 4.0, 9.0, 3.0], dtype=torch.float64)
    without = [{"mean": values[torch.arange(5) != k].mean().item()} for k in range(5)]
    found = with_errors({"mean": values.mean().item()}, without)["mean"]
    assert found == pytest.approx({"value": 3.8, "error": values.std().item() / math.sqrt(5)})


# --- runs ---

Measure = Callable[..., dict[str, Any]]
QUICK = ("--replicates=4", "--points=3", "--interval=2", "--snapshot_batches=2", "--device=cpu")


@pytest.fixture
def measure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Measure:
    """Runs the command in this process. Returns the JSON."""

    def measure(*arguments: Any) -> dict[str, Any]:
        file = tmp_path / "out.json"
        status = gradient_noise.main([*map(str, arguments), *QUICK, "--json", str(file)])
        out = capsys.readouterr()
        assert status == 0, out.err
        return json.loads(file.read_text())

    return measure


def test_a_run_and_its_config_give_the_same(run_train: Train, measure: Measure) -> None:
    """The start of a run, and a checkpoint: the config trains to the same point."""
    settings = ("--optimizer=mars-adamw", "--exact=True", "--checkpoint_interval=3", "--keep_checkpoints=9")
    run = run_train(*settings).folder
    found = measure(run, "--at", "start", "3")["points"]
    assert [(point["start"], point["update"]) for point in found] == [(0, 2), (3, 5)]
    for updates, point in zip(([], ["--updates=3"]), found, strict=True):
        (again,) = measure(run_train.config, *updates, *settings)["points"]
        assert again["kinds"] == point["kinds"]
        assert (again["name"], again["start"]) == ("tiny", point["start"])
    every = measure(run, "--estimates", "approximate:0.5")["points"]
    assert [point["start"] for point in every] == [3, 6]
    assert list(every[0]["kinds"]["all"]["m"]) == ["plain", "approximate 0.5"]
    assert every[0]["kinds"]["all"]["m"]["plain"] == found[1]["kinds"]["all"]["m"]["plain"]
    assert list(every[0]["kinds"]) == ["matrices", "embeddings", "vectors", "all"]


@pytest.mark.parametrize(
    "settings",
    [
        ("--optimizer=adamw",),
        ("--optimizer=mars-adamw", "--exact=True"),
        ("--optimizer=mars-adamw", "--estimator=svrg", "--snapshot_interval=3", "--snapshot_batches=2"),
    ],
    ids=str,
)
def test_the_path_is_what_training_would_do(run_train: Train, settings: tuple[str, ...]) -> None:
    run = run_train(*settings, "--checkpoint_interval=1", "--keep_checkpoints=9").folder
    with contextlib.closing(open_dataset(str(run.parent / "data"), 16, 64)) as data:
        processes = Processes.from_environment("cpu")
        for begin in ("start", "2"):
            (point,) = points_of(run, [begin])
            course = Course(point, data, processes)
            names, _ = course.layout
            for update, weights in enumerate(course.path(4), start=point.update):
                if update > 0:
                    saved = read_checkpoint(run / "checkpoints" / f"iter-{update:08}.pt")["model"]
                    expected = torch.cat([saved[name].flatten() for name in names])
                    torch.testing.assert_close(weights, expected, rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_gradients_are_those_of_the_loss(run_train: Train, dtype: torch.dtype) -> None:
    """Of all micro-batches; also after other weights, and on batches that training does not have."""
    config = load_config(run_train.config)
    with contextlib.closing(open_dataset(config.dataset, 16, 64)) as data:
        course = Course(Point(config, 0, None), data, Processes.from_environment("cpu"))
        names, layout = course.layout
        problem = LossGradient(config, data, names, torch.device("cpu"), dtype, seed=1)
        first, second = course.path(2)
        problem.gradient(second, 0, 5)
        found = problem.gradient(first, 0, 3)
        inputs, targets = (
            torch.cat(parts)
            for parts in zip(*(problem.sequences[0].micro_batch(4, step) for step in range(2)), strict=True)
        )
        model = course.model.to(dtype)
        vector_to_parameters_of(model, names, first)
        loss = nn.functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
        grads = torch.autograd.grad(loss, [dict(model.named_parameters())[name] for name in names])
        tolerance = 1e-6 if dtype == torch.float32 else 1e-14
        expected = torch.cat([grad.flatten() for grad in grads])
        assert found.dtype == dtype
        torch.testing.assert_close(found, expected, rtol=0, atol=tolerance)
        assert sum(layout.sizes) == len(found)
        seeds = {problem.sequences[0].seed, problem.sequences[1].seed, config.seed}
        assert len(seeds) == 3


def vector_to_parameters_of(model: nn.Module, names: list[str], vector: Tensor) -> None:
    start = 0
    for name in names:
        parameter = dict(model.named_parameters())[name]
        parameter.data.copy_(vector[start : start + parameter.numel()].view_as(parameter))
        start += parameter.numel()


def test_seeds_precision_and_beta1(run_train: Train, measure: Measure) -> None:
    """The same again is the same; another seed is not; float64 is close; `--average` is beta1 of m alone."""

    def of(*arguments: str) -> dict[str, Any]:
        return measure(run_train.config, "--estimates", "exact:0.5", *arguments)["points"][0]["kinds"]["all"]

    first = of()
    assert of() == first
    other = of("--noise_seed=2")
    assert other["c"]["plain"]["variance"]["value"] != first["c"]["plain"]["variance"]["value"]
    double = of("--precision=float64")
    for name in ("c", "m"):
        for case, row in double[name].items():
            assert row["mse"]["value"] == pytest.approx(first[name][case]["mse"]["value"], rel=1e-3)
    average = of("--average=0.5")
    assert average["c"]["plain"] == first["c"]["plain"]
    assert average["m"]["plain"] != first["m"]["plain"]


def test_what_is_printed_and_drawn(run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And once more from the JSON."""
    file, figure = tmp_path / "found.json", tmp_path / "figure.png"
    assert gradient_noise.main([str(run_train.config), *QUICK, "--json", str(file), "--plot", str(figure)]) == 0
    first = capsys.readouterr().out
    assert figure.read_bytes().startswith(b"\x89PNG")
    (point,) = json.loads(file.read_text())["points"]
    single, average = (
        next(line for line in part.splitlines() if line.startswith("exact 0.025"))
        for part in first.split("--- all")[1].split("the moving average")
    )
    row = point["kinds"]["all"]["m"]["exact 0.025"]
    value, error = row["relative_variance"]["value"], row["relative_variance"]["error"]
    found = [float(number) for number in re.findall(r"[\d.]+", average)]
    assert any(
        a == pytest.approx(value, abs=error / 10) and b == pytest.approx(error, rel=0.1) for a, b in pairwise(found)
    )
    assert single.endswith("%")
    assert "tiny, update 2, all parameters: " in first
    assert all(f"--- {kind} (" in first for kind in ("matrices", "embeddings", "vectors", "all"))

    figure.unlink()
    assert gradient_noise.main([str(file), str(file), "--plot", str(figure)]) == 0
    again = capsys.readouterr().out
    assert figure.exists()
    assert again.count(average) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["absent"], "absent holds no run with a checkpoint"),
        (["absent.py"], "absent.py: cannot read this config file"),
        (["absent.json"], "absent.json is not a JSON file of this script"),
        (["CONFIG", "--at", "start"], "--at is for a run; a config has --updates"),
        (["CONFIG", "--learnin_rate=1"], "--learnin_rate=1"),
        (["CONFIG", "--dropout=0.1"], "dropout=0.1: noise is measured with dropout 0 only"),
        (["CONFIG", "--batch_size=3"], "does not divide total_batch_size=8"),
        (["CONFIG", "--dataset=/absent"], "no data set in /absent"),
        (["CONFIG", "--replicates=3"], "--replicates: 3 is not allowed, only from 4"),
        (["CONFIG", "--estimates", "exact"], "--estimates 'exact' must be FORM:GAMMA"),
        (["CONFIG", "--estimates", "storm:1"], "one of approximate, exact, reference, svrg"),
        (["CONFIG", "--average=1"], "--average 1.0: must be below 1"),
        (["CONFIG", "--plot=x.txt"], "--plot x.txt: must end in .png, .svg or .pdf"),
        (["CONFIG", "--json=/absent/x.json"], "--json /absent/x.json: must be a file in a folder that is there"),
        (["CONFIG", "RUN"], "one run or config at a time"),
        (["RUN", "--at", "4"], "has start and checkpoints 6"),
        (["RUN", "--at", "soon"], "--at soon: "),
        (["RUN", "--lr=1"], "unrecognized arguments: --lr=1"),
        (["RUN", "--updates=3"], "--updates is for a config; a run has --at"),
        (["RUN", "--data=OTHER"], "holds other tokens than the run was trained on"),
    ],
)
def test_mistakes_end_in_a_line(
    arguments: list[str], message: str, run_train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if any(argument == "RUN" for argument in arguments):
        run_train("--eval_interval=0")
    write_tokens(tmp_path / "other", [1, 2, 3] * 100, [1, 2, 3] * 10)
    places = {"CONFIG": run_train.config, "RUN": run_train.folder("run"), "--data=OTHER": f"--data={tmp_path}/other"}
    capsys.readouterr()
    assert gradient_noise.main([str(places.get(argument, argument)) for argument in arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert error.count("\n") == 1
    assert message in error
