"""What status, submit, retry and cancel conclude where Slurm shows little, or the wrong jobs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from preprocess.attempts import AttemptRecord
from shardprep.errors import BrokenShard
from shardprep.format.done import publish_findings
from shardprep.format.plan import need_plan
from slurm import commands
from slurm.commands import SlurmAway, ask_patiently
from slurm.request import JobRequest
from slurm.retry import failing_nodes
from slurm.send import prepare_submit
from slurm.state import find_state, log_tail
from slurm.submissions import SubmittedMeanwhile, read_submissions
from tests.slurm.fake_slurm import (
    FakeSlurm,
    ended,
    make_done,
    slurm,
    squeue_line,
    status,
    submitted,
    write_index,
    write_record,
)

pytestmark = pytest.mark.processes


def test_a_job_of_the_same_number_name_and_user_is_ours_only_at_its_time_of_submission_or_restarted(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    later = "2026-11-22T09:00:00"
    fake.answers("squeue", squeue_line("0-4", "RUNNING", submit=later))
    slurm("cancel", data_dir)
    assert not fake.calls("scancel"), "a controller that lost its state began to count anew"
    fake.answers("squeue", squeue_line("0-4", "RUNNING", submit=later, restarts="1"))
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1"], "Slurm started it again, and dated it anew"


def test_jobs_of_another_cluster_are_asked_for_there_or_called_not_visible_and_never_sent_twice(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, cluster="other")
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    state = status(data_dir)
    assert state["running"] == "0-4", "squeue --clusters=other knows them"
    away = "[ -z $SLURM_CLUSTERS ] || { echo No cluster $SLURM_CLUSTERS known >&2; exit 1; }"
    fake.answers_by("squeue", away)
    state = status(data_dir)
    assert (state["not_visible"], state["failed"]) == ("0-4", "")
    assert "cluster other cannot be seen from test" in state["why_not_visible"]
    said = slurm("submit", data_dir)
    assert "left out: 5 shards may wait or run where it cannot be seen from here" in said
    assert not fake.sent()
    slurm("submit", data_dir, "--shards", "1,3")
    assert "shards_of=(1 3)" in fake.sent()[0]


def test_a_colleagues_jobs_on_a_private_site_are_not_visible_but_for_those_whose_record_has_an_end(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, user="kim")
    write_record(data_dir, "1_1", ended(74))
    fake.answers("config", "ClusterName = test\nMaxArraySize = 1001\nPrivateData = jobs,usage\n")
    state = status(data_dir)
    assert (state["not_visible"], state["causes"]) == ("0,2-4", {"read or write error (74)": "1"})
    fake.answers("config", "ClusterName = test\nMaxArraySize = 1001\nPrivateData = none\n")
    assert status(data_dir)["not_visible"] == "", "where all is shown, what is not shown has ended"


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
    text = slurm("status", data_dir)
    assert "what waits and runs is not known" in text
    assert "next: the same again, when Slurm answers" in text


def test_wait_outlasts_a_controller_that_restarts(
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


def test_patience_ends_after_an_hour_without_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(commands, "sleep", waits.append)

    def away() -> None:
        raise SlurmAway("down")

    with pytest.raises(SlurmAway):
        ask_patiently(away)
    assert 3000 < sum(waits) < 4000


def test_of_two_submits_at_once_the_second_cancels_its_jobs_and_leaves_nothing(
    fake: FakeSlurm, data_dir: Path
) -> None:
    request = JobRequest()
    sendings = [prepare_submit(data_dir, request, None)[1] for _ in range(2)]
    assert sendings[0]
    assert sendings[1]
    first, _ = sendings[0].send()
    with pytest.raises(SubmittedMeanwhile):
        sendings[1].send()
    assert fake.calls("scancel") == ["3 4"]
    assert read_submissions(data_dir) == [first]
    assert [call for call in fake.calls("scontrol") if "release" in call] == ["release 1,2"]


def test_a_submit_that_came_second_looks_again_and_finds_nothing_left_to_send(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one's record appears between this one's look and its own record."""
    looks: list[int] = []

    def look(*args: Any, **settings: Any) -> Any:
        found = prepare_submit(*args, **settings)
        if not looks:
            submitted(data_dir)
            fake.answers("squeue", squeue_line("0-4", "PENDING", "Priority"))
        looks.append(1)
        return found

    monkeypatch.setattr("slurm.send.prepare_submit", look)
    said = slurm("submit", data_dir)
    assert len(looks) == 2
    assert "written meanwhile: somebody else submitted at the same time" in said
    assert "5 shards wait or run already: 0-4" in said
    assert fake.calls("scancel") == ["1 2"]


