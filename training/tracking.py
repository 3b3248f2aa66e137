"""Weights & Biases, as an addition that can fail without harm: it never asks for a login and never stops a run.

What is there mirrors `metrics.jsonl`, row by row, under one run id that `wandb.json` in the run's folder keeps. That
file also has the last row that was sent. A start sends the rows after it first, so that rows which a process
could not send (it was killed, wandb failed, or was not asked for) are there in the end. Where `metrics.jsonl` no longer
holds that row, the run has gone on in another way; it becomes a new run there, with all rows, beside the old one.

A row's step in wandb is three times its `iter`, plus one for a training row, two for an evaluation: no two rows share a
step, and steps grow over resumes, as wandb demands.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import re
import shlex
import socket
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from secrets import token_hex
from threading import Thread
from typing import Any
from urllib.parse import urlsplit

from training.console import say, warn
from training.folder import read_json, write_json
from training.metrics import KINDS, format_count, kind_of, read_rows
from training.stopping import STOPPED

ROOT = Path(__file__).resolve().parents[1]
PROBE_SECONDS = 5.0
INIT_SECONDS = 30.0
UPLOAD_SECONDS = 10.0  # to send what is left at the end of a run; with twice the next less than `stop_seconds`
GRACE_SECONDS = 3.0  # more than that until wandb's process is killed, and for that to end
AXES = ("iter", "tokens", "time")

Row = dict[str, Any]


class Tracker:
    """A run in Weights & Biases. Without a login or a network it is recorded offline, to be sent with `wandb sync`.

    Rows go to wandb from a thread of their own: however long wandb takes, training does not wait.

    Args:
        record: what `config.json` has; its `wandb_*` keys say where and how the run appears.
        folder: the run's. The rows of its `metrics.jsonl` that wandb does not have yet are sent at once.
        upload_seconds: time to send what is left at the end.
        without, lacking: what becomes of the run when wandb fails, and when it fails at the end; for the warning.
    """

    def __init__(
        self,
        record: dict[str, Any],
        folder: Path,
        upload_seconds: float = UPLOAD_SECONDS,
        without: str = "training goes on without it",
        lacking: str = "it lacks the last rows of the run",
    ) -> None:
        self.problem: str | None = None
        """why wandb failed"""
        self._upload_seconds, self._without, self._lacking = upload_seconds, without, lacking
        self._folder, self._place = folder.absolute(), folder / "wandb.json"
        self._project = record.get("wandb_project") or "mars-gpt2"
        self._id = ""
        self._sent: Row | None = None
        self._whole = True  # no process of the run left a part without an end
        self._rows = SimpleQueue[Row | None]()
        self._run: Any = None
        self._thread: Thread | None = None
        self._exit_code = 0
        if os.environ.get("WANDB_MODE") == "disabled":
            return
        try:
            rows = read_rows(folder / "metrics.jsonl")
            waiting = self._identify(rows)
            self._run = self._start(record)
            self._note(None)  # only now: what wandb refuses must not take the place of a run that it has
            if not self._run.offline:  # the server knows best what it has
                waiting = [row for row in rows if step_of(row) >= self._run.starting_step]
            self._thread = Thread(target=self._send_rows, name="wandb", daemon=True)
        except Exception as error:
            self._give_up(error)
            _kill_service()
            return
        atexit.register(self.finish, 1)  # before wandb's own handler, which would wait without end
        for row in waiting:
            self.log(row)
        self._thread.start()

    def log(self, row: Row) -> None:
        """Sends a row of metrics, later."""
        if self._thread is not None and self.problem is None:
            self._rows.put({key: math.nan if value is None else value for key, value in row.items()})

    def finish(self, exit_code: int = 0) -> None:
        """Ends the run there, within `upload_seconds` and 6 more: then what is left stays on the disk.

        Args:
            exit_code: of the run: 0 makes it finished there, 75 (to be started again) preempted, others failed.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        self._exit_code = exit_code
        self._without = self._lacking
        atexit.unregister(self.finish)
        self._rows.put(None)
        thread.join(self._upload_seconds + GRACE_SECONDS)
        if thread.is_alive():
            self._give_up(TimeoutError(self._unsent()))
        if self.problem is not None:
            _kill_service()
        elif self._run.offline:
            say(f"wandb: recorded offline; to send it: {self._how_to_send()}")

    def _identify(self, rows: list[Row]) -> list[Row]:
        """Finds the id that the run has in wandb. Returns the rows that it does not have there, as far as is known.

        The id is a new one where `wandb.json` is that of another run: of the folder that this one is a copy of, in
        another project, or of a course that was given up."""
        known = read_json(self._place)
        former = Path(str(known.get("folder")))
        is_copy = former.resolve() != self._folder.resolve() and read_json(former / "wandb.json").get(
            "id"
        ) == known.get("id")
        usable = re.fullmatch(r"[\w-]{1,64}", str(known.get("id")))
        if usable and known.get("project") == self._project and not is_copy:
            sent, keys = known.get("sent"), [_key(row) for row in rows]
            if sent is None or sent in keys:
                self._id, self._sent = known["id"], sent
                self._whole = bool(known.get("whole") and known.get("ended"))
                return rows if sent is None else rows[keys.index(sent) + 1 :]
            say("wandb: what was sent is no longer the course of this run; it goes on as a new run there")
        self._id, self._sent, self._whole = token_hex(4), None, True
        return rows

    def _start(self, record: dict[str, Any]) -> Any:
        """Starts the run in wandb, or goes on with it."""
        import wandb
        import wandb.errors

        logging.raiseExceptions = False  # on a full disk wandb's own log would print a traceback for each line
        chosen = os.environ.get("WANDB_MODE")
        console: Any = os.environ.get("WANDB_CONSOLE", "off")  # what is printed would have to pass through wandb
        options: dict[str, Any] = {
            "project": self._project,
            "id": self._id,
            "resume": "allow",
            "name": record.get("wandb_run_name") or self._folder.name,
            **labels(record),
            "dir": self._folder,
            "config": record,
            "settings": wandb.Settings(
                init_timeout=INIT_SECONDS,
                finish_timeout=self._upload_seconds,
                finish_timeout_raises=True,
                git_root=str(ROOT),  # not that of the folder
                console=console,
                quiet=True,
            ),
        }
        try:
            mode: Any = chosen or ("online" if _can_go_online(wandb) else "offline")
            run = wandb.init(mode=mode, **options)
        except wandb.errors.CommError as error:
            if chosen:
                raise
            say(f"wandb: no connection ({' '.join(str(error).split())}), recording offline")
            _kill_service()  # it still holds the id
            run = wandb.init(mode="offline", **options)
        axis = record.get("wandb_x_axis") or AXES[0]
        run.define_metric(axis)
        run.define_metric("*", step_metric=axis)
        run.define_metric("val/loss", step_metric=axis, summary="min,last")  # the table of runs can sort by the best
        say(f"wandb: {'recording offline in ' + run.settings.sync_dir if run.offline else run.url}")
        return run

    def _send_rows(self) -> None:
        """What the thread does."""
        last: Row | None = None
        try:
            while (row := self._rows.get()) is not None:
                self._run.log(row, step=step_of(row), commit=True)
                last = row
                if self._rows.empty():  # not for each of thousands
                    self._note(last)
            if self._exit_code == STOPPED:
                self._run.mark_preempting()
            self._run.finish(exit_code=self._exit_code)
            self._note(last, ended=True)
        except TimeoutError:
            self._give_up(TimeoutError(self._unsent()))
        except Exception as error:
            self._give_up(error)

    def _note(self, row: Row | None, ended: bool = False) -> None:
        """Writes `wandb.json`: the last row sent (None: as it says), and whether this process has ended its part."""
        if row is not None:
            self._sent = _key(row)
        content = {"id": self._id, "project": self._project, "folder": str(self._folder), "sent": self._sent}
        with suppress(OSError):
            write_json(self._place, content | {"whole": self._whole, "ended": ended})

    def _how_to_send(self) -> str:
        """What sends a run that was recorded offline."""
        if not self._whole:
            # A process that was killed leaves half a record, at which `wandb sync` stops, and may have held back rows.
            return f"with a network: {self._upload_command()}"
        parts = sorted((self._folder / "wandb").glob(f"offline-run-*-{self._id}*"))
        waiting = [part for part in parts if not any(part.glob("*.synced"))]
        return " ".join(["wandb sync", *(shlex.quote(str(part)) for part in waiting)])

    def _upload_command(self) -> str:
        return f"python scripts/upload_wandb.py {shlex.quote(str(self._folder))}"

    def _unsent(self) -> str:
        seconds = f"{self._upload_seconds:g} s"
        return f"not all was sent within {seconds}; {self._upload_command()} sends the rest"

    def _give_up(self, error: Exception) -> None:
        if self.problem is None:
            self.problem = " ".join(str(error).split()) or type(error).__name__
            warn(f"wandb failed, {self._without}: {self.problem}")


