"""Where documents come from: the Python standard library, and local text files.

A corpus may be far larger than memory, and so may one document (a .txt file of many gigabytes). So a source is an
iterator of documents that reads as it goes, and a document is either a whole text or, when it is long, an iterator of
its pieces. Folders are read in sorted order: the same files always give the same sequence of documents.
"""

import codecs
import gzip
import io
import json
import os
import platform
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

from data import DataError
from data.network import reason

Document = str | bytes | Iterator[str]
"""A text, or the pieces of a long one; pieces must be used up before the next document is asked for."""

BLOCK = 1 << 18  # bytes of a .txt file that are read at once
MIN_STDLIB_BYTES = 10_000_000


@dataclass
class Meter:
    """How far a source has been read, for the progress bar."""

    total: int | None = None
    unit: str = "B"
    done: int = 0


@dataclass
class Source:
    documents: Iterator[Document]
    description: dict[str, Any]
    """What it is and where it is from, for meta.json."""
    meter: Meter = field(default_factory=Meter)


# ---- the Python standard library ----


def stdlib() -> Source:
    """Every .py file of this Python's standard library, as raw bytes. DataError where they have less than 10 MB."""
    root = Path(sysconfig.get_path("stdlib")).resolve()
    files = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [n for n in subfolders if n not in ("site-packages", "dist-packages", "__pycache__")]
        files += [Path(folder, name) for name in names if name.endswith(".py")]
    files = [path for path in files if path.resolve().is_relative_to(root) and path.is_file()]
    files = [path for path in files if path.stat().st_size > 0]
    files.sort(key=lambda path: path.relative_to(root).as_posix())
    meter = Meter(total=sum(path.stat().st_size for path in files))
    if meter.total is None or meter.total < MIN_STDLIB_BYTES:
        raise DataError(
            f"{root} has {meter.total} bytes of Python source, {MIN_STDLIB_BYTES} or more are needed: use a Python "
            "with its complete library (python.org, conda, uv), or run "
            "`python data/prepare.py text FOLDER --tokenizer bytes`"
        )

    def documents() -> Iterator[Document]:
        for path in files:
            content = path.read_bytes()
            meter.done += len(content)
            yield content

    description = {"kind": "stdlib", "path": str(root), "files": len(files), "bytes": meter.total}
    return Source(documents(), description, meter)


def python_version() -> str:
    """Which standard library this is."""
    return f"{platform.python_implementation()} {platform.python_version()}"


# ---- local files ----


@dataclass(frozen=True)
class TextOptions:
    text_field: str = "text"
    encoding_errors: str = "strict"  # or "replace"


Reader = Callable[[Path, TextOptions, Meter], Iterator[Document]]


def text(paths: Sequence[Path], options: TextOptions) -> Source:
    """The documents of files and folders, in the given order; a folder's files sorted by relative path.

    A .txt file is one document; each line of a .jsonl file (also .gz, .zst) and each row of a .parquet file is one. An
    empty document is kept: its end-of-text token stands alone. Raises DataError for a path that is missing or of
    another kind; reading raises it, with file and line or byte, for content that cannot be used.
    """
    files = [file for path in paths for file in _files_of(path.absolute())]
    meter = Meter(total=sum(file.stat().st_size for file in files))

    def documents() -> Iterator[Document]:
        start = 0
        for file in files:
            reader = _reader_of(file)
            assert reader is not None  # _files_of has seen to it
            yield from reader(file, options, meter)
            start += file.stat().st_size
            meter.done = start

    where = [str(path.absolute()) for path in paths]
    return Source(documents(), {"kind": "text", "paths": where, "files": len(files), "bytes": meter.total}, meter)


def _files_of(path: Path) -> list[Path]:
    kinds = ", ".join(READERS)
    if path.is_dir():
        found = [Path(folder, name) for folder, _, names in os.walk(path) for name in names]
        found = [file for file in found if _reader_of(file) and not file.name.startswith(".")]
        if not found:
            raise DataError(f"folder {path} has no text files; allowed: {kinds}")
        return sorted(found, key=lambda file: file.relative_to(path).as_posix())
    if not path.exists():
        raise DataError(f"no file or folder {path}; give paths of files ({kinds}) or of folders with such files")
    if _reader_of(path) is None:
        raise DataError(f"{path} is no text file by its name; allowed: {kinds}")
    return [path]


def _reader_of(path: Path) -> Reader | None:
    return next((reader for suffix, reader in READERS.items() if path.name.lower().endswith(suffix)), None)


def read_txt(path: Path, options: TextOptions, meter: Meter) -> Iterator[Document]:
    """The whole file as one document. A byte order mark is dropped, line ends stay as they are."""
    if path.stat().st_size <= BLOCK:
        yield "".join(_txt_pieces(path, options, meter))
    else:
        yield _txt_pieces(path, options, meter)


