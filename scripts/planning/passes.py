"""What the forward and backward passes of an update hold in memory, beside weights and optimizer state.

The passes are those of `train.py`, on tensors without memory; gradients stay for the next micro-batch. Numbers below
float32 are autocast's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, fields
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

import model
from configs import TrainConfig
from model import GPT, GPTConfig
from scripts.planning.ledger import Ledger
from training.device import DTYPES

LABELS = ("gradients", "weight copies", "activations", "logits and loss", "backward")


@dataclass(frozen=True)
class Passes:
    """Bytes by label when most are alive. `gradients` are those that are no part of DDP's buckets."""

    peak: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.peak.values())


class FlashAttention(TorchFunctionMode):
    """Attention as CUDA's kernels compute it, which keep queries, keys, values, outputs and a logarithm a row; in
    float32, and on a CPU without dropout, other kernels keep the same."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        return self._attend(*args, **(kwargs or {}))

    @staticmethod
    def _attend(
        query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None = None
    ) -> Tensor:
        flash = torch.ops.aten._scaled_dot_product_flash_attention
        return flash(query, key, value, dropout_p, is_causal, False, scale=scale)[0]


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """The model's tensors here are a CPU's, which it treats in ways of their own."""
    with patch.multiple(model, SHORT=0, AT_ONCE={}), FlashAttention():
        yield


class PassCounter:
    """Counts the passes of a config's model for any micro-batch.

    Args:
        config: the run.
        dtype: numbers of the passes: float32, bfloat16 or float16.
        on_gpu: whether attention is FlashAttention's; on a CPU it is what torch chooses there.
        buckets: whether DistributedDataParallel averages the gradients, into buckets of its own.
    """

    def __init__(self, config: TrainConfig, dtype: str, on_gpu: bool, buckets: bool) -> None:
        self.dtype, self.on_gpu, self.buckets = dtype, on_gpu, buckets
        self.block_size = config.block_size
        self._mode = FakeTensorMode()
        with self._mode:
            chunked = not on_gpu if config.chunked_loss == "auto" else config.chunked_loss
            self._model = new_model(config, chunked)
        self.count = cache(self._count)

    def _count(self, batch_size: int, accumulation: int) -> Passes:
        """Of an update with micro-batches of `batch_size` sequences; of more than two of them the third is like the
        second."""
        ledger, steps = Ledger(), min(accumulation, 2)

        def arrived(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if self.buckets:
                parameter.grad = None  # added to its bucket
            else:
                ledger.relabel(parameter.grad, "gradients")

        hooks: list[Any] = [p.register_post_accumulate_grad_hook(arrived) for p in self._model.parameters()]
        hooks.append(self._model.transformer.register_forward_pre_hook(_labels(ledger, "activations")))
        hooks.append(self._model.transformer.register_forward_hook(_labels(ledger, "logits and loss")))
        try:
            with self._mode, as_on_a_gpu() if self.on_gpu else nullcontext(), ledger:
                for _ in range(steps):
                    tokens = torch.zeros(batch_size, self.block_size, dtype=torch.int64)
                    with torch.autocast("cpu", DTYPES[self.dtype], enabled=self.dtype != "float32"):
                        loss = self._model(tokens, tokens)
                    loss = loss / accumulation
                    ledger.label = "backward"
                    loss.backward()
                del loss, tokens
        finally:
            for hook in hooks:
                hook.remove()
            self._model.zero_grad(set_to_none=True)
        return Passes({label: ledger.at_peak[label] for label in LABELS})


def new_model(config: TrainConfig, chunked_loss: bool = False) -> GPT:
    """A config's model, on torch's default device."""
    sizes = {field.name: getattr(config, field.name) for field in fields(GPTConfig)}
    return GPT(GPTConfig(**sizes), chunked_loss)


def _labels(ledger: Ledger, label: str) -> Callable[..., None]:
    """A hook of a module after which storages are booked under a label."""

    def hook(*_: Any) -> None:
        ledger.label = label

    return hook
