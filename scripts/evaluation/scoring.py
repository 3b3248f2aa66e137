"""Log-likelihoods of continuations, by the rules of lm-evaluation-harness (class HFLM), so that numbers compare.

Tasks of the harness rank answers by the probability that a model gives their text after a question. How the two are
cut into tokens, what happens when they are too long, and which tokens count decides the second digit of an accuracy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data.tokenizers import Tokenizer
from model import GPT
from training.device import autocast, to_device

Request = tuple[Sequence[int], Sequence[int]]
"""Tokens of a context and of its continuation."""


def encode_pair(tokenizer: Tokenizer, context: str, continuation: str) -> tuple[list[int], list[int]]:
    """The tokens of a context and of the text that follows it.

    Both are encoded together and cut where the context alone would end. White space at the end of the context goes to
    the continuation, since GPT-2's tokens begin with a space rather than end with one. An empty context is one
    end-of-text token, after which a document begins.
    """
    bare = context.rstrip()
    continuation, context = context[len(bare) :] + continuation, bare
    whole = tokenizer.encode([context + continuation], complete=False).tolist()
    if not context:
        return [tokenizer.end_of_text], whole
    length = len(tokenizer.encode([context], complete=False))
    return whole[:length], whole[length:]


@torch.no_grad()
def loglikelihoods(
    model: GPT,
    requests: Sequence[Request],
    *,
    batch_size: int,
    device: torch.device | str = "cpu",
    dtype: str = "float32",
    progress: Callable[[int], None] = lambda done: None,
) -> list[tuple[float, bool]]:
    """How probable each continuation is after its context.

    A request that is too long loses tokens at its left, so that block_size inputs remain. The harness refuses
    continuations of more than block_size tokens; here such a one is scored in pieces of half that length, each after
    the tokens before it. The softmax is in float32 and, like that of the training loss, over all rows of the model's
    vocabulary, padding included. The result does not depend on the batch size but for rounding.

    Args:
        model: is left in its mode.
        requests: token ids of contexts and continuations, neither of them empty.
        batch_size: sequences of a forward pass; they are sorted by length, longest first, and padded at the right.
        device: where the model is.
        dtype: of the forward pass: float32, bfloat16 or float16.
        progress: is told how many sequences are done, after each batch.

    Returns:
        of each request, the sum of the log-probabilities of its continuation's tokens in nats, and whether each of them
        is the most probable one at its place.

    Raises:
        ValueError: an empty context or continuation.
    """
    pieces = [
        piece for index, request in enumerate(requests) for piece in _pieces(index, request, model.config.block_size)
    ]
    pieces.sort(key=lambda piece: -len(piece.tokens))
    sums, greedy = [0.0] * len(requests), [True] * len(requests)
    was_training = model.training
    model.eval()
    for start in range(0, len(pieces), batch_size):
        batch = pieces[start : start + batch_size]
        for piece, (total, best) in zip(batch, _score(model, batch, torch.device(device), dtype), strict=True):
            sums[piece.request] += total
            greedy[piece.request] &= best
        progress(start + len(batch))
    model.train(was_training)
    return list(zip(sums, greedy, strict=True))


@dataclass(frozen=True)
class _Piece:
    """A sequence that fits the model, of which the last `count` tokens are predicted."""

    request: int
    tokens: list[int]
    count: int


def _pieces(index: int, request: Request, block_size: int) -> Iterator[_Piece]:
    context, continuation = request
    if not len(context) or not len(continuation):
        raise ValueError(f"request {index}: a context of {len(context)} tokens, a continuation of {len(continuation)}")
    whole = [*context, *continuation]
    step = block_size if len(continuation) <= block_size else max(1, block_size // 2)
    for start in range(len(context), len(whole), step):
        end = min(start + step, len(whole))
        yield _Piece(index, whole[max(0, end - block_size - 1) : end], end - start)


def _score(model: GPT, batch: list[_Piece], device: torch.device, dtype: str) -> Iterator[tuple[float, bool]]:
    """Sum and greediness of each piece. The head, the widest matrix of a small model, sees the last tokens only."""
    inputs = torch.zeros(len(batch), len(batch[0].tokens) - 1, dtype=torch.long)  # the first is the longest
    counted = torch.zeros_like(inputs, dtype=torch.bool)
    for row, piece in enumerate(batch):
        length = len(piece.tokens) - 1
        inputs[row, :length] = torch.tensor(piece.tokens[:-1])
        counted[row, length - piece.count : length] = True
    targets = to_device(torch.tensor([token for piece in batch for token in piece.tokens[-piece.count :]]), device)
    with autocast(device, dtype):
        hidden = model.transformer(to_device(inputs, device))
        logits = model.lm_head(hidden[to_device(counted, device)])  # (tokens that count, vocab_size)
    chosen, best = _chosen(logits.float(), targets)
    start = 0
    for piece in batch:
        end = start + piece.count
        yield float(chosen[start:end].sum()), bool(best[start:end].all())
        start = end


def _chosen(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """(N, V) logits to the (N,) log-probabilities of the targets, in float64, and whether each is the highest."""
    logs = torch.log_softmax(logits, dim=-1).gather(1, targets[:, None])[:, 0]
    return logs.cpu().double(), (logits.argmax(dim=-1) == targets).cpu()
