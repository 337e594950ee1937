"""What ``status`` says and advises, what ``retry`` sends again, how ``--until_done`` goes on by itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import socket
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkout import ROOT
from tests.forged import rewrite_json
from tests.slurm.fake_slurm import (
    NAME,
    QUEUES,
    Desk,
    FakeSlurm,
    array,
    call_at_waits,
    ended,
    failure,
    squeue_line,
)
from tests.world import call_main

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


# --- the page


def test_every_field_of_json_is_documented_and_every_documented_field_is_there(desk: Desk) -> None:
    desk.submitted()
    desk.queue(squeue_line("0", "PENDING", "Resources"), QUEUES["24.11.5"])
    page = (ROOT / "docs" / "status_json.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(desk.status())


def test_the_speed_is_that_since_the_newest_submission_and_what_waits_for_later_is_not_made_sooner(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr("slurm.status.time.time", lambda: now)
    desk.submitted(submitted=now - 1000)
    desk.submitted(array("5"), verify="6", number=1, submitted=now - 60)
    desk.queue(squeue_line("1-4", "RUNNING", job="5"))
    desk.make_done(0, began=now - 900, wall_s=60.0, job_id="1")  # of the submission before
    assert desk.status()["tokens_per_s"] is None
    desk.make_done(1, began=now - 50, wall_s=50.0, job_id="5")
    state = desk.status()
    tokens = json.loads((desk.data / "shard-00001.json").read_text())["counts"]["num_tokens"]
    assert state["tokens_per_s"] == round(tokens / 60)
    assert 100 < state["left_s"] < 300, "three shards of the size of one that took a minute"
    begins = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + 7200))
    runs = squeue_line("3-4", "RUNNING", job="5")
    desk.queue(runs, squeue_line("2", "PENDING", "BeginTime", job="5", start=begins))
    assert abs(desk.status()["left_s"] - 7200) < 3
    desk.queue(runs, squeue_line("2", "PENDING", "launch failed requeued held", job="5"))
    assert desk.status()["left_s"] is None, "nobody knows when"


def test_a_verify_job_that_ran_out_of_time_or_never_begins_is_told(desk: Desk) -> None:
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


class Asked:
    """Counts what is asked of the file system below a folder."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.counts = str(folder), Counter[str]()
        for name in ("open", "stat", "scandir", "listdir"):
            monkeypatch.setattr(os, name, self._counting(name, getattr(os, name)))

    def _counting(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **settings: Any) -> Any:
            if str(path).startswith(self.folder):
                suffix = Path(str(path)).suffix
                self.counts[f"open {suffix}" if name == "open" else "stat" if name == "stat" else "list"] += 1
            return real(path, *args, **settings)

        return call


