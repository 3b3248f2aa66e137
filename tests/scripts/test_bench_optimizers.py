"""scripts/bench_optimizers.py: the table and the file of a small model, and the bytes and operations counted. Never how
fast anything is."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from model import GPT, GPTConfig
from optim import build_optimizer, clip_gradients, preconditioner
from scripts import bench_optimizers as bench
from scripts.benchmarking import counting, steps

TINY = ["--layers=2", "--width=32", "--vocab=64", "--repeat=2", "--no-compile"]


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> SimpleNamespace:
    """What all methods print (`lines`) and write (`values`, `rows` by name)."""
    path = tmp_path_factory.mktemp("bench") / "numbers.json"
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *parts, **_: lines.extend(" ".join(parts).split("\n")))
        assert bench.main([*TINY, f"--json={path}", "--optimizers", *bench.METHODS]) == 0
    values = json.loads(path.read_text())
    return SimpleNamespace(lines=lines, values=values, rows={row["method"]: row for row in values["rows"]})


def test_every_method_has_a_line_with_the_numbers_of_its_row(outcome: SimpleNamespace) -> None:
    assert list(outcome.rows) == list(bench.METHODS)
    for name, row in outcome.rows.items():
        cells = next(line.split() for line in outcome.lines if line.split()[:1] == [name])
        assert cells[1] == f"{row['ratio']:.2f}"
        assert cells[2] == f"{row['seconds']:.3f}"
        assert cells[6] == f"{row['bytes_per_parameter']:.1f}"
    assert outcome.rows["adamw"]["ratio"] == 1


def test_figures_follow_from_the_times(outcome: SimpleNamespace) -> None:
    parameters = GPT(GPTConfig(n_layer=2, n_head=1, n_embd=32, vocab_size=64)).num_parameters()
    for row in outcome.rows.values():
        times = row["times"]
        assert {len(series) for series in times.values()} == {2}
        assert row["ratio"] == pytest.approx(median(times["step"]) / median(times["adamw"]))
        assert row["ratio_of_minima"] == pytest.approx(min(times["step"]) / min(times["adamw"]))
        rate = row["bytes_per_parameter"] * parameters / median(times["step"])
        assert row["gigabytes_per_second"] == pytest.approx(rate / 1e9)
        assert row["copy_share"] == pytest.approx(rate * median(times["copy"]) / (8 * parameters))
    exact = outcome.rows["mars-adamw-exact"]
    assert exact["record_in_copies"] == pytest.approx(median(exact["times"]["record"]) / exact["copy_seconds"])
    assert all(step > record for step, record in zip(exact["times"]["step"], exact["times"]["record"], strict=True))
    shampoo = outcome.rows["mars-shampoo"]
    assert shampoo["products_share"] == pytest.approx(5 * median(shampoo["times"]["iteration"]) / shampoo["seconds"])


def test_clip_rates_are_of_methods_that_clip(outcome: SimpleNamespace) -> None:
    rates = {name: row["clip_rate"] for name, row in outcome.rows.items()}
    assert {name for name, rate in rates.items() if rate is None} == {"adamw", "mars-adamw-unclipped", "lion", "muon"}
    assert rates["mars-adamw-global"] in (0, 0.5, 1)


def test_targets_are_judged_by_what_was_measured(outcome: SimpleNamespace) -> None:
    assert outcome.values["targets"] == list(bench.outcomes([bench.Row(**row) for row in outcome.values["rows"]]))
    for target, found in zip(bench.TARGETS, outcome.values["targets"], strict=True):
        value = outcome.rows[target.method][target.field]
        assert found["value"] == value
        assert found["reached"] == (value <= target.limit if target.at_most else value >= target.limit)
        verdict = f"{'reached' if found['reached'] else 'missed'}: {value:.3f}"
        assert any(line.startswith(target.text) and line.endswith(verdict) for line in outcome.lines)
    assert [found["reached"] for found in bench.outcomes([])] == [None] * len(bench.TARGETS)


@pytest.mark.parametrize(("method", "norms"), [("adamw", 1), ("mars-lion", 2), ("mars-adamw-exact", 3)])
def test_norms_are_taken_before_steps_and_recordings_and_found_by_mars(
    method: str, norms: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`norms`: in a turn, in which fused AdamW has one."""
    taken: list[float] = []

    def noted(parameters: Any, max_norm: float) -> torch.Tensor:
        taken.append(max_norm)
        return clip_gradients(parameters, max_norm)

    work = steps.Bench(GPT(GPTConfig(n_layer=1, n_head=1, n_embd=32, vocab_size=64)), repeat=2, takes_norms=True)
    monkeypatch.setattr(steps, "clip_gradients", noted)
    row = work.row(method, replace(bench.METHODS[method], compile_optimizer=False))
    assert taken == [0.0] * norms * (steps.WARM_UP + 2)
    if method == "adamw":
        assert row.bytes_per_parameter == 32  # and those of the norm


