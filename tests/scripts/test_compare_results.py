"""scripts/compare.py --json and --csv: what other programs read."""

import csv
import json
import math
from pathlib import Path
from typing import Any

import pytest

from scripts import compare
from scripts.comparison.results import as_csv
from tests.conftest import ROOT
from tests.scripts.written_runs import write_run


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    """adamw ends at 2.0 and 2.2 (seeds 1 and 2), muon at 1.8 and 1.9, and has 2.1 after 13.6K tokens of 20K."""
    evals = {"adamw": [(2.5, 2.0), (2.5, 2.2)], "muon": [(2.2, 1.8), (2.2, 1.9)]}
    return [
        str(write_run(tmp_path / f"{name}-{seed}", [(0, 5.0), (10, mid), (20, end)], name, seed=seed))
        for name, runs in evals.items()
        for seed, (mid, end) in enumerate(runs, 1)
    ]


def results(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    assert compare.main([*arguments, "--json", "-"]) == 0

    def no_constant(name: str) -> None:
        pytest.fail(f"{name} is no JSON")

    return json.loads(capsys.readouterr().out, parse_constant=no_constant)


def test_json(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    values = results(folders, capsys)
    assert [run["name"] for run in values["runs"]] == ["adamw-1", "adamw-2", "muon-1", "muon-2"]
    run = values["runs"][1]
    assert (run["optimizer"], run["seed"], run["final_loss"], run["best_loss"]) == ("adamw", 2, 2.2, 2.2)
    assert (run["tokens"], run["seconds"], run["updates"], run["finished"]) == (20_000, 10, 20, True)
    assert run["final_bits_per_byte"] == pytest.approx(2.2 / math.log(2) / 2)
    adamw, muon = values["groups"]
    assert adamw["runs"] == ["adamw-1", "adamw-2"]
    assert adamw["seeds"] == [1, 2]
    assert adamw["final_loss"] == pytest.approx({"mean": 2.1, "sd": 0.2 / math.sqrt(2), "n": 2})
    slower, faster = values["speed_ups"]
    assert (slower["name"], slower["against"], slower["speed_up"]) == (adamw["name"], muon["name"], None)
    # muon's mean goes from 2.2 at 10K to 1.85 at 20K tokens: 2.1 is 0.1 / 0.35 of the way.
    assert faster["tokens"] == pytest.approx(10_000 + 10_000 * 0.1 / 0.35)
    assert faster["speed_up"] == pytest.approx(20_000 / faster["tokens"])
    assert faster["time_speed_up"] == pytest.approx(faster["speed_up"])
    assert faster["goal"] == "final loss of against"
    paired = {(row["name"], row["against"]): row for row in values["paired"]}
    assert paired[muon["name"], adamw["name"]]["mean"] == pytest.approx(-0.25)
    assert paired[adamw["name"], muon["name"]]["mean"] == pytest.approx(0.25)
    assert values["paper"] == []
    assert values["milestones"] == {}


def test_given_losses(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    values = results([*folders, "--loss", "2.5", "--loss", "1.0"], capsys)
    assert [(row["loss"], row["goal"]) for row in values["speed_ups"]] == [(2.5, "given"), (1.0, "given")] * 2
    assert values["runs"][0]["tokens_to_loss"] == {"2.5": 10_000, "1": None}
    assert values["groups"][0]["tokens_to_loss"] == {"2.5": 10_000, "1": None}


def test_close_losses_keep_their_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = write_run(tmp_path / "a", [(0, 5.0), (10, 2.0)])
    losses = [f"--loss={loss}" for loss in ("3", "3.0000001", "3.0000002")]
    assert list(results([str(run), *losses], capsys)["runs"][0]["tokens_to_loss"]) == ["3", "3.0000001", "3.0000002"]


def test_milestones_and_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evals, data = [(0, 9.0), (10_000, 3.2)], {"val_tokens": 4_434_897}
    run = write_run(tmp_path / "a", evals, train_rows=0, tokens_per_update=491_520, data=data)
    values = results([str(run), "--paper", "small"], capsys)
    assert values["milestones"] == {"5B": 4_915_200_000}
    assert "milestones,5B,,tokens,4915200000" in as_csv(values).splitlines()
    assert values["runs"][0]["loss_at"] == {"5B": 3.2}
    assert values["groups"][0]["loss_at"] == {"5B": {"mean": 3.2, "sd": None, "n": 1}}
    assert values["paper"][0]["difference"]["5B"] == pytest.approx(0.007)


def test_what_is_not_a_number_is_null(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    diverged = write_run(tmp_path / "a", [(0, 5.0), (10, math.nan)])
    blind = write_run(tmp_path / "b", [], train_rows=3, max_iters=10)
    values = results([str(diverged), str(blind)], capsys)
    assert values["runs"][0]["final_loss"] is None
    assert values["runs"][0]["best_loss"] == 5.0
    assert values["runs"][1]["final_loss"] is values["groups"][1]["final_loss"] is None
    assert values["speed_ups"] == []


def test_only_data_goes_to_standard_output(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([*folders, "--csv", "-"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("list,name,against,key,value\nruns,adamw-1,,folder,")
    assert err == ""
    assert not list(Path(folders[0]).parent.glob("comparison*"))


def test_csv_has_every_number_of_the_json(folders: list[str], tmp_path: Path) -> None:
    assert compare.main([*folders, "--json", "--csv", str(tmp_path / "deep" / "x.csv")]) == 0
    with (tmp_path / "deep" / "x.csv").open(newline="") as file:
        lines = {(row["list"], row["name"], row["against"], row["key"]): row["value"] for row in csv.DictReader(file)}
    values = json.loads((tmp_path / "comparison.json").read_text())
    muon = values["groups"][1]
    assert float(lines["groups", muon["name"], "", "final_loss.sd"]) == muon["final_loss"]["sd"]
    assert lines["groups", muon["name"], "", "seeds"] == "1 2"
    assert float(lines["runs", "adamw-2", "", "final_loss"]) == 2.2
    assert float(lines["speed_ups", muon["name"], values["groups"][0]["name"], "speed_up"]) > 1
    assert lines["speed_ups", values["groups"][0]["name"], muon["name"], "speed_up"] == ""
    assert float(lines["paired", muon["name"], values["groups"][0]["name"], "mean"]) == pytest.approx(-0.25)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--json", "x.txt"], "x.txt must end in .json"),
        (["--csv", "x.json"], "x.json must end in .csv"),
        (["--html", "x"], "x must end in .html"),
        (["--json", "-", "--csv", "-"], "cannot both go to standard output"),
        (["--loss", "two"], "argument --loss"),
        (["--loss", "nan"], "argument --loss"),
        (["--out", "x.jpg"], "x.jpg must end in .png, .svg or .pdf"),
    ],
)
def test_mistakes_are_one_line(
    folders: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.main([*folders, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err
    assert err.count("\n") == 1


def test_a_run_taken_for_a_file_is_told(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert compare.main([folders[0], "--json", folders[1]]) == 2
    assert "RUN arguments stand before it" in capsys.readouterr().err


def test_every_key_is_documented(folders: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    values = results([*folders, "--loss", "2.5", "--paper", "small"], capsys)
    text = (ROOT / "docs" / "comparing.md").read_text()
    for part in ("runs", "groups", "speed_ups", "paired", "paper"):
        for key in [part, *values[part][0]]:
            assert f"`{key}`" in text, key
