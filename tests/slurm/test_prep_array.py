"""slurm/prep_array.sh on a real cluster of three nodes: what reaches a stand-in for the worker.

test_prep_array_alone.py runs it without Slurm.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.started_cluster import ENDED, started_cluster
from tests.waiting import wait_until

SCRIPT = ROOT / "slurm" / "prep_array.sh"

STAND_IN = """
import json, os, signal, sys, time
from pathlib import Path

index, place = int(sys.argv[sys.argv.index("--shard_id") + 1]), Path(os.environ["STAND_IN_DIR"])
temporary = place / f"{index}.tmp"
got = []

def stop(number, frame):
    got.append(signal.Signals(number).name)

for number in (signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, stop)
names = ("SLURM_CPUS_PER_TASK", "SLURM_STEP_ID", "SLURMD_NODENAME", "MARK", "SLURM_NTASKS")
(place / f"{index}.json").write_text(json.dumps(
    {"argv": sys.argv[1:], "env": {name: os.environ.get(name) for name in names}}))
print("the worker speaks", flush=True)
doing = os.environ.get("STAND_IN_DOES", "")
if doing == "exit with its index":
    sys.exit(index)
if doing == "wait":
    temporary.touch()
    deadline = time.monotonic() + 600
    while not got and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)  # cleaning up takes a while, and nothing may cut it short
    temporary.unlink()
    print("the worker heard", *got, flush=True)
    sys.exit(75)
