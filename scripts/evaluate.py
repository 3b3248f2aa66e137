#!/usr/bin/env python3
"""Scores a trained model: validation loss on its own data set or on others, accuracy on HellaSwag.

    python scripts/evaluate.py runs/gpt2_small_mars [--data openwebtext fineweb_edu] [--hellaswag] [--json FILE]
    torchrun --standalone --nproc_per_node=8 scripts/evaluate.py runs/gpt2_small_mars --hellaswag

Needs no network: `python data/prepare.py hellaswag` fetches the questions beforehand. Several processes share the work.
The parts are in `scripts/evaluation/`; docs/evaluating.md says how the numbers compare with published ones.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

import torch

from data.items import COUNT, PREPARED, Item, read_items
from data.tokenizers import Tokenizer
from scripts.evaluation.command import Parser, add_model_options, dtype_for, load, number, tokenizer_of
from scripts.evaluation.hellaswag import DEFINITION, Accuracy, accuracy
from scripts.evaluation.validation import Loss, measure, open_validation
from training.console import prepare, say, warn
from training.errors import report
from training.folder import write_json
from training.processes import Processes, leave
from training.trained import TrainedModel


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/evaluate.py",
        usage="%(prog)s RUN [--data [NAME_OR_FOLDER ...]] [--hellaswag [FILE]] [--json FILE] [...]",
        description="Validation loss of a trained model (without options: on the run's own data set), and its accuracy "
        "on HellaSwag.",
        epilog=f"HellaSwag: {DEFINITION}.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--data", nargs="*", metavar="NAME_OR_FOLDER", help="prepared data sets (default: the run's own)"
    )
    parser.add_argument(
        "--hellaswag", nargs="?", const=PREPARED, type=Path, metavar="FILE",
        help="HellaSwag's validation split: what `python data/prepare.py hellaswag` has made, or the authors' .jsonl; "
        "without --data nothing else is computed",
    )  # fmt: skip
    parser.add_argument("--limit", type=number(int, 1, 10**9), metavar="N", help="only the first N items of HellaSwag")
    parser.add_argument(
        "--batch_size", type=number(int, 1, 10**6), metavar="N", help="sequences of a forward pass (default: the run's)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there too")
    args = parser.parse_args(argv)
    if args.limit is not None and args.hellaswag is None:
        parser.error("--limit counts items of HellaSwag: it goes with --hellaswag")
    if args.json is not None and not args.json.absolute().parent.is_dir():
        parser.error(f"--json {args.json.absolute()}: there is no folder {args.json.absolute().parent}")
    if args.json is not None and args.json.is_dir():
        parser.error(f"--json {args.json.absolute()} is a folder; it must be a file")
    return args


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 2 for an error that the user can mend, 1 for others, 130 when interrupted."""
    prepare()
    processes = None
    try:
        args = arguments(argv)
        processes = Processes.from_environment(args.device)
        evaluate(args, processes)
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, processes, asked_to_stop=False)
    processes.close()
    return 0


@dataclass(frozen=True)
class Questions:
    """HellaSwag's items and how to ask them."""

    file: Path
    items: list[Item]
    tokenizer: Tokenizer


def evaluate(args: argparse.Namespace, processes: Processes) -> None:
    """All that was asked for. What can be missing is opened before anything is computed."""
    trained = load(args, processes.device)
    own = [trained.settings["dataset"]] if args.hellaswag is None or args.data is not None else []
    datasets = [open_validation(name, trained) for name in args.data or own]
    questions = None
    if args.hellaswag is not None:
        file = args.hellaswag.absolute()
        questions = Questions(file, read_items(file, args.limit), tokenizer_of(trained))
    processes.connect()
    dtype = dtype_for(args, trained, processes.device)
    if processes.device.type == "cuda" and dtype != "float32":
        torch.set_float32_matmul_precision("high")  # as in training
    batch_size = args.batch_size or trained.settings["batch_size"]

    tell = say if processes.is_main else lambda line: None
    tell(
        f"{from_here(trained.path)}: {trained.update:,} updates, "
        f"{trained.model.num_parameters() / 1e6:,.1f}M parameters, {dtype} on {processes.device.type}"
    )
    losses = []
    for dataset in datasets:
        losses.append(measure(trained, dataset, processes, batch_size, dtype))
        tell(loss_line(losses[-1]))
        dataset.close()
    score = ask(trained, questions, processes, batch_size, dtype) if questions else None
    if args.json is not None and processes.is_main:
        write_json(args.json.absolute(), as_json(trained, processes, dtype, losses, questions, score))
        tell(f"written to {args.json}")


def ask(trained: TrainedModel, questions: Questions, processes: Processes, batch_size: int, dtype: str) -> Accuracy:
    """Puts HellaSwag's questions to the model, and says how it did."""
    with progress_bar(4 * len(questions.items) // processes.size, processes.is_main) as progress:
        score = accuracy(trained, questions.items, questions.tokenizer, processes, batch_size, dtype, progress=progress)
    if processes.is_main:
        say(accuracy_line(score))
        if score.items != COUNT:
            warn(f"{score.items:,} items, not the {COUNT:,} of the whole validation split: not the published measure")
        if questions.tokenizer.name == "bytes":
            warn("a model of bytes: its accuracy does not compare with published ones, which are of GPT-2's tokens")
    return score


def from_here(path: Path) -> Path:
    """As short as it can be said in this folder."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def loss_line(loss: Loss) -> str:
    bits = f", {loss.bits_per_byte:.4f} bits per byte" if loss.bits_per_byte is not None else ""
    return (
        f"{loss.data.name}: validation loss {loss.loss:.4f} nats per token, perplexity {loss.perplexity:,.2f}{bits} "
        f"({loss.tokens:,} tokens)"
    )


def accuracy_line(score: Accuracy) -> str:
    def percent(share: float, error: float | None) -> str:
        return f"{100 * share:.2f} %" + (f" ± {100 * error:.2f}" if error is not None else "")

    return (
        f"HellaSwag, 0-shot: acc_norm {percent(score.acc_norm, score.acc_norm_stderr)}, "
        f"acc {percent(score.acc, score.acc_stderr)} ({score.items:,} items; ± is the standard error)"
    )


def as_json(
    trained: TrainedModel,
    processes: Processes,
    dtype: str,
    losses: list[Loss],
    questions: Questions | None,
    score: Accuracy | None,
) -> dict[str, Any]:
    """Losses in nats a token, accuracies as shares."""
    return {
        "checkpoint": str(trained.path),
        "iter": trained.update,
        "tokenizer": trained.tokenizer,
        "device": processes.device.type,
        "processes": processes.size,
        "dtype": dtype,
        "torch": torch.__version__,
        "data": [asdict(loss) | {"data": str(loss.data)} for loss in losses],
        "hellaswag": asdict(score) | {"file": str(questions.file)} if questions and score else None,
    }


@contextmanager
def progress_bar(total: int, shown: bool) -> Iterator[Any]:
    """A bar on standard error, where that is a terminal. Yields what is to be told how many are done."""
    from tqdm import tqdm

    with tqdm(total=total, unit=" endings", disable=None if shown else True, leave=False) as bar:
        yield lambda done: bar.update(min(done, total) - bar.n)


if __name__ == "__main__":
    leave(main())
