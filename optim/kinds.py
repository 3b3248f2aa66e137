"""The kinds of parameters, each a parameter group with its own learning rate, betas, decay and, in the family of MARS,
preconditioner: hidden matrices, convolutions, embeddings and vectors.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from torch import Tensor, nn

from optim.preconditioner import PRECONDITIONERS

Groups = list[dict[str, Any]]


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
    def lr_embedding(self) -> float | None: ...
    @property
    def betas_embedding(self) -> tuple[float, float] | None: ...
    @property
    def embedding_adamw(self) -> bool | None: ...
    @property
    def preconditioner_matrices(self) -> str | None: ...
    @property
    def preconditioner_convolutions(self) -> str | None: ...
    @property
    def preconditioner_embeddings(self) -> str | None: ...
    @property
    def preconditioner_vectors(self) -> str | None: ...
    @property
    def mars_kinds(self) -> tuple[str, ...] | None: ...
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


KINDS = ("matrices", "convolutions", "embeddings", "vectors")
METHOD_KEYS = ("mars_kinds", *(f"preconditioner_{kind}" for kind in KINDS))
"""keys of a config that say how MARS steps a kind"""
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
PLAIN = {"gamma": 0.0, "clip": "none", "last_grad": "full"}


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> Groups:
    """A group for each kind of parameter that the model has. `lr_scale` ties its learning rate to the schedule."""
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, EMBEDDINGS)}
    kinds: dict[str, list[Tensor]] = {kind: [] for kind in KINDS}
    for parameter in model.parameters():
        kinds["embeddings" if id(parameter) in embeddings else _kind_of(parameter)].append(parameter)

    matrices = _settings(config, None, None, config.weight_decay)
    vectors = _settings(config, config.lr_1d, config.betas_1d, config.weight_decay_1d)
    settings = {"matrices": matrices, "convolutions": matrices, "vectors": vectors}
    settings["embeddings"] = (vectors if embeddings_on_adamw(config) else matrices) | _of_embeddings(config)
    return [
        {"name": name, "params": parameters, "lr": config.learning_rate * settings[name]["lr_scale"], **settings[name]}
        for name, parameters in kinds.items()
        if parameters
    ]


def _kind_of(parameter: Tensor) -> str:
    return "vectors" if parameter.dim() < 2 else "matrices" if parameter.dim() == 2 else "convolutions"


def _settings(
    config: OptimizerConfig, lr: float | None, betas: tuple[float, float] | None, decay: float
) -> dict[str, Any]:
    return {
        "eps": config.eps,
        "lr_scale": 1.0 if lr is None else lr / config.learning_rate,
        "betas": betas or (config.beta1, config.beta2),
        "weight_decay": decay,
    }


def _of_embeddings(config: OptimizerConfig) -> dict[str, Any]:
    """What is set for embeddings alone."""
    decay = config.weight_decay_embedding
    own: dict[str, Any] = {"weight_decay": config.weight_decay if decay is None else decay}
    if config.lr_embedding is not None:
        own["lr_scale"] = config.lr_embedding / config.learning_rate
    if config.betas_embedding is not None:
        own["betas"] = config.betas_embedding
    return own


def embeddings_on_adamw(config: OptimizerConfig) -> bool:
    """As set; otherwise as is usual: Muon and Shampoo are for hidden matrices."""
    return config.optimizer in ("muon", "shampoo") if config.embedding_adamw is None else config.embedding_adamw


def set_methods(groups: Groups, config: OptimizerConfig, settings: dict[str, Any]) -> None:
    """Says in each group how MARS steps it.

    By itself an optimizer steps matrices, convolutions and, unless they are on AdamW, embeddings by `settings`, and the
    others by plain AdamW. A config may name the preconditioner of a kind, and the kinds that are corrected.

    Args:
        settings: of MARS; its preconditioner is that of kinds for which the config names none.
    """
    for group in groups:
        kind = group["name"]
        on_adamw = kind == "vectors" or (kind == "embeddings" and embeddings_on_adamw(config))
        named: str | None = getattr(config, f"preconditioner_{kind}")
        preconditioner = named or ("adamw" if on_adamw else settings["preconditioner"])
        corrects = not on_adamw if config.mars_kinds is None else kind in config.mars_kinds
        group.update((settings if corrects else PLAIN) | {"preconditioner": preconditioner})
        if preconditioner == "kronecker":
            group.update({"factors": config.shampoo_factors, "refresh_interval": config.shampoo_interval})


def check_methods(config: OptimizerConfig, mars: tuple[str, ...]) -> None:
    """Checks what a config says of the kinds of parameters.

    Args:
        mars: the optimizers that can be told.

    Raises:
        ValueError: a preconditioner that is unknown or not for the kind; another optimizer; two keys that exclude each
            other.
    """
    told = {key: value for key in METHOD_KEYS if (value := getattr(config, key)) is not None}
    for key, value in told.items():
        if config.optimizer not in mars:
            raise ValueError(
                f"{key}={value!r} is for {', '.join(mars)}; optimizer={config.optimizer!r} does not have it"
            )
        allowed = KINDS if key == "mars_kinds" else _preconditioners_for(key.removeprefix("preconditioner_"))
        if not set(value if key == "mars_kinds" else (value,)) <= set(allowed):
            raise ValueError(f"{key}={value!r} must be among {', '.join(allowed)}")
    corrects = "embeddings" in (config.mars_kinds or ())
    if config.embedding_adamw and (corrects or config.preconditioner_embeddings is not None):
        key = "mars_kinds" if corrects else "preconditioner_embeddings"
        raise ValueError(f"{key}={told[key]!r} needs embedding_adamw=None; True says plain AdamW for embeddings")


def _preconditioners_for(kind: str) -> list[str]:
    dimensions = 0 if kind == "vectors" else 2
    return [name for name, preconditioner in PRECONDITIONERS.items() if preconditioner.min_dim <= dimensions]
