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
import gc
import json
import math
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from training.environment import set_defaults

set_defaults()

import torch
from torch import Tensor
from torch.optim import Optimizer

from configs import TrainConfig
from model import GPT, GPTConfig
from optim import MARS, build_optimizer, clip_gradients, optimizer_metrics, record_reference_gradient
from optim.clipping import SURELY_SHORT
from optim.orthogonal import BATCH, iteration_dtype
from scripts.benchmarking.command import add_json, check_device, check_json
from scripts.benchmarking.machine import machine
from training.console import fail

WARM_UP = 2  # steps: compilation, and with the second one every tensor of the state
ITERATIONS = 5  # of Newton-Schulz
SEQUENCES, TOKENS = 2, 64  # of a batch
UPDATES = ("adamw", "record", "step")  # of what is timed: what a run does with a gradient after it took the norm

BASELINE = TrainConfig(learning_rate=1e-9, min_lr=0.0, compile_optimizer=True)  # parameters stay where they are
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

Gradients = dict[Tensor, Tensor]


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


@dataclass(frozen=True)
class Row:
    """What was found of an optimizer. Medians, in seconds; "adamw" and "copy" are from between its own steps."""

    method: str
    seconds: float
    """of a step; exact: with the recording of a reference gradient; with --norms: each with the norm before it"""
    adamw_seconds: float
    ratio: float
    ratio_of_minima: float
    copy_seconds: float
    """of a copy of all gradients"""
    bytes_per_parameter: float
    gigabytes_per_second: float
    copy_share: float
    """bytes per second relative to the copy's"""
    clip_rate: float | None
    """share of the tensors (or of the one vector) that were clipped, a mean over the steps"""
    record_in_copies: float | None
    """exact: time of the recording, in copies of all gradients"""
    operations: int
    """floating-point operations of the Newton-Schulz iterations' products"""
    products_dtype: str | None
    products_share: float | None
    """operations a second of the whole step relative to those of the products alone"""
    times: dict[str, list[float]]


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


