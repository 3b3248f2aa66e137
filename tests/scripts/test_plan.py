"""scripts/plan.py: bytes against real optimizers, a real checkpoint, arithmetic worked out by hand;
what is said to a user who errs. Measured memory: test_plan_measured.py."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from configs import TrainConfig, load_config
from model import GPT
from optim import build_optimizer, record_reference_gradient, record_snapshot_gradient, take_snapshot
from optim.build import BUILDERS, optimizer_bytes
from scripts import plan as script
from scripts.planning import budget
from scripts.planning.ledger import Ledger
from scripts.planning.machines import GB, MACHINES
from scripts.planning.memory import MemoryPlanner
from scripts.planning.passes import new_model
from scripts.planning.plan import Settings, make_plan, make_rows
from scripts.planning.states import OptimizerCounter
from tests.conftest import Train

ROOT = Path(__file__).resolve().parents[2]
SMALL = TrainConfig(
    n_layer=2,
    n_head=2,
    n_embd=64,
    block_size=32,
    vocab_size=500,
    batch_size=2,
    total_batch_size=24,
    beta2=0.99,
    compile_optimizer=False,
)
EXACT = tuple(name for name in BUILDERS if name.startswith("mars-"))
VARIANTS = [(name, False) for name in BUILDERS] + [(name, True) for name in EXACT]


def text_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert script.main(list(arguments)) == 0
    return capsys.readouterr().out


def json_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict:
    return json.loads(text_of(capsys, *arguments, "--json"))


def stepped(config: TrainConfig, owned: list[int] | None = None) -> int:
    """Bytes that a real optimizer holds after two steps of some parameters, or all."""
    model = new_model(config)
    optimizer = build_optimizer(model, config)
    for _ in range(2):
        for number, parameter in enumerate(model.parameters()):
            if owned is None or number in owned:
                parameter.grad = torch.randn_like(parameter)
        if config.estimator == "svrg":
            take_snapshot(optimizer)
            record_snapshot_gradient(optimizer)
        if config.exact or config.estimator == "svrg":
            record_reference_gradient(optimizer)
        optimizer.step()
    return optimizer_bytes(optimizer)


def on_meta(config: TrainConfig) -> GPT:
    with torch.device("meta"):
        return new_model(config)


# --- memory ---


@pytest.mark.parametrize(("name", "count"), [("small", 124_373_760), ("medium", 354_599_936), ("large", 773_582_080)])
def test_parameters_are_those_of_gpt2(name: str, count: int) -> None:
    config = load_config(ROOT / f"configs/gpt2_{name}_mars.py")
    assert sum(parameter.numel() for parameter in on_meta(config).parameters()) == count


def test_the_ledger_counts_what_is_alive_and_no_view_twice() -> None:
    old = torch.empty(1000, device="meta")
    with Ledger() as ledger:
        first = old + 1
        view = first.view(10, 100)
        second = view * 2
        del first, view
        old.add_(1)
        third = second.t()
        second.mul_(2)
    assert ledger.peak == 8000
    assert +ledger.live == {"other": 4000}
    del second
    assert +ledger.live == {"other": 4000}
    del third
    assert +ledger.live == {}


@pytest.mark.parametrize(("name", "exact"), VARIANTS)
def test_an_optimizers_state_is_that_of_real_steps(name: str, exact: bool) -> None:
    config = replace(SMALL, optimizer=name, exact=exact)
    counted = OptimizerCounter(on_meta(config), on_gpu=False).count(config)
    assert counted.held == stepped(config)


@pytest.mark.parametrize("estimator", ["reference", "svrg", "none"])
def test_an_estimators_state_is_that_of_real_steps(estimator: str) -> None:
    config = replace(SMALL, optimizer="mars-adamw", estimator=estimator)
    counted = OptimizerCounter(on_meta(config), on_gpu=False).count(config)
    assert counted.held == stepped(config)


def test_the_state_of_kinds_with_preconditioners_of_their_own() -> None:
    """Moments and last gradients: 6 bytes a weight of MARS-Shampoo, 10 of MARS-AdamW, 8 of AdamW, and step counts."""
    hybrid = replace(SMALL, optimizer="mars-shampoo", preconditioner_embeddings="adamw", mars_last_grad="bfloat16")
    model = on_meta(hybrid)
    counted = OptimizerCounter(model, on_gpu=False).count(hybrid).held
    assert counted == stepped(hybrid)
    sizes = {"matrices": 6, "embeddings": 10, "vectors": 8}
    groups = {group["name"]: group["params"] for group in build_optimizer(model, hybrid).param_groups}
    assert counted == sum(4 + sizes[kind] * p.numel() for kind, parameters in groups.items() for p in parameters)
    # In the table other optimizers are what they are by themselves.
    rows = {row.optimizer: row for row in make_rows(hybrid, Settings("cpu"))}
    assert rows["mars-shampoo"].state == counted
    assert rows["mars-lion"].state == stepped(replace(SMALL, optimizer="mars-lion", mars_last_grad="bfloat16"))
    assert rows["adamw"].problem is None


@pytest.mark.parametrize("name", ["adamw", "mars-adamw", "muon"])
@pytest.mark.parametrize("shares", [2, 3, 64])
def test_zero_1_is_the_process_that_holds_most(name: str, shares: int) -> None:
    config = replace(SMALL, optimizer=name)
    # The largest first, to the one with the least so far, counted in the order of the optimizer's groups.
    model = new_model(config)
    optimizer = build_optimizer(model, config)
    numbers = {parameter: number for number, parameter in enumerate(model.parameters())}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    loads, owned = [0] * shares, [list[int]() for _ in range(shares)]
    for parameter in sorted(parameters, key=torch.Tensor.numel, reverse=True):
        owner = loads.index(min(loads))
        loads[owner] += parameter.numel()
        owned[owner].append(numbers[parameter])
    most = max(stepped(config, some) for some in owned if some)
    assert OptimizerCounter(on_meta(config), on_gpu=True).count(config, shares).held == most


def test_eager_kernels_need_room_on_a_gpu_and_compiled_ones_none() -> None:
    eager = replace(SMALL, optimizer="mars-adamw")
    counter = OptimizerCounter(on_meta(eager), on_gpu=True)
    largest = 4 * SMALL.vocab_size * SMALL.n_embd
    assert 2 * largest <= counter.count(eager).temporaries <= 10 * largest
    assert counter.count(replace(eager, compile_optimizer=True)).temporaries < largest / 10


def test_the_parts_of_the_memory() -> None:
    config = replace(SMALL, optimizer="mars-adamw", exact=True)
    one, two = (MemoryPlanner(config, MACHINES["h100"], processes) for processes in (1, 2))
    weights = 4 * one.model.num_parameters()
    optimizer = one.optimizer(config, sharded=False)
    assert optimizer.held == pytest.approx(4 * weights, rel=0.01)
    assert optimizer.saved == pytest.approx(3 * weights, rel=0.01)
    alone, shared = one.memory(2, optimizer), two.memory(2, optimizer)
    assert (alone.backward["buckets"], shared.backward["buckets"]) == (0, weights)
    assert (alone.step["gradients"], shared.step["gradients"]) == (weights, 0)
    # Of later micro-batches the gradients of earlier ones are part of the peak; in buckets they have their place.
    assert alone.backward["gradients"] == weights
    assert shared.backward["gradients"] == two.memory(12, optimizer).backward["gradients"] == 0


def test_measurements_of_noise_cost_a_sum_of_gradients_and_the_operations_of_each() -> None:
    plans = [make_plan(replace(SMALL, max_iters=10, log_variance=n), Settings("h100")) for n in (0, 3)]
    without, measured = plans
    assert "sum of gradients" not in without.memory.backward
    assert measured.memory.backward["sum of gradients"] == 4 * without.parameters
    assert measured.memory.step["sum of gradients"] == 4 * without.parameters
    tokens = 3 * SMALL.variance_batches * SMALL.total_batch_size * SMALL.block_size
    more = measured.compute.flops - without.compute.flops
    assert more == pytest.approx(on_meta(SMALL).flops_per_token() * tokens)


def test_activations_grow_with_the_micro_batch_and_shrink_with_the_dtype() -> None:
    half = MemoryPlanner(replace(SMALL, dtype="bfloat16"), MACHINES["h100"], 1)
    full = MemoryPlanner(replace(SMALL, dtype="float32"), MACHINES["h100"], 1)
    optimizer = full.optimizer(SMALL, sharded=False)
    small, large, less = (
        full.memory(4, optimizer).backward,
        full.memory(8, optimizer).backward,
        half.memory(4, optimizer).backward,
    )
    assert large["activations"] == pytest.approx(2 * small["activations"], rel=0.05)
    assert less["activations"] < 0.8 * small["activations"]
    assert small["weight copies"] == 0
    matrices = sum(parameter.numel() for parameter in full.model.parameters() if parameter.dim() == 2)
    assert less["weight copies"] == 2 * (matrices - SMALL.block_size * SMALL.n_embd)


def test_the_largest_micro_batch_divides_and_fits_and_the_next_one_does_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    path, shallow = str(ROOT / "configs/gpt2_medium_mars.py"), "--n_layer=2"
    found = json_of(capsys, path, "--gpu", "4090", "--gpus", "8", shallow)
    limit = 0.9 * 24 * GB
    largest = found["largest_batch"]
    assert 60 % largest == 0
    assert found["largest_total"] <= limit
    following = min(number for number in range(largest + 1, 61) if 60 % number == 0)
    config = load_config(path, [shallow])
    planner = MemoryPlanner(config, MACHINES["4090"], 8)
    assert planner.memory(following, planner.optimizer(config, False)).total > limit


def test_nothing_fits(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    huge = tmp_path / "huge.py"
    huge.write_text("n_layer = 4\nn_head = 64\nn_embd = 16384\n")
    text = text_of(capsys, str(huge), "--gpu", "4090")
    assert "does not fit" in text
    assert "not even one sequence fits" in text


# --- hours and disk ---


def test_a_checkpoint_on_disk(run_train: Train, config: Path) -> None:
    overrides = ["--n_embd=128", "--vocab_size=2000", "--optimizer=mars-adamw", "--max_iters=2", "--warmup_iters=0"]
    assert run_train(*overrides).status == 0
    size = (run_train.folder("run") / "checkpoints/iter-00000002.pt").stat().st_size
    found = make_plan(load_config(config, overrides), Settings("cpu"))
    assert found.disk.checkpoint == pytest.approx(size, rel=0.01)


def test_hours_are_operations_over_what_the_gpus_reach() -> None:
    config = replace(SMALL, max_iters=1000, dataset="/nowhere/at/all")
    tokens, per_token = 1000 * 24 * 32, on_meta(SMALL).flops_per_token()
    once = make_plan(config, Settings("h100", gpus=4, utilisation=0.5)).compute
    assert once.tokens == tokens
    assert once.flops == pytest.approx(per_token * tokens)
    assert once.hours == pytest.approx(per_token * tokens / (4 * 989e12 * 0.5) / 3600)
    assert once.gpu_hours == pytest.approx(4 * once.hours)
    exact = replace(config, optimizer="mars-adamw", exact=True)
    assert make_plan(exact, Settings("h100", gpus=4, utilisation=0.5)).compute.hours == pytest.approx(2 * once.hours)
    measured = make_plan(exact, Settings("h100", gpus=4, tokens_per_second=1000.0)).compute
    assert measured.hours == pytest.approx(tokens / 4000 / 3600)
    assert make_plan(config, Settings("cpu")).compute.hours is None


def test_evaluations_count_a_third(dataset: Path) -> None:
    config = replace(SMALL, max_iters=10, eval_interval=4, dataset=str(dataset))
    found = make_plan(config, Settings("h100")).compute
    per_token = on_meta(SMALL).flops_per_token()
    assert found.evaluations == 4  # at 0, 4, 8 and 10
    assert found.flops == pytest.approx(per_token * (10 * 24 * 32 + 4 * 1000 / 3))


def test_data_sets(dataset: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert budget.dataset_bytes(str(dataset)) == (12_000, "its files")
    (dataset / "meta.json").write_text('{"splits": {"train": {"tokens": 7}, "val": {"tokens": 3}}}')
    assert budget.dataset_bytes(str(dataset)) == (20, "its meta.json")
    monkeypatch.setattr(budget, "DATA", tmp_path)
    monkeypatch.chdir(tmp_path)
    assert budget.dataset_bytes("openwebtext")[0] == 18_080_000_000
    assert budget.dataset_bytes("another") == (None, "not prepared here")


# --- the command ---


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(
            ("configs/gpt2_small_mars_exact.py", "--gpu", "h100", "--gpus=32", "--nodes=4", "--all", "--n_layer=2"),
            marks=pytest.mark.slow,
        ),
        ("configs/gpt2_large_adamw.py", "--gpu", "b200", "--gpus", "2", "--shard_optimizer=true", "--n_layer=3"),
        pytest.param(
            ("configs/stdlib_lion.py", "--gpu", "cpu", "--all", "--tokens-per-sec", "20000"), marks=pytest.mark.slow
        ),
        ("configs/stdlib_muon.py", "--gpu", "4090", "--compile_optimizer=false", "--dtype=float32"),
    ],
)
def test_what_is_printed_is_narrow_and_says_what_it_assumes(
    arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    text = text_of(capsys, str(ROOT / arguments[0]), *arguments[1:])
    assert max(map(len, text.splitlines())) <= 110
    assert "\nassumptions\n" in text
    assert ("Not yet measured on a GPU" in text) == ("cpu" not in arguments)
    assert ("mars-shampoo, exact" in text) == ("--all" in arguments)


@pytest.mark.slow
def test_a_config_that_an_optimizer_cannot_have_is_a_row_that_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    text = text_of(capsys, str(ROOT / "configs/stdlib_lion.py"), "--gpu", "cpu", "--all", "--mars_last_grad=folded")
    row = next(line for line in text.splitlines() if line.startswith("mars-adamw  "))
    assert "folded" in row


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    found = json_of(capsys, str(ROOT / "configs/gpt2_small_mars.py"), "--gpus", "32", "--all", "--n_layer=1")
    assert found["config"]["optimizer"] == "mars-adamw"
    assert found["parameters"] == 124_373_760 - 11 * (12 * 768 + 2) * 768
    assert found["memory"]["backward"]["weights"] == 4 * found["parameters"]
    assert {row["optimizer"] for row in found["optimizers"]} > set(BUILDERS)


ERRORS = [
    (("--gpu", "h1000"), "'h1000' is not known; known are h100, "),
    (("--gpus", "7"), "total_batch_size=480 cannot be shared equally by 7 processes"),
    (("--gpus", "0"), "must be 1 or more"),
    (("--gpus", "32", "--batch_size=4"), "batch_size can be 1, 3, 5, 15"),
    (("--gpus", "32", "--nodes", "5"), "cannot be shared equally by 5 hosts"),
    (("--utilisation", "1.5"), "must be above 0"),
    (("--utilisation", "nan"), "must be above 0"),
    (("--tokens-per-sec", "0"), "must be a number above 0"),
    (("--btach_size=4",), "did you mean batch_size?"),
    (("--optimizer=adamw", "--exact=true"), "has no exact form"),
    (("--gpus",), "expected one argument"),
]


@pytest.mark.parametrize(("arguments", "message"), ERRORS)
def test_errors_of_a_user(arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main([str(ROOT / "configs/gpt2_small_mars.py"), *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert message in printed.err


@pytest.mark.parametrize("arguments", [("nowhere.py",), ()])
def test_no_config(arguments: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert script.main(list(arguments)) == 2
    assert capsys.readouterr().err.startswith("error: ")


@pytest.mark.slow
def test_it_runs_from_anywhere(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "scripts/plan.py"), str(ROOT / "configs/stdlib_mars.py"), "--gpu", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "838,784 parameters" in done.stdout
