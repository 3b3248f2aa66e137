"""How far an update moves the weights: the update-to-weight ratio of each kind of parameter."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from torch.optim import Optimizer


@contextmanager
def update_ratios(optimizer: Optimizer, wanted: bool) -> Iterator[dict[str, float]]:
    """Measures the step that an optimizer makes within the `with` block.

    Yields a dict that is empty in the block. After it, where `wanted`, it has `update_ratio/NAME` for each parameter
    group: RMS(update) / RMS(weights before it) over all tensors of the group, ||w' - w|| / ||w||; infinite or NaN
    where the weights were all zero. The step itself is the same to the last bit.

    The weights are copied for the length of the block: 4 bytes a parameter on the device, at a moment when no
    activations are held. With a sharded optimizer too, since every process has all weights.

    Args:
        optimizer: its groups have a `name`, as those of `build_optimizer`.
        wanted: whether to measure; otherwise nothing is copied.
    """
    ratios: dict[str, float] = {}
    groups = optimizer.param_groups if wanted else []
    before = [[parameter.detach().clone() for parameter in group["params"]] for group in groups]
    yield ratios
    for group, copies in zip(groups, before, strict=True):
        norm = nn.utils.get_total_norm(copies)
        for copy, parameter in zip(copies, group["params"], strict=True):
            copy.sub_(parameter.detach())
        ratios[f"update_ratio/{group['name']}"] = (nn.utils.get_total_norm(copies) / norm).item()
