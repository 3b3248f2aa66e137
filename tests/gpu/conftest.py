"""Tests that need an NVIDIA GPU; where there is none they are skipped, in one line of the summary."""

from collections.abc import Iterator

import pytest
import torch


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no CUDA device here")


@pytest.fixture(autouse=True)
def _torch_as_it_was() -> Iterator[None]:
    """A run of train.py in this process leaves its settings behind."""
    precision, deterministic = torch.get_float32_matmul_precision(), torch.are_deterministic_algorithms_enabled()
    yield
    torch.set_float32_matmul_precision(precision)
    if torch.are_deterministic_algorithms_enabled() != deterministic:
        torch.use_deterministic_algorithms(deterministic)
    torch.cuda.empty_cache()
