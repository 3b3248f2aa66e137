"""Runs that start from weights made elsewhere (`init_from`)."""

import json
import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from model import GPT, GPTConfig
from tests.conftest import Outcome, Train
from tests.training.gpt2_weights import (
    HEADS,
    LAYERS,
    POSITIONS,
    SHAPE,
    TOKENS,
    WIDTH,
    as_nanogpt,
    head_layout,
    hub_layout,
    logits_of,
    pickled_layout,
    random_gpt2,
    sharded_layout,
    write_transformers,
)
from training.interchange import fit, from_nanogpt, from_transformers
from training.trained import load_trained

GPT2 = (*SHAPE, "--bias=true", "--scale_attn_by_inverse_layer_idx=false")
SIZES = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": 16, "vocab_size": 64}
INPUT = torch.arange(32).view(2, 16) * 7 % TOKENS


def start(run_train: Train, init_from: str, *settings: str, out: str = "run") -> Outcome:
    """A run of no updates: its checkpoint has the weights that it started from."""
    return run_train(f"--init_from={init_from}", "--max_iters=0", *settings, out=out)


def gpt2_model(**sizes: int) -> GPT:
    return GPT(GPTConfig(**SIZES | sizes, bias=True, scale_attn_by_inverse_layer_idx=False))


def started_logits(run_train: Train, init_from: str, *settings: str) -> Tensor:
    run = start(run_train, init_from, *settings)
    assert run.status == 0, run.stderr
    with torch.no_grad():
        return load_trained(run.folder).model(INPUT)


def complaint(outcome: Outcome) -> str:
    assert outcome.status == 2, outcome.stderr
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


