"""Log-likelihoods by a plain loop."""

import torch

from model import GPT


@torch.no_grad()
def by_hand(model: GPT, context: list[int], continuation: list[int]) -> float:
    """Token by token in float64: each after what its piece leaves room for."""
    block = model.config.block_size
    exact = GPT(model.config).double().eval()
    exact.load_state_dict(model.state_dict())
    piece = block if len(continuation) <= block else block // 2
    total, whole = 0.0, context + continuation
    for place in range(len(context), len(whole)):
        end = len(context) + ((place - len(context)) // piece + 1) * piece
        first = max(0, min(end, len(whole)) - block - 1)
        logits = exact(torch.tensor([whole[first:place]]))[0, -1]
        total += torch.log_softmax(logits, 0)[whole[place]].item()
    return total
