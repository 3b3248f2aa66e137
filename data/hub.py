"""Documents from the Hugging Face hub: OpenWebText, FineWeb-Edu, and any data set that `datasets` can stream.

OpenWebText and FineWeb-Edu are read from their parquet files. Each file is downloaded whole into the hub's cache
(`HF_HOME`) and read from there: a file that has arrived is never downloaded again, an interrupted one is continued, and
a lost connection can't end a run of hours half-way through a file, as it can when parquet is read over the network.

OpenWebText was published as a script, which current versions of `datasets` refuse. Copies of it as parquet are in
several places, some of them perhaps incomplete, so they are tried in order, and the documents are counted (from the
last kilobytes of each file) before any text is downloaded.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import DataError
from data.network import LIMIT, reason, within
from data.sources import Document, Meter, Source, TextOptions, read_parquet, text

OPENWEBTEXT_DOCUMENTS = 8_013_769


@dataclass(frozen=True)
class Place:
    """A folder of parquet files in a data set repository of the hub."""

    repo: str
    revision: str = "main"
    folder: str = ""

    def __str__(self) -> str:
        return f"{self.repo}@{self.revision}" + (f"/{self.folder}" if self.folder else "")

    @classmethod
    def parse(cls, text: str) -> "Place":
        """From `REPO[@REVISION][/FOLDER]`. Of revisions with a slash it knows refs/pr/N and refs/convert/NAME."""
        name = r"[\w.-]+"
        match = re.fullmatch(rf"({name}/{name})(?:@(refs/(?:pr|convert)/{name}|{name}))?(?:/(.+))?", text.rstrip("/"))
        if not match:
            raise DataError(
                f"--source {text!r} is neither a folder here ({Path(text).absolute()}) nor REPO[@REVISION][/FOLDER] on "
                "the hub, for example dylanebert/openwebtext@main/plain_text"
            )
        return cls(match[1], match[2] or "main", match[3] or "")


OPENWEBTEXT_PLACES = [
    Place("Skylion007/openwebtext", "refs/convert/parquet", "plain_text"),
    Place("Skylion007/openwebtext", "refs/pr/18", "plain_text"),
    Place("Skylion007/openwebtext", "refs/pr/22", "plain_text"),
    Place("dylanebert/openwebtext", "main", "plain_text"),
]


class Unreachable(Exception):
    """The hub itself cannot be reached, so other places on it need not be tried."""


@dataclass
class Shards:
    """The parquet files of a place, at one commit."""

    place: Place
    commit: str
    sizes: dict[str, int]
    """Bytes of each file, by path, sorted."""

    def description(self) -> dict[str, Any]:
        return {
            "kind": "hub",
            "repository": self.place.repo,
            "revision": self.place.revision,
            "commit": self.commit,
            "folder": self.place.folder,
            "files": len(self.sizes),
            "bytes": sum(self.sizes.values()),
        }

    def source(self) -> Source:
        meter = Meter(total=sum(self.sizes.values()))
        return Source(self._documents(meter), self.description(), meter)

    def _documents(self, meter: Meter) -> Iterator[Document]:
        from huggingface_hub import hf_hub_download

        start = 0
        for name, size in self.sizes.items():
            try:
                path = hf_hub_download(self.place.repo, name, repo_type="dataset", revision=self.commit)
            except Exception as error:
                raise DataError(
                    f"cannot download {name} of {self.place} ({reason(error)}); run the same command again: files that "
                    "have arrived are kept"
                ) from error
            yield from read_parquet(Path(path), TextOptions(), meter)
            start += size
            meter.done = start

    def count(self) -> int:
        """Number of documents, from the files' footers alone."""
        import pyarrow.parquet
        from huggingface_hub import HfFileSystem, try_to_load_from_cache

        hub = HfFileSystem()

        def rows(name: str) -> int:
            cached = try_to_load_from_cache(self.place.repo, name, revision=self.commit, repo_type="dataset")
            if isinstance(cached, str):
                return int(pyarrow.parquet.read_metadata(cached).num_rows)
            with hub.open(f"datasets/{self.place.repo}@{self.commit}/{name}", block_size=1 << 20) as file:
                return int(pyarrow.parquet.read_metadata(file).num_rows)

        with ThreadPoolExecutor(8) as pool:
            return sum(pool.map(rows, self.sizes))


def _dataset_info(repo: str, revision: str | None) -> Any:
    """The hub's entry of a data set, in one request without retries. Raises Unreachable, or the hub's refusal."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return within(LIMIT, lambda: HfApi().dataset_info(repo, revision=revision, files_metadata=True, timeout=10))
    except (HfHubHTTPError, HFValidationError):
        raise
    except Exception as error:
        raise Unreachable(
            f"no connection to {os.environ.get('HF_ENDPOINT', 'huggingface.co')}: {reason(error, 80)}"
        ) from error


def find_shards(place: Place) -> Shards:
    """Raises Unreachable, the hub's refusal, or DataError where the place has no parquet files."""
    info = _dataset_info(place.repo, place.revision)
    prefix = f"{place.folder}/" if place.folder else ""
    files = {f.rfilename: f.size or 0 for f in info.siblings}
    sizes = {name: files[name] for name in sorted(files) if name.startswith(prefix) and name.endswith(".parquet")}
    if not sizes:
        raise DataError("no parquet files there")
    return Shards(place, info.sha, sizes)


def _quiet() -> None:
    """The hub's own bars and warnings would run through ours. To be called before its libraries are imported."""
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")


