"""scripts/evaluate.py: losses as training has them, accuracies by hand and by the harness, processes, mistakes."""

import hashlib
import json
import math
import re
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.items import read_items
from data.tokenizers import ByteTokenizer
from model import GPT
from scripts import evaluate
from scripts.evaluation import hellaswag
from scripts.evaluation.scoring import Request
from tests.conftest import ENVIRONMENT, ROOT, Train
from tests.data.conftest import bpe_cache, bpe_files  # noqa: F401 (fixtures)
from tests.helpers import write_tokens
from tests.scripts.reference import by_hand
from training.trained import load_trained

TEXT = "the cat sat on the mat. "
ENDINGS = ["c", "the cat sat on the mat.", "dog eat dog", "XYZ, (1)"]


@pytest.fixture
def byte_run(run_train: Train, tmp_path: Path) -> Path:
    """A run that has learned a sentence of bytes."""
    tokens = ByteTokenizer().encode([TEXT * 200]).tolist()
    folder = write_tokens(tmp_path / "text", tokens, tokens[:1001])
    splits = {"val": {"tokens": 1001, "bytes": 2002}}
    (folder / "meta.json").write_text(json.dumps({"tokenizer": "bytes", "vocab_size": 257, "splits": splits}))
    settings = ("--vocab_size=272", "--max_iters=40", "--eval_interval=0", "--log_interval=40")
    assert run_train(f"--dataset={folder}", *settings, out="bytes").status == 0
    return run_train.folder("bytes")


@pytest.fixture
def items(tmp_path: Path) -> Path:
    """Four items with contexts shorter and longer than the model."""
    rows = [
        {"activity_label": "A", "ctx_a": "the cat", "ctx_b": part, "endings": ENDINGS, "label": label}
        for part, label in (("", "0"), ("sat [title]", 1), (TEXT * 3, "1"), ("was", 3))
    ]
    path = tmp_path / "items.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


Evaluate = Callable[..., tuple[dict[str, Any], str, str]]


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    """Runs the command in this process. Returns the JSON, standard output and standard error."""

    def run(*arguments: Any) -> tuple[dict[str, Any], str, str]:
        capsys.readouterr()
        file = tmp_path / "out.json"
        status = evaluate.main([*map(str, arguments), "--json", str(file)])
        out, err = capsys.readouterr()
        assert status == 0, err
        return json.loads(file.read_text()), out, err

    return run


def test_the_loss_is_that_of_the_run(byte_run: Path, run: Evaluate) -> None:
    rows = [json.loads(line) for line in (byte_run / "metrics.jsonl").read_text().splitlines()]
    last = [row["val/loss"] for row in rows if "val/loss" in row][-1]
    result, out, err = run(byte_run)
    (loss,) = result["data"]
    assert loss["loss"] == last
    assert loss["perplexity"] == pytest.approx(math.exp(last))
    assert loss["bits_per_byte"] == pytest.approx(last / math.log(2) / 2)
    assert (result["iter"], result["hellaswag"], loss["tokens"]) == (40, None, 1001)
    assert f"text: validation loss {last:.4f} nats per token" in out
    assert err == ""
    assert run(byte_run / "checkpoints" / "iter-00000040.pt", "--batch_size", 3)[0]["data"][0]["loss"] == pytest.approx(
        last, rel=0, abs=1e-6
    )


def test_checkpoints_and_other_data(run_train: Train, dataset: Path, run: Evaluate, tmp_path: Path) -> None:
    """A run that does not say what its tokens are takes any that its vocabulary has."""
    done = run_train("--checkpoint_interval=3", "--keep_checkpoints=9")
    losses = {row["iter"]: row["val/loss"] for row in done.rows if "val/loss" in row}
    other = write_tokens(tmp_path / "other", [1] * 100, [1, 2] * 20)
    result, out, _ = run(done.folder, "--checkpoint", "3", "--data", dataset, other)
    assert result["data"][0]["loss"] == losses[3]
    assert [Path(loss["data"]).name for loss in result["data"]] == ["data", "other"]
    assert result["data"][1]["bits_per_byte"] is None
    assert len(out.splitlines()) == 4


