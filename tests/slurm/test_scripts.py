"""slurm/prep_array.sh and slurm/train_ddp.sh with stand-ins for Slurm: exit codes, records and signals.

test_batch_scripts.py and test_slurm_operations.py run them on real clusters.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkout import ROOT
from tests.children import end_of, free_port, run_child
from tests.slurm.fake_slurm import SRUN as SRUN_ALONE
from tests.slurm.fake_slurm import Desk
from tests.waiting import wait_until

pytestmark = pytest.mark.processes


REPLACED = {137: 75, 255: 75}  # Slurm mangles these: a killed worker, and one that srun could not start


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, *REPLACED])
def test_a_task_ends_with_the_exit_code_of_its_worker_unless_slurm_mangles_it(desk: Desk, code: int) -> None:
    desk.task(code=REPLACED.get(code, code), srun=f"exit {code}")


# Fails like the real srun while slurmctld is away, as often as a file has lines.
AWAY = """printf x >>PLACE/tries
[[ $(wc -l <PLACE/failures) -lt $(wc -c <PLACE/tries) ]] || exit "${SLURM_EXIT_ERROR:-1}"
WORK"""
SLEEP = 'printf "%s\\n" "$1" >>PLACE/sleeps; [[ ! -e PLACE/signal ]] || kill -"$(<PLACE/signal)" "$PPID"'


def start_again(
    desk: Desk, *, num_failures: int, code: int, is_away: bool = False, work: str = "exit 0"
) -> tuple[int, list[str], str]:
    """Run a task whose srun fails before any work. Return the number of tries, the sleeps and the log."""
    place = shlex.quote(str(desk.place))
    (desk.place / "failures").write_text("\n" * num_failures)
    for name in ("tries", "sleeps"):
        (desk.place / name).unlink(missing_ok=True)
    sleep = desk.place / "bin" / "sleep"
    sleep.write_text("#!/bin/bash\n" + SLEEP.replace("PLACE", place))
    sleep.chmod(0o755)
    if is_away:
        (desk.place / "away").touch()
    log = desk.task(srun=AWAY.replace("PLACE", place).replace("WORK", work), code=code)
    sleeps = (desk.place / "sleeps").read_text().split() if (desk.place / "sleeps").exists() else []
    return len((desk.place / "tries").read_text()), sleeps, log


def test_a_task_that_begins_while_slurmctld_is_away_waits_for_it(desk: Desk) -> None:
    tries, sleeps, log = start_again(desk, num_failures=6, code=0, is_away=True, work=SRUN_ALONE)
    assert (tries, sleeps) == (7, ["5", "10", "20", "40", "60", "60"])
    assert log.count("trying again in") == 6
    assert (desk.data / "shard-00000.tar").exists()


def test_a_step_that_slurmctld_refuses_is_tried_three_times(desk: Desk) -> None:
    tries, sleeps, log = start_again(desk, num_failures=9, code=75)
    assert (tries, sleeps) == (3, ["5", "10"])
    assert "shard 0 did not start: srun failed" in log
    (failure,) = desk.status()["failures"]
    assert failure["cause"].startswith("srun")


@pytest.mark.parametrize("code", [1, 2, 65, 75, 137, 255])
def test_work_that_failed_is_not_begun_again(desk: Desk, code: int) -> None:
    """Whether srun could begin it at once or not."""
    for num_failures in (0, 1):
        ends = REPLACED.get(code, code)
        tries, _, _ = start_again(desk, num_failures=num_failures, code=ends, work=f"exit {code}")
        assert tries == num_failures + 1


@pytest.mark.parametrize("signal_name", ["TERM", "USR1"])
def test_a_signal_ends_the_wait_for_slurmctld(desk: Desk, signal_name: str) -> None:
    (desk.place / "signal").write_text(signal_name)
    tries, sleeps, _ = start_again(desk, num_failures=9, code=75, is_away=True)
    assert (tries, sleeps) == (1, ["5"])
    assert "signal=" + signal_name in (desk.data / "jobs" / "attempts" / "7_0.r0").read_text()


def test_a_task_refuses_missing_files_by_name(desk: Desk) -> None:
    for name in ("SHARDPREP_PYTHON", "SHARDPREP_SETUP"):
        assert name in desk.task(code=2, environ={name: "/no/such/file"})
    assert not (desk.data / "shard-00000.tar").exists()


# Prints the options of srun, and starts the tasks.
SEVERAL = """echo "options: $*"; num=1
while [[ $1 = --* ]]; do [[ $1 != --ntasks=* ]] || num=${1#*=}; shift; done
for ((rank = 0; rank < num; rank++)); do
  export SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_NTASKS=$num SLURM_STEP_NUM_TASKS=$num SLURM_STEP_ID=0
  "$@" & pids[rank]=$!
done
highest=0
for pid in "${pids[@]}"; do rc=0; wait "$pid" || rc=$?; ((rc <= highest)) || highest=$rc; done
exit "$highest"
"""
TWO_NODES = {"SLURM_JOB_NUM_NODES": "2", "SLURM_CPUS_ON_NODE": "1"}


def test_the_tasks_of_a_job_on_two_nodes_share_the_shards(desk: Desk) -> None:
    """It may be one of a job array, all of whose tasks share them; here the other two never begin."""
    array = {
        f"SLURM_ARRAY_TASK_{name}": value for name, value in (("COUNT", "3"), ("MIN", "0"), ("STEP", "1"))
    }
    output = desk.task("--num_proc", 1, index=1, srun=SEVERAL, environ={**TWO_NODES, **array})
    assert "6 tasks of a job array share 5 shards" in output
    assert re.search("options: .*--nodes=2 --ntasks=2 .*--no-kill --cpus-per-task=1", output)
    assert desk.status()["num_done"] == 5
    for path in desk.made.glob("shard-*.tar"):
        assert (desk.data / path.name).read_bytes() == path.read_bytes()
    assert not list((desk.data / "jobs").rglob("*.r0"))


def test_a_job_of_several_tasks_ends_well_if_the_others_made_the_shards_of_one_that_died(desk: Desk) -> None:
    record = shlex.quote(str(desk.data / "jobs" / "attempts" / "7_0.r0"))
    desk.task(srun=f"rm {record}; exit 137", environ=TWO_NODES)
    desk.task(srun="exit 137", environ=TWO_NODES, code=75)


@pytest.mark.parametrize(
    ("environ", "passed"),
    [
        ({"SLURM_CPUS_PER_TASK": "8"}, ["--cpus-per-task=8"]),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "8"}, ["--cpus-per-task=8"]),
        ({"SLURM_CPUS_PER_TASK": "8", "SLURM_CPUS_ON_NODE": "128"}, ["--cpus-per-task=128"]),
        ({**TWO_NODES, "SLURM_CPUS_ON_NODE": "128"}, []),  # nodes may differ
        ({**TWO_NODES, "SLURM_NTASKS": "4", "SLURM_CPUS_ON_NODE": "2"}, ["--cpus-per-task=1"]),
    ],
)
def test_a_task_uses_all_cpus_that_its_job_was_given(
    desk: Desk, environ: dict[str, str], passed: list[str]
) -> None:
    output = desk.task(srun='echo "$*"; exit 75', environ=environ, code=75)
    assert re.findall("--cpus-per-task=[0-9]+", output) == passed


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


def evil(folder: Path) -> None:
    """Fill a folder with modules that leave a file if they run."""
    for name in (
        "importlib",
        "contextlib",
        "types",
        "os",
        "platform",
        "runpy",
        "preprocess",
        "torch",
        "numpy",
    ):
        (folder / f"{name}.py").write_text(f"open({str(folder / 'RAN')!r}, 'w')\n")


def test_a_task_that_is_sent_from_a_data_set_runs_no_module_of_it(desk: Desk) -> None:
    evil(desk.tmp)
    desk.task(code=0)
    (desk.tmp / "plan.json").touch()
    (desk.tmp / "preprocess.py").unlink()
    (desk.tmp / "preprocess").mkdir()
    evil(desk.tmp / "preprocess")
    (desk.tmp / "preprocess" / "__init__.py").write_text(f"open({str(desk.tmp / 'RAN')!r}, 'w')\n")
    run_child([sys.executable, "-m", "venv", "--without-pip", desk.tmp / "bare"])
    environ = {"SHARDPREP_PYTHON": str(desk.tmp / "bare" / "bin" / "python"), "PYTHONPATH": ""}
    desk.task(index=1, code=2, environ=environ)
    assert not list(desk.tmp.rglob("RAN"))


def test_torchrun_that_is_started_in_a_data_set_runs_no_module_of_it(tmp_path: Path) -> None:
    """A package in place of torch prints its arguments."""
    evil(tmp_path)
    package = tmp_path / "installed" / "torch" / "distributed"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py"):
        path.touch()
    (package / "run.py").write_text("import sys\nprint('torchrun', *sys.argv[1:], file=sys.stderr)\n")
    srun = f'cd {shlex.quote(str(tmp_path))}; while [[ $1 = --* ]]; do shift; done; "$@"'
    environ = {"SHARDPREP_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path / "installed")}
    log = train(tmp_path, srun, code=0, SHARDPREP_LAUNCHER="torchrun", SHARDPREP_PROCS="2", **environ)
    assert "torchrun --nnodes=1 --nproc_per_node=2" in log
    assert not list(tmp_path.rglob("RAN"))


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


@pytest.mark.parametrize("name", ["plan.json", "jobs", "jobs/attempts", "jobs/attempts/7_0.r0"])
def test_a_task_does_not_wait_for_a_fifo_that_stands_in_its_way(desk: Desk, name: str) -> None:
    """A FIFO without a writer or reader. The worker itself refuses a plan that is one."""
    path = desk.data / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    desk.task(srun="exit 65", code=65)
    assert path.is_fifo()


def test_a_record_is_not_appended_through_a_link_that_appears_while_the_task_runs(desk: Desk) -> None:
    secret = desk.tmp / "secret"
    secret.write_text("words")
    record = shlex.quote(str(desk.data / "jobs" / "attempts" / "7_0.r0"))
    desk.task(srun=f"rm {record} && ln -s {shlex.quote(str(secret))} {record}; exit 65", code=65)
    assert secret.read_text() == "words"


NOT_NUMBERS = ("run[$(touch RAN)]", "08", "-1", "1 2", "rc", "9" * 11)


@pytest.mark.parametrize("name", ["SLURM_ARRAY_TASK_ID", "SLURM_NTASKS", "SLURM_RESTART_COUNT"])
def test_a_task_evaluates_no_text_in_place_of_a_number_of_slurm(desk: Desk, name: str) -> None:
    for value in NOT_NUMBERS:
        assert name in desk.task(environ={name: value}, code=2)
    assert not list(desk.tmp.rglob("RAN"))


def test_a_script_of_submit_evaluates_no_text_in_place_of_its_index(desk: Desk) -> None:
    script = desk.slurm("submit", "--dry_run").partition("#!/bin/bash")[2].partition("#!/bin/bash")[0]
    (desk.tmp / "job.sh").write_text(f"#!/bin/bash{script}")
    for value in NOT_NUMBERS:
        own = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": value}
        run_child(["bash", "job.sh"], cwd=desk.tmp, env={**os.environ, **own}, code=2)
    assert not (desk.tmp / "RAN").exists()


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


def test_a_rank_that_is_killed_while_it_writes_its_exit_code_does_not_hide_that_of_another(
    tmp_path: Path,
) -> None:
    process = start(tmp_path, "stop")
    for name in ("dd", "ln"):  # whatever the rank's shell uses, rank 1 only begins it
        create = 'touch "${1#of=}";' if name == "dd" else ""
        body = f'[[ $RANK != 1 || $* != *.code-* ]] || {{ {create} touch "{tmp_path}/writes"; sleep 600; }}'
        (tmp_path / "bin" / name).write_text(f'#!/bin/bash\n{body}\nexec {shutil.which(name)} "$@"\n')
        (tmp_path / "bin" / name).chmod(0o755)
    ranks = wait_until_begun(tmp_path)
    os.kill(ranks[1], signal.SIGTERM)
    wait_until((tmp_path / "writes").exists)
    os.kill(ranks[0], signal.SIGTERM)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists(), log
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1.pt"]


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


def train(place: Path, srun: str, *, code: int, **environ: str) -> str:
    """Run train_ddp.sh with a stand-in for srun, with PLACE as the folder of checkpoints. Returns its log."""
    commands, checkpoints = place / "bin", place / "ck"
    commands.mkdir(exist_ok=True)
    checkpoints.mkdir(exist_ok=True)
    scontrol = f'case $1 in show) echo n0;; requeue) echo "$2" >>"{place}/requeued"; kill "$PPID";; esac'
    srun = f"cd {shlex.quote(str(checkpoints))}; {srun}"
    for name, body in {"srun": srun, "scontrol": scontrol, "squeue": "echo RUNNING 0"}.items():
        (commands / name).write_text(f"#!/bin/bash\n{body}\n")
        (commands / name).chmod(0o755)
    (place / "program.py").touch()
    settings = {"SLURM_JOB_ID": "7", "SLURM_JOB_NUM_NODES": "1", "SLURM_NTASKS": "1"}
    settings |= {"SLURM_JOB_NODELIST": "n0", "PATH": f"{commands}:{os.environ['PATH']}", **environ}
    words: list[str | Path] = [
        "bash",
        ROOT / "slurm" / "train_ddp.sh",
        place / "program.py",
        "DATA",
        checkpoints,
    ]
    return run_child(words, env={**os.environ, **settings}, cwd=place, code=code).stderr


@pytest.mark.parametrize("text", [*NOT_NUMBERS, "300 0 n1", "5 run[$(touch RAN)] n1", "5 0 $(touch RAN)", ""])
def test_a_code_file_that_another_user_wrote_is_only_read_as_numbers(tmp_path: Path, text: str) -> None:
    log = train(tmp_path, f"printf '%s\\n' {shlex.quote(text)} >.code-7-0-0; exit 6", code=6)
    assert "the first to fail" not in log
    assert not list(tmp_path.rglob("RAN"))


@pytest.mark.parametrize("plant", ["ln -s ../secret", "mkfifo", "mkdir"])
def test_training_opens_no_link_or_fifo_in_the_folder_of_checkpoints(tmp_path: Path, plant: str) -> None:
    """Its rank fails behind such a name, and another one stands where the next stop file will be."""
    (tmp_path / "secret").write_text("5 0 words-of-a-private-file")
    rank = 'while [[ $1 = --* ]]; do shift; done; RANK=0 "$@"'
    srun = f"{plant} .code-7-0-0; {plant} .stop-7-0; kill -USR1 $PPID; sleep 0.3; {rank}"
    log = train(tmp_path, srun, code=1, SHARDPREP_PYTHON="false")
    assert "private" not in log
    assert (tmp_path / "secret").read_text() == "5 0 words-of-a-private-file"
    dangling = train(tmp_path, "ln -s ../new .stop-7-0; kill -USR1 $PPID; sleep 0.3; exit 3", code=3)
    assert "asked to stop" in dangling
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("plant", ["ln -s ../program.py", "mkfifo", "mkdir", "install -o nobody /dev/null"])
@pytest.mark.parametrize("code", [3, 75])
def test_a_stop_file_that_this_user_did_not_write_causes_no_requeue(
    tmp_path: Path, plant: str, code: int
) -> None:
    if "nobody" in plant and os.geteuid():
        pytest.skip("needs root")
    log = train(tmp_path, f"{plant} .stop-7-0; touch step-1.pt; exit {code}", code=code)
    assert not (tmp_path / "requeued").exists()
    assert ".stop-7-0" in log


def test_the_example_of_training_stops_only_for_a_file_of_this_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = (ROOT / "examples" / "train_llama.py").read_text()
    function = source[source.index("def stop_wanted(") : source.index("def total(")]
    names: dict[str, Any] = {"os": os, "stat": stat, "_stop_asked": False}
    exec(function, names)  # importing the file would take seconds for torch and transformers
    stop = tmp_path / "stop"
    monkeypatch.setenv("SHARDPREP_STOP_FILE", str(stop))
    assert not names["stop_wanted"](0)
    planted: list[Callable[[], object]] = [
        lambda: stop.symlink_to(Path(__file__)),
        lambda: os.mkfifo(stop),
        lambda: (stop.touch(), os.chown(stop, 12345, -1)),
    ]
    for plant in planted if os.geteuid() == 0 else planted[:2]:  # only root can change an owner
        plant()
        assert not names["stop_wanted"](0)
        stop.unlink()
    stop.touch()
    assert names["stop_wanted"](0)
    assert not names["stop_wanted"](1), "rank 0 tells the others"
    monkeypatch.delenv("SHARDPREP_STOP_FILE")
    assert not names["stop_wanted"](0)


@pytest.mark.parametrize("name", ["SLURM_RESTART_COUNT", "SHARDPREP_MAX_REQUEUES", "SLURM_JOB_ID"])
def test_training_evaluates_no_text_in_place_of_a_number(tmp_path: Path, name: str) -> None:
    for value in NOT_NUMBERS:
        assert name in train(tmp_path, "exit 75", code=2, **{name: value})
    assert not list(tmp_path.rglob("RAN"))


def test_a_training_that_begins_while_slurmctld_is_away_waits_for_it(tmp_path: Path) -> None:
    """If slurmctld answers and refuses the step, three tries are all."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sleep").write_text("#!/bin/bash\n")
    (tmp_path / "bin" / "sleep").chmod(0o755)
    fails = 'printf x >>../tries; [[ $(wc -c <../tries) -gt NUM ]] || exit "${SLURM_EXIT_ERROR:-1}"; exit 3'
    log = train(tmp_path, fails.replace("NUM", "2"), code=3)
    assert log.count("trying again in") == 2
    (tmp_path / "tries").unlink()
    train(tmp_path, fails.replace("NUM", "9"), code=75)
    assert (tmp_path / "tries").read_text() == "xxx"
    (tmp_path / "tries").unlink()
    train(tmp_path, "printf x >>../tries; echo '199 0 n1' >.code-7-0-0; exit 199", code=75)
    assert (tmp_path / "tries").read_text() == "x", "this rank began"
    assert not (tmp_path / "requeued").exists()


