"""The command data/prepare.py, as a user runs it, against plain recomputations."""

import gzip
import json
import math
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard

from data.tokenizers import GPT2Tokenizer

ROOT = Path(__file__).resolve().parents[2]

SPECIAL = [
    "emoji 😀 and 👩‍👩‍👧‍👧 in a line",
    "漢字とひらがな、没有空格的中文。",
    "an empty line\n\nin the middle, and an end of line\r\n",
    "",
    "this spells <|endoftext|> inside",
    "<|endoftext|>",
    "   spaces   \t tabs\n\n\n   ",
    "it's we'll they've 'quoted'",
    "a lone surrogate \ud83d here",
]
Run = Callable[..., "subprocess.CompletedProcess[str]"]

DOCUMENTS = SPECIAL + [f"Document {i} of many, {'word ' * (i % 7)}ends." for i in range(2000)]
Fails = Callable[..., str]


def valid(text: str) -> str:
    return text.replace("\ud83d", "\ufffd")


def write_jsonl(path: Path, documents: list[str], field: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": 1, field: text}) + "\n" for text in documents))
    return path


def read(folder: Path) -> tuple[list[int], list[int], dict[str, Any]]:
    train, val = (np.fromfile(folder / name, dtype="<u2").tolist() for name in ("train.bin", "val.bin"))
    return train, val, json.loads((folder / "meta.json").read_text())


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def split(tokens: list[int], end: int) -> list[list[int]]:
    documents: list[list[int]] = [[]]
    for token in tokens:
        if token == end:
            documents.append([])
        else:
            documents[-1].append(token)
    assert documents.pop() == [], "the last document has no end-of-text"
    return documents


# ---- what comes out ----


@pytest.mark.parametrize("fraction", [0.0005, 0.3])
def test_equals_the_split_of_datasets_and_the_tokens_of_tiktoken(
    run: Run, tmp_path: Path, gpt2: GPT2Tokenizer, fraction: float
) -> None:
    import datasets

    run("text", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out", "--val-fraction", fraction)
    train, val, meta = read(tmp_path / "out")
    dataset = datasets.Dataset.from_dict({"text": [valid(text) for text in DOCUMENTS]})
    parts = dataset.train_test_split(test_size=fraction, seed=2357, shuffle=True)
    for tokens, texts, name in ((train, parts["train"]["text"], "train"), (val, parts["test"]["text"], "val")):
        expected: list[int] = []
        for text in texts:
            expected += [*gpt2.encoding.encode_ordinary(text), 50256]
        assert tokens == expected
        assert meta["splits"][name]["tokens"] == len(expected)
        assert meta["splits"][name]["documents"] == len(texts)
        assert meta["splits"][name]["bytes"] == sum(len(text.encode()) for text in texts)
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"], meta["dtype"]) == (
        "gpt2",
        50257,
        50256,
        "uint16",
    )


def test_bytes_are_the_bytes_of_the_text(run: Run, tmp_path: Path) -> None:
    run("text", write_jsonl(tmp_path / "a.jsonl", SPECIAL), "--out", "out", "--tokenizer", "bytes")
    train, val, meta = read(tmp_path / "out")
    documents = [bytes(tokens) for tokens in split(train + val, 256)]
    assert sorted(documents) == sorted(valid(text).encode() for text in SPECIAL)
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("bytes", 257, 256)


def test_unigram_loss(run: Run, tmp_path: Path) -> None:
    run("text", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out", "--tokenizer", "bytes")
    train, val, meta = read(tmp_path / "out")
    counts = [1 + train.count(token) for token in range(257)]
    expected = sum(math.log(sum(counts) / counts[token]) for token in val[1:]) / len(val[1:])
    assert meta["unigram_loss"] == pytest.approx(expected, rel=1e-12)


def test_any_number_of_workers_and_a_second_run_give_the_same_bytes(command: Run, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*DOCUMENTS, "long " * 200_000, *DOCUMENTS])
    for folder, workers in (("one", 1), ("two", 2), ("five", 5)):
        command("text", source, "--out", folder, "--workers", workers)
    first = contents(tmp_path / "one")
    assert sorted(first) == ["meta.json", "train.bin", "val.bin"]
    assert first == contents(tmp_path / "two") == contents(tmp_path / "five")
    before = (tmp_path / "one/train.bin").stat()
    assert "already prepared" in command("text", source, "--out", "one", "--workers", 2).stdout
    assert (tmp_path / "one/train.bin").stat() == before
    command("text", source, "--out", "one", "--force")
    assert (tmp_path / "one/train.bin").stat().st_ino != before.st_ino
    assert contents(tmp_path / "one") == first


def test_other_arguments_need_force(command: Run, command_fails: Fails, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    command("text", source, "--out", "out")
    line = command_fails("text", source, "--out", "out", "--split-seed", 1)
    assert str(tmp_path / "out") in line
    assert "split_seed" in line
    assert "--force" in line
    assert "--out" in line
    command("text", source, "--out", "out", "--split-seed", 1, "--force")
    assert read(tmp_path / "out")[2]["arguments"]["split_seed"] == 1


def test_foreign_token_files_are_not_overwritten(run: Run, fails: Fails, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/train.bin").write_bytes(b"12345678")
    assert "--force" in fails("text", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out")
    assert contents(tmp_path / "out") == {"train.bin": b"12345678"}


def test_one_document_is_cut_by_tokens(run: Run, tmp_path: Path, gpt2: GPT2Tokenizer) -> None:
    text = "One document with emoji 😀 and words.\n" * 100
    (tmp_path / "a.txt").write_text(text)
    assert "one document" in run("text", "a.txt", "--out", "out").stdout
    train, val, meta = read(tmp_path / "out")
    assert train + val == [*gpt2.encoding.encode_ordinary(text), 50256]
    assert len(val) == len(train + val) // 10
    assert meta["splits"]["train"]["bytes"] + meta["splits"]["val"]["bytes"] == len(text.encode())


@pytest.mark.parametrize("fraction", [0.0005, 0.99])
@pytest.mark.parametrize("count", [2, 3])
def test_few_documents_give_each_split_one(run: Run, tmp_path: Path, count: int, fraction: float) -> None:
    run("text", write_jsonl(tmp_path / "a.jsonl", SPECIAL[:count]), "--out", "out", "--val-fraction", fraction)
    splits = read(tmp_path / "out")[2]["splits"]
    assert sorted((splits["train"]["documents"], splits["val"]["documents"])) == [1, count - 1]


def test_max_documents_and_max_tokens_take_the_first_part(run: Run, tmp_path: Path, gpt2: GPT2Tokenizer) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", DOCUMENTS)
    run("text", source, "--out", "a", "--max-documents", 5)
    train, val, _ = read(tmp_path / "a")
    expected = [gpt2.encoding.encode_ordinary(text) for text in DOCUMENTS[:5]]
    assert sorted(split(train + val, 50256)) == sorted(expected)
    for limit in (len(expected[0]) + 1 + len(expected[1]) + 1, len(expected[0]) + 7):
        run("text", source, "--out", "b", "--max-tokens", limit, "--force")
        train, val, _ = read(tmp_path / "b")
        assert len(train + val) == limit
        second = expected[1][: limit - len(expected[0]) - 2]
        assert sorted(split(train + val, 50256)) == sorted([expected[0], second])


def test_stdlib(command: Run, tmp_path: Path) -> None:
    command("stdlib", "--out", "out", "--max-documents", 30)
    train, val, meta = read(tmp_path / "out")
    import sysconfig

    root = Path(sysconfig.get_path("stdlib"))
    first = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py") if path.stat().st_size)
    first = [name for name in first if not name.startswith(("site-packages/", "dist-packages/"))][:30]
    assert sorted(map(bytes, split(train + val, 256))) == sorted((root / name).read_bytes() for name in first)
    assert meta["tokenizer"] == "bytes"
    assert meta["arguments"]["python"].endswith(sys.version.split()[0])


# ---- kinds of files ----


def test_all_kinds_of_files_give_the_same_documents(run: Run, tmp_path: Path) -> None:
    documents = [valid(text) for text in SPECIAL]
    lines = write_jsonl(tmp_path / "a.jsonl", documents).read_bytes()
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines[:100]) + gzip.compress(lines[100:]))
    compress = zstandard.ZstdCompressor().compress
    (tmp_path / "a.jsonl.zst").write_bytes(compress(lines[:100]) + compress(lines[100:]))
    (tmp_path / "b.jsonl").write_bytes(b"\xef\xbb\xbf\n  \n" + lines.replace(b"\n", b"\r\n\n"))
    table = pa.table({"id": range(len(documents)), "text": documents})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "texts/sub").mkdir(parents=True)
    for i, text in enumerate(documents):
        path = tmp_path / "texts" / ("sub" if i >= 5 else ".") / f"{i}.txt"
        path.write_bytes((b"\xef\xbb\xbf" if i % 2 else b"") + text.encode())
    (tmp_path / "texts/other.md").write_text("not read")
    (tmp_path / "texts/.hidden.txt").write_text("not read")
    results = []
    for source in ("a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "b.jsonl", "a.parquet", "texts"):
        run("text", source, "--out", "out", "--force")
        results.append(read(tmp_path / "out")[:2])
    assert all(result == results[0] for result in results)


def test_other_field(run: Run, tmp_path: Path) -> None:
    run("text", write_jsonl(tmp_path / "a.jsonl", SPECIAL[:4], "body"), "--out", "a", "--text-field", "body")
    run("text", write_jsonl(tmp_path / "b.jsonl", SPECIAL[:4]), "--out", "b")
    assert read(tmp_path / "a")[:2] == read(tmp_path / "b")[:2]


# ---- errors ----


def test_errors_of_files(fails: Fails, tmp_path: Path) -> None:
    to_bytes = ("--out", "out", "--tokenizer", "bytes")
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": "bad"\n')
    assert f"{tmp_path / 'a.jsonl'}:2: " in fails("text", "a.jsonl", *to_bytes)
    (tmp_path / "b.jsonl").write_text('{"text": "good"}\n\n{"body": "x", "id": 1}\n')
    line = fails("text", "b.jsonl", *to_bytes)
    assert f"{tmp_path / 'b.jsonl'}:3: " in line
    assert "body, id" in line
    for value in ("null", '{"text": null}', '{"text": 3}', "[1]", '"text"', '{"text": "\xff"}'):
        (tmp_path / "c.jsonl").write_text(value, encoding="latin-1")
        assert f"{tmp_path / 'c.jsonl'}:1: " in fails("text", "c.jsonl", *to_bytes)
    (tmp_path / "d.txt").write_bytes(b"x" * 300_000 + "é".encode()[:1] + b"yz")
    line = fails("text", "d.txt", *to_bytes)
    assert str(tmp_path / "d.txt") in line
    assert "byte 300000" in line
    assert "--encoding-errors replace" in line
    (tmp_path / "e.txt").write_bytes(b"x" * (2**18 - 1) + "é".encode()[:1])
    assert f"byte {2**18 - 1} " in fails("text", "e.txt", *to_bytes)
    pq.write_table(pa.table({"body": ["x"], "id": [1]}), tmp_path / "f.parquet")
    line = fails("text", "f.parquet", *to_bytes)
    assert "'text'" in line
    assert "body, id" in line
    pq.write_table(pa.table({"text": ["x", None]}), tmp_path / "g.parquet")
    assert "row 2" in fails("text", "g.parquet", *to_bytes)
    (tmp_path / "h.parquet").write_bytes(b"PAR1 nothing")
    assert str(tmp_path / "h.parquet") in fails("text", "h.parquet", *to_bytes)
    (tmp_path / "i.jsonl.gz").write_bytes(gzip.compress(b'{"text": "good"}\n' * 1000)[:-20])
    assert str(tmp_path / "i.jsonl.gz") in fails("text", "i.jsonl.gz", *to_bytes)
    (tmp_path / "j.jsonl.zst").write_bytes(b"nothing")
    assert str(tmp_path / "j.jsonl.zst") in fails("text", "j.jsonl.zst", *to_bytes)
    assert not (tmp_path / "out").exists()


def test_errors_of_arguments(fails: Fails, tmp_path: Path) -> None:
    assert str(tmp_path / "none.txt") in fails("text", "none.txt")
    (tmp_path / "a.doc").write_text("x")
    assert ".jsonl.zst" in fails("text", "a.doc")
    (tmp_path / "empty").mkdir()
    assert "no text files" in fails("text", "empty")
    (tmp_path / "none.jsonl").write_text("\n")
    assert "0 documents" in fails("text", "none.jsonl", "--out", "out", "--tokenizer", "bytes")
    (tmp_path / "empty.txt").write_text("")
    assert "too little text" in fails("text", "empty.txt", "--out", "out", "--tokenizer", "bytes")
    assert "openweb" in fails("openweb")
    assert "between 0 and 1" in fails("stdlib", "--val-fraction", 1)
    assert "1 or more" in fails("stdlib", "--workers", 0)
    assert "--wat" in fails("stdlib", "--wat")
    assert "gpt2" in fails("stdlib", "--tokenizer", "gpt3")
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in fails("stdlib", "--out", "file")


def test_no_permission(fails: Fails, tmp_path: Path) -> None:
    assert "/proc/nothing" in fails("stdlib", "--out", "/proc/nothing")


def test_disk_full(run: Run, fails: Fails, tmp_path: Path) -> None:
    script = (
        "import resource, runpy, signal, sys; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000));"
        f"sys.argv = ['prepare.py', 'stdlib', '--out', {str(tmp_path / 'out')!r}];"
        f"runpy.run_path({str(ROOT / 'data/prepare.py')!r}, run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: File too large: {tmp_path / 'out'}")
    assert len(done.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


# ---- interruptions ----


def start_and_wait_for_tokens(tmp_path: Path, environment: dict[str, str]) -> "subprocess.Popen[str]":
    """Starts a preparation whose input never ends (a pipe), and waits until it is in the middle."""
    import os

    os.mkfifo(tmp_path / "pipe.jsonl")
    command = [sys.executable, str(ROOT / "data/prepare.py"), "text", "pipe.jsonl", "--out", "out"]
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    line = json.dumps({"text": "words " * 10_000}).encode() + b"\n"
    pipe = (tmp_path / "pipe.jsonl").open("wb", buffering=0)
    while not any(path.stat().st_size for path in (tmp_path / "out").glob(".partial/tokens")):
        pipe.write(line)
    process.pipe = pipe  # type: ignore[attr-defined]  # kept open: the end of the pipe would end the run
    return process


def test_killed_midway_leaves_no_final_names_and_the_next_run_works(
    run: Run, environment: dict[str, str], tmp_path: Path
) -> None:
    process = start_and_wait_for_tokens(tmp_path, environment)
    process.kill()
    process.communicate()
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".partial"]
    run("text", write_jsonl(tmp_path / "a.jsonl", DOCUMENTS), "--out", "out")
    assert sorted(contents(tmp_path / "out")) == ["meta.json", "train.bin", "val.bin"]


def test_interrupted_removes_temporary_files(environment: dict[str, str], tmp_path: Path) -> None:
    process = start_and_wait_for_tokens(tmp_path, environment)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=30)
    assert process.returncode == 130
    assert len(stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_two_runs_in_one_folder(command_fails: Fails, environment: dict[str, str], tmp_path: Path) -> None:
    process = start_and_wait_for_tokens(tmp_path, environment)
    assert "another run" in command_fails("stdlib", "--out", "out")
    process.kill()
    process.communicate()


# ---- the tokenizer's files, and no network ----


def test_tokenizer_from_a_folder(run: Run, fails: Fails, bpe_files: Path, tmp_path: Path) -> None:
    assert str(tmp_path / "vocab.bpe") in fails("tokenizer", "--from", tmp_path)
    (tmp_path / "vocab.bpe").write_bytes(b"wrong")
    assert "SHA-256" in fails("tokenizer", "--from", tmp_path)
    cache = str(tmp_path / "cache")
    assert cache in run("tokenizer", "--from", bpe_files, TIKTOKEN_CACHE_DIR=cache).stdout
    assert len(list(Path(cache).iterdir())) == 2
    assert "already" in run("tokenizer", TIKTOKEN_CACHE_DIR=cache).stdout
    source = write_jsonl(tmp_path / "a.jsonl", SPECIAL)
    run("text", source, "--out", "out", TIKTOKEN_CACHE_DIR=cache)


def test_no_vocabulary_and_no_network(command_fails: Fails, bpe_cache: Path, tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", SPECIAL)
    damaged = tmp_path / "damaged"
    damaged.mkdir()
    for path in bpe_cache.iterdir():
        (damaged / path.name).write_bytes(path.read_bytes()[:-1])
    for cache in (str(tmp_path / "none"), str(damaged)):
        for arguments in (["text", source], ["tokenizer"]):
            line = command_fails(*arguments, TIKTOKEN_CACHE_DIR=cache)
            for part in ("/vocab.bpe", "/encoder.json", "https://", "tokenizer --from", "TIKTOKEN_CACHE_DIR", cache):
                assert part in line
