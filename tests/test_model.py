"""GPT-2: its published size, its initial weights, and that it attends only to the past."""

import math

import pytest
import torch
from torch.nn import functional as F

from model import GPT, GPTConfig

TINY = {"n_layer": 2, "n_head": 2, "n_embd": 16, "block_size": 8, "vocab_size": 32}


@pytest.mark.parametrize(
    ("layers", "heads", "width", "parameters"),
    [
        (12, 12, 768, 124_373_760),
        (24, 16, 1024, 354_599_936),
        (36, 20, 1280, 773_582_080),
        (48, 25, 1600, 1_556_840_000),
    ],
)
def test_published_parameter_counts(layers: int, heads: int, width: int, parameters: int) -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(n_layer=layers, n_head=heads, n_embd=width))
    assert model.num_parameters() == parameters


def test_the_head_is_the_token_embedding() -> None:
    model = GPT(GPTConfig(**TINY))
    assert model.lm_head.weight is model.transformer.wte.weight
    assert not any(name.endswith("bias") for name, _ in model.named_parameters())
    assert any(name.endswith("bias") for name, _ in GPT(GPTConfig(**TINY, bias=True)).named_parameters())


def test_initial_weights() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=8, n_head=4, n_embd=128, block_size=64, vocab_size=512, bias=True))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            assert (parameter == 0).all(), name
        elif ".ln_" in name:
            assert (parameter == 1).all(), name
        else:
            expected = 0.02 / math.sqrt(16) if name.endswith("c_proj.weight") else 0.02
            assert parameter.std().item() == pytest.approx(expected, rel=0.05), name
            assert abs(parameter.mean().item()) < 0.001, name


def test_the_initial_loss_is_that_of_a_uniform_guess() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY))
    tokens = torch.randint(32, (16, 9))
    loss = model(tokens[:, :-1], tokens[:, 1:])
    assert loss.item() == pytest.approx(math.log(32), abs=0.05)


def test_a_position_sees_only_the_past() -> None:
    model = GPT(GPTConfig(**TINY)).eval()
    tokens = torch.randint(32, (1, 8))
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 32
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


@pytest.mark.parametrize("by_layer", [True, False])
def test_attention_is_the_textbook_s(by_layer: bool) -> None:
    """Against an attention matrix written out, with scores divided by the layer's number."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**TINY, scale_attn_by_inverse_layer_idx=by_layer))
    x = torch.randn(3, 8, 16)
    for layer, block in enumerate(model.transformer.h, start=1):
        attention = block.attn
        query, key, value = (
            part.view(3, 8, 2, 8).transpose(1, 2) for part in F.linear(x, attention.c_attn.weight).chunk(3, dim=-1)
        )
        scores = query @ key.transpose(-1, -2) / math.sqrt(8)
        if by_layer:
            scores = scores / layer
        scores = scores.masked_fill(torch.ones(8, 8).triu(1).bool(), -math.inf)
        mixed = (scores.softmax(-1) @ value).transpose(1, 2).reshape(3, 8, 16)
        expected = F.linear(mixed, attention.c_proj.weight)
        torch.testing.assert_close(attention(x), expected, rtol=1e-5, atol=1e-6)


def test_targets_of_minus_one_do_not_count() -> None:
    model = GPT(GPTConfig(**TINY))
    tokens, targets = torch.randint(32, (2, 8)), torch.randint(32, (2, 8))
    masked = targets.clone()
    masked[:, 4:] = -1
    loss = model(tokens, masked)
    expected = model(tokens[:, :4], targets[:, :4])
    torch.testing.assert_close(loss, expected)


def test_dropout_acts_in_training_only() -> None:
    model = GPT(GPTConfig(**TINY, dropout=0.5))
    tokens = torch.randint(32, (2, 8))
    assert not torch.equal(model(tokens), model(tokens))
    torch.manual_seed(1)
    first = model(tokens)
    torch.manual_seed(1)
    assert torch.equal(first, model(tokens))
    model.eval()
    assert torch.equal(model(tokens), model(tokens))


def test_clear_errors() -> None:
    with pytest.raises(ValueError, match=r"n_embd=16.*n_head=3"):
        GPT(GPTConfig(**(TINY | {"n_head": 3})))
    with pytest.raises(ValueError, match=r"9 tokens.*block_size=8"):
        GPT(GPTConfig(**TINY))(torch.zeros(1, 9, dtype=torch.long))


def test_flops_of_gpt2_small() -> None:
    """6 x (parameters in products) + 12 x layers x width x context (PaLM, appendix B)."""
    with torch.device("meta"):
        model = GPT(GPTConfig())
    assert model.flops_per_token() == 6 * (124_373_760 - 1024 * 768) + 12 * 12 * 768 * 1024
