"""The orthogonal factor U V^T of a matrix U S V^T, for many matrices of one shape at a time."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
BATCH = {"cpu": 2**23, "cuda": 2**27}  # elements orthogonalised together: on a CPU what its caches hold


def newton_schulz(matrices: Tensor, steps: int = 5) -> Tensor:
    """An approximate orthogonal factor by a quintic Newton-Schulz iteration (Muon, Jordan et al. 2024).

    The coefficients trade accuracy for speed: singular values end between about 0.7 and 1.2 instead of at 1.

    Args:
        matrices: (..., rows, columns); the iteration runs in their dtype.

    Returns:
        a new tensor of the same shape and dtype.
    """
    a, b, c = COEFFICIENTS
    rows, columns = matrices.shape[-2:]
    x = matrices.reshape(-1, rows, columns)
    norms = torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True)
    x = x / norms.clamp(min=1e-30)  # a matrix of zeros stays one
    if rows > columns:
        x = x.mT.contiguous()  # the Gram matrix is then the smaller one
    spare, gram = torch.empty_like(x), x.new_empty(x.shape[0], x.shape[1], x.shape[1])
    polynomial = torch.empty_like(gram)
    for _ in range(steps):
        torch.bmm(x, x.mT, out=gram)
        torch.baddbmm(gram, gram, gram, beta=b, alpha=c, out=polynomial)  # b G + c G^2
        torch.baddbmm(x, polynomial, x, beta=a, out=spare)  # (a I + b G + c G^2) X
        x, spare = spare, x
    return (x.mT if rows > columns else x).contiguous().view(matrices.shape)


def svd_factor(matrices: Tensor) -> Tensor:
    """The exact orthogonal factor; slow, for tests and small matrices. Singular values of zero contribute nothing.

    Args:
        matrices: (..., rows, columns), float32 or float64.
    """
    u, s, vh = torch.linalg.svd(matrices, full_matrices=False)
    return (u * (s > 0).unsqueeze(-2)) @ vh


def iteration_dtype(device: torch.device) -> torch.dtype:
    """The dtype in which matrices are orthogonalised: bfloat16 (as published), float32 on a CPU that has no
    instructions for it."""
    if device.type == "cpu" and not _cpu_has_bfloat16():
        return torch.float32
    return torch.bfloat16


@cache
def _cpu_has_bfloat16() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16") or capabilities.get("bf16"))
