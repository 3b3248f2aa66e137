"""ZeRO stage 1 (Rajbhandari et al., arXiv 1910.02054): each process keeps the optimizer state of a part of the
parameters, steps those, and sends them to the others. Gradients and parameters are whole on every process, as
DistributedDataParallel leaves them.

Every process holds the same optimizer over all parameters; one that is not its own has no gradient while it steps, and
so gets no state. Groups, schedules and saved state are therefore those of the plain optimizer, and a checkpoint can be
resumed with another number of processes, or without sharding. Parameters are not cut: the largest one is the least that
a process can hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.optim import Optimizer

from optim.mars import MARS


class ShardedOptimizer(Optimizer):
    """An optimizer whose state and work are shared by the processes of a group.

    Args:
        optimizer: the same on every process, over all parameters.
        group: the processes; None: all.
    """

    def __init__(self, optimizer: Optimizer, group: distributed.ProcessGroup | None = None) -> None:
        self.optimizer, self.group = optimizer, group
        super().__setstate__({})  # hooks; not super().__init__, which would make groups where those inside serve
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self._load, self._owners = [0] * self.size, dict[Tensor, int]()
        if isinstance(optimizer, MARS):
            optimizer.sum_over_processes = self._sum

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Of the optimizer inside."""
        return self.optimizer.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The state of this process's parameters."""
        return self.optimizer.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        return self.optimizer.defaults

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group; to be called on every process."""
        self.optimizer.add_param_group(param_group)

    def owners(self) -> list[tuple[Tensor, int]]:
        """Every parameter and the process (its rank in the group) that steps it: the largest first, to the one with the
        least so far. An owner never changes."""
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for parameter in sorted(parameters, key=Tensor.numel, reverse=True):
            if parameter not in self._owners:
                owner = self._load.index(min(self._load))
                self._load[owner] += parameter.numel()
                self._owners[parameter] = owner
        return [(parameter, self._owners[parameter]) for parameter in parameters]

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Updates every parameter that has a gradient, on all processes."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with self._own_gradients() as owners:
            self.optimizer.step()
        self._send([(parameter, owner) for parameter, owner in owners if parameter.grad is not None])
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parameters."""
        self.optimizer.zero_grad(set_to_none)

    def record_reference_gradient(self) -> None:
        """See `MARS`; of this process's parameters."""
        assert isinstance(self.optimizer, MARS)
        with self._own_gradients():
            self.optimizer.record_reference_gradient()

    def take_snapshot(self) -> None:
        """See `MARS`; of this process's parameters."""
        assert isinstance(self.optimizer, MARS)
        self.optimizer.take_snapshot()

    def record_snapshot_gradient(self) -> None:
        """See `MARS`; of this process's parameters."""
        assert isinstance(self.optimizer, MARS)
        with self._own_gradients():
            self.optimizer.record_snapshot_gradient()

    @contextmanager
    def snapshot_weights(self) -> Iterator[None]:
        """See `MARS`; on all processes, which send each other their parts of the snapshot, and then of the weights."""
        assert isinstance(self.optimizer, MARS)
        with self.optimizer.snapshot_weights():
            self._send(self.owners())
            yield
        self._send(self.owners())

    def state_dict(self) -> dict[str, Any]:
        """The state of all parameters, as the plain optimizer would give it, on the group's first process (what comes
        from others in host memory); elsewhere that of own parameters. To be called on every process."""
        saved = self.optimizer.state_dict()
        owners = [owner for _, owner in self.owners()]
        for source in range(1, self.size):
            mine = {number: saved["state"][number] for number in saved["state"] if owners[number] == source}
            received = self._to_first(source, mine if self.rank == source else {})
            saved["state"] |= received
        return saved

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores this process's part of what any optimizer of the kind has saved, sharded or not."""
        owned = {number for number, (_, owner) in enumerate(self.owners()) if owner == self.rank}
        state = {number: value for number, value in state_dict["state"].items() if number in owned}
        self.optimizer.load_state_dict(state_dict | {"state": state})

    @contextmanager
    def _own_gradients(self) -> Iterator[list[tuple[Tensor, int]]]:
        """Hides the gradients of other processes' parameters."""
        owners = self.owners()
        hidden = [(parameter, parameter.grad) for parameter, owner in owners if owner != self.rank]
        for parameter, _ in hidden:
            parameter.grad = None
        try:
            yield owners
        finally:
            for parameter, grad in hidden:
                parameter.grad = grad

    def _send(self, owners: list[tuple[Tensor, int]]) -> None:
        """Parameters, from their owners to the other processes."""
        works = [
            distributed.broadcast(parameter.data, self._global(owner), group=self.group, async_op=True)
            for parameter, owner in owners
        ]
        for work in works:
            work.wait()

    def _to_first(self, source: int, state: dict[int, dict[str, Any]]) -> dict[int, dict[str, Any]]:
        """Sends a process's state to the first one, tensor by tensor. Returns what was received, empty elsewhere."""
        device = next(parameter.device for group in self.param_groups for parameter in group["params"])
        shapes = {n: {k: (v.shape, v.dtype) for k, v in entry.items()} for n, entry in state.items()}
        message: list[Any] = [shapes]
        distributed.broadcast_object_list(message, self._global(source), group=self.group, device=device)
        received: dict[int, dict[str, Any]] = {}
        for number, entry in message[0].items():
            for name, (shape, dtype) in entry.items():
                if self.rank == source:
                    value = state[number][name].to(device).contiguous()
                    distributed.send(_bytes(value), self._global(0), group=self.group)
                elif self.rank == 0:
                    value = torch.empty(shape, dtype=dtype, device=device)
                    distributed.recv(_bytes(value), self._global(source), group=self.group)
                    received.setdefault(number, {})[name] = value.cpu()
        return received

    def _global(self, rank: int) -> int:
        return rank if self.group is None else distributed.get_global_rank(self.group, rank)

    def _sum(self, values: Tensor) -> None:
        distributed.all_reduce(values, group=self.group)


def _bytes(tensor: Tensor) -> Tensor:
    """A contiguous tensor's memory: what any backend can send."""
    return tensor.view(-1).view(torch.uint8)
