"""The shell scripts, under the linter for such."""

import shutil
import subprocess

import pytest

from tests.conftest import ROOT


def test_shellcheck_finds_nothing() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("shellcheck is not installed (Debian: apt install shellcheck)")
    scripts = [*(ROOT / "scripts").glob("*.sh"), *(ROOT / "scripts").glob("*.sbatch"), ROOT / ".ci" / "run"]
    assert len(scripts) >= 5
    done = subprocess.run(["shellcheck", *scripts], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
