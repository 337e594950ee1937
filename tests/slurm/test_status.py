"""What ``status`` says and advises, what ``retry`` sends again, how ``--until_done`` goes on by itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.conftest import seal
from tests.slurm.fake_slurm import (
    NAME,
    QUEUES,
    FakeSlurm,
    array,
    command,
    ended,
    events,
    failure,
    last_line,
    make_done,
    names_of_jobs,
    process_began,
    slurm,
    squeue_line,
    status,
    submitted,
    write_index,
    write_log,
    write_record,
    write_run_record,
)
from tests.world import World

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


# --- the page


def test_every_field_of_json_is_documented_and_every_documented_field_is_there(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0", "PENDING", "Resources") + QUEUES["24.11.5"])
    page = (ROOT / "docs" / "status_json.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ([^|]+) \|", page, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`(\w+)`", row)} == set(status(data_dir))


def test_status_counts_documents_tokens_bytes_and_quarantined_per_source(
    fake: FakeSlurm, tmp_path: Path
) -> None:
    sizes = {"ko": [3, 5], "en": [2], "bad\033[2J": [1]}
    world = World(tmp_path)
    for name, files in sizes.items():
        for number, num_lines in enumerate(files):
            records = [{"text": "a b c " * (number + 1)}] * num_lines + [{"text": None}]
            world.raw({f"{name}/{number}.jsonl": records})
    world.plan(num_shards=4, recursive=True, max_bad_fraction=0.9).run()
    state = status(world.data_dir)
    for name, files in sizes.items():
        num_bytes = sum(path.stat().st_size for path in (world.raw_dir / name).iterdir())
        of = state["sources"][name]
        counts = (of["num_documents"], of["num_quarantined"], of["num_bytes"])
        assert counts == (sum(files), len(files), num_bytes)
    assert sum(each["num_tokens"] for each in state["sources"].values()) == state["num_tokens"]
    shown = slurm("status", world.data_dir)
    assert "\033" not in shown
    assert next(line for line in shown.splitlines() if "left out" in line).startswith("  ko: 8 documents")


def test_the_speed_is_that_since_the_newest_submission_and_what_waits_for_later_is_not_made_sooner(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr("slurm.status.time.time", lambda: now)
    submitted(data_dir, submitted=now - 1000)
    submitted(data_dir, array("5"), verify="6", number=1, submitted=now - 60)
    fake.answers("squeue", squeue_line("1-4", "RUNNING", job="5"))
    make_done(data_dir, 0, began=now - 900, wall_s=60.0, job_id="1")  # of the submission before
    assert status(data_dir)["tokens_per_s"] is None
    make_done(data_dir, 1, began=now - 50, wall_s=50.0, job_id="5")
    state = status(data_dir)
    tokens = json.loads((data_dir / "shard-00001.json").read_text())["counts"]["num_tokens"]
    assert state["tokens_per_s"] == round(tokens / 60)
    assert 100 < state["left_s"] < 300, "three shards of the size of one that took a minute"
    begins = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now + 7200))
    waits = squeue_line("2", "PENDING", "BeginTime", job="5", start=begins)
    fake.answers("squeue", squeue_line("3-4", "RUNNING", job="5") + waits)
    assert abs(status(data_dir)["left_s"] - 7200) < 3
    held = squeue_line("2", "PENDING", "launch failed requeued held", job="5")
    fake.answers("squeue", squeue_line("3-4", "RUNNING", job="5") + held)
    assert status(data_dir)["left_s"] is None, "nobody knows when"


def test_what_verify_found_wrong_is_not_done_until_it_is_made_anew(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    make_done(data_dir, *range(5))
    write_index(data_dir)
    assert status(data_dir)["verified"]
    whole = (data_dir / "shard-00003.tar").read_bytes()
    for number in (1, 3):
        tar = data_dir / f"shard-{number:05d}.tar"
        tar.write_bytes(tar.read_bytes()[:-1] + b"x")
    command("verify", data_dir, code=65)
    (data_dir / "shard-00003.tar").write_bytes(whole)
    make_done(data_dir, 3, began=7.0)
    state = status(data_dir)
    assert (state["done"], state["wrong"], state["verified"]) == ("0,2-4", "1", False)
    slurm("retry", data_dir)
    assert "shards_of=(1)" in fake.sent()[0]


def test_manifests_of_wrong_types_and_links_that_go_round_end_no_command_in_a_traceback(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    contents = [b"[" * 100_000, b'{"run": 1}', b'{"run": {"wall_s": "long"}}', b"\xff", b"{}"]
    for shard_id, content in enumerate(contents):
        for suffix in ("tar", "idx"):
            (data_dir / f"shard-{shard_id:05d}.{suffix}").touch()
        (data_dir / f"shard-{shard_id:05d}.json").write_bytes(content)
    state = status(data_dir)
    assert (state["num_done"], len(state["broken"])) == (0, 5)
    (tmp_path / "round").symlink_to("round")
    for name in ("status", "submit", "cancel", "retry"):
        assert "round" in slurm(name, tmp_path / "round", code=74)


def test_a_verify_job_that_ran_out_of_time_or_never_begins_is_told(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    make_done(data_dir, *range(5))
    words = "*** JOB 2 ON n1 CANCELLED AT 2026-11-22T01:52:04 DUE TO TIME LIMIT ***\n"
    log = write_log(data_dir, "verify-2.log", words)
    write_record(data_dir, "2_0", shards="", log=str(log))
    trouble = status(data_dir)["verify_trouble"]
    assert "TIMEOUT" in trouble
    assert str(log) in trouble
    assert last_line(data_dir) == f"next: shardprep verify {data_dir}"
    waits = squeue_line("N/A", "PENDING", "PartitionTimeLimit", job="2", name=f"{NAME}-verify")
    fake.answers("squeue", waits)
    assert "PartitionTimeLimit" in status(data_dir)["verify_trouble"]


# ``python -m slurm`` that counts what it asks of the file system below a folder, and the commands it starts;
# it ends at the second look of --watch.
COUNTED = """
import collections, json, os, sys, time
folder, report = sys.argv.pop(1), sys.argv.pop(1)
seen = collections.Counter()
def count(event, args):
    if event in ("open", "os.listdir", "os.scandir") and str(args[0]).startswith(folder):
        seen[f"open {os.path.splitext(args[0])[1]}" if event == "open" else "list"] += 1
    if event == "subprocess.Popen":
        seen[f"start {args[0]}"] += 1