"""


@dataclass(frozen=True, kw_only=True)
class Desk:
    """A folder to submit from, an environment to submit with, and a place where the stand-in reports."""

    folder: Path
    reports: Path
    environ: dict[str, str]

    def run(self, *command: str) -> str:
        return run_child(command, cwd=self.folder, env=self.environ).stdout

    def sbatch(self, *options: str, args: tuple[str, ...] = (), script: Path = SCRIPT) -> str:
        return self.run("sbatch", "--parsable", *options, str(script), *args).strip()

    def exit_codes(self, job: str) -> dict[int, str]:
        """Array index -> exit code, once no task waits or runs any more."""
        shown: list[dict[str, str]] = []

        def has_ended() -> bool:
            lines = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()
            shown[:] = [dict(re.findall(r"(ArrayTaskId|JobState|ExitCode)=(\S+)", line)) for line in lines]
            return {each["JobState"] for each in shown} <= ENDED

        wait_until(has_ended)
        return {int(each.get("ArrayTaskId", 0)): each["ExitCode"] for each in shown}

    def log(self, job: str, index: int) -> str:
        return (self.folder / "logs" / f"shardprep-{job}_{index}.log").read_text()

    def report(self, index: int) -> dict[str, Any]:
        report: dict[str, Any] = json.loads((self.reports / f"{index}.json").read_text())
        return report


@pytest.fixture(scope="session")
def slurm_conf() -> Iterator[str]:
    environ = {**os.environ, "NUM_NODES": "3", "NODE_CPUS": "8", "KILL_WAIT": "120"}
    with started_cluster(environ, "NO SLURM CLUSTER, slurm/ is untested here") as started:
        yield started["SLURM_CONF"]


@pytest.fixture
def desk(slurm_conf: str, tmp_path: Path) -> Desk:
    """An empty folder of submission, and the stand-in worker in front of the real one."""
    package = tmp_path / "site" / "preprocess"
    for name in (package, tmp_path / "desk", tmp_path / "reports"):
        name.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "plan.py").touch()
    (package / "__main__.py").write_text(STAND_IN)
    kept = {name: value for name, value in os.environ.items() if not re.match("SLURM|SBATCH|SHARDPREP", name)}
    environ = {
        **kept,
        "SLURM_CONF": slurm_conf,
        "PYTHONPATH": str(tmp_path / "site"),
        "SHARDPREP_PYTHON": sys.executable,
        "STAND_IN_DIR": str(tmp_path / "reports"),
    }
    return Desk(folder=tmp_path / "desk", reports=tmp_path / "reports", environ=environ)


pytestmark = pytest.mark.slurm


def test_the_plain_form_makes_shards_0_to_9_and_leaves_only_logs(desk: Desk) -> None:
    job = desk.sbatch()
    assert desk.exit_codes(job) == dict.fromkeys(range(10), "0:0")
    for index in range(10):
        report = desk.report(index)
        assert report["argv"] == ["--shard_id", str(index), "--output_dir", "/data/processed"]
        assert report["env"]["SLURM_CPUS_PER_TASK"] == "8"
        assert report["env"]["SLURM_STEP_ID"] == "0"
        assert desk.log(job, index) == "the worker speaks\n"
    assert [path.name for path in desk.folder.iterdir()] == ["logs"]
    assert len(list((desk.folder / "logs").iterdir())) == 10


def test_folder_and_flags_reach_the_worker_as_they_were_typed(desk: Desk) -> None:
    args = ("my data' $(touch INJECTED)", "--input_dir", "한글 $HOME `touch INJECTED`; touch INJECTED", "")
    job = desk.sbatch("--array=3,5", "-c1", args=args)
    other = desk.sbatch("--array=0", "-c1", args=("--no-keep_text",))
    assert desk.exit_codes(job) == {3: "0:0", 5: "0:0"}
    assert desk.report(5)["argv"] == ["--shard_id", "5", "--output_dir", args[0], "--planned", *args[1:]]
    assert desk.exit_codes(other) == {0: "0:0"}
    assert desk.report(0)["argv"][2:] == ["--output_dir", "/data/processed", "--no-keep_text"]
    assert [path.name for path in desk.folder.iterdir()] == ["logs"]


@pytest.mark.parametrize(
    ("options", "stop", "heard"),
    [
        ((), ("scancel",), "SIGTERM"),
        ((), ("scancel", "--batch", "--signal=TERM"), "SIGUSR1"),
        ((), ("scancel", "--batch", "--signal=USR1"), "SIGUSR1"),
        ((), ("scancel", "--signal=USR1"), "SIGUSR1"),
        (("--time=60", "--signal=B:USR1@55"), (), "SIGUSR1"),
    ],
)
def test_a_stopped_worker_removes_its_temporary_and_the_task_ends_with_75(
    desk: Desk, options: tuple[str, ...], stop: tuple[str, ...], heard: str
) -> None:
    desk.environ["STAND_IN_DOES"] = "wait"
    job = desk.sbatch("--array=1", "-c1", *options)
    wait_until((desk.reports / "1.tmp").exists)
    if stop:
        desk.run(*stop, f"{job}_1")
    else:  # its time runs out soon from now: it hears so in the second minute, however late it began
        minutes = int(re.findall(r"RunTime=00:(\d\d):", desk.run("scontrol", "show", "job", f"{job}_1"))[0])
        desk.run("scontrol", "update", f"jobid={job}_1", f"timelimit={minutes + 2}")
    assert desk.exit_codes(job) == {1: "75:0"}
    assert not (desk.reports / "1.tmp").exists()
    log = desk.log(job, 1)
    [told] = re.findall(r"the worker heard (.*)", log)
    assert heard in told.split()  # of scancel both are on their way, and either may come first
    # what Slurm itself writes to the log follows it to logs/
    assert stop != ("scancel",) or "CANCELLED AT" in log
    assert list(desk.folder.glob("*.log")) == []


def test_a_task_started_again_by_slurm_keeps_the_log_of_its_first_run(desk: Desk) -> None:
    desk.environ["STAND_IN_DOES"] = "exit with its index"
    job = desk.sbatch("--array=7", "-c1")
    assert desk.exit_codes(job) == {7: "7:0"}
    (desk.reports / "7.json").unlink()
    desk.run("scontrol", "requeue", f"{job}_7")
    wait_until((desk.reports / "7.json").exists)
    assert desk.exit_codes(job) == {7: "7:0"}
    logs = sorted((desk.folder / "logs").iterdir())
    assert [path.name for path in logs] == [
        f"shardprep-{job}_7.before-restart-1.log",
        f"shardprep-{job}_7.log",
    ]
    assert ["the worker speaks" in path.read_text() for path in logs] == [True, True]


def test_the_step_starts_without_the_users_environment_too(desk: Desk) -> None:
    settings = f"SHARDPREP_PYTHON={sys.executable} STAND_IN_DIR={desk.reports}"
    (desk.folder / "setup.sh").write_text(f"export {settings} PYTHONPATH={desk.reports.parent / 'site'}\n")
    text = SCRIPT.read_text().replace(
        "set -euo pipefail\n", "set -euo pipefail\nSHARDPREP_SETUP=setup.sh\n", 1
    )
    (desk.folder / "job.sh").write_text(text)
    job = desk.sbatch("--array=0", "-c1", "--export=NONE", script=desk.folder / "job.sh")
    assert desk.exit_codes(job) == {0: "0:0"}, desk.log(job, 0)
