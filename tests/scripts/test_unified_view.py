"""scripts/unified_view.py: every member of the family is its own implementation, and is not with another setting."""

import argparse
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from scripts import unified_view as view
from scripts.unified.family import Member, Rule, members
from scripts.unified.training import DATA, compare, small_gpt, text_batches

UPDATES = 6  # SVRG takes its second snapshot before the fifth, and block means are used from then on
MEMBERS = {member.name: member for member in members()}


def found(member: Member, **settings: Any) -> view.Row:
    """The member with some settings changed, beside the implementation that it had."""
    other = replace(member, settings=member.settings | settings)
    return view.Row(other, compare(other, UPDATES, torch.float64), UPDATES)


def test_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "view.json"
    assert view.main([f"--updates={UPDATES}", "--json", str(file)]) == 0
    report = json.loads(file.read_text())
    rows = {row["name"]: row for row in report["rows"]}
    assert {
        "SGD",
        "momentum SGD",
        "Adam",
        "AdamW",
        "Lion",
        "Muon",
        "Shampoo",
        "STORM",
        "SVRG",
        "MARS-AdamW exact",
    } <= set(rows)
    assert [name for name, row in rows.items() if not row["equal"]] == ["NAdamW"]
    for row in rows.values():
        # Rounding: 6 updates times some operations of 1e-16, times how far dynamics and small moments enlarge it.
        assert not row["equal"] or row["relative"] < 1e-11 or row["reference"] == "torch Muon"
        assert row["relative"] == row["difference"] / row["change"]
        assert row["losses"][1] < row["losses"][0] - 0.1

    out = capsys.readouterr().out
    assert max(map(len, out.split("\n"))) <= view.WIDTH
    (line,) = [line for line in out.split("\n") if line.startswith("Lion ")]
    assert line.split()[:9] == ["Lion", "lion", "approx.", "0.0909", "0.99", "-", "none", "official", "lion"]
    assert line.split()[9:] == [f"{rows['Lion'][key]:.1e}" for key in ("difference", "relative", "rounding")]
    for name, row in rows.items():
        assert f"\n{name}: {row['how'][:20]}" in out
    assert f"{len(rows) - 1} of {len(rows)} are equal up to rounding" in out


@pytest.mark.parametrize("name", [name for name, member in MEMBERS.items() if member.equal])
def test_another_beta_is_another_optimizer(name: str) -> None:
    beta1, beta2 = MEMBERS[name].settings["betas"]
    row = found(MEMBERS[name], betas=(beta1 + 0.01 if beta1 < 0.98 else beta1 - 0.01, beta2))
    assert not row.equal
    assert row.found.relative > 1e-3


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("SGD", {"weight_decay": 0.11}),
        ("momentum SGD", {"lr": 0.2}),
        ("AdamW", {"betas": (0.9, 0.98)}),
        ("Shampoo", {"factors": "averaged", "betas": (0.0, 0.99)}),
        ("Lion", {"gamma": 0.1}),
        ("Lion", {"first_step": "paper", "last_grad": "full"}),
        ("Adan", {"eps": 1e-6}),
        ("STORM", {"first_step": "paper"}),
        ("STORM", {"gamma": 0.99}),
        ("SVRG", {"gamma": 0.99}),
        ("SVRG", {"estimator": "none"}),
        ("block mean", {"reference_interval": 3}),
        ("block mean", {"gamma": 0.99}),
        ("MARS-AdamW", {"clip": "none"}),
        ("MARS-AdamW", {"first_step": "official"}),
        ("MARS-Lion exact", {"clip": "none"}),
        ("MARS-Shampoo exact", {"gamma": 0.03}),
    ],
)
def test_another_setting_is_another_optimizer(name: str, settings: dict[str, Any]) -> None:
    assert not found(MEMBERS[name], **settings).equal


def test_the_exact_form_is_not_the_approximate_one() -> None:
    exact = MEMBERS["MARS-AdamW exact"]
    assert not found(replace(exact, own=MEMBERS["MARS-AdamW"].own)).equal


def test_a_member_that_is_wrong_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    wrong = replace(MEMBERS["Lion"], settings=MEMBERS["Lion"].settings | {"weight_decay": 0.0})
    related = replace(MEMBERS["SGD"], equal=False)
    monkeypatch.setattr(view, "members", lambda: [wrong, related, MEMBERS["Adam"]])
    assert view.main([f"--updates={UPDATES}"]) == 1
    lines = capsys.readouterr().out.split("\n")
    assert "Lion: NOT EQUAL, which it should be." in lines
    assert "SGD: equal, which it should not be." in lines
    assert not any(line.startswith("Adam: NOT") for line in lines)

    assert view.main([f"--updates={UPDATES}", "--dtype=float32"]) == 0
    assert "NOT EQUAL" not in capsys.readouterr().out


def test_a_nan_is_not_equal() -> None:
    row = found(replace(MEMBERS["SGD"], own=Rule(lambda now, state: (now.x * math.nan, state))))
    assert math.isnan(row.found.difference)
    assert not row.equal


def test_what_rounding_can_make_is_a_few_roundings_of_a_still_weight() -> None:
    """With lr 0 nothing moves, and the nudged weights stay 4 eps of the largest weight away: 1, of layer norms."""
    still = Member("still", {"lr": 0.0}, "torch SGD", lambda parameters: torch.optim.SGD(parameters, lr=0.0), how="")
    assert compare(still, 2, torch.float64).rounding == 4 * torch.finfo(torch.float64).eps
    assert compare(still, 2, torch.float32).rounding == 4 * torch.finfo(torch.float32).eps


def test_members_for_matrices_leave_the_rest_to_adamw() -> None:
    """An implementation of its own that leaves the matrices where they are: only the others move, and as AdamW does."""

    def stand_still(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        model = small_gpt(torch.float64, 1)
        assert [p.shape for p in parameters] == [p.shape for p in model.transformer.h.parameters() if p.dim() == 2]
        return torch.optim.SGD(parameters, lr=0.0)

    still = Member("still", MEMBERS["Muon"].settings | {"lr": 0.0}, "torch SGD", stand_still, how="", matrices=True)
    comparison = compare(still, UPDATES, torch.float64)
    assert comparison.change > 1e-3
    assert comparison.relative < 1e-11


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--updates=1", "--updates: 1 must be 2 or more"),
        ("--updates=many", "--updates: invalid int value: 'many'"),
        ("--seed=-1", "--seed: -1 must be from 0 to 2^32 - 1"),
        ("--dtype=float16", "--dtype: invalid choice: 'float16'"),
        ("--json=/nowhere/view.json", "--json: there is no folder /nowhere"),
        ("--update=3", "unrecognized arguments: --update=3"),
    ],
)
def test_bad_arguments(argument: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert view.main([argument]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error


def test_the_batches_are_of_text() -> None:
    batches = text_batches(DATA + 1, seed=3)
    assert batches[DATA] is batches[0]
    inputs, targets = batches[1]
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    assert bytes(inputs[0].tolist()) in Path(argparse.__file__).read_bytes()