def openwebtext(source: str | None = None, allow_other_count: bool = False) -> Source:
    """OpenWebText from `source` (a local folder of parquet files or REPO[@REVISION][/FOLDER]), else from the first of
    OPENWEBTEXT_PLACES that works and has all its documents. Raises DataError with each place's reason."""
    _quiet()

    def wrong_count(documents: int) -> str | None:
        if documents == OPENWEBTEXT_DOCUMENTS or allow_other_count:
            return None
        return f"{documents} documents, expected {OPENWEBTEXT_DOCUMENTS} (--allow-other-count accepts others)"

    if source is not None and Path(source).is_dir():
        folder = Path(source).absolute()
        files = sorted(folder.rglob("*.parquet"))
        if problem := wrong_count(_count_local(files)):
            raise DataError(f"{folder} has {problem}")
        local = text(files, TextOptions())
        local.description["paths"] = [str(folder)]
        return local
    failures = []
    for place in [Place.parse(source)] if source is not None else OPENWEBTEXT_PLACES:
        try:
            shards = find_shards(place)
            problem = wrong_count(shards.count())
        except Unreachable as error:
            failures.append(str(error))
            break
        except Exception as error:
            problem = str(error) if isinstance(error, DataError) else reason(error, 100)
        if problem is None:
            return shards.source()
        failures.append(f"{place}: {problem}")
    raise DataError(
        f"OpenWebText cannot be had ({'; '.join(failures)}): name another copy with --source REPO[@REVISION][/FOLDER], "
        "or put its parquet files into a folder and run `python data/prepare.py text FOLDER --name openwebtext`"
    )


def _count_local(files: list[Path]) -> int:
    import pyarrow.parquet

    documents = 0
    for path in files:
        try:
            documents += pyarrow.parquet.read_metadata(path).num_rows
        except Exception as error:
            raise DataError(f"{path} cannot be read as parquet ({reason(error)}); fetch it again") from error
    return documents


def download_split(place: Place, split: str) -> list[Path]:
    """The parquet files of a small data set's split, downloaded into the hub's cache within 100 seconds. Raises what
    `find_shards` raises, the hub's refusal, or TimeoutError."""
    _quiet()
    shards = find_shards(place)
    names = [name for name in shards.sizes if Path(name).name.startswith(f"{split}-")]
    if not names:
        raise DataError(f"no files {split}-*.parquet there")
    from huggingface_hub import hf_hub_download

    def download() -> list[Path]:
        return [Path(hf_hub_download(place.repo, name, repo_type="dataset", revision=shards.commit)) for name in names]

    return within(5 * LIMIT, download)


def fineweb_edu(config: str) -> Source:
    """FineWeb-Edu: `sample-10BT`, `sample-100BT`, `sample-350BT`, `default` (everything) or a crawl such as
    `CC-MAIN-2024-10`."""
    _quiet()
    folder = "data" if config == "default" else f"data/{config}"
    place = Place(
        "HuggingFaceFW/fineweb-edu", "main", config.replace("-", "/", 1) if config.startswith("sample-") else folder
    )
    local = "or put its parquet files into a folder and run `python data/prepare.py text FOLDER --name fineweb_edu`"
    try:
        shards = find_shards(place)
    except Exception as error:
        known = isinstance(error, (DataError, Unreachable))
        why = str(error) if known else reason(error)
        raise DataError(
            f"FineWeb-Edu, --config {config}, cannot be had from {place} ({why}): check both, {local}"
        ) from error
    return shards.source()


def any_dataset(name: str, config: str | None, split: str, text_field: str, revision: str | None) -> Source:
    """Any data set of the hub, or a local folder of one, through `datasets` as a stream."""
    _quiet()
    import datasets

    datasets.utils.logging.set_verbosity_error()
    description: dict[str, Any] = {"kind": "hf", "name": name, "config": config, "split": split}
    try:
        if not Path(name).exists():  # `datasets` itself would retry for minutes without a network
            revision = _dataset_info(name, revision).sha
            description["commit"] = revision
        stream = datasets.load_dataset(name, config, split=split, revision=revision, streaming=True)
        info = stream.info.splits.get(split) if stream.info.splits else None
        if stream.column_names is not None and text_field not in stream.column_names:
            raise DataError(
                f"no field {text_field!r}; its fields: {', '.join(stream.column_names)}; choose with --text-field"
            )
    except Exception as error:
        why = str(error) if isinstance(error, (DataError, Unreachable)) else reason(error)
        raise DataError(
            f"data set {name!r} cannot be opened ({why}): check its name, --config, --split and --revision, "
            "or download its files and run `python data/prepare.py text FOLDER`"
        ) from error
    meter = Meter(total=info.num_examples or None if info else None, unit=" documents")
    return Source(_stream(iter(stream), name, text_field, meter), description, meter)


def _stream(rows: Iterator[dict[str, Any]], name: str, text_field: str, meter: Meter) -> Iterator[Document]:
    while True:
        try:
            row = next(rows, None)
        except Exception as error:
            raise DataError(
                f"data set {name!r} cannot be read after {meter.done} documents ({reason(error)})"
            ) from error
        if row is None:
            return
        meter.done += 1
        document = row.get(text_field)
        if not isinstance(document, str):
            raise DataError(
                f"data set {name!r}, document {meter.done}: {text_field!r} is {type(document).__name__}, not a text; "
                f"its fields: {', '.join(row)}; choose with --text-field"
            )
        yield document
