"""Published update rules, each written from its paper to be read beside it.

A rule is a pure function of one parameter: what it sees of an update and its own state, both as they were before, to
the new weights and the new state. It shares no code with `optim/`. b are decay rates of averages, lr the learning rate,
wd decoupled weight decay, t counts the updates from 1; a state that is not there yet is zero.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    """What a rule sees of a parameter in an update; all tensors have the parameter's shape."""

    t: int
    x: Tensor
    """weights x_t"""
    g: Tensor
    """gradient at x_t on batch t"""
    r: Tensor
    """g_{t-1}, or for rules that take a second gradient in each update: the gradient at x_{t-1} on batch t, at a
    snapshot of the weights on batch t (SVRG); g in the first update"""
    mu: Tensor
    """gradient at the snapshot on all batches, for SVRG"""


State = dict[str, Any]
Result = tuple[Tensor, State]


def qhm(now: Seen, s: State, *, lr: float, b: float, nu: float) -> Result:
    """Quasi-hyperbolic momentum (Ma & Yarats, arXiv 1810.06801, equations 3 and 4): d is the moving average of g,
    x <- x - lr ((1 - nu) g + nu d)."""
    d = b * s.get("d", 0.0) + (1 - b) * now.g
    return now.x - lr * ((1 - nu) * now.g + nu * d), {"d": d}


def signum(now: Seen, s: State, *, lr: float, b: float, wd: float) -> Result:
    """signSGD with momentum (Bernstein et al., arXiv 1802.04434, Algorithm 2): m = b m + (1 - b) g,
    x <- x - lr (sign(m) + wd x)."""
    m = b * s.get("m", 0.0) + (1 - b) * now.g
    return now.x - lr * (m.sign() + wd * now.x), {"m": m}


def lion(now: Seen, s: State, *, lr: float, b1: float, b2: float, wd: float) -> Result:
    """Lion (Chen et al., arXiv 2302.06675, Algorithm 2): u = sign(b1 m + (1 - b1) g), x <- x - lr (u + wd x), and only
    then m <- b2 m + (1 - b2) g."""
    m = s.get("m", 0.0)
    u = (b1 * m + (1 - b1) * now.g).sign()
    return now.x - lr * (u + wd * now.x), {"m": b2 * m + (1 - b2) * now.g}


def adan(now: Seen, s: State, *, lr: float, b: float, b3: float, eps: float) -> Result:
    """Adan (Xie et al., arXiv 2208.06677, Algorithm 1), one b for both of its first two averages, with the corrections
    for their start at zero that its authors' code has: y = g_t - g_{t-1}, m of g, v of y, n of (g + b y)^2,
    x <- x - lr (m + b v) / (sqrt(n) + eps)."""
    y = now.g - now.r
    m = b * s.get("m", 0.0) + (1 - b) * now.g
    v = b * s.get("v", 0.0) + (1 - b) * y
    n = b3 * s.get("n", 0.0) + (1 - b3) * (now.g + b * y) ** 2
    root = (n / (1 - b3**now.t)).sqrt() + eps
    return now.x - lr * (m + b * v) / (1 - b**now.t) / root, {"m": m, "v": v, "n": n}


