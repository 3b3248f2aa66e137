"""MARS against a reference written from the paper, and what must hold whatever the settings, on cases that hypothesis
draws: shapes, settings, groups, and gradients that are large, zero or missing."""

import io
import itertools
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, reject, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from optim import MARS
from tests.optim.reference import ReferenceMARS, Settings

PUBLISHED = ("adamw", "lion", "shampoo")
CLIPS = ("tensor", "global", "none")
EMPTY_SHAPES = ((0,), (3, 0), (0, 4), (2, 0, 3))
ALL_GRADIENTS, ANY_GRADIENTS, NONE_MISSING = "g", "gg0-", "gg0"  # letters of Case.gradient_kinds, with their weights
LION_MARGIN = {torch.float64: 1e-6, torch.float32: 1e-3}
SHAMPOO_MARGIN = {torch.float64: 1e-4, torch.float32: 1e-2}
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
SHAMPOO_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}


def examples(number: int) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The same examples on every run, so that a change of the code is what a new failure is due to."""
    return settings(
        max_examples=number,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


# --- cases ---


@dataclass(frozen=True)
class Group:
    settings: dict[str, Any]
    members: tuple[int, ...]
    joins: int = 0
    """before which step it is added"""


@dataclass(frozen=True)
class Case:
    """Inputs of an optimizer. Only a description, from which the tensors follow, so that a failure prints readably."""

    groups: tuple[Group, ...]
    shapes: tuple[tuple[int, ...], ...]
    gradient_kinds: tuple[str, ...]
    """a string a step with a letter a parameter: g a random gradient, 0 zeros, - none"""
    reference_kinds: tuple[str, ...]
    """exact form: the same for the gradient of the last parameters on the step's batch"""
    lengths: tuple[float, ...]
    """the norm of each gradient of a step"""
    seed: int
    exact: bool
    changes: tuple[dict[str, Any], ...] = ()
    """before each step, settings for all groups that are there, as schedulers change them"""
    transposed_parameters: bool = False
    transposed_gradients: bool = False

    @property
    def steps(self) -> range:
        return range(len(self.gradient_kinds))

    def start(self, index: int) -> Tensor:
        return self._layout(self._random(0, index), self.transposed_parameters)

    def gradient(self, step: int, index: int) -> Tensor | None:
        return self._gradient(self.gradient_kinds[step][index], step, 1, index)

    def reference(self, step: int, index: int) -> Tensor | None:
        """None also for a parameter that was not there yet when the references of this step were recorded."""
        if self.group_of(index).joins >= step:
            return None
        return self._gradient(self.reference_kinds[step][index], step, 2, index)

    def group_of(self, index: int) -> Group:
        return next(group for group in self.groups if index in group.members)

    def change(self, step: int) -> dict[str, Any]:
        return self.changes[step] if 0 < step < len(self.changes) else {}

    def with_settings(self, **changes: Any) -> "Case":
        return replace(self, groups=tuple(replace(g, settings=g.settings | changes) for g in self.groups))

    def _gradient(self, kind: str, step: int, which: int, index: int) -> Tensor | None:
        if kind == "-":
            return None
        grad = self._random(which, step, index)
        if grad.numel() > 0:
            grad = grad / torch.linalg.vector_norm(grad) * (0.0 if kind == "0" else self.lengths[step])
        return self._layout(grad, self.transposed_gradients)

    def _random(self, *which: int) -> Tensor:
        """Seeded for each tensor by itself, so that dropping one while a failure is shrunk leaves the others alone."""
        shape = self.shapes[which[-1]]
        return torch.from_numpy(np.asarray(np.random.default_rng([self.seed, *which]).standard_normal(shape)))

    @staticmethod
    def _layout(tensor: Tensor, transposed: bool) -> Tensor:
        return tensor.mT.contiguous().mT if transposed and tensor.dim() > 1 else tensor


GAMMAS = st.sampled_from([0.025, 0.0, 0.1, 0.5, 1.0, -0.1]) | st.floats(0.0, 1.0)


def linear_from_zero(step: int) -> float:
    return 0.1 * (step - 1)


