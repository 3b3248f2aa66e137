"""Micro-batches made by a thread before they are needed, so that training does not wait for files to be read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from itertools import islice
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from torch import Tensor

from configs import TrainConfig
from data.batches import EvaluationBatches, TrainingBatches
from data.tokens import Dataset
from training.passes import passes_of
from training.processes import Processes

DEPTH = 2  # micro-batches that are made ahead
Request = tuple[int, int]  # update and step
Batch = tuple[Tensor, Tensor]


class BatchesAhead:
    """The micro-batches of a process on its device, made ahead within a `with` block.

    Args:
        batches: makes them, in host memory.
        order: in which they will be asked for, as (update, step). Other requests are served too, but not ahead.
        device: where they are wanted.
    """

    def __init__(self, batches: TrainingBatches, order: Iterator[Request], device: torch.device) -> None:
        self.batches, self.device = batches, device
        self._order = order
        self._ahead: deque[tuple[Request, Future[Batch]]] = deque()
        self._tasks: SimpleQueue[tuple[Request, Future[Batch]] | None] = SimpleQueue()
        # A daemon, since a disk that hangs must not keep the process from ending.
        self._thread = Thread(target=self._work, name="batches", daemon=True)

    def __enter__(self) -> BatchesAhead:
        self._thread.start()
        self._ask()
        return self

    def __exit__(self, *_: object) -> None:
        self._order = iter(())
        self._tasks.put(None)
        self._thread.join(1.0)

    def micro_batch(self, update: int, step: int, *draw: int) -> Batch:
        """Inputs and targets of a micro-batch (see `TrainingBatches`), on the device. A copy to CUDA may still be under
        way; what is given to the device afterwards waits for it.

        Raises:
            DataError: the file shrank, the disk fails, or a token is beyond the vocabulary.
        """
        if self._ahead and self._ahead[0][0] == (update, step, *draw):
            _, future = self._ahead.popleft()
            self._ask()
            inputs, targets = future.result()
        else:
            inputs, targets = self._make(update, step, *draw)
        return inputs.to(self.device, non_blocking=True), targets.to(self.device, non_blocking=True)

    def _ask(self) -> None:
        """Has the thread make what is next, up to `DEPTH` micro-batches."""
        for request in islice(self._order, DEPTH - len(self._ahead)):
            task = request, Future[Batch]()
            self._ahead.append(task)
            self._tasks.put(task)

    def _work(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)  # a thread begins with device 0, where pinned memory would be known
            torch.set_num_threads(1)  # in this thread
        while (task := self._tasks.get()) is not None:
            (update, step), future = task
            try:
                future.set_result(self._make(update, step))
            except BaseException as error:  # belongs to whoever asks for this batch
                future.set_exception(error)

    def _make(self, update: int, step: int, *draw: int) -> Batch:
        inputs, targets = self.batches.micro_batch(update, step, *draw)
        if self.device.type == "cuda":  # from pinned memory a copy runs beside what the host does next
            inputs, targets = inputs.pin_memory(), targets.pin_memory()
        return inputs, targets


def open_batches(
    config: TrainConfig, data: Dataset, processes: Processes, done: int
) -> tuple[BatchesAhead, EvaluationBatches]:
    """A process's batches of a run that goes on after `done` updates, and those of an evaluation."""
    shares: dict[str, Any] = {
        "block_size": config.block_size,
        "batch_size": config.batch_size,
        "rank": processes.rank,
        "processes": processes.size,
        "vocab_size": config.vocab_size,
    }
    steps = config.accumulation_steps(processes.size)
    training = TrainingBatches(data.train, accumulation=steps, seed=config.seed, **shares)
    order = in_order(range(done + 1, config.max_iters + 1), steps, config)
    return BatchesAhead(training, order, processes.device), EvaluationBatches(data.val, **shares)


def in_order(updates: range, steps: int, config: TrainConfig) -> Iterator[Request]:
    """The requests of a training loop: every step of each pass of each update."""
    for update in updates:
        for one in passes_of(config, update):
            for step in range(steps):
                yield one.batch, step
