"""train.py as a user meets it: what a run computes, writes and says, and how it ends when something is wrong."""

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from model import GPT, GPTConfig
from optim.build import BUILDERS
from tests.conftest import ROOT, Outcome, Train
from tests.helpers import write_tokens
from training.device import pick_dtype

OPTIMIZERS = sorted(BUILDERS)


def weights(outcome: Outcome, update: int = 6) -> dict[str, torch.Tensor]:
    return torch.load(outcome.folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_learns_and_leaves_its_folder(run_train: Train, optimizer: str) -> None:
    rate = ("--learning_rate=0.5", "--min_lr=0.05") if optimizer == "sgd" else ()
    done = run_train(f"--optimizer={optimizer}", *rate, "--max_iters=60", "--eval_interval=25", "--log_interval=10")
    assert (done.status, done.stderr) == (0, "")
    val = [row for row in done.rows if "val/loss" in row]
    train = [row for row in done.rows if "train/loss" in row]
    assert [row["iter"] for row in val] == [0, 25, 50, 60]
    assert [row["iter"] for row in train] == [1, 10, 20, 30, 40, 50, 60]
    assert all(row["tokens"] == row["iter"] * 8 * 16 for row in done.rows)
    assert val[0]["val/loss"] == pytest.approx(math.log(64), abs=0.1)
    assert val[-1]["val/loss"] < 3.2 < val[0]["val/loss"]
    assert {"lr", "grad_norm", "tokens_per_sec"} <= set(train[0])
    assert all(row["eval_seconds"] >= 0 for row in val)
    assert done.stdout.count(", training waited ") >= len(val)
    assert ("mars/clip_rate" in train[0]) == optimizer.startswith("mars-")
    times = [row["time"] for row in done.rows]
    assert times == sorted(times)
    assert times[0] == 0


def test_the_clip_rate_is_the_share_of_updates_whose_gradient_was_too_long(run_train: Train) -> None:
    settings = ("--max_iters=12", "--eval_interval=0", "--grad_clip=1.3")
    norms = run_train(*settings, out="each").series("grad_norm")
    rows = run_train(*settings, "--log_interval=5", out="some").rows
    clipped = [norm > 1.3 for norm in norms]
    assert 0 < sum(clipped) < 12
    shares = [sum(clipped[a:b]) / (b - a) for a, b in ((0, 1), (1, 5), (5, 10), (10, 12))]
    assert [row["clip_rate"] for row in rows if "clip_rate" in row] == shares
    assert run_train("--max_iters=1", "--grad_clip=0", out="none").series("clip_rate") == []


def test_config_json_records_what_was_used(run_train: Train, dataset: Path) -> None:
    (dataset / "meta.json").write_text(json.dumps({"tokenizer": "bytes", "vocab_size": 64, "unigram_loss": 4.0}))
    done = run_train("--max_iters=1", "--dtype=auto", "--compile=auto")
    record = json.loads((done.folder / "config.json").read_text())
    dtype = pick_dtype("auto", torch.device("cpu"))
    assert (record["max_iters"], record["dtype"], record["device"]) == (1, dtype, "cpu")
    assert (record["compile"], record["chunked_loss"]) == (False, True)
    assert (record["processes"], record["gradient_accumulation_steps"], record["tokens_per_update"]) == (1, 2, 128)
    assert (
        record["parameters"]
        == GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64)).num_parameters()
    )
    assert record["torch_version"] == torch.__version__
    assert len(record["data"].pop("fingerprint")) == 32
    assert record["data"] == {
        "path": str(dataset),
        "train_tokens": 5000,
        "val_tokens": 1000,
        "val_bytes": None,
        "unigram_loss": 4.0,
        "tokenizer": "bytes",
    }
    assert {"command", "code_version", "project_version", "device_name"} <= set(record)


