"""scripts/sample.py: distributions worked out by hand, what is never drawn, text that is what a seed says."""

import io
import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.tokenizers import ByteTokenizer, GPT2Tokenizer
from model import GPT, GPTConfig
from scripts import sample as command
from scripts.evaluation.sampling import Choice, next_token_probabilities, sample
from tests.conftest import ENVIRONMENT, ROOT, Train
from tests.data.conftest import bpe_cache, bpe_files, gpt2  # noqa: F401 (fixtures)
from tests.helpers import write_tokens
from training import RunError
from training.trained import TrainedModel

ALL = Choice(temperature=1.0, top_k=0, top_p=1.0)
PROBABILITIES = [0.05, 0.4, 0.15, 0.3, 0.1]
LOGITS = torch.tensor(PROBABILITIES).log() + 7.0


@pytest.mark.parametrize(
    ("choice", "expected"),
    [
        (ALL, PROBABILITIES),
        (replace(ALL, temperature=0.0), [0, 1, 0, 0, 0]),
        # Squares: 0.0025, 0.16, 0.0225, 0.09, 0.01, together 0.285.
        (replace(ALL, temperature=0.5), [value**2 / 0.285 for value in PROBABILITIES]),
        (replace(ALL, top_k=1), [0, 1, 0, 0, 0]),
        (replace(ALL, top_k=2), [0, 4 / 7, 0, 3 / 7, 0]),
        (replace(ALL, top_k=9), PROBABILITIES),
        # 0.4 + 0.3 is below 0.75, and 0.15 more is not.
        (replace(ALL, top_p=0.75), [0, 0.4 / 0.85, 0.15 / 0.85, 0.3 / 0.85, 0]),
        (replace(ALL, top_p=0.3), [0, 1, 0, 0, 0]),
        (replace(ALL, top_p=1e-9), [0, 1, 0, 0, 0]),
        # Of the three most probable ones, with 0.85 together, 0.4 and 0.3 have 0.82.
        (replace(ALL, top_k=3, top_p=0.8), [0, 4 / 7, 0, 3 / 7, 0]),
        # After the temperature: 0.16 and 0.09 have 0.877 together.
        (replace(ALL, temperature=0.5, top_p=0.85), [0, 0.64, 0, 0.36, 0]),
        (replace(ALL, temperature=1e-9), [0, 1, 0, 0, 0]),
    ],
    ids=str,
)
def test_distributions_by_hand(choice: Choice, expected: list[float]) -> None:
    before = LOGITS.clone()
    assert next_token_probabilities(LOGITS, choice).tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(LOGITS, before)


def test_of_equal_tokens_exactly_k_remain() -> None:
    assert next_token_probabilities(torch.zeros(6), replace(ALL, top_k=3)).tolist() == pytest.approx(
        [1 / 3] * 3 + [0] * 3
    )


def test_half_precision_logits() -> None:
    kept = next_token_probabilities(LOGITS.bfloat16(), ALL)
    assert kept.dtype == torch.float32
    assert kept.tolist() == pytest.approx(torch.softmax(LOGITS.bfloat16().double(), 0).tolist(), abs=1e-6)


class Parrot(torch.nn.Module):
    """Stands for a transformer and its head: the logits of the next token depend on the last token alone."""

    def __init__(self, table: torch.Tensor, block_size: int = 8) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(table)
        self.config = GPTConfig(block_size=block_size, vocab_size=len(table))
        self.windows: list[list[int]] = []

    def transformer(self, tokens: torch.Tensor) -> torch.Tensor:
        self.windows.append(tokens[0].tolist())
        return self.table[tokens]

    def lm_head(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden


def parrot(table: torch.Tensor, tokenizer: str = "bytes") -> tuple[TrainedModel, Parrot]:
    model = Parrot(table)
    return TrainedModel(model, {}, 0, Path("parrot.pt"), tokenizer), model  # type: ignore[arg-type]


def drawn(trained: TrainedModel, prompt: list[int], count: int, choice: Choice = ALL, seed: int = 0) -> list[int]:
    return list(sample(trained, prompt, 256, count, choice, torch.Generator().manual_seed(seed)))


def test_frequencies_are_the_distribution() -> None:
    table = torch.full((272, 272), -math.inf)
    table[:, 65:70] = LOGITS
    counts = torch.bincount(torch.tensor(drawn(parrot(table.nan_to_num(neginf=-1e4))[0], [65], 1500)), minlength=272)
    for token, probability in enumerate(PROBABILITIES, 65):
        # Five standard deviations; the seed is fixed.
        assert counts[token] / 1500 == pytest.approx(probability, abs=5 * math.sqrt(probability / 1500))
    assert counts.sum() == counts[65:70].sum() == 1500


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_is_never_drawn(temperature: float) -> None:
    table = torch.zeros(272, 272)
    table[:, 257:] = 1e4
    table[:, 256] = -1e4
    trained, _ = parrot(table)
    assert trained.tokens == 257
    tokens = drawn(trained, [1], 200, replace(ALL, temperature=temperature))
    assert len(tokens) == 200
    assert max(tokens) < 256


def test_end_of_text_ends() -> None:
    table = torch.zeros(272, 272)
    for token in range(256):
        table[token, token + 1] = 100.0
    assert drawn(parrot(table)[0], [250], 50, replace(ALL, temperature=0.0)) == [251, 252, 253, 254, 255]


def test_the_window_slides() -> None:
    table = torch.zeros(272, 272)
    for token in range(256):
        table[token, token + 1] = 100.0
    trained, model = parrot(table)
    assert drawn(trained, list(range(6)), 4, replace(ALL, temperature=0.0)) == [6, 7, 8, 9]
    assert model.windows == [list(range(6)), list(range(7)), list(range(8)), list(range(1, 9))]


def test_a_diverged_model_is_named() -> None:
    with pytest.raises(RunError, match=r"parrot.pt: logits that are not finite"):
        drawn(parrot(torch.full((272, 272), math.nan))[0], [1], 1)


def test_greedy_is_the_model_s_argmax() -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=32, block_size=16, vocab_size=272)).eval()
    trained = TrainedModel(model, {}, 0, Path("a.pt"), "bytes")
    tokens = [1, 2, 3]
    for _ in range(20):
        tokens.append(int(model(torch.tensor([tokens[-16:]]))[0, -1, :257].argmax()))
    assert drawn(trained, [1, 2, 3], 20, replace(ALL, temperature=0.0)) == tokens[3:]