SAVED = {
    "mkdir checkpoint-12": "checkpoint-12",  # Trainer
    "mkdir checkpoint_0": "checkpoint_0",  # Accelerate
    "mkdir global_step30; echo global_step30 >latest": "global_step30",  # DeepSpeed
    "mkdir 100": "100",  # distributed checkpoints
    "mkdir epoch=1-step=9.ckpt": "epoch=1-step=9.ckpt",  # Lightning, sharded
    "echo new >last.ckpt.x; mv last.ckpt.x last.ckpt": "last.ckpt",
    "touch step-00000003.pt": "step-00000003.pt",
}
NOT_SAVED = (
    "touch events.out.tfevents.1732.n1.7.0", "mkdir -p runs/Nov28_n1", "mkdir wandb", "mkdir version_1",
    "touch log-2.txt", "touch metrics-1.jsonl", "mkdir tmp-checkpoint-9", "mkdir checkpoint-9.tmp",
    "touch step-1.pt/later", "touch core.12345 core.python.77", "touch trace_0.json.gz memory_5.pickle.gz",
    "mkdir profiler_1 tb_2026",
)  # fmt: skip


def test_a_new_checkpoint_is_a_file_or_folder_and_logs_count_as_none(tmp_path: Path) -> None:
    (tmp_path / "ck" / "step-1.pt").mkdir(parents=True)
    for how in NOT_SAVED:
        assert "no new checkpoint" in train(tmp_path, f"{how}; exit 75", code=75)
    assert not (tmp_path / "requeued").exists()
    for how, name in SAVED.items():
        assert f"saved {name}; requeueing" in train(tmp_path, f"{how}; exit 75", code=-15)
        assert "no new checkpoint" in train(tmp_path, "exit 75", code=75), "it was there before"