def test_the_start_says_what_will_happen(run_train: Train) -> None:
    out = run_train("--max_iters=2", "--lr_decay_iters=10").stdout
    assert "27,296 parameters" in out
    assert "128 tokens = 8 sequences x 16 tokens, as 4 sequences x 2 micro-batches x 1 process\n" in out
    assert "computing in float32, not compiled" in out
    assert "lr_decay_iters=10 differs from max_iters=2" in out
    assert "the run ends within its warm-up" in out
    assert "left" in out


def test_a_checkpoint_holds_what_the_design_says(run_train: Train) -> None:
    done = run_train("--dtype=float32")
    files = sorted(path.name for path in (done.folder / "checkpoints").iterdir())
    assert files[-1] == "iter-00000006.pt"
    saved = torch.load(done.folder / "checkpoints" / files[-1], weights_only=True)
    assert {"model", "optimizer", "config", "iter", "best_val_loss"} <= set(saved)
    assert saved["iter"] == 6
    assert saved["best_val_loss"] == min(done.series("val/loss"))
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=64))
    model.load_state_dict(saved["model"])


def test_the_newest_and_the_best_checkpoints_are_kept(run_train: Train) -> None:
    # A learning rate that grows until the loss rises again.
    done = run_train(
        *("--max_iters=24", "--eval_interval=4", "--checkpoint_interval=4", "--keep_checkpoints=2"),
        *("--learning_rate=0.5", "--warmup_iters=200", "--lr_decay_iters=1000"),
    )
    losses = dict(zip([row["iter"] for row in done.rows if "val/loss" in row], done.series("val/loss"), strict=True))
    best = min(losses, key=lambda update: losses[update])
    assert 0 < best < 20, "the test needs a best evaluation before the end"
    names = sorted(path.name for path in (done.folder / "checkpoints").iterdir())
    assert names == [f"iter-{update:08}.pt" for update in sorted({best, 20, 24})]


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(name, marks=[] if name == "mars-adamw" else [pytest.mark.slow]) for name in OPTIMIZERS],
)
def test_division_of_the_batch_changes_nothing(tmp_path: Path, run_train: Train, optimizer: str) -> None:
    """Tokens that are all equal, so that each division sees the very same sequences.

    Lion's sign and Shampoo's iteration in bfloat16 turn a rounding of a gradient near zero into a step of full size.
    """
    tolerance = 1e-6 if optimizer in ("adamw", "mars-adamw") else 1e-3
    folder = write_tokens(tmp_path / "equal", [3] * 500, [3] * 100)
    common = (f"--dataset={folder}", f"--optimizer={optimizer}")
    first = run_train(*common, "--batch_size=8", out="8-1-1")
    others = [run_train(*common, "--batch_size=1", out="1-8-1")]
    others += [run_train(*common, "--batch_size=2", out="2-2-2", processes=2)]
    for other in others:
        assert other.status == 0, other.stderr
        for key in ("train/loss", "grad_norm", "val/loss"):
            np.testing.assert_allclose(other.series(key), first.series(key), rtol=tolerance, atol=tolerance)
        if tolerance == 1e-6:
            for name, weight in weights(first).items():
                torch.testing.assert_close(weights(other)[name], weight, rtol=0, atol=tolerance)