def step_of(row: Row) -> int:
    """The step of a row of `metrics.jsonl` in wandb."""
    return len(KINDS) * int(row["iter"]) + KINDS.index(kind_of(row))


def labels(record: dict[str, Any]) -> dict[str, Any]:
    """Group, job type and tags of a run, so that runs of one size and data set lie in one chart, by optimizer.

    Args:
        record: what `config.json` has; its keys `wandb_group`, `wandb_job_type` and `wandb_tags` come first.
    """
    data = record.get("data")
    path = (data.get("path") if isinstance(data, dict) else None) or record.get("dataset") or "unknown data"
    dataset, optimizer = Path(path).name, str(record.get("optimizer", "unknown optimizer"))
    parameters = record.get("parameters")
    size = f"gpt2-{format_count(float(f'{parameters:.3g}'))}" if isinstance(parameters, int) else "gpt2"
    form = "exact" if record.get("exact") else str(record.get("estimator", "recursive"))
    tags = [optimizer, size, dataset, f"seed {record.get('seed')}", *([form] if form != "recursive" else [])]
    return {
        "group": record.get("wandb_group") or f"{size} {dataset}",
        "job_type": record.get("wandb_job_type") or optimizer,
        "tags": list(dict.fromkeys(record.get("wandb_tags") or [tag[:64] for tag in tags])),
    }


