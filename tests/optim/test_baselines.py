"""The baselines as `build_optimizer` makes them, against torch's own or the published algorithm written out."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from configs import TrainConfig
from model import GPT, GPTConfig
from optim import MARS, build_optimizer, describe_groups

BASE = TrainConfig(
    learning_rate=1e-2, beta1=0.9, beta2=0.99, weight_decay=0.1, lr_1d=3e-3, betas_1d=(0.8, 0.9), weight_decay_1d=0.05
)


def small_gpt() -> GPT:
    torch.manual_seed(0)
    return GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32)).double()


def steps(model: nn.Module, optimizers: list[torch.optim.Optimizer], count: int = 8) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.05
        for optimizer in optimizers:
            optimizer.step()


def split(model: GPT) -> dict[str, list[nn.Parameter]]:
    embeddings = [model.lm_head.weight, model.transformer.wpe.weight]
    rest = [p for p in model.parameters() if all(p is not e for e in embeddings)]
    return {
        "matrices": [p for p in rest if p.dim() == 2],
        "embeddings": embeddings,
        "vectors": [p for p in rest if p.dim() == 1],
    }


def assert_same(a: nn.Module, b: nn.Module, atol: float = 1e-12) -> None:
    for (name, p), (_, q) in zip(a.named_parameters(), b.named_parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


def adamw(params: list[nn.Parameter], decay: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=3e-3, betas=(0.8, 0.9), eps=1e-8, weight_decay=decay)


class Lion(torch.optim.Optimizer):
    """Chen et al., arXiv 2302.06675, Algorithm 2."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                m = self.state[x].setdefault("m", torch.zeros_like(x))
                beta1, beta2 = group["betas"]
                update = (beta1 * m + (1 - beta1) * x.grad).sign()
                x.sub_(group["lr"] * (update + group["weight_decay"] * x))
                m.copy_(beta2 * m + (1 - beta2) * x.grad)


class Shampoo(torch.optim.Optimizer):
    """Gupta et al., arXiv 1802.09568, with momentum: both factors' inverse fourth roots by singular values."""

    def __init__(self, params: Any, **defaults: Any) -> None:
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for x in group["params"]:
                state = self.state[x]
                if not state:
                    state |= {"t": 0, "m": torch.zeros_like(x), "L": 0.0, "R": 0.0}
                state["t"] += 1
                beta1, beta2 = group["betas"]
                averaged = group["factors"] == "averaged"
                decay, weight = (beta2, 1 - beta2) if averaged else (1.0, 1.0)
                state["m"] = beta1 * state["m"] + (1 - beta1) * x.grad
                state["L"] = decay * state["L"] + weight * x.grad @ x.grad.T
                state["R"] = decay * state["R"] + weight * x.grad.T @ x.grad
                if (state["t"] - 1) % group["every"] == 0 or state["t"] in [t for t in (1, 2, 4) if t < group["every"]]:
                    bias = 1 - beta2 ** state["t"] if averaged else 1.0
                    state["roots"] = [self.root(state[side] / bias) for side in "LR"]
                left, right = state["roots"]
                x.sub_(group["lr"] * (left @ state["m"] @ right + group["weight_decay"] * x))

    @staticmethod
    def root(matrix: torch.Tensor) -> torch.Tensor:
        u, s, _ = torch.linalg.svd(matrix)  # symmetric: the columns of u are its eigenvectors
        return u @ torch.diag((s + 1e-6 * s.max()) ** -0.25) @ u.T


def test_lion_is_the_published_one_with_vectors_on_adamw() -> None:
    ours, theirs = small_gpt(), small_gpt()
    steps(ours, [build_optimizer(ours, replace(BASE, optimizer="lion"))])
    kinds = split(theirs)
    lion = Lion(kinds["matrices"] + kinds["embeddings"], lr=1e-2, betas=(0.9, 0.99), weight_decay=0.1)
    steps(theirs, [lion, adamw(kinds["vectors"], 0.05)])
    assert_same(ours, theirs)


@pytest.mark.parametrize("all_matrices", [False, True])
def test_muon_is_torch_s(all_matrices: bool) -> None:
    """Embeddings on AdamW unless all matrices are asked for, as in the published comparison. Both iterate in bfloat16,
    on averages that differ by a factor: within a few percent of the distance covered."""
    ours, theirs = small_gpt(), small_gpt()
    config = replace(BASE, optimizer="muon", beta1=0.95, embedding_adamw=False if all_matrices else None)
    steps(ours, [build_optimizer(ours, config)])
    kinds = split(theirs)
    by_muon = kinds["matrices"] + (kinds["embeddings"] if all_matrices else [])
    muon = torch.optim.Muon(by_muon, lr=1e-2, momentum=0.95, nesterov=True, weight_decay=0.1)
    others: list[torch.optim.Optimizer] = [adamw(kinds["vectors"], 0.05)]
    if not all_matrices:
        others.append(adamw(kinds["embeddings"], 0.1))
    steps(theirs, [muon, *others])
    assert_same(ours, theirs, atol=0.05 * 1e-2 * 8)


