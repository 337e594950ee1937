"""What status, submit, retry and cancel conclude where Slurm shows little, or the wrong jobs."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.slurm.fake_slurm import ALL, CONFIG, NAME, QUEUES, WHEN, Desk, array, ended, squeue_line

pytestmark = pytest.mark.processes

LATER = "2026-11-22T09:00:00"
SINCE_WHEN = datetime.strptime(f"{WHEN}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
VERIFY = {"job": "2", "name": f"{NAME}-verify"}
PLAIN = {"job": "7", "name": "shardprep"}
RUNS = squeue_line("0-4", "RUNNING")
PLAIN_RUNS = squeue_line("0", "RUNNING", **PLAIN) + squeue_line("[1-2%1]", "PENDING", **PLAIN)


class Row(NamedTuple):
    """What squeue says, and what follows from it. HERE in a line is the name of this folder's jobs."""

    queue: str
    status: dict[str, Any]
    sends: str = ""  # shards of the tasks that submit sends
    cancels: str = ""  # what is given to scancel
    submit_ends: int = 0
    config: str = CONFIG
    # What stands in the folder: by default the record of the submission of job 1, of five tasks.
    given: Callable[[Desk], object] = Desk.submitted


def of_kim(desk: Desk) -> None:
    desk.submitted(user="kim")
    desk.record("1_1", ended(74))
    desk.record("1_2", SLURM_JOB_USER="kim")


def of_two_users(desk: Desk) -> None:
    desk.record("7_1", SLURM_JOB_USER="kim")
    desk.record("8_2")


def of_another_cluster(desk: Desk) -> None:
    desk.submitted(cluster="other")
    desk.record("1_2")


