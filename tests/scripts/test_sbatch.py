"""scripts/train.sbatch on a real Slurm of two nodes."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conftest import ROOT, Train
from tests.scripts.cluster import Cluster, what_is_missing

SCRIPT = ROOT / "scripts" / "train.sbatch"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Two nodes with one CPU each."""
    if problem := what_is_missing():
        pytest.skip(f"no Slurm here: {problem}")
    cluster = Cluster(tmp_path_factory.mktemp("slurm"))
    yield cluster
    cluster.stop()


class Submit:
    """sbatch with the tiny config."""

    def __init__(self, cluster: Cluster, run_train: Train, logs: Path) -> None:
        self.cluster, self.run_train, self.logs = cluster, run_train, logs

    def __call__(self, *arguments: str, out: str, options: tuple[str, ...] = (), configs: tuple[Path, ...] = ()) -> str:
        paths = map(str, configs or [self.run_train.config])
        settings = [*paths, f"--out_dir={self.run_train.folder(out)}", *arguments]
        log = f"--output={self.logs / out}.log"
        command = ["sbatch", "--parsable", log, *options, str(SCRIPT), *settings]
        return self.cluster.call(*command, cwd=ROOT, PYTHON=sys.executable)

    def log(self, out: str) -> str:
        """What the job printed."""
        return (self.logs / f"{out}.log").read_text()

    def series(self, out: str, key: str) -> dict[int, float]:
        """Of metrics.jsonl, by update."""
        lines = (self.run_train.folder(out) / "metrics.jsonl").read_text().splitlines()
        return {row["iter"]: row[key] for row in map(json.loads, lines) if key in row}

    def wait_for_update(self, out: str, update: int) -> None:
        """Waits until the run has done an update, of which it writes a row."""
        rows = self.run_train.folder(out) / "metrics.jsonl"
        self.cluster.wait(lambda: rows.exists() and f'"iter": {update},' in rows.read_text(), 120)


@pytest.fixture
def submit(cluster: Cluster, run_train: Train, tmp_path: Path) -> Submit:
    """Submits jobs that log to `tmp_path`."""
    return Submit(cluster, run_train, tmp_path)


# Until Slurm has started a job again, an update takes a tenth of a second and more, on a machine of any speed.
SLOW_AT_FIRST = """
base = "tiny.py"
import os as __os, sys as __sys, time as __time
if __sys.argv[0].endswith("train.py") and __os.environ.get("SLURM_RESTART_COUNT", "0") == "0":
    from model import GPT as __GPT
    def __slowly(model, *inputs, __forward=__GPT.forward, **named):
        __time.sleep(0.1)
        return __forward(model, *inputs, **named)
    __GPT.forward = __slowly
"""


@pytest.mark.timeout(600)
@pytest.mark.slow
def test_two_nodes_train_one_run_over_a_time_limit(submit: Submit, run_train: Train, tmp_path: Path) -> None:
    """The limit leads into the queue, and on to the end.

    Slurm looks at time limits every 30 s, and sends the signal of `--signal=USR1@120` when the limit is nearer than
    150 s. So that the test does not wait longer, the limit comes near when the run has begun.
    """
    (tmp_path / "slow.py").write_text(SLOW_AT_FIRST)
    settings = ("--optimizer=mars-adamw", "--dropout=0.1", "--max_iters=900", "--eval_interval=500")
    settings = (*settings, "--checkpoint_interval=1000", "--log_interval=7")
    options = ("--nodes=2", "--time=30")
    number = submit(*settings, out="job", options=options, configs=(tmp_path / "slow.py",))
    submit.wait_for_update("job", 7)
    minutes = int(submit.cluster.call("squeue", "-h", "-j", number, "-o", "%M").split(":")[0])
    submit.cluster.call("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes + 2}")
    submit.cluster.wait(lambda: submit.cluster.job(number)["Restarts"] == "1", 150)
    submit.cluster.call("scontrol", "update", f"JobId={number}", "TimeLimit=30")
    job = submit.cluster.wait_for_job(number)
    assert (job["JobState"], job["Restarts"]) == ("COMPLETED", "1"), submit.log("job")
    assert submit.log("job").count("on 2 node(s) of 1 process(es) with 1 thread(s), node1:") == 2
    assert "2 processes" in submit.log("job")
    assert submit.log("job").count("back into the queue") == 1
    straight = run_train.fresh(*settings, out="straight", processes=2)
    assert straight.status == 0
    for key in ("train/loss", "val/loss"):
        assert submit.series("job", key) == submit.series("straight", key)


