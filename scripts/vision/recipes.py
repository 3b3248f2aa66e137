"""What each optimizer is trained with: the settings of `TrainConfig` that `build_optimizer` reads.

None of these learning rates is the paper's, whose values for images are not known here. Those for digits are from a
search over four rates of each optimizer (docs/vision.md); those for CIFAR are usual values that were not tried
here, where a search can start.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from configs import TrainConfig


@dataclass(frozen=True)
class Recipe:
    name: str
    """of the row"""
    config: TrainConfig

    @property
    def learning_rate(self) -> float:
        """Of matrices and convolutions, before the first drop."""
        return self.config.learning_rate

    def at(self, learning_rate: float) -> Recipe:
        """The same with another learning rate, and vectors as they are."""
        return replace(self, config=replace(self.config, learning_rate=learning_rate))


BASE: dict[str, Any] = {"min_lr": 0.0, "beta1": 0.9, "beta2": 0.99, "weight_decay": 0.05}
APART = {"betas_1d": (0.9, 0.99)}  # of vectors (batch normalization, biases), which are on AdamW
MARS = BASE | APART | {"beta1": 0.95}
SIGN = {"weight_decay": 0.5}  # a sign's learning rate is about a tenth of AdamW's, so its decay is ten times as large
SETTINGS: dict[str, dict[str, Any]] = {
    "adamw": BASE,
    "nadamw": BASE,
    "sgd": BASE | {"weight_decay": 5e-4},
    "lion": BASE | APART | SIGN,
    "muon": MARS,
    "shampoo": MARS,
    "mars-adamw": MARS,
    "mars-lion": MARS | SIGN,
    "mars-shampoo": MARS,
}
EXACT = ("mars-adamw", "mars-lion", "mars-shampoo")  # have a form with two gradients an update
METHODS = (*SETTINGS, *(f"{name}-exact" for name in EXACT))


@dataclass(frozen=True)
class Rates:
    """Learning rates for a kind of data."""

    matrices: dict[str, float]
    """and convolutions: one for each of SETTINGS"""
    vectors: float
    """where they are apart"""

    def recipes(self) -> dict[str, Recipe]:
        """One for each of METHODS."""
        found = {}
        for name, settings in SETTINGS.items():
            rates = {"learning_rate": self.matrices[name], "lr_1d": self.vectors if "betas_1d" in settings else None}
            config = TrainConfig(**{"optimizer": name} | settings | rates)
            found[name] = Recipe(name, config)
            found[f"{name}-exact"] = Recipe(f"{name}-exact", replace(config, exact=True))
        return {name: found[name] for name in METHODS}


DIGITS = Rates(
    {
        **{"adamw": 3e-2, "nadamw": 3e-2, "sgd": 0.3, "lion": 1e-2, "muon": 0.1, "shampoo": 0.1},
        **{"mars-adamw": 3e-2, "mars-lion": 1e-2, "mars-shampoo": 0.1},
    },
    vectors=3e-3,
)
CIFAR = Rates(
    {
        **{"adamw": 1e-3, "nadamw": 1e-3, "sgd": 0.1, "lion": 1e-4, "muon": 2e-2, "shampoo": 2e-2},
        **{"mars-adamw": 3e-3, "mars-lion": 3e-4, "mars-shampoo": 2e-2},
    },
    vectors=1e-3,
)
RATES = {"digits": DIGITS, "cifar10": CIFAR, "cifar100": CIFAR}
