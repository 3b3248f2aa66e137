"""MARS: Make vAriance Reduction Shine (Yuan et al., arXiv 2411.10438).

One optimizer, estimator x preconditioner: `estimators/` say how the gradient is corrected, `estimator.py` does it and
averages, `preconditioner.py` turns the average into a direction, `clipping.py` finds the clip factors, and the class
here keeps state and settings. Every setting can be given for a parameter group, so that the published recipe's AdamW
for vectors is a group with gamma 0 and clip "none".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, overload

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from optim.batch import Batch
from optim.clipping import Clipping, norm_of
from optim.estimator import compute_dtype
from optim.estimators import SVRG, Estimator, SecondGradient, new_estimators
from optim.gammas import Gammas
from optim.preconditioner import PRECONDITIONERS
from optim.runner import Runner
from optim.schedule import GammaSchedule
from optim.settings import check_settings, check_whole


class MARS(Optimizer):
    """MARS: a preconditioned method on a gradient estimate of less variance (Algorithms 1 to 4).

    For each parameter x with gradient g_t and reference gradient r_t:

        c_t = g_t + gamma * beta1 / (1 - beta1) * (g_t - r_t) (or that of another estimator), clipped to norm 1
        m_t = beta1 * m_{t-1} + (1 - beta1) * c_t
        x  <- x - lr * (direction(m_t, c_t) + weight_decay * x)

    The reference is the last gradient (approximate form), or the gradient of the last parameters on this step's batch
    (exact form), for which `record_reference_gradient` is called once a step.

    Parameters of 16 bits are stepped in float32 arithmetic with float32 moments. A step with a gradient that is not
    finite, or whose norm overflows, changes no parameter and no moment (`metrics` says so); it counts as a step.

    Args:
        params: parameters or parameter groups; every other argument but `exact` and `compile` can be set for a group,
            and `estimator` where no group's is "svrg".
        lr: learning rate.
        betas: decay of m and, where the preconditioner has one, of the second moment of c.
        eps: added to the root of the second moment.
        weight_decay: decoupled weight decay, times lr.
        gamma: scale of the correction; 0 is the preconditioner's plain method and keeps no reference. A function of the
            optimizer's step (from 1) makes a schedule, and `AdaptiveGamma` one that follows the gradients' norm.
        preconditioner: "adamw"; "lion", the sign of m; "sgd", m itself; "shampoo", the orthogonal factor of m, and
            "kronecker", Shampoo's two-sided statistics, both for tensors of two dimensions or more.
        estimator: "recursive", as above; "reference", towards the mean of earlier gradients; "svrg", with gradients at
            a snapshot of the weights; "none", the plain gradient (`estimators/` has equations and costs).
        exact: use the exact form of "recursive".
        clip: "tensor" clips each tensor's c_t to norm 1 (the published code), "global" all tensors of such groups as
            one vector (the paper), "none" does not clip.
        first_step: what the first step takes as its reference: "paper" the gradient itself, so that the correction is
            zero; "official" zero, as the published code does.
        last_grad: how the approximate form keeps the last gradient: "full"; "bfloat16", in half the memory; "folded"
            into the moment, in none, which needs clip "none", a gamma that does not change, and a preconditioner that
            looks at m alone (lion, sgd, shampoo).
        orthogonal: how "shampoo" finds the orthogonal factor: "newton-schulz" (five iterations) or "svd" (exact, slow).
        factors: the statistics of "kronecker": "averaged" with the second beta, or "accumulated" over all steps.
        reference_interval: of "reference": every so many steps the mean of their gradients becomes the reference.
        refresh_interval: steps between new roots of these, which are also found at steps 1, 2, 4, 8 and so on before.
        damping: added to their eigenvalues, relative to the largest.
        compile: whether to compile the step; None: where it pays and a compiler is found.

    Raises:
        ValueError: a setting out of range or unknown, for the optimizer or a group.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float,
        betas: tuple[float, float] = (0.95, 0.99),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        gamma: float | GammaSchedule = 0.025,
        preconditioner: str = "adamw",
        estimator: str = "recursive",
        exact: bool = False,
        clip: str = "tensor",
        first_step: str = "paper",
        last_grad: str = "full",
        orthogonal: str = "newton-schulz",
        factors: str = "averaged",
        reference_interval: int = 10,
        refresh_interval: int = 10,
        damping: float = 1e-6,
        compile: bool | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "gamma": gamma,
            "preconditioner": preconditioner,
            "estimator": estimator,
            "exact": exact,
            "clip": clip,
            "first_step": first_step,
            "last_grad": last_grad,
            "orthogonal": orthogonal,
            "factors": factors,
            "reference_interval": reference_interval,
            "refresh_interval": refresh_interval,
            "damping": damping,
        }
        self._gammas = Gammas()
        self._runner = Runner(compile)
        self.step_allowed: Tensor | None = None
        """whether a step may change anything, a 0-d bool on the device of the parameters; None: it may"""
        self.watcher: Callable[[Tensor, Tensor], None] | None = None
        """is shown every parameter's c_t before the clip, except in the folded form, where it is not known"""
        self._clipping = Clipping()
        self._estimators = new_estimators(exact)
        super().__init__(params, defaults)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of parameters.

        Raises:
            ValueError: a setting out of range or unknown.
        """
        settings = self.defaults | param_group
        schedule, settings["gamma"] = Gammas.schedule_of(settings["gamma"])
        check_settings(settings, schedule is not None)
        check_whole(settings, self.defaults)
        super().add_param_group(param_group | {"gamma": settings["gamma"]})
        self._gammas.add(self.param_groups[-1], schedule)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Updates every parameter that has a gradient.

        Args:
            closure: computes the loss and its gradients anew; its result is returned.

        Raises:
            RuntimeError: a gradient that is sparse or complex; a tensor with fewer dimensions than its preconditioner
                needs; in the exact form and with svrg, no reference gradient. Nothing is changed then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()

        self._follow_gamma_schedules()
        work = list(self._with_gradient())
        self._check_state(work)
        batches = self._batches(work)
        every = [parameter for group in self.param_groups for parameter in group["params"]]
        self._runner.decide(every)
        with self._gammas.adapted(
            self.param_groups,
            lambda: self._clipping.norm_of_all(batches, every, self._device),
            lambda: self._clipping.skipped,
        ):
            for batch in batches:
                batch.estimator.before_step(batch, self._runner, self._clipping)
            if self.watcher is not None and not any(batch.folded for batch in batches):
                for batch in batches:
                    for parameter, corrected in batch.corrected():
                        self.watcher(parameter, corrected)
            self._clipping.set_factors(batches, self._runner, self._device, self.step_allowed)
        for batch in batches:
            if batch.guarded or not self._clipping.skipped:
                PRECONDITIONERS[batch.group["preconditioner"]].step(batch, self._runner)
            batch.estimator.after_step(batch, self._runner, self._clipping)
        # So that a backward pass through old values is an error also where a kernel saw parameters as `.data`.
        torch.autograd.graph.increment_version([parameter for parameter, _, _ in work])
        if self._second is not None:
            self._second.finish(self._states())
        return loss

    @torch.no_grad()
    def record_reference_gradient(self) -> None:
        """Exact form: takes the present gradients, which must be those of the current parameters on the *next* batch,
        for the correction of the step after the coming one.

        An update is: gradient on the next batch, `record_reference_gradient()`, `zero_grad()`, gradient on this batch,
        `step()`.

        svrg: takes the present gradients, which must be those at the snapshot (within `snapshot_weights()`) on this
        step's batch.

        Where any of them is not finite (a float16 pass that overflowed) they are of no use, and the step that they
        were for makes no correction.

        Raises:
            RuntimeError: the optimizer is not exact and not svrg, or a gradient is sparse.
        """
        if self._second is None:
            raise RuntimeError("record_reference_gradient() is for MARS(..., exact=True) and estimator='svrg'")
        work = [item for item in self._with_gradient() if self._corrects(item[2])]
        self._second.start_record(self._states())
        norms, references = [], []
        for parameter, grad, index in work:
            norms.append(norm_of(grad))  # leaves the gradient in a CPU's caches for the copy
            state = self._state_of(parameter, self.param_groups[index])
            references.append(self._second.record(parameter, state, grad))
        finite = self._clipping.all_finite(norms, self._device)
        for reference, norm in zip(references, norms, strict=True):
            if reference.device.type != "cpu" or not finite:  # elsewhere, to read `finite` would be to wait for it
                reference.masked_fill_(~finite.to(reference.device), math.nan)
            self._clipping.remember(reference, norm)

    @torch.no_grad()
    def take_snapshot(self) -> None:
        """svrg: the present parameters become the snapshot, whose mean gradient is to be recorded before they change.
        Without a snapshot, and without a gradient of it that is finite, gradients are not corrected.

        With a snapshot of n batches every k updates:

            for number, batch in enumerate(batches):
                if number % k == 0:
                    optimizer.take_snapshot()
                    for other in n_other_batches():
                        loss(other).backward()
                        optimizer.record_snapshot_gradient()
                        optimizer.zero_grad()
                with optimizer.snapshot_weights():
                    loss(batch).backward()
                optimizer.record_reference_gradient()
                optimizer.zero_grad()
                loss(batch).backward()
                optimizer.step()
                optimizer.zero_grad()

        Raises:
            RuntimeError: the optimizer is not svrg.
        """
        self._svrg.take(self._states())

    @torch.no_grad()
    def record_snapshot_gradient(self) -> None:
        """svrg: takes the present gradients, which must be those of the snapshot on one of its batches, into its mean
        gradient; none of them where one is not finite.

        Raises:
            RuntimeError: the optimizer is not svrg, or a gradient is sparse.
        """
        svrg, work = self._svrg, list(self._with_gradient())
        finite = self._clipping.all_finite([norm_of(grad) for _, grad, _ in work], self._device)
        for parameter, grad, index in work:
            state = self._state_of(parameter, self.param_groups[index])
            svrg.add(parameter, state, grad, self._corrects(index), finite.to(grad.device))

    @contextmanager
    def snapshot_weights(self) -> Iterator[None]:
        """svrg: within it the parameters have the snapshot's values, in other memory.

        Raises:
            RuntimeError: the optimizer is not svrg.
        """
        svrg, states = self._svrg, self._states()
        svrg.swap(states)
        try:
            yield
        finally:
            svrg.swap(states)

    @property
    def sum_over_processes(self) -> Callable[[Tensor], None] | None:
        """Sums a tensor in place over the processes, where each steps a part of the parameters (`sharded.py`), so that
        all clip and skip alike. Then `step` and `record_reference_gradient` have to be called on all of them."""
        return self._clipping.sum_over_processes

    @sum_over_processes.setter
    def sum_over_processes(self, function: Callable[[Tensor], None]) -> None:
        self._clipping.sum_over_processes = function

    @property
    def gamma_schedules(self) -> list[GammaSchedule | None]:
        """Of each group: the schedule that its gamma follows, where it does."""
        return self._gammas.schedules

    @property
    def spare_bytes(self) -> int:
        """Bytes that are held beside the state: in the exact form and with svrg, room for the next reference."""
        return 0 if self._second is None else self._second.spare_bytes

    def metrics(self) -> dict[str, Tensor]:
        """Figures of the last step, as scalar tensors on the device; none before the first.

        `mars/skipped`: 1 where the step changed nothing, since a gradient was not finite. `mars/clip_rate`: the share
        of vectors (tensors, or the one vector of clip "global") that were longer than 1; absent where nothing is
        clipped. `mars/gamma`: where it follows a schedule, in the first such group.
        """
        figures = {}
        if self._clipping.skipped is not None:
            figures["mars/skipped"] = self._clipping.skipped.float()
        if self._clipping.clip_rate is not None and any(group["clip"] != "none" for group in self.param_groups):
            figures["mars/clip_rate"] = self._clipping.clip_rate
        if (gamma := self._gammas.scheduled(self.param_groups)) is not None:
            figures["mars/gamma"] = gamma
        return figures

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restores what `state_dict` gave, bit for bit: torch's own method would cast moments to the dtype of their
        parameters. A gamma schedule is a function, is not saved, and stays what it is; the running norm of an
        `AdaptiveGamma` is restored.

        Raises:
            ValueError: the groups hold other numbers of parameters; the state is of another form, or not of MARS.
        """
        for group in state_dict["param_groups"]:
            if group.get("exact") != self.defaults["exact"]:
                raise ValueError(
                    f"the state has exact={group.get('exact')} (None: it is not of MARS), "
                    f"the optimizer exact={self.defaults['exact']}"
                )
        svrg = any(group.get("estimator") == "svrg" for group in state_dict["param_groups"])
        if svrg != isinstance(self._second, SVRG):
            raise ValueError(f"the state is {'' if svrg else 'not '}of svrg, the optimizer is{' not' if svrg else ''}")
        super().load_state_dict(state_dict)
        numbers = [number for group in state_dict["param_groups"] for number in group["params"]]
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        for number, parameter in zip(numbers, parameters, strict=True):
            for name, value in state_dict["state"].get(number, {}).items():
                device = "cpu" if name == "step" else parameter.device
                self.state[parameter][name] = value.detach().to(device, copy=True)
        self._gammas.restore(self.param_groups)
        if self._second is not None:
            self._second.forget()

    def __getstate__(self) -> dict[str, Any]:
        own = {name: self.__dict__[name] for name in ("_gammas", "_runner")}
        return super().__getstate__() | own

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.setdefault("step_allowed", None)
        self.__dict__.setdefault("watcher", None)
        self.__dict__.setdefault("_clipping", Clipping())
        self.defaults.setdefault("estimator", "recursive")
        self.__dict__.setdefault("_estimators", new_estimators(self.defaults["exact"]))
        for group in self.param_groups:  # those of an older version had no choice
            group.setdefault("estimator", "recursive")
            group.setdefault("reference_interval", 10)

    @property
    def _second(self) -> SecondGradient | None:
        """The estimator that is handed a second gradient for each step."""
        name = "recursive" if self.defaults["exact"] else self.defaults["estimator"]
        estimator = self._estimators[name]
        return estimator if isinstance(estimator, SecondGradient) else None

    @property
    def _svrg(self) -> SVRG:
        if not isinstance(self._second, SVRG):
            raise RuntimeError("snapshots are for MARS(..., estimator='svrg')")
        return self._second

    def _states(self) -> list[tuple[Tensor, dict[str, Any], bool]]:
        """Every parameter that has a state, with it and whether its gradient is corrected, now or at times."""
        return [
            (parameter, state, self._corrects(index))
            for index, group in enumerate(self.param_groups)
            for parameter in group["params"]
            if (state := self.state.get(parameter))
        ]

    @property
    def _device(self) -> torch.device:
        """Where to gather what concerns all parameters."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        return next(parameters, torch.empty(0)).device

    def _with_gradient(self) -> Iterator[tuple[Tensor, Tensor, int]]:
        """Every parameter that has a gradient, with it and the index of its group."""
        for index, group in enumerate(self.param_groups):
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise RuntimeError("MARS does not support sparse gradients; use nn.Embedding(..., sparse=False)")
                if parameter.is_complex():
                    raise RuntimeError("MARS does not support complex parameters; use torch.view_as_real")
                if parameter.dim() < PRECONDITIONERS[group["preconditioner"]].min_dim:
                    raise RuntimeError(
                        f"preconditioner {group['preconditioner']!r} cannot step a tensor of shape "
                        f"{tuple(parameter.shape)}; put vectors in a group with preconditioner='adamw'"
                    )
                yield parameter, parameter.grad, index

    def _follow_gamma_schedules(self) -> None:
        if any(self._gammas.schedules):
            step = int(max((state["step"].item() for state in self.state.values() if state), default=0)) + 1
            for group in self._gammas.follow(self.param_groups, step):
                check_settings(group, scheduled=True)

    def _corrects(self, index: int) -> bool:
        """Whether a group's gradients are corrected, now or at times."""
        group, schedule = self.param_groups[index], self._gammas.schedules[index]
        return group["estimator"] != "none" and (schedule is not None or group["gamma"] != 0)

    def _estimator_of(self, index: int) -> Estimator:
        return self._estimators[self.param_groups[index]["estimator"] if self._corrects(index) else "none"]

    def _check_state(self, work: list[tuple[Tensor, Tensor, int]]) -> None:
        """Raises what a step raises, before anything is changed."""
        states = [(state, i) for p, _, i in work if (state := self.state.get(p)) and state["step"] > 0]
        for state, index in states:
            group = self.param_groups[index]
            names = {_moment_name(group), *PRECONDITIONERS[group["preconditioner"]].state_names}
            if not names <= set(state):
                raise RuntimeError(
                    f"a parameter's state lacks {', '.join(names - set(state))}: it was stepped with other settings "
                    f"than its group has now, preconditioner={group['preconditioner']!r} and "
                    f"last_grad={group['last_grad']!r}"
                )
        if self._second is not None:
            self._second.check([state for state, index in states if self._corrects(index)])

    def _batches(self, work: list[tuple[Tensor, Tensor, int]]) -> list[Batch]:
        """The parameters in batches, their state made ready and their steps counted."""
        batches: dict[tuple[Any, ...], Batch] = {}
        for parameter, grad, index in work:
            group = self.param_groups[index]
            state = self._state_of(parameter, group)
            state["step"] += 1
            step = int(state["step"].item())
            if parameter.numel() == 0:
                continue
            estimator = self._estimator_of(index)
            estimator.make_ready(parameter, state, group)
            batch = batches.setdefault((index, step, parameter.dtype, parameter.device), Batch(group, estimator, step))
            batch.parameters.append(parameter)
            batch.grads.append(grad)
            batch.states.append(state)
        return list(batches.values())

    def _state_of(self, parameter: Tensor, group: dict[str, Any]) -> dict[str, Any]:
        """A parameter's state, made when it is first needed."""
        state = self.state[parameter]
        if "step" not in state:
            state["step"] = torch.tensor(0.0)  # on the CPU: reading it must not wait for a device
            dtype = compute_dtype(parameter.dtype)
            moment = torch.zeros_like(parameter, dtype=dtype, memory_format=torch.preserve_format)
            state |= PRECONDITIONERS[group["preconditioner"]].new_state(moment)
            if group["last_grad"] == "folded" and group["first_step"] == "paper":
                moment.fill_(math.nan)  # unknown
            state[_moment_name(group)] = moment
        return state


def _moment_name(group: dict[str, Any]) -> str:
    return "folded" if group["last_grad"] == "folded" else "exp_avg"
