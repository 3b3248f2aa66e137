"""Data sets of the hub: against a small hub on this machine, against local folders, and without a network."""

import hashlib
import http.server
import json
import socket
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data import DataError, hub
from data.hub import Place
from data.network import within

Run = Callable[..., "subprocess.CompletedProcess[str]"]

DOCUMENTS = [f"Document {i} of the web. " * (i % 9) + "😀" for i in range(500)]


def write_shards(folder: Path, documents: list[str], count: int = 3) -> None:
    folder.mkdir(parents=True)
    for i in range(count):
        part = documents[i * len(documents) // count : (i + 1) * len(documents) // count]
        pq.write_table(pa.table({"text": part}), folder / f"train-{i:05}-of-{count:05}.parquet")


def tokens(folder: Path) -> list[list[int]]:
    return [np.fromfile(folder / name, "<u2").tolist() for name in ("train.bin", "val.bin")]


class FakeHub(http.server.BaseHTTPRequestHandler):
    """What the hub's clients ask for: a repository's entry, its folders, and files (whole or in part)."""

    protocol_version = "HTTP/1.1"
    repositories: dict[tuple[str, str], Path]  # by (name, revision or commit)
    log: list[str]

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def answer(self, status: int, body: bytes, **headers: str) -> None:
        self.send_response(status)
        for name, value in ({"Content-Length": str(len(body))} | headers).items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def refuse(self, code: str) -> None:
        self.answer(404, b'{"error": "not found"}', X_Error_Code=code, X_Error_Message="not found")

    def serve(self) -> None:
        self.log.append(f"{self.command} {self.path} {self.headers.get('Range', '')}")
        parts = [urllib.parse.unquote(part) for part in self.path.split("?")[0].strip("/").split("/")]
        api = parts[0] == "api"
        owner, repo, action, revision, *rest = [*parts[1 + api :], "", "main"][: max(4, len(parts) - 1 - api)]
        name = f"{owner}/{repo}"
        root = self.repositories.get((name, revision))
        if root is None:
            return self.refuse("RevisionNotFound" if any(n == name for n, _ in self.repositories) else "RepoNotFound")
        commit = hashlib.sha1(str(root).encode()).hexdigest()
        self.repositories[name, commit] = root
        files = {path.relative_to(root).as_posix(): path for path in sorted(root.rglob("*")) if path.is_file()}
        if api and action in ("revision", ""):
            siblings = [{"rfilename": n, "size": p.stat().st_size} for n, p in files.items()]
            entry = {"id": name, "sha": commit, "siblings": siblings, "private": False, "downloads": 0, "tags": []}
            return self.answer(200, json.dumps(entry).encode(), Content_Type="application/json")
        if api and action == "tree":
            entries = [
                {
                    "type": "file" if p.is_file() else "directory",
                    "path": p.relative_to(root).as_posix(),
                    "oid": "0" * 40,
                }
                | ({"size": p.stat().st_size} if p.is_file() else {})
                for p in sorted((root / "/".join(rest)).iterdir())
            ]
            return self.answer(200, json.dumps(entries).encode(), Content_Type="application/json")
        path = files.get("/".join(rest))
        if action != "resolve" or path is None:
            return self.refuse("EntryNotFound")
        content, status, headers = path.read_bytes(), 200, {}
        if "Range" in self.headers:
            first, last = self.headers["Range"].removeprefix("bytes=").split("-")
            end = min(int(last or len(content)), len(content) - 1)
            headers["Content_Range"] = f"bytes {first}-{end}/{len(content)}"
            content, status = content[int(first) : end + 1], 206
        etag = hashlib.sha256(path.read_bytes()).hexdigest()
        return self.answer(status, content, X_Repo_Commit=commit, ETag=f'"{etag}"', Accept_Ranges="bytes", **headers)

    do_GET = do_HEAD = serve


@pytest.fixture
def fake_hub(tmp_path: Path) -> Iterator[type[FakeHub]]:
    class Hub(FakeHub):
        pass

    Hub.repositories, Hub.log = {}, []
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    Hub.endpoint = f"http://127.0.0.1:{server.server_port}"  # type: ignore[attr-defined]
    yield Hub
    server.shutdown()
    thread.join()


@pytest.fixture
def hub_run(command: Run, fake_hub: Any) -> Run:
    def hub_run(*arguments: Any, **options: Any) -> Any:
        return command(*arguments, HF_ENDPOINT=fake_hub.endpoint, NO_PROXY="127.0.0.1", **options)

    return hub_run


# ---- OpenWebText ----


def test_openwebtext_is_taken_from_the_first_place_that_is_complete(
    hub_run: Run, run: Run, fake_hub: Any, tmp_path: Path
) -> None:
    write_shards(tmp_path / "good/plain_text", DOCUMENTS)
    write_shards(tmp_path / "part/plain_text/partial-train", DOCUMENTS[:100])
    (tmp_path / "script").mkdir()
    (tmp_path / "script/openwebtext.py").write_text("")
    fake_hub.repositories["Skylion007/openwebtext", "refs/convert/parquet"] = tmp_path / "part"
    fake_hub.repositories["Skylion007/openwebtext", "refs/pr/18"] = tmp_path / "script"
    fake_hub.repositories["dylanebert/openwebtext", "main"] = tmp_path / "good"
    # The true number of documents can't be had here.
    error = hub_run("openwebtext", "--out", "out", status=2).stderr
    for part in (
        "refs/convert/parquet/plain_text: 100 documents, expected 8013769",
        "refs/pr/18/plain_text: no parquet files",
        "refs/pr/22/plain_text: RevisionNotFoundError",
        "dylanebert/openwebtext@main/plain_text: 500 documents",
        "--source REPO[@REVISION][/FOLDER]",
        "text FOLDER --name openwebtext",
    ):
        assert part in error
    assert len(error.splitlines()) == 1
    assert any("/resolve/" in line for line in fake_hub.log)  # for the counts, but nothing has been downloaded whole
    assert not any(line.startswith("GET") and "/resolve/" in line and "bytes=" not in line for line in fake_hub.log)

    source = "dylanebert/openwebtext@main/plain_text"
    hub_run("openwebtext", "--source", source, "--allow-other-count", "--out", "out")
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert meta["source"]["repository"] == "dylanebert/openwebtext"
    assert meta["source"]["commit"] == hashlib.sha1(str(tmp_path / "good").encode()).hexdigest()
    run("text", tmp_path / "good/plain_text", "--out", "local")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "local")