def muon(now: Seen, s: State, *, lr: float, b: float, wd: float) -> Result:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon) with Nesterov momentum: B = b B + g,
    O = orthogonalised(g + b B), x <- (1 - lr wd) x - lr sqrt(max(1, rows/columns)) O."""
    rows, columns = now.x.shape
    buffer = b * s.get("B", 0.0) + now.g
    direction = math.sqrt(max(1, rows / columns)) * orthogonalised(now.g + b * buffer)
    return (1 - lr * wd) * now.x - lr * direction, {"B": buffer}


def shampoo(now: Seen, s: State, *, lr: float, damping: float) -> Result:
    """Shampoo (Gupta et al., arXiv 1802.09568, Algorithm 1): L = sum of g g^T, R = sum of g^T g,
    x <- x - lr L^(-1/4) g R^(-1/4). The paper starts L and R at eps I; here eps is `damping` times their largest
    eigenvalue when the roots are taken."""
    left, right = s.get("L", 0.0) + now.g @ now.g.T, s.get("R", 0.0) + now.g.T @ now.g
    direction = fourth_root(left, damping) @ now.g @ fourth_root(right, damping)
    return now.x - lr * direction, {"L": left, "R": right}


def storm(now: Seen, s: State, *, lr: float, a: float) -> Result:
    """STORM's estimate (Cutkosky & Orabona, arXiv 1905.10018, Algorithm 1), a and the step constant:
    d_t = g(x_t, xi_t) + (1 - a) (d_{t-1} - g(x_{t-1}, xi_t)) from d_1 = g_1, x <- x - lr d_t."""
    d = now.g if now.t == 1 else now.g + (1 - a) * (s["d"] - now.r)
    return now.x - lr * d, {"d": d}


def svrg(now: Seen, s: State, *, lr: float) -> Result:
    """SVRG (Johnson & Zhang, NIPS 2013, figure 1): x <- x - lr (g - r + mu), with the gradients r on this batch and mu
    on all of the data at a snapshot of the weights, which is taken anew every so many updates."""
    return now.x - lr * (now.g - now.r + now.mu), {}


def block_mean(now: Seen, s: State, *, lr: float, tau: int) -> Result:
    """Blocks of tau updates: each steps along the mean of the gradients of the block before, the first block's along g
    itself. (No paper's; overviews call such a mean a reference gradient.)"""
    direction, block = s.get("mean", now.g), [*s.get("block", []), now.g]
    after = {"block": []} | {"mean": sum(block) / tau} if len(block) == tau else s | {"block": block}
    return now.x - lr * direction, after


def mars_adamw(now: Seen, s: State, *, lr: float, b1: float, b2: float, eps: float, wd: float, gamma: float) -> Result:
    """MARS-AdamW (Yuan et al., arXiv 2411.10438, Algorithm 2): m of c, v of c^2, both corrected for their start at
    zero, x <- x - lr (m / (sqrt(v) + eps) + wd x)."""
    c = estimate(now, b1, gamma)
    m = b1 * s.get("m", 0.0) + (1 - b1) * c
    v = b2 * s.get("v", 0.0) + (1 - b2) * c**2
    direction = m / (1 - b1**now.t) / ((v / (1 - b2**now.t)).sqrt() + eps)
    return now.x - lr * (direction + wd * now.x), {"m": m, "v": v}


def mars_lion(now: Seen, s: State, *, lr: float, b: float, wd: float, gamma: float) -> Result:
    """MARS-Lion (the same, Algorithm 3): x <- x - lr (sign(m) + wd x)."""
    m = b * s.get("m", 0.0) + (1 - b) * estimate(now, b, gamma)
    return now.x - lr * (m.sign() + wd * now.x), {"m": m}


def mars_shampoo(now: Seen, s: State, *, lr: float, b: float, wd: float, gamma: float) -> Result:
    """MARS-Shampoo (the same, Algorithm 4): x <- x - lr (O + wd x), O = U V^T of m = U S V^T, as in the published code
    by iteration and times sqrt(max(1, rows/columns))."""
    rows, columns = now.x.shape
    m = b * s.get("m", 0.0) + (1 - b) * estimate(now, b, gamma)
    direction = math.sqrt(max(1, rows / columns)) * orthogonalised(m)
    return now.x - lr * (direction + wd * now.x), {"m": m}


def estimate(now: Seen, b: float, gamma: float) -> Tensor:
    """c_t of MARS (Algorithm 1): g + gamma b/(1-b) (g - r), divided by its norm where that is above 1. r is on batch t
    in the exact form, on batch t-1 in the approximate one."""
    c = now.g + gamma * b / (1 - b) * (now.g - now.r)
    return c / max(1.0, c.norm().item())


def orthogonalised(matrix: Tensor) -> Tensor:
    """Muon's X_5: X_0 = A / ||A||, X <- a X + (b X X^T + c (X X^T)^2) X. Singular values come near 1, those of zero
    stay; and a transformer's gradients have such, as layer norms take the mean away. In the matrix's own dtype, where
    the authors take bfloat16."""
    a, b, c = 3.4445, -4.7750, 2.0315
    x = matrix / matrix.norm()
    for _ in range(5):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def fourth_root(matrix: Tensor, damping: float) -> Tensor:
    """(A + damping ||A|| I)^(-1/4) of a symmetric A, by its singular vectors."""
    u, s, _ = torch.linalg.svd(matrix)
    return u @ torch.diag((s + damping * s.max()) ** -0.25) @ u.T
