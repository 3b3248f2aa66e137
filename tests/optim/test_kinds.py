"""Kinds of parameters: which are which, and a preconditioner, a learning rate and a correction for each."""

import copy
import math
import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from configs import TrainConfig
from optim import MARS, build_optimizer, describe_groups, load_optimizer_state, set_learning_rate
from optim.build import BUILDERS

CONFIG = TrainConfig(
    optimizer="mars-shampoo",
    learning_rate=2e-2,
    beta1=0.95,
    beta2=0.99,
    weight_decay=0.01,
    weight_decay_embedding=0.03,
    weight_decay_1d=0.1,
    lr_1d=3e-3,
    betas_1d=(0.9, 0.95),
    lr_embedding=6e-3,
    betas_embedding=(0.8, 0.9),
    compile_optimizer=False,
    gamma=0.05,
)
MARS_NAMES = ("mars-adamw", "mars-lion", "mars-shampoo")
KINDS = ("matrices", "convolutions", "embeddings", "vectors")


class Mixed(nn.Module):
    """Every kind of parameter."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(7, 6)
        self.bags = nn.EmbeddingBag(5, 6)
        self.conv1 = nn.Conv1d(4, 5, 3)
        self.conv2 = nn.Conv2d(3, 8, 3)
        self.linear = nn.Linear(6, 5)
        self.tall = nn.Linear(4, 9, bias=False)
        self.norm = nn.LayerNorm(5)
        self.scale = nn.Parameter(torch.tensor(1.5))


class Bare(nn.Module):
    """Some parameters that are of one kind."""

    def __init__(self, kind: str, values: list[Tensor]) -> None:
        super().__init__()
        if kind == "embeddings":
            self.parts = nn.ModuleList(nn.Embedding.from_pretrained(value.clone(), freeze=False) for value in values)
        else:
            self.parts = nn.ParameterList(value.clone() for value in values)


def set_gradients(params: list[nn.Parameter], seed: int) -> None:
    """Each by its place, so that a parameter has the same in a model of its own."""
    for place, parameter in enumerate(params):
        generator = torch.Generator().manual_seed(100 * seed + place)
        parameter.grad = torch.randn(parameter.shape, generator=generator) * 0.3


def of_kind(optimizer: torch.optim.Optimizer, kind: str) -> list[nn.Parameter]:
    return next(group["params"] for group in optimizer.param_groups if group["name"] == kind)


def groups_of(config: TrainConfig) -> dict[str, dict[str, Any]]:
    return {group["name"]: group for group in build_optimizer(Mixed(), config).param_groups}


# --- which are which ---


@pytest.mark.parametrize("name", sorted(BUILDERS))
def test_every_parameter_of_any_module_has_a_kind(name: str) -> None:
    model = Mixed()
    optimizer = build_optimizer(model, replace(CONFIG, optimizer=name, betas_embedding=None))
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {group["name"]: {names[id(p)] for p in group["params"]} for group in optimizer.param_groups} == {
        "matrices": {"linear.weight", "tall.weight"},
        "convolutions": {"conv1.weight", "conv2.weight"},
        "embeddings": {"tokens.weight", "bags.weight"},
        "vectors": {"conv1.bias", "conv2.bias", "linear.bias", "norm.weight", "norm.bias", "scale"},
    }
    set_learning_rate(optimizer, 1e-2)
    rates = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert rates == pytest.approx({"matrices": 1e-2, "convolutions": 1e-2, "embeddings": 3e-3, "vectors": 1.5e-3})


def test_a_model_without_a_kind_has_no_such_group() -> None:
    groups = build_optimizer(nn.Conv2d(3, 4, 3, bias=False), replace(CONFIG, preconditioner_convolutions="lion"))
    assert [(group["name"], group["preconditioner"]) for group in groups.param_groups] == [("convolutions", "lion")]


# --- what steps them ---


def test_without_keys_an_optimizer_does_what_it_does_by_itself() -> None:
    shampoo, plain = ("shampoo", 0.05, "tensor"), ("adamw", 0.0, "none")
    for embedding_adamw, of_embeddings in ((None, shampoo), (False, shampoo), (True, plain)):
        groups = groups_of(replace(CONFIG, embedding_adamw=embedding_adamw))
        assert {kind: (g["preconditioner"], g["gamma"], g["clip"]) for kind, g in groups.items()} == {
            **{"matrices": shampoo, "convolutions": shampoo, "embeddings": of_embeddings, "vectors": plain}
        }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["preconditioner", "mars_kinds"])
def test_a_key_changes_its_kind_and_nothing_else(kind: str, key: str) -> None:
    """Whether a kind is corrected does not depend on its preconditioner, nor the other way round."""
    before = groups_of(CONFIG)
    if key == "preconditioner":
        after, changed = groups_of(replace(CONFIG, **{f"preconditioner_{kind}": "sgd"})), {"preconditioner": "sgd"}
    else:
        kinds = {"matrices", "convolutions", "embeddings"} ^ {kind}
        after = groups_of(replace(CONFIG, mars_kinds=tuple(kinds)))
        plain = {"gamma": 0.0, "clip": "none"}
        changed = plain if kind != "vectors" else {"gamma": 0.05, "clip": "tensor"}
    for name in KINDS:
        expected = before[name] | (changed if name == kind else {})
        assert {key: after[name][key] for key in expected if key != "params"} == {
            key: value for key, value in expected.items() if key != "params"
        }


HYBRIDS: list[dict[str, Any]] = [
    {"preconditioner_embeddings": "adamw", "preconditioner_convolutions": "kronecker", "shampoo_interval": 2},
    {"preconditioner_matrices": "lion", "preconditioner_embeddings": "sgd", "preconditioner_vectors": "lion"},
    {"mars_kinds": KINDS, "preconditioner_convolutions": "lion"},
    {"mars_kinds": ("vectors",), "preconditioner_matrices": "kronecker", "shampoo_factors": "accumulated"},
    {"exact": True, "preconditioner_embeddings": "adamw", "mars_kinds": ("matrices", "embeddings")},
    {"gamma": "cosine:0.3:0", "max_iters": 5, "preconditioner_embeddings": "lion"},
    {"mars_last_grad": "folded", "mars_clip": "none", "preconditioner_embeddings": "lion"},
]


def update(optimizer: MARS, params: list[nn.Parameter], seed: int) -> None:
    if optimizer.defaults["exact"]:
        set_gradients(params, 50 + seed)
        optimizer.record_reference_gradient()
    set_gradients(params, seed)
    optimizer.step()


@pytest.mark.parametrize("hybrid", HYBRIDS, ids=str)
def test_each_kind_steps_as_by_itself(hybrid: dict[str, Any]) -> None:
    """To the last bit as the plain optimizer of that kind, that has only these parameters, and no word of kinds."""
    model, config = Mixed(), replace(CONFIG, **hybrid)
    optimizer = build_optimizer(model, config)
    assert isinstance(optimizer, MARS)
    alone: dict[str, tuple[MARS, list[nn.Parameter]]] = {}
    for group in optimizer.param_groups:
        twins = [nn.Parameter(parameter.detach().clone()) for parameter in group["params"]]
        corrects = group["name"] in (config.mars_kinds or ("matrices", "convolutions", "embeddings"))
        by_itself: dict[str, Any] = {
            "matrices": {"lr": 2e-2, "betas": (0.95, 0.99), "weight_decay": 0.01, "preconditioner": "shampoo"},
            "convolutions": {"lr": 2e-2, "betas": (0.95, 0.99), "weight_decay": 0.01, "preconditioner": "shampoo"},
            "embeddings": {"lr": 6e-3, "betas": (0.8, 0.9), "weight_decay": 0.03, "preconditioner": "shampoo"},
            "vectors": {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "preconditioner": "adamw"},
        }[group["name"]]
        by_itself |= {"exact": config.exact, "compile": False}
        if preconditioner := hybrid.get(f"preconditioner_{group['name']}"):
            by_itself["preconditioner"] = preconditioner
        if by_itself["preconditioner"] == "kronecker":
            by_itself |= {"refresh_interval": config.shampoo_interval, "factors": config.shampoo_factors}
        by_itself |= {"gamma": 0.05 if corrects else 0.0, "clip": config.mars_clip if corrects else "none"}
        by_itself |= {"last_grad": config.mars_last_grad} if corrects else {}
        if corrects and isinstance(config.gamma, str):
            by_itself["gamma"] = lambda step: 0.15 * (1 + math.cos(math.pi * (step - 1) / 4))
        alone[group["name"]] = MARS(twins, **by_itself), twins
    start = copy.deepcopy(model)
    for seed in range(5):
        for kind, (plain, twins) in alone.items():
            update(plain, twins, seed)
            # In the exact form all record before any steps.
            set_gradients(of_kind(optimizer, kind), 50 + seed)
        if config.exact:
            optimizer.record_reference_gradient()
        for kind in alone:
            set_gradients(of_kind(optimizer, kind), seed)
        optimizer.step()
    for kind, (_, twins) in alone.items():
        assert all(torch.equal(p, twin) for p, twin in zip(of_kind(optimizer, kind), twins, strict=True)), kind
    assert not any(torch.equal(p, old) for p, old in zip(model.parameters(), start.parameters(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", MARS_NAMES[:2])
def test_a_named_preconditioner_is_the_optimizer_of_that_name(kind: str, name: str) -> None:
    """Between configs: under mars-shampoo, with a key, as under that optimizer without."""
    values = [parameter.detach() for parameter in of_kind(build_optimizer(Mixed(), CONFIG), kind)]
    config = replace(CONFIG, mars_kinds=KINDS)
    hybrid, plain = Bare(kind, values), Bare(kind, values)
    key = {f"preconditioner_{kind}": name.removeprefix("mars-")}
    one = build_optimizer(hybrid, replace(config, **key))
    other = build_optimizer(plain, replace(config, optimizer=name, **(key if kind == "vectors" else {})))
    assert [group["name"] for group in one.param_groups] == [kind]
    for seed in range(4):
        for model, optimizer in ((hybrid, one), (plain, other)):
            set_gradients(list(model.parameters()), seed)
            optimizer.step()
    assert all(torch.equal(p, q) for p, q in zip(hybrid.parameters(), plain.parameters(), strict=True))
    assert not torch.equal(next(iter(hybrid.parameters())), values[0])


def test_plain_adamw_for_vectors_and_for_embeddings_is_torch_s() -> None:
    model = Mixed()
    config = replace(CONFIG, preconditioner_embeddings="adamw", mars_kinds=("matrices", "convolutions"))
    optimizer = build_optimizer(model, config)
    settings: dict[str, dict[str, Any]] = {
        "vectors": {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1},
        "embeddings": {"lr": 6e-3, "betas": (0.8, 0.9), "weight_decay": 0.03},
    }
    twins = {kind: [nn.Parameter(p.detach().clone()) for p in of_kind(optimizer, kind)] for kind in settings}
    plain = {kind: torch.optim.AdamW(twins[kind], **settings[kind]) for kind in settings}
    for seed in range(5):
        set_gradients(list(model.parameters()), seed)
        for kind in settings:
            for parameter, twin in zip(of_kind(optimizer, kind), twins[kind], strict=True):
                assert parameter.grad is not None
                twin.grad = parameter.grad.clone()
            plain[kind].step()
        optimizer.step()
    for kind in settings:
        torch.testing.assert_close(of_kind(optimizer, kind), twins[kind], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["adamw", "lion", "shampoo", "kronecker", "sgd"])
def test_convolutions_step_as_matrices_of_outputs_and_the_rest(name: str) -> None:
    shapes = [(8, 3, 3, 3), (5, 4, 3)]
    values = [torch.randn(shape, generator=torch.Generator().manual_seed(1)) for shape in shapes]
    flat = Bare("matrices", [value.flatten(1) for value in values])
    conv = Bare("convolutions", values)
    keys = {"preconditioner_matrices": name, "preconditioner_convolutions": name, "shampoo_interval": 2}
    config = replace(CONFIG, **keys)
    optimizers = [build_optimizer(model, config) for model in (conv, flat)]
    assert [one.param_groups[0]["name"] for one in optimizers] == ["convolutions", "matrices"]
    for seed in range(4):
        set_gradients(list(flat.parameters()), seed)
        for one, other in zip(conv.parameters(), flat.parameters(), strict=True):
            assert other.grad is not None
            one.grad = other.grad.view(one.shape).clone()
        for optimizer in optimizers:
            optimizer.step()
    for one, other, old in zip(conv.parameters(), flat.parameters(), values, strict=True):
        assert torch.equal(one.flatten(1), other)
        assert not torch.equal(one, old)


@pytest.mark.parametrize("hybrid", HYBRIDS, ids=str)
def test_the_state_goes_on_bit_for_bit(hybrid: dict[str, Any]) -> None:
    config = replace(CONFIG, **hybrid)
    model = Mixed()
    optimizer = build_optimizer(model, config)
    for seed in range(3):
        update(optimizer, list(model.parameters()), seed)
    other = copy.deepcopy(model)
    resumed = build_optimizer(other, config)
    load_optimizer_state(resumed, copy.deepcopy(optimizer.state_dict()))
    for seed in range(3, 6):
        update(optimizer, list(model.parameters()), seed)
        update(resumed, list(other.parameters()), seed)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def test_what_is_kept_is_what_each_preconditioner_needs() -> None:
    config = replace(CONFIG, preconditioner_embeddings="adamw", preconditioner_convolutions="kronecker")
    model = Mixed()
    optimizer = build_optimizer(model, config)
    set_gradients(list(model.parameters()), 0)
    optimizer.step()
    kept = {
        group["name"]: {frozenset(optimizer.state[parameter]) - {"step"} for parameter in group["params"]}
        for group in optimizer.param_groups
    }
    factors = {"factor_left", "factor_right", "root_left", "root_right"}
    assert kept == {
        "matrices": {frozenset({"exp_avg", "last_grad"})},
        "convolutions": {frozenset({"exp_avg", "last_grad", *factors})},
        "embeddings": {frozenset({"exp_avg", "exp_avg_sq", "last_grad"})},
        "vectors": {frozenset({"exp_avg", "exp_avg_sq"})},
    }


def test_start_up_lines_say_what_steps_each_kind() -> None:
    keys: dict[str, Any] = {"preconditioner_embeddings": "adamw", "preconditioner_vectors": "lion"}
    config = replace(CONFIG, gamma="adaptive", **keys)
    lines = describe_groups(build_optimizer(Mixed(), config))
    assert [line.split()[0] for line in lines] == list(KINDS)
    adaptive = (
        "gamma 0.3 where the norm is above 1.5 of its running one (decay 0.9), 0.9 below 0.5, else 0.7, clip tensor"
    )
    assert [line.split("  ")[-1] for line in lines] == [
        *(f"{name}, {adaptive}" for name in ("shampoo", "shampoo", "adamw")),
        "lion, no correction",
    ]
    assert "lr 0.006  betas (0.8, 0.9)  weight decay 0.03" in lines[2]


# --- what cannot be ---

WRONG: list[tuple[dict[str, Any], str]] = [
    ({"preconditioner_vectors": "shampoo"}, "preconditioner_vectors='shampoo' must be among adamw, lion, sgd"),
    ({"preconditioner_vectors": "kronecker"}, "preconditioner_vectors='kronecker' must be among adamw, lion, sgd"),
    (
        {"preconditioner_matrices": "muon"},
        "preconditioner_matrices='muon' must be among adamw, lion, sgd, shampoo, kron",
    ),
    ({"mars_kinds": ("matrix",)}, "mars_kinds=('matrix',) must be among matrices, convolutions, embeddings, vectors"),
    (
        {"optimizer": "muon", "preconditioner_embeddings": "lion"},
        "preconditioner_embeddings='lion' is for mars-adamw, ",
    ),
    ({"optimizer": "adamw", "mars_kinds": KINDS}, "optimizer='adamw' does not have it"),
    (
        {"embedding_adamw": True, "preconditioner_embeddings": "lion"},
        "preconditioner_embeddings='lion' needs embedding_",
    ),
    ({"embedding_adamw": True, "mars_kinds": KINDS}, "'vectors') needs embedding_adamw=None"),
    ({"optimizer": "lion", "mars_kinds": None}, "betas_embedding=(0.8, 0.9) is for embeddings on AdamW"),
    ({"optimizer": "muon", "embedding_adamw": False}, "betas_embedding=(0.8, 0.9) is for embeddings on AdamW"),
    ({"mars_last_grad": "folded", "mars_clip": "none", "preconditioner_embeddings": "adamw"}, "folded"),
]


@pytest.mark.parametrize(("keys", "said"), WRONG, ids=[said for _, said in WRONG])
def test_what_cannot_be_is_one_line(keys: dict[str, Any], said: str) -> None:
    config = copy.copy(CONFIG)
    for key, value in keys.items():  # past the config's own checks
        object.__setattr__(config, key, value)
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        build_optimizer(Mixed(), config)
    assert "\n" not in str(error.value)