sys.addaudithook(count)
real = os.stat
def stat(path, *args, **settings):
    seen["stat"] += str(path).startswith(folder)
    return real(path, *args, **settings)
os.stat = stat
looks = []
def write():
    seen["numpy"] = "numpy" in sys.modules
    looks.append(dict(seen))
    seen.clear()
    with open(report, "w") as file:
        json.dump(looks, file)
def sleep(_):
    write()
    if len(looks) == 2:
        sys.exit(0)
import slurm.status
slurm.status.time = type("Clock", (), {**vars(time), "sleep": staticmethod(sleep)})
from slurm.__main__ import main
code = main(sys.argv[1:])
write()
sys.exit(code)
"""


def test_a_status_reads_each_manifest_and_record_once_and_the_next_look_reads_none_of_them_again(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    """290 manifests and 10 failures; of 10,000 it is so, too."""
    num_shards, num_failed, data = 300, 10, tmp_path / "data"
    prep.plan(sample_dir, data, num_shards=num_shards)
    prep.make(data, 0)
    first = data / "shard-00000.json"
    manifest = json.loads(first.read_text())
    for shard_id in range(1, num_shards - num_failed):
        path = data / f"shard-{shard_id:05d}.json"
        for suffix in (".tar", ".idx"):
            path.with_suffix(suffix).symlink_to(first.with_suffix(suffix))
        manifest["shard_id"] = shard_id
        path.write_text(json.dumps(manifest))
        seal(path)
    submitted(data, array(tasks=[str(number) for number in range(num_shards)]))
    for shard_id in range(num_shards - num_failed, num_shards):
        log = write_log(data, f"1_{shard_id}.log", "an error\n")
        write_record(data, f"1_{shard_id}", ended(74), log=str(log))
    fake.answers("squeue", squeue_line("N/A", "RUNNING", job="2", name=f"{NAME}-verify"))
    report = tmp_path / "seen.json"
    run_child([sys.executable, "-c", COUNTED, data, report, "status", data, "--watch"])
    seen, again = json.loads(report.read_text())
    assert {name: seen[f"start {name}"] for name in ("squeue", "scontrol")} == {"squeue": 1, "scontrol": 1}
    assert not seen["numpy"], "its 0.1 s"
    assert seen["open .log"] == 8, "the newest failures'"
    few = 6  # plan.json, its tokenizer, a submission, index.json
    assert num_shards - num_failed <= seen["open .json"] <= num_shards - num_failed + few
    assert seen["open .r0"] == 2 * num_failed, "before Slurm is asked, and after"
    assert seen["list"] <= 4, "the folder, its jobs, and twice the attempts"
    assert seen["stat"] <= 2 * num_shards + few, "tar and idx of each"
    assert (again["start squeue"], again.get("start scontrol", 0)) == (1, 0)
    assert again["open .json"] <= few
    assert again["stat"] <= few


# --- next


def test_next_is_never_a_retry_that_would_be_refused(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, 0, 1, 2, 3)
    for number in range(3):
        write_record(data_dir, f"{number + 1}_4", ended(74), time=1000 + number)
    assert f"shardprep retry {data_dir} --shards 4" in last_line(data_dir)
    slurm("retry", data_dir, code=74)
    slurm("retry", data_dir, "--shards", 4)
    assert "shards_of=(4)" in fake.sent()[0]


def test_next_accepts_the_share_of_bad_documents_that_the_worker_found_and_keeps_other_arguments(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """Three tries that failed are no reason to refuse what status says."""
    make_done(data_dir, 0, 1, 2, 3)
    for number, fraction in enumerate(("", "0.04", "0.06")):
        args = f"--input_dir /a --max_bad_fraction {fraction}" if fraction else "--input_dir /a"
        request = {"worker_args": args}
        submitted(data_dir, array(f"10{number}", request=request), verify=f"20{number}", number=number)
        said = f"too many documents are left out: --max_bad_fraction {['0.04', '0.06', '0.52'][number]}"
        write_record(data_dir, f"10{number}_4", failure(4, 65, said), ended(65), time=1000 + number)
        words = shlex.split(last_line(data_dir).removeprefix("next: shardprep "))
        assert words[-1].split()[-1] == ["0.04", "0.06", "0.52"][number]
        assert words[-1].startswith("--input_dir /a ")
        slurm(*words, "--dry_run")


def test_watch_goes_on_while_a_run_on_this_machine_makes_shards(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run_record(data_dir, "1", socket.gethostname(), os.getpid(), process_began(os.getpid()))
    looks: list[float] = []

    def sleep(seconds: float) -> None:
        looks.append(seconds)
        path.unlink()

    monkeypatch.setattr("slurm.status.time", SimpleNamespace(**{**vars(time), "sleep": sleep}))
    slurm("status", data_dir, "--watch")
    assert len(looks) == 1


def test_where_slurm_gives_no_answer_a_set_that_nobody_submitted_is_made_by_run(
    fake: FakeSlurm, data_dir: Path
) -> None:
    assert last_line(data_dir) == f"next: shardprep submit {data_dir}"
    (fake.place / "away").touch()
    assert last_line(data_dir) == f"next: shardprep run {data_dir}"
    with write_run_record(data_dir, "1", "n1", 1, 1).open("a") as record:
        record.write(failure(1, 65, "too many are left out: --max_bad_fraction 0.06") + ended(65))
    assert last_line(data_dir) == f"next: shardprep run {data_dir} --max_bad_fraction 0.06"


def test_next_quotes_the_folder_and_who_may_not_write_is_shown_no_command_that_writes(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = data_dir.rename(data_dir.with_name("my data"))
    assert f"shardprep submit '{folder}'" in last_line(folder)
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere
    assert "shardprep" not in last_line(folder)


def test_a_task_without_a_record_that_slurm_has_forgotten_is_said_to_have_left_none(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0, 1, 2, 3)
    state = status(data_dir)
    assert state["not_begun"] == "4"
    assert state["unexplained"].startswith("sacct -D -j 1_4 ")


# --- retry


@pytest.mark.parametrize(
    ("request_", "mem_mb", "node_mb", "option"),
    [
        ({"mem_gb": 1}, 1000, 8000, "mem=2000M"),
        ({"mem_gb": 1}, 1000, 1500, "mem=1500M"),  # the largest node's
        ({"mem_per_cpu_gb": 0.5, "cpus_per_task": 4}, 2048, 8000, "mem-per-cpu=1024M"),
    ],
)
def test_retry_doubles_the_memory_of_what_ran_out_of_it_up_to_the_largest_node(
    fake: FakeSlurm, data_dir: Path, request_: dict[str, Any], mem_mb: int, node_mb: int, option: str
) -> None:
    submitted(data_dir, array(request=request_, mem_mb=mem_mb))
    write_record(data_dir, "1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    fake.answers("sinfo", f"cpu*|idle|{node_mb}|64|infinite\n")
    slurm("retry", data_dir, "--shards", 0)
    assert f"#SBATCH --{option}\n" in fake.sent()[0]


@pytest.mark.parametrize(("had", "asked"), [("4:00:20", 480), ("1:01:50", 120)])
def test_retry_doubles_the_time_that_a_task_was_given(
    fake: FakeSlurm, data_dir: Path, had: str, asked: int
) -> None:
    """After --time_min 60 and scontrol update jobid=1 timelimit=240; or Slurm ended it late."""
    submitted(data_dir, array(request={"time_min": 60, "exclude": "n1"}, time_min=60))
    fake.answers("squeue", squeue_line("0", "TIMEOUT", elapsed=had))
    slurm("retry", data_dir, "--mem_gb", 3)
    scripts = "".join(fake.sent())
    assert f"#SBATCH --time={asked}\n" in scripts
    assert {"#SBATCH --exclude=n1", "#SBATCH --mem=3072M"} <= set(scripts.splitlines()), "and keeps the rest"


def test_a_shard_is_left_after_failing_the_same_way_too_often_unless_something_is_changed(
    fake: FakeSlurm, data_dir: Path
) -> None:
    for number, codes in enumerate(((65, 2, 74), (65, 2, 75), (65, 2, 75))):
        for index, code in enumerate(codes):
            write_record(data_dir, f"{number + 1}_{index}", ended(code), time=1000 + number)
    make_done(data_dir, 3, 4)
    assert status(data_dir)["can_retry"] == "2", "whose last two failures are of one kind, and the first not"
    accepted = {"": "2", "--mem_gb 1": "1 2", "--worker_args '--max_bad_fraction 1'": "0 1 2"}
    for flags, shards in accepted.items():
        shown = slurm("retry", data_dir, *shlex.split(flags), "--dry_run")
        assert f"shards_of=({shards})" in shown, flags


# --- until all is done


def control_line(data: Path, job: str) -> str:
    return squeue_line("N/A", "PENDING", "Dependency", job=job, name=f"{names_of_jobs(data)}0-control")


def test_until_done_leaves_a_controller_that_does_the_same_behind_what_it_sends(
    fake: FakeSlurm, data_dir: Path
) -> None:
    slurm("submit", data_dir, "--until_done")
    controller = fake.sent()[2]
    assert f"retry {data_dir} --until_done --round 1" in controller
    assert f"--job-name={names_of_jobs(data_dir)}0-control" in controller
    assert "--dependency=afterany:1:2" in fake.calls("sbatch")[-1]
    make_done(data_dir, 0, 1, 2, 3)
    write_record(data_dir, "1_4", ended(75, stopped_by="OUT_OF_MEMORY"))
    slurm("retry", data_dir, "--until_done", "--round", 1)
    assert "shards_of=(4)" in fake.sent()[3]
    assert "#SBATCH --mem=200M" in fake.sent()[3], "twice the 100 MB that it had"
    assert "--round 2" in fake.sent()[5]
    assert events(data_dir)[-1]["causes"] == {"OUT_OF_MEMORY": "4"}
    slurm("retry", data_dir, "--until_done", "--round", 6, code=74)
    assert events(data_dir)[-1]["event"] == "stopped"
    assert len(fake.sent()) == 6


def test_until_done_stops_where_only_people_can_help_and_tells_whom_notify_names_once(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    notify = f'echo "$SHARDPREP_RESULT" >>{tmp_path / "told"}'
    slurm("submit", data_dir, "--until_done", "--notify", notify)
    assert not any("shardprep_notify=" in script for script in fake.sent()), "no verify job before the end"
    make_done(data_dir, 0, 1, 2, 3)
    write_record(data_dir, "1_4", ended(65))
    slurm("retry", data_dir, "--until_done", code=74)
    assert "bad input (65)" in events(data_dir)[-1]["why"]
    assert (tmp_path / "told").read_text() == "not verified\n"
    write_record(data_dir, "1_4", ended(74))  # a controller that cannot go on says so, too
    slurm("retry", data_dir, "--until_done", "--setup", "/no/such/file", code=2)
    assert "/no/such/file" in events(data_dir)[-1]["why"]


def test_until_done_verifies_what_is_done_and_writes_the_report(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, *range(5))
    slurm("retry", data_dir, "--until_done")
    assert status(data_dir)["verified"]
    assert "<html" in (data_dir / "report.html").read_text()
    assert events(data_dir)[-1]["event"] == "finished"


def test_cancel_ends_the_controller_first_as_it_would_send_again_what_is_cancelled(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0-4", "PENDING", "Priority") + control_line(data_dir, "9"))
    assert status(data_dir)["controller_jobs"] == ["9"]
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["9 1"]


def test_a_controller_that_died_is_told_unless_somebody_ended_it(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--until_done")
    assert status(data_dir)["controller_lost"] == "3"
    assert "control-3.log" in slurm("status", data_dir)
    fake.answers("squeue", squeue_line("0-4", "PENDING", name=f"{names_of_jobs(data_dir)}0"))
    slurm("cancel", data_dir, "--shards", 0)
    assert fake.calls("scancel") == ["1_0"]
    assert status(data_dir)["controller_lost"] == "3"
    fake.answers("squeue", control_line(data_dir, "3"))
    assert status(data_dir)["controller_lost"] == ""
    slurm("cancel", data_dir)
    fake.answers("squeue", "")
    assert status(data_dir)["controller_lost"] == ""


def test_another_submit_with_until_done_leaves_one_controller(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--until_done", "--shards", "0-2")
    fake.answers("squeue", control_line(data_dir, "3"))
    assert "--shards 0-2" in fake.sent()[2], "it keeps to the shards that were asked for"
    slurm("submit", data_dir, "--until_done", "--shards", "3")
    assert fake.calls("scancel") == ["3"]
    make_done(data_dir, *range(5))
    slurm("submit", data_dir, "--until_done")
    assert len(fake.sent()) == 6, "the one that is there does it"


def test_the_controller_is_submitted_before_the_jobs_are_released_or_nothing_is(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """A limit of jobs that has no room for it: the array is made of fewer tasks until it has."""
    refuse = "echo 'sbatch: error: Job violates accounting/QOS policy (job submit limit)' >&2; exit 1"
    body = f"""script=$(cat)
if [[ $script = *-control* && ! -e "{fake.place}/refused" ]]; then touch "{fake.place}/refused"; {refuse}; fi
printf '%s\\n' "$script" | "{fake.place}/sbatch.sh" "$@\""""
    fake.answers_by("sbatch", body)
    slurm("submit", data_dir, "--until_done")
    assert fake.calls("scancel") == ["1 2"], "what was sent before, not yet released"
    assert [call for call in fake.calls("scontrol") if "release" in call] == ["release 3", "release 4"]
    assert "shards_of=(0-1 2-4)" in fake.sent()[2]


def test_clean_removes_the_logs_of_tasks_once_all_is_verified(fake: FakeSlurm, data_dir: Path) -> None:
    names = ("7_0.log", "verify-8.log", "control-9.log")
    logs = write_log(data_dir, names[0], "words\n").parent
    for name in names[1:]:
        write_log(data_dir, name, "words\n")
    command("clean", data_dir)
    assert sorted(path.name for path in logs.iterdir()) == sorted(names)
    make_done(data_dir, *range(5))
    write_index(data_dir)
    command("clean", data_dir)
    assert sorted(path.name for path in logs.iterdir()) == ["control-9.log", "verify-8.log"]
