"""Why a shard was not made, by all that is left of its task: its record, its log, and what squeue shows."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from tests.slurm.fake_slurm import Desk, FakeSlurm, array, ended, failure, squeue_line

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

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
        "OUT_OF_MEMORY",
        [ended(75, killed_by=9)],
        "slurmstepd: error: Detected 1 oom_kill event in StepId=8.0.",
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
    Row(
        "stopped by Slurm: preempted with GraceTime, or its step cancelled",
        [ended(75, signal="TERM")],
        CANCELLED_AT.replace("JOB 8", "STEP 8.0"),
    ),
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


def squeue_lines(version: str) -> list[str]:
    """squeue's answer: 22.05 prints an exit code as wait() has it, 24.11 as CODE:SIGNAL."""
    lines = []
    for index, row in enumerate(ROWS):
        if row.queue is not None:
            state, code, number = row.queue
            shown = str(code << 8 | number) if version == "22.05" else f"{code}:{number}"
            lines.append(squeue_line(str(index), state, exit=shown))
    return lines


@pytest.mark.parametrize("version", ["22.05", "24.11"])
def test_the_cause_of_every_failure_is_told_and_stays_when_slurm_and_the_log_have_forgotten_it(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path, version: str
) -> None:
    desk = Desk(data=tmp_path / "data", fake=fake)
    prep.plan(sample_dir, desk.data, num_shards=len(ROWS))
    desk.submitted(array(tasks=[str(index) for index in range(len(ROWS))]))
    for index, row in enumerate(ROWS):
        log = desk.log(f"1_{index}.log", f"shardprep: node n1: shard {index} begins\n{row.log}\n")
        if row.record is not None:
            lines = [line if isinstance(line, str) else failure(index, *line) for line in row.record]
            desk.record(f"1_{index}", *lines, log=str(log), **row.begin)
    desk.queue(*squeue_lines(version))

    def causes(state: dict[str, Any]) -> list[str]:
        found = {each["shard"]: each["cause"] for each in state["failures"]}
        return [found.get(index, "none") for index in range(len(ROWS))]

    state = desk.status()
    assert causes(state) == [row.cause for row in ROWS]
    assert all(state["remedies"].values())
    left_nothing = str(len(ROWS) - 1)
    assert left_nothing in state["not_begun"]
    assert f"1_{left_nothing}" in state["unexplained"], "the accounts may know"

    # MinJobAge later, and the logs are removed: the records have it.
    desk.queue("")
    shutil.rmtree(desk.data / "jobs" / "logs")
    left = zip(ROWS, causes(desk.status()), strict=True)
    assert [cause for row, cause in left if row.record is not None] == [
        row.cause for row in ROWS if row.record is not None
    ]