def test_status_says_why_shards_wait_and_when_they_are_expected_to_start(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    lines = [
        squeue_line("0-1", "PENDING", "PartitionConfig"),
        squeue_line("2-3", "PENDING", "Resources", start="2026-11-23T08:00:00"),
        squeue_line("4", "SUSPENDED"),
    ]
    fake.answers("squeue", "".join(lines))
    text = slurm("status", data_dir)
    assert "shards 0-1 wait for PartitionConfig: no node of the partition is so large" in text
    assert "shards 2-3 wait for Resources" in text
    assert "expected to start at 2026-11-23 08:00:00" in text


def lost(node: str, ended: float) -> AttemptRecord:
    """An attempt whose node went down."""
    facts: dict[str, Any] = {"path": Path("r"), "plan_id": "", "identity": "1.2", "shards": [0], "began": 0.0}
    return AttemptRecord(**facts, started_by="submit", node=node, ended=ended, stopped_by="NODE_FAIL")


def test_a_retry_excludes_nodes_that_failed_twice_alone_and_none_after_a_power_cut() -> None:
    power_cut = [lost(f"n{number}", 60 * number) for number in range(5) for _ in "ab"]
    again = [lost(f"n{number}", 90_000 + 60 * number) for number in range(5)]
    assert failing_nodes(power_cut + again) == [], "all nodes were left out, and nothing could run"
    alone = [lost("n3", day * 200_000) for day in (4, 5) for _ in range(9)]
    assert failing_nodes(alone[:9]) == [], "nine tasks, one incident"
    assert failing_nodes(power_cut + again + alone) == ["n3"]


def test_what_verify_found_wrong_is_not_done_until_it_is_made_anew(fake: FakeSlurm, data_dir: Path) -> None:
    """Whatever the clocks say: the finding is of that manifest."""
    submitted(data_dir)
    make_done(data_dir, *range(5))
    write_index(data_dir, 5)
    assert status(data_dir)["verified"]
    plan_id = need_plan(data_dir).plan_id
    publish_findings(data_dir, plan_id, [(each, BrokenShard(f"shard {each}: x")) for each in (1, 3)])
    make_done(data_dir, 3, began=7.0)
    state = status(data_dir)
    assert (state["done"], state["wrong"], state["verified"]) == ("0,2-4", "1", False)
    assert "found wrong by verify: shard 1; not done" in slurm("status", data_dir)
    slurm("retry", data_dir)
    assert "shards_of=(1)" in fake.sent()[0]


@pytest.mark.parametrize(("state", "code"), [("drained", 0), ("idle", 2)])
def test_drained_nodes_are_a_warning_and_nodes_that_never_fit_a_refusal(
    fake: FakeSlurm, data_dir: Path, state: str, code: int
) -> None:
    """Slurm has the same words for both."""
    for name, case, words in (
        ("sbatch", "test-only", "echo allocation failure: Requested node configuration is not available >&2"),
        ("sinfo", "%T", f"echo 'cpu*|{state}|4000|64|infinite'; exit"),
    ):
        path = fake.place / "bin" / name
        body = path.read_text().partition("\n")[2]
        path.unlink()
        path.write_text(f'#!/bin/bash\ncase "$*" in *"{case}"*) {words}; exit 1;; esac\n{body}')
        path.chmod(0o755)
    said = slurm("submit", data_dir, "--dry_run", code=code)
    assert ("the jobs wait until such nodes are back" in said) == (state == "drained"), said


def test_printed_commands_quote_a_folder_with_blanks(fake: FakeSlurm, data_dir: Path) -> None:
    folder = data_dir.rename(data_dir.with_name("my data"))
    for said in (slurm("submit", folder), slurm("status", folder)):
        assert f"'{folder}'" in said.splitlines()[-1]


def test_a_log_that_is_a_fifo_holds_nobody(data_dir: Path) -> None:
    os.mkfifo(data_dir / "1_0.log")
    assert log_tail(data_dir / "1_0.log") == ""


def test_the_scripts_that_were_sent_are_kept_beside_their_record(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir)
    kept = sorted((data_dir / "jobs").glob("*.sh"))
    assert [path.name for path in kept] == ["0000-1.sh", "0000-2.sh"]
    assert [path.read_text() for path in kept] == fake.sent()
