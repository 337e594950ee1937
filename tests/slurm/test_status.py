"""``status``, ``retry``, ``cancel`` and ``report``, given the files of a folder and the answers of Slurm.

Also if Slurm shows nothing or the wrong jobs, and with ``--until_done``.
"""

from __future__ import annotations

import html
import json
import math
import os
import random
import re
import shlex
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import product
from operator import methodcaller as did
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import content_sha256, rewrite_json
from tests.slurm.fake_slurm import ALL, CONFIG, NAME, QUEUES, WHEN, Desk, array, ended, failure, squeue_line
from tests.world import World, call_main, hostile_text, save_tokenizer

pytestmark = pytest.mark.processes

LATER = "2026-11-22T09:00:00"
SINCE_WHEN = datetime.strptime(f"{WHEN}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
VERIFY = {"job": "2", "name": f"{NAME}-verify"}
PLAIN = {"job": "7", "name": "shardprep"}
runs = partial(squeue_line, "0-4", "RUNNING")
RUNS = runs()
PLAIN_RUNS = squeue_line("0", "RUNNING", **PLAIN) + squeue_line("[1-2%1]", "PENDING", **PLAIN)
Step = Callable[[Desk], object]  # ``did`` makes one of a method of the desk


class Case(NamedTuple):
    """The output of squeue and the files of the folder, and what follows.

    In ``queue``, HERE is the name of this folder's jobs, and PLAN begins its plan id. DATA is the folder.
    """

    queue: str = ""
    status: Mapping[str, Any] = {}
    given: Sequence[Step] = (did("submitted"),)  # the record of array job 1 with five tasks, and verify job 2
    config: str = CONFIG
    next: str = ""  # the next command by status
    cancels: str = ""  # arguments of scancel
    types: str = "submit"  # the command to run then, if ``next`` names none
    sends: str = ""  # shards of the tasks that this command sends
    asks: Sequence[str] = ()  # sbatch options of their script
    ends: int = 0  # exit code of the command, and of cancel if Slurm gives no answer


def away(desk: Desk) -> None:
    (desk.place / "away").touch()


def in_a_folder_with_a_blank(desk: Desk) -> None:
    desk.data = desk.data.rename(desk.tmp / "my data")


def too_many_left_out(desk: Desk) -> None:
    """Leave three failed attempts, after which the command that status prints must still work."""
    worker_args = "--input_dir /a"
    for number, fraction in enumerate(("0.04", "0.06", "0.52")):
        request = {"worker_args": worker_args}
        desk.submitted(array(f"10{number}", request=request), verify=f"20{number}", number=number)
        message = f"too many documents are left out: --max_bad_fraction {fraction}"
        desk.record(f"10{number}_4", failure(4, 65, message), ended(65), time=1000 + number)
        worker_args = f"--input_dir /a --max_bad_fraction {fraction}"


def one_found_wrong(desk: Desk) -> None:
    desk.make_done(*range(5))
    tar = desk.data / "shard-00001.tar"
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    desk.slurm("verify", code=65)


def run_that_left_too_many_out(desk: Desk) -> None:
    with desk.run_record("1", "n1", 1).open("a") as record:
        record.write(failure(1, 65, "too many are left out: --max_bad_fraction 0.06") + ended(65))


def failures(index: int, *ends: str) -> list[Step]:
    """Return steps that write a record for each attempt at a shard, the newest last."""
    return [did("record", f"{n}_{index}", end, time=1000 + n) for n, end in enumerate(ends, start=1)]


def submitted(**request: Any) -> Step:
    """Return the step of a submission that got what it requested."""
    granted = {"mem_mb": round(1024 * request.get("mem_gb", 2)), "time_min": request.get("time_min")}
    return did("submitted", array(request={**request, "exclude": "n1"}, **granted))


HOST, AGAIN = socket.gethostname(), "when Slurm answers again: shardprep status DATA"
MOST_MADE = did("make_done", 0, 1, 2, 3)
TOO_LARGE = did("record", "1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
OF_OTHER_CLUSTER = (did("submitted", cluster="other"), did("record", "1_2"))
OF_KIM = (
    did("submitted", user="kim"), did("record", "1_1", ended(74)), did("record", "1_2", SLURM_JOB_USER="kim"),
)  # fmt: skip
OF_KIM_AND_OURS = (did("record", "7_1", SLURM_JOB_USER="kim"), did("record", "8_2"))
ACCEPTING = "--max_bad_fraction"
LOOK = (
    "shardprep logs DATA %d  # documents that were left out, and why; correct options or input and plan into "
    "a new folder, or accept the loss: "
)
# Shards 0 to 2 failed three times: bad input, set-up, and another cause before two stops.
OFTEN: Sequence[Step] = (
    *failures(0, *[ended(65)] * 3), *failures(1, *[ended(2)] * 3), *failures(2, ended(74), *[ended(75)] * 2),
    did("make_done", 3, 4),
)  # fmt: skip

CASES = {
    "a job that waits and runs": Case(
        squeue_line("0-1", "RUNNING") + squeue_line("[2-4%2]", "PENDING"),
        {"running": "0-1", "pending": "2-4"}, cancels="1"),
    "the same number from a controller that lost its state": Case(
        runs(submit=LATER), {"running": ""}, sends=ALL),
    "a task that Slurm restarted with a new submit time": Case(
        runs(submit=LATER, restarts="1"), {"running": "0-4"}, cancels="1"),
    "another plan's job of the same number": Case(
        runs(name="shardprep-ba9876543210-3f2a91-0"), {"running": ""}, sends=ALL),
    "another user's job of the same number": Case(runs(user="kim"), {"running": ""}, sends=ALL),
    "a job that a person renamed": Case(runs(name="mine"), {"running": "0-4"}, cancels="1"),
    "states of a later Slurm": Case(
        squeue_line("0-1", "EXPEDITING") + squeue_line("2-4", "RESV_DEL_HOLD"),
        {"running": "0-1", "pending": "2-4", "failed": ""}, cancels="1"),
    "tasks that were held, suspended and requeued": Case(
        squeue_line("0", "SUSPENDED")
        + squeue_line("1", "PENDING", "JobHeldUser")
        + squeue_line("2", "PENDING", "BeginTime", submit=LATER, restarts="1")
        + squeue_line("3", "REQUEUE_HOLD", "job requeued in held state", submit=LATER, restarts="1")
        + squeue_line("4", "RUNNING"),
        {"running": "0,4", "pending": "1-3"}, cancels="1"),
    "a controller, which is cancelled first, or it would resubmit what is cancelled": Case(
        RUNS + squeue_line("N/A", "PENDING", "Dependency", job="9", name="HERE-control"),
        {"controller_jobs": ["9"]}, cancels="9 1"),
    # A job without a record: DATA/jobs was emptied, or sbatch timed out although Slurm got the job.
    "a job that runs, and waits, held, without a record": Case(
        squeue_line("0", "RUNNING", name="HERE") + squeue_line("1-4", "PENDING", "JobHeldUser", name="HERE"),
        {"unrecorded_jobs": ["1"]}, ends=2, cancels="1", given=()),
    # A plain sbatch is visible once a task of its array has started.
    "plain sbatch": Case(
        PLAIN_RUNS, {"running": "0", "pending": "1-2"}, sends="3 4", cancels="7",
        given=[did("record", "7_0", time=SINCE_WHEN + 1)]),
    "plain sbatch without a started task": Case(
        PLAIN_RUNS, {"running": "", "pending": ""}, sends=ALL, given=()),
    "plain sbatch with a job id that Slurm has reused": Case(
        PLAIN_RUNS, {"running": "", "pending": ""}, sends=ALL,
        given=[did("record", "7_0", ended(1), time=1000)]),
    # Tasks that are not visible from here are never called failed.
    "another cluster": Case("", {"not_visible": "0-4", "failed": ""}, given=OF_OTHER_CLUSTER),
    "another cluster, asked by SLURM_CLUSTERS": Case(
        RUNS, {"running": "0-4"}, cancels="1", given=OF_OTHER_CLUSTER,
        config=CONFIG.replace("= test", "= other")),
    "a colleague's jobs on a private site, except one whose record has an end": Case(
        "", {"not_visible": "0,2-4", "causes": {"read or write error (74)": "1"}}, sends="1",
        given=OF_KIM, config=f"{CONFIG}PrivateData = jobs,usage\n"),
    "a colleague's jobs if all jobs are visible": Case("", {"not_visible": ""}, sends=ALL, given=OF_KIM),
    "a colleague's plain tasks on a private site, beside the user's own": Case(
        "", {"not_visible": "1", "failed": "2"}, sends="0 2 3 4",
        given=OF_KIM_AND_OURS, config=f"{CONFIG}PrivateData = jobs\n"),
    "the jobs of a folder with this inode number on another file system": Case(
        RUNS, {"running": "", "foreign_jobs": ["1"]}, sends=ALL,
        given=[lambda desk: desk.submitted(identity=f"{desk.identity.partition('.')[0]}.0")]),
    "a copy with the records of its original": Case(
        RUNS + squeue_line("N/A", "PENDING", job="9", name="shardprep-PLAN-1.0-0-control"),
        {"running": "", "foreign_jobs": ["1", "9"]}, given=[did("submitted", identity="1.0")], sends=ALL),
    "a copy of a folder whose jobs have ended": Case(
        squeue_line("0-4", "CANCELLED"), {"foreign_jobs": []}, sends=ALL,
        given=[did("submitted", identity="1.0")]),
    "a folder that was moved": Case(
        RUNS, {"running": "0-4"}, given=[did("submitted"), in_a_folder_with_a_blank], cancels="1",
        next="shardprep status DATA --watch"),
    "tasks that are not visible are sent only if --shards names them": Case(
        status={"not_visible": "0-4"}, given=OF_OTHER_CLUSTER, sends=ALL,
        next="look where these jobs are visible; if they do not run: shardprep submit DATA --shards 0-4"),
    **{
        f"Slurm {version}": Case(
            # Job 3 is another user's, and shards with bad input are not sent again.
            queue,
            {"running": "2-3", "pending": "4", "causes": {"bad input (65)": "0", "killed by signal 9": "1"}},
            cancels="1 2", types="retry", sends="1",
        )
        for version, queue in QUEUES.items()
    },
    # Slurm gives no answer.
    "away": Case(
        status={"done": "0", "failed": "1", "not_visible": "2-4"}, next=AGAIN, ends=74,
        given=[did("submitted"), did("make_done", 0), did("record", "1_1", ended(74)), away]),
    "not installed": Case(
        status={"done": "0", "failed": "1", "not_visible": "2-4"}, next=AGAIN, ends=66,
        given=[did("submitted"), did("make_done", 0), did("record", "1_1", ended(74)),
               lambda desk: desk.patch.setenv("PATH", str(desk.data))]),
    "away, and nobody submitted": Case(given=[away], next="shardprep run DATA", ends=74),
    "away, and a run left too many out": Case(
        given=[run_that_left_too_many_out, away], next=f"{LOOK % 1}shardprep run DATA {ACCEPTING} 0.06",
        ends=74),
    # A run on a machine. With another start time, the process has ended and its id was reused.
    "a run": Case(
        status={"running": "1-2"}, sends="0 3 4",
        given=[did("run_record", "1-2", HOST, os.getpid(), is_this_process=True)]),
    "a run that was killed": Case(
        status={"failed": "1-2"}, sends=ALL, given=[did("run_record", "1-2", HOST, os.getpid())]),
    "a run elsewhere": Case(
        status={"not_visible": "1-2"}, sends="0 3 4", given=[did("run_record", "1-2", "another.host", 1)]),
    # The next command, which is executed.
    "a folder to quote": Case(given=[in_a_folder_with_a_blank], next="shardprep submit DATA", sends=ALL),
    "no permission to write": Case(
        given=[lambda desk: desk.patch.setattr(os, "access", lambda *_, **__: False)],  # root always has it
        next="ask its owner to go on, because you cannot write into DATA", ends=73),
    "the same cause three times": Case(
        given=[MOST_MADE, *failures(4, *[ended(74)] * 3)], sends="4",
        next="correct the cause, then: shardprep retry DATA --shards 4"),
    "too little time three times, but a retry requests more": Case(
        given=[MOST_MADE, *failures(4, *[ended(75, stopped_by="TIMEOUT")] * 3)], sends="4",
        next="shardprep retry DATA --shards 4"),
    "too many are left out": Case(
        given=[MOST_MADE, too_many_left_out], sends="4",
        next=f"{LOOK % 4}shardprep retry DATA "
        f"--worker_args '--input_dir /a {ACCEPTING} 0.06 {ACCEPTING} 0.52'"),
    # Shards that retry does not send, and what it requests.
    "failed too often": Case(status={"can_retry": "2"}, given=OFTEN, types="retry", sends="2"),
    "found wrong by verify": Case(
        status={"done": "0,2-4", "wrong": "1"}, given=[did("submitted"), one_found_wrong], types="retry",
        sends="1"),
    "failed too often, then other memory": Case(given=OFTEN, types="retry --mem_gb 1", sends="1 2"),
    "failed too often, then other arguments": Case(
        given=OFTEN, types="retry --worker_args '--max_bad_fraction 1'", sends="0 1 2"),
    "the newest attempt, where an older one left no record": Case(
        squeue_line("0", "NODE_FAIL"), {"causes": {"OUT_OF_MEMORY": "0"}}, sends=ALL,
        given=[did("submitted"), did("submitted", array("3"), verify="4", number=1, submitted=2.5),
               did("record", "3_0", ended(75, stopped_by="OUT_OF_MEMORY"))]),
    "too little memory": Case(
        given=[submitted(mem_gb=1), TOO_LARGE], types="retry --shards 0 --account mine", sends="0",
        asks=["mem=2048M", "exclude=n1", "account=mine"]),
    "too little memory, up to the largest node's": Case(
        given=[submitted(mem_gb=4), TOO_LARGE,
               lambda desk: desk.answers("sinfo", "cpu*|idle|6000|64|infinite\n")],
        types="retry --shards 0", sends="0", asks=["mem=6000M"]),
    "too little memory per CPU": Case(
        given=[submitted(mem_per_cpu_gb=0.5, cpus_per_task=4), TOO_LARGE],
        types="retry --shards 0", sends="0", asks=["mem-per-cpu=1024M"]),
    "too little time, after scontrol update jobid=1 timelimit=240": Case(
        squeue_line("0", "TIMEOUT", elapsed="4:00:20"), given=[submitted(time_min=60)],
        types="retry --shards 0", sends="0", asks=["time=480"]),
    "too little time, and Slurm ended it late": Case(
        squeue_line("0", "TIMEOUT", elapsed="1:01:50"), given=[submitted(time_min=60)],
        types="retry --shards 0", sends="0", asks=["time=120"]),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_no_task_that_may_run_is_sent_again_and_no_job_of_others_is_cancelled(desk: Desk, name: str) -> None:
    case = CASES[name]
    for step in case.given:
        step(desk)
    desk.answers("config", case.config)
    desk.queue(case.queue.replace("HERE", desk.job_name).replace("PLAN", desk.plan_id[:12]))
    state, line = desk.status(), desk.next()
    assert {field: state[field] for field in case.status} == case.status
    assert not case.next or line == f"next: {case.next}".replace("DATA", shlex.quote(str(desk.data)))
    desk.slurm("cancel", code=case.ends if case.ends in (66, 74) else 0)
    assert desk.calls("scancel") == ([case.cancels] if case.cancels else [])
    word, *flags = shlex.split(case.types)
    words = shlex.split(line.rpartition("shardprep ")[2]) if case.next else []
    if words[:1] not in (["submit"], ["retry"]):
        words = [word, str(desk.data), *flags]
    assert call_main(*words).code == case.ends
    assert desk.sent_shards() == ([case.sends] if case.sends else [])
    script = "".join(desk.sent()).splitlines()
    assert {f"#SBATCH --{option}" for option in case.asks} <= set(script)


def test_cancel_with_shards_cancels_only_their_tasks_and_refuses_a_part_of_a_task(desk: Desk) -> None:
    desk.submitted(array(tasks=["0", "1", "2", "3-4"]))
    desk.queue(squeue_line("0-3", "PENDING", "Priority"))
    desk.slurm("cancel", "--shards", "2-3", code=2)
    assert not desk.calls("scancel")
    desk.slurm("cancel", "--shards", "1,3-4")
    assert desk.calls("scancel") == ["1_1 1_3"]


def test_another_cluster_is_named_and_several_clusters_are_refused(desk: Desk) -> None:
    desk.submitted(cluster="other")
    assert "SLURM_CLUSTERS=other" in desk.status()["why_not_visible"]
    for name, clusters in product(("submit", "status", "retry", "cancel"), ("test,other", "all")):
        desk.slurm(name, code=2, SLURM_CLUSTERS=clusters)
    assert len(desk.calls("sbatch") + desk.calls("squeue")) == 1, "Slurm is not called"


def test_status_in_another_time_zone_knows_the_job_and_prints_its_start_in_local_time(desk: Desk) -> None:
    """Slurm prints times in the caller's time zone."""
    desk.submitted()
    waits = squeue_line("0-4", "PENDING", start="2026-11-23T08:00:00").strip()
    desk.answers_by("squeue", f"[[ $TZ != UTC0 ]] || echo '{waits}'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "KST-9")
        time.tzset()
        state = desk.status()
    time.tzset()
    assert (state["pending"], state["waits_for"][0]["starts"]) == ("0-4", "2026-11-23T17:00:00")


# --- why a shard was not made: by its task's record and log, and the output of squeue


CANCELLED_AT = "slurmstepd: error: *** JOB 8 ON n1 CANCELLED AT 2026-11-22T01:52:04"
KILLED = (74, "its process was killed by signal 9 (out of memory?)")
BAD = (65, "1 document cannot be decoded")


class Row(NamedTuple):
    """The traces of a task that ended, and the cause that status prints."""

    cause: str
    record: list[str | tuple[int, str]] | None = None  # None: no record; []: one without an end
    log: str = ""
    queue: tuple[str, int, int] | None = None  # state, exit code, signal; None: Slurm has forgotten the task
    begin: dict[str, Any] = {}  # noqa: RUF012 - never changed


STEP_STOPPED = "stopped by Slurm: preempted with GraceTime, or its step cancelled"
VANISHED = "ended without a record (killed, or its node failed)"
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
    # killed: the record has the signal, and log or squeue may have the reason
    Row("killed by signal 9", [ended(75, killed_by=9)]),
    Row(
        "OUT_OF_MEMORY", [ended(75, killed_by=9)], "slurmstepd: error: Detected 1 oom_kill event in StepId=8."
    ),
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], "srun: error: n1: task 0: Out Of Memory"),
    Row("OUT_OF_MEMORY", [ended(1)], "srun: error: n1: task 0: Out Of Memory"),  # a wrapper around Python
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], "slurmstepd: error: Exceeded job memory limit".lower()),
    Row("OUT_OF_MEMORY", [ended(75, killed_by=9)], queue=("OUT_OF_MEMORY", 0, 125)),
    # told to stop: log or squeue may have the reason
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
    # a record without an end: the script was killed, too
    Row(VANISHED, []),
    Row("TIMEOUT", [], f"{CANCELLED_AT} DUE TO TIME LIMIT ***"),
    Row("TIMEOUT", [], queue=("TIMEOUT", 0, 0)),
    Row("NODE_FAIL", [], f"{CANCELLED_AT} DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS ***"),
    Row("NODE_FAIL", [], queue=("NODE_FAIL", 0, 0)),
    Row("NODE_FAIL", [], queue=("BOOT_FAIL", 0, 0)),
    Row("NODE_FAIL", [ended(1)], queue=("NODE_FAIL", 0, 0)),
    Row("CANCELLED", [], queue=("CANCELLED", 0, 0)),
    Row("CANCELLED", [], f"{CANCELLED_AT} ***"),
    Row("requeued (scontrol requeue)", [ended(75, signal="TERM")], f"{CANCELLED_AT} DUE TO JOB REQUEUE ***"),
    # a shard that failed, whatever happened to others of its task
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
def test_status_names_each_cause_also_without_slurm_and_the_log(desk: Desk, version: str) -> None:
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
            # 22.05 prints the status of wait()
            shown = str(code << 8 | number) if version == "22.05" else f"{code}:{number}"
            queue.append(squeue_line(str(index), ended_as, exit=shown))
    desk.queue(*queue)

    state, left_nothing = desk.status(), str(len(ROWS) - 1)
    causes = {each["shard"]: each["cause"] for each in state["failures"]}
    assert [causes.get(index, "none") for index in range(len(ROWS))] == [row.cause for row in ROWS]
    assert all(state["remedies"].values())
    assert left_nothing in state["not_begun"]
    assert f"1_{left_nothing}" in state["unexplained"], "sacct may know the cause"

    # Slurm has forgotten the jobs and the logs are removed, but the records have the causes.
    desk.queue("")
    shutil.rmtree(desk.data / "jobs" / "logs")
    left = {each["shard"]: each["cause"] for each in desk.status()["failures"]}
    recorded = {index: row.cause for index, row in enumerate(ROWS) if row.record is not None}
    assert {index: left[index] for index in recorded} == recorded