def test_two_processes_compute_what_one_does(run_train: Train) -> None:
    one = run_train("--optimizer=mars-adamw", "--max_iters=20", out="one")
    two = run_train("--optimizer=mars-adamw", "--max_iters=20", out="two", processes=2)
    assert two.status == 0, two.stderr
    np.testing.assert_allclose(two.series("train/loss"), one.series("train/loss"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(two.series("val/loss"), one.series("val/loss"), rtol=0, atol=1e-5)
    assert two.stdout.count("parameters: 2 layers") == 1, "only one process speaks"


def test_gradients_travel_with_the_last_micro_batch_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from training.processes import Processes

    processes = Processes(rank=0, local_rank=0, size=2, device=torch.device("cpu"))
    entered = []
    wrapped = DistributedDataParallel.__new__(DistributedDataParallel)
    monkeypatch.setattr(DistributedDataParallel, "no_sync", lambda self: entered.append(self))
    processes.accumulate(wrapped, last=True)
    assert entered == []
    processes.accumulate(wrapped, last=False)
    assert entered == [wrapped]


def test_gradients_stay_in_buckets_and_go_where_there_are_none() -> None:
    from torch.nn.parallel import DistributedDataParallel

    from training.processes import Processes

    processes = Processes(rank=0, local_rank=0, size=2, device=torch.device("cpu"))
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight])
    weight.grad = bucket = torch.ones(3)
    processes.clear_gradients(DistributedDataParallel.__new__(DistributedDataParallel), optimizer)
    assert weight.grad is bucket
    assert not bucket.any()
    processes.clear_gradients(torch.nn.Linear(1, 1), optimizer)
    assert weight.grad is None


def test_optimizers_see_the_same_batches_whatever_the_evaluation(run_train: Train) -> None:
    """The first loss depends on nothing but weights and batch, and evaluating draws no random number."""
    runs = [run_train("--dropout=0.1", f"--eval_interval={n}", out=f"e{n}") for n in (0, 1, 4)]
    assert runs[0].series("train/loss") == runs[1].series("train/loss") == runs[2].series("train/loss")
    assert [row["iter"] for row in runs[0].rows if "val/loss" in row] == [0, 6]
    mars = run_train("--dropout=0.1", "--optimizer=mars-adamw", out="mars")
    assert mars.series("train/loss")[0] == runs[0].series("train/loss")[0]


