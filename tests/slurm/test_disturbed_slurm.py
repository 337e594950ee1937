"""Servers that answer in part or not at all, clocks that differ, people who change jobs between two looks."""

from __future__ import annotations

import shlex
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from slurm import queue as shown_jobs
from slurm import state as dataset_state
from slurm.commands import SlurmRefused
from slurm.queue import parse_queue
from slurm.request import JobRequest
from slurm.send import release
from tests.slurm.fake_slurm import (
    NAME,
    WHEN,
    FakeSlurm,
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


@pytest.mark.parametrize(
    "words",
    [
        "slurm_load_jobs error: Unable to contact slurm controller (connect failure)",
        "slurm_load_jobs error: Socket timed out on send/recv operation",
        "error: Munge decode failed: Expired credential",
        "error: Munge decode failed: Rewound credential",
        "slurm_load_jobs error: Protocol authentication error",
        "slurm_load_jobs error: Zero Bytes were transmitted or received",
        "squeue: error: 'other' can't be reached now, or it is an invalid entry for SLURM_CLUSTERS.",
    ],
)
def test_whatever_keeps_squeue_from_answering_a_running_shard_is_never_called_failed_nor_sent_again(
    fake: FakeSlurm, data_dir: Path, words: str
) -> None:
    """A credential expires, or is from the future, where clocks differ by more than munge allows."""
    submitted(data_dir)
    write_log(data_dir, "1_0.log", "shardprep: node n1: shard 0 begins\n")
    fake.answers_by("squeue", f"echo {shlex.quote(words)} >&2; exit 1")
    state = status(data_dir)
    assert (state["failed"], state["not_visible"]) == ("", "0-4")
    for command in ("submit", "retry", "cancel"):
        assert words[-12:] in slurm(command, data_dir, code=74)
    assert not fake.sent()
    assert not fake.calls("scancel")
    # So a client was answered whose munged was 10 minutes behind, or ahead, of the controller's.
    hint = "does it restart (scontrol ping), or is the clock of this host"
    assert (hint in slurm("status", data_dir)) == ("Zero Bytes" in words)


@pytest.mark.parametrize("how", ["cut in a line", "another server silent"])
def test_an_answer_in_part_is_no_answer(fake: FakeSlurm, data_dir: Path, how: str) -> None:
    submitted(data_dir)
    lines = squeue_line("0-2", "RUNNING") + squeue_line("3-4", "PENDING", "Priority")
    if how == "cut in a line":
        fake.answers("squeue", lines[:-60])
    else:
        fake.answers("queue", lines.splitlines()[0])
        said = "echo 'squeue: error: cluster two: Unable to contact slurm controller' >&2"
        fake.answers_by("squeue", f"cat {shlex.quote(str(fake.place / 'queue'))}; {said}")
    state = status(data_dir)
    assert (state["failed"], state["not_visible"]) == ("", "0-4")
    assert state["slurm_away"]
    slurm("submit", data_dir, code=74)
    assert not fake.sent()


def test_a_state_of_a_later_slurm_is_no_end(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0-1", "EXPEDITING") + squeue_line("2-4", "RESV_DEL_HOLD"))
    state = status(data_dir)
    assert (state["running"], state["pending"], state["failed"]) == ("0-1", "2-4", "")
    assert "nothing to submit" in slurm("submit", data_dir)


def test_a_job_that_a_person_renamed_is_still_ours(fake: FakeSlurm, data_dir: Path) -> None:
    """scontrol update jobid=1 name=mine."""
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0-4", "RUNNING", name="mine"))
    assert status(data_dir)["running"] == "0-4"
    assert "nothing to submit" in slurm("submit", data_dir)
    assert "cancelled: 1" in slurm("cancel", data_dir)


def test_what_is_held_suspended_or_requeued_by_a_person_is_live_and_named(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    later = "2026-11-22T09:00:00"
    lines = [
        squeue_line("0", "SUSPENDED"),
        squeue_line("1", "PENDING", "JobHeldUser"),
        squeue_line("2", "PENDING", "BeginTime", submit=later, restarts="1"),
        squeue_line("3", "REQUEUE_HOLD", "job requeued in held state", submit=later, restarts="1"),
        squeue_line("4", "RUNNING"),
    ]
    fake.answers("squeue", "".join(lines))
    state = status(data_dir)
    assert (state["running"], state["pending"], state["suspended"]) == ("0,4", "1-3", "0")
    text = slurm("status", data_dir)
    assert "suspended: shard 0; to go on: scontrol resume JOB" in text
    assert "shard 1 waits for JobHeldUser: held; scontrol release lets it go on" in text
    assert "shard 2 waits for BeginTime: its start time has not come" in text
    assert "nothing to submit" in slurm("submit", data_dir)
    assert "nothing to retry" in slurm("retry", data_dir)


@pytest.mark.parametrize(("had", "asked"), [("4:00:20", 480), ("1:01:50", 120)])
def test_retry_doubles_the_time_that_a_task_was_given(
    fake: FakeSlurm, data_dir: Path, had: str, asked: int
) -> None:
    """After --time_min 60 and scontrol update jobid=1 timelimit=240; or Slurm ended it late."""
    (array,) = submission().arrays
    submitted(data_dir, arrays=[replace(array, request=JobRequest(time_min=60), time_min=60)])
    fake.answers("squeue", squeue_line("0", "TIMEOUT").replace("|0:02|", f"|{had}|"))
    slurm("retry", data_dir)
    assert f"#SBATCH --time={asked}\n" in fake.sent()[0]


def test_two_who_look_from_two_time_zones_see_the_same_job(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slurm prints its times in the zone of who asks."""
    submitted(data_dir)
    lines = {zone: squeue_line("0-4", "RUNNING", submit=when) for zone, when in
             (("UTC0", WHEN), ("KST-9", "2026-11-22T10:52:04"))}  # fmt: skip
    cases = "".join(f"{zone}) echo '{line.strip()}' ;; " for zone, line in lines.items())
    fake.answers_by("squeue", f'case "$TZ" in {cases} esac')
    monkeypatch.setenv("TZ", "KST-9")
    assert status(data_dir)["running"] == "0-4"


def test_expected_starts_are_in_the_readers_own_time_zone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "KST-9")
    time.tzset()
    try:
        (waiting,) = parse_queue(squeue_line("0", "PENDING", start="2026-11-23T08:00:00"))
    finally:
        monkeypatch.undo()
        time.tzset()
    assert waiting.start_time == "2026-11-23T17:00:00"


def test_a_held_job_of_an_earlier_try_is_named_also_after_a_later_submit(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """sbatch timed out, but Slurm had taken the job; then the same line was typed again, and it went well."""
    submitted(data_dir)
    (name,) = {line.partition("=")[2] for line in slurm("submit", data_dir, "--dry_run").splitlines()
               if line.startswith("#SBATCH --job-name=") and not line.endswith("-verify")}  # fmt: skip
    earlier = f"{name.rpartition('-')[0]}-0"
    stray = squeue_line("0-4", "PENDING", "JobHeldUser", job="9", name=earlier)
    asks = f'case "$*" in *--user=*) echo "{stray.strip()}" ;; esac'
    fake.answers_by("squeue", asks)
    assert status(data_dir)["stray_jobs"] == ["9"]
    assert "cancelled: 9" in slurm("cancel", data_dir)


def test_a_submit_whose_jobs_somebody_cancels_before_they_begin_says_so(
    fake: FakeSlurm, data_dir: Path
) -> None:
    fake.answers_by("scontrol", "echo 'Job has already finished for job 1' >&2; exit 1")
    with pytest.raises(SlurmRefused, match="Somebody cancelled the jobs before they began"):
        release(["1", "2"])


@pytest.mark.parametrize("ahead_s", [-200, 0, 200])
def test_clocks_that_differ_neither_hide_what_was_made_nor_change_the_speed(
    fake: FakeSlurm, data_dir: Path, ahead_s: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node's clock, 200 s behind or ahead of this machine's; the shard took the last 60 s."""
    now = time.time()
    submitted(data_dir, submitted=now - 60)
    fake.answers("squeue", squeue_line("1-4", "RUNNING"))
    make_done(data_dir, 0, began=now - 60 + ahead_s, wall_s=60.0, job_id="1")
    monkeypatch.setattr("slurm.status.time.time", lambda: now)
    state = status(data_dir)
    assert state["clock_difference_s"] == ahead_s
    assert state["tokens_per_s"] == 100
    text = slurm("status", data_dir)
    way = {
        -200: "3 min 20 s or more behind this one",
        200: "3 min 20 s or more ahead of this one",
        0: "the nodes' clocks",
    }
    assert (way[ahead_s] in text) == bool(ahead_s)


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


def test_in_a_federation_the_verify_job_stays_on_the_cluster_of_the_array_that_it_waits_for(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """What scontrol printed on a real federation of two; a cluster that is in none prints nothing."""
    fed = "Federation: fed\nSelf:       test:127.0.0.1:21920 ID:1 FedState:ACTIVE Features:"
    slurm("submit", data_dir, "--shards", "0")
    fake.answers("federation", fed)
    slurm("submit", data_dir, "--shards", "1")
    sent = [call for call in fake.calls("sbatch") if "--parsable" in call]
    assert ["--clusters=test" in call for call in sent] == [False, False, True, True]


@pytest.mark.parametrize(
    ("clusters", "words"),
    [
        ("test,other", "SLURM_CLUSTERS is 'test,other', expected one cluster"),
        ("all", "SLURM_CLUSTERS is 'all', expected one cluster"),
    ],
)
def test_several_clusters_at_once_are_refused_before_slurm_is_asked(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, clusters: str, words: str
) -> None:
    submitted(data_dir)
    monkeypatch.setenv("SLURM_CLUSTERS", clusters)
    for command in ("submit", "status", "retry", "cancel"):
        assert words in slurm(command, data_dir, code=2)
    assert not fake.calls("sbatch") + fake.calls("squeue")


def test_where_the_records_are_gone_nothing_is_sent_while_the_jobs_go_on(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """rm -r O/jobs, or a purge."""
    slurm("submit", data_dir)
    (name,) = {line.partition("=")[2] for line in fake.sent()[0].splitlines()
               if line.startswith("#SBATCH --job-name=")}  # fmt: skip
    shutil.rmtree(data_dir / "jobs")
    line = squeue_line("0-4", "RUNNING", name=name).strip()
    fake.answers_by("squeue", f'case "$*" in *--user=*) echo "{line}" ;; esac')
    assert "wait or run, and no record says for which shards: 1" in slurm("status", data_dir)
    for command in ("submit", "retry"):
        assert "jobs 1 of this data set wait or run, and no file in" in slurm(command, data_dir, code=2)
    assert len(fake.sent()) == 2, "the first submission's"
    assert "cancelled: 1" in slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1"]
    fake.answers_by("squeue", "")
    slurm("submit", data_dir)


def test_a_shard_that_is_done_while_status_looks_is_not_called_failed(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A controller that restarts takes its time for an answer."""
    submitted(data_dir)
    record = write_record(data_dir, "1_0")
    fake.answers("squeue", squeue_line("1-4", "RUNNING"))

    def finish() -> None:
        make_done(data_dir, 0)
        record.unlink(missing_ok=True)

    real = shown_jobs.find_queue
    monkeypatch.setattr(dataset_state, "find_queue", lambda *given: (real(*given), finish(), real(*given))[2])
    state = status(data_dir)
    assert (state["done"], state["failed"]) == ("0", "")


def test_wait_does_not_wait_for_a_verify_job_that_a_later_one_made_needless(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was to run where the nodes are down by now."""
    submitted(data_dir)
    here = [replace(submission().arrays[0], job_id="5")]
    submitted(data_dir, number=1, arrays=here, verify_job_id="6")
    make_done(data_dir, *range(5))
    write_index(data_dir, 5)
    verify = squeue_line("N/A", "PENDING", "Nodes required for job are DOWN", job="2", name=f"{NAME}-verify")
    fake.answers("squeue", verify)
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: pytest.fail("it waits")})
    monkeypatch.setattr("slurm.status.time", clock)
    slurm("submit", data_dir, "--wait")
    fake.answers("squeue", verify.replace("2|N/A|", "6|N/A|").replace("|2|root", "|6|root"))
    with pytest.raises(pytest.fail.Exception, match="it waits"):
        slurm("submit", data_dir, "--wait")