def test_openwebtext_stops_at_the_first_good_place(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def find_shards(place: Place) -> Any:
        tried.append(place)
        shards = hub.Shards(place, "0" * 40, {"a.parquet": 1})
        number = [5, hub.OPENWEBTEXT_DOCUMENTS, 7][len(tried) - 1]
        monkeypatch.setattr(hub.Shards, "count", lambda self: number)
        return shards

    monkeypatch.setattr(hub, "find_shards", find_shards)
    source = hub.openwebtext()
    assert tried == hub.OPENWEBTEXT_PLACES[:2]
    assert source.description["revision"] == "refs/pr/18"


def test_openwebtext_from_a_local_folder(run: Run, fails: Callable[..., str], tmp_path: Path) -> None:
    write_shards(tmp_path / "shards", DOCUMENTS)
    line = fails("openwebtext", "--source", "shards", "--out", "out")
    assert str(tmp_path / "shards") in line
    assert "500 documents, expected 8013769" in line
    run("openwebtext", "--source", "shards", "--allow-other-count", "--out", "out")
    run("text", "shards", "--out", "local")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "local")
    assert "REPO[@REVISION][/FOLDER]" in fails("openwebtext", "--source", "nowhere")


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("a/b", Place("a/b", "main", "")),
        ("a/b/c/d", Place("a/b", "main", "c/d")),
        ("a/b@v1", Place("a/b", "v1", "")),
        ("a/b@v1/c", Place("a/b", "v1", "c")),
        ("a/b@refs/pr/18/plain_text", Place("a/b", "refs/pr/18", "plain_text")),
        ("a/b@refs/convert/parquet", Place("a/b", "refs/convert/parquet", "")),
    ],
)
def test_parse_place(text: str, place: Place) -> None:
    assert Place.parse(text) == place


# ---- others ----


