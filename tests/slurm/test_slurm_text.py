"""What shardprep computes from text alone: scripts, limits, Slurm's answers, causes, retries."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.attempts import folder_identity
from shardprep.errors import UsageError
from shardprep.format.names import ids_of_ranges, idx_path, manifest_path, tar_path
from slurm.commands import minutes_of
from slurm.request import JobRequest
from slurm.retry import retry_request
from slurm.script import array_script
from slurm.send import parse_job
from slurm.site import find_site, tasks_of_shards
from slurm.state import (
    BAD_INPUT,
    OUT_OF_MEMORY,
    SETUP,
    TIMEOUT,
    Attempt,
    Shard,
    last_lines,
    reason_to_leave,
)
from slurm.submissions import JobArray, Submission, SubmittedMeanwhile, read_submissions
from slurm.submissions import publish_submission as publish
from tests.checkout import ROOT
from tests.children import run_child
from tests.conftest import seal
from tests.slurm.fake_slurm import FakeSlurm, ended, write_record

if TYPE_CHECKING:
    from tests.conftest import Prep

WHEN = "2026-11-22T01:52:04"
SHOWN = f"JobId=7 JobName=shardprep-0123 UserId=root(0) GroupId=root(0) SubmitTime={WHEN} "


def _array(**changes: Any) -> JobArray:
    request = JobRequest(**changes.pop("request", {}))
    fields: dict[str, Any] = {
        "job_id": "7",
        "name": "shardprep-0123",
        "submit_time": WHEN,
        "tasks": ["0", "1-2"],
    }
    fields |= {"submit_time": WHEN, "mem_mb": 1000, "time_min": 10}
    return JobArray(request=request, **{**fields, **changes})


def _failed(*causes: str, **changes: Any) -> Shard:
    attempts = [
        Attempt(array=_array(**changes), task="7_0", cause=cause, state="failed", node="n1")
        for cause in causes
    ]
    return Shard(shard_id=0, state="failed", attempts=attempts)


@pytest.mark.processes
def test_the_script_is_prep_array_with_a_head_that_maps_index_to_shards() -> None:
    request = JobRequest(mem_gb=1.5, time_min=9, sbatch_args="--comment='two words' --mem=1M", partition="p")
    folder = Path("/data/it's 5% of all")
    text = array_script(folder, "shardprep-0123456789ab-0", ["0-5", "7", "8,10"], request)
    lines = text.splitlines()
    options = [line.removeprefix("#SBATCH ") for line in lines if line.startswith("#SBATCH ")]
    assert options == [
        "--open-mode=append",
        "--job-name=shardprep-0123456789ab-0",
        "--array=0-2%3",
        '--output="/data/it\'s 5%% of all/jobs/logs/%A_%a.log"',
        '--comment="two words"',
        "--mem=1M",
        "--nodes=1",
        "--ntasks=1",
        "--cpus-per-task=8",
        "--mem=1536M",
        "--time=9",
        "--partition=p",
    ]
    head, _, body = text.partition("set -euo pipefail\n")
    assert (ROOT / "slurm" / "prep_array.sh").read_text().endswith(body)
    for index, expected in enumerate(
        [
            "shards 0-5|run|/data/it's 5% of all|--shards|0-5",
            "shard 7|--shard_id|7|--planned|--output_dir|/data/it's 5% of all",
            "shards 8,10|run|/data/it's 5% of all|--shards|8,10",
        ]
    ):
        show = 'IFS="|"; echo "$shardprep_what|${shardprep_command[*]}"'
        environ = {"SLURM_ARRAY_TASK_ID": str(index), "PATH": os.environ["PATH"]}
        done = run_child(["bash", "-uc", f"{head}\n{show}"], env=environ)
        assert done.stdout.strip() == expected


@pytest.mark.parametrize(
    ("request_", "python", "exported"),
    [
        (JobRequest(), "", {"SHARDPREP_PYTHON": sys.executable}),
        (JobRequest(), "p", {"SHARDPREP_PYTHON": "p"}),
        (JobRequest(container="apptainer exec i"), "", {"SHARDPREP_EXEC": "'apptainer exec i'"}),
        (JobRequest(setup="/s.sh"), "", {"SHARDPREP_SETUP": "/s.sh"}),
    ],
)
def test_tasks_use_this_python_unless_a_setup_or_a_container_brings_another(
    monkeypatch: pytest.MonkeyPatch, request_: JobRequest, python: str, exported: dict[str, str]
) -> None:
    monkeypatch.setenv("SHARDPREP_PYTHON", python)
    script = array_script(Path("/d"), "shardprep-0", ["0"], request_)
    found = dict(re.findall(r"^export (SHARDPREP_\w+)=(.*)$", script, re.MULTILINE))
    assert {name: value for name, value in found.items() if value != "''"} == exported


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"mem_gb": 0}, "--mem_gb is 0, expected more than 0"),
        ({"max_parallel": -1}, "--max_parallel is -1"),
        ({"sbatch_args": "--array=0-3"}, "--sbatch_args has --array=0-3, which submit sets itself"),
        ({"sbatch_args": "-Mother"}, "for another cluster: SLURM_CLUSTERS=NAME before submit"),
        ({"sbatch_args": "-Jmine"}, "--sbatch_args has -Jmine, which submit sets itself"),
        ({"partition": "cpu\ntouch INJECTED"}, "cannot stand in a job script"),
        ({"cpus_per_task": "8"}, "--cpus_per_task is '8', expected a number, or: node"),
        ({"time_min": 10**40}, "expected more than 0 and at most"),
        ({"worker_args": "'"}, "cannot be split"),
    ],
)
def test_a_request_that_cannot_be_is_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words.replace("(", r"\(")):
        JobRequest(**fields)


def test_shards_are_shared_evenly_among_as_many_tasks_as_fit() -> None:
    assert tasks_of_shards([3, 5], 100, None) == ["3", "5"]
    forty = tasks_of_shards(range(40), 7, None)
    assert len(forty) == 7
    assert [shard_id for word in forty for shard_id in ids_of_ranges(word, end=40)] == list(range(40))
    assert {len(ids_of_ranges(word, end=40)) for word in forty} == {5, 6}
    assert tasks_of_shards(range(6), 100, 3) == ["0-2", "3-5"]
    assert tasks_of_shards([1, 3, 4], 1, None) == ["1,3-4"]


@pytest.mark.processes
def test_the_nodes_and_the_time_limit_are_of_the_named_or_the_default_partition(fake: FakeSlurm) -> None:
    fake.answers("sinfo", "a|idle|4000|4|2:00:00\na|mixed|8000|2|2:00:00\nb*|idle|16000+|64|infinite\n")
    found = [find_site(name) for name in ("a", None, "gone", "a,b")]
    assert [(each.max_mem_mb, each.max_cpus, each.max_time_min) for each in found] == [
        (8000, 4, 120),
        (16000, 64, None),
        (None, None, None),
        (16000, 64, None),
    ]


@pytest.mark.parametrize(
    ("text", "minutes"), [("1-00:00:00", 1440), ("00:01:00", 1), ("05:30", 6), ("UNLIMITED", None)]
)
def test_slurms_times_are_minutes(text: str, minutes: int | None) -> None:
    assert minutes_of(text) == minutes


def test_what_slurm_granted_is_read_off_the_job() -> None:
    job = parse_job(SHOWN + "NumCPUs=4 TimeLimit=00:01:00 MinMemoryNode=300M")
    assert job == {
        "name": "shardprep-0123",
        "user": "root",
        "submit_time": WHEN,
        "mem_mb": 300,
        "time_min": 1,
    }
    job = parse_job(SHOWN + "NumCPUs=4 TimeLimit=UNLIMITED MinMemoryCPU=1.50G")
    assert (job["mem_mb"], job["time_min"]) == (6144, None)
    job = parse_job(SHOWN + "NumCPUs=1 TimeLimit=1-00:00:00 MinMemoryNode=0")
    assert (job["mem_mb"], job["time_min"]) == (None, 1440)


def test_last_lines_leave_out_frame_progress_bars_and_what_srun_says_of_a_worker_that_spoke() -> None:
    frame = "shardprep: node n1: shard 3"
    worker = " 10%\r 20%\nerror: no\nsrun: error: n1: task 0: Exited"
    log = f"{frame} begins\n{worker}\n{frame} ended with exit code 65\n"
    assert last_lines(log) == [" 20%", "error: no"]
    assert last_lines("srun: error: Unable to create step\n") == ["srun: error: Unable to create step"]


def test_a_retry_asks_for_what_the_cause_says() -> None:
    base = JobRequest(partition="other")
    assert retry_request(_failed(OUT_OF_MEMORY), base, 8000).mem_gb == round(2000 / 1024, 3)
    assert retry_request(_failed(OUT_OF_MEMORY), base, 1500).mem_gb == round(1500 / 1024, 3), (
        "the largest node's"
    )
    assert retry_request(_failed(TIMEOUT), base, None).time_min == 20
    assert retry_request(_failed("CANCELLED"), base, None) == JobRequest(), "as the last try"
    assert (
        retry_request(_failed("CANCELLED", request={"exclude": "n1"}), base, None, ["n2"]).exclude == "n1,n2"
    )
    assert retry_request(Shard(shard_id=0, state="not submitted"), base, None) == base


def test_a_shard_is_left_after_failing_the_same_way_too_often() -> None:
    assert reason_to_leave(_failed("CANCELLED", TIMEOUT, TIMEOUT), 3, {}) is None
    assert reason_to_leave(_failed(TIMEOUT, TIMEOUT, TIMEOUT), 3, {}) == "failed the same way 3 times"
    assert reason_to_leave(_failed(BAD_INPUT), 3, {}) == "the same input fails in the same way"
    for cause in (BAD_INPUT, SETUP):
        thrice = _failed(cause, cause, cause)
        assert reason_to_leave(thrice, 3, {"worker_args": "--max_bad_fraction 1"}) is None, "another way"
        assert reason_to_leave(thrice, 3, {"worker_args": ""}), "the same"
    assert reason_to_leave(_failed(BAD_INPUT), 3, {"mem_gb": 4.0}) == "the same input fails in the same way"


def _submission(arrays: list[JobArray]) -> Submission:
    return Submission(
        number=0, plan_id="p", cluster="c", user="root", submitted=1.5, arrays=arrays, verify_job_id="9",
        verify_name="shardprep-0123-verify", verify_submit_time=WHEN, identity="1.2",
    )  # fmt: skip


def test_of_two_submissions_with_one_number_the_second_is_told_so_and_the_first_stays(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    first = _submission([_array(request={"mem_gb": 1.5})])
    publish(tmp_path, first)
    with pytest.raises(SubmittedMeanwhile, match="cancelled before it began"):
        publish(tmp_path, _submission([_array(job_id="8")]))
    assert read_submissions(tmp_path) == [first]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["0000.json"]


# ``python -m slurm`` that counts what it asks of the file system below a folder, and the commands it starts.
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
from slurm.__main__ import main
code = main(sys.argv[1:])
seen["numpy"] = "numpy" in sys.modules
seen["cpu_s"] = time.process_time()
with open(report, "w") as file:
    json.dump(seen, file)
sys.exit(code)
"""


