"""The estimators of MARS: against plain loops written from their equations, and against their formulas of variance.

Gradients are those of a noisy quadratic, so that they depend on the weights as well as on the batch.
"""

import copy
import io
import math
from collections.abc import Generator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from optim import MARS, optimizer_bytes
from optim.batch import Batch
from tests.optim.reference import DIRECTIONS, Parameter, Settings

SHAPES = [(4, 6), (6, 3)]
LR, BETAS, GAMMA, DECAY = 0.05, (0.8, 0.9), 0.6, 0.1
TAU, INTERVAL, BATCHES = 3, 4, 2  # of "reference"; of "svrg"
ESTIMATORS = ("recursive", "exact", "reference", "svrg", "none")
Weights = list[Tensor]


def gradient(weights: Weights, batch: int) -> Weights:
    """Of the quadratic on a batch; those from 1000 on are for snapshots."""
    generator = torch.Generator().manual_seed(batch)
    found = []
    for x in weights:
        scale = torch.rand(x.shape, generator=generator, dtype=torch.float64)
        noise = torch.randn(x.shape, generator=generator, dtype=torch.float64)
        found.append((0.5 + scale) * x.double() + 0.3 * noise)
    return found


def snapshot_batches(step: int) -> list[int]:
    return [1000 + 10 * step + index for index in range(BATCHES)]


def start(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)) for shape in SHAPES]


# --- written from the equations ---


def estimates(estimator: str, gamma: float) -> Generator[Weights, Weights, None]:
    """c_t of every step: is sent x_t, and answers."""
    grads: list[Weights] = []
    last = snapshot = mean = reference = None
    weights = yield []
    step = 0
    while True:
        step += 1
        g = gradient(weights, step)
        c, k = g, gamma * BETAS[0] / (1 - BETAS[0])
        if estimator == "recursive" and grads:
            c = [a + k * (a - b) for a, b in zip(g, grads[-1], strict=True)]
        elif estimator == "exact" and last is not None:
            c = [a + k * (a - b) for a, b in zip(g, gradient(last, step), strict=True)]
        elif estimator == "reference" and reference is not None:
            c = [a + gamma * (r - a) for a, r in zip(g, reference, strict=True)]
        elif estimator == "svrg":
            if (step - 1) % INTERVAL == 0:
                snapshot = weights
                mean = average([gradient(snapshot, batch) for batch in snapshot_batches(step)])
            assert snapshot is not None
            assert mean is not None
            h = gradient(snapshot, step)
            c = [a - gamma * (b - mu) for a, b, mu in zip(g, h, mean, strict=True)]
        grads.append(g)
        last = weights
        if step % TAU == 0:
            reference = average(grads[-TAU:])
        weights = yield c


def average(many: list[Weights]) -> Weights:
    return [sum(column) / len(many) for column in zip(*many, strict=True)]


def kronecker(p: Parameter, factors: dict[str, Tensor]) -> Tensor:
    """Shampoo with averaged statistics and new roots at every step."""
    beta2, damping, direction = p.settings.betas[1], 1e-6, p.m
    for side, gram in (("left", p.c @ p.c.T), ("right", p.c.T @ p.c)):
        factors[side] = beta2 * factors.get(side, torch.zeros_like(gram)) + (1 - beta2) * gram
        values, vectors = torch.linalg.eigh(factors[side] / (1 - beta2**p.t))
        root = vectors @ torch.diag((values.clamp(min=0) + damping * values.max()) ** -0.25) @ vectors.T
        direction = root @ direction if side == "left" else direction @ root
    return direction


def by_hand(estimator: str, preconditioner: str, steps: int, gamma: float = GAMMA, clip: str = "none") -> Weights:
    settings = Settings(LR, betas=BETAS, weight_decay=DECAY, preconditioner=preconditioner)
    parameters = [Parameter(x, settings) for x in start()]
    factors: list[dict[str, Tensor]] = [{} for _ in parameters]
    source = estimates(estimator, gamma)
    next(source)
    for _ in range(steps):
        for p, c, kept in zip(parameters, source.send([p.x for p in parameters]), factors, strict=True):
            p.t += 1
            p.c = c / max(1.0, c.norm().item()) if clip == "tensor" else c
            p.m = BETAS[0] * p.m + (1 - BETAS[0]) * p.c
            direction = kronecker(p, kept) if preconditioner == "kronecker" else DIRECTIONS[preconditioner](p)
            p.x = p.x * (1 - LR * DECAY) - LR * direction
    return [p.x for p in parameters]