def falling(step: int) -> float:
    return 0.5 / step


def alternating(step: int) -> float:
    return 0.2 * (step % 2)


SCHEDULES = st.sampled_from([linear_from_zero, falling, alternating])


@st.composite
def group_settings(
    draw: st.DrawFn, preconditioners: tuple[str, ...], clips: tuple[str, ...], gammas: st.SearchStrategy[Any]
) -> dict[str, Any]:
    return {
        "lr": draw(st.sampled_from([1e-2]) | st.floats(1e-4, 0.1)),
        "betas": (
            draw(st.sampled_from([0.95, 0.9, 0.5, 0.0]) | st.floats(0.01, 0.98)),
            draw(st.sampled_from([0.99, 0.5, 0.0]) | st.floats(0.5, 0.999)),
        ),
        "eps": draw(st.sampled_from([1e-8, 1e-4, 1.0])),
        "weight_decay": draw(st.sampled_from([0.0, 0.1]) | st.floats(0.0, 1.0)),
        "gamma": draw(gammas),
        "preconditioner": draw(st.sampled_from(preconditioners)),
        "clip": draw(st.sampled_from(clips)),
        "first_step": draw(st.sampled_from(["paper", "official"])),
    }


@st.composite
def cases(
    draw: st.DrawFn,
    preconditioners: tuple[str, ...] = PUBLISHED,
    clips: tuple[str, ...] = CLIPS,
    gammas: st.SearchStrategy[Any] = GAMMAS,
    kinds: str = ANY_GRADIENTS,
    exact: bool = False,
    max_groups: int = 3,
    max_members: int = 2,
    steps: tuple[int, int] = (1, 5),
) -> Case:
    """Cases of the given variety.

    In the exact form the first parameter has all gradients and references: the optimizer takes a step where no
    parameter has one for a loop that forgot to record them, and refuses.
    """
    count = draw(st.integers(*steps))
    groups: list[Group] = []
    shapes: list[tuple[int, ...]] = []
    for number in range(draw(st.integers(1, max_groups))):
        first = number == 0
        chosen = draw(group_settings(preconditioners, clips, gammas.filter(bool) if exact and first else gammas))
        min_dim = 2 if chosen["preconditioner"] == "shampoo" else 0
        members = draw(st.integers(1, max_members))
        for _ in range(members):
            if draw(st.integers(0, 9)) == 9:
                shapes.append(draw(st.sampled_from([s for s in EMPTY_SHAPES if len(s) >= min_dim])))
            else:
                shapes.append(tuple(draw(st.lists(st.integers(1, 5), min_size=min_dim, max_size=4))))
        joins = 0 if first else draw(st.sampled_from([0, 0, 0, *range(1, count)]))
        groups.append(Group(chosen, tuple(range(len(shapes) - members, len(shapes))), joins))

    def letters() -> tuple[str, ...]:
        numbers = st.text("0123"[: len(kinds)], min_size=len(shapes), max_size=len(shapes))
        lines = numbers.map(lambda line: "".join(kinds[int(number)] for number in line))
        drawn = [draw(lines) for _ in range(count)]
        return tuple("g" + line[1:] if exact else line for line in drawn)

    decade = draw(st.floats(-0.4, 0.2) | st.floats(-4, 3))  # often where some vectors are clipped and others are not
    return Case(
        groups=tuple(groups),
        shapes=tuple(shapes),
        gradient_kinds=letters(),
        reference_kinds=letters() if exact else (),
        lengths=tuple(10 ** (decade + draw(st.sampled_from([0.0, 0.1, -0.1, 1.0, -1.0, -2.0]))) for _ in range(count)),
        seed=draw(st.integers(0, 2**32 - 1)),
        exact=exact,
        transposed_parameters=draw(st.booleans()),
        transposed_gradients=draw(st.booleans()),
    )


# --- running them ---