def test_status_names_the_cause_of_shards_that_run_could_not_make_without_slurm(desk: Desk) -> None:
    lines = b"a line\n" * 50
    world = World(desk.tmp / "of run").raw({"a.txt": lines, "b.txt": lines + b"\xff\n" * 20})
    desk.data = world.plan(num_shards=None).data_dir
    for _ in range(2):
        desk.slurm("run", "--num_proc", 1, code=65)
    attempts = desk.data / "jobs" / "attempts"
    assert len([*attempts.iterdir()]) == 2, "a record of each run that failed"
    desk.patch.setenv("PATH", str(desk.tmp))
    assert desk.status()["causes"] == {"bad input (65)": "1"}
    name, _, *words = shlex.split(desk.next().rpartition("shardprep ")[2])
    desk.slurm(name, *words[:-1], "1", "--num_proc", 1)  # with --max_bad_fraction 1
    desk.slurm("verify")
    assert not [*attempts.iterdir()]


@pytest.mark.parametrize("has_moved", [False, True])
def test_the_cause_of_each_start_of_a_task_is_in_its_own_part_of_the_log(desk: Desk, has_moved: bool) -> None:
    """After a restart, a submission continues its log; the log of plain sbatch is moved away."""
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


def test_logs_shows_the_end_of_each_attempts_log_newest_last(desk: Desk) -> None:
    frame = "shardprep: node n1: shard 2"
    worker = " 10%\r 20%\nerror: of job {}\nsrun: error: n1: task 0: Exited"
    for number, (job, code) in enumerate((("1", 74), ("3", 65), ("5", 75))):
        log = desk.tmp / f"{job}.log"
        if job == "5":
            os.mkfifo(log)  # must not block
        else:
            log.write_text(f"{frame} begins\n{worker.format(job)}\n{frame} ended with exit code {code}\n")
        desk.record(f"{job}_2", ended(code), time=1000 + number, log=str(log))
    lines = [line.strip() for line in desk.slurm("logs", 2).splitlines() if line.startswith("  |")]
    assert lines == ["|  20%", "| error: of job 1", "|  20%", "| error: of job 3"], "only worker's lines"


