"""What status, submit, retry and cancel conclude where Slurm shows little, or the wrong jobs."""

from __future__ import annotations

import os
import shlex
import shutil
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.slurm.fake_slurm import (
    CONFIG,
    JOB,
    NAME,
    QUEUES,
    WHEN,
    FakeSlurm,
    array,
    ended,
    events,
    identity_of,
    last_line,
    make_done,
    names_of_jobs,
    slurm,
    squeue_line,
    status,
    submitted,
    write_index,
    write_log,
    write_record,
)

pytestmark = pytest.mark.processes

LATER = "2026-11-22T09:00:00"
SINCE_WHEN = datetime.strptime(f"{WHEN}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp()
VERIFY = {"job": "2", "name": f"{NAME}-verify"}

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
        {"running": "0,4", "pending": "1-3"},
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
    fake: FakeSlurm, data_dir: Path, version: str
) -> None:
    submitted(data_dir)
    fake.answers("squeue", QUEUES[version])
    state = status(data_dir)
    assert (state["running"], state["pending"]) == ("2-3", "4")
    assert state["causes"] == {"bad input (65)": "0", "killed by signal 9": "1"}
    assert "shards_of=(1)" in slurm("retry", data_dir, "--dry_run"), "of bad input none"
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1 2"], "job 3 is another's"
    slurm("cancel", data_dir, "--shards", "3")
    assert fake.calls("scancel")[1:] == ["1_3"]


# --- plain sbatch


@pytest.mark.parametrize(
    ("record", "pending"),
    [
        ("began", "1-2"),
        (None, ""),
        ("long ago", ""),  # of a controller that lost its state, and gives ids again
    ],
)
def test_plain_sbatch_is_seen_once_a_task_of_its_array_began(
    fake: FakeSlurm, data_dir: Path, record: str | None, pending: str
) -> None:
    facts = {"job": "7", "name": "shardprep"}
    fake.answers("squeue", squeue_line("0", "RUNNING", **facts) + squeue_line("[1-2%1]", "PENDING", **facts))
    if record:
        began = SINCE_WHEN + 1 if record == "began" else 1000
        write_record(data_dir, "7_0", *([] if record == "began" else [ended(1)]), time=began)
    assert status(data_dir)["pending"] == pending
    if pending:
        slurm("submit", data_dir)
        assert "shards_of=(3 4)" in fake.sent()[0]
        slurm("cancel", data_dir)
        assert fake.calls("scancel") == ["7"]


def test_a_copy_leaves_the_jobs_of_its_original_alone_and_names_all_of_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir)
    write_record(data_dir, "1_0")
    copy = Path(shutil.copytree(data_dir, tmp_path / "copy"))
    fake.answers("squeue", squeue_line("0-4", "CANCELLED"))
    assert status(copy)["foreign_jobs"] == [], "those that go on alone"
    control = squeue_line("N/A", "PENDING", job="9", name=f"{names_of_jobs(data_dir)}0-control")
    fake.answers("squeue", squeue_line("0-4", "RUNNING") + control)
    assert status(data_dir)["running"] == "0-4"
    state = status(copy)
    assert (state["running"], state["not_submitted"], state["foreign_jobs"]) == ("", "0-4", ["1", "9"])
    assert "scancel 1 9\n" in slurm("cancel", copy)
    assert not fake.calls("scancel")
    assert status(data_dir.rename(tmp_path / "moved"))["running"] == "0-4", "a move keeps what a folder is"


def test_two_folders_of_one_inode_number_on_two_file_systems_are_two(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir, identity=f"{identity_of(data_dir).partition('.')[0]}.0")
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    slurm("cancel", data_dir)
    assert not fake.calls("scancel")


# --- clusters, private sites


def test_jobs_of_another_cluster_are_called_not_visible_and_never_sent_twice(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, cluster="other")
    write_record(data_dir, "1_2")  # of a task that has begun
    state = status(data_dir)
    assert (state["not_visible"], state["failed"]) == ("0-4", "")
    assert "SLURM_CLUSTERS=other" in state["why_not_visible"]
    slurm("submit", data_dir)
    assert not fake.sent()
    slurm("submit", data_dir, "--shards", "1,3")
    assert "shards_of=(1 3)" in fake.sent()[0]
    fake.answers("config", "ClusterName = other\nMaxArraySize = 1001\n")  # as with SLURM_CLUSTERS=other
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    assert status(data_dir, SLURM_CLUSTERS="other")["running"] == "0-4"