def test_hellaswag_by_hand(byte_run: Path, items: Path, run: Evaluate) -> None:
    """The sum prefers the short ending, the mean over characters the one that the model has learned."""
    trained = load_trained(byte_run)
    right = {"acc": 0, "acc_norm": 0}
    for item in read_items(items):
        sums = [
            by_hand(trained.model, list(item.query.encode()), list(f" {ending}".encode())) for ending in item.endings
        ]
        means = [total / len(ending) for total, ending in zip(sums, item.endings, strict=True)]
        right["acc"] += sums.index(max(sums)) == item.label
        right["acc_norm"] += means.index(max(means)) == item.label
    assert right == {"acc": 1, "acc_norm": 2}

    result, out, err = run(byte_run, "--hellaswag", items, "--batch_size", 3)
    assert result["data"] == []
    score = result["hellaswag"]
    assert (score["items"], score["acc"], score["acc_norm"]) == (4, 0.25, 0.5)
    # The deviation of 1, 0, 0, 0 is 1/2; that of 1, 1, 0, 0 is 1/sqrt(3). Both over sqrt(4).
    assert (score["acc_stderr"], score["acc_norm_stderr"]) == pytest.approx((0.25, 0.5 / math.sqrt(3)))
    assert "acc_norm 50.00 % ± 28.87, acc 25.00 % ± 25.00 (4 items" in out
    assert "4 items, not the 10,042 of the whole validation split" in err
    assert "does not compare with published ones" in err
    assert len(run(byte_run, "--data", "--hellaswag", items, "--limit", 1)[0]["data"]) == 1


def test_prepared_items_and_no_network(
    byte_run: Path, items: Path, run: Evaluate, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*arguments: object) -> None:
        raise AssertionError("a connection was tried")

    monkeypatch.setattr(socket.socket, "connect", connect)
    monkeypatch.setattr(socket, "getaddrinfo", connect)
    monkeypatch.setattr(evaluate, "PREPARED", items)
    result, _, _ = run(byte_run, "--data", "--hellaswag")
    assert result["hellaswag"]["file"] == str(items)
    monkeypatch.setattr(evaluate, "PREPARED", items.with_name("gone.jsonl"))
    with pytest.raises(AssertionError, match=r"gone.jsonl is missing; .*python data/prepare.py hellaswag"):
        run(byte_run, "--hellaswag")


