"""Random GPT-2s as transformers and nanoGPT store them, and what they compute, written without this project's code."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

LAYERS, HEADS, WIDTH, POSITIONS, TOKENS = 3, 3, 24, 20, 61
# The shape above, for the tiny config, whose block_size is 16 and vocab_size 64.
SHAPE = (f"--n_layer={LAYERS}", f"--n_head={HEADS}", f"--n_embd={WIDTH}")
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "n_positions": POSITIONS}
CONFIG |= {"vocab_size": TOKENS, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5}


def random_gpt2(biases: bool = True, seed: int = 0) -> dict[str, Tensor]:
    """With the names and the (in, out) matrices of the hub's gpt2. Nothing is left at a value that hides a mistake."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, std: float = 0.3, mean: float = 0.0) -> Tensor:
        return mean + std * torch.randn(*shape, generator=generator)

    state = {"wte.weight": normal(TOKENS, WIDTH), "wpe.weight": normal(POSITIONS, WIDTH)}
    norms = [f"h.{layer}.{norm}" for layer in range(LAYERS) for norm in ("ln_1", "ln_2")] + ["ln_f"]
    for norm in norms:
        state |= {f"{norm}.weight": normal(WIDTH, mean=1.0), f"{norm}.bias": normal(WIDTH) * biases}
    for layer in range(LAYERS):
        for part, sizes in {
            "attn.c_attn": (WIDTH, 3 * WIDTH),
            "attn.c_proj": (WIDTH, WIDTH),
            "mlp.c_fc": (WIDTH, 4 * WIDTH),
            "mlp.c_proj": (4 * WIDTH, WIDTH),
        }.items():
            state[f"h.{layer}.{part}.weight"] = normal(*sizes)
            state[f"h.{layer}.{part}.bias"] = normal(sizes[1]) * biases
    return state


def logits_of(state: dict[str, Tensor], tokens: Tensor, inverse_layer: bool = False) -> Tensor:
    """(B, T) tokens to (B, T, TOKENS) logits, from the definition."""
    length = tokens.shape[1]
    future = torch.ones(length, length, dtype=torch.bool).triu(1)

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ state[f"{name}.weight"] + state[f"{name}.bias"]

    def norm(x: Tensor, name: str) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = centred.square().mean(-1, keepdim=True)
        return centred / (variance + 1e-5).sqrt() * state[f"{name}.weight"] + state[f"{name}.bias"]

    def gelu(x: Tensor) -> Tensor:
        return x / 2 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))

    x = state["wte.weight"][tokens] + state["wpe.weight"][:length]
    for layer in range(LAYERS):
        heads = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn").chunk(3 * HEADS, dim=-1)
        outputs = []
        for head in range(HEADS):
            query, key, value = heads[head], heads[HEADS + head], heads[2 * HEADS + head]
            scores = query @ key.transpose(1, 2) / math.sqrt(WIDTH // HEADS) / (layer + 1 if inverse_layer else 1)
            outputs.append(F.softmax(scores.masked_fill(future, -math.inf), dim=-1) @ value)
        x = x + linear(torch.cat(outputs, dim=-1), f"h.{layer}.attn.c_proj")
        x = x + linear(gelu(linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")), f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f") @ state["wte.weight"].T


def write_transformers(folder: Path, state: dict[str, Tensor], **config: Any) -> Path:
    """A folder as transformers writes it."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(CONFIG | config))
    save_file({name: tensor.contiguous() for name, tensor in state.items()}, folder / "model.safetensors")
    return folder


def as_nanogpt(state: dict[str, Tensor], prefix: str = "", **model_args: Any) -> dict[str, Any]:
    """What nanoGPT's train.py saves."""
    model = {
        f"{prefix}transformer.{name}": tensor.T.contiguous() if ".c_" in name and tensor.dim() == 2 else tensor
        for name, tensor in state.items()
    }
    model[f"{prefix}lm_head.weight"] = state["wte.weight"]
    sizes = {"n_layer": LAYERS, "n_head": HEADS, "n_embd": WIDTH, "block_size": POSITIONS, "vocab_size": TOKENS}
    return {
        "model": model,
        "optimizer": {"state": {}, "param_groups": []},
        "model_args": sizes | {"bias": True, "dropout": 0.0} | model_args,
        "iter_num": 5,
        "best_val_loss": torch.tensor(3.0),
        "config": {"out_dir": "out"},
    }


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
