"""From the documents' tokens, in their order, to shuffled `train.bin`, `val.bin` and `meta.json`.

The split is nanoGPT's, which is that of `datasets.Dataset.train_test_split(fraction, seed=seed, shuffle=True)`: numpy's
permutation of all documents; its first ceil(fraction * documents) are the validation split, the rest is the training
split, both in the order of the permutation. A corpus of a hundred million documents must be shuffled in little memory,
so everything with an entry for each document is a file: `bounds` (see pipeline.py) and `order`, the permutation. Token
files are written in segments, and a segment's documents are read in the order of the source, so disks read forwards.

Everything is made in a hidden folder beside its destination and moved there at the end, `meta.json` last.
"""

import contextlib
import fcntl
import hashlib
import json
import math
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from data import DataError
from data.tokenizers import Tokenizer

SEGMENT = 32 << 20
"""Tokens of a segment (64 MiB)."""
GROUP = 1 << 19
"""Documents whose place is looked up at once."""
BLOCK = 1 << 22
"""Entries of `bounds` read at once."""
PARTIAL = ".partial"


@contextlib.contextmanager
def partial_folder(out: Path) -> Iterator[Path]:
    """A folder for temporary files in `out`, empty (whatever a killed run left is removed), gone in the end.

    Raises DataError where another run is using it.
    """
    was_there = out.exists()
    partial = out / PARTIAL
    partial.mkdir(parents=True, exist_ok=True)
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(
                f"another run is preparing {out}; wait for it, or choose another folder with --out"
            ) from error
        except OSError:
            pass  # a file system without locks
        try:
            for stale in partial.iterdir():
                if stale.name != "lock":
                    stale.unlink()
            yield partial
        except OSError as error:
            error.filename = error.filename or str(out)  # writing to a full disk names no file
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
            if not was_there:
                with contextlib.suppress(OSError):  # it holds the result
                    out.rmdir()