@pytest.mark.parametrize("clusters", ["test,other", "all"])
def test_several_clusters_at_once_are_refused_before_slurm_is_asked(
    fake: FakeSlurm, data_dir: Path, clusters: str
) -> None:
    submitted(data_dir)
    for name in ("submit", "status", "retry", "cancel"):
        slurm(name, data_dir, code=2, SLURM_CLUSTERS=clusters)
    assert not fake.calls("sbatch") + fake.calls("squeue")


def test_a_colleagues_jobs_on_a_private_site_are_not_visible_but_for_those_whose_record_has_an_end(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, user="kim")
    write_record(data_dir, "1_1", ended(74))
    write_record(data_dir, "1_2", SLURM_JOB_USER="kim")
    fake.answers("config", f"{CONFIG}PrivateData = jobs,usage\n")
    state = status(data_dir)
    assert (state["not_visible"], state["causes"]) == ("0,2-4", {"read or write error (74)": "1"})
    fake.answers("config", f"{CONFIG}PrivateData = none\n")
    assert status(data_dir)["not_visible"] == "", "where all is shown, what is not shown has ended"


def test_so_are_a_colleagues_tasks_of_plain_sbatch_but_not_those_of_who_looks(
    fake: FakeSlurm, data_dir: Path
) -> None:
    fake.answers("config", f"{CONFIG}PrivateData = jobs\n")
    write_record(data_dir, "7_1", SLURM_JOB_USER="kim")
    write_record(data_dir, "8_2")
    state = status(data_dir)
    assert (state["not_visible"], state["failed"]) == ("1", "2")
    slurm("submit", data_dir)
    assert "shards_of=(0 2 3 4)" in fake.sent()[0]


