"""Counts the memory of tensors that are alive, without any memory: of fake or meta tensors, which have shapes only.

A formula for the activations of a model is wrong as soon as the model changes, and says nothing about the moment at
which most of them are alive. So the model's own code runs here, and every storage that comes into being is written
down until nothing refers to it any more.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Ledger(TorchDispatchMode):
    """While entered, notes the storages that operations make; those of before are not counted. Each is booked under
    the label of its time, and the peak keeps the balance of every label."""

    def __init__(self) -> None:
        super().__init__()
        self.label = "other"
        self.live: Counter[str] = Counter()
        """bytes alive by label"""
        self.peak, self.at_peak = 0, Counter[str]()
        self._now, self._paused = 0, False
        self._entries: dict[int, tuple[int, str]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if not self._paused:
            # A copy of a weight in other numbers is autocast's.
            copies_weight = function is torch.ops.aten._to_copy.default and isinstance(args[0], torch.nn.Parameter)
            old = {_key(tensor) for tensor in _tensors((args, kwargs))}  # of views, and of what is updated in place
            for tensor in _tensors(result):
                if _key(tensor) not in old:
                    self._note(tensor, "weight copies" if copies_weight else self.label)
        return result

    def relabel(self, tensor: Tensor, label: str) -> None:
        """Books a tensor's storage under another label; nothing where it was not counted."""
        key = _key(tensor)
        if key in self._entries:
            size, old = self._entries[key]
            self._entries[key] = (size, label)
            self.live[old] -= size
            self.live[label] += size

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Storages that are made meanwhile are not counted."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def unseen(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, not counted."""

        def run(*args: Any, **kwargs: Any) -> Any:
            with self.paused():
                return function(*args, **kwargs)

        return run

    def _note(self, tensor: Tensor, label: str) -> None:
        storage, key = tensor.untyped_storage(), _key(tensor)
        if key in self._entries:
            return
        size = storage.nbytes()
        self._entries[key] = (size, label)
        weakref.finalize(storage, self._strike, key)
        self.live[label] += size
        self._now += size
        if self._now > self.peak:
            self.peak, self.at_peak = self._now, Counter(self.live)

    def _strike(self, key: int) -> None:
        size, label = self._entries.pop(key)
        self.live[label] -= size
        self._now -= size


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
