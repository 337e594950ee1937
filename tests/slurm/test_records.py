"""Attempt records and submissions on disk: who writes them, what is read off them, and what is refused.

``prep_array.sh`` runs here without Slurm, by an srun that only starts what it is given; test_prep_array.py
and test_slurm_operations.py run it on a real cluster.
"""

from __future__ import annotations

import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardprep.errors import BrokenShard, ShardprepError
from shardprep.format.attempts import RunRecord, read_attempts
from shardprep.format.json_files import content_sha256
from shardprep.format.names import tar_path
from shardprep.format.plan import need_plan
from shardprep.format.submissions import SubmittedMeanwhile, publish_submission, read_submissions
from slurm.causes import log_tail
from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import (
    FakeSlurm,
    ended,
    slurm,
    squeue_line,
    status,
    submission,
    submitted,
    write_record,
)

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

SRUN = '#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nexec "$@"\n'


def task(
    fake: FakeSlurm,
    data: Path,
    index: int,
    *args: str,
    code: int = 0,
    srun: str = SRUN,
    stdout: Any = subprocess.PIPE,
    **environ: str,
) -> None:
    """Task ``index`` of ``sbatch --array slurm/prep_array.sh DATA``, started by hand."""
    (fake.place / "bin" / "srun").write_text(srun)
    (fake.place / "bin" / "srun").chmod(0o755)
    slurm = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    slurm |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_USER": "root", "SLURM_CPUS_PER_TASK": "1"}
    settings = {**os.environ, **slurm, "SHARDPREP_PYTHON": sys.executable, **environ}
    command = [str(ROOT / "slurm" / "prep_array.sh"), str(data), *args]
    run_child(command, cwd=ROOT, env=settings, code=code, stdout=stdout)


def records(data: Path) -> list[str]:
    folder = data / "jobs" / "attempts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- the batch script's record


def test_an_attempt_that_makes_its_shard_leaves_no_record(fake: FakeSlurm, data_dir: Path) -> None:
    task(fake, data_dir, 2)
    assert status(data_dir)["done"] == "2"
    assert records(data_dir) == []


def test_an_srun_that_ends_with_0_where_its_node_failed_leaves_the_record(
    fake: FakeSlurm, data_dir: Path
) -> None:
    task(fake, data_dir, 0, srun="#!/bin/sh\necho 'srun: error: Node failure on n1' >&2\n")
    assert records(data_dir) == ["7_0.r0"]
    assert status(data_dir)["causes"] == {"finished without a manifest": "0"}


def test_a_set_up_file_that_exits_leaves_a_record_that_says_so(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("exit 3\n")
    task(fake, data_dir, 2, code=3, SHARDPREP_SETUP=str(setup))
    (attempt,) = read_attempts(data_dir, need_plan(data_dir).plan_id).own
    assert (attempt.shards, attempt.node, attempt.exit_code, attempt.stage) == ([2], "n1", 3, "set-up")
    assert attempt.log == "", "its output is a pipe"
    assert status(data_dir)["causes"] == {"the set-up file ended the task": "2"}


def test_the_record_names_the_file_that_the_task_logs_to(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    log = tmp_path / "a log.txt"
    with log.open("wb") as file:
        task(fake, data_dir, 2, "--input_dir", "/no/such/folder", code=66, stdout=file)
    assert status(data_dir)["failures"][0]["log"] == str(log)


@pytest.mark.parametrize("is_told", [True, False])
def test_a_worker_that_fails_says_why_and_retry_asks_for_what_its_task_had(
    fake: FakeSlurm, data_dir: Path, is_told: bool
) -> None:
    """An older Slurm does not tell a task its time limit."""
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    if is_told:
        environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)
    fake.answers_by("squeue", '[[ "$*" != *%l* ]] || echo 45:00')
    task(fake, data_dir, 1, "--input_dir", "/no/such/folder", code=66, **environ)
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
    folder = tmp_path / name
    data_dir.rename(folder)
    task(fake, folder, 1, "--input_dir", "/no/such/folder", code=66)
    (attempt,) = read_attempts(folder, need_plan(folder).plan_id).own
    assert (attempt.shards, attempt.exit_code) == ([1], 66)


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
    task(fake, data_dir, 2, "--max_bad_fraction", "-1", code=2)
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "file"]
    assert not (other / "file").read_bytes()


