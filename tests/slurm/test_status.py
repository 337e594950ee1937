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
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.forged import rewrite_json
from tests.slurm.fake_slurm import NAME, QUEUES, Desk, array, ended, failure, squeue_line
from tests.world import World, call_main

pytestmark = pytest.mark.processes


# --- the page


@pytest.mark.parametrize("command", ["status", "report"])
def test_every_field_of_json_is_documented_and_every_documented_field_is_there(
    desk: Desk, command: str
) -> None:
    desk.submitted()
    desk.queue(squeue_line("0", "PENDING", "Resources"), QUEUES["24.11.5"])
    page = (ROOT / "docs" / f"{command}_json.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    fields = json.loads(desk.command(command, "--json").out)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(fields)


def test_the_speed_is_that_since_the_newest_submission_and_what_waits_for_later_is_not_made_sooner(
    desk: Desk,
) -> None:
    now = time.time()
    desk.patch.setattr("slurm.status.time.time", lambda: now)
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


def count_calls(desk: Desk, counts: Counter[str]) -> None:
    """Count what is asked of the file system below the data set's folder."""

    def counting(name: str, real: Any) -> Any:
        def call(path: Any = ".", *args: Any, **settings: Any) -> Any:
            if str(path).startswith(str(desk.data)):
                counts[f"open {Path(str(path)).suffix}" if name == "open" else name] += 1
            return real(path, *args, **settings)

        return call

    for name in ("open", "stat", "scandir", "listdir"):
        desk.patch.setattr(os, name, counting(name, getattr(os, name)))


def test_a_status_reads_each_manifest_and_record_once_and_the_next_look_reads_none_of_them_again(
    desk: Desk,
) -> None:
    """290 manifests and 10 failures; of 10,000 it is so, too."""
    num_shards, num_failed = 300, 10
    num_made = num_shards - num_failed
    world = World(desk.tmp / "many").raw({"a.txt": "a\n" * num_shards}).plan(num_shards=num_shards).run(0)
    desk.data = world.data_dir
    first = desk.data / "shard-00000.json"
    for shard_id in range(1, num_made):
        path = desk.data / f"shard-{shard_id:05d}.json"
        for suffix in (".tar", ".idx"):
            path.with_suffix(suffix).symlink_to(first.with_suffix(suffix))
        shutil.copy(first, path)
        rewrite_json(path, shard_id=shard_id)
    desk.submitted(array(tasks=[str(number) for number in range(num_shards)]))
    for shard_id in range(num_made, num_shards):
        log = desk.log(f"1_{shard_id}.log", "an error\n")
        desk.record(f"1_{shard_id}", ended(74), log=str(log))
    desk.queue(squeue_line("N/A", "RUNNING", job="2", name=f"{NAME}-verify"))
    counts, looks = Counter[str](), list[Counter[str]]()
    count_calls(desk, counts)

    def sleep(_: float) -> None:
        starts = {f"start {name}": len(desk.fake.calls(name)) for name in ("squeue", "scontrol")}
        looks.append(counts + Counter(starts))
        counts.clear()
        desk.queue("")  # the next look is the last one

    desk.at_waits(sleep)
    desk.slurm("status", "--watch")
    (seen,) = looks
    few = 6  # plan.json, its tokenizer, a submission, index.json
    assert (seen["start squeue"], seen["start scontrol"]) == (1, 1)
    assert seen["open .log"] == 8, "the newest failures'"
    assert num_made <= seen["open .json"] <= num_made + few
    assert seen["open .r0"] == 2 * num_failed, "before Slurm is asked, and after"
    assert seen["scandir"] + seen["listdir"] <= 4, "the folder, its jobs, and twice the attempts"
    assert seen["stat"] <= 2 * num_shards + few, "tar and idx of each"
    assert (len(desk.fake.calls("squeue")), len(desk.fake.calls("scontrol"))) == (2, 1)
    assert counts["open .json"] <= few
    assert counts["stat"] <= few


def test_watch_goes_on_while_a_run_on_this_machine_makes_shards(desk: Desk) -> None:
    path, looks = desk.run_record("1", socket.gethostname(), os.getpid(), is_this_process=True), list[None]()
    desk.at_waits(lambda _: looks.append(path.unlink()))
    desk.slurm("status", "--watch")
    assert len(looks) == 1


# --- next


def three_failures(end: str) -> Callable[[Desk], None]:
    def given(desk: Desk) -> None:
        desk.make_done(0, 1, 2, 3)
        for number in range(3):
            desk.record(f"{number + 1}_4", end, time=1000 + number)

    return given


def too_many_left_out(desk: Desk) -> None:
    """Three tries that failed are no reason to refuse what status says."""
    desk.make_done(0, 1, 2, 3)
    worker_args = "--input_dir /a"
    for number, fraction in enumerate(("0.04", "0.06", "0.52")):
        request = {"worker_args": worker_args}
        desk.submitted(array(f"10{number}", request=request), verify=f"20{number}", number=number)
        said = f"too many documents are left out: --max_bad_fraction {fraction}"
        desk.record(f"10{number}_4", failure(4, 65, said), ended(65), time=1000 + number)
        worker_args = f"--input_dir /a --max_bad_fraction {fraction}"


def away(desk: Desk) -> None:
    (desk.fake.place / "away").touch()


def run_that_left_too_many_out(desk: Desk) -> None:
    away(desk)
    with desk.run_record("1", "n1", 1).open("a") as record:
        record.write(failure(1, 65, "too many are left out: --max_bad_fraction 0.06") + ended(65))


def in_a_folder_with_a_blank(desk: Desk) -> None:
    desk.data = desk.data.rename(desk.tmp / "my data")


def of_somebody_else(desk: Desk) -> None:
    desk.patch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere


RETRY = "shardprep retry DATA"
# What stands in the folder -> what to type next, and the shards that it sends.
NEXT: dict[Callable[[Desk], None], tuple[str, str]] = {
    in_a_folder_with_a_blank: ("shardprep submit DATA", "0 1 2 3 4"),
    three_failures(ended(74)): (f"correct the cause, then: {RETRY} --shards 4", "4"),
    # the retry itself asks for more
    three_failures(ended(75, stopped_by="TIMEOUT")): (f"{RETRY} --shards 4", "4"),
    too_many_left_out: (
        f"{RETRY} --worker_args '--input_dir /a --max_bad_fraction 0.06 --max_bad_fraction 0.52'", "4",
    ),
    away: ("shardprep run DATA", ""),
    run_that_left_too_many_out: ("shardprep run DATA --max_bad_fraction 0.06", ""),
    of_somebody_else: ("its owner goes on, as you may not write into DATA", ""),
}  # fmt: skip


@pytest.mark.parametrize(("given", "typed", "sends"), [(given, *said) for given, said in NEXT.items()])
def test_next_is_a_command_that_is_not_refused_from_any_folder(
    desk: Desk, given: Callable[[Desk], None], typed: str, sends: str
) -> None:
    given(desk)
    line = desk.next()
    assert line == f"next: {typed}".replace("DATA", shlex.quote(str(desk.data)))
    if sends:
        assert call_main(*shlex.split(line.partition("shardprep ")[2])).code == 0
        assert desk.sent_shards() == [sends]


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
    ("request_", "granted", "ran", "option"),
    [
        # up to the largest node's
        ({"mem_gb": 1}, {"mem_mb": 1000}, "", "mem=2000M"),
        ({"mem_gb": 4}, {"mem_mb": 4096}, "", "mem=6000M"),
        ({"mem_per_cpu_gb": 0.5, "cpus_per_task": 4}, {"mem_mb": 2048}, "", "mem-per-cpu=1024M"),
        # after --time_min 60 and scontrol update jobid=1 timelimit=240; or Slurm ended it late
        ({"time_min": 60}, {"time_min": 60}, "4:00:20", "time=480"),
        ({"time_min": 60}, {"time_min": 60}, "1:01:50", "time=120"),
    ],
)
def test_retry_doubles_the_memory_or_time_that_was_too_little_and_keeps_the_rest(
    desk: Desk, request_: dict[str, Any], granted: dict[str, Any], ran: str, option: str
) -> None:
    desk.submitted(array(request={**request_, "exclude": "n1"}, **granted))
    desk.fake.answers("sinfo", "cpu*|idle|6000|64|infinite\n")
    if ran:
        desk.queue(squeue_line("0", "TIMEOUT", elapsed=ran))
    else:
        desk.record("1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    desk.slurm("retry", "--shards", 0, "--account", "mine")
    lines = desk.fake.sent()[0].splitlines()
    assert {f"#SBATCH --{option}", "#SBATCH --exclude=n1", "#SBATCH --account=mine"} <= set(lines)


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


def control_line(desk: Desk) -> str:
    """Return squeue's line of the controller that a first submit left."""
    return squeue_line("N/A", "PENDING", "Dependency", job="3", name=f"{desk.job_name}-control")


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


def test_until_done_stops_where_only_people_can_help_and_tells_whom_notify_names_once(desk: Desk) -> None:
    told = desk.tmp / "told"
    desk.slurm("submit", "--until_done", "--notify", f'echo "$SHARDPREP_RESULT" >>{told}')
    assert not any("shardprep_notify=" in script for script in desk.fake.sent()), "not before the end"
    desk.make_done(0, 1, 2, 3)
    desk.record("1_4", ended(65))
    desk.slurm("retry", "--until_done", code=74)
    assert "bad input (65)" in desk.events()[-1]["why"]
    assert told.read_text() == "not verified\n"
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
    desk.queue(control_line(desk))
    assert desk.status()["controller_lost"] == ""
    desk.slurm("cancel")
    desk.queue("")
    assert desk.status()["controller_lost"] == ""


def test_another_submit_with_until_done_leaves_one_controller(desk: Desk) -> None:
    desk.slurm("submit", "--until_done", "--shards", "0-2")
    desk.queue(control_line(desk))
    assert "--shards 0-2" in desk.fake.sent()[2], "it keeps to the shards that were asked for"
    desk.slurm("submit", "--until_done", "--shards", "3")
    assert desk.cancelled() == ["3"]
    desk.make_done(*range(5))
    desk.slurm("submit", "--until_done")
    assert len(desk.fake.sent()) == 6, "the one that is there does it"


def test_clean_removes_the_logs_of_tasks_once_all_is_verified(desk: Desk) -> None:
    names = ["7_0.log", "control-9.log", "verify-8.log"]
    *_, logs = (desk.log(name, "words\n").parent for name in names)
    desk.slurm("clean")
    assert len(list(logs.iterdir())) == 3
    desk.make_done(*range(5))
    desk.write_index()
    desk.slurm("clean")
    assert sorted(path.name for path in logs.iterdir()) == names[1:]
