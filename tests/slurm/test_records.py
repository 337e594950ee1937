"""Records of attempts and of submissions: who writes them, what is read off them, and what is refused.

``prep_array.sh`` runs here without Slurm, by an srun that only starts what it is given; test_prep_array.py
and test_slurm_operations.py run it on a real cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.children import run_child
from tests.forged import content_sha256
from tests.slurm.fake_slurm import (
    FakeSlurm,
    array,
    command,
    ended,
    process_began,
    run_task,
    slurm,
    squeue_line,
    status,
    submitted,
    write_log,
    write_record,
    write_run_record,
)

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


def records(data: Path) -> list[str]:
    folder = data / "jobs" / "attempts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- the batch script's record


def test_an_attempt_that_makes_its_shard_leaves_no_record(fake: FakeSlurm, data_dir: Path) -> None:
    run_task(fake, data_dir, index=2)
    assert status(data_dir)["done"] == "2"
    assert records(data_dir) == []


def test_an_srun_that_ends_with_0_where_its_node_failed_leaves_the_record(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    srun = "#!/bin/sh\necho 'srun: error: Node failure on n1'\n"
    with (tmp_path / "log").open("wb") as file:
        run_task(fake, data_dir, index=0, srun=srun, stdout=file)
    assert records(data_dir) == ["7_0.r0"]
    assert status(data_dir)["causes"] == {"NODE_FAIL": "0"}


def test_a_set_up_file_that_exits_leaves_a_record_that_says_so(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    setup, log = tmp_path / "setup.sh", tmp_path / "a log.txt"
    setup.write_text("exit 3\n")
    with log.open("wb") as file:
        run_task(fake, data_dir, index=2, code=3, environ={"SHARDPREP_SETUP": str(setup)}, stdout=file)
    (failure,) = status(data_dir)["failures"]
    assert (failure["shard"], failure["node"], failure["log"]) == (2, "n1", str(log))
    assert failure["cause"] == "the set-up file ended the task"


@pytest.mark.parametrize("is_told", [True, False])
def test_retry_asks_for_what_a_plain_task_had_and_says_the_workers_words(
    fake: FakeSlurm, data_dir: Path, is_told: bool
) -> None:
    """An older Slurm does not tell a task its time limit."""
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    if is_told:
        environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)
    fake.answers_by("squeue", '[[ "$*" != *%l* ]] || echo 45:00')
    run_task(fake, data_dir, "--input_dir", "/no/such/folder", index=1, code=66, environ=environ)
    (failure,) = status(data_dir)["failures"]
    assert (failure["shard"], failure["cause"]) == (1, "no such input or shard (66)")
    assert "/no/such/folder" in failure["message"]
    script = slurm("retry", data_dir, "--shards", 1, "--dry_run")
    assert "shards_of=(1)" in script
    for option in ("partition=amx-part", "account=mine", "mem=3000M", "time=45", "cpus-per-task=1"):
        assert f"#SBATCH --{option}\n" in script, option


@pytest.mark.parametrize("name", ['it\'s "a" \\ folder', "데이터 $(touch INJECTED)", "line\nend"])
def test_a_record_can_be_read_whatever_the_folder_is_called(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: str
) -> None:
    folder = data_dir.rename(tmp_path / name)
    run_task(fake, folder, "--input_dir", "/no/such/folder", index=1, code=66)
    assert status(folder)["causes"] == {"no such input or shard (66)": "1"}


@pytest.mark.parametrize("link", ["jobs", "jobs/attempts", "jobs/attempts/7_2.r0"])
def test_a_task_keeps_no_record_through_a_link(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, link: str
) -> None:
    """Nor does its work stop: it is another user who put the link there."""
    other = tmp_path / "other"
    (other / "attempts").mkdir(parents=True)
    (other / "file").touch()
    (data_dir / link).parent.mkdir(parents=True, exist_ok=True)
    (data_dir / link).symlink_to(other / "file" if link.endswith("r0") else other)
    run_task(fake, data_dir, "--max_bad_fraction", "-1", index=2, code=2)
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "file"]
    assert not (other / "file").read_bytes()


def test_where_no_record_can_be_written_the_shard_is_made_all_the_same(
    fake: FakeSlurm, data_dir: Path
) -> None:
    (data_dir / "jobs").write_text("a file in the way")
    run_task(fake, data_dir, index=0)
    assert (data_dir / "shard-00000.tar").exists()


# --- run's record


def test_shards_that_a_run_could_not_make_have_their_cause_without_any_slurm(
    prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, data = Path(shutil.copytree(sample_dir, tmp_path / "raw")), tmp_path / "data"
    bad = sorted(raw.iterdir())[1]
    bad.write_bytes(bad.read_bytes() + b"\xff\n" * 20)
    prep.plan(raw, data)
    command("run", data, code=65)
    command("run", data, code=65)
    assert len(records(data)) == 2, "a record of each run that failed"
    monkeypatch.setenv("PATH", str(tmp_path))
    state = status(data)
    assert state["causes"] == {"bad input (65)": "1"}
    (line,) = [line for line in slurm("status", data).splitlines() if line.startswith("next: shardprep run ")]
    words = shlex.split(line.removeprefix("next: shardprep "))
    command(*words[:-1], "1")  # with another share
    command("verify", data)
    assert records(data) == []


@pytest.mark.parametrize(
    ("host", "is_same", "state"),
    [("here", True, "running"), ("here", False, "failed"), ("elsewhere", True, "not_visible")],
)
def test_a_run_without_an_end_runs_was_killed_or_cannot_be_seen_from_this_host(
    fake: FakeSlurm, data_dir: Path, host: str, is_same: bool, state: str
) -> None:
    """Where it is not the same, the process has gone, and another one has its number."""
    node = socket.gethostname() if host == "here" else "another.host"
    write_run_record(data_dir, "1-2", node, os.getpid(), process_began(os.getpid()) if is_same else 1)
    assert status(data_dir)[state] == "1-2"
    if state != "failed":
        slurm("submit", data_dir)
        assert "shards_of=(0 3 4)" in fake.sent()[0]


# --- several attempts


def test_the_newest_attempt_says_the_cause_where_an_older_one_has_no_record(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    submitted(data_dir, array("3"), verify="4", number=1, submitted=2.5)
    write_record(data_dir, "3_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    fake.answers("squeue", squeue_line("0", "NODE_FAIL"))
    assert status(data_dir)["causes"] == {"OUT_OF_MEMORY": "0"}


@pytest.mark.parametrize("has_moved", [False, True])
def test_of_a_task_that_was_started_again_each_start_has_the_cause_of_its_own_part_of_the_log(
    fake: FakeSlurm, data_dir: Path, has_moved: bool
) -> None:
    """A submission's log goes on; plain sbatch's is moved away when Slurm starts the task again."""
    submitted(data_dir)
    parts = [
        f"shardprep: node {node}: shard 0 begins\n*** JOB 7 ON {node} CANCELLED AT now DUE TO {why} ***\n"
        for node, why in (("n1", "NODE FAILURE"), ("n2", "TIME LIMIT"))
    ]
    if has_moved:
        write_log(data_dir, "1_0.before-restart-1.log", parts.pop(0))
    log = write_log(data_dir, "1_0.log", "".join(parts))
    for number in range(2):
        write_record(data_dir, "1_0", SLURM_RESTART_COUNT=number, time=1000 + number, log=str(log))
    state = status(data_dir)
    assert (state["causes"], state["restarts"]) == ({"TIMEOUT": "0"}, {"NODE_FAIL on n1": 1})


def test_logs_shows_the_attempts_at_a_shard_newest_last_with_the_ends_of_their_logs(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    frame, worker = (
        "shardprep: node n1: shard 2",
        " 10%\r 20%\nerror: of job {}\nsrun: error: n1: task 0: Exited",
    )
    for number, (job, code) in enumerate((("1", 74), ("3", 65), ("5", 75))):
        log = tmp_path / f"{job}.log"
        if job == "5":
            os.mkfifo(log)  # which holds nobody
        else:
            log.write_text(f"{frame} begins\n{worker.format(job)}\n{frame} ended with exit code {code}\n")
        write_record(data_dir, f"{job}_2", ended(code), time=1000 + number, log=str(log))
    said = [line.strip() for line in slurm("logs", data_dir, 2).splitlines() if line.startswith("  |")]
    assert said == ["|  20%", "| error: of job 1", "|  20%", "| error: of job 3"], "not the frame, nor srun"
    slurm("logs", data_dir, 9, code=66)


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_colleague_sees_what_is_done_of_a_set_submitted_with_umask_077(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    write_record(data_dir, "1_4", ended(65))
    (data_dir / "jobs").chmod(0o700)
    os.chown(data_dir / "jobs", 65534, 65534)
    colleague = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable]
    state = json.loads(run_child([*colleague, "-m", "slurm", "status", data_dir, "--json"]).stdout)
    assert (state["not_visible"], state["failed"]) == ("0-4", "")
    assert state["unreadable"]


# --- submissions on disk


CHANGES: dict[str, Any] = {
    "version": 99, "number": "0", "plan_id": None, "user": ["root"], "submitted": 1e300, "arrays": {},
    "verify.job_id": "7; rm", "verify.name": 1,
    "arrays.job_id": 1, "arrays.name": None, "arrays.mem_mb": 2**70, "arrays.time_min": -1,
    "arrays.request": [], "arrays.tasks": [1],
    "request.partition": "a\ntouch X", "request.cpus_per_task": "8", "request.mem_gb": True,
}  # fmt: skip


def refused(data: Path, code: int = 65) -> None:
    """Status and submit end in words that name the record."""
    for name in ("status", "submit"):
        assert "jobs/0000.json" in slurm(name, data, code=code)


@pytest.mark.parametrize("name", [*CHANGES, "arrays.tasks 0-99999999999", "arrays.tasks 0-99998 often"])
@pytest.mark.parametrize("is_missing", [False, True])
def test_a_submission_with_a_wrong_or_missing_field_is_named(
    fake: FakeSlurm, data_dir: Path, name: str, is_missing: bool
) -> None:
    path = submitted(data_dir)
    data = json.loads(path.read_text())
    place, _, tasks = name.partition(" ")
    outer, _, inner = place.rpartition(".")
    of_array = data["arrays"][0]
    values = {"": data, "arrays": of_array, "request": of_array["request"], "verify": data["verify"]}[outer]
    values[inner] = [tasks.split(" ")[0]] * (50 if "often" in tasks else 1) if tasks else CHANGES[name]
    if is_missing and outer == "request":
        return  # its default
    if is_missing:
        del values[inner]
    path.write_text(json.dumps({**data, "content_sha256": content_sha256(data)}))  # a hash that is right
    refused(data_dir)


def test_a_submission_that_was_altered_by_hand_or_is_none_is_refused(fake: FakeSlurm, data_dir: Path) -> None:
    path = submitted(data_dir)
    altered = path.read_bytes().replace(b'"job_id": "1"', b'"job_id": "3"')
    for content in (altered, b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": Infinity}'):
        path.write_bytes(content)
        refused(data_dir)


@pytest.mark.parametrize("what", ["folder", "fifo", "jobs is a file", "dangling link", "loop"])
def test_what_cannot_be_read_in_jobs_is_named_and_holds_nobody(
    data_dir: Path, fake: FakeSlurm, what: str
) -> None:
    jobs = data_dir / "jobs"
    if what == "jobs is a file":
        jobs.touch()
    else:
        jobs.mkdir()
        path = jobs / "0000.json"
        make: dict[str, Callable[[], None]] = {
            "folder": path.mkdir,
            "fifo": lambda: os.mkfifo(path),
            "dangling link": lambda: path.symlink_to("gone"),
            "loop": lambda: path.symlink_to(path),
        }
        make[what]()
    codes = {"folder": 65, "fifo": 65, "jobs is a file": 73}
    assert str(jobs) in slurm("submit", data_dir, code=codes.get(what, 74))