# ---- the command ----

Say = Callable[..., str]


@pytest.fixture
def byte_run(run_train: Train, tmp_path: Path) -> Path:
    tokens = ByteTokenizer().encode(["the cat sat on the mat. " * 200]).tolist()
    folder = write_tokens(tmp_path / "text", tokens, tokens[:100])
    (folder / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 257}')
    settings = ("--vocab_size=272", "--max_iters=120", "--eval_interval=0", "--log_interval=120")
    assert run_train(f"--dataset={folder}", *settings, out="bytes").status == 0
    return run_train.folder("bytes")


@pytest.fixture
def say(byte_run: Path, capsys: pytest.CaptureFixture[str]) -> Say:
    """What the command prints for the run."""

    def say(*arguments: Any) -> str:
        capsys.readouterr()
        status = command.main([str(byte_run), *map(str, arguments)])
        out, err = capsys.readouterr()
        assert (status, err) == (0, "")
        return out

    return say


def test_text_of_a_run(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    greedy = say("--prompt", "the cat s", "--tokens", 15, "--temperature", 0)
    assert greedy == "the cat sat on the mat. \n"
    one = say("--prompt", "the", "--tokens", 40, "--temperature", 2)
    assert one == say("--prompt", "the", "--tokens", 40, "--temperature", 2, "--seed", 0)
    assert one != say("--prompt", "the", "--tokens", 40, "--temperature", 2, "--seed", 1)
    both = say("--prompt", "the", "--tokens", 40, "--temperature", 2, "--samples", 2)
    first, second = both.split(command.SEPARATOR)
    assert (first + "\n", second != one) == (one, True)
    assert say("--tokens", 0) == "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO("é\xff".encode("latin-1"))))
    assert say("--prompt", "-", "--tokens", 0) == "\ufffd\ufffd\n"


def test_what_is_no_utf8_is_replaced(gpt2: GPT2Tokenizer) -> None:  # noqa: F811
    """A character in several tokens appears once it is whole; half of one at the end is replaced."""
    whole, half = "aé漢".encode(), "漢".encode()[:2]
    pieces = list(command.characters(ByteTokenizer(), list(whole[:2]), iter([*whole[2:], 0xFF, *half])))
    assert "".join(pieces) == "aé漢\ufffd\ufffd"
    assert pieces[:2] == ["a", "é"]
    tokens = gpt2.encode(["😀 漢"], complete=False).tolist()
    assert "".join(command.characters(gpt2, tokens[:1], iter(tokens[1:]))) == "😀 漢"


def test_mistakes(run_train: Train, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def fails(*arguments: Any) -> str:
        capsys.readouterr()
        assert command.main([str(argument) for argument in arguments]) == 2
        out, err = capsys.readouterr()
        (line,) = err.splitlines()
        assert (out, line[:7]) == ("", "error: ")
        return str(line)

    assert "arguments are required: RUN" in fails()
    assert f"{tmp_path}/gone holds no run" in fails(tmp_path / "gone")
    assert "--top_p: 0 is not allowed, only above 0 to 1" in fails(tmp_path, "--top_p", 0)
    assert "--temperature: nan is not allowed" in fails(tmp_path, "--temperature", "nan")
    assert "--top_k: invalid whole number value: '1.5'" in fails(tmp_path, "--top_k", "1.5")
    assert "--device=cuda:99" in fails(tmp_path, "--device", "cuda:99")
    unknown = run_train("--max_iters=0", out="unknown")
    assert f"{unknown.folder}/config.json does not say what the run's tokens are" in fails(unknown.folder)
    (unknown.folder / "config.json").unlink()
    assert "config.json is missing and does not say" in fails(unknown.folder)


def test_gpt2_s_files_cannot_be_had(
    run_train: Train, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run_train("--vocab_size=50304", "--n_embd=8", "--max_iters=0")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "empty"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    assert command.main([str(done.folder), "--prompt", "a"]) == 2
    assert "python data/prepare.py tokenizer --from FOLDER" in capsys.readouterr().err


@pytest.mark.slow
def test_a_reader_that_leaves(byte_run: Path) -> None:
    """As `| head` does; and standard output that is not for UTF-8 gets UTF-8 all the same."""
    words = [sys.executable, str(ROOT / "scripts" / "sample.py"), str(byte_run), "--tokens", "3000", "--prompt", "é"]
    environment = ENVIRONMENT | {"PYTHONIOENCODING": "latin-1"}
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(2) == "é".encode()
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(60) == 0