class Run:
    """MARS on a case."""

    def __init__(self, case: Case, dtype: torch.dtype = torch.float64, reuse_gradients: bool = False, **keywords: Any):
        self.case, self.dtype, self.reuse_gradients = case, dtype, reuse_gradients
        self.buffers: dict[int, Tensor] = {}
        self.parameters = [nn.Parameter(case.start(index).to(dtype)) for index in range(len(case.shapes))]
        self.keywords: dict[str, Any] = {"lr": 1.0, "exact": case.exact, "orthogonal": "svd", **keywords}
        self.optimizer = MARS([self._group(group) for group in case.groups if group.joins == 0], **self.keywords)
        self.to_join = sorted((group for group in case.groups if group.joins > 0), key=lambda group: group.joins)

    def join(self, step: int) -> None:
        """Adds the groups that are there at a step and are not in the optimizer yet."""
        for group in [group for group in self.to_join if group.joins <= step]:
            self.optimizer.add_param_group(self._group(group))
            self.to_join.remove(group)

    def step(self, step: int) -> None:
        for group in self.optimizer.param_groups:
            group.update(self.case.change(step))
        self.join(step)
        if self.case.exact and step + 1 in self.case.steps:
            self._set_gradients(lambda index: self.case.reference(step + 1, index))
            self.optimizer.record_reference_gradient()
        self._set_gradients(lambda index: self.case.gradient(step, index))
        self.optimizer.step()

    def values(self) -> list[Tensor]:
        return [parameter.detach().clone() for parameter in self.parameters]

    def state(self) -> dict[tuple[int, str], Tensor]:
        """All that is kept for parameters but the counts of their steps."""
        return {
            (index, name): value.detach().clone()
            for index, parameter in enumerate(self.parameters)
            for name, value in self.optimizer.state.get(parameter, {}).items()
            if name != "step"
        }

    def resumed(self, step: int) -> "Run":
        """Another run, which goes on before this step from what this one saves."""
        file = io.BytesIO()
        torch.save({"parameters": self.values(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        saved = torch.load(file, weights_only=True)
        other = Run(self.case, self.dtype, self.reuse_gradients, **self.keywords)
        for parameter, value in zip(other.parameters, saved["parameters"], strict=True):
            parameter.data = value
        other.join(step - 1)
        other.optimizer.load_state_dict(saved["optimizer"])
        return other

    def _group(self, group: Group) -> dict[str, Any]:
        return {"params": [self.parameters[index] for index in group.members], **group.settings}

    def _set_gradients(self, value: Callable[[int], Tensor | None]) -> None:
        """New tensors, or as `zero_grad(set_to_none=False)` and autograd do it, in the memory of the last ones."""
        for index, parameter in enumerate(self.parameters):
            grad = value(index)
            if grad is not None:
                grad = grad.to(self.dtype)
                if self.reuse_gradients:
                    grad = self.buffers.setdefault(index, torch.empty_like(grad)).zero_().add_(grad)
            parameter.grad = grad


def run(case: Case, dtype: torch.dtype = torch.float64, **keywords: Any) -> list[list[Tensor]]:
    """The parameters after each step."""
    mars, trajectory = Run(case, dtype, **keywords), []
    for step in case.steps:
        mars.step(step)
        trajectory.append(mars.values())
    return trajectory


def expected(case: Case, dtype: torch.dtype = torch.float64) -> tuple[list[list[Tensor]], list[Tensor]]:
    """The reference's parameters after each step, and for each parameter which elements can be compared.

    Where m has cancelled down to rounding, its sign or orthogonal factor is that of the rounding. `sizes` are what m
    would be if nothing cancelled. Elements of Lion's m far below that are not compared; cases where a singular value of
    Shampoo's m is are not used.
    """
    reference = ReferenceMARS(case.exact)
    known = [
        reference.add(case.start(index).to(dtype), Settings(**case.group_of(index).settings))
        for index in range(len(case.shapes))
    ]
    sizes = [torch.zeros_like(p.x) for p in known]
    comparable = [torch.ones_like(p.x, dtype=torch.bool) for p in known]
    trajectory = []

    def rounded(grad: Tensor | None) -> Tensor | None:
        return None if grad is None else grad.to(dtype)

    for step in case.steps:
        for index, p in enumerate(known):
            if case.group_of(index).joins < step:
                p.settings = replace(p.settings, **case.change(step))
        there = [case.group_of(index).joins <= step for index in range(len(known))]
        grads = [rounded(case.gradient(step, index)) if there[index] else None for index in range(len(known))]
        references = [rounded(case.reference(step, index)) if case.exact else None for index in range(len(known))]
        reference.step(grads, references)
        for index, p in enumerate(known):
            if grads[index] is None or p.x.numel() == 0:
                continue
            beta1 = p.settings.betas[0]
            sizes[index] = beta1 * sizes[index] + (1 - beta1) * p.c.abs()
            if p.settings.preconditioner == "lion":
                comparable[index] &= (p.m.abs() > LION_MARGIN[dtype] * sizes[index]) | (sizes[index] == 0)
            elif p.settings.preconditioner == "shampoo" and sizes[index].any():
                smallest = torch.linalg.svdvals(p.m.flatten(1)).min()
                if smallest <= SHAMPOO_MARGIN[dtype] * torch.linalg.vector_norm(sizes[index]):
                    reject()
        trajectory.append([p.x for p in known])
    return trajectory, comparable


def check(
    case: Case, actual: list[list[Tensor]], want: list[list[Tensor]], comparable: list[Tensor], dtype: torch.dtype
) -> None:
    for step, (ours, theirs) in enumerate(zip(actual, want, strict=True)):
        for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            shampoo = case.group_of(index).settings["preconditioner"] == "shampoo"
            tolerance = (SHAMPOO_TOLERANCE if shampoo else TOLERANCE)[dtype]
            a, b = a[comparable[index]].double(), b[comparable[index]].double()
            size = max(1.0, b.abs().max().item()) if b.numel() else 1.0
            where = f"step {step}, tensor {index}: "
            torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance * size, msg=where.__add__)


def follows_the_reference(case: Case, dtype: torch.dtype = torch.float64, **keywords: Any) -> None:
    check(case, run(case, dtype, **keywords), *expected(case, dtype), dtype)


def same(a: list[list[Tensor]], b: list[list[Tensor]]) -> bool:
    """Bit for bit."""
    return all(torch.equal(x, y) for x, y in zip(itertools.chain(*a), itertools.chain(*b), strict=True))


# --- the paper ---

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "mars.json").read_text())["cases"]