def test_only_checkpoints_of_the_programs_own_names_count(tmp_path: Path) -> None:
    named = {"SHARDPREP_CHECKPOINTS": "*.best"}
    train(tmp_path, "mkdir checkpoint-3; exit 75", code=75, **named)
    assert "saved a.best" in train(tmp_path, "mkdir a.best; exit 75", code=-15, **named)


def packed_environment(folder: Path) -> tuple[Path, Path]:
    """Write on_node.sh beside an environment.tar. Return the node's disk, and where the tar is unpacked."""
    (folder / "env" / "bin").mkdir(parents=True)
    (folder / "env" / "bin" / "python").write_bytes(os.urandom(4 << 20))
    run_child(["tar", "-C", "env", "-cf", "environment.tar", "."], cwd=folder)
    node = folder / "node"
    node.mkdir()
    script = (ROOT / "examples" / "environment_on_node.sh").read_text()
    script = script.replace("/tmp/", f"{node}/").replace("flock -w 600", "flock -w 0.1")
    (folder / "on_node.sh").write_text(script)
    stamp = (folder / "environment.tar").stat()
    return node, node / f"shardprep-{os.getuid()}-{int(stamp.st_mtime)}-{stamp.st_size}"


@pytest.mark.parametrize("in_the_way", ["nothing", "a link to a folder of this user"])
def test_tasks_that_begin_together_unpack_the_environment_once(tmp_path: Path, in_the_way: str) -> None:
    node, unpacked = packed_environment(tmp_path)
    if in_the_way != "nothing":
        unpacked.symlink_to(tmp_path)
    (node / "tar").write_text(f'#!/bin/bash\necho >>{node}/calls; exec {shutil.which("tar")} "$@"\n')
    (node / "tar").chmod(0o755)
    together = "for i in {1..8}; do (. ./on_node.sh; echo $PATH) & done; wait"
    environ = {**os.environ, "PATH": f"{node}:{os.environ['PATH']}"}
    paths = run_child(["bash", "-c", together], cwd=tmp_path, env=environ).stdout.splitlines()
    if in_the_way == "nothing":
        assert [path.partition(":")[0] for path in paths] == [f"{unpacked}/bin"] * 8
        assert (node / "calls").read_text() == "\n", "tar ran once"
    else:
        assert not any(path.startswith(str(unpacked)) for path in paths)


