#!/usr/bin/env python3
"""Trains small residual networks on images with this project's optimizers, and holds their test accuracies against each
other.

    python scripts/train_vision.py --data digits            # minutes on 2 cores, without a network
    python scripts/train_vision.py --data cifar10 --optimizers adamw mars-adamw mars-adamw-exact

CIFAR-10/100: a ResNet-18, batches of 128, 200 epochs, the learning rate divided by 10 after half and after three
quarters of them, as in the MARS paper (arXiv 2411.10438), whose Table 9 is printed beside the results. Digits: a
network of the same kind with two narrow stages, beside a linear classifier.

A seed stands for initial weights, order, crops and mirror images, and of the digits also for the split into training
and test images. All optimizers get the same ones, so that differences are taken seed by seed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

from scripts.benchmarking.command import add_json, check_json
from scripts.benchmarking.machine import machine
from scripts.evaluation.command import Parser, number
from scripts.vision.images import DATA_SETS, linear_accuracy
from scripts.vision.recipes import METHODS, RATES, Recipe
from scripts.vision.results import Results, Row, lines
from scripts.vision.training import BATCH_SIZE, Epoch, new_network, train
from training import RunError
from training.console import prepare, say
from training.device import pick_device
from training.errors import report

QUIET = 30.0  # seconds between lines that tell how far it is


def main(argv: list[str] | None = None) -> int:
    prepare()
    try:
        args = arguments(argv)
        results = measure(args)
        say("\n".join(lines(results)))
        if args.json:
            args.json.write_text(json.dumps(asdict(results), indent=2) + "\n")
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, None, asked_to_stop=False)
    return 0


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line. Its `recipes` are what to train with, a learning rate each.

    Raises:
        RunError: a mistake in it.
    """
    parser = Parser(
        prog="python scripts/train_vision.py",
        usage="%(prog)s --data digits|cifar10|cifar100 [--optimizers NAME ...] [...]",
        description="Test accuracy of small residual networks on images, by optimizer.",
    )
    parser.add_argument("--data", choices=list(DATA_SETS), required=True)
    parser.add_argument("--path", metavar="FOLDER", type=Path, help="with train-*.parquet and test-*.parquet of CIFAR")
    parser.add_argument("--optimizers", metavar="NAME", nargs="+", choices=METHODS, default=METHODS,
        help=f"the first is what others are compared with; all by default: {', '.join(METHODS)}")  # fmt: skip
    parser.add_argument("--lr", metavar="NAME=VALUE[,VALUE...]", nargs="+", default=[],
        help="learning rates of an optimizer instead of its own, each a row")  # fmt: skip
    epochs = ", ".join(f"{data.epochs} for {name}" for name, data in DATA_SETS.items())
    parser.add_argument("--epochs", metavar="N", type=number(int, 1, 10**6), help=epochs)
    parser.add_argument("--seeds", metavar="N", type=number(int, 1, 10**4), default=1, help="how many (1)")
    parser.add_argument("--first_seed", metavar="N", type=number(int, 0, 10**9), default=1, help="(1)")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    add_json(parser)
    args = parser.parse_args(argv)
    check_json(parser, args.json)
    rates = dict(learning_rates(text) for text in args.lr)
    for name in rates:
        if name not in args.optimizers:
            raise RunError(f"--lr {name}=…: allowed are the names of --optimizers: {', '.join(args.optimizers)}")
    recipes = RATES[args.data].recipes()
    args.recipes = [
        recipes[name].at(rate)
        for name in dict.fromkeys(args.optimizers)
        for rate in rates.get(name, [recipes[name].learning_rate])
    ]
    return args


def learning_rates(text: str) -> tuple[str, list[float]]:
    """From NAME=VALUE[,VALUE...]."""
    name, _, values = text.partition("=")
    try:
        return name, [number(float, 0, 1e6, above=True)(value) for value in values.split(",")]
    except (ValueError, argparse.ArgumentTypeError):
        raise RunError(f"--lr {text}: must be NAME=VALUE[,VALUE...] with numbers above 0, such as adamw=1e-3") from None


def measure(args: argparse.Namespace) -> Results:
    """A row for each of `args.recipes`, with a run for each seed."""
    device = pick_device(args.device, 0, 1)
    data = DATA_SETS[args.data]
    splits = data.load(args.path)
    epochs, seeds = args.epochs or data.epochs, range(args.first_seed, args.first_seed + args.seeds)
    progress = Progress(args.recipes, epochs, len(seeds))
    runs: list[list[list[Epoch]]] = [[] for _ in args.recipes]
    for seed in seeds:  # outside, so that a busy minute of the machine slows all optimizers
        split = splits(seed)
        for recipe, row in zip(args.recipes, runs, strict=True):
            progress.begin(recipe, seed)
            row.append(train(data, split, recipe.config, epochs, seed, device, progress.note))
    sizes = {"train": len(split.train), "test": len(split.test)}
    parameters = sum(parameter.numel() for parameter in new_network(data, split).parameters())
    return Results(
        data=args.data,
        machine=machine(device.type),
        parameters=parameters,
        images=sizes,
        batch_size=BATCH_SIZE,
        epochs=epochs,
        seeds=list(seeds),
        linear=[linear_accuracy(splits(seed)) for seed in seeds] if data.linear else None,
        rows=[Row.of(recipe, row) for recipe, row in zip(args.recipes, runs, strict=True)],
    )


class Progress:
    """Now and then a line on standard error."""

    def __init__(self, recipes: Sequence[Recipe], epochs: int, seeds: int) -> None:
        self.total, self.done = len(recipes) * epochs * seeds, 0
        self.run = ""
        self.spoken = self.start = time.monotonic()

    def begin(self, recipe: Recipe, seed: int) -> None:
        self.run = f"{recipe.name}, learning rate {recipe.learning_rate:g}, seed {seed}"

    def note(self, epoch: Epoch) -> None:
        """An epoch is over."""
        self.done += 1
        now = time.monotonic()
        if now - self.spoken >= QUIET:
            self.spoken = now
            left = (now - self.start) / self.done * (self.total - self.done)
            print(
                f"{self.done} of {self.total} epochs, about {left / 60:.0f} min left; {self.run}: loss "
                f"{epoch.train_loss:.3f}, test accuracy {100 * epoch.accuracy:.2f} %",
                file=sys.stderr,
                flush=True,
            )


if __name__ == "__main__":
    sys.exit(main())
