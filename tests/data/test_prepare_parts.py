"""The parts of data preparation by themselves: cutting long texts, running ahead, the split, memory."""

import hashlib
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import pipeline, writer
from data.sources import Document
from data.tokenizers import END_OF_TEXT, ByteTokenizer, GPT2Tokenizer, Tokenizer

WORDS = [
    "word", "Word's", "it'll", "'s", "'", "''ll", "123", "4 5", "a1b2", "=" * 9, "…", "—", "!?", "_", "def f(x):", "é",
    "e\u0301", "😀", "👩‍👩‍👧", "漢字", "没有空格", "，", "。", "ひらがな", "カタカナー", "한국어", "Ünïcödé", "½", "Ⅷ",
    "\u3000", "\xa0", "\u2028", "\x1c", "\x85", "\x00", "\t", "\r\n", "\n", "\n\n\n", " ", "   ", " \n ",
    "<|endoftext|>", "<|endof", "text|>", "١٢٣",
]  # fmt: skip

ROOT = Path(__file__).resolve().parents[2]


def mixed_text(length: int, seed: int) -> str:
    generator = random.Random(seed)
    return "".join(generator.choice(WORDS) + " " * (generator.random() < 0.5) for _ in range(length))


def pieces_of(text: str, seed: int, longest: int) -> Iterator[str]:
    generator, start = random.Random(seed), 0
    while start < len(text):
        end = start + generator.randint(0, longest)
        yield text[start:end]
        start = end


