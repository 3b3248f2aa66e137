#!/usr/bin/env python3
"""How long a step of each optimizer takes on the tensors of GPT-2, relative to torch's fused AdamW.

    python scripts/bench_optimizers.py [--optimizers mars-adamw mars-lion] [--json FILE]

Steps alternate with fused AdamW's, with a copy of all gradients and with the matrix products of a Newton-Schulz
iteration, so that another program on the machine slows all of them; ratios are of medians. The gradients are the
model's on two batches of random tokens in turn, clipped as in a run.

With --norms what is timed is what an update does: the norm of the gradient is taken, as train.py takes it to clip, and
then the step made. That is more work for AdamW, and none for MARS, which finds these norms otherwise by itself.

Bytes are those that the method has to move, each tensor once a pass; of MARS-Shampoo and Muon without what the products
move. A copy counts as a read and a write; but a CPU also reads what a copy is about to overwrite, so that an optimizer,
which writes what it has read, can move more bytes a second than a copy.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

import torch

from model import GPT, GPTConfig
from scripts.benchmarking.command import add_json, check_device, check_json
from scripts.benchmarking.counting import ITERATIONS
from scripts.benchmarking.machine import machine
from scripts.benchmarking.steps import BASELINE, Bench, Row
from training.console import fail

PUBLISHED = replace(BASELINE, optimizer="mars-adamw", beta1=0.95, beta2=0.99, betas_1d=(0.9, 0.95))
SHAMPOO = replace(PUBLISHED, optimizer="mars-shampoo", embedding_adamw=True)
METHODS = {
    "adamw": BASELINE,
    "mars-adamw": PUBLISHED,
    "mars-adamw-global": replace(PUBLISHED, mars_clip="global"),
    "mars-adamw-unclipped": replace(PUBLISHED, mars_clip="none"),
    "mars-adamw-bfloat16": replace(PUBLISHED, mars_last_grad="bfloat16"),
    "mars-adamw-exact": replace(PUBLISHED, exact=True),
    "mars-lion": replace(PUBLISHED, optimizer="mars-lion"),
    "lion": replace(BASELINE, optimizer="lion", beta2=0.99),
    "mars-shampoo": SHAMPOO,
    "muon": replace(BASELINE, optimizer="muon", beta1=0.95),
    "mars-shampoo-embeddings": replace(SHAMPOO, embedding_adamw=False),
    "mars-adamw-eager": replace(PUBLISHED, compile_optimizer=False),
}
DEFAULT = list(METHODS)[:-2]


@dataclass(frozen=True)
class Target:
    """What the project set out to reach."""

    text: str
    method: str
    field: str
    limit: float
    at_most: bool = True


TARGETS = (
    Target("MARS-AdamW at most 1.7 times fused AdamW", "mars-adamw", "ratio", 1.7),
    Target("MARS-Lion at most 1.5 times fused AdamW", "mars-lion", "ratio", 1.5),
    Target("exact: recording takes at most one copy of the gradients", "mars-adamw-exact", "record_in_copies", 1.0),
    Target("MARS-Shampoo at least 60 % of the products' rate", "mars-shampoo", "products_share", 0.6, at_most=False),
)


class ArgumentError(Exception):
    """Arguments that cannot be used; the message is for the user."""


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"{message} (python scripts/bench_optimizers.py --help lists what is allowed)")


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = Parser(
        prog="python scripts/bench_optimizers.py",
        description="Time of an optimizer's step on the tensors of GPT-2, relative to torch's fused AdamW.",
    )
    sizes = {
        "layers": (12, 1, "transformer blocks"),
        "width": (768, 1, "of the residual stream"),
        "vocab": (50304, 2, "rows of the token embedding"),
        "repeat": (7, 1, "measured steps of each optimizer"),
        "threads": (None, 1, "of torch on a CPU; none: as many as it takes"),
    }
    for name, (default, _, meaning) in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=f"{meaning} (default: {default})")
    parser.add_argument(
        "--optimizers", metavar="NAME", nargs="+", choices=METHODS, default=DEFAULT, help=" ".join(METHODS)
    )
    add_json(parser)
    parser.add_argument("--norms", action="store_true", help="take the gradient's norm before each step, and time both")
    parser.add_argument("--no-compile", action="store_true", help="step eagerly; several times slower")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    args = parser.parse_args(argv)
    for name, (_, lowest, _) in sizes.items():
        if (value := getattr(args, name)) is not None and value < lowest:
            parser.error(f"argument --{name}: {value} must be {lowest} or more")
    check_device(parser, args.device)
    check_json(parser, args.json)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        rows = []
        for row in measure(args):
            rows.append(row)
            print("\n".join(row_lines(row)), flush=True)
        print("\n".join(["", machine(args.device), *(outcome_line(**outcome) for outcome in outcomes(rows))]))
        if args.json:
            write_json(args.json, rows, args)
    except ArgumentError as error:
        fail(str(error))
        return 2
    return 0


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each method, the baseline first. Prints what is measured and the table's head before."""
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    torch.manual_seed(1)
    heads = args.width // 64 if args.width % 64 == 0 else 1
    config = GPTConfig(n_layer=args.layers, n_head=heads, n_embd=args.width, vocab_size=args.vocab)
    bench = Bench(GPT(config).to(args.device), args.repeat, args.norms)
    norms = " and ".join(f"{norm:.2f}" for norm in bench.norms)
    print(f"GPT-2 of {args.layers} layers, width {args.width}, vocabulary {args.vocab}:", end=" ")
    print(f"{bench.model.num_parameters():,} parameters in {len(bench.copies)} tensors.")
    print(
        f"Gradients of norm {norms}, clipped to 1. Medians of {args.repeat} {'updates' if args.norms else 'steps'}.\n"
    )
    print("\n".join(table_head()), flush=True)
    for name in ["adamw", *(name for name in dict.fromkeys(args.optimizers) if name != "adamw")]:
        compiled = METHODS[name].compile_optimizer is True and not args.no_compile
        yield bench.row(name, replace(METHODS[name], compile_optimizer=compiled))


