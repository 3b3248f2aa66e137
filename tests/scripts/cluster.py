"""A real Slurm of two nodes on this one machine, for tests of the sbatch scripts."""

import os
import pwd
import shutil
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

NODES = ("node1", "node2")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged", "munge")

ENDS = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")

CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
AuthType=auth/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
ReturnToService=2
JobRequeue=1
KillWait=30
SlurmUser=root
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmdSpoolDir={folder}/spool.%n
StateSaveLocation={folder}/state
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
NodeName=node1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1 State=UNKNOWN
NodeName=node2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1 State=UNKNOWN
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def what_is_missing() -> str | None:
    """Why there can be no cluster here; None where there can."""
    missing = [name for name in PROGRAMS if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not installed (Debian: apt install slurm-wlm munge)"
    return None if os.geteuid() == 0 else "only root can start Slurm's daemons"


class Cluster:
    """The daemons, from construction to `stop`.

    Args:
        folder: for its files; must be new.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.chmod(0o755)
        for name in ("state", *(f"spool.{node}" for node in NODES)):
            (folder / name).mkdir()
        _start_munge()
        hosts = Path("/etc/hosts")
        for node in NODES:
            if node not in hosts.read_text().split():
                with hosts.open("a") as file:
                    file.write(f"127.0.0.1 {node}\n")
        text = CONFIGURATION.format(host=socket.gethostname(), folder=folder, ports=_free_ports(3))
        (folder / "slurm.conf").write_text(text)
        self.environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self.call("slurmctld", "-c")
        for node in NODES:
            self.call("slurmd", "-N", node, "-c")
        self.wait(lambda: self.call("sinfo", "-h", "-o", "%D %T").split() == ["2", "idle"], 30)

    def call(self, *command: str, cwd: Path | None = None, **variables: str) -> str:
        """Runs a command of Slurm's. Returns what it prints."""
        environment = self.environment | variables
        done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=cwd, timeout=60)
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        """What scontrol knows of a job."""
        text = self.call("scontrol", "--oneliner", "show", "job", number)
        return dict(part.split("=", 1) for part in text.split() if "=" in part)

    def wait_for_job(self, number: str, seconds: float = 240) -> dict[str, str]:
        """Waits for the end of a job; one put back into the queue starts again after seconds, not two minutes.

        Not at once: a credential is good for one start, Slurm tells starts apart by their second, and fails a job that
        starts again within it.
        """
        seen: list[str] = []
        hurried: set[str] = set()

        def ended() -> bool:
            job = self.job(number)
            seen.append(job["JobState"])
            if job["JobState"] == "PENDING" and job["Reason"] == "BeginTime" and job["Restarts"] not in hurried:
                hurried.add(job["Restarts"])
                with suppress(AssertionError):  # it may have started meanwhile
                    self.call("scontrol", "update", f"JobId={number}", "StartTime=now+4")
            # On its way back into the queue, a job passes through states that look like ends.
            return seen[-1] in ENDS and len(seen) >= 10 and set(seen[-10:]) == {seen[-1]}

        self.wait(ended, seconds)
        return self.job(number)

    def wait(self, condition: Callable[[], bool], seconds: float) -> None:
        """Waits until something is so."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s; see {self.folder}"
            time.sleep(0.3)

    def stop(self) -> None:
        """Ends jobs and daemons."""
        with suppress(AssertionError):
            self.call("scancel", "--user=root")
        for file in self.folder.glob("*.pid"):
            with suppress(ProcessLookupError, ValueError):
                os.kill(int(file.read_text()), 15)


def _start_munge() -> None:
    if subprocess.run(["munge", "-n"], capture_output=True).returncode == 0:
        return
    key, user = Path("/etc/munge/munge.key"), pwd.getpwnam("munge")
    if not key.exists():
        subprocess.run(["mungekey"], check=True)
    os.chown(key, user.pw_uid, user.pw_gid)
    Path("/run/munge").mkdir(exist_ok=True)
    os.chown("/run/munge", user.pw_uid, user.pw_gid)
    subprocess.run(["su", "-s", "/bin/sh", "munge", "-c", "munged"], check=True)


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
