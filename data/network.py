"""Network calls that end.

A name server that never answers or a proxy that swallows packets can hold a call for minutes, whatever timeout it was
given: timeouts of HTTP libraries cover connecting and reading, not name resolution, and start anew with each retry. A
user should learn within half a minute that there is no network. So such calls run in a daemon thread, with one limit
for everything.
"""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

LIMIT = 20.0
"""Seconds after which a first contact with a server counts as failed."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """The result of `call()`, or its exception; `TimeoutError` where it takes longer than `seconds`."""
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)  # daemon: a hanging call does not keep the process alive
    thread.start()
    thread.join(seconds)
    if results:
        return results[0]
    raise errors[0] if errors else TimeoutError(f"no answer within {seconds:g} s")


def reason(error: BaseException, limit: int = 200) -> str:
    """An exception as one short line."""
    text = " ".join(str(error).split())
    text = text if len(text) <= limit else text[: limit - 1] + "…"
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
