"""Models read back from their runs."""

import shutil

import pytest
import torch

from tests.conftest import Train
from training import RunError
from training.trained import load_trained


def test_last_best_and_named_checkpoints(run_train: Train) -> None:
    run = run_train("--eval_interval=1", "--checkpoint_interval=1", "--keep_checkpoints=9")
    losses = run.series("val/loss")
    best = min(range(len(losses)), key=losses.__getitem__)
    assert [load_trained(run.folder, which).update for which in ("last", "best", "3")] == [6, best, 3]
    last = load_trained(run.folder)
    assert last.path == run.folder / "checkpoints" / "iter-00000006.pt"
    assert not last.model.training
    saved = torch.load(last.path, weights_only=True)
    assert all(torch.equal(value, saved["model"][name]) for name, value in last.model.state_dict().items())
    assert load_trained(last.path).update == 6
    assert last.settings["learning_rate"] == 1e-2


def test_the_tokenizer_is_the_data_sets(run_train: Train) -> None:
    assert load_trained(run_train().folder).tokenizer is None  # no meta.json, and a vocabulary of 64
    run = run_train("--vocab_size=50304", "--max_iters=1", out="large")
    trained = load_trained(run.folder)
    assert (trained.tokenizer, trained.tokens) == ("gpt2", 50257)


def test_what_is_no_run(run_train: Train) -> None:
    run = run_train("--max_iters=2")
    with pytest.raises(RunError, match="holds no run"):
        load_trained(run.folder.parent / "gone")
    with pytest.raises(RunError, match=r"iter-00000007.pt is missing; checkpoints there: 2$"):
        load_trained(run.folder, "7")
    with pytest.raises(RunError, match="checkpoint 'newest': expected last, best"):
        load_trained(run.folder, "newest")
    with pytest.raises(RunError, match=r"gone.pt is not a checkpoint: FileNotFoundError"):
        load_trained(run.folder / "gone.pt")
    shutil.rmtree(run.folder / "checkpoints")
    (run.folder / "checkpoints").mkdir()
    with pytest.raises(RunError, match="no checkpoint yet"):
        load_trained(run.folder)