@pytest.mark.parametrize("case", [c for c in GOLDEN if "newton-schulz" not in c["name"]], ids=lambda c: c["name"])
def test_the_reference_gives_the_golden_trajectories(case: dict[str, Any]) -> None:
    """So that what the optimizer is compared with below is known to be right by itself."""
    hyper, previous = case["hyper"], case.get("previous_grads")
    common = {"eps": hyper["eps"], "first_step": hyper["first_step"]}
    matrices = Settings(
        lr=hyper["lr"],
        betas=hyper["betas"],
        weight_decay=hyper["weight_decay"],
        gamma=hyper["gamma"],
        preconditioner=hyper["variant"],
        clip=hyper["clip"],
        **common,
    )
    vectors = Settings(
        lr=hyper["lr_1d"],
        betas=hyper["betas_1d"],
        weight_decay=hyper["weight_decay_1d"],
        gamma=0.0,
        clip="none",
        **common,
    )
    reference, known = ReferenceMARS(exact=previous is not None), {}
    for name, entry in case["params"].items():
        value = torch.tensor(entry["value"], dtype=torch.float64)
        known[name] = reference.add(value, matrices if value.dim() >= 2 else vectors)
    for step, (grads, want) in enumerate(zip(case["grads"], case["expected"], strict=True)):
        references = None
        if previous is not None and step > 0:
            references = [torch.tensor(previous[step][name], dtype=torch.float64) for name in known]
        reference.step([torch.tensor(grads[name], dtype=torch.float64) for name in known], references)
        tolerance = 1e-9 if "svd" in case["name"] else 1e-12
        for name, p in known.items():
            torch.testing.assert_close(
                p.x, torch.tensor(want[name], dtype=torch.float64), rtol=tolerance, atol=tolerance
            )


@given(cases())
@examples(100)
def test_approximate_mars_follows_the_paper(case: Case) -> None:
    follows_the_reference(case)


