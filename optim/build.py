"""From a model and a config to an optimizer.

The parameters are split into three kinds, hidden matrices, embeddings and vectors, each a parameter group with its
own learning rate, betas and decay. To add an optimizer: write it, add a builder below, and name it in
`TrainConfig.optimizer`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Literal, Protocol

from torch import Tensor, distributed, nn
from torch.optim import SGD, AdamW, NAdam, Optimizer

from optim.mars import MARS
from optim.schedule import gamma_schedule
from optim.sharded import ShardedOptimizer

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
    def embedding_adamw(self) -> bool | None: ...
    @property
    def max_iters(self) -> int: ...
    @property
    def gamma(self) -> float | str: ...
    @property
    def estimator(self) -> Literal["recursive", "reference", "svrg", "none"]: ...
    @property
    def reference_interval(self) -> int: ...
    @property
    def exact(self) -> bool: ...
    @property
    def mars_clip(self) -> Literal["tensor", "global", "none"]: ...
    @property
    def mars_first_step(self) -> Literal["paper", "official"]: ...
    @property
    def mars_last_grad(self) -> Literal["full", "bfloat16", "folded"]: ...
    @property
    def shampoo_factors(self) -> Literal["averaged", "accumulated"]: ...
    @property
    def shampoo_interval(self) -> int: ...
    @property
    def compile_optimizer(self) -> bool | Literal["auto"]: ...
    @property
    def shard_optimizer(self) -> bool: ...


Groups = list[dict[str, Any]]

PLAIN_ADAMW = {"preconditioner": "adamw", "gamma": 0.0, "clip": "none", "last_grad": "full"}
QUASI_HYPERBOLIC = {"clip": "none", "first_step": "official", "last_grad": "folded"}


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> Optimizer:
    """The optimizer that `config.optimizer` names, over all parameters of the model, a tied one once; its state shared
    by the processes (ZeRO-1) where the config says so and there are several.

    Raises:
        ValueError: an unknown name, or settings that the optimizer does not have.
    """
    if config.optimizer not in BUILDERS:
        raise ValueError(f"optimizer={config.optimizer!r} must be one of {', '.join(BUILDERS)}")
    if config.exact and not config.optimizer.startswith("mars-"):
        raise ValueError(f"optimizer={config.optimizer!r} has no exact form; set --exact=false, or a MARS optimizer")
    if config.estimator != "recursive" and not config.optimizer.startswith("mars-"):
        raise ValueError(
            f"estimator={config.estimator!r} is for the MARS optimizers; optimizer={config.optimizer!r} has 'recursive'"
        )
    optimizer = BUILDERS[config.optimizer](_parameter_groups(model, config), config)
    if config.shard_optimizer and distributed.is_initialized() and distributed.get_world_size() > 1:
        if any(parameter.device.type == "mps" for parameter in model.parameters()):
            raise ValueError("shard_optimizer=True needs a CPU or CUDA; no backend of torch.distributed reaches mps")
        return ShardedOptimizer(optimizer)
    return optimizer


def _adamw(groups: Groups, config: OptimizerConfig) -> Optimizer:
    return AdamW(groups, lr=config.learning_rate, fused=_has_fused(groups))


def _nadamw(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """AdamW with Nesterov momentum. Dozat's momentum grows over the steps; so fast a growth makes it beta1 at once."""
    return NAdam(groups, lr=config.learning_rate, momentum_decay=1e4, decoupled_weight_decay=True)


