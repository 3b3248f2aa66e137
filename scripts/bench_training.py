#!/usr/bin/env python3
"""Times an update of a GPT made in two ways, and holds them against each other:

- the plain way: float32, no compiler, attention matrices and logits written out, AdamW not fused;
- ours: what `train.py` does with the settings that `auto` stands for on this machine.

    python scripts/bench_training.py [--layers 6 --width 384 --vocab 50304 ...] [--device cuda] [--json FILE]
    python scripts/bench_training.py --processes 2      each way by several processes on a CPU, a batch each

Both make the same updates on the same batches (the source of Python's standard library, words as tokens), in turn,
each in a process of its own, since how memory is allocated is a process's. A third process, ours in float32, shows
which part of a difference between their losses is bfloat16's. Ratios are of medians over the rounds. `sync` is what
an update waits for other processes' gradients, from the moment when its own last ones are sent.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from configs import ConfigError, TrainConfig
from scripts.benchmarking.command import add_json, check_device, check_json
from scripts.benchmarking.corpus import write_words
from scripts.benchmarking.machine import machine
from scripts.benchmarking.ways import (
    OURS,
    OURS_FLOAT32,
    PARTS,
    PLAIN,
    Seat,
    Setting,
    Updates,
    Way,
    environment_of,
    serve,
)
from training import RunError
from training.console import fail

SPEED, MEMORY, LOSS, LOSS_FLOAT32 = 2.8, 0.5, 1e-2, 1e-4  # what is to be reached on a CPU with bfloat16 instructions


@dataclass(frozen=True)
class Outcome:
    """What was measured of a way."""

    name: str
    setting: Setting
    tokens_per_second: float
    peak_bytes: int
    parts: dict[str, float]
    """median seconds of an update by part"""
    losses: list[float]
    mfu: float | None


class Trainee:
    """Processes that train in one way, together.

    Args:
        folder: of the tokens, train.bin; and for files of its own.
        threads: of each process; None: torch's choice.
    """

    def __init__(self, way: Way, config: TrainConfig, folder: Path, processes: int, threads: int | None) -> None:
        self.way = way
        self._connections: list[Connection] = []
        self._processes: list[SpawnProcess] = []
        context, meeting = multiprocessing.get_context("spawn"), folder / f"meeting-{way.name}"
        with environment_of(way):
            for rank in range(processes):
                ours, theirs = multiprocessing.Pipe()
                given = (way, config, folder / "train.bin", Seat(rank, processes, meeting), threads, theirs)
                self._processes.append(context.Process(target=serve, args=given, daemon=True))
                self._processes[-1].start()
                self._connections.append(ours)
                theirs.close()
        self._receive()

    def call(self, name: str, *arguments: Any) -> Any:
        """A method of each `Trainer`; the first one's result."""
        for connection in self._connections:
            connection.send((name, arguments))
        return self._receive()

    def end(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()

    def _receive(self) -> Any:
        values = []
        for connection in self._connections:
            try:
                values.append(connection.recv())
            except EOFError:
                raise RunError(f"{self.way.name}: its process ended (out of memory?)") from None
            if isinstance(values[-1], Exception):
                raise RunError(f"{self.way.name}: {type(values[-1]).__name__}: {values[-1]}")
        return values[0]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    sizes = {"layers": 6, "heads": 6, "width": 384, "vocab": 50304, "block": 256, "batch": 8}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rounds", type=int, default=10, help="times that the ways take turns")
    parser.add_argument("--updates", type=int, default=5, help="updates of a turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--processes", type=int, default=1, help="that make each update together, on a CPU")
    parser.add_argument("--threads", type=int, help="of a process on a CPU; torch's choice, or the cores shared out")
    parser.add_argument("--compile", choices=("auto", "true", "false"), default="auto", help="ours")
    parser.add_argument("--chunked_loss", choices=("auto", "true", "false"), default="auto", help="ours")
    add_json(parser)
    args = parser.parse_args(argv)
    for name in (*sizes, "rounds", "updates", "processes"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name}: {getattr(args, name)} must be 1 or more")
    if args.processes > 1 and args.device == "cuda":
        parser.error("argument --processes: several need --device cpu")
    if args.processes > 1 and args.threads is None:
        args.threads = max(1, (os.cpu_count() or 1) // args.processes)
    check_device(parser, args.device)
    check_json(parser, args.json)
    return args


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    try:
        config = config_of(args)
        with tempfile.TemporaryDirectory() as folder:
            write_words(Path(folder) / "train.bin", args.vocab)
            outcomes = measure(args, config, Path(folder))
    except (ConfigError, RunError) as error:
        fail(str(error))
        return 2 if isinstance(error, ConfigError) else 1
    report = values(args, outcomes)
    print("\n".join(lines(args, outcomes, report)))
    if args.json:
        args.json.write_text(json.dumps(report, indent=2) + "\n")
    return 0


def config_of(args: argparse.Namespace) -> TrainConfig:
    switches: dict[str, Any] = {"auto": "auto", "true": True, "false": False}
    return TrainConfig(
        n_layer=args.layers,
        n_head=args.heads,
        n_embd=args.width,
        vocab_size=args.vocab,
        block_size=args.block,
        batch_size=args.batch,
        total_batch_size=args.batch * args.processes,
        max_iters=args.rounds * args.updates + 1,
        warmup_iters=10,
        learning_rate=1e-3,
        min_lr=1e-4,
        device=args.device,
        compile=switches[args.compile],
        chunked_loss=switches[args.chunked_loss],
    )


def measure(args: argparse.Namespace, config: TrainConfig, folder: Path) -> list[Outcome]:
    """Plain, ours, and ours in float32."""
    with trainees(args, config, folder) as all_ways:
        made: list[list[Updates]] = [[] for _ in all_ways]
        peaks = [0 for _ in all_ways]
        for trainee in all_ways:
            trainee.call("run", 1)  # the memory of the second update has the optimizer's state from its beginning
            trainee.call("peak_memory")
        for _ in range(args.rounds):
            for place, trainee in enumerate(all_ways):
                made[place].append(trainee.call("run", args.updates))
                peaks[place] = max(peaks[place], trainee.call("peak_memory"))
        settings = [trainee.call("setting") for trainee in all_ways]
    ways = [trainee.way for trainee in all_ways]
    return [outcome(args, *of_way) for of_way in zip(ways, settings, made, peaks, strict=True)]


@contextmanager
def trainees(args: argparse.Namespace, config: TrainConfig, folder: Path) -> Iterator[list[Trainee]]:
    started: list[Trainee] = []
    try:
        for way in (PLAIN, OURS, OURS_FLOAT32):  # one after another: they would disturb each other's start
            started.append(Trainee(way, config, folder, args.processes, args.threads))
        yield started
    finally:
        for trainee in started:
            trainee.end()


def outcome(args: argparse.Namespace, way: Way, setting: Setting, made: list[Updates], peak: int) -> Outcome:
    updates = [seconds for turn in made for seconds in turn.seconds]
    rate = args.batch * args.processes * args.block / statistics.median(sum(seconds.values()) for seconds in updates)
    return Outcome(
        name=way.name,
        setting=setting,
        tokens_per_second=rate,
        peak_bytes=peak,
        parts={part: statistics.median(seconds[part] for seconds in updates) for part in PARTS},
        losses=[loss for turn in made for loss in turn.losses],
        mfu=rate * setting.flops_per_token / setting.peak_flops if setting.peak_flops else None,
    )


def values(args: argparse.Namespace, outcomes: list[Outcome]) -> dict[str, Any]:
    """Everything, as JSON has it."""
    plain, ours, in_float32 = outcomes
    ratios = {
        "tokens_per_second": ours.tokens_per_second / plain.tokens_per_second,
        "peak_memory": ours.peak_bytes / plain.peak_bytes if plain.peak_bytes else None,
        "loss_difference": abs(ours.losses[-1] - plain.losses[-1]),
        "loss_difference_float32": abs(in_float32.losses[-1] - plain.losses[-1]),
        "tokens_per_second_float32": in_float32.tokens_per_second / plain.tokens_per_second,
        "peak_memory_float32": in_float32.peak_bytes / plain.peak_bytes if plain.peak_bytes else None,
    }
    settings = {key: value for key, value in vars(args).items() if key != "json"}
    return {"settings": settings, "machine": machine(args.device), "ratios": ratios, "ways": [*map(asdict, outcomes)]}


def lines(args: argparse.Namespace, outcomes: list[Outcome], report: dict[str, Any]) -> Iterator[str]:
    plain, ours, _ = outcomes
    ratios = report["ratios"]
    config = ours.setting.config
    yield (
        f"GPT of {args.layers} layers, width {args.width}, vocabulary {args.vocab}: {ours.setting.parameters:,} "
        f"parameters; updates of {args.batch} x {args.block} tokens. {report['machine']}"
    )
    yield f"ours: {config['dtype']}, compile={config['compile']}, chunked_loss={config['chunked_loss']}\n"
    head = f"{'':16}{'tokens/s':>10}{'ratio':>7}{'peak':>10}{'ratio':>7}{'loss':>9}" + "".join(
        f"{p:>11}" for p in PARTS
    )
    yield head
    yield "-" * len(head)
    for way in outcomes:
        memory = f"{way.peak_bytes / plain.peak_bytes:7.2f}" if plain.peak_bytes else f"{'-':>7}"
        yield (
            f"{way.name:16}{way.tokens_per_second:10,.0f}{way.tokens_per_second / plain.tokens_per_second:7.2f}"
            f"{way.peak_bytes / 1e6:7,.0f} MB{memory}{way.losses[-1]:9.4f}"
            + "".join(f"{1e3 * way.parts[part]:8.1f} ms" for part in PARTS)
        )
    yield f"\nFirst update: {', '.join(f'{way.name} {way.setting.first_update:.1f} s' for way in outcomes)}."
    for way in outcomes:
        if way.mfu is not None:
            yield f"MFU, {way.name}: {100 * way.mfu:.1f} %"
    count = len(ours.losses) + 2
    yield f"tokens a second, ours over plain (wanted: {SPEED}): {ratios['tokens_per_second']:.2f}"
    if ratios["peak_memory"] is not None:
        yield f"peak memory, ours over plain (at most {MEMORY}): {ratios['peak_memory']:.2f}"
    yield f"loss of update {count}, ours less plain (at most {LOSS:g}): {ratios['loss_difference']:.1e}"
    yield f"the same in float32 (at most {LOSS_FLOAT32:g}): {ratios['loss_difference_float32']:.1e}"


if __name__ == "__main__":
    sys.exit(main())