@given(cases(exact=True))
@examples(80)
def test_exact_mars_follows_the_paper(case: Case) -> None:
    follows_the_reference(case)


@pytest.mark.parametrize("exact", [False, True])
def test_the_identity_as_preconditioner_follows_the_paper(exact: bool) -> None:
    @given(cases(preconditioners=("sgd", "adamw"), exact=exact))
    @examples(25)
    def check_one(case: Case) -> None:
        follows_the_reference(case)

    check_one()


@pytest.mark.parametrize("exact", [False, True])
def test_a_changing_gamma_follows_the_paper(exact: bool) -> None:
    """Also where gamma is zero in some steps: the gradients of those are references too. Every parameter has a gradient
    in each, since the paper does not say whether one that misses a step misses a value of gamma."""

    @given(cases(gammas=SCHEDULES, kinds=NONE_MISSING, exact=exact))
    @examples(25)
    def check_one(case: Case) -> None:
        follows_the_reference(case)

    check_one()


@pytest.mark.parametrize("exact", [False, True])
def test_settings_may_change_between_steps(exact: bool) -> None:
    """As schedulers change them, in `param_groups`. A gamma that has been zero is another matter: no reference is there
    when it changes."""
    gammas = st.sampled_from([0.025, 0.5, 1.0])
    others = st.fixed_dictionaries(
        {"lr": st.floats(0.0, 0.1)},
        optional={"weight_decay": st.floats(0.0, 1.0), "gamma": gammas, "clip": st.sampled_from(CLIPS)},
    )

    @given(cases(gammas=gammas, exact=exact, steps=(2, 5)), st.lists(others, min_size=2, max_size=5))
    @examples(25)
    def check_one(case: Case, changes: list[dict[str, Any]]) -> None:
        follows_the_reference(replace(case, changes=tuple(changes)))

    check_one()


@pytest.mark.parametrize("way", ["gamma", "clip"])
def test_the_clip_knows_the_gradient_of_a_step_that_needed_no_clip(way: str) -> None:
    """Gradients are large in the second step alone, which has no correction or no clip: what is clipped in the third is
    mostly its last gradient, so that whatever is remembered of one must be of this one."""
    gammas = st.just(alternating) if way == "gamma" else st.sampled_from([0.2, 1.0])

    @given(
        cases(gammas=gammas, clips=CLIPS[:2], kinds=ALL_GRADIENTS, steps=(3, 3)),
        st.sampled_from(CLIPS[:2]),
    )
    @examples(15)
    def check_one(case: Case, clip: str) -> None:
        case = replace(case, lengths=(1e-3, 10.0, 1e-3))
        if way == "clip":
            case = replace(case, changes=({}, {"clip": "none"}, {"clip": clip}))
        follows_the_reference(case)

    check_one()


@pytest.mark.parametrize("exact", [False, True])
def test_float32_stays_near_the_paper(exact: bool) -> None:
    @given(cases(exact=exact))
    @examples(25)
    def check_one(case: Case) -> None:
        follows_the_reference(case, torch.float32)

    check_one()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("preconditioner", [*PUBLISHED, "sgd"])
def test_large_tensors_follow_the_paper(preconditioner: str, exact: bool) -> None:
    """Which may be stepped in pieces or several threads."""
    settings = {"lr": 1e-2, "weight_decay": 0.1, "gamma": 0.1, "preconditioner": preconditioner}
    kinds = ("gg",) * 3
    case = Case(
        groups=(Group(settings, (0,)), Group(settings | {"clip": "none"}, (1,))),
        shapes=((3, 60_001), (2, 40, 1_001)),
        gradient_kinds=kinds,
        reference_kinds=kinds,
        lengths=(0.5, 2.0, 0.5),
        seed=0,
        exact=exact,
    )
    follows_the_reference(case)


@pytest.mark.slow
@pytest.mark.parametrize("preconditioner", [*PUBLISHED, "sgd"])
def test_compiled_mars_follows_the_paper(preconditioner: str) -> None:
    """Also of tensors that come and go, and of empty, single-element and transposed ones."""

    @given(cases(preconditioners=(preconditioner,)))
    @examples(10)
    def check_one(case: Case) -> None:
        follows_the_reference(case, compile=True)

    check_one()