# --- what is counted ---

PER_PARAMETER = {  # bytes: (norms, elementwise passes) of a matrix of float32, by hand
    "adamw": (0, 28),  # reads x, g, m, v, writes x, m, v
    "mars-adamw": (4, 36),  # and reads and writes the last gradient
    "mars-adamw-unclipped": (4, 36),
    "mars-adamw-bfloat16": (4, 32),
    "mars-adamw-exact": (4, 44),  # reads the reference; recording reads the gradient twice and writes
    "mars-lion": (4, 28),
    "lion": (4, 20),
}


@pytest.mark.parametrize("method", PER_PARAMETER)
def test_bytes_of_a_step(method: str) -> None:
    assert bytes_per_parameter(method, scale=0.1) == sum(PER_PARAMETER[method])


@pytest.mark.parametrize(
    ("method", "more"),
    [
        ("mars-adamw", 8),
        ("mars-adamw-exact", 8),
        ("mars-adamw-global", 8),
        ("mars-adamw-bfloat16", 6),
        ("mars-lion", 8),
    ],
)
def test_the_norm_is_taken_where_the_bound_allows_a_clip(method: str, more: int) -> None:
    assert bytes_per_parameter(method, scale=1.0) == bytes_per_parameter(method, scale=0.1) + more


def bytes_per_parameter(method: str, scale: float) -> float:
    """Of a matrix whose gradients have a norm of `scale`."""
    layer = torch.nn.Linear(16, 16, bias=False)
    grads = [torch.full((16, 16), scale / 16), torch.full((16, 16), -scale / 16)]
    optimizer: Any = build_optimizer(layer, replace(bench.METHODS[method], compile_optimizer=False, learning_rate=1e-9))
    for grad in grads * 2:
        layer.weight.grad = grad
        if "exact" in method:
            optimizer.record_reference_gradient()
        optimizer.step()
    return counting.step_bytes(optimizer, *({layer.weight: grad} for grad in grads)) / layer.weight.numel()


def test_matrices_are_batched_and_their_operations_counted_as_the_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[tuple[int, ...]] = []
    newton_schulz = preconditioner.newton_schulz

    def noted(matrices: torch.Tensor) -> torch.Tensor:
        batches.append(tuple(matrices.shape))
        return newton_schulz(matrices)

    monkeypatch.setattr(preconditioner, "newton_schulz", noted)
    for module in (preconditioner, counting):
        monkeypatch.setattr(module, "BATCH", {"cpu": 2**13})
    model = GPT(GPTConfig(n_layer=5, n_head=1, n_embd=32, vocab_size=64))
    work = steps.Bench(model, repeat=1)
    optimizer = build_optimizer(model, replace(bench.SHAMPOO, compile_optimizer=False))
    with FlopCounterMode(display=False) as counted:
        optimizer.step()
    chunks = counting.matrix_chunks(optimizer, work.device)
    assert sorted(chunks.elements()) == sorted((number, min(sides), max(sides)) for number, *sides in batches)
    assert counting.flops(chunks) == counted.get_total_flops()


# --- the command ---


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--optimizers=adamx", "--optimizers: invalid choice: 'adamx' (choose from"),
        ("--repeat=0", "--repeat: 0 must be 1 or more"),
        ("--threads=0", "--threads: 0 must be 1 or more"),
        ("--vocab=1", "--vocab: 1 must be 2 or more"),
        ("--json=absent/numbers.json", "--json: there is no folder"),
        ("--layer=", "argument --layers: invalid int value: ''"),
    ],
)
def test_bad_arguments(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([argument]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_json_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main([*TINY, "--repeat=1", "--optimizers", "adamw", "--json", str(tmp_path)]) == 2
    assert f"error: {tmp_path} cannot be written: Is a directory" in capsys.readouterr().err