# --- submissions on disk


FORGED: dict[str, Any] = {
    "version": 99, "user": ["root"], "verify.job_id": "7; rm", "arrays.0.job_id": 1, "arrays.0.mem_mb": 2**70,
    "arrays.0.request.partition": "a\ntouch X", "arrays.0.request.cpus_per_task": "8",
    "arrays.0.tasks": ["0-99999999999"], "arrays.0.tasks ": ["0-99998"] * 50,
}  # fmt: skip
CONTENTS = (b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": Infinity}')
# A change of a submission's record or of its file, and the exit code of all commands.
UNREADABLE: list[tuple[Callable[[Path], object], int]] = [
    *((partial(rewrite_json, **{place.strip(): value}), 65) for place, value in FORGED.items()),
    *((partial(Path.write_bytes, data=content), 65) for content in CONTENTS),
    (lambda path: path.write_bytes(path.read_bytes().replace(b'"job_id": "1"', b'"job_id": "3"')), 65),
    (lambda path: os.truncate(path, 17 << 20), 65),  # sparse
    (lambda path: (path.unlink(), path.mkdir()), 65),
    (lambda path: (path.rmdir(), os.mkfifo(path)), 65),
    (lambda path: (path.unlink(), path.symlink_to("gone")), 65),
]


def test_a_damaged_submission_is_reported_and_blocks_nobody(desk: Desk) -> None:
    """Forged records have correct hashes."""
    for spoil, code in UNREADABLE:
        path = desk.data / "jobs" / "0000.json"
        if not path.is_dir():
            path.unlink(missing_ok=True)
            desk.submitted()
        spoil(path)
        for command in ("status", "submit"):
            assert "jobs/0000.json" in desk.slurm(command, code=code)


# --- records that other users wrote


OTHER = 12345
AS_ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def give_away(path: Path) -> None:
    """Make a file one that another user wrote."""
    os.chown(path, OTHER, OTHER)


TRAINING = squeue_line("N/A", "RUNNING", job="777", name="train-llama")


def foreign_submission(desk: Desk) -> None:
    give_away(desk.submitted(array("777", name="train-llama"), verify="778"))


def foreign_verify_job(desk: Desk) -> None:
    job = {"job_id": "777", "name": "train-llama", "submit_time": WHEN}
    give_away(desk.submitted(verify=job["job_id"]))


def foreign_attempt(desk: Desk) -> None:
    give_away(desk.record("777_0", time=SINCE_WHEN + 1))


def foreign_attempt_at_an_array(desk: Desk) -> None:
    give_away(desk.record("777_0", time=SINCE_WHEN + 1))
    desk.queue(
        squeue_line("0", "RUNNING", job="777", name="x"), squeue_line("1-9", "PENDING", job="777", name="x")
    )


def foreign_controller(desk: Desk) -> None:
    facts = {"format": "shardprep-controller", "version": 4, "job_id": "777", "name": "train-llama"}
    facts |= {"submit_time": WHEN, "identity": desk.identity}
    path = desk.data / "jobs" / "control-777.json"
    path.parent.mkdir()
    path.write_text(json.dumps({**facts, "content_sha256": content_sha256(facts)}))
    give_away(path)


def event_of_a_controller(desk: Desk) -> None:
    path = desk.data / "jobs" / "history.jsonl"
    path.parent.mkdir()
    path.write_text(json.dumps({"time": 1, "event": "submit", "user": "root", "controller": "777"}) + "\n")


@AS_ROOT
@pytest.mark.parametrize(
    "plant",
    [foreign_submission, foreign_verify_job, foreign_attempt, foreign_attempt_at_an_array, foreign_controller,
     event_of_a_controller],
)  # fmt: skip
def test_no_job_of_this_user_is_cancelled_or_counted_because_another_user_recorded_it(
    desk: Desk, plant: Step
) -> None:
    desk.queue(TRAINING)
    plant(desk)
    state = desk.status()
    assert (state["running"], state["pending"], state["controller_jobs"]) == ("", "", [])
    desk.slurm("cancel")
    desk.slurm("cancel", "--shards", "0-4")
    desk.slurm("submit", "--until_done")
    assert not desk.calls("scancel")
    assert desk.sent_shards() == [ALL]


@AS_ROOT
def test_a_foreign_record_does_not_hide_a_job_with_this_data_sets_name(desk: Desk) -> None:
    """It names the user's controller, so that cancel would not see it."""
    give_away(desk.submitted(array("9"), verify="10"))
    desk.queue(squeue_line("N/A", "PENDING", "Dependency", job="9", name=f"{desk.job_name}-control"))
    desk.slurm("cancel")
    assert desk.calls("scancel") == ["9"]


@AS_ROOT
@pytest.mark.parametrize("line_end", ["\n", "\u2028"])
def test_a_line_in_the_name_of_another_users_job_is_no_job(desk: Desk, line_end: str) -> None:
    """It says that a training of this user is a job of the data set."""
    give_away(desk.submitted(array("9"), verify="10", user="zoe"))
    forged = squeue_line("N/A", "RUNNING", job="777", name=desk.job_name)
    name = f"x|{line_end}{forged}".removesuffix("|\n")
    queue = squeue_line("N/A", "RUNNING", job="9", user="zoe", name=name)
    (desk.place / "of_zoe").write_text(queue, encoding="utf-8")
    desk.answers_by("squeue", '[[ "$*" = *--user=zoe* ]] && exec cat PLACE/of_zoe; REAL')
    desk.queue(TRAINING)
    desk.slurm("cancel", code=2)
    assert not desk.calls("scancel")


@AS_ROOT
def test_a_foreign_record_of_a_task_of_this_user_changes_nothing(desk: Desk) -> None:
    """It says that task 0 makes shard 3, and so that shard 0 is in no task."""
    desk.submitted(array(tasks=["0", "1", "2", "3", "4"]))
    desk.queue(squeue_line("0-4", "RUNNING"))
    give_away(desk.record("1_0", shards="3"))
    assert desk.status()["running"] == "0-4"
    desk.slurm("submit")
    desk.slurm("cancel", "--shards", 3)
    assert not desk.sent()
    assert desk.calls("scancel") == ["1_3"]


@AS_ROOT
def test_a_foreign_record_is_not_written_to(desk: Desk) -> None:
    path = desk.record("777_0", SLURM_JOB_USER="root", time=SINCE_WHEN + 1)
    give_away(path)
    before = path.read_bytes()
    desk.log("777_0.log", "slurmstepd: error: *** JOB 777 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***\n")
    path.write_bytes(before.replace(b"begin\n", f"begin\nlog={desk.data}/jobs/logs/777_0.log\n".encode()))
    give_away(path)
    before = path.read_bytes()
    desk.queue(squeue_line("0", "TIMEOUT", job="777", user="12345"))
    desk.status()
    assert path.read_bytes() == before


@AS_ROOT
def test_records_of_others_make_status_ask_about_few_users_and_end_well(desk: Desk) -> None:
    names = [f"user{number}" for number in range(60)]
    for number, user in enumerate([*names, "a,b", "-M x", "a\0b", "\n"]):
        last_second = 253_402_300_799
        path = desk.record(f"{number + 5}_0", SLURM_JOB_USER=user, shards="0", time=last_second)
        give_away(path)
        give_away(desk.submitted(array(f"{number + 500}"), number=number, user=user.replace("\0", "")))
    desk.queue(squeue_line("0", "RUNNING", job="5", user="user0"))
    assert desk.status()["why_not_visible"]
    assert len(desk.calls("squeue")) <= 25


@AS_ROOT
def test_the_name_of_a_cluster_in_a_foreign_record_is_quoted(desk: Desk) -> None:
    give_away(desk.submitted(cluster="x; rm -rf ~ #"))
    assert "SLURM_CLUSTERS='x; rm -rf ~ #' shardprep" in call_main("status", desk.data).out


def test_a_link_in_place_of_a_log_is_not_read(desk: Desk) -> None:
    """A report is for others to read."""
    (desk.tmp / "private").write_text("a line that nobody else may read\n")
    logs = desk.log("7_0.log", "").parent
    (logs / "7_0.log").unlink()
    (logs / "7_0.log").symlink_to(desk.tmp / "private")
    desk.record("7_0", ended(1), log=logs / "7_0.log")
    page = desk.tmp / "report.html"
    for words in (["status"], ["logs"], ["report", "--output", page]):
        said = call_main(words[0], desk.data, *([0] if words == ["logs"] else words[1:]))
        assert "nobody else" not in said.text
    assert "nobody else" not in page.read_text(encoding="utf-8")


@AS_ROOT
def test_jobs_of_another_user_are_shown_and_left_to_that_user(desk: Desk) -> None:
    give_away(desk.submitted(user="kim"))
    desk.queue(squeue_line("0-4", "RUNNING", user="kim"))
    assert desk.status()["running"] == "0-4"
    assert "kim submitted jobs 1" in desk.slurm("cancel", code=2)
    assert "kim submitted jobs 1_0" in desk.slurm("cancel", "--shards", 0, code=2)
    assert not desk.calls("scancel")
    desk.slurm("submit")
    assert not desk.sent(), "they hold back what is queued"


@AS_ROOT
def test_retry_counts_no_attempt_and_takes_no_value_that_another_user_recorded(desk: Desk) -> None:
    """Such as bad input, three failures, a need for memory, and an account to charge."""
    desk.make_done(3, 4)
    own = desk.submitted(array(request={"mem_gb": 1, "time_min": 5}, mem_mb=1024, time_min=5))
    for step in failures(0, *[ended(74)] * 3), failures(1, ended(65)):
        for each in step:
            each(desk)
    desk.record("5_2", ended(75, stopped_by="OUT_OF_MEMORY"), SLURM_MEM_PER_NODE=8000)
    for path in (desk.data / "jobs" / "attempts").iterdir():
        give_away(path)
    assert "task 3_0 of 12345" in call_main("status", desk.data).out, "it is shown whose they are"
    assert desk.status()["can_retry"] == "0-2"
    assert "of 12345" in desk.slurm("logs", 0)
    desk.slurm("retry", "--dry_run")
    desk.slurm("retry")
    assert "#SBATCH --mem=1024M" in desk.sent()[0]
    assert desk.sent_shards() == ["0 1 2"]
    for path in (own, desk.data / "jobs" / "0001.json"):
        path.unlink()
    request = {"account": "theirs", "mem_gb": 9, "qos": "high"}
    give_away(desk.submitted(array(request=request)))
    refusal = desk.slurm("retry", code=78)
    for words in ("--account=theirs", "--mem_gb=9", "SBATCH_QOS=high"):
        assert words in refusal
    desk.slurm("retry", "--account", "mine", "--mem_gb", 1, "--dry_run", SBATCH_QOS="low")


def test_a_record_that_others_may_write_to_does_not_count_for_actions(desk: Desk) -> None:
    desk.submitted().chmod(0o666)
    desk.queue(RUNS)
    desk.slurm("cancel")
    assert not desk.calls("scancel")


def test_a_task_of_a_group_keeps_its_record_to_itself(desk: Desk) -> None:
    mask = os.umask(0o002)
    try:
        desk.task(srun="exit 65", code=65)
    finally:
        os.umask(mask)
    (record,) = (desk.data / "jobs" / "attempts").iterdir()
    assert record.stat().st_mode & 0o777 == 0o644


# --- a controller that somebody renamed


def test_a_renamed_controller_is_cancelled_and_replaced_by_its_id_and_submit_time(desk: Desk) -> None:
    desk.slurm("submit", "--until_done")
    renamed = squeue_line("N/A", "PENDING", "Dependency", job="3", name="prep-control")
    desk.queue(renamed)
    state = desk.status()
    assert (state["controller_jobs"], state["controller_lost"]) == (["3"], "")
    desk.slurm("cancel")
    assert desk.calls("scancel") == ["3"]
    desk.queue(squeue_line("N/A", "PENDING", job="3", name="prep-control", submit="2026-11-22T01:52:09"))
    assert desk.status()["controller_jobs"] == ["3"], "submitted some seconds after the verify job"
    for other in ({"submit": LATER}, {"name": "shardprep-ba9876543210-1.0-0"}, {"user": "kim"}):
        desk.queue(squeue_line("N/A", "PENDING", **{"job": "3", "name": "prep-control", **other}))
        desk.slurm("cancel")
        assert desk.calls("scancel") == ["3"], "Slurm gave the number to another job"


def test_until_done_by_a_person_sends_what_failed_three_times_and_counts_anew(desk: Desk) -> None:
    desk.make_done(0, 2, 3, 4)
    for step in failures(1, *[ended(2)] * 3):
        step(desk)
    desk.slurm("retry", "--until_done", "--round", 2, code=74)
    assert not desk.sent(), "a controller does not"
    desk.slurm("retry", "--until_done")
    assert desk.sent_shards() == ["1"]
    assert "--round 2" in desk.sent()[-1]
    desk.record("1_0", ended(2), shards="1", time=5000)
    assert desk.status()["can_retry"] == "1", "its fourth failure is the first after the retry"
    desk.slurm("retry", "--until_done", "--round", 2)
    assert desk.sent_shards() == ["1", "1"]


@pytest.mark.parametrize("command", ["submit", "retry"])
def test_failures_count_from_the_last_command_of_a_person(desk: Desk, command: str) -> None:
    desk.make_done(0, 2, 3, 4)
    for step in failures(1, *[ended(2)] * 3):
        step(desk)
    desk.slurm(command, "--shards", "1")
    desk.record("1_0", ended(2), shards="1", time=5000)
    assert desk.status()["can_retry"] == "1"
    desk.slurm("retry", "--until_done", "--round", 2)
    assert desk.sent_shards() == ["1", "1"]


# --- what status shows of many shards


def test_each_failure_that_status_shows_has_the_end_of_its_log(desk: Desk) -> None:
    """The newest few."""
    desk.data = World(desk.tmp / "many").raw({"a.txt": "a\n" * 99}).plan(num_shards=20).data_dir
    desk.submitted(array(tasks=[str(index) for index in range(20)]))
    for index in range(20):
        log = desk.log(f"1_{index}.log", f"shard {index}: libfoo.so: no such file\n")
        desk.record(f"1_{index}", ended(1, time=2000 + index * 7 % 20), log=str(log))
    lines = call_main("status", desk.data).out.splitlines()
    shown = [place for place, line in enumerate(lines) if re.match(r"  shard \d{5}, task", line)]
    assert len(shown) == 8
    assert all("libfoo.so" in lines[place + 1] for place in shown)


def test_thousands_of_scattered_shards_are_a_short_line_and_a_short_command(desk: Desk) -> None:
    desk.data = World(desk.tmp / "many").raw({"a.txt": "a\n" * 900}).plan(num_shards=800).data_dir
    scattered = ",".join(str(number) for number in range(0, 800, 2))
    for number in range(3):
        desk.record(f"{number + 1}_0", ended(74), shards=scattered, time=1000 + number)
    lines = call_main("status", desk.data).out.splitlines()
    assert max(map(len, lines)) < 500
    (failed,) = [line for line in lines if "failed, read or write" in line]
    ids, _, more = failed.partition(": shards ")[2].partition(" and ")
    assert ids.count(",") + 1 + int(more.split()[0]) == 400
    assert lines[-1].endswith("--shards 0-798")
    desk.slurm("retry", "--shards", "0-798", "--dry_run")
    said = desk.slurm("retry")
    assert max(map(len, said.splitlines())) < 500
    assert "and " in said


def test_thousands_of_shards_that_are_not_sent_again_are_one_line(desk: Desk) -> None:
    for shard_id in range(5):
        desk.record(f"1_{shard_id}", ended(65))
    said = desk.slurm("retry", code=74)
    assert said.count("left out: ") == 1
    assert "left out: shards 0-4: bad input" in said


# --- ends that only squeue knows


def test_the_time_limit_of_a_killed_plain_task_is_kept_while_squeue_shows_it(desk: Desk) -> None:
    desk.record("7_0", time=SINCE_WHEN + 1)
    desk.queue(squeue_line("0", "CANCELLED", **PLAIN).replace("|N/A|0|", "|7:00|0|"))
    desk.status()
    desk.queue("")
    assert "#SBATCH --time=7\n" in desk.slurm("retry", "--dry_run")


def test_a_restarted_task_that_made_its_shard_is_named_by_why_it_was_restarted(desk: Desk) -> None:
    desk.submitted()
    parts = [
        "shardprep: node n1: shard 0 begins\n*** JOB 1 ON n1 CANCELLED AT now DUE TO JOB REQUEUE ***\n",
        "shardprep: node n1: shard 0 begins\nshardprep: node n1: shard 0 ended with exit code 0\n",
    ]
    desk.record("1_0", log=str(desk.log("1_0.log", "".join(parts))))
    slurm = {"SLURM_ARRAY_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0", "SLURM_RESTART_COUNT": "1"}
    desk.make_done(0, slurm=slurm)
    assert desk.status()["restarts"] == {"requeued (scontrol requeue)": 1}


def test_a_container_that_exits_with_0_without_working_made_no_manifest(desk: Desk) -> None:
    desk.submitted()
    desk.record("1_0")
    log = "shardprep: node n1: shard 1 begins\nshardprep: node n1: shard 1 ended with exit code 0\n"
    desk.record("1_1", log=str(desk.log("1_1.log", log)))
    desk.queue(squeue_line("0", "COMPLETED"))
    assert desk.status()["causes"] == {"finished without a manifest": "0-1"}
    desk.queue("")
    assert desk.status()["causes"] == {"finished without a manifest": "0-1"}


def test_an_empty_answer_of_squeue_is_asked_for_once_more_while_tasks_should_run(desk: Desk) -> None:
    desk.submitted()
    for index in range(5):
        desk.record(f"1_{index}")
    desk.at_waits(lambda _: None)
    once = f"[[ -e PLACE/asked ]] && echo {shlex.quote(RUNS.strip())}; touch PLACE/asked"
    desk.answers_by("squeue", once)
    assert desk.status()["running"] == "0-4"
    (desk.place / "asked").unlink()
    desk.slurm("retry")
    assert not desk.sent()
    assert not (desk.data / "jobs" / "attempts" / "1_0.r0").read_text().count("end")


def test_an_empty_answer_is_asked_for_once_more_before_waiting_tasks_are_sent_again(desk: Desk) -> None:
    """Tasks that wait have no record yet. status, and shards that have a record, need no second look."""
    desk.submitted()
    desk.at_waits(lambda _: None)
    waits = squeue_line("0-4", "PENDING", "Priority").strip()
    desk.answers_by("squeue", f"[[ -e PLACE/asked ]] && echo {shlex.quote(waits)}; touch PLACE/asked")
    desk.slurm("submit")
    assert not desk.sent()
    desk.queue()
    desk.answers_by("squeue", "REAL")
    desk.status()
    for index in range(5):
        desk.record(f"1_{index}", ended(74))
    desk.slurm("submit")
    assert len(desk.calls("squeue")) == 2


def test_a_job_that_a_person_named_like_ours_is_still_known_by_its_id(desk: Desk) -> None:
    desk.submitted()
    desk.queue(squeue_line("0-4", "RUNNING", name="shardprep-mine"))
    assert desk.status()["running"] == "0-4"
    other = "shardprep-0123456789ab-77.3f2a91-0"
    desk.queue(squeue_line("0-4", "RUNNING", name=other))
    assert desk.status()["running"] == "", "Slurm gave the id again, to a job of another data set"


def test_a_held_task_among_waiting_ones_is_named_with_the_command_that_releases_it(desk: Desk) -> None:
    desk.submitted()
    for held in ("JobHeldUser", "launch failed requeued held", "job requeued in held state"):
        desk.queue(squeue_line("0-4", "PENDING", f"JobArrayTaskLimit,{held}"))
        (waits,) = desk.status()["waits_for"]
        assert waits["to_type"] == "scontrol release 1"
        assert "max_parallel" in waits["means"]
        assert "held" in waits["means"]
    reason = "ReqNodeNotAvail, UnavailableNodes:n[1-2]"
    desk.queue(squeue_line("0-4", "PENDING", reason))
    assert desk.status()["waits_for"][0]["to_type"] == ""


# --- no answer, or an incomplete one

TEXT = squeue_line("0-2", "RUNNING") + squeue_line("3-4", "PENDING", "Priority")
SILENT = "squeue: error: cluster two: Unable to contact slurm controller"
# Standard output, standard error and exit code of squeue.
ANSWERS: list[tuple[str, str, int]] = [
    ("", "slurm_load_jobs error: Unable to contact slurm controller (connect failure)", 1),
    ("", "slurm_load_jobs error: Socket timed out on send/recv operation", 1),
    ("", "error: Munge decode failed: Expired credential", 1),
    ("", "slurm_load_jobs error: Protocol authentication error", 1),
    ("", "slurm_load_jobs error: Zero Bytes were transmitted or received", 1),
    ("", "squeue: error: 'other' can't be reached now, or it is an invalid entry for SLURM_CLUSTERS.", 1),
    (TEXT, SILENT, 0),  # of another server
    *((TEXT[:size], "", 0) for size in (3, 40, len(TEXT) - 60, len(TEXT) - 10)),
    *((text, "", 0) for text in ("x", "1|0|RUN", "|||||||||\n", "\0\0", "\udcff", "\ufffd" * 99)),
    ("1|0|FAILED|x|many|n1|0:00|4|root|n|\n", "", 0),
]


def test_without_an_answer_of_slurm_no_shard_is_called_failed_or_sent_again(desk: Desk) -> None:
    desk.submitted()
    desk.log("1_0.log", "shardprep: node n1: shard 0 begins\n")
    desk.answers_by("squeue", "cat PLACE/out; cat PLACE/err >&2; exit $(<PLACE/code)")
    for out, err, code in ANSWERS:
        desk.answers("out", out.encode(errors="surrogateescape"))
        desk.answers("err", err)
        desk.answers("code", str(code))
        state = desk.status()
        assert (state["failed"], state["not_visible"], bool(state["slurm_away"])) == ("", "0-4", True), out
        for name in ("submit", "retry", "cancel"):
            desk.slurm(name, code=74)
    assert not desk.sent()
    assert not desk.calls("scancel")


def test_submit_wait_gives_up_an_hour_after_the_last_answer_of_slurm(desk: Desk) -> None:
    desk.submitted()
    waits: list[float] = []
    # Slurm answers only the first call, by submit.
    once = "[[ ! -e PLACE/answered ]] || { echo 'Socket timed out' >&2; exit 1; }"
    desk.answers_by("squeue", f"{once}; touch PLACE/answered; echo {shlex.quote(RUNS.strip())}")
    desk.at_waits(waits.append)
    desk.slurm("submit", "--wait", code=74)
    assert waits[:3] == [5, 10, 20]
    assert 3000 < sum(waits) < 4000


def test_a_shard_that_is_done_while_status_waits_for_slurm_is_not_called_failed(desk: Desk) -> None:
    desk.submitted()
    record = desk.record("1_0")
    desk.make_done(0)
    manifest = desk.data / "shard-00000.json"
    hidden = manifest.rename(desk.data / "later")
    ends = f"{shlex.join(['mv', str(hidden), str(manifest)])}; {shlex.join(['rm', str(record)])}"
    desk.answers_by("squeue", f"{ends}; echo {shlex.quote(squeue_line('1-4', 'RUNNING').strip())}")
    state = desk.status()
    assert (state["done"], state["failed"]) == ("0", "")


# --- jobs that wait for a person


NEVER_BEGINS = ("PartitionTimeLimit", "PartitionConfig", "QOSGrpCPUMinutesLimit", "AssocGrpCPUMinutesLimit")
# Slurm's reason -> the command to type; "": only an administrator can help; None: the job starts by itself.
REASONS: dict[str, str | None] = {
    **dict.fromkeys(("launch failed requeued held", "JobHeldUser"), "scontrol release 1"),
    **dict.fromkeys(("launch_failed_requeued_held", "job_requeued_in_held_state"), "scontrol release 1"),
    **dict.fromkeys(("QOSMinCpuNotSatisfied", "QOSMinGRES", "QOSMaxMemoryPerNode"), "shardprep cancel {}"),
    **dict.fromkeys(("MaxMemPerLimit", "QOSMinMemory"), "shardprep cancel {}"),
    **dict.fromkeys((*NEVER_BEGINS, "AssocMaxWallDurationPerJobLimit"), "shardprep cancel {}"),
    "JobHeldAdmin": "",
    **dict.fromkeys(("QOSGrpCPURunMinutesLimit", "Resources")),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_job_that_waits_for_a_person_is_reported_and_ends_submit_wait(desk: Desk, reason: str) -> None:
    typed = REASONS[reason]
    desk.submitted()
    desk.queue(squeue_line("0-4", "PENDING", reason), squeue_line("N/A", "PENDING", "Dependency", **VERIFY))
    (waits,) = desk.status()["waits_for"]
    assert (waits["reason"], waits["to_type"]) == (reason, (typed or "").format(desk.data))
    assert waits["means"]
    if typed is None:
        assert desk.next().endswith("--watch")
        return
    assert not typed or desk.next() == f"next: {waits['to_type']}"
    desk.at_waits(lambda _: pytest.fail("it waits"))
    desk.slurm("submit", "--wait", code=74)


def test_submit_wait_does_not_wait_for_a_verify_job_that_is_no_longer_needed(desk: Desk) -> None:
    """The verify job of an earlier submission waits for nodes that are down."""
    desk.submitted()
    desk.submitted(array("5"), verify="6", number=1)
    desk.make_done(*range(5))
    desk.slurm("verify")
    reason = "Nodes required for job are DOWN"
    desk.queue(squeue_line("N/A", "PENDING", reason, **VERIFY))
    desk.at_waits(lambda _: pytest.fail("it waits"))
    desk.slurm("submit", "--wait")
    desk.queue(squeue_line("N/A", "PENDING", reason, **{**VERIFY, "job": "6"}))
    with pytest.raises(pytest.fail.Exception):
        desk.slurm("submit", "--wait")


# --- fields of status


# A program may read each of these: none goes, or changes its meaning, without another version.
STATUS_FIELDS = """
format version folder num_shards done running pending failed not_submitted not_visible num_done
num_running num_pending num_failed num_not_submitted num_not_visible causes remedies can_retry not_begun
failures restarts unexplained other_plan broken wrong findings verify_trouble verified can_write
accepting_args unreadable has_slurm has_jobs waits_for unrecorded_jobs foreign_jobs controller_jobs
controller_trouble controller_lost slurm_away why_not_visible history sources num_tokens tokens_per_s left_s
"""
REPORT_FIELDS = """
format version folder written shardprep plan shards counts validation tar_bytes idx_bytes sources
left_out per_shard work slurm_away again
"""


@pytest.mark.parametrize(("command", "names"), [("status", STATUS_FIELDS), ("report", REPORT_FIELDS)])
def test_json_has_its_fields_and_the_page_names_no_others(desk: Desk, command: str, names: str) -> None:
    desk.submitted()
    desk.queue(squeue_line("0", "PENDING", "Resources"), QUEUES["24.11.5"])
    fields = json.loads(call_main(command, desk.data, "--json").out)
    assert list(fields) == names.split()
    page = (ROOT / "docs" / "json.md").read_text(encoding="utf-8")
    [table] = re.findall(rf"^\| `{command}` \| \|$(.*?)^$", page, re.MULTILINE | re.DOTALL)
    rows = re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} <= set(fields)


def test_speed_is_measured_since_the_newest_submission_and_the_rest_includes_waits(desk: Desk) -> None:
    now = time.time()
    desk.patch.setattr("slurm.speed.time.time", lambda: now)
    desk.submitted(submitted=now - 1000)
    desk.submitted(array("5"), verify="6", number=1, submitted=now - 60)
    desk.queue(squeue_line("1-4", "RUNNING", job="5"))
    before, later = ({"SLURM_ARRAY_JOB_ID": job_id} for job_id in ("1", "5"))
    desk.make_done(0, began=now - 900, wall_s=60.0, slurm=before)
    assert desk.status()["tokens_per_s"] is None
    desk.make_done(1, began=now - 50, wall_s=50.0, slurm=later)
    state = desk.status()
    tokens = json.loads((desk.data / "shard-00001.json").read_text())["counts"]["num_tokens"]
    assert state["tokens_per_s"] == round(tokens / 60)
    assert 100 < state["left_s"] < 300, "three shards, if one takes a minute"
    begins = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + 7200))
    running = squeue_line("3-4", "RUNNING", job="5")
    desk.queue(running, squeue_line("2", "PENDING", "BeginTime", job="5", start=begins))
    assert abs(desk.status()["left_s"] - 7200) < 3
    desk.queue(running, squeue_line("2", "PENDING", "launch failed requeued held", job="5"))
    assert desk.status()["left_s"] is None, "the start is unknown"