# --- settings that come to the same ---


@given(cases(kinds=ALL_GRADIENTS, max_groups=1, max_members=1))
@examples(25)
def test_clips_by_tensor_and_of_all_are_one_for_one_tensor(case: Case) -> None:
    _, comparable = expected(case)
    alone, together = run(case.with_settings(clip="tensor")), run(case.with_settings(clip="global"))
    check(case, together, alone, comparable, torch.float64)


@given(cases(max_groups=2), st.sampled_from([0.025, 0.5, 0.0]))
@examples(25)
def test_a_constant_gamma_may_be_a_function(case: Case, gamma: float) -> None:
    number, function = case.with_settings(gamma=gamma), case.with_settings(gamma=lambda step: gamma)
    _, comparable = expected(number)
    check(case, run(function), run(number), comparable, torch.float64)


@given(cases(preconditioners=("lion", "shampoo", "sgd"), clips=("none",)))
@examples(50)
def test_without_clip_no_last_gradient_is_needed(case: Case) -> None:
    """m_t is then an average of gradients (quasi-hyperbolic momentum), also in the first step of the paper's form."""
    _, comparable = expected(case)
    check(case, run(case, last_grad="folded"), run(case, last_grad="full"), comparable, torch.float64)


@given(cases(preconditioners=("lion", "sgd"), clips=("none",)))
@examples(15)
def test_folded_keeps_one_tensor_for_a_parameter(case: Case) -> None:
    mars = Run(case, last_grad="folded")
    for step in case.steps:
        mars.step(step)
    for parameter, state in mars.optimizer.state.items():
        kept = sum(v.numel() for v in state.values() if torch.is_tensor(v) and v.dim() == parameter.dim() > 0)
        assert kept <= parameter.numel()


@given(cases())
@examples(25)
def test_a_bfloat16_last_gradient_is_the_gradient_rounded(case: Case) -> None:
    case = case.with_settings(last_grad="bfloat16")
    follows_the_reference(case)
    mars = Run(case)
    for step in case.steps:
        mars.step(step)
    for state in mars.optimizer.state.values():
        full = [name for name, v in state.items() if torch.is_tensor(v) and v.dim() > 0 and v.dtype != torch.bfloat16]
        assert len(full) <= 2, f"the moments alone are to be kept in full: {full}"


@given(cases())
@examples(25)
def test_small_parameters_are_not_compiled_unasked(case: Case) -> None:
    assert same(run(case), run(case, compile=False))


@given(cases(max_groups=1, max_members=4), st.randoms(use_true_random=False))
@examples(25)
def test_the_order_of_parameters_does_not_matter(case: Case, random: Any) -> None:
    _, comparable = expected(case)
    members = list(case.groups[0].members)
    random.shuffle(members)
    shuffled = replace(case, groups=(replace(case.groups[0], members=tuple(members)),))
    check(case, run(shuffled), run(case), comparable, torch.float64)


@given(cases(max_groups=2, max_members=4), st.integers(1, 3))
@examples(25)
def test_a_group_may_be_split(case: Case, at: int) -> None:
    _, comparable = expected(case)
    group = case.groups[0]
    parts = (replace(group, members=group.members[:at]), replace(group, members=group.members[at:]))
    split = replace(case, groups=(*(part for part in parts if part.members), *case.groups[1:]))
    check(case, run(split), run(case), comparable, torch.float64)


@given(cases(preconditioners=("lion",), clips=("none",)), st.integers(-20, 20))
@examples(25)
def test_lion_without_clip_does_not_feel_the_scale_of_gradients(case: Case, exponent: int) -> None:
    """Powers of two scale floating-point numbers without rounding."""
    scaled = replace(case, lengths=tuple(length * 2.0**exponent for length in case.lengths))
    assert same(run(case), run(scaled))


