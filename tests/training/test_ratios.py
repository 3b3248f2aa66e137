"""The update-to-weight ratios of evaluation rows, against weights from checkpoints and a hand computation."""

import json
import math

import pytest
import torch
from torch import nn

from optim.build import BUILDERS
from tests.conftest import Outcome, Train
from training.ratios import update_ratios


def weights(outcome: Outcome, update: int) -> dict[str, torch.Tensor]:
    return torch.load(outcome.folder / f"checkpoints/iter-{update:08}.pt", weights_only=True)["model"]


def test_by_hand() -> None:
    """Weights (3, 4) of norm 5 go by (0.3, 0.4) of norm 0.5; a vector of ones goes by a quarter of itself."""
    matrix, vector = nn.Parameter(torch.tensor([[3.0], [4.0]])), nn.Parameter(torch.ones(7))
    groups = [{"name": "matrices", "params": [matrix], "lr": 0.1}, {"name": "vectors", "params": [vector], "lr": 0.25}]
    optimizer = torch.optim.SGD(groups)
    matrix.grad, vector.grad = matrix.detach().clone(), -torch.ones(7)
    with update_ratios(optimizer, wanted=False) as nothing:
        pass
    with update_ratios(optimizer, wanted=True) as ratios:
        optimizer.step()
        assert ratios == {}
    assert nothing == {}
    assert ratios == {
        "update_ratio/matrices": pytest.approx(0.1, rel=1e-6),
        "update_ratio/vectors": pytest.approx(0.25, rel=1e-6),
    }
    torch.testing.assert_close(matrix.detach(), torch.tensor([[2.7], [3.6]]))


OPTIMIZERS = [pytest.param(name, marks=[] if name == "mars-adamw" else [pytest.mark.slow]) for name in sorted(BUILDERS)]


def kinds(model: dict[str, torch.Tensor]) -> dict[str, list[str]]:
    """Names of a model's weights by kind; the head is the token embedding."""
    names = [name for name in model if name != "lm_head.weight"]
    embeddings = ["transformer.wte.weight", "transformer.wpe.weight"]
    vectors = [name for name in names if model[name].dim() == 1]
    return {
        "embeddings": embeddings,
        "vectors": vectors,
        "matrices": [name for name in names if name not in (*embeddings, *vectors)],
    }


def ratio(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor], names: list[str]) -> float:
    """||w' - w|| / ||w||, in float64."""
    moved = sum((after[name].double() - before[name].double()).square().sum().item() for name in names)
    return math.sqrt(moved / sum(before[name].double().square().sum().item() for name in names))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_rows_have_what_the_checkpoints_say(run_train: Train, optimizer: str) -> None:
    every = ("--eval_interval=2", "--checkpoint_interval=1", "--keep_checkpoints=9", f"--optimizer={optimizer}")
    done = run_train(*every)
    assert done.status == 0, done.stderr
    rows = {row["iter"]: row for row in done.rows if "val/loss" in row}
    assert list(rows) == [0, 2, 4, 6]
    assert not any(key.startswith("update_ratio") for key in rows[0]), "no update was made"
    for update in (2, 4, 6):
        before, after = weights(done, update - 1), weights(done, update)
        for kind, names in kinds(after).items():
            expected = ratio(before, after, names)
            assert expected > 0
            assert rows[update][f"update_ratio/{kind}"] == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("settings", [(), ("--optimizer=mars-adamw", "--exact=True"), ("--dtype=float16",)])
def test_measuring_changes_nothing(run_train: Train, settings: tuple[str, ...]) -> None:
    never = run_train("--eval_interval=0", *settings, out="never")
    always = run_train("--eval_interval=1", *settings, out="always")
    assert always.series("train/loss") == never.series("train/loss")
    assert len(always.series("update_ratio/matrices")) == 6
    for name, weight in weights(never, 6).items():
        assert torch.equal(weights(always, 6)[name], weight), name


def test_an_update_that_was_not_made_has_none(run_train: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor has one that another process made, before it was stopped without the evaluation."""
    first = run_train("--max_iters=3", "--lr_decay_iters=6", "--eval_interval=0")
    metrics = first.folder / "metrics.jsonl"
    kept = [row for row in first.rows if not ("val/loss" in row and row["iter"] == 3)]
    metrics.write_text("".join(json.dumps(row) + "\n" for row in kept))
    path = first.folder / "checkpoints" / "iter-00000003.pt"
    saved = torch.load(path, weights_only=True)
    torch.save(saved | {"evaluated": 0}, path)
    monkeypatch.setattr("training.passes.clip_gradients", lambda *_: torch.tensor(math.nan))
    done = run_train("--resume=auto", "--lr_decay_iters=6", "--eval_interval=1")
    assert done.status == 0, done.stderr
    assert [row["iter"] for row in done.rows if "val/loss" in row] == [0, 3, 4, 5, 6]
    assert done.series("update_ratio/matrices") == []
    assert done.series("skipped_updates")[-1] == 3


@pytest.mark.slow
def test_two_processes_measure_what_one_does(run_train: Train) -> None:
    settings = ("--shard_optimizer=True", "--optimizer=mars-adamw", "--exact=True", "--eval_interval=2")
    one = run_train(*settings, out="one")
    two = run_train(*settings, out="two", processes=2)
    assert two.status == 0, two.stderr
    for kind in ("matrices", "embeddings", "vectors"):
        assert len(two.series(f"update_ratio/{kind}")) == 3
        assert two.series(f"update_ratio/{kind}") == pytest.approx(one.series(f"update_ratio/{kind}"), rel=1e-3)