def _sgd(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """SGD with momentum beta1; its decay is not decoupled."""
    return SGD(groups, lr=config.learning_rate, momentum=config.beta1, fused=_has_fused(groups))


def _mars(preconditioner: str, groups: Groups, config: OptimizerConfig) -> Optimizer:
    settings = {
        "preconditioner": preconditioner,
        "gamma": gamma_schedule(config.gamma, config.max_iters),
        "clip": config.mars_clip,
        "first_step": config.mars_first_step,
        "last_grad": config.mars_last_grad,
    }
    return _mars_family(groups, config, settings)


def _lion(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """Lion (Chen et al., arXiv 2302.06675), by its identity with MARS-Lion: beta2 averages, beta1 blends in the last
    gradient."""
    if config.beta1 > config.beta2:
        raise ValueError(f"beta1={config.beta1} must not be above beta2={config.beta2} in optimizer='lion'")
    gamma = 1 - config.beta1 / config.beta2 if config.beta2 > 0 else 0.0
    return _mars_family(
        groups, config, QUASI_HYPERBOLIC | {"preconditioner": "lion", "gamma": gamma}, (config.beta2, 0.0)
    )


def _muon(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """Muon with Nesterov momentum beta1 (Jordan et al. 2024), by its identity with MARS-Shampoo."""
    return _mars_family(groups, config, QUASI_HYPERBOLIC | {"preconditioner": "shampoo", "gamma": 1 - config.beta1})


def _shampoo(groups: Groups, config: OptimizerConfig) -> Optimizer:
    """Shampoo with momentum beta1 (Gupta et al., arXiv 1802.09568)."""
    settings = PLAIN_ADAMW | {
        "preconditioner": "kronecker",
        "factors": config.shampoo_factors,
        "refresh_interval": config.shampoo_interval,
    }
    return _mars_family(groups, config, settings)


def _mars_family(
    groups: Groups, config: OptimizerConfig, settings: dict[str, Any], betas: tuple[float, float] | None = None
) -> Optimizer:
    """Matrices by `settings` and `betas`, vectors by plain AdamW, and embeddings by either."""
    for group in groups:
        if group["name"] == "vectors" or (group["name"] == "embeddings" and _embeddings_on_adamw(config)):
            group.update(PLAIN_ADAMW)
        else:
            group.update(settings | ({} if betas is None else {"betas": betas}))
    compile = None if config.compile_optimizer == "auto" else config.compile_optimizer
    estimator: dict[str, Any] = {"estimator": config.estimator, "reference_interval": config.reference_interval}
    return MARS(groups, lr=config.learning_rate, eps=config.eps, exact=config.exact, compile=compile, **estimator)


BUILDERS: dict[str, Callable[[Groups, OptimizerConfig], Optimizer]] = {
    "adamw": _adamw,
    "mars-adamw": partial(_mars, "adamw"),
    "mars-lion": partial(_mars, "lion"),
    "mars-shampoo": partial(_mars, "shampoo"),
    "lion": _lion,
    "muon": _muon,
    "shampoo": _shampoo,
    "sgd": _sgd,
    "nadamw": _nadamw,
}


def _has_fused(groups: Groups) -> bool:
    return all(parameter.device.type in FUSED_DEVICES for group in groups for parameter in group["params"])


def _embeddings_on_adamw(config: OptimizerConfig) -> bool:
    """As set; otherwise as is usual: Muon and Shampoo are for hidden matrices."""
    return config.optimizer in ("muon", "shampoo") if config.embedding_adamw is None else config.embedding_adamw


def _parameter_groups(model: nn.Module, config: OptimizerConfig) -> Groups:
    """Hidden matrices, embeddings and vectors. `lr_scale` ties a group's learning rate to the schedule."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    kinds: dict[str, list[Tensor]] = {"matrices": [], "embeddings": [], "vectors": []}
    for parameter in model.parameters():
        kind = "embeddings" if id(parameter) in embeddings else "matrices" if parameter.dim() >= 2 else "vectors"
        kinds[kind].append(parameter)

    decay, betas = config.weight_decay, (config.beta1, config.beta2)
    decay_embedding = decay if config.weight_decay_embedding is None else config.weight_decay_embedding
    common: dict[str, Any] = {"eps": config.eps}
    like_matrices: dict[str, Any] = common | {"lr_scale": 1.0, "betas": betas}
    like_vectors: dict[str, Any] = common | {
        "lr_scale": 1.0 if config.lr_1d is None else config.lr_1d / config.learning_rate,
        "betas": config.betas_1d or betas,
    }
    like_embeddings = like_vectors if _embeddings_on_adamw(config) else like_matrices
    settings = {
        "matrices": like_matrices | {"weight_decay": decay},
        "embeddings": like_embeddings | {"weight_decay": decay_embedding},
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
    inside = _inside(optimizer)
    schedules = inside.gamma_schedules if isinstance(inside, MARS) else [None] * len(optimizer.param_groups)
    for group, schedule in zip(optimizer.param_groups, schedules, strict=True):
        count = sum(parameter.numel() for parameter in group["params"])
        tensors = len(group["params"])
        lines.append(
            f"{group.get('name', 'group'):<10} {tensors:>4} tensors {count:>13,} parameters  "
            f"lr {group['lr']:.3g}  betas {group['betas']}  weight decay {group['weight_decay']:g}"
            f"{_method(group, schedule)}"
        )
    return lines


def _method(group: dict[str, Any], schedule: Callable[[int], float] | None) -> str:
    """How MARS steps a group; nothing for torch's own optimizers."""
    if "preconditioner" not in group:
        return ""
    parts = [group["preconditioner"]]
    corrects = group["estimator"] != "none" and (group["gamma"] != 0 or schedule is not None)
    gamma = f"{group['gamma']:g}" if schedule is None else schedule
    parts.append(f"gamma {gamma}, clip {group['clip']}" if corrects else "no correction")
    parts += [group["estimator"]] if corrects and group["estimator"] != "recursive" else []
    parts += [f"every {group['reference_interval']}"] if corrects and group["estimator"] == "reference" else []
    parts += ["exact"] if corrects and group["exact"] else []
    parts += [f"last gradient {group['last_grad']}"] if corrects and group["last_grad"] != "full" else []
    return "  " + ", ".join(parts)


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
    """Hands an exact optimizer the gradient of the current parameters on the next batch, and one with svrg that of the
    snapshot on this batch (see `MARS`)."""
    _mars_of(optimizer).record_reference_gradient()


def take_snapshot(optimizer: Optimizer) -> None:
    """svrg: makes the current parameters the snapshot (see `MARS`)."""
    _mars_of(optimizer).take_snapshot()


def record_snapshot_gradient(optimizer: Optimizer) -> None:
    """svrg: hands over the gradient of the snapshot on one of its batches (see `MARS`)."""
    _mars_of(optimizer).record_snapshot_gradient()


def snapshot_weights(optimizer: Optimizer) -> AbstractContextManager[None]:
    """svrg: within it the parameters have the snapshot's values (see `MARS`)."""
    return _mars_of(optimizer).snapshot_weights()


def optimizer_metrics(optimizer: Optimizer) -> dict[str, Tensor]:
    """Figures that an optimizer reports of its last step, as scalar tensors; none for torch's own."""
    inside = _inside(optimizer)
    return inside.metrics() if isinstance(inside, MARS) else {}


def optimizer_bytes(optimizer: Optimizer) -> int:
    """Bytes that an optimizer holds in this process, after its second step or later."""
    inside = _inside(optimizer)
    values = [value for state in inside.state.values() for value in state.values()]
    held = sum(value.numel() * value.element_size() for value in values if isinstance(value, Tensor))
    return held + (inside.spare_bytes if isinstance(inside, MARS) else 0)


def _mars_of(optimizer: Optimizer) -> MARS | ShardedOptimizer:
    assert isinstance(optimizer, MARS | ShardedOptimizer), "build_optimizer refuses what others do not have"
    return optimizer


def _inside(optimizer: Optimizer) -> Optimizer:
    return optimizer.optimizer if isinstance(optimizer, ShardedOptimizer) else optimizer