@given(cases(preconditioners=("shampoo",), clips=("none",)), st.floats(1e-3, 1e3))
@examples(25)
def test_shampoo_without_clip_does_not_feel_the_scale_of_gradients(case: Case, factor: float) -> None:
    _, comparable = expected(case)
    scaled = replace(case, lengths=tuple(length * factor for length in case.lengths))
    check(case, run(scaled), run(case), comparable, torch.float64)


@pytest.mark.parametrize("exact", [False, True])
def test_a_learning_rate_of_zero_leaves_parameters_alone(exact: bool) -> None:
    @given(cases(exact=exact), st.sampled_from([torch.float32, torch.float64]))
    @examples(20)
    def check_one(case: Case, dtype: torch.dtype) -> None:
        start = [case.start(index).to(dtype) for index in range(len(case.shapes))]
        assert same(run(case.with_settings(lr=0.0), dtype), [start] * len(case.steps))

    check_one()


# --- state and memory ---


@pytest.mark.parametrize("exact", [False, True])
def test_gradients_belong_to_the_caller(exact: bool) -> None:
    """A step neither keeps p.grad, whose memory the next backward pass reuses, nor writes to it."""

    @given(cases(exact=exact), st.sampled_from([torch.float32, torch.float64]))
    @examples(25)
    def check_one(case: Case, dtype: torch.dtype) -> None:
        assert same(run(case, dtype, reuse_gradients=True), run(case, dtype))
        mars = Run(case, dtype)
        for step in case.steps:
            mars.step(step)
            for index, parameter in enumerate(mars.parameters):
                if (grad := case.gradient(step, index)) is not None:
                    assert parameter.grad is not None
                    assert torch.equal(parameter.grad, grad.to(dtype))

    check_one()


@pytest.mark.parametrize("kind", ["full", "bfloat16", "folded"])
def test_a_gradient_that_is_not_finite_changes_nothing(kind: str) -> None:
    """Of any tensor: none is stepped then."""
    options: dict[str, Any] = {"preconditioners": (*PUBLISHED, "sgd")}
    if kind == "folded":
        options = {"preconditioners": ("lion", "shampoo", "sgd"), "clips": ("none",)}

    @given(cases(**options), st.sampled_from([float("nan"), float("inf"), -float("inf")]))
    @examples(25)
    def check_one(case: Case, value: float) -> None:
        mars = Run(case, last_grad=kind)
        first = mars.parameters[0]
        assume(first.numel() > 0)
        for step in case.steps:
            mars.step(step)
        before = mars.values(), mars.state()
        first.grad = torch.zeros_like(first)
        first.grad[(-1,) * first.dim()] = value
        mars.optimizer.step()
        assert same([mars.values()], [before[0]])
        after = mars.state()
        for name, tensor in before[1].items():
            torch.testing.assert_close(after[name], tensor, rtol=0, atol=0, equal_nan=True)
        mars.step(case.steps[-1])
        assert all(value.isfinite().all() for value in mars.values())

    check_one()


RESUMED: dict[str, dict[str, Any]] = {
    "approximate": {},
    "exact": {"exact": True},
    "sgd": {"preconditioners": ("sgd", "adamw")},
    "schedule": {"gammas": SCHEDULES, "kinds": NONE_MISSING},
    "bfloat16": {},
    "folded": {"preconditioners": ("lion", "shampoo", "sgd"), "clips": ("none",)},
}


@pytest.mark.parametrize("kind", RESUMED)
def test_a_saved_run_goes_on_bit_for_bit(kind: str) -> None:
    keywords: dict[str, Any] = {"last_grad": kind} if kind in ("bfloat16", "folded") else {}

    @given(cases(steps=(2, 5), **RESUMED[kind]), st.integers(1, 4), st.sampled_from([torch.float32, torch.float64]))
    @examples(25)
    def check_one(case: Case, at: int, dtype: torch.dtype) -> None:
        at = min(at, len(case.steps) - 1)
        mars = Run(case, dtype, **keywords)
        for step in case.steps[:at]:
            mars.step(step)
        resumed = mars.resumed(at)
        for step in case.steps[at:]:
            mars.step(step)
            resumed.step(step)
            assert same([mars.values()], [resumed.values()])

    check_one()