class Bench:
    """A model with its gradients on two batches, and fused AdamW over it."""

    def __init__(self, model: GPT, repeat: int, takes_norms: bool = False) -> None:
        self.model, self.repeat, self.takes_norms = model, repeat, takes_norms
        self.device = next(model.parameters()).device
        pairs = [self._gradients() for _ in range(2)]
        self.norms = [norm for _, norm in pairs]
        """of the gradients before they were clipped"""
        self.gradients = [gradients for gradients, _ in pairs]
        self.copies = {parameter: torch.zeros_like(parameter) for parameter in model.parameters()}
        self.baseline = build_optimizer(model, BASELINE)

    def _gradients(self) -> tuple[Gradients, float]:
        """Gradients on a batch, clipped to norm 1 together, and their norm before."""
        tokens = torch.randint(self.model.config.vocab_size, (SEQUENCES, TOKENS + 1), device=self.device)
        self.model.zero_grad()
        loss = self.model(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        norm = clip_gradients(self.model.parameters(), BASELINE.grad_clip).item()
        return {p: p.grad for p in self.model.parameters() if p.grad is not None}, norm

    def row(self, name: str, config: TrainConfig) -> Row:
        """Measures a method, whose state is freed before the next one."""
        gc.collect()
        if config.compile_optimizer:
            torch.compiler.reset()  # as in a run of its own: few variants of a kernel
        optimizer = self.baseline if name == "adamw" else build_optimizer(self.model, config)
        chunks = matrix_chunks(optimizer, self.device)
        times, clip_rates = self._times(optimizer, config.exact, chunks)
        medians = {key: statistics.median(values) for key, values in times.items()}
        copied = 2 * sum(copy.nbytes for copy in self.copies.values())
        moved = step_bytes(optimizer, *self.gradients) / 2 + step_bytes(optimizer, *reversed(self.gradients)) / 2
        if self.takes_norms and not isinstance(optimizer, MARS):
            moved += copied / 2
        rate = moved / medians["step"]
        return Row(
            method=name,
            seconds=medians["step"],
            adamw_seconds=medians["adamw"],
            ratio=medians["step"] / medians["adamw"],
            ratio_of_minima=min(times["step"]) / min(times["adamw"]),
            copy_seconds=medians["copy"],
            bytes_per_parameter=moved / sum(p.numel() for p in self.copies),
            gigabytes_per_second=rate / 1e9,
            copy_share=rate / (copied / medians["copy"]),
            clip_rate=statistics.mean(clip_rates) if clip_rates else None,
            record_in_copies=medians["record"] / medians["copy"] if config.exact else None,
            operations=flops(chunks),
            products_dtype=str(iteration_dtype(self.device)).removeprefix("torch.") if chunks else None,
            products_share=ITERATIONS * medians["iteration"] / medians["step"] if chunks else None,
            times=times,
        )

    def _times(
        self, optimizer: Optimizer, exact: bool, chunks: Counter[tuple[int, int, int]]
    ) -> tuple[dict[str, list[float]], list[float]]:
        """Seconds of steps and of what they are set against, in turn, without the warm-up; clip rates of the steps."""
        parts: dict[str, Callable[[], object]] = {"adamw": self.baseline.step, "copy": self._copy}
        if exact:
            parts["record"] = lambda: record_reference_gradient(optimizer)
        if optimizer is not self.baseline:
            parts["step"] = optimizer.step
        if chunks:
            parts["iteration"] = products(chunks, iteration_dtype(self.device), self.device)
        turns: list[dict[str, float]] = []
        clip_rates: list[float] = []
        for turn in range(WARM_UP + self.repeat):
            seconds, norms = dict[str, float](), dict[str, float]()
            for part, run in parts.items():
                # Exact: the reference is of the other batch too, so that the correction is not zero.
                for parameter, grad in self.gradients[int(part == "record") if exact else turn % 2].items():
                    parameter.grad = grad
                before = self._seconds(self._take_norm) if self.takes_norms and part in UPDATES else 0.0
                seconds[part] = self._seconds(run)
                norms[part] = before
            if exact:
                seconds["step"] += seconds["record"] + norms["record"]
            for part in {"adamw", "step"} & set(seconds):
                seconds[part] += norms[part]
            turns.append({"step": seconds["adamw"]} | seconds)
            clip_rates += [value.item() for key, value in optimizer_metrics(optimizer).items() if "clip_rate" in key]
        return {part: [seconds[part] for seconds in turns[WARM_UP:]] for part in turns[0]}, clip_rates[WARM_UP:]

    def _take_norm(self) -> None:
        clip_gradients(self.model.parameters(), 0.0)

    def _copy(self) -> None:
        for parameter, copy in self.copies.items():
            copy.copy_(self.gradients[0][parameter])

    def _seconds(self, run: Callable[[], object]) -> float:
        wait = torch.cuda.synchronize if self.device.type == "cuda" else lambda: None
        wait()
        start = time.perf_counter()
        with torch.no_grad():
            run()
        wait()
        return time.perf_counter() - start


def step_bytes(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> int:
    """Bytes that a step has to read and write: the gradient is read; the parameter and each full-sized tensor of its
    state are read and written, but for the exact form's reference, which is read only, and its recording, which reads
    the gradient twice (is it finite?) and writes it once; the matrix of an orthogonal step is written and its direction
    read. Before this the norms are taken."""
    total = norm_bytes(optimizer, gradients, last)
    for group in optimizer.param_groups:
        for p in group["params"]:
            kept = {k: t.nbytes for k, t in optimizer.state[p].items() if isinstance(t, Tensor) and t.shape == p.shape}
            reference = kept.pop("reference_grad", 0)
            total += gradients[p].nbytes + 2 * p.nbytes + 2 * sum(kept.values()) + 4 * reference
            if group.get("preconditioner") == "shampoo":
                total += 2 * p.numel() * iteration_dtype(p.device).itemsize
    return total


def norm_bytes(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> int:
    """Bytes that MARS reads to find the norms before a step (see optim/clipping.py): the gradient, with the reference
    where the norm of c_t is needed. On a CPU first the gradient alone for a bound, and both only where the bound
    allows a clip."""
    total, bounds = 0, bounds_of_estimates(optimizer, gradients, last)
    for group in optimizer.param_groups if isinstance(optimizer, MARS) else []:
        name = "reference_grad" if group["exact"] else "last_grad"
        clips = group["clip"] != "none" and group["gamma"] != 0
        for p in group["params"]:
            both = gradients[p].nbytes + (optimizer.state[p][name].nbytes if clips else 0)
            if clips and p.device.type == "cpu":
                bound = bounds[p] if group["clip"] == "tensor" else math.hypot(*bounds.values())
                total += gradients[p].nbytes + (both if bound >= SURELY_SHORT else 0)
            else:
                total += both
    return total


def bounds_of_estimates(optimizer: Optimizer, gradients: Gradients, last: Gradients) -> dict[Tensor, float]:
    """Of ||c_t|| for the parameters whose c_t is clipped: (1 + k) ||g_t|| + k ||r_t||."""
    bounds = {}
    for group in optimizer.param_groups:
        if group.get("clip", "none") != "none" and group["gamma"] != 0:
            k = abs(group["gamma"]) * group["betas"][0] / (1 - group["betas"][0])
            for p in group["params"]:
                bounds[p] = (1 + k) * gradients[p].norm().item() + k * last[p].norm().item()
    return bounds


def matrix_chunks(optimizer: Optimizer, device: torch.device) -> Counter[tuple[int, int, int]]:
    """(matrices, short side, long side) of the batches that a step orthogonalises, with how many there are of each."""
    chunks: Counter[tuple[int, int, int]] = Counter()
    for group in optimizer.param_groups:
        if group.get("preconditioner") == "shampoo":
            shapes = Counter((p.shape[0], p.shape[1:].numel()) for p in group["params"])
            for (rows, columns), count in shapes.items():
                together = max(1, BATCH[device.type] // (rows * columns))
                for start in range(0, count, together):
                    chunks[min(together, count - start), min(rows, columns), max(rows, columns)] += 1
    return chunks


def flops(chunks: Counter[tuple[int, int, int]]) -> int:
    """Floating-point operations of the iterations' products: X X^T, G G and P X."""
    return ITERATIONS * sum(
        count * batch * (2 * n * n * m + 2 * n**3 + 2 * n * n * m) for (batch, n, m), count in chunks.items()
    )


def products(chunks: Counter[tuple[int, int, int]], dtype: torch.dtype, device: torch.device) -> Callable[[], None]:
    """A function that makes the products of one iteration of all matrices, into memory that is there."""
    work = []
    for (batch, n, m), count in chunks.items():
        x = (torch.randn(batch, n, m, device=device) / math.sqrt(n * m)).to(dtype)
        gram, polynomial = x.new_zeros(batch, n, n), x.new_zeros(batch, n, n)
        work.append((count, x, gram, polynomial, torch.zeros_like(x)))

    def run() -> None:
        for count, x, gram, polynomial, out in work:
            for _ in range(count):
                torch.bmm(x, x.mT, out=gram)
                torch.bmm(gram, gram, out=polynomial)
                torch.bmm(polynomial, x, out=out)

    return run


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