def _txt_pieces(path: Path, options: TextOptions, meter: Meter) -> Iterator[str]:
    decoder = codecs.getincrementaldecoder("utf-8")(options.encoding_errors)
    with path.open("rb") as file:
        if file.read(3) != codecs.BOM_UTF8:
            file.seek(0)
        while True:
            pending = len(decoder.getstate()[0])  # first bytes of a character whose rest is in the next block
            position = file.tell()
            block = file.read(BLOCK)
            try:
                yield decoder.decode(block, final=not block)
            except UnicodeDecodeError as error:
                offset = position - pending + error.start
                raise DataError(
                    f"{path} is not UTF-8 at byte {offset} ({error.reason}); convert it, or use "
                    "--encoding-errors replace"
                ) from error
            meter.done += len(block)
            if not block:
                return


def read_jsonl(path: Path, options: TextOptions, meter: Meter) -> Iterator[Document]:
    """A document a line; blank lines are skipped."""
    for number, line in enumerate(_lines(path, meter), 1):
        if not line or line.isspace():
            continue
        try:
            decoded = line.decode("utf-8", options.encoding_errors)
            document = json.loads(decoded)[options.text_field]
            if not isinstance(document, str):
                raise TypeError(f"field {options.text_field!r} is {type(document).__name__}, not a text")
        except KeyError as error:
            names = ", ".join(json.loads(decoded)) or "none"
            raise DataError(
                f"{path}:{number}: no field {options.text_field!r}; its fields: {names}; choose with --text-field"
            ) from error
        except (ValueError, TypeError, RecursionError) as error:
            raise DataError(
                f"{path}:{number}: {reason(error)}; each line must be a JSON object with a text in field "
                f"{options.text_field!r}"
            ) from error
        yield document


def _lines(path: Path, meter: Meter) -> Iterator[bytes]:
    start, number = meter.done, 0
    with path.open("rb") as raw:
        try:
            for number, line in enumerate(_decompressed(raw, path), 1):
                if number % 1024 == 0:
                    meter.done = start + raw.tell()
                yield line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
        except Exception as error:  # gzip, zlib, zstandard and the file system each have their own
            raise DataError(f"{path} cannot be read after line {number} ({reason(error)}); fetch it again") from error


def _decompressed(raw: BinaryIO, path: Path) -> io.BufferedIOBase | BinaryIO:
    if path.name.lower().endswith(".gz"):
        return gzip.GzipFile(fileobj=raw)
    if path.name.lower().endswith(".zst"):
        import zstandard

        # Frames follow each other in concatenated files; published dumps use windows up to 2 GiB.
        reader = zstandard.ZstdDecompressor(max_window_size=1 << 31).stream_reader(raw, read_across_frames=True)
        return io.BufferedReader(reader, 1 << 20)
    return raw


def read_parquet(path: Path, options: TextOptions, meter: Meter) -> Iterator[Document]:
    """A document a row, of one text column."""
    import pyarrow
    import pyarrow.parquet

    start, size, rows_done = meter.done, path.stat().st_size, 0
    column = options.text_field
    try:
        # Buffered and not pre-buffered: a row group of many gigabytes is read page by page, not whole.
        with pyarrow.parquet.ParquetFile(path, buffer_size=1 << 20, pre_buffer=False) as file:
            if column not in file.schema_arrow.names:
                names = ", ".join(file.schema_arrow.names)
                raise DataError(f"{path} has no column {column!r}; its columns: {names}; choose with --text-field")
            rows = file.metadata.num_rows
            for batch in file.iter_batches(_rows_at_once(path, rows), columns=[column], use_threads=False):
                for row, document in enumerate(batch.column(0).to_pylist(), rows_done + 1):
                    if not isinstance(document, str):
                        raise DataError(f"{path}, row {row}: {column!r} is {type(document).__name__}, not a text")
                    yield document
                rows_done += batch.num_rows
                meter.done = start + size * rows_done // rows
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read as parquet ({reason(error)}); fetch it again") from error


def _rows_at_once(path: Path, rows: int) -> int:
    """Rows that take some megabytes: texts are rarely compressed more than eightfold."""
    row_bytes = 8 * path.stat().st_size / max(rows, 1)
    return max(1, min(1024, int((8 << 20) / row_bytes)))


READERS: dict[str, Reader] = {
    ".txt": read_txt,
    ".jsonl": read_jsonl,
    ".jsonl.gz": read_jsonl,
    ".jsonl.zst": read_jsonl,
    ".parquet": read_parquet,
}
