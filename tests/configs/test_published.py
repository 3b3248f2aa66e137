"""The configs of the paper's comparison hold the published values (arXiv 2411.10438, Tables 10-12, and the authors'
published configs), and say where a value is not from there."""

import math
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from configs import TrainConfig, load_config
from model import GPT, GPTConfig
from optim import build_optimizer
from tests.conftest import Train

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
SIZES = {  # layers, heads, width, parameters, smallest learning rate, that of vectors, micro-batches on 8 GPUs
    "small": (12, 12, 768, 124_373_760, 3e-5, 3e-3, 4),
    "medium": (24, 16, 1024, 354_599_936, 6e-5, 1.5e-3, 4),
    "large": (36, 20, 1280, 773_582_080, 1e-5, 1e-3, 12),
    "xl": (48, 25, 1600, 1_556_840_000, 1e-5, 1e-3, 12),
}
RATES = {
    "adamw": {"small": 6e-4, "medium": 3e-4, "large": 2e-4, "xl": 2e-4},
    "mars": {"small": 6e-3, "medium": 3e-3, "large": 2e-3, "xl": 2e-3},
    "muon": {"small": 2e-2, "medium": 1e-2, "large": 6.67e-3},
}
RECIPES = ("adamw", "mars", "mars_lion", "mars_shampoo", "lion", "muon")
RUNS = [(size, size) for size in ("small", "medium", "large")] + [("small", "small_fineweb"), ("xl", "xl_fineweb")]
FIXED = {  # the same in every published run
    **{"vocab_size": 50304, "block_size": 1024, "total_batch_size": 480, "seed": 5000, "eps": 1e-8},
    **{"max_iters": 100_000, "decay_iters": 100_000, "warmup_iters": 2000, "grad_clip": 1.0, "dropout": 0.0},
    **{"bias": False, "scale_attn_by_inverse_layer_idx": True, "gamma": 0.025, "gradient_multiplier": 1.0},
    **{"first_lr_zero": False, "weight_decay_embedding": None, "mars_clip": "tensor", "mars_first_step": "paper"},
}
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": {"optimizer": "adamw", "betas": (0.9, 0.95), "weight_decay": 0.1, "weight_decay_1d": 0.0},
    "mars": {"optimizer": "mars-adamw", "betas": (0.95, 0.99), "weight_decay": 0.01, "embedding_adamw": None},
    "muon": {"optimizer": "muon", "beta1": 0.95, "weight_decay": 0.0, "embedding_adamw": False},
    "mars_lion": {"optimizer": "mars-lion", "betas": (0.95, 0.99), "embedding_adamw": None},
    "mars_shampoo": {"optimizer": "mars-shampoo", "betas": (0.95, 0.99), "embedding_adamw": True},
    "lion": {"optimizer": "lion", "betas": (0.9, 0.99), "embedding_adamw": None},
}
UNPUBLISHED = [
    *(f"gpt2_{run}_{recipe}" for _, run in RUNS for recipe in ("mars_lion", "mars_shampoo", "lion")),
    *("gpt2_small_fineweb_muon", "gpt2_xl_fineweb_muon", "gpt2_small_mars_hybrid"),
]


def load(name: str) -> TrainConfig:
    return load_config(CONFIGS / f"{name}.py")


def differences(name: str, other: str) -> dict[str, Any]:
    """What a config has otherwise than another one, but for the folder."""
    mine, theirs = asdict(load(name)), asdict(load(other))
    return {key: mine[key] for key in mine if mine[key] != theirs[key] and key != "out_dir"}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("size", "run"), RUNS)
def test_published_values(size: str, run: str, recipe: str) -> None:
    config = load(f"gpt2_{run}_{recipe}")
    layers, heads, width, _, smallest, lr_1d, accumulation = SIZES[size]
    assert (config.n_layer, config.n_head, config.n_embd) == (layers, heads, width)
    assert config.accumulation_steps(8) == accumulation
    assert {key: getattr(config, key) for key in FIXED} == FIXED
    assert config.dataset == ("fineweb_edu" if "fineweb" in run else "openwebtext")

    settings = {key: getattr(config, key) for key in SETTINGS[recipe] if key != "betas"}
    settings |= {"betas": (config.beta1, config.beta2)} if "betas" in SETTINGS[recipe] else {}
    assert settings == SETTINGS[recipe]
    if size in RATES.get(recipe, {}):
        assert config.learning_rate == RATES[recipe][size]
    if recipe != "lion":
        assert config.min_lr == smallest
    vectors = (None, None, 0.0) if recipe == "adamw" else (lr_1d, (0.9, 0.95), 0.1)
    assert (config.lr_1d, config.betas_1d, config.weight_decay_1d) == vectors


