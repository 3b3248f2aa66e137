"""From a model and a config to an optimizer.

The parameters are split into three kinds, hidden matrices, embeddings and vectors, each a parameter group with its
own learning rate, betas and decay. To add an optimizer: write it, add a builder below, and name it in
`TrainConfig.optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from optim.mars import MARS

FUSED_DEVICES = ("cpu", "cuda", "mps")  # where torch has a fused AdamW


class OptimizerConfig(Protocol):
    """The settings that are read here; `configs.TrainConfig` documents them."""

    @property
    def optimizer(self) -> str: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def beta1(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def weight_decay_embedding(self) -> float | None: ...
    @property
    def weight_decay_1d(self) -> float: ...
    @property
    def lr_1d(self) -> float | None: ...
    @property
    def betas_1d(self) -> tuple[float, float] | None: ...
    @property
    def embedding_adamw(self) -> bool: ...
    @property
    def gamma(self) -> float: ...
    @property
    def exact(self) -> bool: ...
    @property
    def mars_clip(self) -> Literal["tensor", "global", "none"]: ...
    @property
    def mars_first_step(self) -> Literal["paper", "official"]: ...


Groups = list[dict[str, Any]]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer that `config.optimizer` names, over all parameters of the model, a tied one once.

    Raises:
        ValueError: an unknown name, or settings that the optimizer does not have.
    """
    if config.optimizer not in BUILDERS:
        raise ValueError(f"optimizer={config.optimizer!r} must be one of {', '.join(BUILDERS)}")
    return BUILDERS[config.optimizer](_parameter_groups(model, config), config)


def _adamw(groups: Groups, config: OptimizerConfig) -> Optimizer:
    if config.exact:
        raise ValueError("optimizer='adamw' has no exact form; set --exact=false, or a MARS optimizer")
    fused = all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])
    return AdamW(groups, lr=config.learning_rate, betas=(config.beta1, config.beta2), eps=config.eps, fused=fused)


def _mars(preconditioner: str, groups: Groups, config: OptimizerConfig) -> Optimizer:
    plain_adamw = {"preconditioner": "adamw", "gamma": 0.0, "clip": "none"}
    for group in groups:
        if group["name"] == "vectors" or (group["name"] == "embeddings" and config.embedding_adamw):
            group.update(plain_adamw)
    return MARS(
        groups,
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        gamma=config.gamma,
        preconditioner=preconditioner,
        exact=config.exact,
        clip=config.mars_clip,
        first_step=config.mars_first_step,
    )


BUILDERS: dict[str, Callable[[Groups, OptimizerConfig], Optimizer]] = {
    "adamw": _adamw,
    "mars-adamw": partial(_mars, "adamw"),
    "mars-lion": partial(_mars, "lion"),
    "mars-shampoo": partial(_mars, "shampoo"),
}


def _parameter_groups(model: nn.Module, config: OptimizerConfig) -> Groups:
    """Hidden matrices, embeddings and vectors. `lr_scale` ties a group's learning rate to the schedule."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds: dict[str, list[Tensor]] = {"matrices": [], "embeddings": [], "vectors": []}
    for parameter in model.parameters():
        kind = "embeddings" if id(parameter) in embeddings else "matrices" if parameter.dim() >= 2 else "vectors"
        kinds[kind].append(parameter)

    decay, betas = config.weight_decay, (config.beta1, config.beta2)
    decay_embedding = decay if config.weight_decay_embedding is None else config.weight_decay_embedding
    like_matrices: dict[str, Any] = {"lr_scale": 1.0, "betas": betas}
    like_vectors: dict[str, Any] = {
        "lr_scale": 1.0 if config.lr_1d is None else config.lr_1d / config.learning_rate,
        "betas": config.betas_1d or betas,
    }
    settings = {
        "matrices": like_matrices | {"weight_decay": decay},
        "embeddings": (like_vectors if config.embedding_adamw else like_matrices) | {"weight_decay": decay_embedding},
        "vectors": like_vectors | {"weight_decay": config.weight_decay_1d},
    }
    return [
        {"name": name, "params": parameters, "lr": config.learning_rate * settings[name]["lr_scale"], **settings[name]}
        for name, parameters in kinds.items()
        if parameters
    ]


def describe_groups(optimizer: Optimizer) -> list[str]:
    """A line for each parameter group, for the start of a run."""
    lines = []
    for group in optimizer.param_groups:
        count = sum(parameter.numel() for parameter in group["params"])
        tensors = len(group["params"])
        lines.append(
            f"{group.get('name', 'group'):<10} {tensors:>4} tensors {count:>13,} parameters  "
            f"lr {group['lr']:.3g}  betas {group['betas']}  weight decay {group['weight_decay']:g}{_method(group)}"
        )
    return lines


def _method(group: dict[str, Any]) -> str:
    """How MARS steps a group; nothing for torch's own optimizers."""
    if "gamma" not in group:
        return ""
    correction = f"gamma {group['gamma']:g}, clip {group['clip']}" if group["gamma"] else "no correction"
    return f"  {group['preconditioner']}, {correction}{', exact' if group['gamma'] and group['exact'] else ''}"


def load_optimizer_state(optimizer: Optimizer, saved: dict[str, Any]) -> None:
    """Restores what an optimizer's `state_dict()` holds of its parameters, and keeps the settings that its groups have
    now, so that a run can go on with another learning rate, decay or gamma.

    Raises:
        ValueError: the groups hold other parameters.
    """
    settings = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    optimizer.load_state_dict(saved)
    for group, kept in zip(optimizer.param_groups, settings, strict=True):
        group.update(kept)


def record_reference_gradient(optimizer: Optimizer) -> None:
    """Hands an exact optimizer the gradient of the current parameters on the next batch (see `MARS`)."""
    assert isinstance(optimizer, MARS), "build_optimizer refuses exact=True for others"
    optimizer.record_reference_gradient()


def optimizer_metrics(optimizer: Optimizer) -> dict[str, Tensor]:
    """Figures that an optimizer reports of its last step, as scalar tensors; none for torch's own."""
    return optimizer.metrics() if isinstance(optimizer, MARS) else {}