ROWS = {
    "a job that waits and runs": Row(
        squeue_line("0-1", "RUNNING") + squeue_line("[2-4%2]", "PENDING"),
        {"running": "0-1", "pending": "2-4"}, cancels="1",
    ),
    "the same number from a controller that lost its state": Row(
        squeue_line("0-4", "RUNNING", submit=LATER), {"running": ""}, sends=ALL
    ),
    "a task that Slurm started again, and dated anew": Row(
        squeue_line("0-4", "RUNNING", submit=LATER, restarts="1"), {"running": "0-4"}, cancels="1"
    ),
    "another plan's job of the same number": Row(
        squeue_line("0-4", "RUNNING", name="shardprep-ba9876543210-3f2a91-0"), {"running": ""}, sends=ALL
    ),
    "another user's job of the same number": Row(
        squeue_line("0-4", "RUNNING", user="kim"), {"running": ""}, sends=ALL
    ),
    "a job that a person renamed": Row(
        squeue_line("0-4", "RUNNING", name="mine"), {"running": "0-4"}, cancels="1"
    ),
    "states of a later Slurm": Row(
        squeue_line("0-1", "EXPEDITING") + squeue_line("2-4", "RESV_DEL_HOLD"),
        {"running": "0-1", "pending": "2-4", "failed": ""}, cancels="1",
    ),
    "what people hold, suspend and requeue": Row(
        squeue_line("0", "SUSPENDED")
        + squeue_line("1", "PENDING", "JobHeldUser")
        + squeue_line("2", "PENDING", "BeginTime", submit=LATER, restarts="1")
        + squeue_line("3", "REQUEUE_HOLD", "job requeued in held state", submit=LATER, restarts="1")
        + squeue_line("4", "RUNNING"),
        {"running": "0,4", "pending": "1-3"}, cancels="1",
    ),
    "a controller, which is cancelled first, as it would send again what is cancelled": Row(
        RUNS + squeue_line("N/A", "PENDING", "Dependency", job="9", name="HERE-control"),
        {"controller_jobs": ["9"]}, cancels="9 1",
    ),
    # No record says what they make: DATA/jobs was emptied; or sbatch timed out, but Slurm has the job.
    "a job that runs without a record": Row(
        squeue_line("0-4", "RUNNING", name="HERE"), {"unrecorded_jobs": ["1"]},
        submit_ends=2, cancels="1", given=lambda _: None,
    ),
    "a job that waits, held, without a record": Row(
        squeue_line("0-4", "PENDING", "JobHeldUser", name="HERE"), {"unrecorded_jobs": ["1"]},
        submit_ends=2, cancels="1", given=lambda _: None,
    ),
    # Plain sbatch is seen once a task of its array began.
    "plain sbatch": Row(
        PLAIN_RUNS, {"running": "0", "pending": "1-2"}, sends="3 4", cancels="7",
        given=lambda desk: desk.record("7_0", time=SINCE_WHEN + 1),
    ),
    "plain sbatch, of which no task began": Row(
        PLAIN_RUNS, {"running": "", "pending": ""}, sends=ALL, given=lambda _: None
    ),
    "plain sbatch of a controller that gives the id again": Row(
        PLAIN_RUNS, {"running": "", "pending": ""}, sends=ALL,
        given=lambda desk: desk.record("7_0", ended(1), time=1000),
    ),
    # What cannot be seen from here is never failed.
    "another cluster": Row("", {"not_visible": "0-4", "failed": ""}, given=of_another_cluster),
    "another cluster, asked by SLURM_CLUSTERS": Row(
        RUNS, {"running": "0-4"}, cancels="1", given=of_another_cluster,
        config=CONFIG.replace("= test", "= other"),
    ),
    "a colleague's jobs on a private site, but for those whose record has an end": Row(
        "", {"not_visible": "0,2-4", "causes": {"read or write error (74)": "1"}}, sends="1",
        given=of_kim, config=f"{CONFIG}PrivateData = jobs,usage\n",
    ),
    "a colleague's jobs where all is shown": Row("", {"not_visible": ""}, sends=ALL, given=of_kim),
    "a colleague's plain tasks on a private site, beside those of who looks": Row(
        "", {"not_visible": "1", "failed": "2"}, sends="0 2 3 4",
        given=of_two_users, config=f"{CONFIG}PrivateData = jobs\n",
    ),
    "the jobs of a folder of this inode's number on another file system": Row(
        RUNS, {"running": "", "foreign_jobs": ["1"]}, sends=ALL,
        given=lambda desk: desk.submitted(identity=f"{desk.identity.partition('.')[0]}.0"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", ROWS)
def test_jobs_of_this_folder_are_told_from_others_and_neither_sent_twice_nor_cancelled_if_not_ours(
    desk: Desk, name: str
) -> None:
    row = ROWS[name]
    row.given(desk)
    desk.fake.answers("config", row.config)
    desk.queue(row.queue.replace("HERE", desk.job_name))
    state = desk.status()
    assert {field: state[field] for field in row.status} == row.status
    desk.slurm("cancel")
    assert desk.cancelled() == ([row.cancels] if row.cancels else [])
    desk.slurm("submit", code=row.submit_ends)
    assert desk.sent_shards() == ([row.sends] if row.sends else [])


@pytest.mark.parametrize("version", QUEUES)
def test_status_retry_and_cancel_work_on_an_old_and_on_a_new_slurm(desk: Desk, version: str) -> None:
    desk.submitted()
    desk.queue(QUEUES[version])
    state = desk.status()
    assert (state["running"], state["pending"]) == ("2-3", "4")
    assert state["causes"] == {"bad input (65)": "0", "killed by signal 9": "1"}
    desk.slurm("cancel")
    desk.slurm("cancel", "--shards", "3")
    assert desk.cancelled() == ["1 2", "1_3"], "job 3 is another's"
    desk.slurm("retry")
    assert desk.sent_shards() == ["1"], "of bad input none"


def test_cancel_of_some_shards_ends_their_tasks_alone_and_no_part_of_a_task(desk: Desk) -> None:
    desk.submitted(array(tasks=["0", "1", "2", "3-4"]))
    desk.queue(squeue_line("0-3", "PENDING", "Priority"))
    desk.slurm("cancel", "--shards", "2-3", code=2)
    assert not desk.cancelled()
    desk.slurm("cancel", "--shards", "1,3-4")
    assert desk.cancelled() == ["1_1 1_3"]


def test_a_copy_leaves_the_jobs_of_its_original_alone_and_names_all_of_them(desk: Desk) -> None:
    desk.submitted()
    desk.record("1_0")
    copy = Desk(data=Path(shutil.copytree(desk.data, desk.tmp / "copy")), fake=desk.fake)
    desk.queue(squeue_line("0-4", "CANCELLED"))
    assert copy.status()["foreign_jobs"] == [], "those that go on alone"
    desk.queue(RUNS, squeue_line("N/A", "PENDING", job="9", name=f"{desk.job_name}-control"))
    state = copy.status()
    assert (state["running"], state["not_submitted"], state["foreign_jobs"]) == ("", "0-4", ["1", "9"])
    assert "scancel 1 9\n" in copy.slurm("cancel")
    assert not desk.cancelled()
    desk.data = desk.data.rename(desk.tmp / "moved")
    assert desk.status()["running"] == "0-4", "a move keeps what a folder is"


def test_what_is_not_visible_is_sent_by_its_number_alone(desk: Desk) -> None:
    of_another_cluster(desk)
    assert "SLURM_CLUSTERS=other" in desk.status()["why_not_visible"]
    desk.slurm("submit", "--shards", "1,3")
    assert desk.sent_shards() == ["1 3"]


@pytest.mark.parametrize("clusters", ["test,other", "all"])
def test_several_clusters_at_once_are_refused_before_slurm_is_asked(desk: Desk, clusters: str) -> None:
    desk.submitted()
    for name in ("submit", "status", "retry", "cancel"):
        desk.slurm(name, code=2, SLURM_CLUSTERS=clusters)
    assert not desk.fake.calls("sbatch") + desk.fake.calls("squeue")


def test_who_looks_from_another_time_zone_sees_the_same_job_and_its_start_in_their_own(desk: Desk) -> None:
    """Slurm prints its times in the zone of who asks."""
    desk.submitted()
    waits = squeue_line("0-4", "PENDING", start="2026-11-23T08:00:00").strip()
    desk.fake.answers_by("squeue", f"[[ $TZ != UTC0 ]] || echo '{waits}'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TZ", "KST-9")
        time.tzset()
        state = desk.status()
    time.tzset()
    assert (state["pending"], state["waits_for"][0]["starts"]) == ("0-4", "2026-11-23T17:00:00")


# --- no answer, or a part of one

TEXT = squeue_line("0-2", "RUNNING") + squeue_line("3-4", "PENDING", "Priority")
NO_ANSWERS = [
    "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
    "slurm_load_jobs error: Socket timed out on send/recv operation",
    "error: Munge decode failed: Expired credential",
    "slurm_load_jobs error: Protocol authentication error",
    "slurm_load_jobs error: Zero Bytes were transmitted or received",
    "squeue: error: 'other' can't be reached now, or it is an invalid entry for SLURM_CLUSTERS.",
]
GARBAGE = ["x", "1|0|RUN", "|||||||||\n", "\0\0", "1|0|FAILED|x|many|n1|0:00|4|root|n|\n", "\ufffd" * 99]
CUT = [TEXT[:size] for size in (3, 40, len(TEXT) - 60, len(TEXT) - 10)]
SILENT = "squeue: error: cluster two: Unable to contact slurm controller"
# What squeue prints on standard output and as an error, and its exit code.
ANSWERS = [
    *(("", words, 1) for words in NO_ANSWERS),
    *((text, "", 0) for text in CUT),
    *((f"{text}\udcff", "", 0) for text in GARBAGE),
    (TEXT, SILENT, 0),  # of another server
]


def test_whatever_keeps_squeue_from_answering_a_running_shard_is_never_called_failed_nor_sent_again(
    desk: Desk,
) -> None:
    """A credential expires, or is from the future, where clocks differ by more than munge allows."""
    desk.submitted()
    desk.log("1_0.log", "shardprep: node n1: shard 0 begins\n")
    desk.fake.answers_by("squeue", "cat PLACE/out; cat PLACE/err >&2; exit $(<PLACE/code)")
    for out, err, code in ANSWERS:
        desk.fake.answers("out", out.encode(errors="surrogateescape"))
        desk.fake.answers("err", err)
        desk.fake.answers("code", str(code))
        state = desk.status()
        assert (state["failed"], state["not_visible"], bool(state["slurm_away"])) == ("", "0-4", True), out
        for name in ("submit", "retry", "cancel"):
            desk.slurm(name, code=74)
    assert not desk.fake.sent()
    assert not desk.cancelled()


@pytest.mark.parametrize("how", ["away", "not installed"])
def test_status_answers_from_manifests_and_records_where_slurm_is_away(desk: Desk, how: str) -> None:
    desk.submitted()
    desk.make_done(0)
    desk.record("1_1", ended(74))
    if how == "away":
        (desk.fake.place / "away").touch()
    else:
        desk.patch.setenv("PATH", str(desk.data))
    state = desk.status()
    assert (state["done"], state["failed"], state["not_visible"]) == ("0", "1", "2-4")
    assert desk.next().startswith("next: the same again")


def test_wait_outlasts_a_controller_that_restarts_and_ends_after_an_hour(desk: Desk) -> None:
    desk.submitted()
    waits: list[float] = []
    # Slurm answers the first question, which submit asks, and then no more.
    once = "[[ ! -e PLACE/answered ]] || { echo 'Socket timed out' >&2; exit 1; }"
    desk.fake.answers_by("squeue", f"{once}; touch PLACE/answered; echo {shlex.quote(RUNS.strip())}")
    desk.at_waits(waits.append)
    desk.slurm("submit", "--wait", code=74)
    assert waits[:3] == [5, 10, 20]
    assert 3000 < sum(waits) < 4000


def test_a_shard_that_is_done_while_status_looks_is_not_called_failed(desk: Desk) -> None:
    """A controller that restarts takes its time for an answer: meanwhile the task ends."""
    desk.submitted()
    record = desk.record("1_0")
    desk.make_done(0)
    manifest = desk.data / "shard-00000.json"
    hidden = manifest.rename(desk.data / "later")
    ends = f"{shlex.join(['mv', str(hidden), str(manifest)])}; {shlex.join(['rm', str(record)])}"
    desk.fake.answers_by("squeue", f"{ends}; echo {shlex.quote(squeue_line('1-4', 'RUNNING').strip())}")
    state = desk.status()
    assert (state["done"], state["failed"]) == ("0", "")


# --- what only a person can do


@pytest.mark.parametrize(
    ("reason", "typed"),
    [
        ("launch failed requeued held", "scontrol release 1"),
        ("JobHeldUser", "scontrol release 1"),
        *((f"Partition{what}", "shardprep cancel {}") for what in ("TimeLimit", "Config")),
        *((f"{whose}GrpCPUMinutesLimit", "shardprep cancel {}") for whose in ("QOS", "Assoc")),
        ("AssocMaxWallDurationPerJobLimit", "shardprep cancel {}"),
        ("JobHeldAdmin", ""),  # only an administrator can go on
        ("QOSGrpCPURunMinutesLimit", None),
        ("Resources", None),
    ],
)
def test_what_waits_for_a_person_is_told_with_what_to_type_and_ends_a_wait(
    desk: Desk, reason: str, typed: str | None
) -> None:
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


def test_wait_does_not_wait_for_a_verify_job_that_a_later_one_made_needless(desk: Desk) -> None:
    """It was to run where the nodes are down by now."""
    desk.submitted()
    desk.submitted(array("5"), verify="6", number=1)
    desk.make_done(*range(5))
    desk.write_index()
    reason = "Nodes required for job are DOWN"
    desk.queue(squeue_line("N/A", "PENDING", reason, **VERIFY))
    desk.at_waits(lambda _: pytest.fail("it waits"))
    desk.slurm("submit", "--wait")
    desk.queue(squeue_line("N/A", "PENDING", reason, **{**VERIFY, "job": "6"}))
    with pytest.raises(pytest.fail.Exception):
        desk.slurm("submit", "--wait")
