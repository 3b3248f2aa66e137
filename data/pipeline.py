"""Documents to one long file of tokens, on several cores, in the order of the documents.

The result must not depend on the number of workers, and memory must not depend on the corpus. So documents are put
together to batches of about the same size, long ones cut into pieces; a few batches at a time are encoded by threads
(the tokenizers release Python's lock) and appended to the file in the order in which they were read.
"""

import re
import sys
import threading
import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from data.sources import Document, Meter
from data.tokenizers import Tokenizer

BATCH = 1 << 18
"""Characters in a batch: large against the cost of handing it to a thread, small against memory."""
AHEAD = 8 << 20
"""Characters that may wait for being encoded or written, all batches together."""

# A place where a text can be cut without a change of its GPT-2 tokens. They are made within the matches of the pattern
#   '(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s
# and no match runs from something visible into white space, or from a letter into punctuation that is no letter.
# Only characters that every version of Unicode classifies alike are named here.
VISIBLE = "!-~\u3001-\u30ff\u4e00-\u9fa5\uac00-\ud7a3\uff01-\uff5e"
CUT = re.compile(rf"(?<=[{VISIBLE}])(?=[ \n])|(?<=[\u4e00-\u9fa5])(?=[\u3001\u3002\uff0c])")

# Where a text has no such place for this many bytes (no natural text), it is cut anyway, since the encoder needs up to
# 50 bytes of memory for each byte of a text that it cannot split.
LONGEST_UNCUT_ASCII = 8 << 20
LONGEST_UNCUT = LONGEST_UNCUT_ASCII // 2  # characters of 2 to 4 bytes


@dataclass
class Batch:
    texts: list[str | bytes]
    complete: bool = True
    """False: the last text goes on in the next batch."""
    size: int = 0
    """Characters or bytes."""


def batches(documents: Iterable[Document]) -> Iterator[Batch]:
    """Documents in order, short ones together, long ones (over `BATCH` characters) in pieces."""
    batch = Batch([])
    for document in documents:
        if isinstance(document, bytes) or (isinstance(document, str) and len(document) <= BATCH):
            batch.texts.append(document)
            batch.size += len(document) + 1
            if batch.size >= BATCH:
                yield batch
                batch = Batch([])
        else:
            if batch.texts:
                yield batch
                batch = Batch([])
            yield from cut([document] if isinstance(document, str) else document)
    if batch.texts:
        yield batch


def cut(pieces: Iterable[str]) -> Iterator[Batch]:
    """One long document, cut anew into pieces that give the same tokens as the whole."""
    text, start, searched = "", 0, 0  # text[start:] is not given out yet; there is no place to cut before `searched`
    for piece in pieces:
        text, searched, start = text[start:] + piece, searched - start, 0
        while len(text) - start > BATCH:
            searched = max(searched, start + BATCH)
            longest = LONGEST_UNCUT_ASCII if text.isascii() else LONGEST_UNCUT
            place = CUT.search(text, searched, start + longest)
            if place:
                end = place.start()
            elif len(text) - start >= longest:
                end = start + longest
            else:
                searched = len(text)  # not beyond: at the end of `text` the pattern needs the next character
                break
            yield Batch([text[start:end]], complete=False, size=end - start)
            start = end
    yield Batch([text[start:]], size=len(text) - start)


def encoded(source: Iterable[Batch], tokenizer: Tokenizer, workers: int) -> Generator[NDArray[np.uint16], None, None]:
    """Tokens of each batch, in order. Reads no further ahead than the workers need."""
    one_giant = threading.Lock()

    def encode(batch: Batch) -> NDArray[np.uint16]:
        with one_giant if batch.size > 4 * BATCH else nullcontext():  # they need much memory
            return tokenizer.encode(batch.texts, batch.complete)

    pool = ThreadPoolExecutor(workers)
    pending: deque[tuple[Future[NDArray[np.uint16]], int]] = deque()
    try:
        for batch in source:
            pending.append((pool.submit(encode, batch), batch.size))
            while len(pending) > 2 * workers or sum(size for _, size in pending) > AHEAD:
                yield pending.popleft()[0].result()
        while pending:
            yield pending.popleft()[0].result()
    finally:
        pool.shutdown(cancel_futures=True)


def tokenise(
    documents: Iterable[Document],
    meter: Meter,
    tokenizer: Tokenizer,
    folder: Path,
    *,
    workers: int,
    max_tokens: int | None = None,
) -> tuple[int, int]:
    """Writes `folder`/tokens (little-endian uint16) and `folder`/bounds (int64: 0, then where each document ends, in
    tokens, its end-of-text included). Returns the numbers of documents and of tokens.

    With `max_tokens`, stops at that many; the document in which that happens is cut and its last token replaced by
    end-of-text.
    """
    count = total = 0
    with (
        Progress(meter) as progress,
        (folder / "tokens").open("wb") as out,
        (folder / "bounds").open("wb") as bounds,
        closing(encoded(batches(documents), tokenizer, workers)) as stream,
    ):
        bounds.write(np.zeros(1, dtype=np.int64).data)
        for tokens in stream:
            if max_tokens is not None and total + len(tokens) >= max_tokens:
                tokens = tokens[: max_tokens - total]
                tokens[-1] = tokenizer.end_of_text
            ends = np.flatnonzero(tokens == tokenizer.end_of_text) + (total + 1)
            out.write(tokens.astype("<u2", copy=False).data)
            bounds.write(ends.astype(np.int64, copy=False).data)
            count += len(ends)
            total += len(tokens)
            progress.show(count, total)
            if total == max_tokens:
                break
    return count, total


class Progress:
    """A progress bar on standard error; where that is no terminal, a line every ten seconds."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter
        self.start = self.last = time.monotonic()
        terminal = sys.stderr.isatty()
        self.bar = tqdm(
            desc="tokenising", total=meter.total, unit=meter.unit, unit_scale=True, disable=not terminal, leave=False
        )

    def __enter__(self) -> "Progress":
        return self

    def show(self, documents: int, tokens: int) -> None:
        postfix = f"{tqdm.format_sizeof(documents)} documents, {tqdm.format_sizeof(tokens)} tokens"
        now = time.monotonic()
        if not self.bar.disable:
            self.bar.set_postfix_str(postfix, refresh=False)
            self.bar.update(self.meter.done - self.bar.n)
        elif now - self.last >= 10:
            self.last = now
            line = tqdm.format_meter(
                self.meter.done, self.meter.total, now - self.start, ncols=0, prefix="tokenising",
                unit=self.meter.unit, unit_scale=True, postfix=postfix,
            )  # fmt: skip
            print(line, file=sys.stderr, flush=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.bar.close()