def test_a_job_of_all_shards_is_late_only_if_it_has_made_none_for_long(desk: Desk) -> None:
    now = time.time()
    desk.patch.setattr("slurm.speed.time.time", lambda: now)
    desk.submitted(array(tasks=["0-4"]), submitted=now - 7200)
    desk.queue(squeue_line("0", "RUNNING", elapsed="1:59:00"))
    of_job = {"SLURM_ARRAY_JOB_ID": "1"}
    desk.make_done(0, began=now - 3700, wall_s=60.0, slurm=of_job)
    assert desk.status()["left_s"] is None
    desk.make_done(1, began=now - 70, wall_s=60.0, slurm=of_job)
    assert desk.status()["left_s"] is not None


def test_status_reports_a_verify_job_that_ran_out_of_time_or_cannot_start(desk: Desk) -> None:
    desk.submitted()
    desk.make_done(*range(5))
    words = "*** JOB 2 ON n1 CANCELLED AT 2026-11-22T01:52:04 DUE TO TIME LIMIT ***\n"
    log = desk.log("verify-2.log", words)
    desk.record("2_0", shards="", log=str(log))
    trouble = desk.status()["verify_trouble"]
    assert ("TIMEOUT" in trouble, str(log) in trouble) == (True, True)
    assert desk.next() == f"next: shardprep verify {desk.data}"
    desk.queue(squeue_line("N/A", "PENDING", "PartitionTimeLimit", job="2", name=f"{NAME}-verify"))
    assert "PartitionTimeLimit" in desk.status()["verify_trouble"]