def test_dropout_changes_training_but_not_evaluation(run_train: Train) -> None:
    plain, dropped = run_train(out="plain"), run_train("--dropout=0.5", out="dropped")
    assert plain.series("val/loss")[0] == dropped.series("val/loss")[0]
    assert plain.series("train/loss")[0] != dropped.series("train/loss")[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_follows_single(run_train: Train, dtype: str) -> None:
    single = run_train("--max_iters=20", out="single")
    half = run_train("--max_iters=20", f"--dtype={dtype}", out="half")
    assert half.status == 0, half.stderr
    np.testing.assert_allclose(half.series("val/loss"), single.series("val/loss"), rtol=0, atol=0.02)
    state = torch.load(half.folder / "checkpoints/iter-00000020.pt", weights_only=True)
    assert all(weight.dtype == torch.float32 for weight in state["model"].values())


def test_gradient_multiplier_and_clip(run_train: Train) -> None:
    plain = run_train("--max_iters=1", "--grad_clip=0", out="plain")
    times_4 = run_train("--max_iters=1", "--grad_clip=0", "--gradient_multiplier=4", out="times4")
    assert times_4.series("grad_norm")[0] == pytest.approx(4 * plain.series("grad_norm")[0], rel=1e-5)
    assert times_4.series("train/loss") == plain.series("train/loss")


def test_the_last_update_has_the_minimum_rate_and_the_first_one_moves(run_train: Train) -> None:
    rates = run_train("--max_iters=8", "--warmup_iters=2").series("lr")
    assert rates[0] == pytest.approx(5e-3)
    assert rates[1] == max(rates) == pytest.approx(1e-2)
    assert rates[-1] == pytest.approx(1e-3)


def test_no_updates_is_an_evaluation(run_train: Train) -> None:
    done = run_train("--max_iters=0")
    assert done.status == 0
    assert [path.name for path in (done.folder / "checkpoints").iterdir()] == ["iter-00000000.pt"]
    assert [row["iter"] for row in done.rows] == [0]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_goes_on_from_its_checkpoint_exactly(run_train: Train, optimizer: str) -> None:
    common = (f"--optimizer={optimizer}", "--dropout=0.1", "--lr_decay_iters=9", "--eval_interval=1")
    straight = run_train(*common, "--max_iters=9", out="straight")
    run_train(*common, "--max_iters=4", out="parts")
    parts = run_train(*common, "--max_iters=9", "--resume=auto", out="parts")
    assert parts.status == 0, parts.stderr
    assert parts.series("train/loss") == straight.series("train/loss")
    assert parts.series("val/loss") == straight.series("val/loss")
    assert parts.series("iter") == straight.series("iter")
    for name, weight in weights(straight, 9).items():
        assert torch.equal(weights(parts, 9)[name], weight)
    again = run_train(*common, "--max_iters=9", "--resume=auto", out="parts")
    assert again.status == 0
    assert "nothing to do" in again.stdout


def test_rows_are_never_written_twice(run_train: Train) -> None:
    """A run killed after its last checkpoint computes some rows again; one killed within a row leaves half of it."""
    straight = run_train(out="straight")
    run_train("--max_iters=3", "--lr_decay_iters=6", out="parts")
    kept = (straight.folder / "metrics.jsonl").read_text().splitlines(keepends=True)[:7]
    assert '"iter": 5' in kept[-1]
    (straight.folder.parent / "parts" / "metrics.jsonl").write_text("".join(kept) + '{"iter": 6, "tok')
    parts = run_train("--resume=auto", out="parts")
    lines = (parts.folder / "metrics.jsonl").read_text().splitlines()
    assert lines.pop(7) == '{"iter": 6, "tok'
    rows = [json.loads(line) for line in lines]
    assert [row["iter"] for row in rows if "train/loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["iter"] for row in rows if "val/loss" in row] == [0, 3, 6]


def test_changed_settings_take_effect_on_resume_and_are_listed(run_train: Train) -> None:
    """Not the saved ones of the optimizer's groups."""
    common = ("--optimizer=mars-adamw", "--lr_decay_iters=6")
    changes = ("--gamma=0.5", "--weight_decay=2", "--beta1=0.5", "--mars_clip=none", "--lr_1d=1e-3")
    run_train(*common, "--max_iters=3", out="parts")
    shutil.copytree(run_train.folder("parts"), run_train.folder("changed"))
    plain = run_train(*common, "--max_iters=6", "--resume=auto", out="parts")
    changed = run_train(*common, "--max_iters=6", "--resume=auto", *changes, out="changed")
    assert changed.series("train/loss")[:4] == plain.series("train/loss")[:4]
    assert changed.series("train/loss")[4:] != plain.series("train/loss")[4:]
    state = torch.load(changed.folder / "checkpoints/iter-00000006.pt", weights_only=True)["optimizer"]
    groups = {group["name"]: group for group in state["param_groups"]}
    assert (groups["matrices"]["gamma"], groups["matrices"]["betas"][0], groups["matrices"]["clip"]) == (
        0.5,
        0.5,
        "none",
    )
    assert groups["vectors"]["lr"] == pytest.approx(groups["matrices"]["lr"] / 10)
    assert "changed     gamma: 0.025 until now, 0.5 from here on" in changed.stdout
    assert "changed     max_iters: 3 until now, 6 from here on" in plain.stdout
    assert "out_dir:" not in changed.stdout


def test_damaged_checkpoints_are_skipped_for_the_one_before(run_train: Train) -> None:
    straight = run_train("--checkpoint_interval=2", "--keep_checkpoints=9", out="straight")
    run_train("--checkpoint_interval=2", "--keep_checkpoints=9", out="parts")
    folder = run_train.folder("parts") / "checkpoints"
    newest, before = folder / "iter-00000006.pt", folder / "iter-00000004.pt"
    newest.write_bytes(newest.read_bytes()[:5000])
    torch.save({"model": {}}, folder / "iter-00000005.pt")
    (folder / "iter-zzz.pt").write_text("not one of ours")
    parts = run_train("--checkpoint_interval=2", "--keep_checkpoints=9", "--resume=auto", out="parts")
    assert parts.status == 0, parts.stderr
    assert parts.stderr.count("warning: skipped: ") == 2
    assert "going on after update 4" in parts.stdout
    for name, weight in weights(straight).items():
        assert torch.equal(weights(parts)[name], weight)
    for path in folder.glob("iter-0*.pt"):
        path.write_bytes(b"")
    assert before.exists()
    broken = run_train("--resume=auto", out="parts")
    assert broken.status == 2
    assert broken.stderr.splitlines()[-1].startswith(f"error: {folder}: no checkpoint can be read")


def test_a_run_killed_before_its_first_checkpoint_starts_again(run_train: Train) -> None:
    """With the same model and data; with others its rows would be mixed with theirs."""
    straight = run_train(out="straight")
    run_train("--max_iters=3", "--lr_decay_iters=6", out="parts")
    shutil.rmtree(run_train.folder("parts") / "checkpoints")
    refused(run_train("--resume=auto", "--n_embd=16", out="parts"), "n_embd=32", "--n_embd=32")
    parts = run_train("--resume=auto", out="parts")
    assert parts.series("train/loss") == straight.series("train/loss")


def test_a_finished_run_is_left_as_it_is(run_train: Train) -> None:
    done = run_train()
    before = {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()}
    again = run_train("--resume=auto", "--max_iters=2")
    assert (again.status, again.stdout.splitlines()[-1]) == (0, "nothing to do: 6 of 2 updates are done")
    assert {path: path.read_bytes() for path in done.folder.rglob("*") if path.is_file()} == before


def refused(outcome: Outcome, *parts: str) -> None:
    assert outcome.status == 2
    assert outcome.stderr.startswith("error: ")
    assert outcome.stderr.count("\n") == 1, outcome.stderr
    for part in parts:
        assert part in outcome.stderr, outcome.stderr


def test_a_folder_with_a_run_is_not_overwritten(run_train: Train) -> None:
    before = run_train()
    content = (before.folder / "metrics.jsonl").read_text()
    for resume in ("none", "never"):
        refused(run_train(f"--resume={resume}"), str(before.folder), "--resume=auto", "--out_dir")
    assert (before.folder / "metrics.jsonl").read_text() == content
    refused(run_train("--resume=auto", "--seed=1", "--max_iters=9"), "seed=5000", "--seed=5000")


def test_mistakes_end_in_one_line(run_train: Train, dataset: Path, tmp_path: Path) -> None:
    refused(run_train("--learning_rte=1"), "learning_rte", "learning_rate")
    refused(run_train("--learning_rate=abc"), "--learning_rate=abc", "number")
    refused(run_train("--batch_size=7", "--total_batch_size=480"), "batch_size=7", "480", "1, 2, 3, 4, 5, 6, 8")
    refused(run_train(path=tmp_path / "gone.py"), str(tmp_path / "gone.py"))
    refused(run_train("--dataset=nowhere"), "data/nowhere", "prepare.py")
    refused(run_train("--device=cuda:99"), "--device=cuda:99")
    refused(run_train("--vocab_size=60"), f"{dataset}/train.bin: token 63", "vocab_size=60")
    refused(run_train(out="data/train.bin/run"), "data/train.bin/run")
    (dataset / "train.bin").write_bytes(b"abc")
    refused(run_train(), f"{dataset}/train.bin", "3 bytes")
    (dataset / "train.bin").write_bytes(b"ab" * 16)
    refused(run_train(), f"{dataset}/train.bin", "16 tokens", "block_size=16")
    (dataset / "train.bin").write_bytes(b"")
    refused(run_train(), f"{dataset}/train.bin is empty")
    (dataset / "train.bin").unlink()
    refused(run_train(), f"{dataset}/train.bin is missing")
    assert not (tmp_path / "run").exists()


def test_folders_that_cannot_be_written(run_train: Train, tmp_path: Path) -> None:
    refused(run_train(out="x" * 300), "x" * 300)
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "checkpoints").write_text("a file")
    refused(run_train(out="blocked"), "blocked/checkpoints")
    (tmp_path / "odd" / "metrics.jsonl").mkdir(parents=True)
    refused(run_train("--resume=auto", out="odd"), "odd/metrics.jsonl")
    refused(run_train(out="/proc/run"), "/proc/run")


def test_odd_meta_files(run_train: Train, dataset: Path) -> None:
    for meta in ("[1]", '{"vocab_size": null}', '{"vocab_size": "64"}', '{"splits": [1]}', '{"splits": {"val": 3}}'):
        (dataset / "meta.json").write_text(meta)
        refused(run_train(), f"{dataset}/meta.json", "remove the file")
    (dataset / "meta.json").write_text('{"dtype": "uint32"}')
    refused(run_train(), "uint32", "uint16")
    (dataset / "meta.json").write_text("[" * 100_000)
    refused(run_train(), f"{dataset}/meta.json")
    (dataset / "meta.json").unlink()
    (dataset / "train.bin").unlink()
    os.mkfifo(dataset / "train.bin")
    refused(run_train(), f"{dataset}/train.bin is not a file")


def test_numbers_beyond_reason_end_at_once(run_train: Train) -> None:
    refused(run_train("--total_batch_size=10000000000000061", "--batch_size=2"), "total_batch_size")
    refused(run_train("--total_batch_size=2147483647", "--batch_size=2"), "batch_size can be 1, 2147483647")
    refused(run_train(f"--seed={10**30}"), "seed")
    refused(run_train("--device=cuda:99999999999999"), "device")
    refused(run_train("--n_embd=2000000", "--n_head=2"), "out of memory", "--batch_size")


def test_a_command_line_without_a_config(run_train: Train) -> None:
    for arguments in ([], ["--max_iters=2"]):
        done = subprocess.run([sys.executable, str(ROOT / "train.py"), *arguments], capture_output=True, text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr.startswith("error: no config; usage: ")


def test_mistakes_end_all_processes(run_train: Train) -> None:
    """torchrun itself adds its own report and ends with status 1; the run's own line is there once."""
    done = run_train("--learning_rate=abc", processes=2)
    assert done.status != 0
    assert sum(line.startswith("error: ") for line in done.stderr.splitlines()) == 1


def test_the_command_as_typed(config: Path, tmp_path: Path) -> None:
    """From another folder, through the shell's eyes."""

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(ROOT / "train.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)

    done = run("tiny.py", "--max_iters=1", "--out_dir=here")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "here" / "metrics.jsonl").exists()
    wrong = run("tiny.py", "--n_layr=3")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr == "error: --n_layr=3: unknown key; did you mean n_layer?\n"
    assert run("--help").stdout.count("\n  --") > 40


def test_training_needs_neither_tiktoken_nor_datasets(config: Path) -> None:
    heavy = "{'tiktoken', 'datasets', 'wandb', 'matplotlib'}"
    code = f"import sys, train; train.main([{str(config)!r}]); print(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("processes", [None, 2])
def test_a_compiled_run_computes_the_same(run_train: Train, processes: int | None) -> None:
    eager = run_train("--optimizer=mars-adamw", "--max_iters=12", out="eager")
    compiled = run_train(
        "--optimizer=mars-adamw", "--max_iters=12", "--compile=true", out="compiled", processes=processes
    )
    assert compiled.status == 0, compiled.stderr
    assert ", compiled, torch" in compiled.stdout
    np.testing.assert_allclose(compiled.series("train/loss"), eager.series("train/loss"), rtol=0, atol=1e-4)
    np.testing.assert_allclose(compiled.series("val/loss"), eager.series("val/loss"), rtol=0, atol=1e-4)
    assert set(weights(compiled, 12)) == set(weights(eager, 12)), "plain names in the checkpoint"
