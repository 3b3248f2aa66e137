"""Weights that a run cannot start from (`init_from`): what is said in one line."""

import json
import math
import pickle
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.conftest import Outcome, Train
from tests.training.gpt2_weights import SHAPE, random_gpt2, write_transformers
from tests.training.test_init_from import complaint, gpt2_model, start
from training import RunError
from training.processes import Processes
from training.weights import load_initial_weights


def refusal(init_from: str, **sizes: int) -> str:
    """What a run with these sizes would end with."""
    alone = Processes(rank=0, local_rank=0, size=1, device=torch.device("cpu"))
    with pytest.raises(RunError) as error:
        load_initial_weights(gpt2_model(**sizes), init_from, alone)
    assert "\n" not in str(error.value)
    return str(error.value)


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


def pickle_a_list(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    torch.save([torch.ones(1)], folder / "pytorch_model.bin")


@pytest.mark.parametrize(
    ("damage", "parts"),
    [
        (lambda folder: (folder / "config.json").unlink(), ["config.json is missing"]),
        (lambda folder: (folder / "config.json").write_text("{"), ["config.json is missing, or not a JSON object"]),
        (lambda folder: (folder / "model.safetensors").unlink(), ["has no weights: expected model.safetensors"]),
        (cut_short, ["model.safetensors cannot be read"]),
        (lose_a_shard, ["model-1.safetensors cannot be read"]),
        (pickle_a_list, ["pytorch_model.bin is not a state dict"]),
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
    torch.save({"model": {"a": 1}, "model_args": {}}, path)
    assert "lacks model or model_args" in refusal(f"nanogpt:{path}")
    torch.save({"model": {"a": torch.ones(1)}, "model_args": {}}, path)
    assert refusal(f"nanogpt:{path}") == f"init_from=nanogpt:{path}: its model_args lack n_head"
    path.write_bytes(pickle.dumps(Outcome, protocol=2))  # code, which is not run
    assert f"{path} cannot be read" in refusal(f"nanogpt:{path}")
    assert f"{tmp_path / 'gone'} holds no run" in refusal(f"run:{tmp_path / 'gone'}")


@pytest.mark.parametrize("value", ["gpt2", "hf:", "resume", "scratch", "nanogpt"])
def test_values_of_the_key(run_train: Train, value: str) -> None:
    line = complaint(start(run_train, value))
    assert line.startswith("error: --init_from=")
    assert "nanogpt:FILE" in line


def test_hosts_that_read_other_weights(tmp_path: Path) -> None:
    """Process 0 of two; what the other one says is made up."""
    folder = write_transformers(tmp_path / "gpt2", random_gpt2())

    def load(other: Callable[[str], str]) -> None:
        fake = SimpleNamespace(size=2, is_main=True, gather=lambda mine: [mine, other(mine)])
        load_initial_weights(gpt2_model(), f"hf:{folder}", cast(Processes, fake))

    load(lambda mine: mine)
    with pytest.raises(RunError, match="other weights, or none, on another host"):
        load(lambda mine: mine[::-1])
