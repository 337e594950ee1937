"""slurm/prep_array.sh and slurm/train_ddp.sh with stand-ins for Slurm: exit codes, records and signals.

test_batch_scripts.py and test_slurm_operations.py run them on real clusters.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.checkout import ROOT
from tests.children import end_of, free_port, run_child
from tests.slurm.fake_slurm import Desk
from tests.waiting import wait_until

pytestmark = pytest.mark.processes


REPLACED = {137: 75, 255: 75}  # Slurm mangles these: a killed worker, and one that srun could not start


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, *REPLACED])
def test_a_task_ends_with_the_exit_code_of_its_worker_unless_slurm_mangles_it(desk: Desk, code: int) -> None:
    desk.task(code=REPLACED.get(code, code), srun=f"exit {code}")


def test_a_task_refuses_several_tasks_per_job_and_missing_files_by_name(desk: Desk) -> None:
    names = ("SHARDPREP_PYTHON", "SHARDPREP_SETUP")
    wrong = [{"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": number} for number in ("1", "2")]
    for environ in [*wrong, *({name: "/no/such/file"} for name in names)]:
        output = desk.task(code=2, environ=environ)
        assert ("--ntasks" if environ in wrong else next(iter(environ))) in output
    assert not (desk.data / "shard-00000.tar").exists()


def test_outside_a_job_array_the_script_prints_the_command_to_type(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "prep_array.sh"
    output = run_child([script, "my data"], cwd=tmp_path, code=2).stderr
    assert output.endswith(f"type: sbatch --array=0-9 {script.resolve()} my\\ data\n")


@pytest.mark.parametrize("what", ["nothing", "an old preprocess.py", "only the package"])
def test_a_python_without_the_package_or_its_libraries_is_named(desk: Desk, what: str) -> None:
    bare = desk.tmp / "bare"
    run_child([sys.executable, "-m", "venv", "--without-pip", bare])
    path = str(ROOT) if what == "only the package" else ""
    environ = {"SHARDPREP_PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": path}
    if what == "an old preprocess.py":
        (desk.tmp / "preprocess.py").write_text("print('the old script')")
    output = desk.task(code=2, environ=environ)
    assert re.search(rf"node n1: python {bare}/bin/python \(3\.\d+\.\d+\).*SHARDPREP_SETUP", output)
    assert ("preprocess.plan, numpy" in output) == (what != "only the package")
    assert "numpy, orjson, tokenizers, tqdm" in output
    assert (f"{desk.tmp}/preprocess.py" in output) == (what == "an old preprocess.py")
    assert "the old script" not in output


def test_files_in_the_current_folder_do_not_shadow_packages(desk: Desk) -> None:
    for name in ("preprocess", "loader", "platform", "json"):
        (desk.tmp / f"{name}.py").write_text("print('the old script')")
    assert "the old script" not in desk.task(index=1)
    assert (desk.data / "shard-00001.tar").exists()


def test_setup_srun_arguments_and_container_are_used(desk: Desk) -> None:
    # A typical set-up file: unset variables, a failing line, and a check of the arguments.
    (desk.tmp / "setup.sh").write_text('echo "$# arguments $NOT_SET"\nfalse\nexport MARK=setup\n')
    environ = {"SHARDPREP_SETUP": "setup.sh", "SHARDPREP_SRUN_ARGS": "--label --job-name=other"}
    environ["SHARDPREP_EXEC"] = "env MARK=container"
    lines = desk.task(srun='echo "$MARK: $*"', environ=environ).splitlines()
    assert lines[0] == "0 arguments "
    assert re.match(r"setup: .*--label --job-name=other env MARK=container sh -c", lines[1])


@pytest.mark.parametrize("name", ["mine.txt", "shardprep-7_0.log"])
def test_a_log_with_a_name_of_the_user_or_that_cannot_be_moved_is_kept(desk: Desk, name: str) -> None:
    logs, log = desk.tmp / "logs", desk.tmp / name
    if name != "mine.txt":
        logs.write_text("in the way")
    with log.open("wb") as file:
        desk.task(srun="echo the worker speaks", stdout=file)
    assert "the worker speaks" in log.read_text()
    assert not logs.is_dir()


def test_the_record_stays_if_srun_ends_with_0_after_a_node_failure(desk: Desk) -> None:
    """With any name of the folder."""
    desk.data = desk.data.rename(desk.tmp / 'it\'s "a" \\ 데이터 $(touch INJECTED)\nfolder')
    with (desk.tmp / "a log").open("wb") as file:
        desk.task(srun="echo 'srun: error: Node failure on n1'", stdout=file)
    assert [path.name for path in (desk.data / "jobs" / "attempts").iterdir()] == ["7_0.r0"]
    (failure,) = desk.status()["failures"]
    assert (failure["cause"], failure["node"]) == ("NODE_FAIL", "n1")
    assert failure["log"] == str(desk.tmp / "a log")


def test_retry_requests_what_a_plain_task_had_and_status_has_the_workers_message(desk: Desk) -> None:
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    desk.data = desk.data.rename(desk.tmp / 'it\'s "a" 데이터 $(touch INJECTED)')
    environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)  # not set by older versions of Slurm
    desk.task("--input_dir", "/no/such/folder", index=1, code=66, environ=environ)
    (failure,) = desk.status()["failures"]
    assert (failure["shard"], failure["cause"]) == (1, "no such input or shard (66)")
    assert "/no/such/folder" in failure["message"]
    script = desk.slurm("retry", "--shards", 1, "--dry_run")
    assert "shards_of=(1)" in script
    for option in ("partition=amx-part", "account=mine", "mem=3000M", "time=45", "cpus-per-task=1"):
        assert f"#SBATCH --{option}\n" in script, option


@pytest.mark.parametrize("link", ["jobs", "jobs/attempts", "jobs/attempts/7_2.r0"])
def test_a_task_keeps_no_record_through_a_link(desk: Desk, link: str) -> None:
    """Another user may have put the link there, so the work continues."""
    other = desk.tmp / "other"
    (other / "attempts").mkdir(parents=True)
    (other / "file").touch()
    (desk.data / link).parent.mkdir(parents=True, exist_ok=True)
    (desk.data / link).symlink_to(other / "file" if link.endswith("r0") else other)
    desk.task("--max_bad_fraction", "-1", index=2, code=2)
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "file"]
    assert not (other / "file").read_bytes()


def test_a_shard_is_made_even_if_no_record_can_be_written(desk: Desk) -> None:
    (desk.data / "jobs").write_text("a file in the way")
    desk.task()
    assert (desk.data / "shard-00000.tar").exists()
    assert str(desk.data / "jobs") in desk.slurm("submit", code=73)


# --- slurm/train_ddp.sh


# Starts the requested number of tasks. Like the real srun, it kills the others if one fails, and ends with
# the highest exit code.
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
    time.sleep(0.02)  # otherwise the other rank could be killed before it has begun
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
        ["bash", ROOT / "slurm" / "train_ddp.sh", place / "program.py", "DATA", place / "checkpoints", how],
        env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def wait_until_begun(place: Path, start: int = 0) -> list[int]:
    """Wait until both ranks of this start of torchrun handle signals, and return their process ids."""
    found = [place / f"began-{rank}-{start}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in found))
    return [int(path.read_text()) for path in found]


class Run(NamedTuple):
    """How the ranks behave, who gets a signal, the variables of the job, and the result."""

    how: str
    code: int = 75  # exit code, unless it is requeued
    says: str = ""
    told: str = "nobody"  # who gets the signal: nobody, job or ranks
    number: int = signal.SIGTERM
    of_job: Mapping[str, str] = {}
    is_requeued: bool = False
    finds: Sequence[str] = ()  # files beside the checkpoints while it runs
    passes: Sequence[str] = ()  # size options of srun; by default a step gets everything of the job


THREE_CPUS, TORCHRUN = {"SLURM_CPUS_PER_TASK": "3"}, {"SHARDPREP_LAUNCHER": "torchrun"}
NO_PYTHON = {**TORCHRUN, "SHARDPREP_PYTHON": "false", "SLURM_JOB_NUM_NODES": "1"}
SIZES = ("--cpus", "--mem", "--gpus", "--gres", "--tres", "--exclusive", "--exact")
# Slurm has restarted the job twice, for example after node failures.
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
    # With GraceTime the script gets no signal. A program that does not handle TERM is killed by it.
    "a preemption with GraceTime": Run("stop", told="ranks", is_requeued=True),
    "one that no rank handles, after a checkpoint": Run("unheeding", told="ranks", is_requeued=True),
    "scancel": Run("stop", told="job", of_job={"state": "COMPLETING 0"}),
    "it runs elsewhere by now": Run("stop", told="job", of_job={"state": "RUNNING 1"}),
    "no newer checkpoint": Run("save nothing", told="job", number=signal.SIGUSR1),
    "too many requeues": Run("stop", told="job", of_job={"SHARDPREP_MAX_REQUEUES": "0"}),
    "restarted too often": Run("3", 75, "not again", of_job={**AGAIN, "SHARDPREP_MAX_REQUEUES": "1"}),
    # Its old processes may still be running, with their own stop file.
    "a node was lost": Run("stop", told="job", of_job=AGAIN, is_requeued=True, finds=[".stop-7-1"]),
}


@pytest.mark.parametrize("name", RUNS)
def test_a_stopped_training_is_requeued_after_a_checkpoint_and_a_failed_one_is_not(
    tmp_path: Path, name: str
) -> None:
    run, folder = RUNS[name], tmp_path / "checkpoints"
    process = start(tmp_path, run.how, **run.of_job)
    if run.told != "nobody":
        ranks = wait_until_begun(tmp_path)
        assert not run.finds or [path.name for path in folder.iterdir()] == run.finds
        for pid in ranks if run.told == "ranks" else [process.pid]:
            with contextlib.suppress(ProcessLookupError):  # the first to die may end the others
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


def test_torchrun_does_not_restart_ranks_that_stop_when_asked(tmp_path: Path) -> None:
    """It does restart them after a failure, which comes first here."""
    of_job = {**TORCHRUN, "SHARDPREP_PROCS": "2", "SLURM_JOB_NUM_NODES": "1"}
    of_job |= {"PET_MAX_RESTARTS": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start(tmp_path, "once", **of_job)
    wait_until_begun(tmp_path, start=1)
    process.send_signal(signal.SIGUSR1)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists(), log
    assert len(list(tmp_path.glob("began-*"))) == 4, "there was no third start"