@pytest.mark.parametrize("write", [hub_layout, head_layout, sharded_layout, pickled_layout])
def test_transformers_weights_compute_what_they_did(
    run_train: Train, tmp_path: Path, write: Callable[[Path, dict[str, Tensor]], None]
) -> None:
    state = random_gpt2()
    write(tmp_path / "gpt2", state)
    logits = started_logits(run_train, f"hf:{tmp_path / 'gpt2'}", *GPT2)
    assert logits.shape[-1] == 64  # 61 of them the model's own
    torch.testing.assert_close(logits[..., :TOKENS], logits_of(state, INPUT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("inverse_layer", [True, False])
def test_scaled_attention_and_no_biases(run_train: Train, tmp_path: Path, inverse_layer: bool) -> None:
    """transformers always writes biases; where all are zero a model without them computes the same."""
    state = random_gpt2(biases=False)
    write_transformers(tmp_path / "gpt2", state, scale_attn_by_inverse_layer_idx=inverse_layer)
    scale = f"--scale_attn_by_inverse_layer_idx={inverse_layer}"
    logits = started_logits(run_train, f"hf:{tmp_path / 'gpt2'}", *SHAPE, scale)
    expected = logits_of(state, INPUT, inverse_layer)
    torch.testing.assert_close(logits[..., :TOKENS], expected, rtol=1e-5, atol=1e-5)
    assert not torch.allclose(expected, logits_of(state, INPUT, not inverse_layer), atol=1e-2)


def test_a_nanogpt_checkpoint(run_train: Train, tmp_path: Path) -> None:
    state = random_gpt2()
    torch.save(as_nanogpt(state, "_orig_mod."), tmp_path / "ckpt.pt")
    logits = started_logits(run_train, f"nanogpt:{tmp_path / 'ckpt.pt'}", *GPT2)
    torch.testing.assert_close(logits[..., :TOKENS], logits_of(state, INPUT), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module.module."])
def test_wrappers_and_masks_of_nanogpt(prefix: str) -> None:
    saved = as_nanogpt(random_gpt2(), prefix)
    saved["model"][f"{prefix}transformer.h.0.attn.bias"] = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    state, _ = fit(from_nanogpt(saved["model"], saved["model_args"]), gpt2_model())
    plain = as_nanogpt(random_gpt2())["model"]
    assert state.keys() == plain.keys()
    assert torch.equal(state["transformer.h.2.mlp.c_fc.weight"], plain["transformer.h.2.mlp.c_fc.weight"])


def test_a_checkpoint_of_the_code_published_with_mars(run_train: Train, tmp_path: Path) -> None:
    """It is nanoGPT's, and says whether attention is scaled; without biases it has no such names."""
    state = random_gpt2(biases=False)
    saved = as_nanogpt(state, bias=False, scale_attn_by_inverse_layer_idx=True)
    saved["model"] = {name: tensor for name, tensor in saved["model"].items() if not name.endswith(".bias")}
    torch.save(saved, tmp_path / "ckpt.pt")
    expected = logits_of(state, INPUT, inverse_layer=True)
    for bias in ("false", "true"):  # with biases of zero it is the same function
        logits = started_logits(run_train, f"nanogpt:{tmp_path / 'ckpt.pt'}", *SHAPE, f"--bias={bias}")
        torch.testing.assert_close(logits[..., :TOKENS], expected, rtol=1e-5, atol=1e-5)
        shutil.rmtree(run_train.folder("run"))


def test_what_is_cut_and_padded(run_train: Train, tmp_path: Path) -> None:
    state = random_gpt2()
    run = start(run_train, f"hf:{write_transformers(tmp_path / 'gpt2', state)}", *GPT2)
    model = load_trained(run.folder).model.transformer
    assert torch.equal(model.wpe.weight, state["wpe.weight"][:16])
    assert torch.equal(model.wte.weight[:TOKENS], state["wte.weight"])
    torch.testing.assert_close(model.wte.weight[TOKENS:], state["wte.weight"].mean(0).expand(3, -1))
    lines = run.stdout.splitlines()
    assert f"weights     from hf:{tmp_path / 'gpt2'}" in lines
    assert "block_size  the first 16 of 20 positions" in lines
    assert "vocab_size  3 rows added to 61: their mean (raises the loss by at most 0.05)" in lines
    assert json.loads((run.folder / "config.json").read_text())["init_from"] == f"hf:{tmp_path / 'gpt2'}"


def test_padding_rows_hardly_change_a_loss(run_train: Train, tmp_path: Path) -> None:
    """Though the logits are all far below zero, as GPT-2's are: rows of zeros would have taken everything."""
    state = random_gpt2()
    state["ln_f.bias"] += 20 * torch.ones(WIDTH)
    state["wte.weight"] -= 0.3
    expected = logits_of(state, INPUT)
    assert expected.max() < -20
    logits = started_logits(run_train, f"hf:{write_transformers(tmp_path / 'gpt2', state)}", *GPT2)
    rise = logits.logsumexp(-1) - expected.logsumexp(-1)
    assert -1e-4 < rise.min() <= rise.max() <= math.log(1 + 3 / TOKENS) + 1e-4


def test_half_precision_becomes_float32(run_train: Train, tmp_path: Path) -> None:
    state = {name: tensor.bfloat16() for name, tensor in random_gpt2().items()}
    run = start(run_train, f"hf:{write_transformers(tmp_path / 'gpt2', state)}", *GPT2)
    model = load_trained(run.folder).model
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert torch.equal(model.transformer.ln_f.weight, state["ln_f.weight"].float())


def test_a_run_of_this_project(run_train: Train) -> None:
    before = run_train(out="before")
    settings = f"--init_from=run:{before.folder}", "--max_iters=2", "--learning_rate=1e-4", "--min_lr=1e-5"
    after = run_train(*settings, out="after")
    assert after.status == 0, after.stderr
    assert [row["iter"] for row in after.rows] == [0, 1, 2, 2]
    assert after.series("val/loss")[0] == before.series("val/loss")[-1]  # of the same weights
    assert after.series("lr")[0] == pytest.approx(5e-5)  # warms up anew
    first = start(run_train, f"run:{before.folder}/checkpoints/iter-00000003.pt", out="first")
    assert first.series("val/loss") == before.series("val/loss")[1:2]


def test_a_resume_does_not_read_them_again(run_train: Train, tmp_path: Path) -> None:
    state, folder = random_gpt2(), tmp_path / "gpt2"
    settings = (f"--init_from=hf:{write_transformers(folder, state)}", *GPT2, "--resume=auto", "--lr_decay_iters=6")
    straight = run_train(*settings, out="straight")
    assert run_train(*settings, "--max_iters=3", out="parts").status == 0
    shutil.rmtree(folder)
    parts = run_train(*settings, out="parts")
    assert parts.status == 0, parts.stderr
    assert "weights     from" not in parts.stdout
    assert parts.series("train/loss") == straight.series("train/loss")


def test_a_resume_from_other_weights_is_refused(run_train: Train, tmp_path: Path) -> None:
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())
    assert start(run_train, f"hf:{folder}", *GPT2).status == 0
    line = complaint(run_train(*GPT2, "--resume=auto"))
    assert f"init_from='hf:{folder}', now it is None; set --init_from=hf:{folder}, or choose another" in line
    assert run_train(out="random").status == 0
    assert "set --init_from=None" in complaint(start(run_train, f"hf:{folder}", "--resume=auto", out="random"))


@pytest.mark.slow
def test_two_processes(run_train: Train, tmp_path: Path) -> None:
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())
    settings = (f"--init_from=hf:{folder}", *GPT2, "--max_iters=2")
    one, two = run_train(*settings, out="one"), run_train.fresh(*settings, out="two", processes=2)
    assert two.status == 0, two.stderr
    assert two.series("val/loss") == pytest.approx(one.series("val/loss"), rel=1e-5)


def test_fit_leaves_what_it_was_given() -> None:
    state = random_gpt2()
    weights = from_transformers(state, {"n_head": HEADS})
    before = {name: tensor.clone() for name, tensor in weights.state.items()}
    fit(weights, gpt2_model())
    assert before.keys() == weights.state.keys()
    assert all(torch.equal(weights.state[name], tensor) for name, tensor in before.items())
