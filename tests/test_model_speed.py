"""What makes the model fast must not change what it computes, and must not hold what it is there to avoid."""

from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import model as model_file
from model import GPT, GPTConfig

VOCABULARY = 1000
SHAPE = {"n_layer": 2, "n_head": 2, "n_embd": 32, "block_size": 64, "vocab_size": VOCABULARY}


def pair(**shape: Any) -> tuple[GPT, GPT]:
    """A model that finds its loss from all logits, and one that does from blocks."""
    torch.manual_seed(0)
    config = GPTConfig(**(SHAPE | shape))
    whole, chunked = GPT(config, chunked_loss=False), GPT(config, chunked_loss=True)
    chunked.load_state_dict(whole.state_dict())
    return whole, chunked


def batch(sequences: int = 8, length: int = 64) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(VOCABULARY, (sequences, length + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[1, 5:20] = -1
    return tokens[:, :-1], targets


def gradients(model: GPT, factor: float, dtype: torch.dtype | None) -> tuple[float, dict[str, Tensor]]:
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        loss = model(*batch())
    (factor * loss).backward()
    return loss.item(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture(params=[1 << 13, 1 << 15, 1 << 18, 1 << 19], ids=lambda count: f"{count} logits at once")
def at_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Blocks of 64 rows (the least), 64, 512, and all of the vocabulary."""
    with patch.dict(model_file.AT_ONCE, cpu=request.param):
        yield


@pytest.mark.parametrize("factor", [1.0, -2.5], ids=["loss", "scaled"])
@pytest.mark.usefixtures("at_once")
def test_blocks_give_the_loss_and_gradients_of_all_logits(factor: float) -> None:
    whole, chunked = pair()
    (loss, expected), (found_loss, found) = (gradients(model, factor, None) for model in (whole, chunked))
    assert found_loss == pytest.approx(loss, rel=1e-6)
    assert found.keys() == expected.keys()
    for name, grad in expected.items():
        torch.testing.assert_close(found[name], grad, rtol=1e-4, atol=1e-6 * grad.abs().max().item(), msg=name)


@pytest.mark.usefixtures("at_once")
def test_blocks_in_bfloat16_are_as_near_to_float32_as_all_logits_are() -> None:
    (whole, chunked), (in_float32, _) = pair(), pair()
    _, exact = gradients(in_float32, 1.0, None)
    loss, rounded = gradients(whole, 1.0, torch.bfloat16)
    found_loss, found = gradients(chunked, 1.0, torch.bfloat16)
    assert found_loss == pytest.approx(loss, abs=1e-4)
    for name, grad in exact.items():
        error, usual = (found[name] - grad).norm(), (rounded[name] - grad).norm()
        assert error <= 1.5 * usual + 1e-6 * grad.norm(), name
        assert found[name].dtype == torch.float32


def test_targets_that_do_not_count_have_no_gradient() -> None:
    _, chunked = pair()
    tokens, targets = batch()
    with patch.dict(model_file.AT_ONCE, cpu=1 << 13):
        loss = chunked(
            tokens, torch.full_like(targets, -1).index_put((torch.tensor(0), torch.tensor(3)), targets[0, 3])
        )
        alone = chunked(tokens[:1, :4], torch.tensor([[-1, -1, -1, int(targets[0, 3])]]))
    assert loss.item() == pytest.approx(alone.item(), rel=1e-6)
    loss.backward()
    position = chunked.transformer.wpe.weight.grad
    assert position is not None
    assert (position[4:] == 0).all()


class Largest(TorchDispatchMode):
    """The size of the largest tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        self.elements = max([self.elements, *(tensor.numel() for tensor in made)])
        return result


@pytest.mark.parametrize("dtype", [None, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(("sequences", "length"), [(32, 64), (2, 512)], ids=["logits", "attention"])
def test_no_tensor_is_as_large_as_logits_or_attention_matrices(
    sequences: int, length: int, dtype: torch.dtype | None
) -> None:
    """Nothing in an update is larger than the largest activation, (B, T, 4C), or weight."""
    width = 32
    config = GPTConfig(**SHAPE | {"block_size": length, "vocab_size": 16384})
    model, largest = GPT(config), Largest()
    tokens = torch.randint(16384, (sequences, length))
    allowed = max(4 * width * sequences * length, 16384 * width)
    with patch.dict(model_file.AT_ONCE, cpu=1 << 16), largest:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            loss = model(tokens, tokens)
        loss.backward()
    assert allowed < sequences * length * 16384, "the test needs more logits"
    assert length == 64 or allowed < sequences * 2 * length * length, "the test needs larger matrices"
    assert largest.elements <= allowed


@pytest.mark.parametrize("length", [32, 256, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_attention_is_the_written_out_one(length: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    parts = [torch.randn(2, 2, length, 8, dtype=dtype, requires_grad=True) for _ in range(3)]
    query, key, value = (part.double() for part in parts)
    past = torch.ones(length, length, dtype=torch.bool).tril()
    scores = (query @ key.mT * 0.2).masked_fill(~past, -torch.inf)
    expected = scores.softmax(-1) @ value
    found = model_file.attend(*parts, scale=0.2, dropout=0.0)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-10}[dtype]
    torch.testing.assert_close(found.double(), expected, rtol=tolerance, atol=tolerance)
    weight = torch.randn_like(expected)
    for ours, theirs in zip(
        torch.autograd.grad((found * weight).sum(), parts),
        torch.autograd.grad((expected * weight).sum(), parts),
        strict=True,
    ):
        torch.testing.assert_close(ours.double(), theirs.double(), rtol=5 * tolerance, atol=5 * tolerance)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("chunked", [False, True], ids=["all logits", "blocks"])
def test_compiled_there_are_no_graph_breaks_and_no_recompilations(chunked: bool) -> None:
    """50 updates with an evaluation before, amidst and after them; losses are those of the eager model."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager, compiled = pair()
    compiled.chunked_loss = eager.chunked_loss = chunked
    compiled.compile()
    losses: list[list[float]] = []
    with patch.dict(model_file.AT_ONCE, cpu=128 * 512):  # seven blocks of 128 rows of 1000, and one of 104
        for model in (eager, compiled):
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
            losses.append([])
            for update in range(51):
                if update % 25 == 0:
                    losses[-1].append(evaluation(model))
                if update == 1:
                    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
                losses[-1].append(step(model, optimizer))
    counters = torch._dynamo.utils.counters
    assert counters["graph_break"] == {}
    assert counters["stats"]["unique_graphs"] == graphs > 0
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


@torch.no_grad()
def evaluation(model: GPT) -> float:
    model.eval()
    loss = model(*batch()).item()
    model.train()
    return loss


def step(model: GPT, optimizer: torch.optim.Optimizer) -> float:
    loss = model(*batch())
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def test_the_default_on_a_cpu_is_blocks() -> None:
    assert GPT(GPTConfig(**SHAPE)).chunked_loss is None
    with (
        patch.object(F, "cross_entropy", side_effect=AssertionError("all logits")),
        patch.dict(model_file.AT_ONCE, cpu=1 << 13),
    ):
        GPT(GPTConfig(**SHAPE))(*batch())
