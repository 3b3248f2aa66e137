"""MARS against trajectories computed elsewhere (tests/golden)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optim import MARS

CASES = json.loads((Path(__file__).parents[1] / "golden" / "mars.json").read_text())["cases"]
SUPPORTED = [c for c in CASES if c["hyper"]["variant"] == "adamw" and "previous_grads" not in c]


def make_optimizer(parameters: dict[str, torch.Tensor], hyper: dict[str, Any]) -> MARS:
    """The optimizer of a golden case: vectors in a group of their own, on plain AdamW."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    plain = {
        "lr": hyper["lr_1d"],
        "betas": hyper["betas_1d"],
        "weight_decay": hyper["weight_decay_1d"],
        "gamma": 0.0,
        "clip": "none",
    }
    return MARS(
        [{"params": matrices}, *([{"params": vectors, **plain}] if vectors else [])],
        lr=hyper["lr"],
        betas=hyper["betas"],
        eps=hyper["eps"],
        weight_decay=hyper["weight_decay"],
        gamma=hyper["gamma"],
        preconditioner=hyper["variant"],
        clip=hyper["clip"],
        first_step=hyper["first_step"],
    )


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("case", SUPPORTED, ids=[c["name"] for c in SUPPORTED])
def test_trajectory(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    parameters = {
        name: torch.nn.Parameter(torch.tensor(entry["value"], dtype=dtype)) for name, entry in case["params"].items()
    }
    optimizer = make_optimizer(parameters, case["hyper"])
    for grads, expected in zip(case["grads"], case["expected"], strict=True):
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(grads[name], dtype=dtype)
        optimizer.step()
        for name, parameter in parameters.items():
            want = torch.tensor(expected[name], dtype=torch.float64)
            torch.testing.assert_close(parameter.detach().double(), want, rtol=tolerance, atol=tolerance)


def test_the_cases_cover_every_clip_and_first_step() -> None:
    assert len(SUPPORTED) == 8
    assert {c["hyper"]["clip"] for c in SUPPORTED} == {"tensor", "global", "none"}
    assert {c["hyper"]["first_step"] for c in SUPPORTED} == {"paper", "official"}