def test_fineweb_edu(hub_run: Run, fake_hub: Any, tmp_path: Path) -> None:
    write_shards(tmp_path / "fw/sample/10BT", DOCUMENTS)
    fake_hub.repositories["HuggingFaceFW/fineweb-edu", "main"] = tmp_path / "fw"
    hub_run("fineweb_edu", "--config", "sample-10BT", "--out", "a")
    assert sum(map(len, tokens(tmp_path / "a"))) > 5000
    assert "sample/100BT" in hub_run("fineweb_edu", "--out", "b", status=2).stderr


def test_hf_of_an_unknown_name(hub_run: Run) -> None:
    assert "RepositoryNotFoundError" in hub_run("hf", "no/such", "--out", "out", status=2).stderr


def test_hf_with_a_local_folder(run: Run, fails: Callable[..., str], tmp_path: Path) -> None:
    write_shards(tmp_path / "set", DOCUMENTS)
    run("hf", "set", "--out", "out")
    run("text", "set", "--out", "local")
    assert tokens(tmp_path / "out") == tokens(tmp_path / "local")
    assert "its fields: text" in fails("hf", "set", "--out", "x", "--text-field", "body")
    assert "validation" in fails("hf", "set", "--out", "x", "--split", "validation")
    (tmp_path / "script").mkdir()
    (tmp_path / "script/script.py").write_text("")
    assert "script" in fails("hf", "script", "--out", "x")


def test_hellaswag(hub_run: Run, fake_hub: Any, tmp_path: Path) -> None:
    """Only the validation split is fetched."""
    item = {"activity_label": "A", "ctx_a": "b", "ctx_b": "c", "endings": ["d", "e", "f", "g"], "label": "3"}
    (tmp_path / "set/data").mkdir(parents=True)
    for split in ("train", "validation", "test"):
        pq.write_table(pa.Table.from_pylist([item] * 2), tmp_path / f"set/data/{split}-00000-of-00001.parquet")
    fake_hub.repositories["Rowan/hellaswag", "main"] = tmp_path / "set"
    assert "2 items of HellaSwag written" in hub_run("hellaswag", "--out", "out").stdout
    lines = (tmp_path / "out/validation.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [item] * 2
    assert [line.split()[1] for line in fake_hub.log if line.startswith("GET") and "/resolve/" in line] == [
        f"/datasets/Rowan/hellaswag/resolve/{hashlib.sha1(str(tmp_path / 'set').encode()).hexdigest()}"
        "/data/validation-00000-of-00001.parquet"
    ]


def test_hellaswag_without_a_network(fails: Callable[..., str], tmp_path: Path) -> None:
    line = fails("hellaswag", "--out", "out")
    assert "no connection to huggingface.co" in line
    assert "python data/prepare.py hellaswag --from FILE" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["openwebtext"], ["fineweb_edu"], ["hf", "a/b"]])
def test_no_network(command_fails: Callable[..., str], arguments: list[str]) -> None:
    start = time.monotonic()
    line = command_fails(*arguments, "--tokenizer", "bytes")
    assert time.monotonic() - start < 30
    assert "no connection to huggingface.co" in line
    assert "data/prepare.py text FOLDER" in line


@pytest.mark.slow
@pytest.mark.parametrize("arguments", [["openwebtext"], ["hf", "a/b"], ["tokenizer"]])
def test_a_server_that_never_answers(command_fails: Callable[..., str], tmp_path: Path, arguments: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts, by its backlog, and says nothing
        proxy = f"http://127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        options = [] if arguments == ["tokenizer"] else ["--tokenizer", "bytes"]
        environment = {
            "HTTP_PROXY": proxy,
            "HTTPS_PROXY": proxy,
            "ALL_PROXY": proxy,
            "TIKTOKEN_CACHE_DIR": str(tmp_path),
        }
        command_fails(*arguments, *options, **environment)
        assert time.monotonic() - start < 30


# ---- calls that end ----


def test_within() -> None:
    assert within(60, lambda: 3) == 3
    with pytest.raises(DataError, match="why"):
        within(60, lambda: (_ for _ in ()).throw(DataError("why")))
    with pytest.raises(TimeoutError):
        within(0.01, threading.Event().wait)
