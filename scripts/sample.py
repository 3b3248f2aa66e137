#!/usr/bin/env python3
"""Text from a trained model.

    python scripts/sample.py runs/stdlib_mars --prompt "def main(" [--tokens 200] [--temperature 0.8] [--seed 0]

Prints the prompt and what the model makes of it, as it comes, up to an end-of-text token. The same command prints the
same text again on the same machine. Output is UTF-8; bytes that are not become U+FFFD.
"""

import argparse
import codecs
import io
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

import torch

from data.tokenizers import Tokenizer
from scripts.evaluation.command import Parser, add_model_options, dtype_for, load, number, tokenizer_of
from scripts.evaluation.sampling import Choice, sample
from training.console import prepare
from training.device import pick_device
from training.errors import report
from training.processes import leave

SEPARATOR = "\n" + "-" * 80 + "\n"  # between samples


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/sample.py",
        usage="%(prog)s RUN [--prompt TEXT] [--tokens N] [--temperature T] [--seed N] [...]",
        description="Text from a trained model. Greedy with --temperature 0; then the seed is of no account.",
    )
    add_model_options(parser)
    parser.add_argument(
        "--prompt",
        metavar="TEXT",
        default="",
        help="text to go on from; - reads standard input; empty (default): the model begins a document",
    )
    parser.add_argument("--tokens", metavar="N", type=number(int, 0, 10**9), default=200, help="at most (200)")
    parser.add_argument(
        "--temperature", metavar="T", type=number(float, 0, 1e9), default=Choice.temperature, help="(0.8)"
    )
    parser.add_argument(
        "--top_k", metavar="K", type=number(int, 0, 10**9), default=Choice.top_k,
        help="draw from the K most probable tokens only (50); 0: from all",
    )  # fmt: skip
    parser.add_argument(
        "--top_p", metavar="P", type=number(float, 0, 1, above=True), default=Choice.top_p,
        help="of those, from the fewest that have probability P together (0.95); 1: from all",
    )  # fmt: skip
    parser.add_argument("--seed", metavar="N", type=number(int, 0, 2**63 - 1), default=0, help="(0)")
    parser.add_argument("--samples", metavar="N", type=number(int, 1, 10**9), default=1, help="(1)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    prepare()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        args = arguments(argv)
        for piece in texts(args):
            print(piece, end="", flush=True)
    except BrokenPipeError:  # the reader has seen enough
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return report(error, None, asked_to_stop=False)
    return 0


def texts(args: argparse.Namespace) -> Iterator[str]:
    """All that is printed, in pieces, as soon as each is known."""
    device = pick_device(args.device, local_rank=0, local_size=1)
    trained = load(args, device)
    tokenizer = tokenizer_of(trained)
    text = sys.stdin.buffer.read() if args.prompt == "-" else args.prompt
    prompt = tokenizer.encode([text], complete=False).tolist()
    choice, dtype = Choice(args.temperature, args.top_k, args.top_p), dtype_for(args, trained, device)
    generator = torch.Generator().manual_seed(args.seed)
    for number_ in range(args.samples):
        if number_ > 0:
            yield SEPARATOR
        drawn = sample(
            trained, prompt or [tokenizer.end_of_text], tokenizer.end_of_text, args.tokens, choice, generator, dtype
        )
        yield from characters(tokenizer, [*prompt], drawn)
    yield "\n"


def characters(tokenizer: Tokenizer, prompt: list[int], drawn: Iterator[int]) -> Iterator[str]:
    """The text of a prompt and of the tokens after it. A character may need several tokens."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    yield decoder.decode(tokenizer.decode(prompt))
    for token in drawn:
        yield decoder.decode(tokenizer.decode([token]))
    yield decoder.decode(b"", final=True)


if __name__ == "__main__":
    leave(main())