class TokenFile:
    """A token file in the making, with what meta.json says of it: that is found by `background`, an executor of one
    thread, while the next tokens are gathered."""

    def __init__(self, path: Path, tokenizer: Tokenizer, background: Executor) -> None:
        self.path = path
        self.tokenizer = tokenizer
        self.tokens = 0
        self.documents = 0
        self.counts = np.zeros(tokenizer.vocab_size, dtype=np.int64)
        self.first: int | None = None
        self._file = path.open("wb")
        self._sha = hashlib.sha256()
        self._background = background
        self._digested: Future[None] | None = None

    def write(self, tokens: NDArray[np.uint16]) -> None:
        """Appends `tokens`, which must stay as they are from here on."""
        self._wait()  # so that no more than two segments are in memory
        self._digested = self._background.submit(self._digest, tokens)
        self._file.write(tokens.data)
        if self.first is None and len(tokens):
            self.first = int(tokens[0])
        self.tokens += len(tokens)

    def _digest(self, tokens: NDArray[np.uint16]) -> None:
        self._sha.update(tokens.data)
        for start in range(0, len(tokens), 1 << 20):  # in parts, since bincount makes an int64 copy
            self.counts += np.bincount(tokens[start : start + (1 << 20)], minlength=len(self.counts))

    def _wait(self) -> None:
        if self._digested is not None:
            self._digested.result()

    def close(self) -> dict[str, Any]:
        """Brings it to disk; returns its entry for meta.json. `counts` are complete from here on."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._wait()
        text_bytes = int(self.counts @ self.tokenizer.token_bytes)
        return {
            "tokens": self.tokens,
            "documents": self.documents,
            "bytes": text_bytes,
            "sha256": self._sha.hexdigest(),
        }


def write_splits(
    folder: Path, documents: int, tokens: int, tokenizer: Tokenizer, *, fraction: float, seed: int
) -> dict[str, Any]:
    """`folder`/train.bin and val.bin from its tokens and bounds; returns `splits` and `unigram_loss` for meta.json.

    With two documents or more, each split gets at least one. One document alone is cut by tokens: its last part is for
    validation, `fraction` of it but at least a tenth, or 10,000 tokens where a tenth is more. Raises DataError where
    there are not enough tokens for that.
    """
    if tokens < 2:
        raise DataError(f"too little text: {documents} documents with {tokens} tokens in all; give more text")
    with (folder / "tokens").open("rb", buffering=0) as source, ThreadPoolExecutor(1) as background:
        train, val = (TokenFile(folder / name, tokenizer, background) for name in ("train.bin", "val.bin"))
        if documents == 1:
            held_out = max(math.ceil(fraction * tokens), min(tokens // 10, 10_000))
            held_out = min(held_out, tokens - 1)
            _copy_range(source.fileno(), 0, tokens - held_out, train)
            _copy_range(source.fileno(), tokens - held_out, tokens, val)
            train.documents = val.documents = 1
        else:
            held_out = min(math.ceil(fraction * documents), documents - 1)
            order = write_order(folder / "order", documents, seed)
            _copy_documents(folder, order, documents, range(held_out), source.fileno(), val)
            _copy_documents(folder, order, documents, range(held_out, documents), source.fileno(), train)
        return {"splits": {"train": train.close(), "val": val.close()}, "unigram_loss": unigram_loss(train, val)}


def unigram_loss(train: TokenFile, val: TokenFile) -> float | None:
    """Nats per token of `val` (all but its first, which nothing predicts) under the token frequencies of `train`, each
    count plus one. None where `val` has one token alone."""
    if val.tokens < 2:
        return None
    evaluated = val.counts.copy()
    evaluated[val.first] -= 1
    log_p = np.log(train.counts + 1.0) - math.log(train.tokens + len(train.counts))
    return float(-(evaluated @ log_p) / evaluated.sum())


def write_order(path: Path, documents: int, seed: int) -> np.dtype[Any]:
    """Writes `numpy.random.default_rng(seed).permutation(documents)` to a file; returns its type of numbers."""
    dtype = np.dtype(np.int32 if documents < 2**31 else np.int64)
    mapped = np.memmap(path, dtype=dtype, mode="w+", shape=(documents,))
    plain = mapped.view(np.ndarray)  # shuffle is slow with subclasses
    for start in range(0, documents, BLOCK):
        stop = min(start + BLOCK, documents)
        plain[start:stop] = np.arange(start, stop)
    np.random.default_rng(seed).shuffle(plain)  # draws what permutation(documents) draws
    mapped.flush()
    return dtype


def _copy_documents(
    folder: Path, dtype: np.dtype[Any], documents: int, part: range, source: int, out: TokenFile
) -> None:
    """Appends the documents order[part] to `out`. source: descriptor of `folder`/tokens."""
    for start in range(part.start, part.stop, GROUP):
        count = min(GROUP, part.stop - start)
        ids = np.fromfile(folder / "order", dtype, count, offset=start * dtype.itemsize)
        starts, ends = _locate(folder / "bounds", ids, documents)
        filled = np.concatenate([[0], np.cumsum(ends - starts)])  # where each begins in the output
        first = 0
        while first < count:  # one segment: as many documents as fit, or a long one alone
            last = int(np.searchsorted(filled, filled[first] + SEGMENT, side="right")) - 1
            if last <= first:
                _copy_range(source, int(starts[first]), int(ends[first]), out)
                first += 1
                continue
            segment = np.empty(filled[last] - filled[first], dtype="<u2")
            raw = segment.data.cast("B")
            forwards = first + np.argsort(starts[first:last])
            places = 2 * (filled[forwards] - filled[first])
            lengths = 2 * (ends - starts)[forwards]
            for place, length, position in zip(
                places.tolist(), lengths.tolist(), (2 * starts[forwards]).tolist(), strict=True
            ):
                os.preadv(source, [raw[place : place + length]], position)
            out.write(segment)
            first = last
        out.documents += count


def _locate(bounds: Path, ids: NDArray[Any], documents: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where the documents `ids` begin and end, in tokens. Reads `bounds` block by block, forwards."""
    sorting = np.argsort(ids)
    ordered = ids[sorting]
    starts, ends = np.empty(len(ids), dtype=np.int64), np.empty(len(ids), dtype=np.int64)
    for begin in range(0, documents, BLOCK):
        low, high = np.searchsorted(ordered, [begin, begin + BLOCK])
        if low < high:
            block = np.fromfile(bounds, np.int64, BLOCK + 1, offset=8 * begin)
            local = ordered[low:high] - begin
            starts[sorting[low:high]] = block[local]
            ends[sorting[low:high]] = block[local + 1]
    return starts, ends


def _copy_range(source: int, start: int, end: int, out: TokenFile) -> None:
    for begin in range(start, end, SEGMENT):
        count = min(SEGMENT, end - begin)
        out.write(np.frombuffer(os.pread(source, 2 * count, 2 * begin), dtype="<u2"))


def publish(partial: Path, out: Path, meta: dict[str, Any]) -> None:
    """Writes meta.json and moves the three finished files from `partial` to `out`."""
    with (partial / "meta.json").open("w", encoding="utf-8") as file:
        json.dump(meta, file, indent=2, ensure_ascii=False)
        file.write("\n")
        file.flush()
        os.fsync(file.fileno())
    (out / "meta.json").unlink(missing_ok=True)  # the old one does not describe the new files
    for name in ("val.bin", "train.bin", "meta.json"):
        (partial / name).replace(out / name)
    folder = os.open(out, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def read_meta(out: Path) -> dict[str, Any] | None:
    """meta.json of a complete preparation in `out`; None where there is none, or where a token file does not fit it."""
    try:
        meta: dict[str, Any] = json.loads((out / "meta.json").read_text(encoding="utf-8"))
        for name in ("train", "val"):
            if (out / f"{name}.bin").stat().st_size != 2 * meta["splits"][name]["tokens"]:
                return None
        return meta
    except (OSError, ValueError, KeyError, TypeError):
        return None
