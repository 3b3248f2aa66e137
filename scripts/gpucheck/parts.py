"""The parts, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from scripts.gpucheck.pair import run_pair
from scripts.gpucheck.resume import run_resume
from scripts.gpucheck.running import PartFailed, Work
from scripts.gpucheck.sizes import SIZES
from training.folder import read_json


@dataclass(frozen=True)
class Part:
    name: str
    share: float
    """seconds of eight minutes"""
    run: Callable[[Work], None]


def run_training_benchmark(work: Work) -> None:
    """The plain way of training against this repository's."""
    benchmark(work, "scripts/bench_training.py", SIZES[work.device].bench_training)


def run_optimizer_benchmark(work: Work) -> None:
    """A step of each optimizer against fused AdamW's."""
    benchmark(work, "scripts/bench_optimizers.py", SIZES[work.device].bench_optimizers)
    for row in work.figures["rows"]:
        del row["times"]


def benchmark(work: Work, script: str, options: tuple[str, ...]) -> None:
    """A script that writes its own JSON, which becomes the part's figures."""
    work.needs(script)
    file = work.folder / "figures.json"
    work.python((script, f"--device={work.device}", f"--json={file}", *options))
    work.figures.update(read_json(file))
    if not work.figures:
        raise PartFailed(f"{script} wrote no figures")


def run_tests(work: Work) -> None:
    """The tests that need a GPU."""
    file = work.folder / "junit.xml"
    # Without the project's options: an environment for training need not have pytest's plugins.
    pytest = ("-m", "pytest", "tests/gpu", "-m", "gpu", "-q", "-o", "addopts=--import-mode=importlib")
    (status,) = work.python((*pytest, "-p", "no:cacheprovider", f"--junitxml={file}"), may_fail=True)
    if not file.exists():
        raise PartFailed(f"pytest ended with status {status} and no results\n{work.last_output}")
    work.figures.update(counted(file))
    expected = "passed" if work.device == "cuda" else "skipped"
    if status != 0 or not work.figures[expected]:
        raise PartFailed(f"pytest ended with status {status}\n{work.last_output}")


def counted(file: Path) -> dict[str, Any]:
    """How many tests passed, were skipped, failed or could not start; the longest, and those that did not pass."""
    cases = list(ElementTree.parse(file).iter("testcase"))
    ends: dict[str, list[str]] = {"skipped": [], "failure": [], "error": []}
    for case in cases:
        for kind, names in ends.items():
            if case.find(kind) is not None:
                names.append(f"{case.get('classname')}::{case.get('name')}")
    longest = sorted(cases, key=lambda case: -float(case.get("time", "0")))[:5]
    not_passed = {name for names in ends.values() for name in names}
    return {
        "passed": len(cases) - len(not_passed),
        "skipped": len(ends["skipped"]),
        "failed": len(ends["failure"]),
        "errors": len(ends["error"]),
        "not_passed": sorted(set(ends["failure"]) | set(ends["error"])),
        "longest": {str(case.get("name")): float(case.get("time", "0")) for case in longest},
    }


PARTS = (
    Part("training", 110, run_training_benchmark),
    Part("optimizers", 60, run_optimizer_benchmark),
    Part("pair", 170, run_pair),
    Part("resume", 48, run_resume),
    Part("tests", 80, run_tests),
)
