"""What the commands that use a trained model have in common: its options, and reading it."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import NoReturn, cast

import torch

from data.tokenizers import Tokenizer, make_tokenizer
from training import RunError
from training.device import DTYPES, Dtype, pick_dtype
from training.trained import TOKENS, TrainedModel, load_trained


class Parser(argparse.ArgumentParser):
    """Raises RunError for a mistake on the command line."""

    def error(self, message: str) -> NoReturn:
        raise RunError(f"{message} ({self.prog} --help lists what is allowed)")


def add_model_options(parser: argparse.ArgumentParser) -> None:
    """RUN and what concerns the model, its tokens and the device."""
    parser.add_argument("run", metavar="RUN", type=Path, help="a run's folder (its out_dir), or a checkpoint (.pt)")
    parser.add_argument("--checkpoint", metavar="WHICH", help="last (default), best, or a number of updates")
    parser.add_argument("--tokenizer", choices=sorted(TOKENS), help="of the run's tokens, where the run does not say")
    parser.add_argument("--device", default="auto", help="auto (default), cpu, cuda, cuda:N or mps")
    parser.add_argument(
        "--dtype",
        choices=["auto", *DTYPES],
        default="auto",
        help="of the forward pass; auto: that of the run on the device that trained it, else as train.py chooses",
    )


def load(args: argparse.Namespace, device: torch.device) -> TrainedModel:
    """The model that the options name.

    Raises:
        RunError: no such run or checkpoint, or a tokenizer that is not the run's.
    """
    if args.run.suffix == ".pt" and args.checkpoint is not None:
        raise RunError(f"--checkpoint {args.checkpoint}: {args.run.absolute()} is a checkpoint already")
    trained = load_trained(args.run, args.checkpoint or "last", device)
    if args.tokenizer is None:
        return trained
    rows = trained.model.config.vocab_size
    if (trained.tokenizer or args.tokenizer) != args.tokenizer or rows < TOKENS[args.tokenizer]:
        known = f"its tokens are {trained.tokenizer}" if trained.tokenizer else f"its vocabulary has {rows} rows"
        raise RunError(f"--tokenizer {args.tokenizer}: does not fit {trained.path}: {known}")
    return replace(trained, tokenizer=args.tokenizer)


def dtype_for(args: argparse.Namespace, trained: TrainedModel, device: torch.device) -> Dtype:
    """The numbers of the forward pass. Those of the run give its own losses again, but only the device that trained it
    is known to be fast in them."""
    used = trained.settings.get("dtype")
    if args.dtype == "auto" and used in DTYPES and trained.settings.get("device") == device.type:
        return cast("Dtype", used)
    return pick_dtype(args.dtype, device)


def tokenizer_of(trained: TrainedModel) -> Tokenizer:
    """What turns text into the model's tokens.

    Raises:
        RunError: it is not known.
        DataError: GPT-2's BPE files cannot be had.
    """
    if trained.tokenizer is None:
        record = trained.path.parent.parent / "config.json"
        raise RunError(
            f"{record}{'' if record.exists() else ' is missing and'} does not say what the run's tokens are; say "
            "--tokenizer gpt2 or bytes"
        )
    return make_tokenizer(trained.tokenizer)


def number(kind: type, low: float, high: float, above: bool = False) -> Callable[[str], float]:
    """The type of an option whose value lies in [low, high], or in (low, high] where it must be `above`."""

    def convert(text: str) -> float:
        value: float = kind(text)
        if not (low < value if above else low <= value) or not value <= high:
            raise argparse.ArgumentTypeError(
                f"{text} is not allowed, only {'above' if above else 'from'} {low} to {high}"
            )
        return value

    convert.__name__ = "whole number" if kind is int else "number"  # what argparse calls it
    return convert
