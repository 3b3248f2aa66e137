"""Batches made ahead by a thread: the same ones, whoever asks; errors where they belong; an end in all cases."""

import threading
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs import TrainConfig
from data import DataError
from data.batches import TrainingBatches
from data.tokens import TokenStream
from tests.conftest import Train
from tests.helpers import write_tokens
from training.ahead import DEPTH, BatchesAhead, in_order

CPU = torch.device("cpu")


class Counted(TrainingBatches):
    """Notes who makes which micro-batch. One of them may fail."""

    def __init__(self, tokens: TokenStream, bad: tuple[int, int] | None = None) -> None:
        sizes = {"block_size": 8, "batch_size": 2, "accumulation": 2, "rank": 0, "processes": 1}
        super().__init__(tokens, **sizes, seed=5, vocab_size=1000)
        self.made: list[tuple[int, int]] = []
        self.makers: set[str] = set()
        self.bad = bad

    def micro_batch(self, update: int, step: int) -> tuple[Tensor, Tensor]:
        self.made.append((update, step))
        self.makers.add(threading.current_thread().name)
        if (update, step) == self.bad:
            raise DataError("the disk is gone")
        return super().micro_batch(update, step)


@pytest.fixture
def stream(tmp_path: Path) -> TokenStream:
    return TokenStream([write_tokens(tmp_path, range(1000), [0]) / "train.bin"])


def requests(exact: bool = False) -> Iterator[tuple[int, int]]:
    return in_order(range(3, 6), 2, TrainConfig(exact=exact))


def assert_equal(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


def wait_for(batches: Counted, count: int) -> None:
    end = time.monotonic() + 10
    while len(batches.made) < count:
        assert time.monotonic() < end, batches.made
        time.sleep(0.001)


def test_the_order_of_a_loop() -> None:
    assert list(requests()) == [(3, 0), (3, 1), (4, 0), (4, 1), (5, 0), (5, 1)]
    exact = [(4, 0), (4, 1), (3, 0), (3, 1), (5, 0), (5, 1), (4, 0), (4, 1), (6, 0), (6, 1), (5, 0), (5, 1)]
    assert list(requests(exact=True)) == exact


@pytest.mark.parametrize("exact", [False, True])
def test_what_is_asked_for_in_order_is_made_once_and_by_the_thread(stream: TokenStream, exact: bool) -> None:
    batches, plain = Counted(stream), Counted(stream)
    with BatchesAhead(batches, requests(exact), CPU) as ahead:
        for request in requests(exact):
            assert_equal(ahead.micro_batch(*request), plain.micro_batch(*request))
    assert batches.made == list(requests(exact))
    assert batches.makers == {"batches"}


def test_as_many_as_said_are_made_ahead(stream: TokenStream) -> None:
    batches = Counted(stream)
    with BatchesAhead(batches, requests(), CPU) as ahead:
        wait_for(batches, DEPTH)
        time.sleep(0.05)
        assert len(batches.made) == DEPTH
        ahead.micro_batch(3, 0)
        wait_for(batches, DEPTH + 1)
        time.sleep(0.05)
        assert batches.made == list(islice(requests(), DEPTH + 1))


def test_another_order_gets_the_same_batches(stream: TokenStream) -> None:
    """Wrong guesses cost time and nothing else."""
    asked = [(3, 0), (9, 1), (3, 1), (5, 0), (4, 0), (4, 0), (4, 1)]
    with BatchesAhead(Counted(stream), requests(), CPU) as ahead:
        for request in asked:
            assert_equal(ahead.micro_batch(*request), Counted(stream).micro_batch(*request))


def test_an_error_reaches_who_asks_for_that_batch(stream: TokenStream) -> None:
    batches = Counted(stream, bad=(3, 1))
    with BatchesAhead(batches, requests(), CPU) as ahead:
        wait_for(batches, 2)
        assert_equal(ahead.micro_batch(3, 0), Counted(stream).micro_batch(3, 0))
        with pytest.raises(DataError, match="the disk is gone"):
            ahead.micro_batch(3, 1)
        assert_equal(ahead.micro_batch(4, 0), Counted(stream).micro_batch(4, 0))


@pytest.mark.parametrize("error", [None, KeyboardInterrupt, ValueError])
def test_the_thread_ends_with_the_block(stream: TokenStream, error: type[BaseException] | None) -> None:
    try:
        with BatchesAhead(Counted(stream), in_order(range(1, 10**9), 2, TrainConfig(exact=True)), CPU) as ahead:
            assert "batches" in names()
            ahead.micro_batch(2, 0)
            if error is not None:
                raise error
    except (KeyboardInterrupt, ValueError):
        pass
    assert "batches" not in names()


@pytest.mark.parametrize("settings", [(), ("--optimizer=mars-adamw", "--exact=true")])
def test_a_run_has_its_batches_made_ahead(
    run_train: Train, monkeypatch: pytest.MonkeyPatch, settings: tuple[str, ...]
) -> None:
    """All of them, also after a resume; and its thread ends with it."""
    makers: list[str] = []
    whole = TrainingBatches.micro_batch

    def micro_batch(self: TrainingBatches, update: int, step: int) -> tuple[Tensor, Tensor]:
        makers.append(threading.current_thread().name)
        return whole(self, update, step)

    monkeypatch.setattr(TrainingBatches, "micro_batch", micro_batch)
    run_train(*settings, "--max_iters=4", "--lr_decay_iters=6")
    assert run_train(*settings, "--max_iters=6", "--lr_decay_iters=6", "--resume=auto").status == 0
    assert makers == ["batches"] * 6 * 2 * (2 if settings else 1)
    assert "batches" not in names()


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate()]
