"""What status, submit, retry and cancel conclude where Slurm shows little, or the wrong jobs."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from shardprep.errors import ReadWriteError
from shardprep.format.attempts import folder_identity
from shardprep.format.plan import need_plan
from slurm import commands
from slurm import queue as shown_jobs
from slurm import state as dataset_state
from slurm.commands import SlurmAway, ask_patiently, slurm_answer
from slurm.queue import parse_queue
from slurm.script import names_begin
from slurm.send import parse_job
from slurm.state import find_state
from tests.children import run_child
from tests.slurm.fake_slurm import (
    JOB,
    NAME,
    QUEUES,
    WHEN,
    FakeSlurm,
    ended,
    make_done,
    slurm,
    squeue_line,
    status,
    submission,
    submitted,
    write_index,
    write_log,
    write_record,
)

pytestmark = pytest.mark.processes

LATER = "2026-11-22T09:00:00"
SINCE_WHEN = datetime.strptime(f"{WHEN}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
CONFIG = "ClusterName = test\nMaxArraySize = 1001\n"


def plain_line(indices: str, state: str, words: str = "") -> str:
    """A line of ``sbatch prep_array.sh WORDS``, as 22.05 shows it; 24.11 shows no words."""
    command = f"/home|/home/kim/prep_array.sh{words}|"
    return squeue_line(indices, state, "Priority", job="7", name="shardprep", command=command)


# squeue's lines where job 1, an array of five tasks, was submitted -> what status says
SHOWN: dict[str, tuple[str, dict[str, str]]] = {
    "a job that waits and runs": (
        squeue_line("0-1", "RUNNING") + squeue_line("[2-4%2]", "PENDING"),
        {"running": "0-1", "pending": "2-4"},
    ),
    "the same number from a controller that lost its state": (
        squeue_line("0-4", "RUNNING", submit=LATER),
        {"running": ""},
    ),
    "a task that Slurm started again, and dated anew": (
        squeue_line("0-4", "RUNNING", submit=LATER, restarts="1"),
        {"running": "0-4"},
    ),
    "another plan's job of the same number": (
        squeue_line("0-4", "RUNNING", name="shardprep-ba9876543210-3f2a91-0"),
        {"running": ""},
    ),
    "another user's job of the same number": (squeue_line("0-4", "RUNNING", user="kim"), {"running": ""}),
    "a job that a person renamed": (squeue_line("0-4", "RUNNING", name="mine"), {"running": "0-4"}),
    "states of a later Slurm": (
        squeue_line("0-1", "EXPEDITING") + squeue_line("2-4", "RESV_DEL_HOLD"),
        {"running": "0-1", "pending": "2-4", "failed": ""},
    ),
    "what people hold, suspend and requeue": (
        squeue_line("0", "SUSPENDED")
        + squeue_line("1", "PENDING", "JobHeldUser")
        + squeue_line("2", "PENDING", "BeginTime", submit=LATER, restarts="1")
        + squeue_line("3", "REQUEUE_HOLD", "job requeued in held state", submit=LATER, restarts="1")
        + squeue_line("4", "RUNNING"),
        {"running": "0,4", "pending": "1-3", "suspended": "0"},
    ),
}


@pytest.mark.parametrize("what", SHOWN)
def test_a_job_is_ours_by_number_user_and_time_of_submission_and_is_neither_sent_nor_cancelled_if_not(
    fake: FakeSlurm, data_dir: Path, what: str
) -> None:
    lines, expected = SHOWN[what]
    submitted(data_dir)
    fake.answers("squeue", lines)
    state = status(data_dir)
    assert {name: state[name] for name in expected} == expected
    is_ours = bool(expected["running"])
    if is_ours:
        slurm("submit", data_dir)
        slurm("retry", data_dir)
        assert not fake.sent()
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == (["1"] if is_ours else [])


@pytest.mark.parametrize("version", QUEUES)
def test_status_retry_and_cancel_work_on_an_old_and_on_a_new_slurm(
    fake: FakeSlurm, data_dir: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    fake.answers("squeue", QUEUES[version])
    state = status(data_dir)
    assert (state["running"], state["pending"]) == ("2-3", "4")
    assert state["causes"] == {"bad input (65)": "0", "killed by signal 9": "1"}
    assert "left: shard 00000: bad input (65)" in slurm("retry", data_dir, "--dry_run")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")  # as a task of the array itself, which ends with it
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    assert "warning" in slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1 2"], "job 3 is another's"
    assert "warning" in slurm("cancel", data_dir, "--shards", "2")
    assert "warning" not in slurm("cancel", data_dir, "--shards", "3")


# --- plain sbatch


@pytest.mark.parametrize(
    ("version", "words", "record", "pending"),
    [
        ("22.05.8", " {data} --input_dir /raw", None, "1-2"),
        ("22.05.8", " {data}2", None, ""),
        ("24.11.5", "", "began", "1-2"),
        ("24.11.5", "", None, ""),
        ("24.11.5", "", "long ago", ""),  # of a controller that lost its state, and gives ids again
    ],
)
def test_plain_sbatch_is_seen_by_what_was_typed_or_once_a_task_of_its_array_began(
    fake: FakeSlurm, data_dir: Path, version: str, words: str, record: str | None, pending: str
) -> None:
    fake.answers("config", f"{CONFIG}SLURM_VERSION = {version}\n")
    fake.answers("squeue", plain_line("[1-2%1]", "PENDING", words.format(data=data_dir)))
    if record:
        rest = [] if record == "began" else [ended(1)]
        began = SINCE_WHEN + 1 if record == "began" else 1000
        fake.answers("squeue", plain_line("0", "RUNNING") + plain_line("[1-2%1]", "PENDING"))
        write_record(data_dir, "7_0", *rest, by="sbatch", time=began)
    assert status(data_dir)["pending"] == pending
    if pending:
        slurm("submit", data_dir)
        assert "shards_of=(3 4)" in fake.sent()[0] or "shards_of=(0 3 4)" in fake.sent()[0]
        slurm("cancel", data_dir)
        assert fake.calls("scancel") == ["7"]


def test_a_copy_leaves_the_jobs_of_its_original_alone_and_says_how_to_end_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir)
    write_record(data_dir, "1_0")
    copy = Path(shutil.copytree(data_dir, tmp_path / "copy"))
    fake.answers("squeue", squeue_line("0-4", "CANCELLED"))
    assert status(copy)["foreign_jobs"] == [], "those that go on alone"
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    assert status(data_dir)["running"] == "0-4"
    state = status(copy)
    assert (state["running"], state["not_submitted"], state["foreign_jobs"]) == ("", "0-4", ["1"])
    assert "scancel 1\n" in slurm("cancel", copy)
    assert not fake.calls("scancel")
    moved = data_dir.rename(tmp_path / "moved")
    assert status(moved)["running"] == "0-4", "a move keeps what a folder is"


# --- clusters, private sites


def test_jobs_of_another_cluster_are_asked_for_there_or_called_not_visible_and_never_sent_twice(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, cluster="other")
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    assert status(data_dir)["running"] == "0-4", "squeue --clusters=other knows them"
    away = "[ -z $SLURM_CLUSTERS ] || { echo No cluster $SLURM_CLUSTERS known >&2; exit 1; }"
    fake.answers_by("squeue", away)
    state = status(data_dir)
    assert (state["not_visible"], state["failed"]) == ("0-4", "")
    assert "other" in state["why_not_visible"]
    slurm("submit", data_dir)
    assert not fake.sent()
    slurm("submit", data_dir, "--shards", "1,3")
    assert "shards_of=(1 3)" in fake.sent()[0]


def test_jobs_on_two_clusters_are_seen_each_on_its_own_and_cancel_ends_those_where_it_gets_an_answer(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, cluster="other")
    here = [replace(array, job_id="5", tasks=["3-4"]) for array in submission().arrays]
    submitted(data_dir, number=1, arrays=here, verify_job_id="6")
    other, own = squeue_line("0", "RUNNING").strip(), squeue_line("0", "RUNNING", job="5").strip()
    fake.answers_by("squeue", f"[[ ${{SLURM_CLUSTERS:-}} = other ]] && echo '{other}' || echo '{own}'")
    state = status(data_dir)
    assert (state["running"], state["failed"], state["not_begun"]) == ("0,3-4", "", "1-2")
    away = "if [[ ${SLURM_CLUSTERS:-} = other ]]; then echo 'Socket timed out' >&2; exit 1; fi"
    fake.answers_by("scancel", f"{away}; echo $* >>{shlex.quote(str(fake.place / 'cancelled'))}")
    assert "Socket timed out" in slurm("cancel", data_dir, code=74)
    assert (fake.place / "cancelled").read_text() == "5\n"


@pytest.mark.parametrize("clusters", ["test,other", "all"])
def test_several_clusters_at_once_are_refused_before_slurm_is_asked(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, clusters: str
) -> None:
    submitted(data_dir)
    monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    for command in ("submit", "status", "retry", "cancel"):
        assert "SLURM_CLUSTERS" in slurm(command, data_dir, code=2)
    assert not fake.calls("sbatch") + fake.calls("squeue")


def test_a_colleagues_jobs_on_a_private_site_are_not_visible_but_for_those_whose_record_has_an_end(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, user="kim")
    write_record(data_dir, "1_1", ended(74))
    fake.answers("config", f"{CONFIG}PrivateData = jobs,usage\n")
    state = status(data_dir)
    assert (state["not_visible"], state["causes"]) == ("0,2-4", {"read or write error (74)": "1"})
    fake.answers("config", f"{CONFIG}PrivateData = none\n")
    assert status(data_dir)["not_visible"] == "", "where all is shown, what is not shown has ended"


def test_two_who_look_from_two_time_zones_see_the_same_job_and_starts_in_their_own(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm prints its times in the zone of who asks."""
    submitted(data_dir)
    lines = {zone: squeue_line("0-4", "PENDING", submit=when, start="2026-11-23T08:00:00") for zone, when in
             (("UTC0", WHEN), ("KST-9", "2026-11-22T10:52:04"))}  # fmt: skip
    cases = "".join(f"{zone}) echo '{line.strip()}' ;; " for zone, line in lines.items())
    fake.answers_by("squeue", f'case "$TZ" in {cases} esac')
    monkeypatch.setenv("TZ", "KST-9")
    time.tzset()
    try:
        state = status(data_dir)
    finally:
        monkeypatch.undo()
        time.tzset()
    assert state["pending"] == "0-4"
    assert state["waits_for"][0]["starts"] == "2026-11-23T17:00:00"


