"""Token files: nanoGPT's and llm.c's layouts, and what can be wrong with them."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

from data import DataError
from data.tokens import TokenStream, open_dataset
from tests.helpers import write_tokens


def write_shard(path: Path, tokens: np.ndarray, recorded: int | None = None, version: int = 1) -> None:
    """llm.c's layout."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, version, len(tokens) if recorded is None else recorded
    path.write_bytes(header.tobytes() + tokens.astype("<u2").tobytes())


def test_a_nanogpt_folder_without_meta(tmp_path: Path) -> None:
    data = open_dataset(str(write_tokens(tmp_path, range(100), range(50, 60))), block_size=8, vocab_size=100)
    assert (len(data.train), len(data.val), data.meta) == (100, 10, {})
    assert data.train.read(97, 3).tolist() == [97, 98, 99]
    assert data.describe()["val_bytes"] is None
    with pytest.raises(IndexError):
        data.train.read(98, 3)


def test_llm_c_shards_are_one_stream(tmp_path: Path) -> None:
    tokens = np.arange(1000)
    for index, (start, end) in enumerate([(0, 300), (300, 301), (301, 1000)], start=1):
        write_shard(tmp_path / f"fineweb_train_{index:06}.bin", tokens[start:end])
    write_shard(tmp_path / "fineweb_val_000000.bin", tokens[:50])
    data = open_dataset(str(tmp_path), block_size=16, vocab_size=1000)
    assert (len(data.train), len(data.val)) == (1000, 50)
    for start, length in [(0, 1000), (299, 1), (299, 3), (300, 1), (301, 5), (290, 400), (999, 1), (5, 0)]:
        assert np.array_equal(data.train.read(start, length), tokens[start : start + length])


def test_more_shards_than_a_process_may_open_by_default(tmp_path: Path) -> None:
    import resource

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    paths = [tmp_path / f"a_train_{index}.bin" for index in range(300)]
    for path in paths:
        write_shard(path, np.arange(10))
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        stream = TokenStream(paths)
        assert len(stream) == 3000
        stream.close()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def complaint(folder: Path, block_size: int = 8, vocab_size: int = 100) -> str:
    with pytest.raises(DataError) as error:
        open_dataset(str(folder), block_size, vocab_size)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_is_missing_is_named_with_the_command_that_makes_it(tmp_path: Path) -> None:
    assert complaint(Path("fineweb_edu")).endswith("data/fineweb_edu; prepare it: python data/prepare.py fineweb_edu")
    missing = tmp_path / "gone"
    assert (
        complaint(missing) == f"no data set in {missing}; prepare it: python data/prepare.py text FILES --out {missing}"
    )
    folder = write_tokens(tmp_path / "a", range(100), range(20))
    (folder / "train.bin").unlink()
    assert f"{folder}/train.bin is missing" in complaint(folder)


@pytest.mark.parametrize("split", ["train", "val"])
def test_damaged_files(tmp_path: Path, split: str) -> None:
    folder = write_tokens(tmp_path / "a", range(100), range(20))
    path = folder / f"{split}.bin"
    path.write_bytes(b"")
    assert f"{path} is empty" in complaint(folder)
    path.write_bytes(b"abc")
    assert f"{path}: 3 bytes" in complaint(folder)
    path.write_bytes(b"\x01\x00")
    assert f"{path}: 1 tokens; block_size=8 needs {9 if split == 'train' else 2}" in complaint(folder)
    np.array([1, 2, 3, 140, 5, 6, 7, 8, 9, 10], dtype="<u2").tofile(path)
    assert f"{path}: token 140 is beyond vocab_size=100; set --vocab_size=141" in complaint(folder)
    path.unlink()
    path.mkdir()
    assert str(path) in complaint(folder)


def test_the_shortest_files_that_serve(tmp_path: Path) -> None:
    data = open_dataset(str(write_tokens(tmp_path, range(9), range(2))), block_size=8, vocab_size=9)
    assert len(data.train) == 9


def test_damaged_shards(tmp_path: Path) -> None:
    write_shard(tmp_path / "a_val_0.bin", np.arange(50))
    write_shard(tmp_path / "a_train_0.bin", np.arange(50), recorded=60)
    assert "records 60 tokens, it holds 50" in complaint(tmp_path)
    write_shard(tmp_path / "a_train_0.bin", np.arange(50), version=7)
    assert "shard version 7" in complaint(tmp_path)


def test_meta_is_held_against_the_files_and_the_model(tmp_path: Path) -> None:
    folder = write_tokens(tmp_path / "a", range(50), range(20))
    meta = {"vocab_size": 100, "splits": {"train": {"tokens": 50}, "val": {"tokens": 20, "bytes": 77}}}
    (folder / "meta.json").write_text(json.dumps(meta | {"tokenizer": "bytes", "unigram_loss": 3.5}))
    described = open_dataset(str(folder), 8, 100).describe()
    assert (described["val_bytes"], described["unigram_loss"], described["tokenizer"]) == (77, 3.5, "bytes")
    assert "100 tokens, more than vocab_size=64; set --vocab_size=100" in complaint(folder, vocab_size=64)
    meta["splits"]["train"]["tokens"] = 51
    (folder / "meta.json").write_text(json.dumps(meta))
    assert "50 tokens, but meta.json records 51" in complaint(folder)
    (folder / "meta.json").write_text("{")
    assert f"{folder}/meta.json" in complaint(folder)


def test_a_file_that_shrinks_under_a_run(tmp_path: Path) -> None:
    """A mapped file would end the process with a bus error here."""
    folder = write_tokens(tmp_path, range(100), range(20))
    data = open_dataset(str(folder), 8, 100)
    os.truncate(folder / "train.bin", 100)
    assert data.train.read(0, 50).tolist() == list(range(50))
    with pytest.raises(DataError, match=r"train\.bin: ends at byte 100"):
        data.train.read(40, 20)
