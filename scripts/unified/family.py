"""The members of the family: for each the settings of `optim.MARS` that make it, in the hyperparameters of its paper,
and an implementation of its own to hold them against.

b1 and b2 are the betas of MARS. What MARS averages, m = b1 m + (1 - b1) c, starts at zero; without a clip and with
first_step="official" the approximate form is quasi-hyperbolic momentum, m_t = gamma g_t + (1 - gamma) EMA_b1(g).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from torch.optim import SGD, Adam, AdamW, Muon, NAdam, Optimizer

from scripts.unified import references
from scripts.unified.references import Result, Seen, State

EPS = 1e-8


@dataclass(frozen=True)
class Rule:
    """A plain update rule of `references.py`."""

    step: Callable[[Seen, State], Result]
    second: Literal["", "last", "snapshot"] = ""
    """at which weights, if at any, it asks for the gradient on the present batch too"""


@dataclass(frozen=True)
class Member:
    """A known optimizer, as MARS and by itself."""

    name: str
    settings: dict[str, Any]
    """of MARS; those that are not named have MARS's defaults"""
    reference: str
    """what that is called in the table"""
    own: Callable[..., Optimizer] | Rule
    """that: an optimizer of torch, to be called with the parameters, or a rule"""
    how: str
    """how the settings follow from its own hyperparameters"""
    matrices: bool = False
    """whether it is for hidden matrices alone, and AdamW steps the other parameters"""
    bfloat16: bool = False
    """whether matrices are orthogonalised in bfloat16 as they are in training, and not in the dtype of all the rest"""
    tolerance: float = 0.0
    """which share of the largest change of a weight is allowed as a difference, beyond what rounding explains"""
    equal: bool = True
    """False for a near relation that MARS has no settings for"""


PLAIN: dict[str, Any] = {"gamma": 0.0, "clip": "none", "last_grad": "full"}
ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.1}
"""of the other parameters, where a member is for matrices alone"""
FOLDED: dict[str, Any] = {"clip": "none", "first_step": "official", "last_grad": "folded"}


def members() -> list[Member]:
    """The whole family, those without a correction first."""
    return [*plain(), *quasi_hyperbolic(), *other_estimates(), *mars(), *relations()]


def plain() -> list[Member]:
    """gamma = 0: the estimate is the gradient."""
    lr, b1, b2, wd = 0.2, 0.9, 0.99, 0.1
    return [
        Member(
            "SGD",
            PLAIN | {"preconditioner": "sgd", "lr": lr, "betas": (0.0, 0.0), "weight_decay": wd},
            *torch_s(SGD, lr=lr, weight_decay=wd),
            how="m is g; decay within the gradient, as torch has it, is then the same as decoupled decay",
        ),
        Member(
            "momentum SGD",
            PLAIN | {"preconditioner": "sgd", "lr": lr / (1 - b1), "betas": (b1, 0.0)},
            *torch_s(SGD, lr=lr, momentum=b1),
            how="torch's buffer is the sum m / (1 - b1), so lr is torch's over 1 - b1 (dampening=b1 is not the same: "
            "torch's first buffer is g undamped)",
        ),
        Member(
            "Signum",
            PLAIN | {"preconditioner": "lion", "lr": 2e-3, "betas": (b1, 0.0), "weight_decay": wd},
            *rule(references.signum, lr=2e-3, b=b1, wd=wd),
            how="the sign of the average",
        ),
        Member(
            "Adam",
            PLAIN | {"preconditioner": "adamw", "lr": 3e-3, "betas": (b1, b2), "eps": EPS},
            *torch_s(Adam, lr=3e-3, betas=(b1, b2), eps=EPS),
            how="no decay",
        ),
        Member(
            "AdamW",
            PLAIN | {"preconditioner": "adamw", "lr": 3e-3, "betas": (b1, b2), "eps": EPS, "weight_decay": wd},
            *torch_s(AdamW, lr=3e-3, betas=(b1, b2), eps=EPS, weight_decay=wd),
            how="as it is",
        ),
        Member(
            "Shampoo",
            PLAIN
            | {"preconditioner": "kronecker", "lr": 1e-1, "betas": (0.0, 0.0)}
            | {"factors": "accumulated", "refresh_interval": 1, "damping": 1e-4},
            *rule(references.shampoo, lr=1e-1, damping=1e-4),
            how="factors accumulated over all updates, roots anew in each, no momentum; relative damping in both",
            matrices=True,
        ),
    ]


