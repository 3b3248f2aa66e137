"""HellaSwag's items: read, cleaned as the harness does it, fetched from files, and mistakes in them."""

import importlib.util
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import DataError
from data.items import Item, read_items

Run = Callable[..., "subprocess.CompletedProcess[str]"]

ROW = {
    "ind": 4,
    "activity_label": "Baking bread",
    "ctx_a": "[header] How to bake bread [title] Mix the flour. [step] Add water [substeps]  slowly.",
    "ctx_b": "then the Baker",
    "ctx": "unused",
    "endings": ["waits.", " [title] sings  loudly. ", "[step] kneads [it].", "leaves"],
    "label": "2",
    "split": "val",
}


def write(path: Path, *rows: Any) -> Path:
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return path


def test_an_item_by_hand(tmp_path: Path) -> None:
    """Brackets leave two spaces behind, which become one; of three, two."""
    (item,) = read_items(write(tmp_path / "a.jsonl", ROW))
    assert item == Item(
        "Baking bread: How to bake bread. Mix the flour. Add water  slowly. Then the baker",
        ("waits.", " sings loudly.", " kneads .", "leaves"),
        2,
    )


def test_texts_are_the_harness_s(tmp_path: Path) -> None:
    import datasets

    package = importlib.util.find_spec("lm_eval")
    assert package is not None, "run: pip install -r tests/requirements.txt"
    assert package.submodule_search_locations
    file = Path(package.submodule_search_locations[0]) / "tasks" / "hellaswag" / "utils.py"
    spec = importlib.util.spec_from_file_location("harness_hellaswag", file)
    assert spec is not None
    assert spec.loader is not None
    harness = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(harness)

    texts = ["", "  ", "A man.", "he [title] Go [x", "[a] [b]  [c]   d", "ÉCLAIR [title] [step]", "x\n[y\nz]  w ", "ßs"]
    rows = [
        ROW | {"ind": n, "activity_label": a, "ctx_a": b, "ctx_b": c, "endings": [a, b, c, "end"], "label": str(n % 4)}
        for n, (a, b, c) in enumerate((a, b, c) for a in texts[2:] for b in texts for c in texts)
    ]
    expected = harness.process_docs(datasets.Dataset.from_list(rows))
    for item, doc in zip(read_items(write(tmp_path / "a.jsonl", *rows)), expected, strict=True):
        assert (item.query, list(item.endings), item.label) == (doc["query"], doc["choices"], doc["gold"])


def test_limit_blank_lines_and_labels_as_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", ROW, "", ROW | {"label": 0}, ROW | {"label": 3})
    assert [item.label for item in read_items(path)] == [2, 0, 3]
    assert [item.label for item in read_items(path, limit=2)] == [2, 0]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ('{"ind": 1,', "not JSON"),
        ("[1]", "list, not an object"),
        ({"ctx_b": None}, "ctx_b is None, not a text"),
        ({"endings": "one"}, "endings is not a list of texts"),
        ({"endings": ["a", 1, "b", "c"]}, "endings is not a list of texts"),
        ({"label": ""}, r"label is '', allowed: 0 to 3 \(the test split has no labels\)"),
        ({"label": 4}, "label is 4, allowed: 0 to 3"),
    ],
)
def test_a_damaged_line_is_named(tmp_path: Path, row: Any, message: str) -> None:
    path = write(tmp_path / "a.jsonl", ROW, ROW | row if isinstance(row, dict) else row)
    with pytest.raises(DataError, match=rf"^{path}, line 2: {message}"):
        read_items(path)


def test_files_without_items(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}/gone.jsonl is missing; .* --from FILE"):
        read_items(tmp_path / "gone.jsonl")
    with pytest.raises(DataError, match="holds no items"):
        read_items(write(tmp_path / "empty.jsonl"))


def test_prepare_from_a_file(run: Run, fails: Callable[..., str], tmp_path: Path) -> None:
    """Either layout gives the same items. A second call without a file does not fetch anything."""
    rows = [ROW, ROW | {"label": "0", "ctx_b": "é"}]
    source = write(tmp_path / "authors.jsonl", *rows)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "validation.parquet")
    out = run("hellaswag", "--from", source.name, "--out", "a").stdout
    assert f"2 items of HellaSwag written to {tmp_path}/a/validation.jsonl (the validation split has 10,042" in out
    run("hellaswag", "--from", "validation.parquet", "--out", "b")
    written = [tmp_path / name / "validation.jsonl" for name in ("a", "b")]
    assert read_items(written[0]) == read_items(written[1]) == read_items(source)
    assert [json.loads(line) for line in written[0].read_text().splitlines()] == rows
    assert "holds 2 items, HellaSwag's validation split has 10,042; delete the file" in fails("hellaswag", "--out", "a")
    write(tmp_path / "whole.jsonl", *[ROW] * 10_042)
    assert run("hellaswag", "--from", "whole.jsonl", "--out", "c").stdout.endswith("c/validation.jsonl\n")
    assert "already: 10,042" in run("hellaswag", "--out", "c").stdout
    assert f"{tmp_path} is a folder; give the .jsonl or .parquet file in it" in fails("hellaswag", "--from", ".")

    (tmp_path / "no.parquet").write_text("text")
    assert "no.parquet cannot be read as parquet" in fails("hellaswag", "--from", "no.parquet", "--out", "a")
    assert f"{tmp_path}/bad.jsonl, line 1" in fails(
        "hellaswag", "--from", write(tmp_path / "bad.jsonl", {}), "--out", "a"
    )
    assert read_items(written[0]) == read_items(source), "what was there has stayed"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["validation.jsonl"]
