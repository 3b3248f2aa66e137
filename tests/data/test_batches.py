"""Batches: a pure function of seed, update and position; validation: every token once."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data import DataError
from data.batches import EvaluationBatches, TrainingBatches, dropout_seed, window_offsets
from data.tokens import TokenStream
from tests.helpers import write_tokens


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    return TokenStream([write_tokens(tmp_path, range(1000), [0]) / "train.bin"])


def batches(stream: TokenStream, batch_size: int, accumulation: int, rank: int, processes: int, **more: Any) -> Any:
    settings = {"block_size": 8, "seed": 5, "vocab_size": 1000} | more
    return TrainingBatches(
        stream, batch_size=batch_size, accumulation=accumulation, rank=rank, processes=processes, **settings
    )


def whole_update(
    stream: TokenStream, update: int, batch_size: int, accumulation: int, processes: int, **draw: int
) -> list[int]:
    """The first token of every window of an update, whoever computes it."""
    return [
        int(row[0])
        for rank in range(processes)
        for step in range(accumulation)
        for row in batches(stream, batch_size, accumulation, rank, processes).micro_batch(update, step, **draw)[0]
    ]


def test_targets_are_the_inputs_moved_by_one(stream: TokenStream) -> None:
    inputs, targets = batches(stream, 4, 1, 0, 1).micro_batch(1, 0)
    assert inputs.shape == targets.shape == (4, 8)
    assert inputs.dtype == torch.int64
    assert torch.equal(inputs + 1, targets)


@pytest.mark.parametrize(("batch_size", "accumulation", "processes"), [(1, 8, 1), (2, 2, 2), (4, 1, 2), (1, 1, 8)])
def test_any_division_makes_the_same_update(
    stream: TokenStream, batch_size: int, accumulation: int, processes: int
) -> None:
    for update in (1, 2, 77):
        whole = whole_update(stream, update, 8, 1, 1)
        assert sorted(whole_update(stream, update, batch_size, accumulation, processes)) == sorted(whole)


def test_batches_need_no_history_and_differ(stream: TokenStream) -> None:
    straight = [whole_update(stream, update, 8, 1, 1) for update in (1, 2, 3)]
    assert whole_update(stream, 3, 8, 1, 1) == straight[2]
    assert straight[0] != straight[1] != straight[2]
    other = batches(stream, 8, 1, 0, 1, seed=6).micro_batch(1, 0)[0][:, 0].tolist()
    assert other != straight[0]


@pytest.mark.parametrize(("batch_size", "accumulation", "processes"), [(1, 8, 1), (2, 2, 2)])
def test_other_draws_of_an_update_are_batches_that_no_update_has(
    stream: TokenStream, batch_size: int, accumulation: int, processes: int
) -> None:
    def first_tokens(update: int, draw: int, *shares: int) -> tuple[int, ...]:
        return tuple(sorted(whole_update(stream, update, *shares, draw=draw)))

    whole = {(update, draw): first_tokens(update, draw, 8, 1, 1) for update in range(1, 9) for draw in range(5)}
    assert len(set(whole.values())) == len(whole)
    assert whole[3, 2] == first_tokens(3, 2, batch_size, accumulation, processes)
    assert whole[3, 0] == tuple(sorted(whole_update(stream, 3, 8, 1, 1)))


def test_offsets_are_fixed_for_ever() -> None:
    """A change here makes every old run incomparable with every new one."""
    windows = 9_035_582_198 - 1024  # OpenWebText
    assert window_offsets(5000, 1, 4, windows).tolist() == [4500227374, 8979616676, 3093459311, 6123121591]
    assert window_offsets(5000, 100_000, 4, windows).tolist() == [2821808858, 6725984247, 6247873354, 1741434769]


def test_offsets_are_uniform_and_reach_both_ends() -> None:
    offsets = np.concatenate([window_offsets(1, update, 480, 10) for update in range(200)])
    counts = np.bincount(offsets, minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 9600).max() < 5 * np.sqrt(9600)
    assert window_offsets(1, 1, 100, 1).tolist() == [0] * 100


def test_dropout_seeds_differ_by_update_and_process() -> None:
    seeds = {dropout_seed(seed, update, rank) for seed in (1, 2) for update in range(50) for rank in range(4)}
    seeds |= {dropout_seed(1, update, rank, draw) for update in range(50) for rank in range(4) for draw in (1, 2)}
    assert len(seeds) == 800
    assert all(0 <= seed < 2**63 for seed in seeds)


@pytest.mark.parametrize("tokens", [2, 8, 9, 10, 17, 100, 129])
@pytest.mark.parametrize(("batch_size", "processes"), [(1, 1), (3, 1), (3, 2), (4, 5)])
def test_validation_predicts_every_token_but_the_first_once(
    tmp_path: Path, tokens: int, batch_size: int, processes: int
) -> None:
    stream = TokenStream([write_tokens(tmp_path, range(tokens), [0]) / "train.bin"])
    predicted = []
    for rank in range(processes):
        share = EvaluationBatches(
            stream, block_size=8, batch_size=batch_size, rank=rank, processes=processes, vocab_size=tokens
        )
        for index in range(len(share)):
            inputs, targets = share[index]
            assert inputs.shape == targets.shape == (batch_size, 8)
            counted = targets >= 0
            assert torch.equal(inputs[counted] + 1, targets[counted])
            predicted += targets[counted].tolist()
    assert sorted(predicted) == list(range(1, tokens))


def test_a_token_beyond_the_vocabulary_is_met_on_the_way(stream: TokenStream) -> None:
    """Large files are not read whole at the start."""
    with pytest.raises(DataError, match="beyond vocab_size=10;"):
        batches(stream, 8, 1, 0, 1, vocab_size=10).micro_batch(1, 0)
    share = EvaluationBatches(stream, block_size=8, batch_size=2, rank=0, processes=1, vocab_size=10)
    with pytest.raises(DataError, match="beyond vocab_size=10;"):
        share[1]