def quasi_hyperbolic() -> list[Member]:
    """The approximate form without a clip: the last gradient is blended in, and needs no memory (folded), but where the
    second moment looks at c."""
    lr, b, wd = 0.1, 0.9, 0.1
    lion_b1, lion_b2, mu = 0.9, 0.99, 0.95
    muon = FOLDED | {"lr": 1e-2, "betas": (mu, 0.0), "gamma": 1 - mu, "weight_decay": wd, "preconditioner": "shampoo"}
    return [
        Member(
            "Nesterov SGD",
            FOLDED | {"preconditioner": "sgd", "lr": lr / (1 - b), "betas": (b, 0.0), "gamma": 1 - b},
            *torch_s(SGD, lr=lr, momentum=b, nesterov=True),
            how="gamma = 1 - b1, and lr is torch's over 1 - b1",
        ),
        Member(
            "QHM",
            FOLDED | {"preconditioner": "sgd", "lr": 0.5, "betas": (0.95, 0.0), "gamma": 1 - 0.7},
            *rule(references.qhm, lr=0.5, b=0.95, nu=0.7),
            how="gamma = 1 - nu",
        ),
        Member(
            "Lion",
            FOLDED
            | {"preconditioner": "lion", "lr": 1e-3, "betas": (lion_b2, 0.0), "gamma": 1 - lion_b1 / lion_b2}
            | {"weight_decay": wd},
            *rule(references.lion, lr=1e-3, b1=lion_b1, b2=lion_b2, wd=wd),
            how="b1 is Lion's beta2, gamma = 1 - beta1/beta2",
        ),
        Member(
            "Adan",
            {"preconditioner": "adamw", "lr": 3e-3, "betas": (b, 0.99), "eps": EPS, "gamma": 1 - b, "clip": "none"},
            *rule(references.adan, lr=3e-3, b=b, b3=0.99, eps=EPS),
            how="Adam with Nesterov momentum; its beta1 = beta2 is b1, its beta3 is b2, gamma = 1 - b1, no decay",
        ),
        Member(
            "Muon",
            muon,
            *rule(references.muon, lr=1e-2, b=mu, wd=wd),
            how="gamma = 1 - mu; both iterate in the dtype of all the rest",
            matrices=True,
        ),
        Member(
            "Muon, bfloat16",
            muon,
            *torch_s(Muon, lr=1e-2, momentum=mu, nesterov=True, weight_decay=wd),
            how="the same as they run in training: torch's iterates in bfloat16, and so does MARS, but on a CPU that "
            "has no instructions for it; two such iterations may differ by some hundredths",
            matrices=True,
            bfloat16=True,
            tolerance=0.1,
        ),
    ]


def other_estimates() -> list[Member]:
    """All of the correction: the exact form, a snapshot of the weights, a mean of earlier gradients."""
    lr, a, tau = 0.1, 0.1, 4
    whole: dict[str, Any] = {"preconditioner": "sgd", "lr": lr, "gamma": 1.0, "clip": "none"}
    return [
        Member(
            "STORM",
            whole | {"exact": True, "betas": (1 - a, 0.0), "first_step": "official"},
            *rule(references.storm, "last", lr=lr, a=a),
            how="gamma = 1, b1 = 1 - a for a constant a; with r_1 = 0 the first m is the whole g, as STORM's",
        ),
        Member(
            "SVRG",
            whole | {"estimator": "svrg", "betas": (0.0, 0.0)},
            *rule(references.svrg, "snapshot", lr=lr),
            how="gamma = 1, the snapshot's gradient on all batches; no momentum",
        ),
        Member(
            "block mean",
            whole | {"estimator": "reference", "reference_interval": tau, "betas": (0.0, 0.0)},
            *rule(references.block_mean, lr=lr, tau=tau),
            how="gamma = 1: the reference alone, the mean of the last block of tau gradients",
        ),
    ]


def mars() -> list[Member]:
    """The paper's own three, in both forms, clipped tensor by tensor as published."""
    b1, b2, gamma, wd = 0.95, 0.99, 0.025, 0.1
    own: dict[str, Any] = {"wd": wd, "gamma": gamma}
    common: dict[str, Any] = {"weight_decay": wd, "gamma": gamma, "clip": "tensor", "first_step": "paper"}
    adamw = common | {"preconditioner": "adamw", "lr": 3e-3, "betas": (b1, b2), "eps": EPS}
    lion = common | {"preconditioner": "lion", "lr": 1e-3, "betas": (b1, 0.0)}
    shampoo = common | {"preconditioner": "shampoo", "lr": 1e-2, "betas": (b1, 0.0)}
    rows = []
    for exact in (False, True):
        second: Literal["", "last"] = "last" if exact else ""
        form, both = " exact" if exact else "", {"exact": exact}
        by_adamw = rule(references.mars_adamw, second, lr=3e-3, b1=b1, b2=b2, eps=EPS, **own)
        by_lion = rule(references.mars_lion, second, lr=1e-3, b=b1, **own)
        by_shampoo = rule(references.mars_shampoo, second, lr=1e-2, b=b1, **own)
        rows += [
            Member("MARS-AdamW" + form, adamw | both, *by_adamw, how="Algorithm 2"),
            Member("MARS-Lion" + form, lion | both, *by_lion, how="Algorithm 3"),
            Member("MARS-Shampoo" + form, shampoo | both, *by_shampoo, how="Algorithm 4", matrices=True),
        ]
    return rows


def relations() -> list[Member]:
    """Near, but not in the family."""
    b1, b2, wd = 0.9, 0.99, 0.1
    return [
        Member(
            "NAdamW",
            FOLDED
            | {"preconditioner": "adamw", "lr": 3e-3, "betas": (b1, b2), "eps": EPS, "weight_decay": wd}
            | {"gamma": 1 - b1, "last_grad": "full"},
            *torch_s(
                NAdam,
                lr=3e-3,
                betas=(b1, b2),
                eps=EPS,
                weight_decay=wd,
                decoupled_weight_decay=True,
                momentum_decay=1e4,
            ),
            how="not a member, nor is QHAdamW: their averages are those of gamma = 1 - b1, but their second moment is "
            "of g, where MARS's is of c (and they correct g and its average for their start apart)",
            equal=False,
        )
    ]


def torch_s(kind: Callable[..., Optimizer], **settings: Any) -> tuple[str, Callable[..., Optimizer]]:
    """Name and reference."""
    return f"torch {kind.__name__}", partial(kind, **settings)


def rule(
    function: Callable[..., Result], second: Literal["", "last", "snapshot"] = "", **settings: Any
) -> tuple[str, Rule]:
    """Name and reference."""
    return function.__name__, Rule(partial(function, **settings), second)