@pytest.mark.parametrize("seed", range(4))
def test_cutting_anywhere_gives_the_tokens_of_the_whole(
    gpt2: GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setattr(pipeline, "BATCH", 8)
    text = mixed_text(20_000, seed)
    batches = list(pipeline.cut(pieces_of(text, seed, 50)))
    assert "".join(str(batch.texts[0]) for batch in batches) == text
    assert [batch.complete for batch in batches] == [False] * (len(batches) - 1) + [True]
    assert len(batches) > 2000
    tokens = np.concatenate([gpt2.encode(batch.texts, batch.complete) for batch in batches])
    assert tokens.tolist() == [*gpt2.encoding.encode_ordinary(text), 50256]


def test_every_character_at_a_cut(gpt2: GPT2Tokenizer) -> None:
    """Wherever the pattern cuts, before or after any character, the tokens stay the same."""
    encode = gpt2.encoding.encode_ordinary
    for code in [*range(0xD800), *range(0xE000, 0x10000), *range(0x10000, 0x3134F, 16)]:
        text = f"a{chr(code)} {chr(code)}\n{chr(code)}，漢{chr(code)}"
        places = [match.start() for match in pipeline.CUT.finditer(text)]
        parts = [text[i:j] for i, j in zip([0, *places], [*places, len(text)], strict=True)]
        assert list(chain.from_iterable(map(encode, parts))) == encode(text), hex(code)


def test_a_run_of_five_megabytes_is_not_cut(gpt2: GPT2Tokenizer) -> None:
    for run in ("a" * 5_000_000, "漢字仮名" * 420_000, " " * 5_000_000 + "x"):
        (batch,) = pipeline.cut(run[i : i + 100_000] for i in range(0, len(run), 100_000))
        assert batch.texts == [run]


def test_endless_runs_are_cut_at_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH", 10)
    monkeypatch.setattr(pipeline, "LONGEST_UNCUT_ASCII", 200)
    monkeypatch.setattr(pipeline, "LONGEST_UNCUT", 100)
    for letter, limit in (("a", 200), ("é", 100)):
        batches = list(pipeline.cut([letter * 7] * 100))
        assert [batch.size for batch in batches[:-1]] == [limit] * (700 // limit)
        assert "".join(str(batch.texts[0]) for batch in batches) == letter * 700


def test_batches_keep_documents_apart(gpt2: GPT2Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH", 100)
    texts = [mixed_text(n, n) for n in [0, 1, 3, 0, 0, 200, 2, 1, 90, 0]] + [
        "",
        "plain",
        "<|endoftext",
        "|>",
        "x" * 500,
    ]
    documents: list[Document] = [
        t if i % 2 else pieces_of(t, i, 60) if len(t) > 100 else t for i, t in enumerate(texts)
    ]
    tokens = np.concatenate([gpt2.encode(b.texts, b.complete) for b in pipeline.batches(documents)]).tolist()
    expected: list[int] = []
    for text in texts:
        expected += [*gpt2.encoding.encode_ordinary(text), 50256]
    assert tokens == expected


@pytest.mark.parametrize("name", ["gpt2", "bytes"])
def test_encode(name: str, gpt2: GPT2Tokenizer) -> None:
    tokenizer: Tokenizer = gpt2 if name == "gpt2" else ByteTokenizer()
    end = tokenizer.end_of_text
    assert tokenizer.encode([]).tolist() == []
    assert tokenizer.encode([""]).tolist() == [end]
    assert tokenizer.encode([""], complete=False).tolist() == []
    one = tokenizer.encode(["é<|endoftext|>"], complete=False)
    assert end not in one
    assert tokenizer.encode(["é<|endoftext|>", b"", "\ud83d"]).tolist() == [
        *one, end, end, *tokenizer.encode(["\ufffd"]),
    ]  # fmt: skip
    assert tokenizer.encode(["é<|endoftext|>", "x"], complete=False).tolist() == [
        *one,
        end,
        *tokenizer.encode(["x"])[:-1],
    ]
    assert tokenizer.token_bytes[tokenizer.encode(["😀 é" + END_OF_TEXT])].sum() == len(("😀 é" + END_OF_TEXT).encode())


def test_raw_bytes_stay_as_they_are() -> None:
    assert ByteTokenizer().encode([bytes(range(256))]).tolist() == list(range(257))


def test_reads_little_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "BATCH", 10)
    read = 0

    def documents() -> Iterator[Document]:
        nonlocal read
        for number in range(1, 1001):
            read = number
            yield "0123456789"

    written = 0
    for written, _ in enumerate(pipeline.encoded(pipeline.batches(documents()), ByteTokenizer(), workers=2), 1):
        assert read - written <= 4
    assert written == 1000


def test_large_batches_wait_in_small_numbers() -> None:
    read = 0

    def documents() -> Iterator[Document]:
        nonlocal read
        for number in range(1, 11):
            read = number
            yield b"x" * (6 << 20)

    for written, _ in enumerate(pipeline.encoded(pipeline.batches(documents()), ByteTokenizer(), workers=8), 1):
        assert read - written <= 1


def test_an_error_while_reading_ends_the_run() -> None:
    def documents() -> Iterator[Document]:
        yield "x" * 300_000
        raise RuntimeError("read error")

    with pytest.raises(RuntimeError, match="read error"):
        list(pipeline.encoded(pipeline.batches(documents()), ByteTokenizer(), workers=2))


@pytest.mark.parametrize("documents", [1, 2, 1000, 123_457])
def test_order_is_the_permutation_of_numpy(tmp_path: Path, documents: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer, "BLOCK", 1000)
    dtype = writer.write_order(tmp_path / "order", documents, 2357)
    expected = np.random.default_rng(2357).permutation(documents)
    assert np.array_equal(np.fromfile(tmp_path / "order", dtype), expected)


class SlowHash:
    """Still at work when the last segment is written."""

    def __init__(self) -> None:
        self.sha = hashlib.sha256()
        self.hexdigest = self.sha.hexdigest

    def update(self, content: bytes) -> None:
        time.sleep(0.002)
        self.sha.update(content)


def test_splits_in_small_segments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Documents of all lengths, with segments, groups and blocks much smaller than the corpus."""
    generator = np.random.default_rng(0)
    lengths = generator.integers(0, 60, 3000)
    lengths[[5, 77]] = 900
    documents = [[*generator.integers(0, 256, n).tolist(), 256] for n in lengths]
    np.array(list(chain.from_iterable(documents)), dtype="<u2").tofile(tmp_path / "tokens")
    np.cumsum([0, *map(len, documents)]).astype(np.int64).tofile(tmp_path / "bounds")
    monkeypatch.setattr(writer, "SEGMENT", 300)
    monkeypatch.setattr(writer, "GROUP", 70)
    monkeypatch.setattr(writer, "BLOCK", 128)
    monkeypatch.setattr(writer, "hashlib", SimpleNamespace(sha256=SlowHash))
    total = sum(map(len, documents))
    result = writer.write_splits(tmp_path, len(documents), total, ByteTokenizer(), fraction=0.1, seed=7)
    order = np.random.default_rng(7).permutation(len(documents))
    for name, part in (("val.bin", order[:300]), ("train.bin", order[300:])):
        expected = list(chain.from_iterable(documents[i] for i in part))
        content = (tmp_path / name).read_bytes()
        assert np.frombuffer(content, "<u2").tolist() == expected
        assert result["splits"][name.removesuffix(".bin")] == {
            "tokens": len(expected),
            "documents": len(part),
            "bytes": len(expected) - len(part),
            "sha256": hashlib.sha256(content).hexdigest(),
        }


# ---- memory ----


def peak_memory(tmp_path: Path, environment: dict[str, str], *arguments: str) -> float:
    """Megabytes that a preparation with two workers takes at most."""
    code = (
        "import resource, subprocess, sys; status = subprocess.call(sys.argv[1:]);"
        "print(status, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    command = [sys.executable, str(ROOT / "data/prepare.py"), "text", *arguments, "--out", "out", "--workers", "2"]
    done = subprocess.run(
        [sys.executable, "-c", code, *command],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    status, peak = map(int, done.stdout.split()[-2:])
    assert status == 0, done.stderr
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["txt", "jsonl", "parquet", "letters", "characters"])
def test_memory(tmp_path: Path, environment: dict[str, str], kind: str) -> None:
    """One huge document, millions of small ones, one huge row group, 20 MB without a place to cut: under 1 GB."""
    sentence = "The quick brown fox jumps over the lazy dog, and number {} follows it into the next line.\n"
    text = "".join(map(sentence.format, range(100_000)))
    path = tmp_path / f"a.{kind if kind in ('jsonl', 'parquet') else 'txt'}"
    if kind == "jsonl":
        with path.open("w") as file:
            for start in range(0, 2_000_000):
                file.write(json.dumps({"text": text[start : start + 100]}) + "\n")
    elif kind == "parquet":
        rows = [text[start : start + 5000] for start in range(0, 4_000_000, 100)]
        pq.write_table(pa.table({"text": rows}), path, row_group_size=len(rows))
    else:
        content = {"txt": text * 22, "letters": "x" * 20_000_000, "characters": "漢" * 7_000_000}[kind]
        path.write_text(content)
    assert peak_memory(tmp_path, environment, str(path)) < 1000