@pytest.mark.slow
def test_two_jobs_at_once_do_not_meet(submit: Submit, run_train: Train, tmp_path: Path) -> None:
    """One of them a task of an array, which takes its config."""
    long = "--max_iters=60"
    numbers = [
        submit("--seed=1", long, out="job1", options=("--nodes=1",)),
        submit("--seed=2", long, out="job2", options=("--array=1",), configs=(tmp_path / "gone.py", run_train.config)),
    ]
    for number in numbers:
        assert submit.cluster.wait_for_job(number)["JobState"] == "COMPLETED"
    ports = [re.search(r"node\d:(\d+)", submit.log(f"job{seed}")) for seed in (1, 2)]
    assert ports[0] is not None
    assert ports[1] is not None
    assert ports[0].group(1) != ports[1].group(1)


@pytest.mark.slow
def test_jobs_that_fail_or_are_cancelled_stay_out_of_the_queue(submit: Submit) -> None:
    cancelled = submit("--max_iters=1000000", "--eval_interval=0", out="cancelled")
    failed = submit("--learning_rate=1e30", "--warmup_iters=0", "--max_iters=50", out="failed")
    submit.wait_for_update("cancelled", 5)
    submit.cluster.call("scancel", cancelled)
    job = submit.cluster.wait_for_job(cancelled)
    assert (job["JobState"], job["Restarts"]) == ("CANCELLED", "0"), submit.log("cancelled")
    status = json.loads((submit.run_train.folder("cancelled") / "status.json").read_text())
    assert (status["state"], status["reason"]) == ("stopped", "SIGTERM")

    job = submit.cluster.wait_for_job(failed)
    assert (job["JobState"], job["Restarts"]) == ("FAILED", "0"), submit.log("failed")
    assert "error: loss or gradient norm was not finite" in submit.log("failed")
    assert "failed; " in submit.log("failed")


@pytest.mark.slow
def test_mistakes_end_in_a_line(submit: Submit, tmp_path: Path) -> None:
    """All jobs at once, on the nodes in turn."""
    mistakes: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[Path, ...], str]] = {
        "config": ((), (), (tmp_path / "gone.py",), "gone.py"),
        "key": (("--learning_rte=1",), (), (), "learning_rate"),
        "python": ((), ("--export=ALL,PYTHON=/usr/bin/false",), (), "/usr/bin/false has no torch"),
        "array": ((), ("--array=3",), (), "task 3 of the array has no config"),
    }
    numbers = {
        name: submit(*arguments, out=name, options=options, configs=configs)
        for name, (arguments, options, configs, _) in mistakes.items()
    }
    for name, number in numbers.items():
        job = submit.cluster.wait_for_job(number)
        assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0"), name
        errors = submit.log(name).splitlines()
        assert len(errors) == 1, name
        assert errors[0].startswith("error: ")
        assert mistakes[name][-1] in errors[0]


@pytest.mark.slow
def test_a_pair_is_submitted_and_compared(submit: Submit, dataset: Path, tmp_path: Path) -> None:
    """In a copy of the checkout, since the configs' own folders are used."""
    checkout = tmp_path / "checkout"
    for name in ("configs", "data", "optim", "scripts", "training"):
        shutil.copytree(ROOT / name, checkout / name, ignore=shutil.ignore_patterns("*.bin", "__pycache__"))
    for name in ("train.py", "model.py"):
        shutil.copy(ROOT / name, checkout / name)
    small = (
        "--vocab_size=64",
        "--n_layer=1",
        "--n_embd=32",
        "--block_size=16",
        "--max_iters=8",
        f"--dataset={dataset}",
    )
    said = submit.cluster.call(
        *("bash", "scripts/compare.sbatch", "stdlib", "--time=5", "--", *small), cwd=checkout, PYTHON=sys.executable
    )
    pair, after = re.findall(r"job (\d+)", said)
    assert submit.cluster.wait_for_job(after)["JobState"] == "COMPLETED", said
    assert submit.cluster.job(f"{pair}_1")["JobState"] == "COMPLETED"
    assert (checkout / "runs" / "compare_stdlib.png").stat().st_size > 1000
    table = (checkout / f"slurm-compare-stdlib-{after}.out").read_text()
    assert "stdlib_adamw" in table
    assert "stdlib_mars" in table


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({}, "sbatch scripts/train.sbatch"),
        ({"SLURM_JOB_ID": "7"}, "scontrol is not on the PATH"),
        ({"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": "/", "with": "scontrol"}, "/ has no train.py"),
        ({"SLURM_JOB_ID": "7", "SLURM_SUBMIT_DIR": str(ROOT), "with": "scontrol"}, "no config"),
    ],
)
def test_outside_a_job_or_without_its_tools(tmp_path: Path, variables: dict[str, str], words: str) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("bash", "hostname", "cat", "env", variables.pop("with", "bash")):
        link = programs / name
        link.unlink(missing_ok=True)
        link.symlink_to(shutil.which(name) or "/bin/true")
    done = subprocess.run(
        [shutil.which("bash") or "bash", str(SCRIPT), *(() if "SLURM_SUBMIT_DIR" in variables else ("a.py",))],
        capture_output=True,
        text=True,
        env={"PATH": str(programs)} | variables,
    )
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert done.stderr.startswith("error: ")
    assert words in done.stderr
