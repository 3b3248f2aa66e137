"""The two ends of wandb: what an offline run has in its file, and a server that takes runs over HTTP.

The server knows as much of the protocol as wandb 0.31 uses to start, resume, stream and end a run. It is no proof of
what the real one does with the rows, but wandb itself decides on ids, steps and offsets by what it answers.
"""

import gzip
import json
import re
import struct
import time
from collections.abc import Iterator
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

BLOCK, HEADER = 32768, 7  # of LevelDB's log format, which .wandb files have after HEADER bytes of their own
FULL, LAST = 1, 4


def records(path: Path) -> Iterator[Record]:
    """The records of a .wandb file."""
    data, place, message = path.read_bytes(), HEADER, b""
    while place + HEADER <= len(data):
        if BLOCK - place % BLOCK < HEADER:
            place += BLOCK - place % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + HEADER])
        message += data[place + HEADER : place + HEADER + length]
        place += HEADER + length
        if kind in (FULL, LAST):
            yield Record.FromString(message)
            message = b""


class Recording:
    """An offline run, read back."""

    def __init__(self, path: Path) -> None:
        self.rows: list[dict[str, Any]] = []
        self.metrics: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.preempted = False
        for record in records(path):
            kind = record.WhichOneof("record_type")
            if kind == "run":
                self.run = record.run
                self.config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            elif kind == "history":
                items = record.history.item
                self.rows.append({item.nested_key[0] or item.key: json.loads(item.value_json) for item in items})
            elif kind == "metric":
                self.metrics[record.metric.name or record.metric.glob_name] = record.metric
            elif kind == "environment" and record.environment.HasField("git"):
                self.commit = record.environment.git.commit
            elif kind == "preempting":
                self.preempted = True
            elif kind == "exit":
                self.exit_code = record.exit.exit_code


def recordings(folder: Path) -> list[Recording]:
    """The offline runs in a run's folder, oldest first."""
    found = [Recording(path) for path in (folder / "wandb").glob("offline-run-*/run-*.wandb")]
    return sorted(found, key=lambda recording: recording.run.start_time.ToNanoseconds())


class Server:
    """Takes runs within a `with` block, at `url`."""

    def __init__(self) -> None:
        self.buckets: dict[str, dict[str, Any]] = {}
        """by id: the fields that the run was made with"""
        self.histories: dict[str, dict[int, dict[str, Any]]] = {}
        """by id: rows by the line that they were sent for"""
        self.takes_rows = True
        """or else whoever sends rows gets no answer"""
        backend = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.answer({})

            def do_PUT(self) -> None:
                self.body()
                self.answer({})

            def do_POST(self) -> None:
                body = self.body()
                if self.path.endswith("/graphql"):
                    query = json.loads(body)
                    name = re.search(r"(?:query|mutation) (\w+)", query["query"])
                    self.answer({"data": backend.graphql(name[1] if name else "", query.get("variables") or {})})
                elif self.path.endswith("/file_stream"):
                    backend.stream(self.path.split("/")[-2], json.loads(body))
                    self.answer({"limits": {}})
                else:
                    self.answer({})

            def body(self) -> bytes:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                return gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body

            def answer(self, content: dict[str, Any]) -> None:
                encoded = json.dumps(content).encode()
                with suppress(BrokenPipeError):  # asked by a process that is gone
                    self.send_response(200)
                    self.send_header("Content-Type", "application/json")
                    self.send_header("Content-Length", str(len(encoded)))
                    self.end_headers()
                    self.wfile.write(encoded)

            def log_message(self, *_: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "Server":
        Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: TracebackType | BaseException | type[BaseException] | None) -> None:
        self.takes_rows = True
        self._server.shutdown()
        self._server.server_close()

    def history(self, run: str) -> list[dict[str, Any]]:
        """A run's rows in the order of their lines."""
        lines = self.histories.get(run, {})
        assert sorted(lines) == list(range(len(lines))), "lines are missing"
        return [lines[line] for line in sorted(lines)]

    def stream(self, run: str, message: dict[str, Any]) -> None:
        while not self.takes_rows:
            time.sleep(0.1)
        sent = (message.get("files") or {}).get("wandb-history.jsonl")
        for number, line in enumerate(sent["content"] if sent else []):
            self.histories[run][sent["offset"] + number] = json.loads(line)

    def graphql(self, name: str, variables: dict[str, Any]) -> dict[str, Any]:
        run = variables.get("name")
        project = {"id": "project", "name": variables.get("project"), "entity": {"id": "entity", "name": "me"}}
        if name == "Viewer":
            return {"viewer": {"id": "me", "entity": "me", "username": "me", "flags": "{}", "teams": {"edges": []}}}
        if name == "RunResumeStatus":
            return {"model": project | {"bucket": self._resume_status(run) if run in self.buckets else None}}
        if name == "UpsertBucket":
            new = run not in self.buckets
            given = {key: value for key, value in variables.items() if value is not None}
            self.buckets[run] = self.buckets.get(run, {}) | given
            lines = len(self.histories.setdefault(run, {}))
            bucket = {"id": f"id of {run}", "name": run, "historyLineCount": lines, "project": project}
            return {"upsertBucket": {"bucket": bucket, "inserted": new}}
        if name == "CreateRunFiles":
            files = [{"name": file, "uploadUrl": f"{self.url}/files/{file}"} for file in variables["files"]]
            return {"createRunFiles": {"runID": variables["run"], "uploadHeaders": [], "files": files}}
        return {}

    def _resume_status(self, run: str) -> dict[str, Any]:
        lines = self.histories[run]
        last = json.dumps(lines[max(lines)]) if lines else None
        counts = {"historyLineCount": len(lines), "eventsLineCount": 0, "logLineCount": 0}
        tails = {"historyTail": json.dumps([last] if last else []), "eventsTail": "[]"}
        config = self.buckets[run].get("config", "{}")
        own = {"id": f"id of {run}", "name": run, "config": config, "wandbConfig": '{"t": 1}'}
        return {**own, "summaryMetrics": last or "{}", **counts, **tails}