@pytest.mark.parametrize("job", ["2", "3"])
def test_status_says_how_to_release_a_verify_job_or_controller_that_somebody_holds(
    desk: Desk, job: str
) -> None:
    desk.submitted()
    desk.make_done(*range(5))
    name = f"{NAME}-verify" if job == "2" else f"{desk.job_name}-control"
    desk.queue(squeue_line("N/A", "PENDING", "Dependency", job=job, name=name))
    assert "scontrol release" not in desk.slurm("status")
    desk.queue(squeue_line("N/A", "PENDING", "JobHeldUser", job=job, name=name))
    assert f"type: scontrol release {job}\n" in desk.slurm("status")


def note_opened(patch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that gets the names of all files opened from now on."""
    opened, open_ = list[str](), os.open

    def noting(path: str, *rest: Any, **at: Any) -> int:
        opened.append(Path(path).name)
        return open_(path, *rest, **at)

    patch.setattr(os, "open", noting)
    return opened


def test_status_watch_reads_each_manifest_and_log_only_once(desk: Desk) -> None:
    desk.submitted()
    desk.make_done(0, 1, 2)
    desk.record("1_3", ended(74), log=str(desk.log("1_3.log", "an error\n")))
    desk.queue(squeue_line("N/A", "RUNNING", **VERIFY))
    opened, looks = note_opened(desk.patch), list[Any]()
    # Stop after the next look.
    desk.at_waits(lambda _: (looks.append(Counter(opened)), desk.queue("")))
    desk.slurm("status", "--watch")
    for name in [f"shard-{number:05d}.json" for number in range(3)]:
        assert looks[0][name] == opened.count(name) == 1, name
    assert (looks[0]["1_3.r0"], looks[0]["1_3.log"]) == (2, 1), "records before and after calling Slurm"
    assert (len(desk.calls("squeue")), len(desk.calls("scontrol"))) == (2, 1)


def test_status_watch_continues_while_a_run_on_this_machine_makes_shards(desk: Desk) -> None:
    path, looks = desk.run_record("1", socket.gethostname(), os.getpid(), is_this_process=True), list[None]()
    desk.at_waits(lambda _: looks.append(path.unlink()))
    desk.slurm("status", "--watch")
    assert len(looks) == 1


# --- retry and --until_done


def test_until_done_stops_if_only_people_can_help_and_notifies_once(desk: Desk) -> None:
    notified = desk.tmp / "notified"
    desk.slurm("submit", "--until_done", "--notify", f'echo "$SHARDPREP_RESULT" >>{notified}')
    assert not any("shardprep_notify=" in script for script in desk.sent()), "only at the end"
    desk.make_done(0, 1, 2, 3)
    desk.record("1_4", ended(65))
    desk.slurm("retry", "--until_done", code=74)
    assert "bad input (65)" in desk.status()["history"][-1]["why"]
    assert notified.read_text() == "not verified\n"
    desk.record("1_4", ended(74))  # a controller that fails is in the history, too
    desk.slurm("retry", "--until_done", "--setup", "/no/such/file", code=2)
    assert "/no/such/file" in desk.status()["history"][-1]["why"]
    desk.slurm("retry", "--until_done", "--round", 5)
    assert "--round 6" in desk.sent()[-1]
    desk.slurm("retry", "--until_done", "--round", 6, code=74)
    assert desk.status()["history"][-1]["event"] == "stopped", "after five rounds"


def test_there_is_one_controller_and_status_reports_one_that_died_but_was_not_cancelled(desk: Desk) -> None:
    control = squeue_line("N/A", "PENDING", "Dependency", job="3", name=f"{desk.job_name}-control")
    desk.slurm("submit", "--until_done", "--shards", "0-2")
    assert "--shards 0-2" in desk.sent()[2], "the controller gets the requested shards"
    assert desk.status()["controller_lost"] == "3"
    desk.queue(squeue_line("0-2", "PENDING", name=desk.job_name))
    desk.slurm("cancel", "--shards", 0)
    assert desk.status()["controller_lost"] == "3"
    desk.queue(control)
    assert desk.status()["controller_lost"] == ""
    desk.slurm("submit", "--until_done", "--shards", "3")
    assert desk.calls("scancel") == ["1_0", "3"], "the earlier controller"
    desk.queue(control.replace("3|", "6|", 1))
    desk.make_done(*range(5))
    desk.slurm("submit", "--until_done")
    assert len(desk.sent()) == 6, "the existing controller is enough"
    desk.slurm("cancel")
    desk.queue("")
    assert desk.status()["controller_lost"] == ""


def test_an_earlier_controller_is_cancelled_after_the_record_and_before_the_release(desk: Desk) -> None:
    """A submission that fails leaves the only controller, and one that dies leaves no two of them."""
    desk.queue(squeue_line("N/A", "PENDING", "Dependency", job="99", name=f"{desk.job_name}-control"))
    desk.answers_by("sbatch", "[[ -e PLACE/room || $* != *--dependency* ]] || exit 1; REAL")
    desk.slurm("submit", "--until_done", code=2)
    assert "99" not in desk.calls("scancel")
    (desk.place / "room").touch()
    desk.answers_by("scontrol", "[[ $1 != release ]] || exit 1; REAL")
    desk.slurm("submit", "--until_done", code=2)
    assert desk.calls("scancel")[-1] == "99"


def test_clean_removes_the_logs_of_tasks_once_the_data_set_is_verified(desk: Desk) -> None:
    names = ["7_0.log", "control-9.log", "verify-8.log"]
    *_, logs = (desk.log(name, "words\n").parent for name in names)
    desk.slurm("clean")
    assert len(list(logs.iterdir())) == 3
    desk.make_done(*range(5))
    desk.slurm("verify")
    desk.slurm("clean")
    assert sorted(path.name for path in logs.iterdir()) == names[1:]


# --- report

NAMES = ("뉴스 <b>굵게", "code", "웹문서")
SECRET = "https://user:hunter2@host/?api_token=abc"
NODE = '"><img src=x onerror="alert(1)'


@pytest.fixture(scope="module")
def reported(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Four packed shards of three sources, with left-out documents and markup in names. Never written to."""
    folder = tmp_path_factory.mktemp("report")
    files: dict[str, Any] = {f"{name}/글.txt": hostile_text(150) for name in NAMES}
    files |= {"code/bad.txt": b"good\n\xff\xfe\ncaf\xe9 again\n", "LICENSE.txt": "a\n", "<script>.log": "a\n"}
    world = World(folder, data_dir=folder / "자료 <i>").raw(files)
    world.make(num_shards=4, recursive=True, record="packed", seq_len=64, max_bad_fraction=0.9)
    facts = {"run.host": NODE, "run.engine": f"<b>fast|tokens{{x}}</b> {SECRET} \x1b[31m"}
    rewrite_json(world.data_dir / "shard-00001.json", **facts)
    return world


def report(folder: Path) -> dict[str, Any]:
    return dict(json.loads(call_main("report", folder, "--json").ends(0).out))


def page(folder: Path, place: Path) -> tuple[str, str]:
    """Write the page, and return its source and the text between its tags."""
    call_main("report", folder, "--output", place / "page.html").ends(0)
    source = (place / "page.html").read_text(encoding="utf-8")
    return source, html.unescape(re.sub("<[^>]*>", "", source))


def test_the_numbers_of_a_report_are_sums_over_the_manifests(reported: World) -> None:
    found = report(reported.data_dir)
    for name in ("num_samples", "num_documents", "num_tokens", "num_pad_tokens", "input_bytes"):
        assert found["counts"][name] == sum(each["counts"][name] for each in reported.manifests()), name
    whole, *sources = found["sources"]
    assert {each["name"] for each in sources} == set(NAMES)
    assert whole["num_tokens"] == sum(each["num_tokens"] for each in sources) == found["counts"]["num_tokens"]
    of_status = json.loads(call_main("status", reported.data_dir, "--json").out)
    assert of_status["num_tokens"] == whole["num_tokens"]
    for each in sources:
        counts = of_status["sources"][each["name"]]
        assert counts["num_tokens"] == each["num_tokens"]
        files = (reported.raw_dir / each["name"]).iterdir()
        assert counts["num_bytes"] == sum(path.stat().st_size for path in files)
    assert found["tar_bytes"] == sum(path.stat().st_size for path in reported.data_dir.glob("*.tar"))
    assert found["left_out"] == {"undecodable": 2}
    assert sorted(found["plan"]["inputs_left_out"].values()) == [["<script>.log"], ["LICENSE.txt"]]
    assert (found["shards"]["verified"], found["shards"]["done"]) == (True, "0-3")


def test_the_lengths_of_a_report_are_those_of_the_texts(tmp_path: Path) -> None:
    """A document has BOS and a token per letter."""
    chooser = random.Random(7)
    lengths = [1 + int(chooser.paretovariate(0.8)) % 900 for _ in range(400)]
    world = World(tmp_path).raw({"a.txt": "\n".join("Q" * length for length in lengths)})
    (whole,) = report(world.plan(num_shards=3).run().data_dir)["sources"]
    num_tokens = [length + 1 for length in lengths]
    assert (whole["num_tokens"], whole["text_bytes"]) == (sum(num_tokens), sum(lengths))
    assert whole["bytes_per_token"] == round(sum(lengths) / sum(num_tokens), 3)
    for percent in (50, 90, 99):
        exact = sorted(num_tokens)[math.ceil(len(lengths) * percent / 100) - 1]
        assert exact <= whole[f"length_p{percent}"] <= exact * 1.125


def test_the_pictures_of_a_report_are_svg_that_show_its_numbers(reported: World, tmp_path: Path) -> None:
    found = report(reported.data_dir)
    shares = found["work"]["done_over_time"]
    assert shares == sorted(shares)
    assert shares[-1] == 1
    source, _ = page(reported.data_dir, tmp_path)
    drawn = re.findall(r"<svg.*?</svg>", source, re.DOTALL)
    for picture in drawn:
        ElementTree.fromstring(picture)
    widths = re.findall(r'class="bar" width="([\d.]+)" height="10"', source)
    parts = [each for each in found["sources"] if not each["is_all"]]
    expected = [100 * each["num_tokens"] / found["counts"]["num_tokens"] for each in parts]
    assert [float(width) for width in widths] == pytest.approx(expected, abs=0.01)
    assert len(expected) > 1


def test_markup_stays_text_and_no_secret_is_shown(reported: World, tmp_path: Path) -> None:
    source, shown = page(reported.data_dir, tmp_path)
    elements = Counter(re.findall(r"<(\w+)", source))
    assert not elements.keys() & {"script", "i", "img", "iframe", "link", "object"}
    assert elements["b"] == 5, "only those of the tiles"
    for text in (NAMES[0], NODE, "<b>fast|tokens{x}</b>", "<script>.log"):
        assert text in shown, "it is shown unchanged"
    attributes = set(re.findall(r'([\w-]+)="', "".join(re.findall("<[^>]*>", source))))
    of_pictures = {"viewBox", "preserveAspectRatio", "aria-hidden", "x", "y", "width", "height", "points"}
    of_text = {"lang", "charset", "http-equiv", "content", "name", "class", "data-name"}
    assert attributes == of_text | of_pictures
    assert "default-src 'none'" in source
    assert not re.search(r"url\(|@import", source)
    for form in (call_main("report", reported.data_dir, "--json").out, source):
        assert "***@host" in form
        assert not re.search("hunter2|api_token=abc|\x1b", form)


def test_the_report_of_an_unfinished_data_set_has_causes(desk: Desk) -> None:
    (desk.place / "away").touch()
    desk.submitted()
    desk.record("1_1", ended(75, stopped_by="OUT_OF_MEMORY"))
    found = report(desk.data)
    assert (found["shards"]["missing"], found["shards"]["num_done"]) == ("0-4", 0)
    assert found["shards"]["failed"] == {"OUT_OF_MEMORY": "1"}
    assert found["slurm_away"]
    assert "OUT_OF_MEMORY" in page(desk.data, desk.tmp)[1]


def test_a_report_reads_each_manifest_once_and_neither_shards_nor_slurm(desk: Desk, reported: World) -> None:
    opened = note_opened(desk.patch)
    before = sorted(reported.data_dir.rglob("*"))
    desk.patch.chdir(desk.tmp)
    call_main("report", reported.data_dir).ends(0)
    assert (desk.tmp / "report.html").is_file()
    assert sorted(reported.data_dir.rglob("*")) == before, "nothing is written into the data set"
    of_shards = [name for name in opened if name.startswith("shard-")]
    assert sorted(of_shards) == sorted(path.name for path in reported.data_dir.glob("shard-*.json"))
    assert [desk.calls(name) for name in ("squeue", "scontrol")] == [[], []]
    call_main("report", reported.data_dir, "--output", desk.tmp / "none" / "x.html").ends(73)


TEMPLATE = "{% for m in messages %}<|start_header_id|>{{ m.role }}: {{ m.content }}<|eot_id|>{% endfor %}"
OPTIONS: list[dict[str, Any]] = [
    {"num_shards": 3, "keep_text": False, "append_eos": True, "token_format": "npy", "hash_inputs": True},
    {"shard_bytes": "4k", "also": "*.md", "allow_special_tokens": True, "max_bad_fraction": 0.5},
    {"limit": 20, "digests": True, "record": "packed", "seq_len": 64, "pack": "best_fit"},
    {"record": "chat", "seq_len": 64, "validation_fraction": 0.1},  # uses the tokenizer's template
    {"record": "chat", "seq_len": 64, "chat_template_file": "own.jinja"},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_commands_in_a_report_make_the_same_plan_again_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Even if the plan was made with relative paths in another folder."""
    turns = [{"role": "user", "content": "a?"}, {"role": "assistant", "content": "b."}]
    is_chat, has_own = options.get("record") == "chat", "chat_template_file" in options
    ending, text = ("jsonl", [{"messages": turns}] * 40) if is_chat else ("txt", hostile_text(60))
    place, elsewhere = tmp_path / "my work", tmp_path / "elsewhere"
    elsewhere.mkdir()
    save_tokenizer(place / "tokenizer", None if has_own else TEMPLATE)
    world = World(place).raw({f"a.{ending}": text, f"b.{ending}": text, "more.md": ""})
    (place / "own.jinja").write_text(TEMPLATE)
    monkeypatch.chdir(place)
    world.main("plan", input_dir="raw", output_dir="data", model_id="tokenizer", **options).ends(0)
    monkeypatch.chdir(elsewhere)
    for line in report(world.data_dir)["again"]["commands"][:-2]:  # before run and verify
        words = shlex.split(line)
        if words[0] == "shardprep":
            call_main(*words[1:]).ends(0)
        else:
            run_child(words, cwd=elsewhere)
    again = World(tmp_path, data_dir=elsewhere / "NEW")
    assert again.plan_json()["plan_id"] == world.plan_json()["plan_id"]
