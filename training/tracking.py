"""Weights & Biases, as an addition that can fail without harm: it never asks for a login and never stops a run."""

from __future__ import annotations

import os
import socket
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from training.console import say, warn

PROBE_SECONDS = 5.0
INIT_SECONDS = 30.0


class Tracker:
    """A run in Weights & Biases. Without a login or a network it is recorded offline, to be sent with `wandb sync`.

    Args:
        project, name: where the run appears.
        x_axis: the key that all charts are drawn against: iter, tokens or time.
        folder: where wandb keeps its files.
        settings: recorded with the run.
    """

    def __init__(self, *, project: str, name: str, x_axis: str, folder: Path, settings: dict[str, Any]) -> None:
        self._run: Any = None
        try:
            import wandb
            import wandb.errors

            chosen = os.environ.get("WANDB_MODE")
            options: dict[str, Any] = {"project": project, "name": name, "dir": folder, "config": settings}
            options["settings"] = wandb.Settings(init_timeout=INIT_SECONDS)
            try:
                mode: Any = chosen or ("online" if _can_go_online(wandb) else "offline")
                self._run = wandb.init(mode=mode, **options)
            except wandb.errors.CommError as error:
                if chosen:
                    raise
                say(f"wandb: no connection ({error}), recording offline")
                self._run = wandb.init(mode="offline", **options)
            self._run.define_metric(x_axis)
            self._run.define_metric("*", step_metric=x_axis)
        except Exception as error:
            self._give_up(error)

    def log(self, row: dict[str, Any]) -> None:
        """Records a row of metrics."""
        if self._run is not None:
            try:
                self._run.log(row)
            except Exception as error:
                self._give_up(error)

    def finish(self) -> None:
        """Ends the run there."""
        if self._run is not None:
            try:
                self._run.finish()
            except Exception as error:
                self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        warn(f"wandb failed, training goes on without it: {error}")
        self._run = None


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
