"""Which tokens an update sees, as a pure function of (seed, update, position in the global batch).

A counter-based generator (Philox, Salmon et al. 2011) gives the window offsets of update k without those of the updates
before it. So there is no sampler state: a resume is exact, any number of processes and any micro-batch make the same
update, two optimizers see the same batches, and a method that needs the next batch can ask for it.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from data.tokens import TokenStream, check_tokens

IGNORED = -1  # a target that does not count


def window_offsets(seed: int, update: int, count: int, windows: int, draw: int = 0) -> npt.NDArray[np.int64]:
    """Where the `count` windows of an update begin, each uniform over 0 … windows - 1. Draw 0 is what training sees;
    others are independent of it, and of those of other updates.

    Raw output of the bit generator, whose stream numpy guarantees for all versions; the remainder's bias is below
    windows / 2**64, one in a billion for OpenWebText.
    """
    counter = np.array([0, update, draw, 0], np.uint64)
    philox = np.random.Philox(key=np.array([seed, 0], dtype=np.uint64), counter=counter)
    return (philox.random_raw(count) % np.uint64(windows)).astype(np.int64)


def snapshot_batch(update: int, index: int) -> int:
    """The number of a batch beside those of the updates, whose numbers are below 2**31: the `index`-th (from 0) of a
    snapshot of the weights that is taken before an update. In [2**63, 2**64)."""
    return 2**63 + index * 2**32 + update


def dropout_seed(seed: int, update: int, rank: int, *draw: int) -> int:
    """The seed of a process's dropout in an update, or in another draw of it, in [0, 2**63)."""
    return int(np.random.SeedSequence([seed, update, rank, *draw]).generate_state(1, np.uint64)[0] >> np.uint64(1))


class TrainingBatches:
    """The micro-batches of one process.

    Args:
        tokens: the training tokens.
        block_size: T, tokens of a window.
        batch_size: B, windows of a micro-batch.
        accumulation: micro-batches of this process in an update.
        rank, processes: this process and their number.
        seed: of the run.
        vocab_size: tokens at or above it are refused.
    """

    def __init__(
        self,
        tokens: TokenStream,
        *,
        block_size: int,
        batch_size: int,
        accumulation: int,
        rank: int,
        processes: int,
        seed: int,
        vocab_size: int,
    ) -> None:
        self.tokens = tokens
        self.block_size, self.batch_size, self.accumulation = block_size, batch_size, accumulation
        self.rank, self.processes = rank, processes
        self.seed, self.vocab_size = seed, vocab_size

    def micro_batch(self, update: int, step: int, draw: int = 0) -> tuple[Tensor, Tensor]:
        """Micro-batch `step` (from 0) of update `update` (from 1, or the number of a batch that is no update's), or of
        another draw for it.

        Returns:
            inputs and targets, each (B, T) int64 on the CPU; the targets are the inputs moved by one token.

        Raises:
            DataError: the file shrank, the disk fails, or a token is beyond the vocabulary.
        """
        total = self.batch_size * self.accumulation * self.processes
        offsets = window_offsets(self.seed, update, total, len(self.tokens) - self.block_size, draw)
        first = (step * self.processes + self.rank) * self.batch_size
        rows = [self.tokens.read(int(o), self.block_size + 1) for o in offsets[first : first + self.batch_size]]
        windows = np.stack(rows)
        check_tokens(windows, self.vocab_size, self.tokens.name)
        # Copied by numpy: torch would start threads of its own for each thread that asks.
        inputs, targets = windows[:, :-1].astype(np.int64), windows[:, 1:].astype(np.int64)
        return torch.from_numpy(inputs), torch.from_numpy(targets)


class EvaluationBatches:
    """The whole validation file in order, in windows side by side, split over the processes.

    Each token but the first is predicted once. The last window may be shorter and the last batch may have fewer
    windows; both are padded, with targets that do not count, so that all batches have one shape.

    Args: as of `TrainingBatches`.
    """

    def __init__(
        self, tokens: TokenStream, *, block_size: int, batch_size: int, rank: int, processes: int, vocab_size: int
    ) -> None:
        self.tokens, self.block_size, self.batch_size, self.vocab_size = tokens, block_size, batch_size, vocab_size
        windows = -(-(len(tokens) - 1) // block_size)
        batches = -(-windows // batch_size)
        self.mine = range(rank, batches, processes)
        self.rounds = -(-batches // processes)
        """batches of the process that has the most"""

    def __len__(self) -> int:
        """Batches of this process."""
        return len(self.mine)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each (B, T) int64 on the CPU; targets are -1 where they do not count."""
        size = self.batch_size * self.block_size
        start = self.mine[index] * size
        tokens = self.tokens.read(start, min(size + 1, len(self.tokens) - start))
        check_tokens(tokens, self.vocab_size, self.tokens.name)
        inputs, targets = np.zeros(size, np.int64), np.full(size, IGNORED, np.int64)
        inputs[: len(tokens) - 1], targets[: len(tokens) - 1] = tokens[:-1], tokens[1:]
        shape = (self.batch_size, self.block_size)
        return torch.from_numpy(inputs.reshape(shape)), torch.from_numpy(targets.reshape(shape))