def test_two_who_look_from_two_time_zones_see_the_same_job_and_starts_in_their_own(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """Slurm prints its times in the zone of who asks."""
    submitted(data_dir)
    lines = {zone: squeue_line("0-4", "PENDING", submit=when, start="2026-11-23T08:00:00") for zone, when in
             (("UTC0", WHEN), ("KST-9", "2026-11-22T10:52:04"))}  # fmt: skip
    cases = "".join(f"{zone}) echo '{line.strip()}' ;; " for zone, line in lines.items())
    fake.answers_by("squeue", f'case "$TZ" in {cases} esac')
    os.environ["TZ"] = "KST-9"
    time.tzset()
    try:
        state = status(data_dir)
    finally:
        del os.environ["TZ"]
        time.tzset()
    assert (state["pending"], state["waits_for"][0]["starts"]) == ("0-4", "2026-11-23T17:00:00")


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
    assert (state["failed"], state["not_visible"], bool(state["slurm_away"])) == ("", "0-4", True)
    for name in ("submit", "retry", "cancel"):
        slurm(name, data_dir, code=74)
    assert not fake.sent()
    assert not fake.calls("scancel")


def test_an_answer_that_is_cut_anywhere_ends_in_words_or_is_no_answer(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    text = squeue_line("0-4", "RUNNING")
    for size in range(0, len(text), 5):
        fake.answers("squeue", text[:size])
        status(data_dir)
    for size in (20, 200):  # of what scontrol shows of the job that was just submitted
        fake.answers("squeue", "")
        fake.answers("job", JOB[:size])
        slurm("submit", data_dir, code=74)
        assert fake.calls("scancel"), "what is not recorded does not run"


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
    assert last_line(data_dir).startswith("next: the same again")


def test_wait_outlasts_a_controller_that_restarts_and_ends_after_an_hour(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    waits: list[float] = []
    line = shlex.quote(squeue_line("0-4", "RUNNING").strip())
    answered = fake.place / "answered"
    # Slurm answers the first question, which submit asks, and then no more.
    once = f'[[ ! -e "{answered}" ]] || {{ echo "Socket timed out" >&2; exit 1; }}'
    fake.answers_by("squeue", f'{once}; touch "{answered}"; echo {line}')
    monkeypatch.setattr("slurm.queue.sleep", waits.append)
    slurm("submit", data_dir, "--wait", code=74)
    assert waits[:3] == [5, 10, 20]
    assert 3000 < sum(waits) < 4000


def test_a_shard_that_is_done_while_status_looks_is_not_called_failed(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """A controller that restarts takes its time for an answer: meanwhile the task ends."""
    submitted(data_dir)
    record = write_record(data_dir, "1_0")
    make_done(data_dir, 0)
    manifest = data_dir / "shard-00000.json"
    hidden = manifest.rename(data_dir / "later")
    ends = f"mv {shlex.quote(str(hidden))} {shlex.quote(str(manifest))}; rm {shlex.quote(str(record))}"
    fake.answers_by("squeue", f"{ends}; echo {shlex.quote(squeue_line('1-4', 'RUNNING').strip())}")
    state = status(data_dir)
    assert (state["done"], state["failed"]) == ("0", "")


# --- jobs that no record names


@pytest.mark.parametrize(("state", "reason"), [("RUNNING", "None"), ("PENDING", "JobHeldUser")])
def test_nothing_is_sent_beside_jobs_of_which_no_record_says_what_they_make(
    fake: FakeSlurm, data_dir: Path, state: str, reason: str
) -> None:
    """DATA/jobs was emptied; or sbatch timed out, but Slurm had taken the job, which waits, held."""
    fake.answers("squeue", squeue_line("0-4", state, reason, name=f"{names_of_jobs(data_dir)}0"))
    assert status(data_dir)["unrecorded_jobs"] == ["1"]
    for name in ("submit", "retry"):
        slurm(name, data_dir, code=2)
    assert not fake.sent()
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1"]


def test_cancel_of_some_shards_ends_their_tasks_alone_and_no_part_of_a_task(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, array(tasks=["0", "1", "2", "3-4"]))
    fake.answers("squeue", squeue_line("0-3", "PENDING", "Priority"))
    slurm("cancel", data_dir, "--shards", "2-3", code=2)
    assert not fake.calls("scancel")
    slurm("cancel", data_dir, "--shards", "1,3-4")
    assert fake.calls("scancel") == ["1_1 1_3"]


def test_cancel_of_a_groups_data_set_ends_the_users_own_jobs_and_names_who_can_end_the_others(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, array(tasks=["0", "1"]))
    submitted(data_dir, array("5", tasks=["2", "3", "4"]), verify="6", number=1, user="kim")
    fake.answers("squeue", squeue_line("0-1", "RUNNING") + squeue_line("0-2", "RUNNING", job="5", user="kim"))
    fake.answers_by("scancel", "echo 'Kill job error on job id 5: Access/permission denied' >&2; exit 1")
    assert "error: kim " in slurm("cancel", data_dir, code=2)
    assert events(data_dir)[-1]["jobs"] == ["1"]


# --- what only a person can do


class ItWaitsError(BaseException):
    """Raised in the place of a sleep."""


def test_where_only_an_administrator_can_go_on_nothing_is_told_to_type_and_no_time_is_foretold(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0)
    runs = squeue_line("4", "RUNNING")
    for line in (squeue_line("1-3", "SUSPENDED"), squeue_line("1-3", "PENDING", "JobHeldAdmin")):
        fake.answers("squeue", line + runs)
        (waits,) = status(data_dir)["waits_for"]
        assert (waits["shards"], waits["to_type"], bool(waits["means"])) == ("1-3", "", True)
        assert status(data_dir)["left_s"] is None


def fail_at_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def sleep(_: float) -> None:
        raise ItWaitsError

    monkeypatch.setattr("slurm.status.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))


@pytest.mark.parametrize(
    ("reason", "typed"),
    [
        ("launch failed requeued held", "scontrol release 1"),
        ("JobHeldUser", "scontrol release 1"),
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
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, reason: str, typed: str | None
) -> None:
    submitted(data_dir)
    fake.answers(
        "squeue",
        squeue_line("0-4", "PENDING", reason) + squeue_line("N/A", "PENDING", "Dependency", **VERIFY),
    )
    (waits,) = status(data_dir)["waits_for"]
    assert (waits["reason"], waits["to_type"]) == (reason, (typed or "").format(data_dir))
    assert waits["means"]
    if typed is None:
        assert last_line(data_dir).endswith("--watch")
        return
    assert last_line(data_dir) == f"next: {waits['to_type']}"
    fail_at_a_wait(monkeypatch)
    slurm("submit", data_dir, "--wait", code=74)


def test_wait_does_not_wait_for_a_verify_job_that_a_later_one_made_needless(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to run where the nodes are down by now."""
    submitted(data_dir)
    submitted(data_dir, array("5"), verify="6", number=1)
    make_done(data_dir, *range(5))
    write_index(data_dir)
    reason = "Nodes required for job are DOWN"
    fake.answers("squeue", squeue_line("N/A", "PENDING", reason, **VERIFY))
    fail_at_a_wait(monkeypatch)
    slurm("submit", data_dir, "--wait")
    fake.answers("squeue", squeue_line("N/A", "PENDING", reason, **{**VERIFY, "job": "6"}))
    with pytest.raises(ItWaitsError):
        slurm("submit", data_dir, "--wait")
