"""Log-likelihoods of continuations: against a plain loop, and cut into tokens as lm-evaluation-harness does it."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from data.tokenizers import ByteTokenizer, GPT2Tokenizer, Tokenizer
from model import GPT, GPTConfig
from scripts.evaluation.scoring import Request, encode_pair, loglikelihoods
from tests.data.conftest import bpe_cache, bpe_files, gpt2  # noqa: F401 (fixtures)
from tests.scripts.reference import by_hand

BLOCK = 16


@pytest.fixture
def model() -> GPT:
    """Of larger weights than at the start of training, so that its preferences are clear."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=BLOCK, vocab_size=64))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3.0)
    return model


def requests() -> list[Request]:
    """Context and continuation that fit, that fill the model, that lose tokens of the context, that exceed it."""
    rng = np.random.default_rng(0)
    lengths = [(1, 1), (3, 4), (9, 8), (10, 8), (40, 5), (10, 16), (1, 16), (2, 17), (30, 40)]
    return [tuple(rng.integers(0, 64, length).tolist() for length in pair) for pair in lengths]  # type: ignore[misc]


@pytest.mark.parametrize("batch_size", [1, 2, 100])
def test_log_likelihoods_are_those_of_a_plain_loop(model: GPT, batch_size: int) -> None:
    model.train()
    done: list[int] = []
    scores = loglikelihoods(model, requests(), batch_size=batch_size, progress=done.append)
    expected = [by_hand(model, list(context), list(continuation)) for context, continuation in requests()]
    assert [total for total, _ in scores] == pytest.approx(expected, rel=0, abs=1e-5 * 40)
    assert model.training
    assert done[-1] == 7 + 3 + 5  # two continuations in pieces of 8


def test_batches_differ_by_rounding_only(model: GPT) -> None:
    scores = [loglikelihoods(model, requests(), batch_size=size) for size in (1, 3, 8)]
    for other in scores[1:]:
        assert [total for total, _ in other] == pytest.approx([total for total, _ in scores[0]], rel=0, abs=1e-5)
        assert [greedy for _, greedy in other] == [greedy for _, greedy in scores[0]]


def test_greedy_is_what_the_model_would_say(model: GPT) -> None:
    context = [5, 6, 7]
    said: list[int] = []
    for _ in range(6):
        said.append(int(model(torch.tensor([context + said]))[0, -1].argmax()))
    wrong = [*said[:5], (said[5] + 1) % 64]
    assert [greedy for _, greedy in loglikelihoods(model, [(context, said), (context, wrong)], batch_size=2)] == [
        True,
        False,
    ]


def test_the_softmax_is_over_all_rows(model: GPT) -> None:
    scores = loglikelihoods(model, [([3], [token]) for token in range(64)], batch_size=64)
    assert sum(math.exp(total) for total, _ in scores) == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("request_", [([], [1]), ([1], [])])
def test_nothing_cannot_be_scored(model: GPT, request_: Request) -> None:
    with pytest.raises(ValueError, match="request 1: a context of"):
        loglikelihoods(model, [([1], [1]), request_], batch_size=1)


def test_pairs_are_cut_as_the_harness_does(gpt2: GPT2Tokenizer) -> None:  # noqa: F811
    from lm_eval.api.model import TemplateLM

    tokenizers: list[Tokenizer] = [gpt2, ByteTokenizer()]
    contexts = ["A man", "A man ", "two  ", "ends.\n", "un", "été 漢", "x\t \n "]
    continuations = [" sits", "believable", "  twice", "", " 😀", "\n"]
    for tokenizer in tokenizers:

        def encode(text: str, tokenizer: Tokenizer = tokenizer) -> list[int]:
            return tokenizer.encode([text], complete=False).tolist()

        harness = SimpleNamespace(backend="causal", tok_encode=encode)
        for context in contexts:
            for continuation in continuations:
                expected = TemplateLM._encode_pair(harness, context, continuation)  # type: ignore[arg-type]
                assert encode_pair(tokenizer, context, continuation) == tuple(expected)
        assert encode_pair(tokenizer, "", "a b") == ([tokenizer.end_of_text], encode("a b"))
        assert encode_pair(tokenizer, " ", "a") == ([tokenizer.end_of_text], encode(" a"))
