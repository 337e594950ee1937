"""What ``status`` says and advises, what ``retry`` sends again, how ``--until_done`` goes on by itself."""

from __future__ import annotations

import json
import os
import re
import shlex
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from shardprep.console import source_lines
from shardprep.errors import BrokenShard
from shardprep.format.attempts import AttemptRecord
from shardprep.format.done import publish_findings
from shardprep.format.manifest import read_manifest
from shardprep.format.names import idx_path, manifest_path, shard_name, tar_path
from shardprep.format.plan import Plan, need_plan
from shardprep.format.submissions import JobRequest
from slurm.causes import last_lines
from slurm.retry import failing_nodes
from slurm.script import names_begin
from tests.checkout import ROOT
from tests.children import run_child
from tests.conftest import seal
from tests.slurm.fake_slurm import (
    NAME,
    QUEUES,
    FakeSlurm,
    ended,
    failure,
    make_done,
    slurm,
    squeue_line,
    status,
    submission,
    submitted,
    write_index,
    write_record,
)

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


def events(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "jobs" / "history.jsonl").read_text().splitlines()]


# --- the page


def test_every_field_of_json_is_documented_and_every_documented_field_is_there(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    fake.answers("squeue", squeue_line("0", "PENDING", "Resources") + QUEUES["24.11.5"])
    page = (ROOT / "docs" / "status_json.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE)) == set(status(data_dir))


def test_status_counts_documents_tokens_bytes_and_quarantined_per_source(
    fake: FakeSlurm, prep: Prep, tmp_path: Path
) -> None:
    raw, folder = tmp_path / "raw", tmp_path / "data"
    sizes = {"ko": [3, 5], "en": [2], "bad\033[2J": [1]}
    for name, files in sizes.items():
        (raw / name).mkdir(parents=True)
        for number, num_lines in enumerate(files):
            lines = ['{"text": "' + "a b c " * (number + 1) + '"}\n'] * num_lines
            (raw / name / f"{number}.jsonl").write_text("".join([*lines, '{"text": null}\n']))
    prep.plan(raw, folder, num_shards=4, recursive=True, max_bad_fraction=0.9)
    prep.make(folder)
    found = status(folder)["sources"]
    for name, files in sizes.items():
        num_bytes = sum(path.stat().st_size for path in (raw / name).iterdir())
        of = found[name]
        assert (of["num_documents"], of["num_quarantined"], of["num_bytes"]) == (
            sum(files), len(files), num_bytes,
        )  # fmt: skip
    num_tokens = sum(read_manifest(folder, shard).counts.num_tokens for shard in range(4))
    assert sum(each["num_tokens"] for each in found.values()) == num_tokens
    shown = slurm("status", folder)
    assert "\033" not in shown
    assert next(line for line in shown.splitlines() if "left out" in line).startswith("  ko: 8 documents")


def test_of_many_sources_the_largest_are_shown_and_one_alone_has_no_line() -> None:
    counts = {"num_documents": 1, "num_bytes": 1, "num_quarantined": 0}
    many = {f"s{number:02d}": {**counts, "num_tokens": number} for number in range(20)}
    lines = source_lines(many, all_in="index.json")
    assert [line.split(":")[0].strip() for line in lines[:-1]] == [f"s{19 - n:02d}" for n in range(12)]
    assert "8 more" in lines[-1]
    assert source_lines({".": many["s01"]}, all_in="index.json") == []


def test_last_lines_leave_out_frame_progress_bars_and_what_srun_says_of_a_worker_that_spoke() -> None:
    frame = "shardprep: node n1: shard 3"
    worker = " 10%\r 20%\nerror: no\nsrun: error: n1: task 0: Exited"
    assert last_lines(f"{frame} begins\n{worker}\n{frame} ended with exit code 65\n") == [" 20%", "error: no"]
    assert last_lines("srun: error: Unable to create step\n") == ["srun: error: Unable to create step"]


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
    assert (state["clock_difference_s"], state["tokens_per_s"]) == (ahead_s, 100)
    assert ("the nodes' clocks" in slurm("status", data_dir)) == bool(ahead_s)


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
    slurm("retry", data_dir)
    assert "shards_of=(1)" in fake.sent()[0]


def test_manifests_of_wrong_types_and_links_that_go_round_do_not_end_a_status_with_a_traceback(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    contents = [b"[" * 100_000, b'{"run": 1}', b'{"run": {"wall_s": "long"}}', b"\xff", b"{}"]
    for shard_id, content in enumerate(contents):
        for suffix in ("tar", "idx"):
            (data_dir / f"{shard_name(shard_id)}.{suffix}").touch()
        (data_dir / f"{shard_name(shard_id)}.json").write_bytes(content)
    state = status(data_dir)
    assert (state["num_done"], len(state["broken"])) == (0, 5)
    (tmp_path / "round").symlink_to("round")
    for command in ("status", "submit", "cancel", "retry"):
        assert "round" in slurm(command, tmp_path / "round", code=74)


def test_a_verify_job_that_ran_out_of_time_or_never_begins_is_told(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    make_done(data_dir, *range(5))
    log = data_dir / "jobs" / "logs" / "verify-2.log"
    log.parent.mkdir()
    log.write_text("*** JOB 2 ON n1 CANCELLED AT 2026-11-22T01:52:04 DUE TO TIME LIMIT ***\n")
    write_record(data_dir, "2_0", shards="", log=str(log))
    trouble = status(data_dir)["verify_trouble"]
    assert "TIMEOUT" in trouble
    assert str(log) in trouble
    assert slurm("status", data_dir).splitlines()[-1] == f"next: shardprep verify {data_dir}"
    waits = squeue_line("N/A", "PENDING", "PartitionTimeLimit", job="2", name=f"{NAME}-verify")
    fake.answers("squeue", waits)
    assert "PartitionTimeLimit" in status(data_dir)["verify_trouble"]


def test_where_nothing_waits_or_runs_status_reads_no_sizes_of_the_plan(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_done(data_dir, 0, 1)
    monkeypatch.setattr(Plan, "shard_bytes", lambda _: pytest.fail("10,000 shards take 0.1 s of CPU"))
    assert status(data_dir)["done"] == "0-1"


# ``python -m slurm`` that counts what it asks of the file system below a folder, and the commands it starts.
COUNTED = """
import collections, json, os, sys
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
from slurm.__main__ import main
code = main(sys.argv[1:])
seen["numpy"] = "numpy" in sys.modules
with open(report, "w") as file:
    json.dump(seen, file)
sys.exit(code)
"""


def test_a_status_reads_each_manifest_and_record_once_and_eight_logs_and_asks_slurm_once(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    """290 manifests and 10 failures; of 10,000 it is so, too."""
    num_shards, num_failed, data = 300, 10, tmp_path / "data"
    prep.plan(sample_dir, data, num_shards=num_shards)
    prep.make(data, 0)
    manifest = json.loads(manifest_path(data, 0).read_text())
    for shard_id in range(1, num_shards - num_failed):
        for path in (tar_path, idx_path):
            path(data, shard_id).symlink_to(path(data, 0))
        manifest["shard_id"] = shard_id
        manifest_path(data, shard_id).write_text(json.dumps(manifest))
        seal(manifest_path(data, shard_id))
    submitted(data, arrays=[replace(submission().arrays[0], tasks=[str(i) for i in range(num_shards)])])
    (data / "jobs" / "logs").mkdir()
    for shard_id in range(num_shards - num_failed, num_shards):
        log = data / "jobs" / "logs" / f"1_{shard_id}.log"
        log.write_text("an error\n")
        write_record(data, f"1_{shard_id}", ended(74), log=str(log))
    done = run_child([sys.executable, "-c", COUNTED, data, tmp_path / "seen.json", "status", data])
    assert "290 of 300 shards are done" in done.stdout
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert {name: seen[f"start {name}"] for name in ("squeue", "scontrol")} == {"squeue": 1, "scontrol": 1}
    assert not seen["numpy"], "its 0.1 s"
    assert seen["open .log"] == 8, "the newest failures'"
    few = 6  # plan.json, its tokenizer, a submission, index.json
    assert num_shards - num_failed <= seen["open .json"] <= num_shards - num_failed + few
    assert seen["open .r0"] == 2 * num_failed, "before Slurm is asked, and after"
    assert seen["list"] <= 4, "the folder, its jobs, and twice the attempts"
    assert seen["stat"] <= 2 * num_shards + few, "tar and idx of each"


# --- next


def last_line(data: Path) -> str:
    return slurm("status", data).splitlines()[-1]


def test_next_is_never_a_retry_that_would_be_refused(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, 0, 1, 2, 3)
    for number in range(3):
        write_record(data_dir, f"{number + 1}_4", ended(74), time=1000 + number)
    assert f"shardprep retry {data_dir} --shards 4" in last_line(data_dir)
    slurm("retry", data_dir, code=74)
    slurm("retry", data_dir, "--shards", 4)
    assert "shards_of=(4)" in fake.sent()[0]


def test_next_accepts_more_bad_input_at_each_time_and_keeps_the_other_arguments(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """Three tries that failed are no reason to refuse what status says."""
    make_done(data_dir, 0, 1, 2, 3)
    array = submission().arrays[0]
    given = "--input_dir /a"
    for number, fraction in enumerate(("", "0.05", "0.5", "1")):
        args = f"{given} --max_bad_fraction {fraction}" if fraction else given
        arrays = [replace(array, job_id=str(100 + number), request=JobRequest(worker_args=args))]
        submitted(data_dir, number=number, arrays=arrays, verify_job_id=str(200 + number))
        write_record(data_dir, f"{100 + number}_4", ended(65), time=1000 + number)
        if fraction == "1":
            assert "retry" not in last_line(data_dir)
        else:
            words = shlex.split(last_line(data_dir).removeprefix("next: shardprep "))
            slurm(*words, "--dry_run")
            assert words[-1].startswith(f"{given} --max_bad_fraction ")


def test_next_accepts_the_share_of_bad_documents_that_the_worker_found(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0, 1, 2, 3)
    words = "51 documents (5.10%) cannot be decoded as utf-8, the limit is 1.00%"
    write_record(data_dir, "1_4", failure(4, 65, words), ended(65))
    assert status(data_dir)["accepting_args"] == "--max_bad_fraction 0.5"


def test_watch_goes_on_while_a_run_on_this_machine_makes_shards(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    facts = {"by": "run", "SLURM_ARRAY_JOB_ID": "", "SLURMD_NODENAME": socket.gethostname()}
    path = write_record(data_dir, "1_1", **facts, pid=os.getpid(), pid_began=ticks)
    path = path.rename(path.with_name(f"host-{os.getpid()}.1000"))
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
        (JobRequest(mem_gb=1), 1000, 8000, "mem=2000M"),
        (JobRequest(mem_gb=1), 1000, 1500, "mem=1500M"),  # the largest node's
        (JobRequest(mem_per_cpu_gb=0.5, cpus_per_task=4), 2048, 8000, "mem-per-cpu=1024M"),
    ],
)
def test_retry_doubles_the_memory_of_what_ran_out_of_it_up_to_the_largest_node(
    fake: FakeSlurm, data_dir: Path, request_: JobRequest, mem_mb: int, node_mb: int, option: str
) -> None:
    submitted(data_dir, arrays=[replace(submission().arrays[0], request=request_, mem_mb=mem_mb)])
    write_record(data_dir, "1_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    fake.answers("sinfo", f"cpu*|idle|{node_mb}|64|infinite\n")
    slurm("retry", data_dir, "--shards", 0)
    assert f"#SBATCH --{option}\n" in fake.sent()[0]


@pytest.mark.parametrize(("had", "asked"), [("4:00:20", 480), ("1:01:50", 120)])
def test_retry_doubles_the_time_that_a_task_was_given(
    fake: FakeSlurm, data_dir: Path, had: str, asked: int
) -> None:
    """After --time_min 60 and scontrol update jobid=1 timelimit=240; or Slurm ended it late."""
    request = JobRequest(time_min=60, exclude="n1")
    submitted(data_dir, arrays=[replace(submission().arrays[0], request=request, time_min=60)])
    fake.answers("squeue", squeue_line("0", "TIMEOUT").replace("|0:02|", f"|{had}|"))
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


def lost(node: str, ended_s: float) -> AttemptRecord:
    """An attempt whose node went down."""
    facts: dict[str, Any] = {"path": Path("r"), "plan_id": "", "identity": "1.2", "shards": [0], "began": 0.0}
    return AttemptRecord(**facts, started_by="submit", node=node, ended=ended_s, stopped_by="NODE_FAIL")


def test_a_retry_excludes_nodes_that_failed_twice_alone_and_none_after_a_power_cut() -> None:
    power_cut = [lost(f"n{number}", 60 * number) for number in range(5) for _ in "ab"]
    again = [lost(f"n{number}", 90_000 + 60 * number) for number in range(5)]
    assert failing_nodes(power_cut + again) == [], "all nodes were left out, and nothing could run"
    alone = [lost("n3", day * 200_000) for day in (4, 5) for _ in range(9)]
    assert failing_nodes(alone[:9]) == [], "nine tasks, one incident"
    assert failing_nodes(power_cut + again + alone) == ["n3"]


# --- until all is done


def test_until_done_leaves_a_controller_that_does_the_same_behind_what_it_sends(
    fake: FakeSlurm, data_dir: Path
) -> None:
    slurm("submit", data_dir, "--until_done")
    controller = fake.sent()[2]
    assert f"retry {data_dir} --until_done --round 1" in controller
    assert "--job-name=" + names_begin(data_dir, need_plan(data_dir).plan_id) + "0-control" in controller
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


def test_until_done_verifies_what_is_done_and_writes_the_report(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    prep.plan(sample_dir, data, num_shards=2)
    prep.make(data)
    slurm("retry", data, "--until_done")
    assert status(data)["verified"]
    assert "<html" in (data / "report.html").read_text()
    assert events(data)[-1]["event"] == "finished"


def control_line(data: Path, job: str) -> str:
    name = f"{names_begin(data, need_plan(data).plan_id)}0-control"
    return squeue_line("N/A", "PENDING", "Dependency", job=job, name=name)


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
    real = f'"{fake.place}/sbatch.sh" "$@"'
    refuse = "echo 'sbatch: error: Job violates accounting/QOS policy (job submit limit)' >&2; exit 1"
    body = f"""script=$(cat)
if [[ $script = *-control* && ! -e "{fake.place}/refused" ]]; then touch "{fake.place}/refused"; {refuse}; fi
printf '%s\\n' "$script" | {real}"""
    fake.answers_by("sbatch", body)
    slurm("submit", data_dir, "--until_done")
    assert fake.calls("scancel") == ["1 2"], "what was sent before, not yet released"
    assert [call for call in fake.calls("scontrol") if "release" in call] == ["release 3,4"]
    assert "shards_of=(0-1 2-4)" in fake.sent()[2]


def test_clean_removes_the_logs_of_tasks_once_all_is_verified(prep: Prep, data_dir: Path) -> None:
    logs = data_dir / "jobs" / "logs"
    logs.mkdir(parents=True)
    names = ("7_0.log", "verify-8.log", "control-9.log")
    for name in names:
        (logs / name).write_text("words\n")
    assert prep.command("clean", data_dir).code == 0
    assert sorted(path.name for path in logs.iterdir()) == sorted(names)
    assert prep.command("run", data_dir).code == 0
    assert prep.command("verify", data_dir).code == 0
    assert prep.command("clean", data_dir).code == 0
    assert sorted(path.name for path in logs.iterdir()) == ["control-9.log", "verify-8.log"]