@pytest.mark.processes
def test_a_status_reads_each_manifest_and_record_once_and_eight_logs_and_lists_the_folder_once(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    """1,990 manifests and 10 failures; 10,000 take about 0.5 s of CPU where nothing counts the calls."""
    num_shards, num_failed, data, commands = 2_000, 10, tmp_path / "O", tmp_path / "bin"
    prep.plan(sample_dir, data, num_shards=num_shards)
    prep.make(data, 0)
    manifest = json.loads(manifest_path(data, 0).read_text())
    for shard_id in range(1, num_shards - num_failed):
        for path in (tar_path, idx_path):
            path(data, shard_id).symlink_to(path(data, 0))
        manifest["shard_id"] = shard_id
        manifest_path(data, shard_id).write_text(json.dumps(manifest))
        seal(manifest_path(data, shard_id))
    (data / "jobs" / "logs").mkdir(parents=True)
    sent = _submission([_array(tasks=[str(i) for i in range(num_shards)])])
    publish(data, dataclasses.replace(sent, identity=folder_identity(data)))
    commands.mkdir()
    config = "printf 'ClusterName = c\\nMaxArraySize = 1001\\n'"
    bodies = {"squeue": "true", "scontrol": config}
    for name, body in bodies.items():
        (commands / name).write_text(f"#!/bin/sh\n{body}\n")
        (commands / name).chmod(0o755)
    for shard_id in range(num_shards - num_failed, num_shards):
        log = data / "jobs" / "logs" / f"7_{shard_id}.log"
        log.write_text("an error\n")
        write_record(data, f"7_{shard_id}", ended(74), log=str(log))
    done = run_child(
        [sys.executable, "-c", COUNTED, data, tmp_path / "seen.json", "status", data],
        env={**os.environ, "PATH": f"{commands}:{os.environ['PATH']}"},
    )
    assert "1990 of 2000 shards are done" in done.stdout
    assert "failed, read or write error (74): shards 1990-1999" in done.stdout
    seen = json.loads((tmp_path / "seen.json").read_text())
    started = {name: seen.get(f"start {name}", 0) for name in bodies}
    assert started == {"squeue": 1, "scontrol": 1}, "one question for the jobs of one user"
    assert not seen["numpy"], "its 0.1 s"
    assert seen["open .log"] == 8, "the newest failures'"
    few = 6  # plan.json, its tokenizer, a submission, index.json
    assert num_shards - num_failed <= seen["open .json"] <= num_shards - num_failed + few
    assert seen["open .r0"] == 2 * num_failed, "before Slurm is asked, and after"
    assert seen["list"] <= 4, "the folder, its jobs, and twice the attempts"
    assert seen["stat"] <= 2 * num_shards + few, "tar and idx of each"
    assert seen["cpu_s"] < 4, "on a busy machine, and counted"