def _key(row: Row) -> Row:
    """What tells a row from one that was computed in another way. Its time may differ from the file's."""
    kind = kind_of(row)
    value = row[kind]
    return {"iter": row["iter"], kind: value if value is not None and math.isfinite(value) else None}


def _can_go_online(wandb: Any) -> bool:
    """Whether there is a login, and a server that answers."""
    if not wandb.login(prompt=False, verify=False):
        say("wandb: no login on this machine, recording offline")
        return False
    if any(os.environ.get(name) for name in ("HTTPS_PROXY", "https_proxy")):
        return True  # the proxy knows the way; wandb's own time limit decides
    server = urlsplit(wandb.setup().settings.base_url)
    try:
        port = server.port or (80 if server.scheme == "http" else 443)
        socket.create_connection((server.hostname, port), timeout=PROBE_SECONDS).close()
    except OSError as error:
        say(f"wandb: {server.hostname} cannot be reached ({error}), recording offline")
        return False
    return True


def _kill_service() -> None:
    """Ends wandb's own process, for which Python would wait at its end. wandb has no public way to do so."""

    def forget() -> None:
        with suppress(Exception, SystemExit):  # wandb itself would exit with the status of that process
            import wandb

            service: Any = wandb.setup()._connection
            service._proc._process.kill()
            wandb.teardown()

    thread = Thread(target=forget, daemon=True)
    thread.start()
    thread.join(GRACE_SECONDS)
