"""scripts/prefetch.sh with a Python that only notes what it is asked to do."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import ROOT

Prefetch = Callable[..., tuple["subprocess.CompletedProcess[str]", list[str]]]

PYTHON = """#!/bin/sh
echo "$*" >> "$CALLS"
case "$*" in *"$FAILS"*) echo "error: no connection" >&2; exit 2;; esac
"""


@pytest.fixture
def prefetch(tmp_path: Path) -> Prefetch:
    """Runs the script in a checkout; the command that has the words `fails` in it fails. Returns what was called."""

    def prefetch(*arguments: str, fails: str = "nothing") -> tuple["subprocess.CompletedProcess[str]", list[str]]:
        checkout = tmp_path / "checkout"
        (checkout / "scripts").mkdir(parents=True)
        for name in ("scripts/prefetch.sh", "scripts/environment.sh", "requirements.txt"):
            shutil.copy(ROOT / name, checkout / name)
        python = checkout / ".venv" / "bin" / "python"
        python.parent.mkdir(parents=True)
        python.write_text(PYTHON)
        python.chmod(0o755)
        calls = tmp_path / "calls"
        done = subprocess.run(
            ["bash", str(checkout / "scripts" / "prefetch.sh"), *arguments],
            env={"PATH": "/usr/bin:/bin", "CALLS": str(calls), "FAILS": fails},
            capture_output=True,
            text=True,
            timeout=60,
        )
        prepared = [
            line.removeprefix("data/prepare.py ") for line in calls.read_text().splitlines() if "prepare" in line
        ]
        return done, prepared

    return prefetch


@pytest.mark.parametrize(
    ("arguments", "calls"),
    [
        ("", ["tokenizer", "hellaswag", "openwebtext"]),
        ("fineweb_edu --workers 16", ["tokenizer", "hellaswag", "fineweb_edu --workers 16"]),
        ("stdlib", ["stdlib"]),
        ("text a.txt --tokenizer bytes", ["text a.txt --tokenizer bytes"]),
        ("text a.txt --tokenizer=bytes", ["text a.txt --tokenizer=bytes"]),
        ("text bytes --tokenizer gpt2", ["tokenizer", "hellaswag", "text bytes --tokenizer gpt2"]),
    ],
)
def test_what_is_fetched(prefetch: Prefetch, arguments: str, calls: list[str]) -> None:
    done, called = prefetch(*arguments.split())
    assert (done.returncode, done.stderr, called) == (0, "", calls)
    assert done.stdout.splitlines()[-1].startswith("ready; ")


def test_without_hellaswag_the_data_are_prepared(prefetch: Prefetch) -> None:
    """The warning is the last word on standard error, after what may have taken an hour."""
    done, called = prefetch(fails="hellaswag")
    assert (done.returncode, called) == (0, ["tokenizer", "hellaswag", "openwebtext"])
    error, warning = done.stderr.splitlines()
    assert error == "error: no connection"
    assert warning.startswith("warning: HellaSwag is missing")
    assert warning.endswith("to fetch it later: .venv/bin/python data/prepare.py hellaswag")
    assert done.stdout.splitlines()[-1].startswith("ready; ")


@pytest.mark.parametrize("fails", ["tokenizer", "openwebtext"])
def test_what_training_needs_must_be_there(prefetch: Prefetch, fails: str) -> None:
    done, called = prefetch(fails=fails)
    assert done.returncode == 2
    assert called[-1] == fails
    assert "ready;" not in done.stdout


def test_help_fetches_nothing(tmp_path: Path) -> None:
    command = ["bash", str(ROOT / "scripts" / "prefetch.sh"), "--help"]
    done = subprocess.run(command, env={"PATH": "/usr/bin:/bin"}, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "bash scripts/prefetch.sh fineweb_edu --workers 16" in done.stdout
    assert "ready;" not in done.stdout
