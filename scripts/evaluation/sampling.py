"""Text from a model, token by token."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from training import RunError
from training.device import autocast
from training.trained import TrainedModel


@dataclass(frozen=True)
class Choice:
    """How the next token is drawn."""

    temperature: float = 0.8
    """what logits are divided by; 0 takes the most probable token"""
    top_k: int = 50
    """tokens that may be drawn; 0: all"""
    top_p: float = 0.95
    """the nucleus (Holtzman et al. 2019, arXiv 1904.09751): probability of those that may be drawn; 1: all"""


def next_token_probabilities(logits: Tensor, choice: Choice) -> Tensor:
    """The distribution that the next token is drawn from.

    Temperature first, then the `top_k` most probable tokens, then of these, renormalised, the fewest most probable ones
    that have `top_p` together. Of equally probable tokens the lower ids come first.

    Args:
        logits: (V,), of any float type.

    Returns:
        (V,) float32 probabilities; 1 for one token where the temperature is 0.
    """
    order = torch.sort(logits.float(), descending=True, stable=True)
    if choice.temperature == 0:
        return torch.zeros_like(order.values).index_fill_(0, order.indices[:1], 1.0)
    kept = order.values[: choice.top_k or None]
    sorted_ = torch.softmax((kept - kept[0]) / choice.temperature, dim=0)  # the highest is 0: no overflow
    before = sorted_.cumsum(0) - sorted_
    sorted_ = torch.where(before < choice.top_p, sorted_, 0.0)
    sorted_[0] = sorted_[0].clamp_min(torch.finfo(torch.float32).tiny)  # one at least, whatever is rounded
    return torch.zeros_like(order.values).index_copy_(0, order.indices[: len(kept)], sorted_ / sorted_.sum())


@torch.no_grad()
def sample(
    trained: TrainedModel,
    prompt: Sequence[int],
    end_of_text: int,
    count: int,
    choice: Choice,
    generator: torch.Generator,
    dtype: str = "float32",
) -> Iterator[int]:
    """At most `count` tokens after a prompt, one after another; ends before an end-of-text token.

    Rows of the vocabulary that pad it are never drawn. The model sees the last block_size tokens.

    Args:
        prompt: one token or more.
        generator: of the CPU, so that a seed draws the same numbers for any device.

    Raises:
        RunError: the model computes infinities or NaN.
    """
    model = trained.model
    device = next(model.parameters()).device
    tokens = list(prompt)
    for _ in range(count):
        window = torch.tensor([tokens[-model.config.block_size :]], device=device)
        with autocast(device, dtype):
            logits = model.lm_head(model.transformer(window)[0, -1])
        if not logits.isfinite().all():
            raise RunError(f"{trained.path}: logits that are not finite; the run has diverged")
        probabilities = next_token_probabilities(logits[: trained.tokens].cpu(), choice)
        token = int(torch.multinomial(probabilities, 1, generator=generator))
        if token == end_of_text:
            return
        tokens.append(token)
        yield token
