"""Optimizers: MARS (arXiv 2411.10438) and its baselines. Needs only torch and can be copied out and used alone."""

from optim.build import (
    build_optimizer,
    describe_groups,
    load_optimizer_state,
    optimizer_bytes,
    optimizer_metrics,
    record_reference_gradient,
    record_snapshot_gradient,
    snapshot_weights,
    take_snapshot,
)
from optim.conditional import step_if
from optim.estimates import watch_estimates
from optim.gradients import clip_gradients
from optim.mars import MARS
from optim.schedule import AdaptiveGamma, CosineGamma, LinearGamma, learning_rate_at, set_learning_rate
from optim.sharded import ShardedOptimizer

__all__ = [
    "MARS",
    "AdaptiveGamma",
    "CosineGamma",
    "LinearGamma",
    "ShardedOptimizer",
    "build_optimizer",
    "clip_gradients",
    "describe_groups",
    "learning_rate_at",
    "load_optimizer_state",
    "optimizer_bytes",
    "optimizer_metrics",
    "record_reference_gradient",
    "record_snapshot_gradient",
    "set_learning_rate",
    "snapshot_weights",
    "step_if",
    "take_snapshot",
    "watch_estimates",
]
