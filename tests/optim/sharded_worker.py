"""Run by torchrun: for every optimizer, sharded steps against plain ones, in one process group."""

import copy
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import torch
from torch import distributed

from configs import TrainConfig
from model import GPT, GPTConfig
from optim import (
    MARS,
    LinearGamma,
    ShardedOptimizer,
    build_optimizer,
    clip_gradients,
    load_optimizer_state,
    optimizer_bytes,
    record_reference_gradient,
    record_snapshot_gradient,
    snapshot_weights,
    take_snapshot,
)
from optim.build import BUILDERS
from training.processes import leave

BASE = TrainConfig(
    learning_rate=1e-2, beta1=0.9, beta2=0.95, lr_1d=3e-3, grad_clip=0, shampoo_interval=2, embedding_adamw=True
)
CASES = {name: {"optimizer": name} for name in BUILDERS} | {
    "global": {"optimizer": "mars-adamw", "mars_clip": "global"},
    "exact": {"optimizer": "mars-adamw", "exact": True, "mars_clip": "global"},
    "reference": {"optimizer": "mars-adamw", "estimator": "reference", "reference_interval": 2},
    "svrg": {"optimizer": "mars-adamw", "estimator": "svrg", "gamma": 0.5, "mars_clip": "global"},
    "linear": {"optimizer": "mars-lion", "gamma": "linear:0.1:0", "max_iters": 5},
}


def gradients(model: GPT, step: int, scale: float) -> None:
    """The same on every process; of a quadratic, so that they depend on the weights."""
    generator = torch.Generator().manual_seed(step)
    for parameter in model.parameters():
        parameter.grad = torch.randn(parameter.shape, generator=generator) * scale + 0.01 * parameter.detach()


def update(model: GPT, optimizer: torch.optim.Optimizer, step: int, config: TrainConfig) -> None:
    if config.estimator == "svrg":
        if step % 2 == 0:
            take_snapshot(optimizer)
            for batch in (200, 300):
                gradients(model, batch + step, 0.05)
                record_snapshot_gradient(optimizer)
        with snapshot_weights(optimizer):
            gradients(model, step, 0.05)
        record_reference_gradient(optimizer)
    if config.exact:
        gradients(model, 100 + step, 0.05)
        if step % 2:
            clip_gradients(model.parameters(), 0.5)
        record_reference_gradient(optimizer)
    gradients(model, step, 0.05)
    if step % 2:
        clip_gradients(model.parameters(), 0.5)  # leaves norms, of all gradients on every process
    optimizer.step()


def main() -> None:
    distributed.init_process_group("gloo")
    rank = distributed.get_rank()
    torch.manual_seed(0)
    start = GPT(GPTConfig(n_layer=2, n_head=2, n_embd=16, block_size=8, vocab_size=40))
    for name, settings in CASES.items():
        config = replace(BASE, **settings)
        plain, sharded = copy.deepcopy(start), copy.deepcopy(start)
        plain_optimizer = build_optimizer(plain, config)
        optimizer = build_optimizer(sharded, replace(config, shard_optimizer=True))
        for step in range(3):
            update(plain, plain_optimizer, step, config)
            update(sharded, optimizer, step, config)
        share = optimizer_bytes(optimizer) / optimizer_bytes(plain_optimizer)
        ideal = 1 / distributed.get_world_size()
        assert abs(share - ideal) < 0.15, (name, share)

        # What it saves is what the plain one saves, and goes on in a new one, sharded or not.
        saved = optimizer.state_dict()
        holder = [saved if rank == 0 else None]
        distributed.broadcast_object_list(holder)
        saved, whole = holder[0], plain_optimizer.state_dict()
        assert saved["param_groups"] == whole["param_groups"], name
        assert saved["state"].keys() == whole["state"].keys(), name
        for number, entry in whole["state"].items():
            assert saved["state"][number].keys() == entry.keys(), name
            for key, value in entry.items():
                torch.testing.assert_close(saved["state"][number][key], value, rtol=1e-6, atol=1e-7)
        resumed = build_optimizer(sharded, replace(config, shard_optimizer=True))
        load_optimizer_state(resumed, copy.deepcopy(saved))
        alone = copy.deepcopy(sharded)
        alone_optimizer = build_optimizer(alone, config)
        load_optimizer_state(alone_optimizer, copy.deepcopy(saved))
        for step in range(3, 5):
            update(plain, plain_optimizer, step, config)
            update(sharded, resumed, step, config)
            update(alone, alone_optimizer, step, config)
        for a, b, c in zip(plain.parameters(), sharded.parameters(), alone.parameters(), strict=True):
            torch.testing.assert_close(b, a, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
            torch.testing.assert_close(c, a, rtol=1e-6, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}")
        if rank == 0:
            print(f"{name}: {share:.2f}", flush=True)

    # A gradient that is not finite on one process's part alone makes all of them skip.
    config = replace(BASE, optimizer="mars-adamw", shard_optimizer=True)
    optimizer = build_optimizer(start, config)
    before = [parameter.detach().clone() for parameter in start.parameters()]
    gradients(start, 0, 0.05)
    start.transformer.wpe.weight.grad[0, 0] = float("nan")
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, start.parameters(), strict=True))

    # One parameter: all other processes own nothing, and follow the schedule, the clip and the skip all the same.
    weight = torch.nn.Parameter(torch.ones(6, 4))
    twin = torch.nn.Parameter(torch.ones(6, 4))
    settings = {"lr": 1e-2, "gamma": LinearGamma(0.4, 0.0, 4), "clip": "global"}
    optimizer, plain = ShardedOptimizer(MARS([weight], **settings)), MARS([twin], **settings)
    optimizer.register_step_post_hook(lambda *_: None)
    for step in range(4):
        weight.grad = torch.randn(6, 4, generator=torch.Generator().manual_seed(step))
        twin.grad = weight.grad.clone()
        optimizer.step()
        plain.step()
    torch.testing.assert_close(weight, twin)
    if rank == 0:
        assert optimizer.optimizer.metrics()["mars/gamma"] == 0
    print("done", flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main()
    leave(0)
