"""Runs that start from weights made elsewhere (`init_from`)."""

import http.server
import json
import math
import pickle
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from model import GPT, GPTConfig
from tests.conftest import Outcome, Train
from tests.data.test_prepare_hub import FakeHub
from tests.training.gpt2_weights import (
    HEADS,
    LAYERS,
    POSITIONS,
    SHAPE,
    TOKENS,
    WIDTH,
    as_nanogpt,
    logits_of,
    random_gpt2,
    write_transformers,
)
from training import RunError
from training.interchange import fit, from_nanogpt, from_transformers
from training.processes import Processes
from training.trained import load_trained
from training.weights import load_initial_weights, read_weights


class ModelHub(FakeHub):
    """The same for models, whose files have addresses without a kind before the name."""

    def serve(self) -> None:
        if not self.path.startswith("/api/"):
            self.path = f"/models{self.path}"
        super().serve()

    do_GET = do_HEAD = serve


GPT2 = (*SHAPE, "--bias=true", "--scale_attn_by_inverse_layer_idx=false")
SIZES = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": 16, "vocab_size": 64}
HUB_FILE = "/{repo_id}/resolve/{revision}/{filename}"  # where the hub has a model's file
INPUT = torch.arange(32).view(2, 16) * 7 % TOKENS


def start(run_train: Train, init_from: str, *settings: str, out: str = "run") -> Outcome:
    """A run of no updates: its checkpoint has the weights that it started from."""
    return run_train(f"--init_from={init_from}", "--max_iters=0", *settings, out=out)


def started_logits(run_train: Train, init_from: str, *settings: str) -> Tensor:
    run = start(run_train, init_from, *settings)
    assert run.status == 0, run.stderr
    with torch.no_grad():
        return load_trained(run.folder).model(INPUT)[0]


def complaint(outcome: Outcome) -> str:
    assert outcome.status == 2, outcome.stderr
    lines = outcome.stderr.splitlines()
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: ")
    return lines[0]


def gpt2_model(**sizes: int) -> GPT:
    return GPT(GPTConfig(**SIZES | sizes, bias=True, scale_attn_by_inverse_layer_idx=False))


def refusal(init_from: str, **sizes: int) -> str:
    """What a run with these sizes would end with."""
    alone = Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(RunError) as error:
        load_initial_weights(gpt2_model(**sizes), init_from, alone)
    assert "\n" not in str(error.value)
    return str(error.value)


def hub_layout(folder: Path, state: dict[str, Tensor]) -> None:
    """As the hub's gpt2: no prefix, and the causal masks."""
    masks = {f"h.{layer}.attn.bias": torch.ones(1, 1, POSITIONS, POSITIONS) for layer in range(LAYERS)}
    write_transformers(folder, state | masks)


def head_layout(folder: Path, state: dict[str, Tensor]) -> None:
    """As of GPT2LMHeadModel, with the head written out."""
    named = {f"transformer.{name}": tensor for name, tensor in state.items()}
    masked = {"transformer.h.0.attn.masked_bias": torch.tensor(-1e4), "lm_head.weight": state["wte.weight"].clone()}
    write_transformers(folder, named | masked)


def sharded_layout(folder: Path, state: dict[str, Tensor]) -> None:
    write_transformers(folder, {})
    (folder / "model.safetensors").unlink()
    files = {name: f"model-0000{1 + (number > 9)}-of-00002.safetensors" for number, name in enumerate(state)}
    for file in set(files.values()):
        save_file({name: state[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))


def pickled_layout(folder: Path, state: dict[str, Tensor]) -> None:
    write_transformers(folder, {})
    (folder / "model.safetensors").unlink()
    torch.save(state, folder / "pytorch_model.bin")


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


def test_all_keys_to_set_are_named_at_once(run_train: Train, tmp_path: Path) -> None:
    """As GPT-2's own weights need them."""
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())
    assert complaint(start(run_train, f"hf:{folder}", *SHAPE)) == (
        f"error: init_from=hf:{folder}: it has bias=True (the config: False), scale_attn_by_inverse_layer_idx=False "
        "(the config: True); set --bias=True --scale_attn_by_inverse_layer_idx=False"
    )


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ({"n_layer": 2}, "n_layer=3 (the config: 2); set --n_layer=3"),
        ({"n_head": 4}, "n_head=3 (the config: 4); set --n_head=3"),
        ({"n_embd": 48}, "n_embd=24 (the config: 48); set --n_embd=24"),
        ({"block_size": 21}, "block_size=20 (the config: 21); set --block_size=20"),
        ({"vocab_size": 60}, "vocab_size=61 (the config: 60); set --vocab_size=61"),
        ({"vocab_size": 189}, "vocab_size=61 (the config: 189); set --vocab_size=61"),
    ],
)
def test_a_shape_that_does_not_fit(tmp_path: Path, sizes: dict[str, int], reason: str) -> None:
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())
    assert refusal(f"hf:{folder}", **sizes) == f"init_from=hf:{folder}: it has {reason}"


def change_config(**config: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | config))

    return change


