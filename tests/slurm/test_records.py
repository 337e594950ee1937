"""A task without Slurm, and the records of attempts and submissions: what is read off them, and refused.

test_batch_scripts.py and test_slurm_operations.py run slurm/prep_array.sh on real clusters. tests/faults puts
wrong values at all places of a record.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import rewrite_json
from tests.slurm.fake_slurm import Desk, array, ended, failure, squeue_line
from tests.world import World

pytestmark = pytest.mark.processes


# --- why a shard was not made, by all that is left of its task: its record, its log, and what squeue shows


CANCELLED_AT = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-22T01:52:04"
KILLED = (74, "its process was killed by signal 9 (out of memory?)")
BAD = (65, "1 document cannot be decoded")


class Row(NamedTuple):
    """What is left of a task that ended, and the cause that status tells."""

    cause: str
    record: list[str | tuple[int, str]] | None = None  # None: it left none; []: one without an end
    log: str = ""
    queue: tuple[str, int, int] | None = None  # state, exit code, signal; None: Slurm has forgotten it
    begin: dict[str, Any] = {}  # noqa: RUF012 - never changed


STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
VANISHED = "ended without a word (killed, or its node failed)"
ROWS = [
    # the worker's own exit code
    Row("bad input (65)", [ended(65)]),
    Row("bad input (65)", [ended(65)], queue=("FAILED", 65, 0)),
    Row("no such input or shard (66)", [ended(66)]),
    Row("cannot write the output (73)", [ended(73)]),
    Row("read or write error (74)", [ended(74)]),
    Row("refused: plan, options or tokenizer differ (78)", [ended(78)]),
    Row("set-up or usage (2)", [ended(2)]),
    Row("exit code 3", [ended(3)]),
    Row("finished without a manifest", [ended(0)]),
    # a stage before the work
    Row("set-up or usage (2)", [ended(2, stage="set-up")]),
    Row("the set-up file ended the task", [ended(3, stage="set-up")]),
    Row("srun failed", [ended(75, stage="start")]),
    Row("srun failed", [ended(1)], "srun: error: Unable to confirm allocation for job 8: (connect failure)"),
    # killed: the record has the signal, the log or squeue knows better
    Row("killed by signal 9", [ended(75, killed_by=9)]),
    Row(
        "OUT_OF_MEMORY", [ended(75, killed_by=9)], "slurmstepd: error: Detected 1 oom_kill event in StepId=8."
    ),
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], "srun: error: n1: task 0: Out Of Memory"),
    Row("OUT_OF_MEMORY", [ended(1)], "srun: error: n1: task 0: Out Of Memory"),  # of a wrapper around Python
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], "slurmstepd: error: Exceeded job memory limit".lower()),
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], queue=("OUT_OF_MEMORY", 0, 125)),
    # told to stop: by whom is in the log, or in squeue
    Row("stopped by a signal (75)", [ended(75, signal="TERM")]),
    Row("TIMEOUT", [ended(75, signal="TERM")], f"{CANCELLED_AT} DUE TO TIME LIMIT ***"),
    Row("TIMEOUT", [ended(75, signal="USR1", stopped=942)], begin={"time": 400, "SLURM_JOB_END_TIME": 1000}),
    Row("TIMEOUT", [ended(75, signal="USR1", stopped=1540, limit="10:00")]),
    Row("stopped by a signal (75)", [ended(75, signal="USR1", stopped=1540, limit="1:00:00")]),
    Row("stopped by a signal (75)", [ended(75, signal="USR1")]),
    Row("PREEMPTED", [ended(75, signal="TERM")], f"{CANCELLED_AT} DUE TO PREEMPTION ***"),
    Row("PREEMPTED", [ended(75, signal="TERM")], f"{CANCELLED_AT} ***", queue=("PREEMPTED", 0, 15)),
    Row("CANCELLED", [ended(75, signal="TERM")], f"{CANCELLED_AT} ***", queue=("CANCELLED", 0, 15)),
    Row(STEP_STOPPED, [ended(75, signal="TERM")], CANCELLED_AT.replace("JOB 8", "STEP 8.0")),
    # no end: the script was killed, too
    Row(VANISHED, []),
    Row(VANISHED, [], "nothing of that kind"),
    Row("TIMEOUT", [], f"{CANCELLED_AT} DUE TO TIME LIMIT ***"),
    Row("TIMEOUT", [], queue=("TIMEOUT", 0, 0)),
    Row("NODE_FAIL", [], f"{CANCELLED_AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
    Row("NODE_FAIL", [], queue=("NODE_FAIL", 0, 0)),
    Row("NODE_FAIL", [], queue=("BOOT_FAIL", 0, 0)),
    Row("NODE_FAIL", [ended(1)], queue=("NODE_FAIL", 0, 0)),
    Row("CANCELLED", [], queue=("CANCELLED", 0, 0)),
    Row("CANCELLED", [], f"{CANCELLED_AT} ***"),
    Row("requeued (scontrol requeue)", [ended(75, signal="TERM")], f"{CANCELLED_AT} DUE TO JOB REQUEUE ***"),
    # a shard that failed of its own, whatever became of the others of its task
    Row("bad input (65)", [BAD, ended(75)], f"{CANCELLED_AT} DUE TO TIME LIMIT ***", ("TIMEOUT", 0, 0)),
    Row("killed by signal 9", [KILLED, ended(74)]),
    Row("OUT_OF_MEMORY", [KILLED, ended(74)], "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=8."),
    Row("OUT_OF_MEMORY", [KILLED, ended(74)], queue=("OUT_OF_MEMORY", 0, 125)),
    # no record
    Row("bad input (65)", queue=("FAILED", 65, 0)),
    Row("killed by signal 9", queue=("FAILED", 0, 9)),
    Row("its log could not be opened", queue=("FAILED", 0, 53)),
    Row("its log could not be opened", queue=("FAILED", 15, 53)),
    Row("OUT_OF_MEMORY", queue=("OUT_OF_MEMORY", 0, 125)),
    Row("finished without a manifest", queue=("COMPLETED", 0, 0)),
    Row("none", queue=("CANCELLED", 0, 0)),
    Row("none"),
]


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_each_cause_is_told_also_when_slurm_and_the_log_have_forgotten_it(desk: Desk, version: str) -> None:
    desk.data = World(desk.tmp / "of rows").raw({"a.txt": "a\n" * 99}).plan(num_shards=len(ROWS)).data_dir
    desk.submitted(array(tasks=[str(index) for index in range(len(ROWS))]))
    queue = []
    for index, row in enumerate(ROWS):
        log = desk.log(f"1_{index}.log", f"shardprep: node n1: shard {index} begins\n{row.log}\n")
        if row.record is not None:
            lines = [line if isinstance(line, str) else failure(index, *line) for line in row.record]
            desk.record(f"1_{index}", *lines, log=str(log), **row.begin)
        if row.queue is not None:
            ended_as, code, number = row.queue
            # 22.05 prints an exit code as wait() has it
            shown = str(code << 8 | number) if version == "22.05" else f"{code}:{number}"
            queue.append(squeue_line(str(index), ended_as, exit=shown))
    desk.queue(*queue)

    state, left_nothing = desk.status(), str(len(ROWS) - 1)
    causes = {each["shard"]: each["cause"] for each in state["failures"]}
    assert [causes.get(index, "none") for index in range(len(ROWS))] == [row.cause for row in ROWS]
    assert all(state["remedies"].values())
    assert left_nothing in state["not_begun"]
    assert f"1_{left_nothing}" in state["unexplained"], "the accounts may know"

    # MinJobAge later, and the logs are removed: the records have it.
    desk.queue("")
    shutil.rmtree(desk.data / "jobs" / "logs")
    left = {each["shard"]: each["cause"] for each in desk.status()["failures"]}
    recorded = {index: row.cause for index, row in enumerate(ROWS) if row.record is not None}
    assert {index: left[index] for index in recorded} == recorded


def records(desk: Desk) -> list[str]:
    folder = desk.data / "jobs" / "attempts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- the batch script, which an srun of the test starts


SLURM_MANGLES = {137: 75, 255: 75}  # a worker that was killed, and one that srun could not start


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, *SLURM_MANGLES])
def test_the_workers_exit_codes_are_the_tasks_but_for_those_that_slurm_mangles(desk: Desk, code: int) -> None:
    desk.task(code=SLURM_MANGLES.get(code, code), srun=f"exit {code}")


def test_what_a_task_cannot_start_with_is_refused_by_name(desk: Desk) -> None:
    names = ("SHARDPREP_PYTHON", "SHARDPREP_SETUP")
    wrong = [{"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": number} for number in ("1", "2")]
    for environ in [*wrong, *({name: "/no/such/file"} for name in names)]:
        said = desk.task(code=2, environ=environ)
        assert ("--ntasks" if environ in wrong else next(iter(environ))) in said
    assert not (desk.data / "shard-00000.tar").exists()


def test_outside_a_job_array_it_prints_the_line_to_type(tmp_path: Path) -> None:
    script = ROOT / "slurm" / "prep_array.sh"
    said = run_child([script, "my data"], cwd=tmp_path, code=2).stderr
    assert said.endswith(f"type: sbatch --array=0-9 {script.resolve()} my\\ data\n")


@pytest.mark.parametrize("what", ["nothing", "an old preprocess.py", "the package alone"])
def test_a_python_without_the_package_is_named_with_what_it_lacks(desk: Desk, what: str) -> None:
    bare = desk.tmp / "bare"
    run_child([sys.executable, "-m", "venv", "--without-pip", bare])
    path = str(ROOT) if what == "the package alone" else ""
    environ = {"SHARDPREP_PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": path}
    if what == "an old preprocess.py":
        (desk.tmp / "preprocess.py").write_text("print('the old script')")
    said = desk.task(code=2, environ=environ)
    assert re.search(rf"node n1: python {bare}/bin/python \(3\.\d+\.\d+\).*SHARDPREP_SETUP", said)
    assert ("preprocess.plan, numpy" in said) == (what != "the package alone")
    assert "numpy, orjson, tokenizers, tqdm" in said
    assert (f"{desk.tmp}/preprocess.py" in said) == (what == "an old preprocess.py")
    assert "the old script" not in said


def test_files_named_as_packages_in_the_folder_of_submission_are_left_alone(desk: Desk) -> None:
    for name in ("preprocess", "loader", "platform", "json"):
        (desk.tmp / f"{name}.py").write_text("print('the old script')")
    assert "the old script" not in desk.task(index=1)
    assert (desk.data / "shard-00001.tar").exists()


def test_setup_srun_arguments_and_container_are_used(desk: Desk) -> None:
    # a set-up file as they are: unset variables, a failing line, its own look at the arguments
    (desk.tmp / "setup.sh").write_text('echo "$# arguments $NOT_SET"\nfalse\nexport MARK=setup\n')
    environ = {"SHARDPREP_SETUP": "setup.sh", "SHARDPREP_SRUN_ARGS": "--label --job-name=other"}
    environ["SHARDPREP_EXEC"] = "env MARK=container"
    said = desk.task(srun='echo "$MARK: $*"', environ=environ).splitlines()
    assert said[0] == "0 arguments "
    assert re.match(r"setup: .*--label --job-name=other env MARK=container sh -c", said[1])


@pytest.mark.parametrize("name", ["mine.txt", "shardprep-7_0.log"])
def test_a_log_that_the_user_named_or_that_cannot_be_moved_stays_there(desk: Desk, name: str) -> None:
    logs, log = desk.tmp / "logs", desk.tmp / name
    if name != "mine.txt":
        logs.write_text("in the way")
    with log.open("wb") as file:
        desk.task(srun="echo the worker speaks", stdout=file)
    assert "the worker speaks" in log.read_text()
    assert not logs.is_dir()


# --- its record


def test_an_srun_that_ends_with_0_where_its_node_failed_leaves_the_record(desk: Desk) -> None:
    """Whatever the folder is called."""
    desk.data = desk.data.rename(desk.tmp / 'it\'s "a" \\ 데이터 $(touch INJECTED)\nfolder')
    with (desk.tmp / "a log").open("wb") as file:
        desk.task(srun="echo 'srun: error: Node failure on n1'", stdout=file)
    assert records(desk) == ["7_0.r0"]
    (failure,) = desk.status()["failures"]
    assert (failure["cause"], failure["node"]) == ("NODE_FAIL", "n1")
    assert failure["log"] == str(desk.tmp / "a log")


def test_retry_asks_for_what_a_plain_task_had_and_says_the_workers_words(desk: Desk) -> None:
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)  # an older Slurm does not tell it
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
    """Nor does its work stop: it is another user who put the link there."""
    other = desk.tmp / "other"
    (other / "attempts").mkdir(parents=True)
    (other / "file").touch()
    (desk.data / link).parent.mkdir(parents=True, exist_ok=True)
    (desk.data / link).symlink_to(other / "file" if link.endswith("r0") else other)
    desk.task("--max_bad_fraction", "-1", index=2, code=2)
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "file"]
    assert not (other / "file").read_bytes()


def test_where_no_record_can_be_written_the_shard_is_made_all_the_same(desk: Desk) -> None:
    (desk.data / "jobs").write_text("a file in the way")
    desk.task()
    assert (desk.data / "shard-00000.tar").exists()
    assert str(desk.data / "jobs") in desk.slurm("submit", code=73)


# --- run's record


def test_shards_that_a_run_could_not_make_have_their_cause_without_any_slurm(desk: Desk) -> None:
    lines = b"a line\n" * 50
    world = World(desk.tmp / "of run").raw({"a.txt": lines, "b.txt": lines + b"\xff\n" * 20})
    desk.data = world.plan(num_shards=None).data_dir
    for _ in range(2):
        desk.slurm("run", "--num_proc", 1, code=65)
    assert len(records(desk)) == 2, "a record of each run that failed"
    desk.patch.setenv("PATH", str(desk.tmp))
    assert desk.status()["causes"] == {"bad input (65)": "1"}
    name, _, *words = shlex.split(desk.next().removeprefix("next: shardprep "))
    desk.slurm(name, *words[:-1], "1", "--num_proc", 1)  # with another share
    desk.slurm("verify")
    assert records(desk) == []


# --- several attempts


@pytest.mark.parametrize("has_moved", [False, True])
def test_each_start_of_a_task_has_the_cause_of_its_own_part_of_the_log(desk: Desk, has_moved: bool) -> None:
    """A submission's log goes on; plain sbatch's is moved away when Slurm starts the task again."""
    desk.submitted()
    parts = [
        f"shardprep: node {node}: shard 0 begins\n*** JOB 7 ON {node} CANCELLED AT now DUE TO {why} ***\n"
        for node, why in (("n1", "NODE FAILURE"), ("n2", "TIME LIMIT"))
    ]
    if has_moved:
        desk.log("1_0.before-restart-1.log", parts.pop(0))
    log = desk.log("1_0.log", "".join(parts))
    for number in range(2):
        desk.record("1_0", SLURM_RESTART_COUNT=number, time=1000 + number, log=str(log))
    state = desk.status()
    assert (state["causes"], state["restarts"]) == ({"TIMEOUT": "0"}, {"NODE_FAIL on n1": 1})


def test_logs_shows_the_attempts_at_a_shard_newest_last_with_the_ends_of_their_logs(desk: Desk) -> None:
    frame = "shardprep: node n1: shard 2"
    worker = " 10%\r 20%\nerror: of job {}\nsrun: error: n1: task 0: Exited"
    for number, (job, code) in enumerate((("1", 74), ("3", 65), ("5", 75))):
        log = desk.tmp / f"{job}.log"
        if job == "5":
            os.mkfifo(log)  # which holds nobody
        else:
            log.write_text(f"{frame} begins\n{worker.format(job)}\n{frame} ended with exit code {code}\n")
        desk.record(f"{job}_2", ended(code), time=1000 + number, log=str(log))
    said = [line.strip() for line in desk.slurm("logs", 2).splitlines() if line.startswith("  |")]
    assert said == ["|  20%", "| error: of job 1", "|  20%", "| error: of job 3"], "not the frame, nor srun"


# --- submissions on disk


FORGED: dict[str, Any] = {
    "version": 99, "user": ["root"], "verify.job_id": "7; rm", "arrays.0.job_id": 1, "arrays.0.mem_mb": 2**70,
    "arrays.0.request.partition": "a\ntouch X", "arrays.0.request.cpus_per_task": "8",
    "arrays.0.tasks": ["0-99999999999"], "arrays.0.tasks ": ["0-99998"] * 50,
}  # fmt: skip
CONTENTS = (b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": Infinity}')
# What becomes of a record of a submission, or of its place, and the exit code of every command.
UNREADABLE: list[tuple[Callable[[Path], object], int]] = [
    *((partial(rewrite_json, **{place.strip(): value}), 65) for place, value in FORGED.items()),
    *((partial(Path.write_bytes, data=content), 65) for content in CONTENTS),
    (lambda path: path.write_bytes(path.read_bytes().replace(b'"job_id": "1"', b'"job_id": "3"')), 65),
    (lambda path: (path.unlink(), path.mkdir()), 65),
    (lambda path: (path.rmdir(), os.mkfifo(path)), 65),
    (lambda path: (path.unlink(), path.symlink_to("gone")), 74),
]


def test_a_submission_that_cannot_be_read_or_has_a_wrong_field_is_named_and_holds_nobody(desk: Desk) -> None:
    """The hash of forged ones is right."""
    for spoil, code in UNREADABLE:
        path = desk.data / "jobs" / "0000.json"
        if not path.is_dir():
            path.unlink(missing_ok=True)
            desk.submitted()
        spoil(path)
        for command in ("status", "submit"):
            assert "jobs/0000.json" in desk.slurm(command, code=code)