def test_where_no_record_can_be_written_the_shard_is_made_all_the_same(
    fake: FakeSlurm, data_dir: Path
) -> None:
    (data_dir / "jobs").write_text("a file in the way")
    task(fake, data_dir, 0)
    assert tar_path(data_dir, 0).exists()


# --- run's record


def test_shards_that_a_run_could_not_make_have_their_cause_without_any_slurm(
    prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = Path(shutil.copytree(sample_dir, tmp_path / "raw"))
    bad = sorted(raw.iterdir())[1]
    bad.write_bytes(bad.read_bytes() + b"\xff\n" * 20)
    prep.plan(raw, tmp_path / "data")
    assert prep.command("run", tmp_path / "data").code == 65
    monkeypatch.setenv("PATH", str(tmp_path))
    text = run_child([sys.executable, "-m", "slurm", "status", tmp_path / "data"], cwd=ROOT).stdout
    assert "failed, bad input (65): shard 1" in text
    (command,) = [line for line in text.splitlines() if line.startswith("next: shardprep run ")]
    words = shlex.split(command.removeprefix("next: shardprep "))
    assert prep.command(*words[:-1], "1").code == 0, "with another share"
    assert len(records(tmp_path / "data")) == 1, "of the run that failed"
    assert prep.command("verify", tmp_path / "data").code == 0
    assert records(tmp_path / "data") == []


def test_runs_of_one_process_within_a_second_keep_records_of_their_own(data_dir: Path) -> None:
    plan_id = need_plan(data_dir).plan_id
    for number in range(3):  # a second may end between two
        time.sleep(0.005)
        with RunRecord(data_dir, plan_id, [0], num_cpus=1) as failing:
            failing.exit_code = 65
        time.sleep(0.005)
        with RunRecord(data_dir, plan_id, [1], num_cpus=1):
            pass
        assert len(records(data_dir)) == number + 1


@pytest.mark.parametrize(
    ("host", "pid_began", "state"),
    [("here", 0, "running"), ("here", 1, "failed"), ("elsewhere", 0, "not_visible")],
)
def test_a_run_without_an_end_runs_was_killed_or_cannot_be_seen_from_this_host(
    fake: FakeSlurm, data_dir: Path, host: str, pid_began: int, state: str
) -> None:
    """``pid_began`` 1: the process has gone, and another one has its number."""
    node = socket.gethostname() if host == "here" else "another.host"
    ticks = pid_began or int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    facts = {"by": "run", "SLURM_ARRAY_JOB_ID": "", "shards": "1-2", "SLURMD_NODENAME": node}
    path = write_record(data_dir, "1_1", **facts, pid=os.getpid(), pid_began=ticks)
    path.rename(path.with_name(f"{node}-{os.getpid()}.1000"))
    assert status(data_dir)[state] == "1-2"
    if state != "failed":
        slurm("submit", data_dir)
        assert "shards_of=(0 3 4)" in fake.sent()[0]


# --- several attempts


def test_the_newest_attempt_says_the_cause_where_an_older_one_has_no_record(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    again = [replace(submission().arrays[0], job_id="3")]
    submitted(data_dir, number=1, arrays=again, submitted=2.5, verify_job_id="4")
    write_record(data_dir, "3_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    fake.answers("squeue", squeue_line("0", "NODE_FAIL"))
    assert status(data_dir)["causes"] == {"OUT_OF_MEMORY": "0"}


@pytest.mark.parametrize("has_moved", [False, True])
def test_of_a_task_that_was_started_again_each_start_has_the_cause_of_its_own_part_of_the_log(
    fake: FakeSlurm, data_dir: Path, has_moved: bool
) -> None:
    """A submission's log goes on; plain sbatch's is moved away when Slurm starts the task again."""
    submitted(data_dir)
    log = data_dir / "jobs" / "logs" / "1_0.log"
    log.parent.mkdir(parents=True)
    parts = [
        f"shardprep: node {node}: shard 0 begins\n*** JOB 7 ON {node} CANCELLED AT now DUE TO {why} ***\n"
        for node, why in (("n1", "NODE FAILURE"), ("n2", "TIME LIMIT"))
    ]
    if has_moved:
        log.with_name("1_0.before-restart-1.log").write_text(parts.pop(0))
    log.write_text("".join(parts))
    for number in range(2):
        write_record(data_dir, "1_0", SLURM_RESTART_COUNT=number, time=1000 + number, log=str(log))
    assert status(data_dir)["causes"] == {"TIMEOUT": "0"}
    assert status(data_dir)["restarts"] == {"NODE_FAIL on n1": 1}


def test_logs_shows_the_attempts_at_a_shard_newest_last_with_the_ends_of_their_logs(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    for number, (job, code) in enumerate((("1", 74), ("3", 65))):
        log = tmp_path / f"{job}.log"
        log.write_text(f"error: of job {job}\n")
        write_record(data_dir, f"{job}_2", ended(code), time=1000 + number, log=str(log))
    said = [line.strip() for line in slurm("logs", data_dir, 2).splitlines() if "error: of job" in line]
    assert said == ["| error: of job 1", "| error: of job 3"]
    slurm("logs", data_dir, 9, code=66)
    os.mkfifo(data_dir / "1_0.log")
    assert log_tail(data_dir / "1_0.log") == "", "a FIFO holds nobody"


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_colleague_sees_what_is_done_of_a_set_submitted_with_umask_077(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    write_record(data_dir, "1_4", ended(65))
    jobs = data_dir / "jobs"
    jobs.chmod(0o700)
    os.chown(jobs, 65534, 65534)
    colleague = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable]
    said = run_child([*colleague, "-m", "slurm", "status", data_dir]).stdout
    assert "not visible" in said
    assert f"chmod -R a+rX {shlex.quote(str(data_dir))}" in said
    assert "failed" not in said


# --- submissions on disk


CHANGES: dict[str, Any] = {
    "version": 99, "number": "0", "plan_id": None, "user": ["root"], "submitted": 1e300, "arrays": {},
    "verify.job_id": "7; rm", "verify.name": 1,
    "arrays.job_id": 1, "arrays.name": None, "arrays.mem_mb": 2**70, "arrays.time_min": -1,
    "arrays.request": [], "arrays.tasks": [1],
    "request.partition": "a\ntouch X", "request.cpus_per_task": "8", "request.mem_gb": True,
}  # fmt: skip


def refused(data: Path) -> str:
    with pytest.raises(BrokenShard) as found:
        read_submissions(data)
    assert "jobs/0000.json" in str(found.value)
    return str(found.value)


@pytest.mark.parametrize("name", [*CHANGES, "arrays.tasks 0-99999999999", "arrays.tasks 0-99998 often"])
@pytest.mark.parametrize("change", ["another value", "missing"])
def test_a_submission_with_a_wrong_or_missing_field_is_named(data_dir: Path, name: str, change: str) -> None:
    submitted(data_dir)
    path = data_dir / "jobs" / "0000.json"
    data = json.loads(path.read_text())
    name, _, tasks = name.partition(" ")
    outer, _, inner = name.rpartition(".")
    array = data["arrays"][0]
    place = {"": data, "arrays": array, "request": array["request"], "verify": data["verify"]}[outer]
    place[inner] = [tasks.split(" ")[0]] * (50 if "often" in tasks else 1) if tasks else CHANGES[name]
    if change == "missing":
        if outer == "request":
            return  # its default
        del place[inner]
    path.write_text(json.dumps({**data, "content_sha256": content_sha256(data)}))  # a hash that is right
    assert inner in refused(data_dir) or tasks


def test_a_submission_that_was_altered_by_hand_or_is_none_is_refused(data_dir: Path) -> None:
    submitted(data_dir)
    path = data_dir / "jobs" / "0000.json"
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
    with pytest.raises(ShardprepError, match="jobs"):
        read_submissions(data_dir)
    assert "jobs" in slurm("status", data_dir, code=65 if what in {"folder", "fifo"} else 74)


def test_of_two_submissions_with_one_number_the_second_is_told_so_and_the_first_stays(tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    first = submission()
    publish_submission(tmp_path, first)
    with pytest.raises(SubmittedMeanwhile):
        publish_submission(tmp_path, submission(user="kim"))
    assert read_submissions(tmp_path) == [first]
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["0000.json"]