@pytest.mark.parametrize("fate", ["was killed", "hangs"])
def test_a_task_unpacks_the_environment_where_another_one_was_killed_or_hangs(
    tmp_path: Path, fate: str
) -> None:
    node, unpacked = packed_environment(tmp_path)
    left = Path(f"{unpacked}.abcdef")
    (left / "bin").mkdir(parents=True)
    lock = node / f"shardprep-{os.getuid()}"
    lock.mkdir(mode=0o700)
    held = os.open(lock, os.O_RDONLY)
    try:
        if fate == "hangs":
            fcntl.flock(held, fcntl.LOCK_EX)
        path = run_child(["bash", "-c", ". ./on_node.sh; echo $PATH"], cwd=tmp_path).stdout
    finally:
        os.close(held)
    assert path.startswith(f"{unpacked}/bin:")
    assert set(node.iterdir()) == {lock, unpacked, *([left] if fate == "hangs" else [])}


def test_a_task_of_an_array_requeues_only_itself(tmp_path: Path) -> None:
    task = {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "3"}
    train(tmp_path, "touch step-1.pt; exit 75", code=-15, **task)
    assert (tmp_path / "requeued").read_text() == "7_3\n"
    task["SLURM_ARRAY_TASK_ID"] = ""
    assert "SLURM_ARRAY_TASK_ID" in train(tmp_path, "touch step-2.pt; exit 75", code=2, **task)
