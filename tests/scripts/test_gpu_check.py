"""scripts/gpu_check.sh: its parts on a CPU, and what becomes of one that fails, is missing or takes too long. Never
how fast anything is."""

import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from scripts import gpu_check
from scripts.gpucheck import pair
from scripts.gpucheck.parts import PARTS, Part, counted
from scripts.gpucheck.resume import compare
from scripts.gpucheck.running import PartFailed, Work
from tests.conftest import ENVIRONMENT, ROOT


def run_parts_of(monkeypatch: pytest.MonkeyPatch, out: Path, *parts: Part, minutes: str = "1") -> tuple[int, Any]:
    """The script in this process with other parts. Returns its status and what it wrote."""
    monkeypatch.setattr(gpu_check, "PARTS", parts)
    status = gpu_check.main(["--device=cpu", f"--minutes={minutes}", str(out)])
    return status, json.loads(out.read_text())


def succeeds(work: Work) -> None:
    work.python(("-c", "print('well')"))
    work.figures["found"] = 7


def fails(work: Work) -> None:
    work.figures["found"] = "something before"
    work.python(("-c", "print('first'); print('the reason'); raise SystemExit(3)"))


def breaks(work: Work) -> None:
    work.figures["rows"]["none"] = 1


def is_missing(work: Work) -> None:
    work.needs("scripts/of_another_version.py")


def test_what_becomes_of_a_part_is_recorded_and_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = (fails, breaks, is_missing, succeeds)
    parts = [Part(run.__name__, 10, run) for run in runs]
    status, written = run_parts_of(monkeypatch, tmp_path / "out.json", *parts)
    assert (status, written["succeeded"]) == (1, False)
    assert (written["device"], written["machine"]["torch"]) == ("cpu", torch.__version__)
    by_name = {part["name"]: part for part in written["parts"]}
    assert {name: part["outcome"] for name, part in by_name.items()} == {
        "fails": "failed",
        "breaks": "failed",
        "is_missing": "absent",
        "succeeds": "succeeded",
    }
    assert by_name["fails"]["message"].startswith("status 3 of: python -c ")
    assert by_name["fails"]["message"].endswith("first\nthe reason")
    assert by_name["fails"]["figures"] == {"found": "something before"}
    assert by_name["breaks"]["message"] == "KeyError: 'rows'"
    assert "no scripts/of_another_version.py" in by_name["is_missing"]["message"]
    assert by_name["succeeds"]["commands"] == ["""python -c 'print('"'"'well'"'"')'"""]
    assert by_name["succeeds"]["figures"] == {"found": 7}
    printed = capsys.readouterr().out
    assert all(part.name in printed for part in parts)


