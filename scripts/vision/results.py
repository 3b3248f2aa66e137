"""What the runs came to, and the table that says so."""

from __future__ import annotations

import json
import statistics
from dataclasses import dataclass
from pathlib import Path

from scripts.comparison.statistics import paired_difference, spread
from scripts.vision.recipes import Recipe
from scripts.vision.training import Epoch

PAPER = Path(__file__).parent / "paper.json"


@dataclass(frozen=True)
class Row:
    """An optimizer at a learning rate."""

    optimizer: str
    learning_rate: float
    learning_rate_vectors: float
    betas: tuple[float, float]
    weight_decay: float
    runs: list[list[Epoch]]
    """of each seed, the epochs"""

    @classmethod
    def of(cls, recipe: Recipe, runs: list[list[Epoch]]) -> Row:
        config = recipe.config
        betas, vectors = (config.beta1, config.beta2), config.lr_1d or config.learning_rate
        return cls(recipe.name, config.learning_rate, vectors, betas, config.weight_decay, runs)

    @property
    def last(self) -> list[float]:
        """Test accuracy after the last epoch, of each seed, in percent."""
        return [100 * run[-1].accuracy for run in self.runs]

    @property
    def best(self) -> list[float]:
        """That of the epoch that is best on the test images, which is an optimistic figure."""
        return [100 * max(epoch.accuracy for epoch in run) for run in self.runs]

    @property
    def loss(self) -> float:
        """Test loss after the last epoch, in nats, a mean over the seeds."""
        return statistics.fmean(run[-1].test_loss for run in self.runs)

    @property
    def seconds(self) -> float:
        """Of an epoch's training, a median."""
        return statistics.median(epoch.seconds for run in self.runs for epoch in run)


@dataclass(frozen=True)
class Results:
    data: str
    machine: str
    parameters: int
    images: dict[str, int]
    """of each split"""
    batch_size: int
    epochs: int
    seeds: list[int]
    linear: list[float] | None
    """test accuracy of a linear classifier, of each seed, in percent"""
    rows: list[Row]


def lines(results: Results) -> list[str]:
    """What is printed."""
    published, after = _published(results.data)
    first, last = results.seeds[0], results.seeds[-1]
    seeds = f"seed {first}" if first == last else f"seeds {first} to {last}"
    text = [
        f"{results.data}: {results.images['train']:,} training and {results.images['test']:,} test images; "
        f"a network of {results.parameters:,} parameters;",
        f"{results.epochs} epochs of batches of {results.batch_size}; {seeds}. {results.machine}.",
        "",
        *_table(results, published),
        "",
        "Test accuracy in percent, mean ± standard deviation over the seeds; best: of the epoch that is best on the",
        f"test images. difference: last - last of {results.rows[0].optimizer}, seed by seed, with its 95 % interval.",
        "loss: on the test images, after the last epoch. learning rates: of matrices and convolutions; of vectors.",
        "s/epoch: seconds of an epoch's training, a median.",
    ]
    if published:
        text.append(
            f"paper: arXiv 2411.10438v4, Table 9, after {after} epochs; with learning rates that are not these."
        )
    return text


def _table(results: Results, published: dict[str, float]) -> list[str]:
    first = results.rows[0]
    head = ["optimizer", "learning rates", "betas", "decay", "last", "best", "difference", "loss", "s/epoch"]
    cells = [
        [
            row.optimizer,
            f"{row.learning_rate:g}, {row.learning_rate_vectors:g}",
            f"{row.betas[0]:g}, {row.betas[1]:g}",
            f"{row.weight_decay:g}",
            _mean(row.last),
            _mean(row.best),
            _difference(row.last, first.last) if row is not first else "",
            f"{row.loss:.4f}",
            f"{row.seconds:.2f}",
        ]
        for row in results.rows
    ]
    if results.linear is not None:
        difference = _difference(results.linear, first.last)
        cells.append(["linear classifier", "", "", "", _mean(results.linear), "", difference, "", ""])
    if published:
        head.append("paper")
        for row, line in zip(results.rows, cells, strict=True):
            line.append(f"{published[row.optimizer]:.2f}" if row.optimizer in published else "")
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    aligned = [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(line[1:], widths[1:], strict=True))]
        )
        for line in [head, *cells]
    ]
    return [aligned[0].rstrip(), "-" * len(aligned[0]), *(line.rstrip() for line in aligned[1:])]


def _mean(values: list[float]) -> str:
    found = spread(list(values))
    assert found is not None
    return f"{found.mean:.2f}" + ("" if found.sd is None else f" ± {found.sd:.2f}")


def _difference(values: list[float], others: list[float]) -> str:
    found = paired_difference(values, others)
    if found is None:
        return f"{values[0] - others[0]:+.2f}"
    mean = round(found.mean, 2) + 0.0  # adding 0 makes -0 positive
    return f"{mean:+.2f} [{found.low:+.2f}, {found.high:+.2f}]"


def _published(data: str) -> tuple[dict[str, float], int]:
    """Test accuracies in percent by optimizer, none for other data, and after how many epochs."""
    paper = json.loads(PAPER.read_text())
    return paper["accuracy"].get(data, {}), paper["epochs"]
