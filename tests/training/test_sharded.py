"""The training loop with the optimizer's state shared by the processes (ZeRO-1), and with a gamma that changes."""

import numpy as np
import pytest
import torch

from tests.conftest import Train


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        pytest.param(("--optimizer=mars-adamw", "--mars_clip=global"), 1e-5, marks=pytest.mark.slow),
        pytest.param(("--optimizer=adamw",), 1e-5, marks=pytest.mark.slow),
        pytest.param(("--optimizer=mars-adamw", "--exact=true", "--gamma=0.3"), 1e-5, marks=pytest.mark.slow),
        pytest.param(("--optimizer=mars-adamw", "--dtype=float16"), 1e-3, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_two_processes_that_share_the_state_compute_what_one_does(
    run_train: Train, settings: tuple[str, ...], tolerance: float
) -> None:
    """And their checkpoint goes on in one process without sharding, as one's own would."""
    common = (*settings, "--max_iters=12", "--lr_decay_iters=16", "--checkpoint_interval=4")
    one = run_train(*common, out="one")
    two = run_train(*common, "--shard_optimizer=true", out="two", processes=2)
    assert two.status == 0, two.stderr
    np.testing.assert_allclose(two.series("train/loss"), one.series("train/loss"), rtol=0, atol=tolerance)
    np.testing.assert_allclose(two.series("val/loss"), one.series("val/loss"), rtol=0, atol=tolerance)

    file = "checkpoints/iter-00000012.pt"
    saved = [torch.load(run.folder / file, weights_only=True)["optimizer"] for run in (one, two)]
    assert saved[0]["state"].keys() == saved[1]["state"].keys()
    for number, entry in saved[0]["state"].items():
        assert {name: value.shape for name, value in entry.items()} == {
            name: value.shape for name, value in saved[1]["state"][number].items()
        }
    for run in ("one", "two"):
        on = run_train(*settings, "--max_iters=16", "--resume=auto", out=run)
        assert on.status == 0, on.stderr
    np.testing.assert_allclose(two.series("train/loss"), one.series("train/loss"), rtol=0, atol=tolerance)
    again = run_train(*settings, "--max_iters=18", "--resume=auto", "--shard_optimizer=true", out="one", processes=2)
    assert again.status == 0, again.stderr
    assert len(again.series("train/loss")) == 18


def test_in_one_process_there_is_nothing_to_share(run_train: Train) -> None:
    plain = run_train("--optimizer=mars-lion", out="plain")
    alone = run_train("--optimizer=mars-lion", "--shard_optimizer=true", out="alone")
    assert alone.series("train/loss") == plain.series("train/loss")


def test_a_gamma_that_changes_goes_on_after_a_resume(run_train: Train) -> None:
    common = ("--optimizer=mars-adamw", "--gamma=linear:0.4:0", "--max_iters=8")
    straight = run_train(*common, out="straight")
    np.testing.assert_allclose(straight.series("mars/gamma"), [0.4 * (7 - k) / 7 for k in range(8)], atol=1e-6)
    run_train(*common, "--checkpoint_interval=3", "--keep_checkpoints=9", out="parts")
    for path in (run_train.folder("parts") / "checkpoints").glob("iter-0000000[6-8].pt"):
        path.unlink()
    parts = run_train(*common, "--resume=auto", out="parts")
    assert "going on after update 3" in parts.stdout
    assert parts.series("train/loss") == straight.series("train/loss")
    constant = run_train("--optimizer=mars-adamw", "--gamma=0.4", "--max_iters=8", out="constant")
    assert constant.series("train/loss")[:2] == straight.series("train/loss")[:2]
    assert constant.series("train/loss")[4:] != straight.series("train/loss")[4:]


def test_a_gamma_that_follows_the_gradient_s_norm_goes_on_after_a_resume(run_train: Train) -> None:
    common = ("--optimizer=mars-adamw", "--gamma=adaptive:1.0:0.02:0.9:0.1:0.05:0.5", "--grad_clip=0", "--max_iters=8")
    straight = run_train(*common, out="straight")
    norms, expected, running = straight.series("grad_norm"), [0.05], straight.series("grad_norm")[0]
    for norm in norms[1:]:
        expected.append(0.02 if norm > running else 0.1 if norm < 0.9 * running else 0.05)
        running = (running + norm) / 2
    assert straight.series("mars/gamma") == expected
    assert len(set(expected)) > 1
    run_train(*common, "--checkpoint_interval=3", "--keep_checkpoints=9", out="parts")
    for path in (run_train.folder("parts") / "checkpoints").glob("iter-0000000[6-8].pt"):
        path.unlink()
    parts = run_train(*common, "--resume=auto", out="parts")
    assert "going on after update 3" in parts.stdout
    assert parts.series("mars/gamma") == expected
    assert parts.series("train/loss") == straight.series("train/loss")


def test_a_run_may_go_on_in_float16(run_train: Train) -> None:
    run_train("--optimizer=mars-adamw", "--max_iters=3")
    done = run_train("--optimizer=mars-adamw", "--max_iters=6", "--dtype=float16", "--resume=auto")
    assert (done.status, done.stderr) == (0, "")
    assert len(done.series("train/loss")) == 6


WRONG = (
    "linear:1",
    "linear:a:b",
    "cosine:1:inf",
    "linear:0.1:1e400",
    "step:1:0",
    "adaptive:1.5:0.3",
    "adaptive:1:0:2:0:0",
)


@pytest.mark.parametrize("text", WRONG)
def test_a_gamma_of_another_form_ends_in_one_line(run_train: Train, text: str) -> None:
    done = run_train("--optimizer=mars-adamw", f"--gamma={text}")
    assert (done.status, done.stderr.count("\n")) == (2, 1)
    assert "gamma" in done.stderr
    assert "linear:" in done.stderr


def test_the_last_gradient_in_half_the_memory(run_train: Train) -> None:
    done = run_train("--optimizer=mars-adamw", "--mars_last_grad=bfloat16", "--checkpoint_interval=3")
    assert done.status == 0
    assert "last gradient bfloat16" in done.stdout
    saved = torch.load(done.folder / "checkpoints/iter-00000006.pt", weights_only=True)["optimizer"]["state"]
    assert saved[0]["last_grad"].dtype == torch.bfloat16
    full = run_train("--optimizer=mars-adamw", out="full")
    np.testing.assert_allclose(done.series("train/loss"), full.series("train/loss"), rtol=0, atol=1e-3)
    other = run_train("--optimizer=mars-adamw", "--max_iters=8", "--resume=auto")
    assert other.status == 2
    assert "--mars_last_grad=bfloat16" in other.stderr
