"""Token files: uint16 ids, little-endian, one after another, in a folder with a training and a validation part.

Two layouts are read: nanoGPT's raw `train.bin` and `val.bin`, and llm.c's shards (`*_train_*.bin`, `*_val_*.bin`,
each with a header of 256 int32). Files are read with pread rather than mapped into memory: a mapped file grows
resident with every window that is touched, and one that shrinks under a run kills it with a bus error instead of a
message.
"""

from __future__ import annotations

import hashlib
import json
import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from data import DataError

Tokens = npt.NDArray[np.uint16]

ROOT = Path(__file__).resolve().parent
PREPARED_BY_NAME = ("stdlib", "openwebtext", "fineweb_edu")
ITEM = 2  # bytes a token
SHARD_MAGIC, SHARD_VERSION, SHARD_HEADER = 20240520, 1, 256 * 4
SCAN_LIMIT = 1 << 30  # data up to this many bytes are checked whole when they are opened
SCAN_TOKENS = 1 << 23  # at a time


class TokenStream:
    """One or several token files as one long array.

    Args:
        paths: the files, in order.

    Raises:
        DataError: a file that is missing, empty, unreadable or of a wrong size.
    """

    def __init__(self, paths: list[Path]) -> None:
        _allow_open_files(len(paths))
        self.paths = paths
        self._files: list[int] = []
        self._headers: list[int] = []
        sizes = []
        for path in paths:
            file, header, size = _open(path)
            self._files.append(file)
            self._headers.append(header)
            sizes.append(size)
        self._ends = np.cumsum(sizes)

    @property
    def name(self) -> Path:
        """The file, or the folder of several."""
        return (self.paths[0] if len(self.paths) == 1 else self.paths[0].parent).absolute()

    def __len__(self) -> int:
        """Tokens in all files."""
        return int(self._ends[-1])

    def read(self, start: int, length: int) -> Tokens:
        """Tokens [start, start + length), across file borders.

        Raises:
            DataError: the file ends before them (it shrank since it was opened), or the disk fails.
            IndexError: the range is outside the stream.
        """
        if start < 0 or length < 0 or start + length > len(self):
            raise IndexError(f"tokens [{start}, {start + length}) of {len(self)}")
        parts = []
        index = int(np.searchsorted(self._ends, start, side="right"))
        while length > 0:
            begin = int(self._ends[index - 1]) if index else 0
            count = min(length, int(self._ends[index]) - start)
            parts.append(self._read_file(index, start - begin, count))
            start, length, index = start + count, length - count, index + 1
        return parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, "<u2")])

    def _read_file(self, index: int, start: int, count: int) -> Tokens:
        wanted, offset = count * ITEM, self._headers[index] + start * ITEM
        chunks = []
        while wanted > 0:
            try:
                chunk = os.pread(self._files[index], wanted, offset)
            except OSError as error:
                raise DataError(f"{self.paths[index].absolute()}: cannot be read: {error.strerror}") from None
            if not chunk:
                raise DataError(
                    f"{self.paths[index].absolute()}: ends at byte {offset}, earlier than when it was opened; "
                    "it was changed during the run"
                )
            chunks.append(chunk)
            wanted, offset = wanted - len(chunk), offset + len(chunk)
        return np.frombuffer(b"".join(chunks), dtype="<u2")

    def check_vocabulary(self, vocab_size: int) -> None:
        """Looks for tokens beyond the vocabulary, where there are few enough to read them all at the start of a run.

        Raises:
            DataError: there is one.
        """
        if len(self) * ITEM > SCAN_LIMIT:
            return
        for start in range(0, len(self), SCAN_TOKENS):
            check_tokens(self.read(start, min(SCAN_TOKENS, len(self) - start)), vocab_size, self.name)

    def close(self) -> None:
        """Closes the files."""
        for file in self._files:
            os.close(file)
        self._files.clear()


def check_tokens(tokens: Tokens, vocab_size: int, path: Path) -> None:
    """Tokens beyond the vocabulary would end in an assertion without a place on a GPU.

    Raises:
        DataError: there is one.
    """
    highest = int(tokens.max(initial=0))
    if highest >= vocab_size:
        raise DataError(
            f"{path}: token {highest} is beyond vocab_size={vocab_size}; set --vocab_size={highest + 1} or "
            "more, or prepare the data set with the tokenizer that the config expects"
        )