def test_success_of_all_is_success(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, written = run_parts_of(monkeypatch, tmp_path / "out.json", Part("succeeds", 10, succeeds))
    assert (status, written["succeeded"]) == (0, True)


def test_a_part_that_takes_too_long_is_ended_with_all_that_it_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pid = tmp_path / "pid"
    endless = f"import subprocess, sys, time; print('begun', flush=True); p = subprocess.Popen(['sleep', '600']); \
open({str(pid)!r}, 'w').write(str(p.pid)); time.sleep(600)"
    monkeypatch.setattr(gpu_check, "SPARE", 57.0)  # of 60 s
    parts = (Part("endless", 10, lambda work: void(work.python(("-c", endless)))), Part("after", 0.001, succeeds))
    start = time.monotonic()
    status, written = run_parts_of(monkeypatch, tmp_path / "out.json", *parts)
    assert time.monotonic() - start < 30
    assert status == 1
    first, second = written["parts"]
    assert first["outcome"] == "cut off"
    assert first["message"].startswith("its time was over during: python -c ")
    assert first["message"].endswith("begun")
    assert first["seconds"] >= first["limit"] - 0.1
    assert second["outcome"] == "cut off", "no time was left"
    time.sleep(0.1)
    assert not Path(f"/proc/{pid.read_text()}").exists() or state_of(pid.read_text()) == "Z"


def void(_: object) -> None:
    """Drops a value."""


def state_of(pid: str) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def test_time_that_a_part_leaves_goes_to_the_next(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = (Part("one", 10, succeeds), Part("two", 10, succeeds), Part("three", 28, succeeds))
    _, written = run_parts_of(monkeypatch, tmp_path / "out.json", *parts)
    one, two, three = written["parts"]
    assert one["limit"] == pytest.approx(10, abs=8)
    assert two["limit"] == pytest.approx(one["limit"] - one["seconds"] + 10, abs=1)
    assert three["limit"] == pytest.approx(two["limit"] - two["seconds"] + 28, abs=1)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device=cpu", "--parts=pair,none"], "'none' is none of training, optimizers, pair, resume, tests"),
        (["--device=cpu", "--minutes=0"], "--minutes: 0 must be 1 or more"),
        (["--device=tpu"], "--device"),
        (["--device=cpu", "/nowhere/out.json"], "there is no folder /nowhere"),
    ],
)
def test_mistakes_end_in_a_line(arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(arguments) == 2
    errors = capsys.readouterr().err
    assert errors.startswith("error: ")
    assert errors.count("\n") == 1
    assert words in errors


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_without_a_gpu_it_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main(["--parts=tests"]) == 2
    assert "finds no CUDA device" in capsys.readouterr().err


# --- the parts' own reckoning ---


def test_the_pair_s_data_has_gpt2_s_tokens_and_the_entropy_that_it_says(tmp_path: Path) -> None:
    entropy = pair.write_data(tmp_path / "data", "cpu")
    train, val = (np.fromfile(tmp_path / "data" / f"{name}.bin", dtype="<u2") for name in ("train", "val"))
    assert (len(train), len(val)) == (20_000, 1_000)
    assert max(train.max(), val.max()) < 50257
    shares = np.bincount(train, minlength=50257) / len(train)
    assert np.sort(shares)[-10:] == pytest.approx(np.sort(1 / np.arange(3, 50260) / 9.9)[-10:], rel=0.4)
    assert 7 < entropy < math.log(50257)


@pytest.mark.parametrize(
    ("rate", "seconds_left", "expected"),
    [
        (500_000, 180, (64, 200)),  # as many sequences as allowed
        (200_000, 180, (48, 200)),
        (60_000, 180, (16, 198)),  # not even one micro-batch in every update: fewer of them
    ],
)
def test_the_pair_s_length_fits_into_its_time(rate: float, seconds_left: float, expected: tuple[int, int]) -> None:
    beside = 25.0 / pair.WARM_START
    trial_tokens = 15 * 16 * 1024
    work = Work("cuda", Path(), time.monotonic() + seconds_left, {})
    trial = {"tokens_per_second": rate, "seconds": beside + trial_tokens / rate}
    sequences, updates = pair.choose_length(work, trial, 16)
    assert sequences == expected[0]
    assert updates == pytest.approx(expected[1], abs=3)
    assert 2 * (25.0 + sequences * 1024 * updates / rate) < seconds_left


def test_too_slow_a_gpu_is_no_pair() -> None:
    work = Work("cuda", Path(), time.monotonic() + 30, {})
    with pytest.raises(PartFailed, match="no time for 10 updates"):
        pair.choose_length(work, {"tokens_per_second": 1000.0, "seconds": 260.0}, 16)


def test_a_single_bit_is_a_difference(tmp_path: Path) -> None:
    weight = torch.linspace(-1, 1, 9)
    other = weight.clone()
    other.view(torch.int32)[3] += 1
    for name, value in (("one", weight), ("same", weight.clone()), ("other", other)):
        (tmp_path / name / "checkpoints").mkdir(parents=True)
        torch.save({"model": {"w": value}}, tmp_path / name / "checkpoints" / "iter-00000006.pt")
        (tmp_path / name / "metrics.jsonl").write_text('{"iter": 1, "train/loss": 2.5}\n')
    assert compare(tmp_path / "one", tmp_path / "same")["equal"]
    found = compare(tmp_path / "one", tmp_path / "other")
    assert not found["equal"]
    assert 0 < found["largest_difference_of_weights"] < 1e-6
    assert found["largest_difference_of_losses"] == 0


def test_results_of_pytest_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    ends = ["", "<skipped/>", "<failure/>", "<error/>", ""]
    cases = [f'<testcase classname="m" name="t{k}" time="{k}.5">{end}</testcase>' for k, end in enumerate(ends)]
    path.write_text(f"<testsuites><testsuite>{''.join(cases)}</testsuite></testsuites>")
    figures = counted(path)
    assert {key: figures[key] for key in ("passed", "skipped", "failed", "errors")} == {
        "passed": 2,
        "skipped": 1,
        "failed": 1,
        "errors": 1,
    }
    assert figures["not_passed"] == ["m::t2", "m::t3"]
    assert next(iter(figures["longest"])) == "t4"


# --- all of it, small ---


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_whole_of_it_on_a_cpu(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ("--device", "cpu", "--minutes", "10", "out.json")
    done = subprocess.run(
        ["bash", str(ROOT / "scripts" / "gpu_check.sh"), *options],
        capture_output=True, text=True, timeout=560, cwd=tmp_path, env=ENVIRONMENT | {"PYTHON": sys.executable},
    )  # fmt: skip
    written = json.loads(out.read_text())
    assert (done.returncode, done.stderr, written["succeeded"]) == (0, "", True), done.stdout
    assert [part["name"] for part in written["parts"]] == [part.name for part in PARTS]
    training, optimizers, pairs, resume, tests = (part["figures"] for part in written["parts"])
    assert training["ratios"]["tokens_per_second"] > 0
    assert [row["method"] for row in optimizers["rows"]][:2] == ["adamw", "mars-adamw"]
    for run in (pairs["adamw"], pairs["mars-adamw"]):
        assert run["tokens_per_second"] > 0
        assert run["val_loss"][-1] < run["val_loss"][0]
        assert run["planned"] > 0
        assert run["peak_allocated"] is None, "measured on a GPU only"
    rates = [pairs[name]["tokens_per_second"] for name in ("mars-adamw", "adamw")]
    assert pairs["mars_time_to_adamw_time"] == pytest.approx(rates[1] / rates[0])
    assert resume["deterministic"]["equal"]
    assert resume["deterministic"]["updates"] == [6, 6]
    skipped = 0 if torch.cuda.is_available() else tests["skipped"]
    assert skipped or tests["passed"]
    assert not list(Path(os.environ.get("TMPDIR", "/tmp")).glob("gpu_check-*")), "its runs are gone"