def test_a_status_reads_each_manifest_and_record_once_and_the_next_look_reads_none_of_them_again(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """290 manifests and 10 failures; of 10,000 it is so, too."""
    num_shards, num_failed = 300, 10
    desk = Desk(data=tmp_path / "data", fake=fake)
    prep.plan(sample_dir, desk.data, num_shards=num_shards)
    prep.make(desk.data, 0)
    first = desk.data / "shard-00000.json"
    for shard_id in range(1, num_shards - num_failed):
        path = desk.data / f"shard-{shard_id:05d}.json"
        for suffix in (".tar", ".idx"):
            path.with_suffix(suffix).symlink_to(first.with_suffix(suffix))
        shutil.copy(first, path)
        rewrite_json(path, shard_id=shard_id)
    desk.submitted(array(tasks=[str(number) for number in range(num_shards)]))
    for shard_id in range(num_shards - num_failed, num_shards):
        log = desk.log(f"1_{shard_id}.log", "an error\n")
        desk.record(f"1_{shard_id}", ended(74), log=str(log))
    runs = squeue_line("N/A", "RUNNING", job="2", name=f"{NAME}-verify")
    desk.queue(runs)
    asked, looks = Asked(desk.data, monkeypatch), list[Counter[str]]()

    def sleep(_: float) -> None:
        calls = {f"start {name}": len(fake.calls(name)) for name in ("squeue", "scontrol")}
        looks.append(asked.counts + Counter(calls))
        asked.counts.clear()
        desk.queue("")  # the next look is the last one

    call_at_waits(monkeypatch, sleep)
    desk.slurm("status", "--watch")
    (seen,), again = looks, asked.counts
    few = 6  # plan.json, its tokenizer, a submission, index.json
    assert (seen["start squeue"], seen["start scontrol"]) == (1, 1)
    assert seen["open .log"] == 8, "the newest failures'"
    assert num_shards - num_failed <= seen["open .json"] <= num_shards - num_failed + few
    assert seen["open .r0"] == 2 * num_failed, "before Slurm is asked, and after"
    assert seen["list"] <= 4, "the folder, its jobs, and twice the attempts"
    assert seen["stat"] <= 2 * num_shards + few, "tar and idx of each"
    assert (len(fake.calls("squeue")), len(fake.calls("scontrol"))) == (2, 1)
    assert again["open .json"] <= few
    assert again["stat"] <= few


# --- next


@pytest.mark.parametrize(
    ("end", "first"),
    [
        (ended(74), "correct the cause, then: "),
        (ended(75, stopped_by="TIMEOUT"), ""),  # the retry itself asks for more
    ],
)
def test_next_is_never_a_retry_that_would_be_refused(desk: Desk, end: str, first: str) -> None:
    desk.make_done(0, 1, 2, 3)
    for number in range(3):
        desk.record(f"{number + 1}_4", end, time=1000 + number)
    assert desk.next() == f"next: {first}shardprep retry {desk.data} --shards 4"
    desk.slurm("retry", code=74)
    desk.slurm("retry", "--shards", 4)
    assert desk.sent_shards() == ["4"]


def test_next_accepts_the_share_of_bad_documents_that_the_worker_found_and_keeps_other_arguments(
    desk: Desk,
) -> None:
    """Three tries that failed are no reason to refuse what status says."""
    desk.make_done(0, 1, 2, 3)
    had = ""
    for number, fraction in enumerate(("0.04", "0.06", "0.52")):
        request = {"worker_args": f"--input_dir /a{had}"}
        desk.submitted(array(f"10{number}", request=request), verify=f"20{number}", number=number)
        said = f"too many documents are left out: --max_bad_fraction {fraction}"
        desk.record(f"10{number}_4", failure(4, 65, said), ended(65), time=1000 + number)
        name, _, *words = shlex.split(desk.next().removeprefix("next: shardprep "))
        assert words[-1].split()[-1] == fraction
        assert words[-1].startswith("--input_dir /a ")
        desk.slurm(name, *words, "--dry_run")
        had = f" --max_bad_fraction {fraction}"


def test_watch_goes_on_while_a_run_on_this_machine_makes_shards(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = desk.run_record("1", socket.gethostname(), os.getpid(), is_this_process=True)
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        path.unlink()

    call_at_waits(monkeypatch, sleep)
    desk.slurm("status", "--watch")
    assert len(looks) == 1


def test_where_slurm_gives_no_answer_a_set_that_nobody_submitted_is_made_by_run(desk: Desk) -> None:
    assert desk.next() == f"next: shardprep submit {desk.data}"
    (desk.fake.place / "away").touch()
    assert desk.next() == f"next: shardprep run {desk.data}"
    with desk.run_record("1", "n1", 1).open("a") as record:
        record.write(failure(1, 65, "too many are left out: --max_bad_fraction 0.06") + ended(65))
    assert desk.next() == f"next: shardprep run {desk.data} --max_bad_fraction 0.06"


def test_next_quotes_the_folder_and_who_may_not_write_is_shown_no_command_that_writes(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.data = desk.data.rename(desk.data.with_name("my data"))
    assert f"shardprep submit '{desk.data}'" in desk.next()
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere
    assert "shardprep" not in desk.next()


# --- retry


def test_retry_and_the_line_that_verify_prints_make_what_it_found_wrong(desk: Desk) -> None:
    desk.submitted()
    desk.make_done(*range(5))
    tar = desk.data / "shard-00001.tar"
    tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    said = desk.slurm("verify", code=65)
    assert desk.status()["wrong"] == "1"
    desk.slurm("retry")
    assert desk.sent_shards() == ["1"]
    (repairs,) = re.findall("error: shard 00001: .*shardprep (--shard_id .*)$", said, re.MULTILINE)
    assert call_main(*shlex.split(repairs)).code == 0
    assert desk.status()["wrong"] == ""


@pytest.mark.parametrize(
    ("request_", "mem_mb", "node_mb", "option"),
    [
        ({"mem_gb": 1}, 1000, 8000, "mem=2000M"),
        ({"mem_gb": 1}, 1000, 1500, "mem=1500M"),  # the largest node's
        ({"mem_per_cpu_gb": 0.5, "cpus_per_task": 4}, 2048, 8000, "mem-per-cpu=1024M"),
    ],
)
def test_retry_doubles_the_memory_of_what_ran_out_of_it_up_to_the_largest_node(
    desk: Desk, request_: dict[str, Any], mem_mb: int, node_mb: int, option: str
) -> None:
    desk.submitted(array(request=request_, mem_mb=mem_mb))
    desk.record("1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    desk.fake.answers("sinfo", f"cpu*|idle|{node_mb}|64|infinite\n")
    desk.slurm("retry", "--shards", 0)
    assert f"#SBATCH --{option}\n" in desk.fake.sent()[0]


@pytest.mark.parametrize(("had", "asked"), [("4:00:20", 480), ("1:01:50", 120)])
def test_retry_doubles_the_time_that_a_task_was_given(desk: Desk, had: str, asked: int) -> None:
    """After --time_min 60 and scontrol update jobid=1 timelimit=240; or Slurm ended it late."""
    desk.submitted(array(request={"time_min": 60, "exclude": "n1"}, time_min=60))
    desk.queue(squeue_line("0", "TIMEOUT", elapsed=had))
    desk.slurm("retry", "--mem_gb", 3)
    lines = "".join(desk.fake.sent()).splitlines()
    assert f"#SBATCH --time={asked}" in lines
    assert {"#SBATCH --exclude=n1", "#SBATCH --mem=3072M"} <= set(lines), "and keeps the rest"


def test_a_shard_is_left_after_failing_the_same_way_too_often_unless_something_is_changed(
    desk: Desk,
) -> None:
    for number, codes in enumerate(((65, 2, 74), (65, 2, 75), (65, 2, 75))):
        for index, code in enumerate(codes):
            desk.record(f"{number + 1}_{index}", ended(code), time=1000 + number)
    desk.make_done(3, 4)
    assert desk.status()["can_retry"] == "2", "whose last two failures are of one kind, and the first not"
    accepted = {"": "2", "--mem_gb 1": "1 2", "--worker_args '--max_bad_fraction 1'": "0 1 2"}
    for flags, shards in accepted.items():
        shown = desk.slurm("retry", *shlex.split(flags), "--dry_run")
        assert f"shards_of=({shards})" in shown, flags


# --- until all is done


def control_line(desk: Desk, job: str) -> str:
    return squeue_line("N/A", "PENDING", "Dependency", job=job, name=f"{desk.job_name}-control")


def test_until_done_leaves_a_controller_that_does_the_same_behind_what_it_sends(desk: Desk) -> None:
    desk.slurm("submit", "--until_done")
    controller = desk.fake.sent()[2]
    assert f"retry {desk.data} --until_done --round 1" in controller
    assert f"--job-name={desk.job_name}-control" in controller
    assert "--dependency=afterany:1:2" in desk.fake.calls("sbatch")[-1]
    desk.make_done(0, 1, 2, 3)
    desk.record("1_4", ended(75, stopped_by="OUT_OF_MEMORY"))
    desk.slurm("retry", "--until_done", "--round", 1)
    assert desk.sent_shards()[1:] == ["4"]
    assert "#SBATCH --mem=200M" in desk.fake.sent()[3], "twice the 100 MB that it had"
    assert "--round 2" in desk.fake.sent()[5]
    assert desk.events()[-1]["causes"] == {"OUT_OF_MEMORY": "4"}
    desk.slurm("retry", "--until_done", "--round", 6, code=74)
    assert desk.events()[-1]["event"] == "stopped"
    assert len(desk.fake.sent()) == 6


def test_until_done_stops_where_only_people_can_help_and_tells_whom_notify_names_once(
    desk: Desk, tmp_path: Path
) -> None:
    notify = f'echo "$SHARDPREP_RESULT" >>{tmp_path / "told"}'
    desk.slurm("submit", "--until_done", "--notify", notify)
    assert not any("shardprep_notify=" in script for script in desk.fake.sent()), "not before the end"
    desk.make_done(0, 1, 2, 3)
    desk.record("1_4", ended(65))
    desk.slurm("retry", "--until_done", code=74)
    assert "bad input (65)" in desk.events()[-1]["why"]
    assert (tmp_path / "told").read_text() == "not verified\n"
    desk.record("1_4", ended(74))  # a controller that cannot go on says so, too
    desk.slurm("retry", "--until_done", "--setup", "/no/such/file", code=2)
    assert "/no/such/file" in desk.events()[-1]["why"]


def test_a_controller_that_died_is_told_unless_somebody_ended_it(desk: Desk) -> None:
    desk.slurm("submit", "--until_done")
    assert desk.status()["controller_lost"] == "3"
    assert "control-3.log" in desk.slurm("status")
    desk.queue(squeue_line("0-4", "PENDING", name=desk.job_name))
    desk.slurm("cancel", "--shards", 0)
    assert desk.cancelled() == ["1_0"]
    assert desk.status()["controller_lost"] == "3"
    desk.queue(control_line(desk, "3"))
    assert desk.status()["controller_lost"] == ""
    desk.slurm("cancel")
    desk.queue("")
    assert desk.status()["controller_lost"] == ""


def test_another_submit_with_until_done_leaves_one_controller(desk: Desk) -> None:
    desk.slurm("submit", "--until_done", "--shards", "0-2")
    desk.queue(control_line(desk, "3"))
    assert "--shards 0-2" in desk.fake.sent()[2], "it keeps to the shards that were asked for"
    desk.slurm("submit", "--until_done", "--shards", "3")
    assert desk.cancelled() == ["3"]
    desk.make_done(*range(5))
    desk.slurm("submit", "--until_done")
    assert len(desk.fake.sent()) == 6, "the one that is there does it"


def test_clean_removes_the_logs_of_tasks_once_all_is_verified(desk: Desk) -> None:
    kept = ["control-9.log", "verify-8.log"]
    for name in ("7_0.log", *kept):
        logs = desk.log(name, "words\n").parent
    desk.slurm("clean")
    assert len(list(logs.iterdir())) == 3
    desk.make_done(*range(5))
    desk.write_index()
    desk.slurm("clean")
    assert sorted(path.name for path in logs.iterdir()) == kept