@dataclass(frozen=True)
class Dataset:
    """A folder of token files, open."""

    path: Path
    train: TokenStream
    val: TokenStream
    meta: dict[str, Any]
    """meta.json, or nothing where the folder has none (nanoGPT's and llm.c's have none)"""

    def close(self) -> None:
        """Closes the files."""
        self.train.close()
        self.val.close()

    def fingerprint(self) -> str:
        """Tells this content from another without reading it all: a hash of the numbers of tokens, and of 4096 tokens
        at 64 places of each part."""
        digest = hashlib.sha256()
        for stream in (self.train, self.val):
            size, piece = len(stream), min(4096, len(stream))
            digest.update(f"{size};".encode())
            for start in sorted({(size - piece) * place // 63 for place in range(64)}):
                digest.update(stream.read(start, piece).tobytes())
        return digest.hexdigest()[:32]

    def describe(self) -> dict[str, Any]:
        """What a run records of its data; None where it is not known."""
        splits = self.meta.get("splits", {})
        return {
            "path": str(self.path),
            "train_tokens": len(self.train),
            "val_tokens": len(self.val),
            "val_bytes": splits.get("val", {}).get("bytes"),
            "unigram_loss": self.meta.get("unigram_loss"),
            "tokenizer": self.meta.get("tokenizer"),
            "fingerprint": self.fingerprint(),
        }


def open_dataset(name: str, block_size: int, vocab_size: int) -> Dataset:
    """Opens and checks a data set.

    Args:
        name: a folder of data/, or a path to a folder.
        block_size: tokens of a training window; training needs one more.
        vocab_size: rows of the model's embedding.

    Raises:
        DataError: a folder or file that is missing, empty, damaged, too short, or of another vocabulary.
    """
    path = _find(name)
    train_paths, val_paths = _split_paths(path, "train"), _split_paths(path, "val")
    meta = _read_meta(path)
    if meta.get("vocab_size", 0) > vocab_size:
        raise DataError(
            f"{path}/meta.json: its tokenizer has {meta['vocab_size']} tokens, more than vocab_size={vocab_size}; "
            f"set --vocab_size={meta['vocab_size']} or more"
        )
    dataset = Dataset(path, TokenStream(train_paths), TokenStream(val_paths), meta)
    for stream, needed in ((dataset.train, block_size + 1), (dataset.val, 2)):
        if len(stream) < needed:
            raise DataError(
                f"{stream.name}: {len(stream)} tokens; block_size={block_size} needs {needed} or more; "
                f"lower --block_size, or prepare more text: {_command(path)}"
            )
        stream.check_vocabulary(vocab_size)
    for split, stream in (("train", dataset.train), ("val", dataset.val)):
        recorded = meta.get("splits", {}).get(split, {}).get("tokens", len(stream))
        if recorded != len(stream):
            raise DataError(
                f"{stream.name}: {len(stream)} tokens, but meta.json records {recorded}; "
                f"prepare it again: {_command(path)}"
            )
    return dataset


def _find(name: str) -> Path:
    """The folder that a name or path stands for."""
    candidates = [Path(name).absolute()] if os.sep in name else [ROOT / name, Path(name).absolute()]
    for candidate in candidates:
        if candidate.is_dir():
            return candidate
    raise DataError(f"no data set in {candidates[0]}; prepare it: {_command(candidates[0])}")


def _command(path: Path) -> str:
    if path.parent == ROOT and path.name in PREPARED_BY_NAME:
        return f"python data/prepare.py {path.name}"
    return f"python data/prepare.py text FILES --out {path}"


def _split_paths(path: Path, split: str) -> list[Path]:
    single = path / f"{split}.bin"
    paths = [single] if single.exists() else sorted(path.glob(f"*_{split}_*.bin"))
    if not paths:
        raise DataError(
            f"{single} is missing, and there are no shards {path}/*_{split}_*.bin; prepare it: {_command(path)}"
        )
    return paths


def _read_meta(path: Path) -> dict[str, Any]:
    file = path / "meta.json"
    if not file.exists():
        return {}
    try:
        meta = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(f"{file}: cannot be read: {error}; prepare the data set again, or remove the file") from None
    if (problem := _wrong_in(meta)) is not None:
        raise DataError(f"{file}: {problem}; prepare the data set again ({_command(path)}), or remove the file")
    return meta


def _wrong_in(meta: Any) -> str | None:
    """What keeps meta.json from being used. Everything in it is optional."""
    if not isinstance(meta, dict):
        return "not a JSON object"
    if not isinstance(meta.get("vocab_size", 0), int):
        return f"vocab_size is {meta['vocab_size']!r}, not a number"
    if meta.get("dtype", "uint16") != "uint16":
        return f"dtype is {meta['dtype']!r}, only uint16 is known"
    splits = meta.get("splits", {})
    if not isinstance(splits, dict) or not all(isinstance(splits.get(name, {}), dict) for name in ("train", "val")):
        return "splits is not an object with train and val"
    return None


def _open(path: Path) -> tuple[int, int, int]:
    """A token file's descriptor, the bytes of its header and its number of tokens."""
    again = f"prepare it again: {_command(path.absolute().parent)}"
    try:
        if not path.is_file():
            raise DataError(f"{path.absolute()} is not a file; {again}")
        file = os.open(path, os.O_RDONLY)
        size = os.fstat(file).st_size
        header = np.frombuffer(os.pread(file, SHARD_HEADER, 0), dtype="<i4", count=min(size, SHARD_HEADER) // 4)
    except OSError as error:
        raise DataError(f"{path.absolute()}: cannot be read: {error.strerror}") from None
    is_shard = len(header) == SHARD_HEADER // 4 and header[0] == SHARD_MAGIC
    start = SHARD_HEADER if is_shard else 0
    if is_shard and header[1] != SHARD_VERSION:
        raise DataError(f"{path.absolute()}: shard version {header[1]}; only {SHARD_VERSION} (uint16) is known")
    if size == start:
        raise DataError(f"{path.absolute()} is empty; {again}")
    if size % ITEM:
        raise DataError(f"{path.absolute()}: {size} bytes, an odd number, cannot be uint16 tokens; {again}")
    count = (size - start) // ITEM
    if is_shard and header[2] != count:
        raise DataError(f"{path.absolute()}: its header records {header[2]} tokens, it holds {count}; {again}")
    return file, start, count


def _allow_open_files(count: int) -> None:
    """A data set can have more shards (FineWeb-Edu: about 1000) than a process may open by default."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count + 256:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, count + 4096), hard))
