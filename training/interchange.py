"""GPT-2's weights as this project and nanoGPT name them, and as transformers does. Pure functions; no file is touched.

transformers' `GPT2LMHeadModel` is the same function under nearly the same names. What differs:

- the four projections of a block are `Conv1D` there: (in, out), the transpose of a linear layer's weight;
- it always has biases; a model without them has zeros there;
- older files hold the causal mask as `attn.bias` and `attn.masked_bias`, and the hub's own gpt2 lacks the prefix
  `transformer.`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from model import GPT, GPTConfig

State = dict[str, Tensor]

TOKENS, POSITIONS, HEAD = "transformer.wte.weight", "transformer.wpe.weight", "lm_head.weight"
LAYER_NORM_EPS = 1e-5  # of model.py, nanoGPT and transformers' default
TANH_GELUS = ("gelu_new", "gelu_fast", "gelu_pytorch_tanh")  # transformers' names for one function
MOST_PADDING = 127  # rows; what it takes to round a vocabulary up to a multiple of 128
_PROJECTION = re.compile(r"transformer\.h\.\d+\.(attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_MASK = re.compile(r"transformer\.h\.\d+\.attn\.(masked_)?bias")
_WRAPPERS = re.compile(r"^((_orig_mod|module)\.)+")  # of torch.compile and DistributedDataParallel


@dataclass(frozen=True)
class Weights:
    """The weights of a GPT-2, and what they do not say themselves."""

    state: State
    """by the names of model.py, without the tied head; on the host"""
    n_head: Any
    scale_attn_by_inverse_layer_idx: bool


def from_transformers(state: State, config: dict[str, Any]) -> Weights:
    """Weights of a `GPT2LMHeadModel` or `GPT2Model`.

    Args:
        state: its state dict.
        config: its config.json.

    Raises:
        ValueError: it computes something that model.py does not.
    """
    n_embd = config.get("n_embd", 768)
    required: dict[str, tuple[Any, ...]] = {
        "model_type": ("gpt2",),
        "activation_function": TANH_GELUS,
        "layer_norm_epsilon": (LAYER_NORM_EPS,),
        "n_inner": (None, 4 * n_embd if isinstance(n_embd, int) else None),
        "scale_attn_weights": (True,),
        "add_cross_attention": (False,),
    }
    for key, allowed in required.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ValueError(f"{key}={config[key]!r} in its config.json, model.py has {allowed[0]!r}")
    if not isinstance(config.get("n_head", 12), int):
        raise ValueError(f"n_head={config['n_head']!r} in its config.json is not a number")
    named = {
        name if name == HEAD else f"transformer.{name.removeprefix('transformer.')}": state[name] for name in state
    }
    turned = {name: tensor.T if _PROJECTION.fullmatch(name) else tensor for name, tensor in named.items()}
    return Weights(_tied(turned), config.get("n_head", 12), bool(config.get("scale_attn_by_inverse_layer_idx", False)))


def from_nanogpt(state: State, model_args: dict[str, Any]) -> Weights:
    """Weights of a nanoGPT checkpoint (`model` and `model_args` in its ckpt.pt), also of the code published with MARS.

    Raises:
        ValueError: it computes something that model.py does not.
    """
    if "n_head" not in model_args:
        raise ValueError("its model_args lack n_head")
    scale = bool(model_args.get("scale_attn_by_inverse_layer_idx", False))
    return Weights(_tied({_WRAPPERS.sub("", name): state[name] for name in state}), model_args["n_head"], scale)


def from_model(model: GPT) -> Weights:
    """Weights of a model of this project."""
    return Weights(_tied(model.state_dict()), model.config.n_head, model.config.scale_attn_by_inverse_layer_idx)


def _tied(state: State) -> State:
    """Without masks, and without the head, which must be the token embedding."""
    if HEAD in state and TOKENS in state and not torch.equal(state[HEAD], state[TOKENS]):
        raise ValueError(f"its {HEAD} is not {TOKENS}: model.py ties the two")
    return {name: tensor for name, tensor in state.items() if name != HEAD and not _MASK.fullmatch(name)}


def fit(weights: Weights, model: GPT) -> tuple[State, list[str]]:
    """A state dict for `model` that computes what `weights` did.

    Positions beyond the model's block_size are cut off. Rows that the vocabulary lacks (padding) become the mean of
    those it has: by Jensen's inequality they take at most the share k / V of a probability, k rows added to V, so the
    loss rises by at most log(1 + k / V). Zeros would take nearly all of it, since GPT-2's logits are far below 0.

    Returns:
        the state dict, in float32, and a line for each thing that was done to make it fit.

    Raises:
        ValueError: the shapes do not agree, or the weights are not those of a GPT-2. The message names the keys of the
            config to set.
    """
    missing = [name for name in (TOKENS, POSITIONS) if name not in weights.state or weights.state[name].dim() != 2]
    if missing:
        raise ValueError(f"there is no {missing[0]} as GPT-2 has it")
    _check_shape(weights, model.config)
    state, notes = {name: tensor.float() for name, tensor in weights.state.items()}, []
    vocab, padding = len(state[TOKENS]), model.config.vocab_size - len(state[TOKENS])
    if padding:
        state[TOKENS] = torch.cat([state[TOKENS], state[TOKENS].mean(0, keepdim=True).expand(padding, -1)])
        more = padding / vocab
        notes.append(f"vocab_size  {padding} rows added to {vocab}: their mean (raises the loss by at most {more:.1g})")
    positions = len(state[POSITIONS])
    if positions > model.config.block_size:
        state[POSITIONS] = state[POSITIONS][: model.config.block_size]
        notes.append(f"block_size  the first {model.config.block_size} of {positions} positions")

    expected = model.state_dict()
    biases = {name for name in state if name.endswith(".bias")}
    if not model.config.bias:
        state = {name: tensor for name, tensor in state.items() if name not in biases}  # zeros, says _check_shape
    elif not biases:
        state |= {name: torch.zeros_like(expected[name], device="cpu") for name in expected if name.endswith(".bias")}
    state[HEAD] = state[TOKENS]
    _check_tensors(state, expected)
    return state, notes


def _check_shape(weights: Weights, config: GPTConfig) -> None:
    """Raises ValueError with all keys of the config that have to be others."""
    state = weights.state
    blocks = {name.split(".")[2] for name in state if name.startswith("transformer.h.")}
    (vocab, n_embd), positions = state[TOKENS].shape, len(state[POSITIONS])
    has_bias = any(bool(tensor.any()) for name, tensor in state.items() if name.endswith(".bias"))
    scaled = weights.scale_attn_by_inverse_layer_idx
    there = {"n_layer": len(blocks), "n_head": weights.n_head, "n_embd": n_embd, "block_size": positions}
    there |= {"vocab_size": vocab, "bias": has_bias, "scale_attn_by_inverse_layer_idx": scaled}
    fits = {key: value == getattr(config, key) for key, value in there.items()}
    fits["block_size"] = config.block_size <= positions
    fits["vocab_size"] = 0 <= config.vocab_size - vocab <= MOST_PADDING
    fits["bias"] = config.bias or not has_bias
    wrong = [key for key, good in fits.items() if not good]
    if wrong:
        values = ", ".join(f"{key}={there[key]} (the config: {getattr(config, key)})" for key in wrong)
        raise ValueError(f"it has {values}; set {' '.join(f'--{key}={there[key]}' for key in wrong)}")


def _check_tensors(state: State, expected: State) -> None:
    missing, strange = sorted(expected.keys() - state.keys()), sorted(state.keys() - expected.keys())
    if missing or strange:
        raise ValueError(f"there is no {missing[0]}" if missing else f"GPT-2 has no {strange[0]}")
    for name, tensor in state.items():
        if tensor.shape != expected[name].shape:
            raise ValueError(f"{name} is {tuple(tensor.shape)}, expected {tuple(expected[name].shape)}")
        if not torch.isfinite(tensor).all():
            raise ValueError(f"{name} is not finite")


def to_transformers(state: State, rows: int) -> State:
    """The state dict of a `GPT2LMHeadModel` that computes the same.

    Args:
        state: of this project's GPT.
        rows: of the token embedding to keep.
    """
    result = {name: tensor.T if _PROJECTION.fullmatch(name) else tensor for name, tensor in state.items()}
    del result[HEAD]  # tied there too
    result[TOKENS] = result[TOKENS][:rows]
    for name, weight in list(result.items()):
        if name.endswith(".weight") and name not in (TOKENS, POSITIONS):
            # The last dimension is the output: of a Conv1D, and of a layer norm's vector.
            result.setdefault(name.removesuffix("weight") + "bias", weight.new_zeros(weight.shape[-1]))
    return {name: tensor.contiguous() for name, tensor in result.items()}


def transformers_config(config: GPTConfig, rows: int, end_of_text: int | None) -> dict[str, Any]:
    """The config.json of that model.

    Args:
        config: of this project's GPT.
        rows: of the token embedding.
        end_of_text: its token, which also begins a text; None where it is not known.
    """
    return {
        "architectures": ["GPT2LMHeadModel"],
        "model_type": "gpt2",
        "n_layer": config.n_layer,
        "n_head": config.n_head,
        "n_embd": config.n_embd,
        "n_inner": None,
        "n_positions": config.block_size,
        "vocab_size": rows,
        "activation_function": TANH_GELUS[0],
        "layer_norm_epsilon": LAYER_NORM_EPS,
        "scale_attn_weights": True,
        "scale_attn_by_inverse_layer_idx": config.scale_attn_by_inverse_layer_idx,
        "tie_word_embeddings": True,
        **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop"), config.dropout),
        "initializer_range": 0.02,
        "bos_token_id": end_of_text,
        "eos_token_id": end_of_text,
        "dtype": "float32",
    }