# --- as a user would ---


def make(params: Any, estimator: str, preconditioner: str = "sgd", gamma: float = GAMMA, **settings: Any) -> MARS:
    form = {"estimator": "recursive", "exact": True} if estimator == "exact" else {"estimator": estimator}
    common: dict[str, Any] = {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "gamma": gamma, "clip": "none"}
    common |= {"preconditioner": preconditioner, "orthogonal": "svd", "refresh_interval": 1, "reference_interval": TAU}
    return MARS(params, **(common | form | settings))


def train(
    params: list[nn.Parameter], optimizer: MARS, estimator: str, first: int, last: int, bad: tuple[int, ...] = ()
) -> None:
    """Steps `first` to `last`; the gradients of `bad` ones are not finite."""

    def backward(batch: int) -> None:
        for p, g in zip(params, gradient([p.detach() for p in params], batch), strict=True):
            p.grad = g.to(p.dtype)

    for step in range(first, last + 1):
        if estimator == "exact":
            backward(step + 1)
            optimizer.record_reference_gradient()
        if estimator == "svrg":
            if (step - 1) % INTERVAL == 0:
                optimizer.take_snapshot()
                for batch in snapshot_batches(step):
                    backward(batch)
                    optimizer.record_snapshot_gradient()
            with optimizer.snapshot_weights():
                backward(step)
            optimizer.record_reference_gradient()
        backward(step)
        if step in bad:
            assert params[0].grad is not None
            params[0].grad[0, 0] = math.inf
        optimizer.step()


def trained(estimator: str, preconditioner: str, steps: int, **settings: Any) -> Weights:
    params = start()
    train(params, make(params, estimator, preconditioner, **settings), estimator, 1, steps)
    return [p.detach() for p in params]


def assert_alike(ours: Weights, theirs: Weights, tolerance: float = 1e-9) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance, check_dtype=False)


def state_of(optimizer: MARS) -> dict[int, dict[str, Tensor]]:
    saved: dict[int, dict[str, Tensor]] = copy.deepcopy(optimizer.state_dict()["state"])
    return saved


