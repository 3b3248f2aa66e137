"""MARS against trajectories computed elsewhere (tests/golden)."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from optim import MARS

CASES = json.loads((Path(__file__).parents[1] / "golden" / "mars.json").read_text())["cases"]
NEWTON_SCHULZ = "official/shampoo/newton-schulz-bf16"


def make_optimizer(
    parameters: dict[str, torch.Tensor], hyper: dict[str, Any], exact: bool, orthogonal: str, compile: bool
) -> MARS:
    """The optimizer of a golden case: vectors in a group of their own, on plain AdamW."""
    matrices = [p for p in parameters.values() if p.dim() >= 2]
    vectors = [p for p in parameters.values() if p.dim() < 2]
    plain = {
        "lr": hyper["lr_1d"],
        "betas": hyper["betas_1d"],
        "weight_decay": hyper["weight_decay_1d"],
        "gamma": 0.0,
        "clip": "none",
        "preconditioner": "adamw",
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
        exact=exact,
        orthogonal=orthogonal,
        compile=compile,
    )


DTYPES = pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])


@DTYPES
@pytest.mark.parametrize("case", CASES, ids=[c["name"] for c in CASES])
def test_trajectory(case: dict[str, Any], dtype: torch.dtype, tolerance: float) -> None:
    follow(case, dtype, tolerance, compile=False)


@pytest.mark.slow
@DTYPES
@pytest.mark.filterwarnings("error::UserWarning")
def test_trajectory_compiled(dtype: torch.dtype, tolerance: float) -> None:
    """All cases, with kernels that were really compiled: a compiler that is missing would only warn."""
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    for case in CASES:
        follow(case, dtype, tolerance, compile=True)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert 5 <= graphs <= 16  # a few for each kernel, none for a shape or a step


def follow(case: dict[str, Any], dtype: torch.dtype, tolerance: float, compile: bool, device: str = "cpu") -> None:
    """Steps along a trajectory and holds every point against the expected one."""
    if "svd" in case["name"]:
        tolerance = max(tolerance, 1e-9) if dtype == torch.float64 else 1e-5  # the factor is sensitive to small values
    if case["name"] == NEWTON_SCHULZ:
        tolerance = 2e-2 * case["hyper"]["lr"] * len(case["grads"])  # of the distance that a step of this method covers
    parameters = {
        name: torch.nn.Parameter(torch.tensor(entry["value"], dtype=dtype, device=device))
        for name, entry in case["params"].items()
    }
    references = case.get("previous_grads")
    orthogonal = "newton-schulz" if case["name"] == NEWTON_SCHULZ else "svd"
    optimizer = make_optimizer(parameters, case["hyper"], references is not None, orthogonal, compile)

    def set_gradients(values: dict[str, Any]) -> None:
        for name, parameter in parameters.items():
            parameter.grad = torch.tensor(values[name], dtype=dtype, device=device)

    for step, (grads, expected) in enumerate(zip(case["grads"], case["expected"], strict=True)):
        if references is not None and step + 1 < len(references):
            set_gradients(references[step + 1])
            optimizer.record_reference_gradient()
        set_gradients(grads)
        optimizer.step()
        for name, parameter in parameters.items():
            want = torch.tensor(expected[name], dtype=torch.float64)
            torch.testing.assert_close(parameter.detach().cpu().double(), want, rtol=tolerance, atol=tolerance)


def test_the_cases_cover_every_variant() -> None:
    assert len(CASES) == 23
    for key, values in {
        "variant": {"adamw", "lion", "shampoo"},
        "clip": {"tensor", "global", "none"},
        "first_step": {"paper", "official"},
    }.items():
        assert {c["hyper"][key] for c in CASES} == values