@pytest.mark.parametrize("size", SIZES)
def test_parameters(size: str) -> None:
    config = load("gpt2_xl_fineweb_adamw" if size == "xl" else f"gpt2_{size}_adamw")
    settings = {key: getattr(config, key) for key in GPTConfig.__dataclass_fields__}
    with torch.device("meta"):
        model = GPT(GPTConfig(**settings))
    assert sum(parameter.numel() for parameter in model.parameters()) == SIZES[size][3]


def test_exact_mars() -> None:
    assert differences("gpt2_small_mars_exact", "gpt2_small_mars") == {"exact": True}


@pytest.mark.parametrize("recipe", RECIPES)
def test_fineweb_edu_differs_in_the_data_alone(recipe: str) -> None:
    assert differences(f"gpt2_small_fineweb_{recipe}", f"gpt2_small_{recipe}") == {"dataset": "fineweb_edu"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_xl_is_large_but_for_model_and_data(recipe: str) -> None:
    """AdamW and MARS have one learning rate for both, as published; the others have followed them."""
    different = differences(f"gpt2_xl_fineweb_{recipe}", f"gpt2_large_{recipe}")
    assert different == {"n_layer": 48, "n_head": 25, "n_embd": 1600, "dataset": "fineweb_edu"}


@pytest.mark.parametrize(("size", "run"), RUNS)
def test_values_that_were_not_published_follow_their_rules(size: str, run: str) -> None:
    """Those that configs/base/ gives for them."""
    adamw, mars, mars_lion, mars_shampoo, lion, muon = (load(f"gpt2_{run}_{recipe}") for recipe in RECIPES)
    assert mars_lion.learning_rate == pytest.approx(mars.learning_rate / 10)
    assert lion.learning_rate == pytest.approx(adamw.learning_rate / 5)
    assert lion.min_lr == pytest.approx(adamw.min_lr / 5)
    assert mars_shampoo.learning_rate == muon.learning_rate
    assert muon.learning_rate == pytest.approx(mars.learning_rate / 0.3, rel=1e-3)  # published, but for XL
    for config in (mars, mars_lion, lion):
        assert config.learning_rate * config.weight_decay == pytest.approx(adamw.learning_rate * adamw.weight_decay)
    decay = mars_shampoo.learning_rate * mars_shampoo.weight_decay
    assert decay == pytest.approx(adamw.learning_rate * adamw.weight_decay, rel=1e-3)


@pytest.mark.parametrize("size", ["gpt2_small", "stdlib"])
def test_the_hybrid_is_mars_shampoo_with_embeddings_as_in_mars_adamw(size: str) -> None:
    hybrid, mars = load(f"{size}_mars_hybrid"), load(f"{size}_mars")
    assert differences(f"{size}_mars_hybrid", f"{size}_mars_shampoo") == {
        **{"embedding_adamw": False, "preconditioner_embeddings": "adamw"},
        **{"lr_embedding": mars.learning_rate, "weight_decay_embedding": mars.weight_decay},
    }
    assert (hybrid.beta1, hybrid.beta2, hybrid.gamma) == (mars.beta1, mars.beta2, mars.gamma)
    with torch.device("meta"):
        model = GPT(GPTConfig(**{key: getattr(hybrid, key) for key in GPTConfig.__dataclass_fields__}))
    groups = {group["name"]: group for group in build_optimizer(model, hybrid).param_groups}
    methods = {name: (group["preconditioner"], group["gamma"], group["clip"]) for name, group in groups.items()}
    assert methods == {
        "matrices": ("shampoo", 0.025, "tensor"),
        "embeddings": ("adamw", 0.025, "tensor"),
        "vectors": ("adamw", 0.0, "none"),
    }
    assert {name: group["lr"] for name, group in groups.items()} == pytest.approx(
        {"matrices": hybrid.learning_rate, "embeddings": mars.learning_rate, "vectors": hybrid.lr_1d}
    )


def step_on_noise(name: str) -> float:
    """The root mean square of the peak steps that a config's optimizer makes of gradients that are pure noise."""
    torch.manual_seed(0)
    layer = torch.nn.Linear(100, 100, bias=False)
    optimizer = build_optimizer(layer, replace(load(name), weight_decay=0.0, compile_optimizer=False))
    squares = []
    for step in range(400):
        layer.weight.grad = 1e-4 * torch.randn(100, 100)
        before = layer.weight.detach().clone()
        optimizer.step()
        if step >= 300:  # past the first updates, which are larger
            squares.append((layer.weight.detach() - before).square().mean().item())
    return math.sqrt(sum(squares) / len(squares))


@pytest.mark.slow
def test_the_steps_on_noise_that_the_learning_rates_of_lion_and_mars_lion_are_from() -> None:
    """The figures in configs/base/lion.py, mars_lion.py and docs/reproducing.md."""
    adamw, mars = step_on_noise("gpt2_small_adamw"), step_on_noise("gpt2_small_mars")
    assert (adamw, mars) == pytest.approx((1.4e-4, 6.4e-4), rel=0.05)
    assert step_on_noise("gpt2_small_lion") == pytest.approx(1.2e-4, rel=1e-3)
    assert step_on_noise("gpt2_small_mars_lion") == pytest.approx(6e-4, rel=1e-3)


@pytest.mark.parametrize("name", UNPUBLISHED)
def test_what_was_not_published_says_so(name: str) -> None:
    text = " ".join((CONFIGS / f"{name}.py").read_text().replace("#", "").split()).lower()
    assert "nothing was published" in text
    assert "not tuned" in text or "nothing is tuned" in text


ALL_SCRIPTS = {"first_lr_zero": True, "max_iters": 100_001, "lr_decay_iters": 100_000}
MARS_SCRIPT = {"mars_first_step": "official", "weight_decay_embedding": 0.0}


@pytest.mark.parametrize(
    ("paper", "quirks", "multiplier"),
    [
        ("gpt2_small_adamw", ALL_SCRIPTS, 4.0),
        ("gpt2_medium_adamw", ALL_SCRIPTS, 4.0),
        ("gpt2_large_adamw", ALL_SCRIPTS, 12.0),
        ("gpt2_small_mars", ALL_SCRIPTS | MARS_SCRIPT, 4.0),
        ("gpt2_small_mars_exact", ALL_SCRIPTS | MARS_SCRIPT, 4.0),
        ("gpt2_medium_mars", ALL_SCRIPTS | MARS_SCRIPT, 4.0),
        ("gpt2_large_mars", ALL_SCRIPTS | MARS_SCRIPT, 12.0),
    ],
)
def test_official_presets_differ_in_the_quirks_of_the_published_code(
    paper: str, quirks: dict[str, Any], multiplier: float
) -> None:
    assert differences(f"{paper}_official", paper) == quirks | {"gradient_multiplier": multiplier}
    official = load(f"{paper}_official")
    assert official.mars_clip == "tensor"
    assert official.weight_decay_1d == (0.1 if "mars" in paper else 0.0)
    assert official.accumulation_steps(8) == multiplier  # what the published code leaves undivided


def test_a_run_with_the_published_loop_s_schedule(run_train: Train) -> None:
    """In the tiny run of conftest.py (peak 1e-2 at update 2, minimum 1e-3 at update 6) each rate is an update late."""
    done = run_train("--first_lr_zero=true", "--lr_decay_iters=6", "--max_iters=7", "--eval_interval=1")
    cosine = [1e-3 + 9e-3 * 0.5 * (1 + math.cos(math.pi * step / 4)) for step in (1, 2, 3)]
    assert done.series("lr") == pytest.approx([0.0, 5e-3, 1e-2, *cosine, 1e-3])
    val = done.series("val/loss")
    assert val[0] == val[1] != val[2]  # the first update moves nothing

    changed = run_train("--lr_decay_iters=6", "--max_iters=9", "--resume=auto")
    assert "changed     first_lr_zero: True until now, False from here on" in changed.stdout
    assert changed.series("lr")[-2:] == [1e-3, 1e-3]


def test_the_page_of_commands_names_every_config_that_has_a_published_result() -> None:
    """And none that does not exist."""
    text = (CONFIGS.parent / "docs" / "reproducing.md").read_text()
    rows = set(re.findall(r"^\| `(gpt2_\w+)`", text, re.MULTILINE))
    names = {path.stem for path in CONFIGS.glob("gpt2_*.py")}
    assert rows <= names
    published = {name for name in names - set(UNPUBLISHED) if not name.endswith("_official")}
    with_results = {"gpt2_small_mars_lion", "gpt2_medium_mars_lion", "gpt2_large_mars_lion", "gpt2_large_lion"}
    assert rows == published | with_results