@pytest.mark.parametrize("preconditioner", ["adamw", "lion", "sgd", "shampoo", "kronecker"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_with_each_preconditioner_is_its_equation(estimator: str, preconditioner: str) -> None:
    assert_alike(trained(estimator, preconditioner, 11), by_hand(estimator, preconditioner, 11))


@pytest.mark.parametrize("preconditioner", ["adamw", "sgd"])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_clipped(estimator: str, preconditioner: str) -> None:
    ours = trained(estimator, preconditioner, 11, clip="tensor")
    theirs = by_hand(estimator, preconditioner, 11, clip="tensor")
    assert_alike(ours, theirs)
    with patch.object(Batch, "guarded", True), patch("optim.clipping._has_bounds", lambda batch: False):  # as on a GPU
        assert_alike(trained(estimator, preconditioner, 11, clip="tensor"), theirs)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_gamma_zero_is_the_plain_method(estimator: str) -> None:
    plain = trained("none", "adamw", 8)
    for a, b in zip(trained(estimator, "adamw", 8, gamma=0.0), plain, strict=True):
        assert torch.equal(a, b)


def test_reference_with_gamma_one_follows_the_reference_alone() -> None:
    """From the first refresh to the second one c_t is the mean of the first gradients."""
    params = start()
    optimizer = make(params, "reference", gamma=1.0, betas=(0.0, 0.9))
    grads = []
    for step in range(1, 2 * TAU + 1):
        grads.append(gradient([p.detach() for p in params], step))
        train(params, optimizer, "reference", step, step)
        expected = grads[-1] if step <= TAU else average(grads[:TAU])
        assert_alike([optimizer.state[p]["exp_avg"] for p in params], expected)


def test_reference_keeps_no_buffer_of_gradients() -> None:
    for tau in (2, 50):
        params = start(torch.float32)
        optimizer = make(params, "reference", reference_interval=tau)
        train(params, optimizer, "reference", 1, 5)
        size = 4 * sum(p.numel() for p in params)
        assert size * 3 < optimizer_bytes(optimizer) < size * 3 + 40  # moment, reference, sum; counts and steps


def test_svrg_with_all_data_goes_to_the_minimum_where_sgd_stays_noisy() -> None:
    """Johnson & Zhang's point: with mu over all of the data a constant learning rate is enough. Least squares of 8
    rows, one a step."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(8, 2, generator=generator, dtype=torch.float64)
    targets = torch.randn(8, generator=generator, dtype=torch.float64)
    solution = torch.linalg.lstsq(rows, targets[:, None]).solution[:, 0]
    errors = {}
    for estimator, gamma in (("svrg", 1.0), ("none", 0.0)):
        x = nn.Parameter(torch.zeros(2, dtype=torch.float64))
        optimizer = MARS([x], 0.1, (0.0, 0.9), gamma=gamma, preconditioner="sgd", estimator=estimator, clip="none")
        order = torch.Generator().manual_seed(1)

        def backward(row: int, x: nn.Parameter = x) -> None:
            x.grad = None
            (0.5 * (rows[row] @ x - targets[row]).square()).backward()

        for step in range(400):
            row = int(torch.randint(8, (), generator=order))
            if estimator == "svrg":
                if step % 16 == 0:
                    optimizer.take_snapshot()
                    for each in range(8):
                        backward(each)
                        optimizer.record_snapshot_gradient()
                with optimizer.snapshot_weights():
                    backward(row)
                optimizer.record_reference_gradient()
            backward(row)
            optimizer.step()
        errors[estimator] = (x.detach() - solution).norm().item()
    assert errors["svrg"] < 1e-8
    assert errors["none"] > 1e-3


# --- variance ---

COUNT = 40_000  # elements, each with noise of its own
SIGMA, CURVATURE, POINT, OLD_POINT = 0.5, 2.0, 1.5, 1.0


def noisy_gradient(weights: Weights, batch: int) -> Weights:
    """(a + n_batch) x with n of variance SIGMA**2: of two points on one batch the noise is the same but for its
    scale."""
    generator = torch.Generator().manual_seed(batch)
    return [(CURVATURE + SIGMA * torch.randn(COUNT, generator=generator, dtype=torch.float64)) * x for x in weights]


VARIANCES = {  # of c_t in units of SIGMA**2, by the equations, for k = gamma beta1 / (1 - beta1), x and x~
    "none": lambda gamma: POINT**2,
    "recursive": lambda gamma: ((1 + kappa(gamma)) ** 2 + kappa(gamma) ** 2) * POINT**2,
    "exact": lambda gamma: POINT**2,  # the weights do not move: g_t - r_t is zero
    "reference": lambda gamma: ((1 - gamma) ** 2 + gamma**2 / TAU) * POINT**2,
    "svrg": lambda gamma: (POINT - gamma * OLD_POINT) ** 2 + gamma**2 * OLD_POINT**2 / BATCHES,
}


def kappa(gamma: float) -> float:
    return gamma * BETAS[0] / (1 - BETAS[0])


@pytest.mark.parametrize("gamma", [0.1, 0.6, 1.0])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_variance_is_its_formula(estimator: str, gamma: float) -> None:
    """Weights that do not move (lr 0), away from the snapshot: the variance over elements of c_t, which is read off two
    moments. That of a sample variance of COUNT normal numbers is 2 / (COUNT - 1) of its square: five of its deviations
    are allowed, and of the mean's."""
    x = nn.Parameter(torch.full((COUNT,), OLD_POINT, dtype=torch.float64))
    optimizer = make([x], estimator, gamma=gamma, lr=0.0)

    def backward(batch: int) -> None:
        x.grad = noisy_gradient([x.detach()], batch)[0]

    for batch in snapshot_batches(1) if estimator == "svrg" else []:
        backward(batch)
        optimizer.record_snapshot_gradient()
    x.data.fill_(POINT)
    before = torch.zeros(COUNT)
    for step in range(1, TAU + 3):
        if estimator == "exact":
            backward(step + 1)
            optimizer.record_reference_gradient()
        elif estimator == "svrg":
            with optimizer.snapshot_weights():
                backward(step)
            optimizer.record_reference_gradient()
        backward(step)
        if step > 1:
            before = optimizer.state[x]["exp_avg"].clone()
        optimizer.step()
    c = (optimizer.state[x]["exp_avg"] - BETAS[0] * before) / (1 - BETAS[0])
    expected = VARIANCES[estimator](gamma) * SIGMA**2
    assert c.var().item() == pytest.approx(expected, rel=5 * math.sqrt(2 / (COUNT - 1)))
    assert c.mean().item() == pytest.approx(CURVATURE * POINT, abs=5 * math.sqrt(expected / COUNT))


# --- state ---


@pytest.mark.parametrize("estimator", ESTIMATORS)
@pytest.mark.parametrize("cut", [2, 4, 5])
def test_state_is_saved_and_restored_bit_for_bit(estimator: str, cut: int) -> None:
    straight, parts = start(torch.float32), start(torch.float32)
    straight_optimizer = make(straight, estimator, "adamw", clip="tensor")
    train(straight, straight_optimizer, estimator, 1, 10)
    optimizer = make(parts, estimator, "adamw", clip="tensor")
    train(parts, optimizer, estimator, 1, cut)
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    restored = make(parts, estimator, "adamw", clip="tensor")
    restored.load_state_dict(torch.load(file, weights_only=True))
    train(parts, restored, estimator, cut + 1, 10)
    for a, b in zip(parts, straight, strict=True):
        assert torch.equal(a, b)
    for number, entry in state_of(straight_optimizer).items():
        assert state_of(restored)[number].keys() == entry.keys()
        assert all(torch.equal(state_of(restored)[number][key], value) for key, value in entry.items())


def test_a_copy_goes_on_as_the_original_does() -> None:
    for estimator in ESTIMATORS:
        params = start()
        optimizer = make(params, estimator)
        train(params, optimizer, estimator, 1, 6)
        others, other = copy.deepcopy((params, optimizer))
        train(params, optimizer, estimator, 7, 9)
        train(others, other, estimator, 7, 9)
        assert all(torch.equal(a, b) for a, b in zip(params, others, strict=True))


def test_a_state_from_before_there_was_a_choice_is_recursive() -> None:
    params = start()
    optimizer = make(params, "recursive")
    train(params, optimizer, "recursive", 1, 3)
    old = optimizer.state_dict()
    for group in old["param_groups"]:
        del group["estimator"], group["reference_interval"]
    restored = make(params, "recursive")
    restored.load_state_dict(old)
    twins = copy.deepcopy(params)
    twin = make(twins, "recursive")
    twin.load_state_dict(optimizer.state_dict())
    train(params, restored, "recursive", 4, 6)
    train(twins, twin, "recursive", 4, 6)
    assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


@pytest.mark.parametrize("guarded", [False, True])
@pytest.mark.parametrize("estimator", ["reference", "svrg"])
@pytest.mark.parametrize("bad", [(1,), (2,), (3,), (2, 3, 4)])
def test_a_skipped_step_changes_nothing(estimator: str, guarded: bool, bad: tuple[int, ...]) -> None:
    """Not even the sum of gradients: what a refresh averages are the gradients of the steps that were made."""
    params = start()
    with patch.object(Batch, "guarded", guarded):
        optimizer = make(params, estimator, clip="tensor")
        kept = {"exp_avg", "snapshot", "snapshot_grad", "snapshot_count"}
        sums: Weights = [torch.zeros_like(p) for p in params]
        counted, reference = 0, None
        for step in range(1, 8):
            before, state = [p.detach().clone() for p in params], state_of(optimizer)
            grads = gradient(before, step)
            train(params, optimizer, estimator, step, step, bad)
            if step in bad:
                assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
                later = state_of(optimizer)
                for number in state if estimator == "reference" or (step - 1) % INTERVAL else []:
                    assert all(torch.equal(later[number][key], state[number][key]) for key in kept & set(state[number]))
            else:
                sums, counted = [a + g for a, g in zip(sums, grads, strict=True)], counted + 1
            if step % TAU == 0:
                reference = [a / counted for a in sums] if counted else reference
                sums, counted = [torch.zeros_like(p) for p in params], 0
            if estimator == "reference":
                assert_alike([optimizer.state[p]["grad_sum"] for p in params], sums)
                if reference is not None:
                    assert_alike([optimizer.state[p]["mean_grad"] for p in params], reference)
        assert all(p.isfinite().all() for p in params)


def test_a_gradient_of_a_snapshot_that_is_not_finite_does_not_count() -> None:
    params = start()
    optimizer = make(params, "svrg")
    grads = [gradient([p.detach() for p in params], batch) for batch in (1, 2, 3)]
    for number, found in enumerate(grads):
        for p, g in zip(params, found, strict=True):
            p.grad = torch.full_like(g, math.nan) if number == 1 else g.clone()
        optimizer.record_snapshot_gradient()
    assert_alike([optimizer.state[p]["snapshot_grad"] for p in params], average([grads[0], grads[2]]))


def test_without_a_snapshot_or_with_a_useless_one_svrg_is_plain() -> None:
    for useless in (False, True):
        params, twins = start(), start()
        optimizer, plain = make(params, "svrg"), make(twins, "none")
        for step in (1, 2, 3):
            grads = gradient([p.detach() for p in params], step)
            if useless:
                for p in params:
                    p.grad = torch.full_like(p, math.nan)
                optimizer.take_snapshot()
                optimizer.record_snapshot_gradient()
                optimizer.record_reference_gradient()
            for p, twin, g in zip(params, twins, grads, strict=True):
                p.grad, twin.grad = g.clone(), g.clone()
            optimizer.step()
            plain.step()
        assert all(torch.equal(a, b) for a, b in zip(params, twins, strict=True))


def test_a_reference_at_the_snapshot_that_is_not_finite_makes_no_correction() -> None:
    params = start()
    optimizer = make(params, "svrg", betas=(0.0, 0.9))
    train(params, optimizer, "svrg", 1, 2)
    for p in params:
        p.grad = torch.full_like(p, math.inf)
    optimizer.record_reference_gradient()
    grads = gradient([p.detach() for p in params], 3)
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    assert_alike([optimizer.state[p]["exp_avg"] for p in params], grads)


def test_snapshot_weights_come_and_go() -> None:
    params = start()
    optimizer = make(params, "svrg")
    old = [p.detach().clone() for p in params]
    train(params, optimizer, "svrg", 1, 3)
    new = [p.detach().clone() for p in params]

    def fail() -> None:
        with optimizer.snapshot_weights():
            assert all(torch.equal(p, x) for p, x in zip(params, old, strict=True))
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert all(torch.equal(p, x) for p, x in zip(params, new, strict=True))


def test_a_parameter_without_a_gradient_is_left_alone() -> None:
    for estimator in ("reference", "svrg"):
        params = [*start(), nn.Parameter(torch.ones(3))]
        optimizer = make(params, estimator)
        train(params[:2], optimizer, estimator, 1, 5)
        assert torch.equal(params[2], torch.ones(3))
        assert set(optimizer.state_dict()["state"]) == {0, 1}
        assert_alike([p.detach() for p in params[:2]], by_hand(estimator, "sgd", 5))


def test_a_parameter_that_misses_the_batch_at_the_snapshot_has_a_gradient_of_zero_there() -> None:
    params = start()
    optimizer = make(params, "svrg", betas=(0.0, 0.9))
    train(params, optimizer, "svrg", 1, 1)
    grads, mean = gradient([p.detach() for p in params], 2), optimizer.state[params[1]]["snapshot_grad"].clone()
    params[1].grad = None
    optimizer.record_reference_gradient()
    for p, g in zip(params, grads, strict=True):
        p.grad = g.clone()
    optimizer.step()
    torch.testing.assert_close(optimizer.state[params[1]]["exp_avg"], grads[1] + GAMMA * mean)


@pytest.mark.parametrize("estimator", ["reference", "svrg"])
def test_parameters_of_16_bits(estimator: str) -> None:
    params = start(torch.bfloat16)
    optimizer = make(params, estimator, clip="tensor")
    train(params, optimizer, estimator, 1, 9)
    for p in params:
        dtypes = {key: value.dtype for key, value in optimizer.state[p].items()}
        assert dtypes.pop("snapshot", torch.bfloat16) == torch.bfloat16
        assert set(dtypes.values()) == {torch.float32}
    for p, expected in zip(params, by_hand(estimator, "sgd", 9, clip="tensor"), strict=True):
        torch.testing.assert_close(p.detach().double(), expected, rtol=0.02, atol=0.02)


def test_groups_have_estimators_of_their_own() -> None:
    params, alone, plain = start(), start(), start()
    optimizer = make([{"params": params[:1], "estimator": "reference"}, {"params": params[1:]}], "none")
    train(params, optimizer, "reference", 1, 7)
    train(alone, make(alone, "reference"), "reference", 1, 7)
    train(plain, make(plain, "none"), "none", 1, 7)
    assert torch.equal(params[0], alone[0])
    assert torch.equal(params[1], plain[1])

    params, alone = start(), start()
    optimizer = make([{"params": params[:1]}, {"params": params[1:], "estimator": "none"}], "svrg")
    train(params, optimizer, "svrg", 1, 7)
    train(alone, make(alone, "svrg"), "svrg", 1, 7)
    assert torch.equal(params[0], alone[0])
    assert torch.equal(params[1], plain[1])
    assert "snapshot" in optimizer.state[params[1]], "the gradient of the others depends on it"


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"estimator": "sarah"}, "estimator='sarah' must be one of recursive, reference, svrg, none"),
        ({"estimator": "svrg", "exact": True}, "exact=True is for estimator='recursive', not 'svrg'"),
        ({"estimator": "reference", "last_grad": "bfloat16"}, "last_grad='bfloat16' is for estimator='recursive'"),
        ({"estimator": "reference", "reference_interval": 0}, "reference_interval=0 must be a whole number, 1 or more"),
    ],
)
def test_what_cannot_be_is_an_error(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        MARS(start(), lr=0.1, **settings)


def test_svrg_is_a_matter_of_the_whole_optimizer() -> None:
    for of_group, of_all in (("svrg", "recursive"), ("recursive", "svrg")):
        with pytest.raises(ValueError, match="svrg is a setting of the whole optimizer"):
            MARS([{"params": start(), "estimator": of_group}], lr=0.1, estimator=of_all)
    params = start()
    optimizer = make(params, "svrg")
    train(params, optimizer, "svrg", 1, 2)
    with pytest.raises(RuntimeError, match="no gradient at the snapshot"):
        optimizer.step()
    with pytest.raises(ValueError, match="the state is of svrg, the optimizer is not"):
        make(start(), "recursive").load_state_dict(optimizer.state_dict())
    with pytest.raises(RuntimeError, match="snapshots are for"):
        make(start(), "reference").take_snapshot()
    with pytest.raises(RuntimeError, match="record_reference_gradient"):
        make(start(), "reference").record_reference_gradient()


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["reference", "svrg"])
@pytest.mark.parametrize("preconditioner", ["adamw", "lion"])
def test_compiled_steps_are_the_eager_ones(estimator: str, preconditioner: str) -> None:
    torch.compiler.reset()
    eager = trained(estimator, preconditioner, 9, clip="tensor", compile=False)
    assert_alike(trained(estimator, preconditioner, 9, clip="tensor", compile=True), eager)
