"""slurm/train_ddp.sh with stand-ins for srun, scontrol and squeue: exit codes, signals, what is requeued."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkout import ROOT
from tests.children import end_of, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "slurm" / "train_ddp.sh"
# As many tasks as asked for; where one ends badly the others are killed, and the highest code is srun's own,
# as of the real one.
SRUN = r"""#!/bin/bash
printf '%s\n' "$@" >"$0.arguments"
while [[ $1 = --* ]]; do [[ $1 != --ntasks=* ]] || num=${1#*=}; shift; done
for ((rank = 0; rank < num; rank++)); do
  export SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_NTASKS=$num SLURM_LOCALID=$rank SLURMD_NODENAME=n$rank
  setsid "$@" & pids[rank]=$!
done
highest=0
for _ in "${pids[@]}"; do
  rc=0; wait -n "${pids[@]}" || rc=$?
  ((rc <= highest)) || highest=$rc
  ((rc == 0)) || for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null && highest=137; done
done
exit "$highest"
"""
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
rank, how, folder = int(os.environ["RANK"]), sys.argv[3], Path(sys.argv[2])
start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
asked = []
if how != "unheeding":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(folder.parent / f"pid-{rank}-{start}").write_text(str(os.getpid()))
(folder.parent / f"pid-{rank}-{start}").rename(folder.parent / f"began-{rank}-{start}")
while how == "once" and len(list(folder.parent.glob(f"began-*-{start}"))) < 2:
    time.sleep(0.02)  # else one that ends at once could have the other killed before it began
if how == "unheeding":
    (folder / "step-1.pt").touch()
if how in ("stop", "unheeding", "save nothing") or (how == "once" and start == "1"):
    while not asked and not Path(os.environ["SHARDPREP_STOP_FILE"]).exists():
        time.sleep(0.02)
    if how != "save nothing":
        (folder / "step-1.pt").touch()
    sys.exit(75)
if how == "once":
    while rank == 0 and not asked:
        time.sleep(0.02)
    sys.exit(3)
if rank == 1:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
time.sleep(600)
"""


def start(place: Path, how: str, *, state: str = "RUNNING 0", **environ: str) -> subprocess.Popen[str]:
    commands = place / "bin"
    commands.mkdir()
    scontrol = f'case $1 in show) echo n0;; requeue) touch "{place}/requeued"; kill "$PPID";; esac'
    bodies = {"srun": SRUN, "scontrol": f"#!/bin/bash\n{scontrol}\n", "squeue": f"#!/bin/sh\necho {state}\n"}
    for name, body in bodies.items():
        (commands / name).write_text(body)
        (commands / name).chmod(0o755)
    (place / "program.py").write_text(PROGRAM)
    settings = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "2", "SLURM_NTASKS": "2"}
    settings |= {"SLURM_JOB_NODELIST": "n0", "SHARDPREP_PYTHON": sys.executable, **environ}
    settings["PATH"] = f"{commands}:{os.environ['PATH']}"
    return subprocess.Popen(
        ["bash", SCRIPT, place / "program.py", "DATA", place / "checkpoints", how],
        env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until_begun(place: Path, start: int = 0) -> list[int]:
    """The ranks' process ids, once both of this start of torchrun heed their signals."""
    found = [place / f"began-{rank}-{start}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in found))
    return [int(path.read_text()) for path in found]


class Run(NamedTuple):
    """How the ranks behave, who is told to stop, what the job has set, and what comes of it."""

    how: str
    code: int = 75  # unless it is requeued
    says: str = ""
    told: str = "nobody"
    number: int = signal.SIGTERM
    of_job: Mapping[str, str] = {}
    is_requeued: bool = False
    finds: Sequence[str] = ()  # files beside the checkpoints, while it runs
    passes: Sequence[str] = ()  # sizes of its step, which else has all that the job has


THREE_CPUS, TORCHRUN = {"SLURM_CPUS_PER_TASK": "3"}, {"SHARDPREP_LAUNCHER": "torchrun"}
NO_PYTHON = {**TORCHRUN, "SHARDPREP_PYTHON": "false", "SLURM_JOB_NUM_NODES": "1"}
SIZES = ("--cpus", "--mem", "--gpus", "--gres", "--tres", "--exclusive", "--exact")
NO_MORE = {"SHARDPREP_MAX_REQUEUES": "0"}
# Slurm started it again twice, as where one node after the other dies under it.
AGAIN = {"SLURM_RESTART_COUNT": "2", "state": "RUNNING 2"}
RUNS = {
    "exit code 3": Run("3", 3, "the first to fail was rank 1 on n1, with exit code 3"),
    "exit code 7": Run("7", 7, "without being asked to stop: not requeued"),
    "killed": Run(
        "kill", 75, "rank 1 on n1 was killed by signal 9", of_job=THREE_CPUS, passes=["--cpus-per-task=3"]
    ),
    "torchrun": Run("", 1, of_job=NO_PYTHON),
    "torchrun, and CPUs of two tasks": Run(
        "", 1, of_job={**NO_PYTHON, **THREE_CPUS, "SLURM_NTASKS_PER_NODE": "2"}, passes=["--cpus-per-task=6"]
    ),
    "before the time limit": Run("stop", told="job", number=signal.SIGUSR1, is_requeued=True),
    "a preemption": Run("stop", told="job", is_requeued=True),
    # With GraceTime the script itself hears nothing. A program that does not heed TERM dies of it.
    "a preemption with GraceTime": Run("stop", told="ranks", is_requeued=True),
    "one that no rank heeds, after a checkpoint": Run("unheeding", told="ranks", is_requeued=True),
    "scancel": Run("stop", told="job", of_job={"state": "COMPLETING 0"}),
    "it runs elsewhere by now": Run("stop", told="job", of_job={"state": "RUNNING 1"}),
    "no newer checkpoint": Run("save nothing", told="job", number=signal.SIGUSR1),
    "past the most requeues": Run("stop", told="job", number=signal.SIGUSR1, of_job=NO_MORE),
    "started again too often": Run("3", 75, "not again", of_job={**AGAIN, "SHARDPREP_MAX_REQUEUES": "1"}),
    # Its processes may live on there, with the stop file of their own run.
    "a node was lost": Run("stop", told="job", of_job=AGAIN, is_requeued=True, finds=[".stop-7-1"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_job_that_was_stopped_saves_and_is_requeued_if_it_may_go_on_or_ends_with_the_first_failure(
    tmp_path: Path, name: str
) -> None:
    run, folder = RUNS[name], tmp_path / "checkpoints"
    process = start(tmp_path, run.how, **run.of_job)
    if run.told != "nobody":
        ranks = wait_until_begun(tmp_path)
        assert not run.finds or [path.name for path in folder.iterdir()] == run.finds
        for pid in ranks if run.told == "ranks" else [process.pid]:
            with contextlib.suppress(ProcessLookupError):  # one that dies of it takes the others with it
                os.kill(pid, run.number)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists() == run.is_requeued, log
    assert run.is_requeued or process.returncode == run.code, log
    assert run.says in log
    given = tmp_path / "bin" / "srun.arguments"
    words = given.read_text().splitlines() if given.exists() else []
    assert [word for word in words if word.startswith(SIZES)] == [*run.passes]
    saved = ["step-1.pt"] if run.how in ("stop", "unheeding") else []
    assert [path.name for path in folder.iterdir()] == saved, log


def test_ranks_that_stop_when_asked_are_no_failure_that_torchrun_starts_again(tmp_path: Path) -> None:
    """After one restart that it did make."""
    of_job = {**TORCHRUN, "SHARDPREP_PROCS": "2", "SLURM_JOB_NUM_NODES": "1"}
    of_job |= {"PET_MAX_RESTARTS": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start(tmp_path, "once", **of_job)
    wait_until_begun(tmp_path, start=1)
    process.send_signal(signal.SIGUSR1)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists(), log
    assert len(list(tmp_path.glob("began-*"))) == 4, "it was not started a third time"