# --- no answer, or a part of one


NO_ANSWERS = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Socket timed out on send/recv operation",
    "error: Munge decode failed: Expired credential",
    "slurm_load_jobs error: Protocol authentication error",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
    "squeue: error: 'other' can't be reached now, or it is an invalid entry for SLURM_CLUSTERS.",
]
GARBAGE = ["x", "1|0|RUN", "|||||||||\n", "\0\0", "1|0|FAILED|x|many|n1|0:00|4|root|n|\n", "\ufffd" * 99]


@pytest.mark.parametrize("answer", [*NO_ANSWERS, *GARBAGE, "cut in a line", "another server silent"])
def test_whatever_keeps_squeue_from_answering_a_running_shard_is_never_called_failed_nor_sent_again(
    fake: FakeSlurm, data_dir: Path, answer: str
) -> None:
    """A credential expires, or is from the future, where clocks differ by more than munge allows."""
    submitted(data_dir)
    write_log(data_dir, "1_0.log", "shardprep: node n1: shard 0 begins\n")
    lines = squeue_line("0-2", "RUNNING") + squeue_line("3-4", "PENDING", "Priority")
    if answer in NO_ANSWERS:
        fake.answers_by("squeue", f"echo {shlex.quote(answer)} >&2; exit 1")
    elif answer == "another server silent":
        fake.answers("queue", lines.splitlines()[0])
        said = "echo 'squeue: error: cluster two: Unable to contact slurm controller' >&2"
        fake.answers_by("squeue", f"cat {shlex.quote(str(fake.place / 'queue'))}; {said}")
    else:
        fake.answers("squeue", lines[:-60] if answer == "cut in a line" else answer.encode() + b"\xff")
    state = status(data_dir)
    assert (state["failed"], state["not_visible"]) == ("", "0-4")
    assert state["slurm_away"]
    for command in ("submit", "retry", "cancel"):
        slurm(command, data_dir, code=74)
    assert not fake.sent()
    assert not fake.calls("scancel")