def test_gpt2_tokens(
    run_train: Train,
    items: Path,
    run: Evaluate,
    bpe_cache: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    done = run_train("--vocab_size=50304", "--n_embd=8", "--max_iters=1")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
    result, _, err = run(done.folder, "--hellaswag", items)
    assert (result["tokenizer"], result["hellaswag"]["items"]) == ("gpt2", 4)
    assert "compare with published" not in err


def diverge(folder: Path, weight: float = 3e38) -> None:
    """By weights that are finite, whose products are not."""
    path = folder / "checkpoints" / "iter-00000040.pt"
    saved = torch.load(path, weights_only=True)
    saved["model"]["transformer.ln_f.weight"].fill_(weight)
    torch.save(saved, path)


def test_mistakes(
    byte_run: Path, dataset: Path, items: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*arguments: Any) -> str:
        capsys.readouterr()
        assert evaluate.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        assert "±" not in out
        return str(line)

    assert "arguments are required: RUN" in fails()
    assert f"{tmp_path}/gone holds no run" in fails(tmp_path / "gone")
    assert "no data set in" in fails(byte_run, "--data", tmp_path / "gone")
    assert "--batch_size: 0 is not allowed, only from 1" in fails(byte_run, "--batch_size", 0)
    assert "--limit counts items" in fails(byte_run, "--limit", 3)
    assert f"there is no folder {tmp_path}/gone" in fails(byte_run, "--json", tmp_path / "gone" / "a.json")
    assert f"--json {tmp_path} is a folder; it must be a file" in fails(byte_run, "--json", tmp_path)
    assert "--device=xyz: allowed are auto, cpu, cuda" in fails(byte_run, "--device", "xyz")
    assert "is a checkpoint already" in fails(byte_run / "checkpoints" / "a.pt", "--checkpoint", "best")
    assert re.search("--tokenizer gpt2: does not fit .*: its tokens are bytes", fails(byte_run, "--tokenizer", "gpt2"))
    items.write_text(items.read_text() + "{\n")
    assert f"{items}, line 5: not JSON" in fails(byte_run, "--hellaswag", items)

    (dataset / "meta.json").write_text('{"tokenizer": "gpt2", "vocab_size": 50257}')
    line = fails(byte_run, "--data", dataset)
    assert f"{dataset}: its tokens are gpt2, those of {byte_run}/checkpoints/iter-00000040.pt bytes" in line
    high = write_tokens(tmp_path / "high", [1] * 100, [272] * 100)
    assert "tokens that" in fails(byte_run, "--data", high)

    items.write_text(items.read_text().removesuffix("{\n"))
    diverge(byte_run)
    assert "log-likelihoods that are not finite; the run has diverged" in fails(byte_run, "--hellaswag", items)
    assert re.search("a loss of (nan|inf) on .*; the run has diverged", fails(byte_run))
    diverge(byte_run, math.nan)
    assert "transformer.ln_f.weight is not finite any more; the run has diverged" in fails(byte_run)


def test_a_run_of_unknown_tokens(run_train: Train, items: Path, capsys: pytest.CaptureFixture[str]) -> None:
    done = run_train("--vocab_size=300", "--max_iters=1")
    assert evaluate.main([str(done.folder), "--hellaswag", str(items)]) == 2
    assert "say --tokenizer gpt2 or bytes" in capsys.readouterr().err
    assert evaluate.main([str(done.folder), "--hellaswag", str(items), "--tokenizer", "bytes"]) == 0
    assert evaluate.main([str(done.folder), "--hellaswag", str(items), "--tokenizer", "gpt2"]) == 2
    assert "its vocabulary has 300 rows" in capsys.readouterr().err


def pretended(context: bytes, continuation: bytes) -> float:
    """A log-likelihood that depends on every byte."""
    return -5 - int(hashlib.sha256(context + b"\0" + continuation).hexdigest()[:6], 16) / 2**19


@pytest.mark.slow
def test_the_harness_s_own_task_gives_the_same(
    byte_run: Path, run: Evaluate, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Same texts, answers, accuracies and standard errors, whatever a model says."""
    import lm_eval
    from lm_eval.api.model import LM
    from lm_eval.evaluator import simple_evaluate
    from lm_eval.tasks import TaskManager

    rng = np.random.default_rng(0)
    words = ["[header]", "[title]", "[substeps]", "Mix", "the", "flour.", "", "ÉTÉ", "then", "[step] Stir", "it."]

    def words_of(count: int) -> str:
        return " ".join(rng.choice(words, count))

    rows = [
        {"activity_label": words_of(2), "ctx_a": words_of(9), "ctx_b": words_of(3), "label": str(rng.integers(4))}
        | {"endings": [words_of(int(count)) + " end" for count in rng.integers(0, 9, 4)]}
        for _ in range(60)
    ]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))

    class Pretender(LM):
        def loglikelihood(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            texts = [[text.encode() for text in request.args] for request in requests]
            pairs = [(context.rstrip(b" "), context, continuation) for context, continuation in texts]
            return [(pretended(bare, context[len(bare) :] + rest), False) for bare, context, rest in pairs]

        loglikelihood_rolling = generate_until = None

    included = Path(lm_eval.__file__).parent / "tasks" / "hellaswag" / "hellaswag.yaml"
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"validation": str(file)}}}
    task = {"include": str(included), "task": "hellaswag_here", "training_split": None} | source
    (tmp_path / "here.yaml").write_text(json.dumps(task))
    manager = TaskManager(include_path=tmp_path, include_defaults=False)
    theirs = simple_evaluate(Pretender(), tasks=["hellaswag_here"], task_manager=manager, bootstrap_iters=1)
    assert theirs is not None

    def loglikelihoods(model: GPT, requests: list[Request], **_: Any) -> list[tuple[float, bool]]:
        return [(pretended(bytes(context), bytes(continuation)), False) for context, continuation in requests]

    monkeypatch.setattr(hellaswag, "loglikelihoods", loglikelihoods)
    ours = run(byte_run, "--hellaswag", file)[0]["hellaswag"]
    assert ours["acc"] != ours["acc_norm"]
    for key in ("acc", "acc_norm", "acc_stderr", "acc_norm_stderr"):
        assert ours[key] == pytest.approx(theirs["results"]["hellaswag_here"][f"{key},none"], rel=1e-9), key


def torchrun(*arguments: Any) -> "subprocess.CompletedProcess[str]":
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "scripts/evaluate.py"]
    return subprocess.run(
        [sys.executable, *words, *map(str, arguments)],
        cwd=ROOT,
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=120,
    )


@pytest.mark.slow
def test_two_processes_count_each_item_once(byte_run: Path, items: Path, run: Evaluate, tmp_path: Path) -> None:
    """Three items, so that the shares differ."""
    one, out, _ = run(byte_run, "--data", "--hellaswag", items, "--limit", 3)
    file = tmp_path / "two.json"
    done = torchrun(byte_run, "--data", "--hellaswag", items, "--limit", 3, "--json", file)
    assert done.returncode == 0, done.stderr
    two = json.loads(file.read_text())
    assert two.pop("processes") == 2
    assert one.pop("processes") == 1
    assert two["data"][0].pop("loss") == pytest.approx(one["data"][0].pop("loss"), rel=0, abs=1e-6)
    for key in ("perplexity", "bits_per_byte"):
        assert two["data"][0].pop(key) == pytest.approx(one["data"][0].pop(key), rel=1e-6)
    assert two == one
    assert done.stdout.replace("two.json", "out.json") == out


@pytest.mark.slow
def test_two_processes_say_a_mistake_once(byte_run: Path, items: Path) -> None:
    diverge(byte_run)
    for arguments, message in ((("--data", "gone"), "no data set in"), (("--hellaswag", items), "has diverged")):
        done = torchrun(byte_run, *arguments)
        assert done.returncode == 1
        errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1
        assert message in errors[0]
        assert "±" not in done.stdout
