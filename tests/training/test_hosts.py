"""Two hosts, each a network namespace of this machine with a name, mounts and an address of its own, and a torchrun on
each without Slurm; and a host without any network."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import ENVIRONMENT, ROOT, Outcome, Train
from tests.helpers import write_tokens

pytestmark = pytest.mark.slow

ADDRESSES = ("10.231.77.1", "10.231.77.2")
SETTINGS = ("--optimizer=mars-adamw", "--max_iters=8")


class Hosts:
    """Two namespaces with a cable between them."""

    def __init__(self) -> None:
        self.names = [f"mars{os.getpid()}{side}" for side in "ab"]
        self.cables = [f"m{os.getpid()}{side}"[-15:] for side in "ab"]
        for name in self.names:
            _ip("netns", "add", name)
        _ip("link", "add", self.cables[0], "type", "veth", "peer", "name", self.cables[1])
        for name, cable, address in zip(self.names, self.cables, ADDRESSES, strict=True):
            _ip("link", "set", cable, "netns", name)
            _ip("-n", name, "address", "add", f"{address}/24", "dev", cable)
            _ip("-n", name, "link", "set", cable, "up")
            _ip("-n", name, "link", "set", "lo", "up")

    def close(self) -> None:
        for name in self.names:
            subprocess.run(["ip", "netns", "delete", name], check=False)

    def start(self, number: int, before: str, arguments: list[str]) -> subprocess.Popen[str]:
        """torchrun with one process on a host, after a shell command there."""
        shell = f'hostname host{number + 1}; {before or ":"}; exec "$@"'
        place = ["ip", "netns", "exec", self.names[number], "unshare", "--uts", "sh", "-c", shell, "sh"]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", f"--node_rank={number}"]
        torchrun += ["--nproc_per_node=1", f"--master_addr={ADDRESSES[0]}", "--master_port=29561"]
        return subprocess.Popen(
            [*place, *torchrun, str(ROOT / "train.py"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=ENVIRONMENT | {"GLOO_SOCKET_IFNAME": self.cables[number]},
        )

    def run(
        self, run_train: Train, *overrides: str, out: str, second: tuple[str, ...] = (), before_second: str = ""
    ) -> list[Outcome]:
        """A run of both; `second` and `before_second` are for the second host alone."""
        arguments = [str(run_train.config), f"--out_dir={run_train.folder(out)}", *overrides]
        started = [self.start(0, "", arguments), self.start(1, before_second, [*arguments, *second])]
        try:
            outputs = [process.communicate(timeout=60) for process in started]
        finally:
            for process in started:
                process.kill()
        return [
            Outcome(process.returncode, *output, run_train.folder(out))
            for process, output in zip(started, outputs, strict=True)
        ]


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def hosts() -> Iterator[Hosts]:
    """The two hosts, where this machine can be made to have them."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("unshare") is None:
        pytest.skip("network namespaces need root, and the programs ip (Debian: apt install iproute2) and unshare")
    try:
        made = Hosts()
    except subprocess.CalledProcessError as error:
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    yield made
    made.close()


def test_two_hosts_compute_what_one_does(hosts: Hosts, run_train: Train) -> None:
    one = run_train.fresh(*SETTINGS, out="one", processes=2)
    both = hosts.run(run_train, *SETTINGS, out="two")
    assert [outcome.status for outcome in both] == [0, 0], both[0].stderr + both[1].stderr
    for key in ("train/loss", "val/loss"):
        np.testing.assert_allclose(both[0].series(key), one.series(key), rtol=0, atol=1e-6)
    assert both[1].stdout == "", "the main process speaks for all"


@pytest.mark.parametrize("mistake", ["other tokens", "no tokens", "other code", "other settings"])
def test_a_host_that_differs_is_named(
    hosts: Hosts, run_train: Train, dataset: Path, tmp_path: Path, mistake: str
) -> None:
    other, empty, model = tmp_path / "other", tmp_path / "empty", tmp_path / "model.py"
    write_tokens(other, np.arange(5000) % 64, np.arange(1000) % 64)
    empty.mkdir()
    model.write_text((ROOT / "model.py").read_text() + "# another version\n")
    before, second, words = {
        "other tokens": (f"mount --bind {other} {dataset}", (), "host host2 has other tokens"),
        "no tokens": (f"mount --bind {empty} {dataset}", (), "on host host2: "),
        "other code": (f"mount --bind {model} {ROOT}/model.py", (), "host host2 has other code"),
        "other settings": ("", ("--learning_rate=2e-2",), "host host2 has learning_rate=0.02, host host1 0.01"),
    }[mistake]
    both = hosts.run(run_train, *SETTINGS, out="run", second=second, before_second=before)
    for outcome in both:
        assert outcome.status != 0
        errors = [line for line in outcome.stderr.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1, outcome.stderr
        assert words in errors[0]
    assert not (run_train.folder("run") / "metrics.jsonl").exists()


@pytest.mark.parametrize("processes", [None, 2])
def test_a_run_needs_no_network(hosts: Hosts, run_train: Train, processes: int | None) -> None:
    """Not even for wandb, which records offline."""
    torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"] if processes else []
    command = [sys.executable, *torchrun, str(ROOT / "train.py"), str(run_train.config), "--wandb_log=true"]
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", 'ip link set lo up; exec "$@"', "sh", *command],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr
    assert "recording offline" in done.stdout
    assert list((run_train.folder("run") / "wandb").glob("offline-run-*/*.wandb"))