def table_head() -> list[str]:
    head = (
        f"{'optimizer':23}{'ratio':>7}{'step':>11}{'adamw':>11}{'bytes/param':>13}{'GB/s':>8}{'of copying':>12}"
        f"{'clip rate':>11}"
    )
    return [head, "-" * len(head)]


def row_lines(row: Row) -> list[str]:
    """The table's line, and in more of them what only some methods have."""
    rate = "-" if row.clip_rate is None else f"{100 * row.clip_rate:.1f} %"
    lines = [
        f"{row.method:23}{row.ratio:7.2f}{row.seconds:9.3f} s{row.adamw_seconds:9.3f} s{row.bytes_per_parameter:13.1f}"
        f"{row.gigabytes_per_second:8.1f}{100 * row.copy_share:10.0f} %{rate:>11}"
    ]
    if row.record_in_copies is not None:
        record = statistics.median(row.times["record"])
        lines.append(f"    of which recording {record:.3f} s, {row.record_in_copies:.2f} copies of the gradients")
    if row.products_share is not None:
        alone = row.operations / ITERATIONS / statistics.median(row.times["iteration"])
        lines.append(
            f"    {row.operations / 1e9:.0f} Gflop of {row.products_dtype} products: {alone / 1e9:.0f} Gflop/s "
            f"alone, {row.operations / row.seconds / 1e9:.0f} over the step, {100 * row.products_share:.0f} %"
        )
    return lines


def outcomes(rows: list[Row]) -> Iterator[dict[str, Any]]:
    """Each target with what was measured, None where nothing was."""
    by_method = {row.method: row for row in rows}
    for target in TARGETS:
        value = getattr(by_method.get(target.method), target.field, None)
        reached = value is not None and (value <= target.limit if target.at_most else value >= target.limit)
        yield {"target": target.text, "value": value, "reached": reached if value is not None else None}


def outcome_line(target: str, value: float | None, reached: bool | None) -> str:
    return f"{target:58}" + ("not measured" if value is None else f"{'reached' if reached else 'missed'}: {value:.3f}")


def write_json(path: Path, rows: list[Row], args: argparse.Namespace) -> None:
    settings = {name: getattr(args, name) for name in ("layers", "width", "vocab", "repeat", "device")}
    values: dict[str, Any] = {
        **settings,
        "compile": not args.no_compile,
        "norms": args.norms,
        "machine": machine(args.device),
        "rows": [asdict(row) for row in rows],
        "targets": list(outcomes(rows)),
    }
    try:
        path.write_text(json.dumps(values, indent=2) + "\n")
    except OSError as problem:
        raise ArgumentError(f"{path.resolve()} cannot be written: {problem.strerror or problem}") from None


if __name__ == "__main__":
    sys.exit(main())