def change_state(tensors: dict[str, Tensor | None]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        path = folder / "model.safetensors"
        state = load_file(path) | tensors
        save_file({name: tensor for name, tensor in state.items() if tensor is not None}, path)

    return change


def cut_short(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def lose_a_shard(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"wte.weight": "model-1.safetensors"}}')


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["config.json is missing"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json is missing, or not a JSON object"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["has no weights: expected model.safetensors"]),
        (cut_short, ["model.safetensors cannot be read"]),
        (lose_a_shard, ["model-1.safetensors cannot be read"]),
        (change_config(model_type="llama"), ["model_type='llama'", "'gpt2'"]),
        (change_config(activation_function="relu"), ["activation_function='relu'", "'gelu_new'"]),
        (change_config(layer_norm_epsilon=1e-6), ["layer_norm_epsilon=1e-06", "1e-05"]),
        (change_config(n_inner=48), ["n_inner=48"]),
        (change_state({"wte.weight": None}), ["there is no transformer.wte.weight"]),
        (change_state({"h.1.ln_1.weight": None}), ["there is no transformer.h.1.ln_1.weight"]),
        (change_state({"h.1.ln_3.weight": torch.ones(1)}), ["GPT-2 has no transformer.h.1.ln_3.weight"]),
        (change_state({"wpe.weight": torch.full((20, 24), math.nan)}), ["transformer.wpe.weight is not finite"]),
        (change_state({"wpe.weight": torch.ones(20, 23)}), ["wpe.weight is (16, 23), expected (16, 24)"]),
        (change_state({"lm_head.weight": torch.ones(61, 24)}), ["lm_head.weight is not transformer.wte.weight"]),
    ],
)
def test_folders_that_are_not_gpt2(tmp_path: Path, damage: Callable[[Path], object], parts: list[str]) -> None:
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())
    damage(folder)
    line = refusal(f"hf:{folder}")
    assert all(part in line for part in [str(folder), *parts]), line


def test_files_that_are_not_nanogpts(tmp_path: Path) -> None:
    path = tmp_path / "ckpt.pt"
    assert f"{path} cannot be read: FileNotFoundError" in refusal(f"nanogpt:{path}")
    torch.save({"model": {}}, path)
    assert "lacks model or model_args" in refusal(f"nanogpt:{path}")
    path.write_bytes(pickle.dumps(Outcome, protocol=2))  # code, which is not run
    assert f"{path} cannot be read" in refusal(f"nanogpt:{path}")
    assert f"{tmp_path / 'gone'} holds no run" in refusal(f"run:{tmp_path / 'gone'}")


@pytest.mark.parametrize("value", ["gpt2", "hf:", "resume", "scratch", "nanogpt"])
def test_values_of_the_key(run_train: Train, value: str) -> None:
    line = complaint(start(run_train, value))
    assert line.startswith("error: --init_from=")
    assert "nanogpt:FILE" in line


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, and a hub that cannot be reached."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", "http://127.0.0.1:9" + HUB_FILE)
    return tmp_path / "cache"


def test_a_model_in_the_hubs_cache_needs_no_network(run_train: Train, hub_cache: Path) -> None:
    state = random_gpt2()
    repository, commit = hub_cache / "models--openai-community--gpt2", "c" * 40
    write_transformers(repository / "snapshots" / commit, state)
    (repository / "refs").mkdir()
    (repository / "refs/main").write_text(commit)
    logits = started_logits(run_train, "hf:openai-community/gpt2", *GPT2)
    torch.testing.assert_close(logits[..., :TOKENS], logits_of(state, INPUT), rtol=1e-5, atol=1e-5)


def test_a_model_is_downloaded_once(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import constants

    safe, pickled = random_gpt2(), random_gpt2(seed=1)
    sharded_layout(tmp_path / "safe", safe)
    pickled_layout(tmp_path / "pickled", pickled)
    ModelHub.repositories = {("o/safe", "main"): tmp_path / "safe", ("o/pickled", "v2"): tmp_path / "pickled"}
    ModelHub.log = []
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), ModelHub) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        with monkeypatch.context() as patch:
            address = f"http://127.0.0.1:{server.server_port}"
            patch.setattr(constants, "ENDPOINT", address)
            patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + HUB_FILE)
            assert torch.equal(read_weights("hf:o/safe").state["transformer.wpe.weight"], safe["wpe.weight"])
            assert torch.equal(read_weights("hf:o/pickled@v2").state["transformer.wpe.weight"], pickled["wpe.weight"])
            assert "RevisionNotFoundError" in refusal("hf:o/pickled")
            requests = len(ModelHub.log)
        server.shutdown()
    for name in ("o/safe", "o/pickled@v2"):  # without the hub
        assert len(read_weights(f"hf:{name}").state) == len(safe)
    assert len(ModelHub.log) == requests


def test_a_hub_that_cannot_be_reached(hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal("hf:gpt2")
    assert f"init_from=hf:gpt2 is no folder here ({tmp_path / 'gpt2'}), and cannot be had from the hub" in line
    assert "hf download gpt2" in line
    assert "no name on the hub" in refusal("hf:../my models")


def test_hosts_that_read_other_weights(tmp_path: Path) -> None:
    """Process 0 of two; what the other one says is made up."""
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())

    def load(other: Callable[[str], str]) -> None:
        fake = SimpleNamespace(size=2, is_main=True, gather=lambda mine: [mine, other(mine)])
        load_initial_weights(gpt2_model(), f"hf:{folder}", cast(Processes, fake))

    load(lambda mine: mine)
    with pytest.raises(RunError, match="other weights, or none, on another host"):
        load(lambda mine: mine[::-1])


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
