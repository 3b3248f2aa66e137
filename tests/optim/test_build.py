"""From a config to an optimizer: groups, settings, schedule."""

import math
import typing
from dataclasses import replace

import pytest
import torch

from configs import TrainConfig
from model import GPT, GPTConfig
from optim import MARS, build_optimizer, describe_groups, learning_rate_at, optimizer_metrics, set_learning_rate
from optim.build import BUILDERS

SMALL = GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=32)
MARS_CONFIG = TrainConfig(
    optimizer="mars-adamw",
    learning_rate=6e-3,
    beta1=0.95,
    beta2=0.99,
    weight_decay=0.01,
    lr_1d=3e-3,
    betas_1d=(0.9, 0.95),
    weight_decay_1d=0.1,
    mars_clip="global",
    mars_first_step="official",
)


def test_config_names_are_the_builders_names() -> None:
    hints = typing.get_type_hints(TrainConfig)
    assert set(typing.get_args(hints["optimizer"])) == set(BUILDERS)


def test_every_parameter_is_in_one_group_once() -> None:
    model = GPT(SMALL)
    for name in BUILDERS:
        optimizer = build_optimizer(model, replace(MARS_CONFIG, optimizer=name))
        ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
        assert sorted(ids) == sorted(id(p) for p in model.parameters())
        assert len(set(ids)) == len(ids)
        groups = {group["name"]: group for group in optimizer.param_groups}
        assert {id(p) for p in groups["embeddings"]["params"]} == {
            id(model.lm_head.weight),
            id(model.transformer.wpe.weight),
        }
        assert all(p.dim() == 1 for p in groups["vectors"]["params"])
        assert len(groups["matrices"]["params"]) == 2 * 4


def test_adamw_is_torch_s_fused_one_and_spares_vectors_from_decay() -> None:
    optimizer = build_optimizer(GPT(SMALL), TrainConfig(weight_decay=0.1, weight_decay_embedding=0.05))
    assert type(optimizer) is torch.optim.AdamW
    assert optimizer.defaults["fused"]
    decay = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decay == {"matrices": 0.1, "embeddings": 0.05, "vectors": 0.0}


def test_mars_takes_every_setting() -> None:
    optimizer = build_optimizer(GPT(SMALL), MARS_CONFIG)
    assert isinstance(optimizer, MARS)
    groups = {group["name"]: group for group in optimizer.param_groups}
    for name in ("matrices", "embeddings"):
        group = groups[name]
        assert (group["lr"], group["betas"], group["weight_decay"]) == (6e-3, (0.95, 0.99), 0.01)
        assert (group["gamma"], group["clip"], group["first_step"]) == (0.025, "global", "official")
    vectors = groups["vectors"]
    assert (vectors["lr"], vectors["betas"], vectors["weight_decay"]) == (3e-3, (0.9, 0.95), 0.1)
    assert (vectors["gamma"], vectors["clip"]) == (0.0, "none")


@pytest.mark.parametrize("embedding_adamw", [False, True])
def test_embeddings_follow_the_matrices_or_the_vectors(embedding_adamw: bool) -> None:
    config = replace(MARS_CONFIG, optimizer="mars-shampoo", embedding_adamw=embedding_adamw, exact=True)
    groups = {group["name"]: group for group in build_optimizer(GPT(SMALL), config).param_groups}
    assert (groups["matrices"]["preconditioner"], groups["matrices"]["exact"]) == ("shampoo", True)
    assert groups["vectors"]["preconditioner"] == "adamw"
    embeddings = groups["embeddings"]
    got = (embeddings["preconditioner"], embeddings["gamma"], embeddings["lr"], embeddings["betas"])
    assert got == (("adamw", 0.0, 3e-3, (0.9, 0.95)) if embedding_adamw else ("shampoo", 0.025, 6e-3, (0.95, 0.99)))
    assert embeddings["weight_decay"] == 0.01


def test_only_mars_has_an_exact_form() -> None:
    with pytest.raises(ValueError, match="exact"):
        build_optimizer(GPT(SMALL), TrainConfig(exact=True))


def test_the_schedule_moves_all_groups_in_proportion() -> None:
    optimizer = build_optimizer(GPT(SMALL), MARS_CONFIG)
    set_learning_rate(optimizer, 1e-3)
    lrs = {group["name"]: group["lr"] for group in optimizer.param_groups}
    assert lrs == pytest.approx({"matrices": 1e-3, "embeddings": 1e-3, "vectors": 5e-4})


def test_start_up_lines_name_each_group() -> None:
    lines = describe_groups(build_optimizer(GPT(SMALL), MARS_CONFIG))
    assert len(lines) == 3
    assert lines[2].split()[:2] == ["vectors", "5"]
    assert "lr 0.003" in lines[2]


def test_unknown_optimizer() -> None:
    config = TrainConfig()
    object.__setattr__(config, "optimizer", "adam")
    with pytest.raises(ValueError, match="mars-adamw"):
        build_optimizer(GPT(SMALL), config)


def test_metrics_exist_only_where_an_optimizer_reports_some() -> None:
    model = GPT(SMALL)
    assert optimizer_metrics(build_optimizer(model, TrainConfig())) == {}


def test_schedule() -> None:
    def lr(update: int, warmup: int = 10, decay: int = 110) -> float:
        return learning_rate_at(update, peak=1.0, minimum=0.1, warmup=warmup, decay=decay)

    assert lr(1) == pytest.approx(0.1)  # the first update moves
    assert lr(10) == 1.0  # the maximum, at the end of the warm-up
    assert max(lr(k) for k in range(1, 200)) == 1.0
    assert lr(60) == pytest.approx(0.55)  # half way
    assert lr(35) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert lr(110) == lr(111) == lr(10_000) == 0.1
    assert lr(1, warmup=0) > 0.99
    assert lr(1, warmup=1) == 1.0
    assert lr(3, warmup=10, decay=5) == pytest.approx(0.3)  # a run shorter than its warm-up


def test_the_published_loop_s_schedule_lags_by_one_update() -> None:
    def lr(update: int) -> float:
        return learning_rate_at(update, 6e-3, 3e-5, 2000, 100_000, first_zero=True)

    assert lr(1) == 0.0
    assert lr(2) == pytest.approx(3e-6)
    assert lr(2001) == 6e-3  # the maximum, an update later than without
    assert lr(51_001) == pytest.approx((6e-3 + 3e-5) / 2)  # half way
    assert lr(100_000) > lr(100_001) == 3e-5
    assert lr(2) == learning_rate_at(1, 6e-3, 3e-5, 2000, 100_000)
