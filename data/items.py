"""HellaSwag (Zellers et al. 2019, arXiv 1905.07830): beginnings of stories, each with four endings, one of them real.

`python data/prepare.py hellaswag` puts the validation split into data/hellaswag/validation.jsonl, in the layout of the
authors' hellaswag_val.jsonl, and scripts/evaluate.py reads either.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data import DataError
from data.hub import Place, Unreachable, download_split
from data.network import reason

COUNT = 10_042
"""Items of the whole validation split."""

PLACE = Place("Rowan/hellaswag")
PREPARED = Path(__file__).resolve().parent / "hellaswag" / "validation.jsonl"
TEXTS = ("activity_label", "ctx_a", "ctx_b")


@dataclass(frozen=True)
class Item:
    """A question as lm-evaluation-harness puts it. An ending follows the query after one space."""

    query: str
    endings: tuple[str, ...]
    label: int
    """which ending is the real one, from 0"""


def read_items(path: Path, limit: int | None = None) -> list[Item]:
    """The items of a .jsonl or .parquet file, at most `limit` of them.

    Raises:
        DataError: the file is missing or empty, or a line of it is damaged.
    """
    items: list[Item] = []
    for place, row in _rows(path.absolute()):
        if len(items) == limit:
            break
        items.append(_item(row, place))
    if not items:
        raise DataError(f"{path.absolute()} holds no items; fetch it again: python data/prepare.py hellaswag")
    return items


def prepare(source: Path | None, out: Path) -> str:
    """Writes the validation split, from a file or else from the hub, to `out`. Returns what to tell the user.

    Raises:
        DataError: the file is missing or damaged, or the hub cannot be reached.
    """
    if source is None and out.exists():
        count = len(read_items(out))
        if count != COUNT:
            raise DataError(
                f"{out} holds {count:,} items, HellaSwag's validation split has {COUNT:,}; delete the file to fetch all"
            )
        return f"HellaSwag's items are in {out} already: {count:,}"
    paths = _download() if source is None else [source.absolute()]
    lines = []
    for path in paths:
        for place, row in _rows(path):
            _item(row, place)
            lines.append(json.dumps(row) + "\n")
    if not lines:
        raise DataError(f"{', '.join(map(str, paths))}: no items there")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f"{out.name}.{os.getpid()}.partial")
    temporary.write_text("".join(lines), encoding="utf-8")
    temporary.replace(out)
    part = "" if len(lines) == COUNT else f" (the validation split has {COUNT:,}: results will not compare)"
    return f"{len(lines):,} items of HellaSwag written to {out}{part}"


def _download() -> list[Path]:
    try:
        return download_split(PLACE, "validation")
    except Exception as error:
        why = str(error) if isinstance(error, DataError | Unreachable) else reason(error, 100)
        raise DataError(
            f"HellaSwag cannot be had from {PLACE} ({why}): fetch data/validation-00000-of-00001.parquet from "
            f"https://huggingface.co/datasets/{PLACE.repo} on a machine with a network (the authors' "
            "hellaswag_val.jsonl serves too), then run `python data/prepare.py hellaswag --from FILE`"
        ) from error


def _rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Each row, with its place for a message."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; give the .jsonl or .parquet file in it")
    if not path.is_file():
        raise DataError(
            f"{path} is missing; make it with `python data/prepare.py hellaswag`, on a machine with a network, or with "
            "`python data/prepare.py hellaswag --from FILE`"
        )
    if path.suffix == ".parquet":
        import pyarrow.parquet

        try:
            rows = pyarrow.parquet.read_table(path).to_pylist()
        except Exception as error:
            raise DataError(f"{path} cannot be read as parquet ({reason(error, 100)}); fetch it again") from error
        yield from ((f"{path}, row {number}", row) for number, row in enumerate(rows, 1))
        return
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise DataError(f"{path}, line {number}: not JSON ({reason(error, 100)})") from None
                yield f"{path}, line {number}", row


def _item(row: Any, place: str) -> Item:
    if not isinstance(row, dict):
        raise DataError(f"{place}: {type(row).__name__}, not an object")
    for key in TEXTS:
        if not isinstance(row.get(key), str):
            raise DataError(f"{place}: {key} is {row.get(key)!r}, not a text")
    endings = row.get("endings")
    if not isinstance(endings, list) or len(endings) < 2 or not all(isinstance(ending, str) for ending in endings):
        raise DataError(f"{place}: endings is not a list of texts")
    label = str(row.get("label"))
    if not re.fullmatch(r"\d", label) or int(label) >= len(endings):
        raise DataError(
            f"{place}: label is {row.get('label')!r}, allowed: 0 to {len(endings) - 1} (the test split has no labels)"
        )
    activity, first, second = (row[key] for key in TEXTS)
    query = _clean(f"{activity}: {first} {second.capitalize()}")
    return Item(query, tuple(_clean(ending) for ending in endings), int(label))


def _clean(text: str) -> str:
    """Without WikiHow's markup, as the harness does it: "[title]" ends a sentence, other brackets go, and so does one
    of two spaces. What is left at the end of the text stays, even a space."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")