@pytest.mark.parametrize(("parse", "text"), [(parse_queue, QUEUES["24.11.5"]), (parse_job, JOB)])
def test_every_cut_of_an_answer_is_read_or_an_error(
    fake: FakeSlurm, parse: Callable[[str], Any], text: str
) -> None:
    num_refused = 0
    for size in range(len(text)):
        try:
            parse(text[:size])
        except (ValueError, LookupError, TypeError, ArithmeticError):
            num_refused += 1
    assert num_refused > 10
    fake.answers("sinfo", "x")
    with pytest.raises(ReadWriteError):
        slurm_answer(parse, "sinfo")


@pytest.mark.parametrize("how", ["away", "not installed"])
def test_status_answers_from_manifests_and_records_where_slurm_is_away(
    fake: FakeSlurm, data_dir: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0)
    write_record(data_dir, "1_1", ended(74))
    if how == "away":
        (fake.place / "away").touch()
    else:
        monkeypatch.setenv("PATH", str(data_dir))
    state = status(data_dir)
    assert (state["done"], state["failed"], state["not_visible"]) == ("0", "1", "2-4")
    assert slurm("status", data_dir).splitlines()[-1].startswith("next: the same again")


def test_patience_outlasts_a_controller_that_restarts_and_ends_after_an_hour(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    waits: list[float] = []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            (fake.place / "away").unlink()

    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    monkeypatch.setattr(commands, "sleep", sleep)
    (fake.place / "away").touch()
    state = ask_patiently(lambda: find_state(data_dir, need_plan(data_dir)))
    assert waits == [5, 10, 20]
    assert state.ids("running") == [0, 1, 2, 3, 4]
    waits.clear()
    monkeypatch.setattr(commands, "sleep", waits.append)

    def away() -> None:
        raise SlurmAway("down")

    with pytest.raises(SlurmAway):
        ask_patiently(away)
    assert 3000 < sum(waits) < 4000


def test_a_shard_that_is_done_while_status_looks_is_not_called_failed(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that restarts takes its time for an answer."""
    submitted(data_dir)
    record = write_record(data_dir, "1_0")
    fake.answers("squeue", squeue_line("1-4", "RUNNING"))
    real = shown_jobs.find_queue

    def find_queue(*given: Any) -> Any:
        make_done(data_dir, 0)
        record.unlink(missing_ok=True)
        return real(*given)

    monkeypatch.setattr(dataset_state, "find_queue", find_queue)
    state = status(data_dir)
    assert (state["done"], state["failed"]) == ("0", "")


def test_a_poll_asks_slurm_once_and_reads_no_manifest_again(
    fake: FakeSlurm, data_dir: Path, opened: list[str]
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0, 1)
    fake.answers("squeue", squeue_line("2-4", "RUNNING"))
    plan = need_plan(data_dir)
    state = find_state(data_dir, plan)
    before = {name: len(fake.calls(name)) for name in ("squeue", "scontrol")}
    make_done(data_dir, 2)
    opened.clear()
    again = find_state(data_dir, plan, before=state)
    assert again.ids("done") == [0, 1, 2]
    assert [path[-9:] for path in opened if "shard-" in path] == ["0002.json"]
    now = {name: len(fake.calls(name)) for name in before}
    assert now == {**before, "squeue": before["squeue"] + 1}


# --- jobs that no record names


def test_where_the_records_are_gone_nothing_is_sent_while_the_jobs_go_on(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """rm -r DATA/jobs, or a purge."""
    name = f"{names_begin(data_dir, need_plan(data_dir).plan_id)}0"
    fake.answers("squeue", squeue_line("0-4", "RUNNING", name=name))
    assert status(data_dir)["unrecorded_jobs"] == ["1"]
    for command in ("submit", "retry"):
        slurm(command, data_dir, code=2)
    assert not fake.sent()
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1"]


def test_a_held_job_of_an_earlier_try_is_named_and_cancelled(fake: FakeSlurm, data_dir: Path) -> None:
    """sbatch timed out, but Slurm had taken the job; then the same line was typed again, and it went well."""
    submitted(data_dir)
    name = f"{names_begin(data_dir, need_plan(data_dir).plan_id)}0"
    fake.answers("squeue", squeue_line("0-4", "PENDING", "JobHeldUser", job="9", name=name))
    assert status(data_dir)["stray_jobs"] == ["9"]
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["9"]


def test_cancel_of_some_shards_ends_their_tasks_alone_and_no_part_of_a_task(
    fake: FakeSlurm, data_dir: Path
) -> None:
    array = replace(submission().arrays[0], tasks=["0", "1", "2", "3-4"])
    submitted(data_dir, arrays=[array])
    fake.answers("squeue", squeue_line("0-3", "PENDING", "Priority"))
    slurm("cancel", data_dir, "--shards", "2-3", code=2)
    assert not fake.calls("scancel")
    slurm("cancel", data_dir, "--shards", "1,3-4")
    assert fake.calls("scancel") == ["1_1 1_3"]


# --- what only a person can do


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("launch failed requeued held", "scontrol release 1"),
        ("PartitionTimeLimit", "shardprep cancel {}"),
        ("PartitionConfig", "shardprep cancel {}"),
        ("QOSGrpCPUMinutesLimit", "shardprep cancel {}"),
        ("AssocGrpCPUMinutesLimit", "shardprep cancel {}"),
        ("AssocMaxWallDurationPerJobLimit", "shardprep cancel {}"),
        ("QOSGrpCPURunMinutesLimit", None),
        ("Resources", None),
    ],
)
def test_what_waits_for_a_person_is_told_with_what_to_type_and_ends_a_wait(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, reason: str, command: str | None
) -> None:
    submitted(data_dir)
    verify = squeue_line("N/A", "PENDING", "Dependency", job="2", name=f"{NAME}-verify")
    fake.answers("squeue", squeue_line("0-4", "PENDING", reason) + verify)
    (waits,) = status(data_dir)["waits_for"]
    assert waits["reason"] == reason
    assert waits["means"]
    last = slurm("status", data_dir).splitlines()[-1]
    if command is None:
        assert last.endswith("--watch")
        return
    assert command.format(data_dir) in last
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: pytest.fail("it waits")})
    monkeypatch.setattr("slurm.status.time", clock)
    slurm("submit", data_dir, "--wait", code=74)


def test_wait_does_not_wait_for_a_verify_job_that_a_later_one_made_needless(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to run where the nodes are down by now."""
    submitted(data_dir)
    here = [replace(submission().arrays[0], job_id="5")]
    submitted(data_dir, number=1, arrays=here, verify_job_id="6")
    make_done(data_dir, *range(5))
    write_index(data_dir, 5)
    name = f"{NAME}-verify"
    reason = "Nodes required for job are DOWN"
    fake.answers("squeue", squeue_line("N/A", "PENDING", reason, job="2", name=name))
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: pytest.fail("it waits")})
    monkeypatch.setattr("slurm.status.time", clock)
    slurm("submit", data_dir, "--wait")
    fake.answers("squeue", squeue_line("N/A", "PENDING", reason, job="6", name=name))
    with pytest.raises(pytest.fail.Exception, match="it waits"):
        slurm("submit", data_dir, "--wait")


def test_two_folders_of_one_inode_number_on_two_file_systems_are_two(data_dir: Path) -> None:
    """The identity is what the batch script, which runs on nodes, has from stat."""
    inode, _, file_system = folder_identity(data_dir).partition(".")
    assert inode == str(data_dir.stat().st_ino)
    assert file_system == run_child(["stat", "-fLc", "%i", data_dir]).stdout.strip()