@pytest.mark.parametrize("factors", ["averaged", "accumulated"])
def test_shampoo_is_the_published_one_with_momentum(factors: Any) -> None:
    ours, theirs = small_gpt(), small_gpt()
    config = replace(BASE, optimizer="shampoo", shampoo_factors=factors, shampoo_interval=3)
    steps(ours, [build_optimizer(ours, config)])
    kinds = split(theirs)
    settings = {"lr": 1e-2, "betas": (0.9, 0.99), "weight_decay": 0.1, "factors": factors, "every": 3}
    shampoo = Shampoo(kinds["matrices"], **settings)
    steps(theirs, [shampoo, adamw(kinds["vectors"], 0.05), adamw(kinds["embeddings"], 0.1)])
    assert_same(ours, theirs, atol=1e-6)  # small eigenvalues, which the damping bounds, differ between the two ways


def test_nadamw_is_adamw_with_nesterov_momentum() -> None:
    """The last gradient looked ahead by one step: beta1 m_t + (1 - beta1) g_t, each corrected for its start at zero."""
    ours, theirs = small_gpt(), small_gpt()
    config = replace(BASE, optimizer="nadamw", lr_1d=None, betas_1d=None)
    steps(ours, [build_optimizer(ours, config)])
    m = {p: torch.zeros_like(p) for p in theirs.parameters()}
    v = {p: torch.zeros_like(p) for p in theirs.parameters()}
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for t in range(1, 9):
            for p in theirs.parameters():
                grad = torch.randn(p.shape, generator=generator, dtype=torch.float64) * 0.05
                m[p] = 0.9 * m[p] + 0.1 * grad
                v[p] = 0.99 * v[p] + 0.01 * grad * grad
                ahead = 0.9 * m[p] / (1 - 0.9 ** (t + 1)) + 0.1 * grad / (1 - 0.9**t)
                direction = ahead / ((v[p] / (1 - 0.99**t)).sqrt() + 1e-8)
                p.sub_(1e-2 * (direction + (0.1 if p.dim() > 1 else 0.05) * p))
    assert_same(ours, theirs, atol=1e-6)  # torch keeps the product of its momenta in float32


def test_sgd_is_torch_s_with_momentum() -> None:
    ours, theirs = small_gpt(), small_gpt()
    steps(ours, [build_optimizer(ours, replace(BASE, optimizer="sgd", lr_1d=None))])
    kinds = split(theirs)
    groups = [
        {"params": kinds["matrices"] + kinds["embeddings"], "weight_decay": 0.1},
        {"params": kinds["vectors"], "weight_decay": 0.05},
    ]
    steps(theirs, [torch.optim.SGD(groups, lr=1e-2, momentum=0.9)])
    assert_same(ours, theirs)


def test_lion_and_muon_keep_one_tensor_a_matrix() -> None:
    for name in ("lion", "muon"):
        model = small_gpt()
        optimizer = build_optimizer(model, replace(BASE, optimizer=name))
        steps(model, [optimizer], count=1)
        for parameter in split(model)["matrices"]:
            assert set(optimizer.state[parameter]) == {"step", "folded"}


def test_start_up_lines_say_how_each_group_is_stepped() -> None:
    def words(**settings: Any) -> list[str]:
        return [
            line.split("weight decay ")[1].split(" ", 1)[1].strip()
            for line in describe_groups(build_optimizer(small_gpt(), replace(BASE, **settings)))
        ]

    plain = "adamw, no correction"
    assert words(optimizer="muon", beta1=0.95)[1:] == [plain, plain]
    assert words(optimizer="muon", beta1=0.95)[0] == "shampoo, gamma 0.05, clip none, last gradient folded"
    assert words(optimizer="shampoo")[0] == "kronecker, no correction"
    assert words(optimizer="mars-adamw", exact=True)[0] == "adamw, gamma 0.025, clip tensor, exact"
    assert words(optimizer="mars-lion", gamma="linear:0.05:0")[0].startswith("lion, gamma linear from 0.05 to 0")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"optimizer": "muon", "exact": True}, "exact"),
        ({"optimizer": "lion", "beta1": 0.999}, "beta1=0.999"),
        ({"optimizer": "mars-adamw", "gamma": "linear:0.1:x"}, "gamma"),
        ({"optimizer": "mars-adamw", "mars_last_grad": "folded", "mars_clip": "none"}, "last_grad='folded'"),
    ],
    ids=str,
)
def test_settings_that_an_optimizer_does_not_have(settings: dict[str, Any], message: str) -> None:
    config = TrainConfig()
    for key, value in settings.items():
        object.__setattr__(config, key, value)  # also values that TrainConfig itself refuses
    with pytest.raises(ValueError, match=message):
        build_optimizer(small_gpt(), config)


def test_a_linear_gamma_runs_over_the_run() -> None:
    model = small_gpt()
    optimizer = build_optimizer(model, replace(BASE, optimizer="mars-adamw", gamma="linear:0.1:0", max_iters=5))
    seen = []
    for _ in range(7):
        steps(model, [optimizer], count=1)
        seen.append(optimizer.param_groups[0]["gamma"])
    assert seen == pytest.approx([0.1, 0.075, 0.05, 0.025, 0.0, 0.0, 0.0])
    assert isinstance(optimizer, MARS)
    assert optimizer.metrics()["mars/gamma"].item() == 0
