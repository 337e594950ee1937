"""Records of attempts and of submissions: who writes them, what is read off them, and what is refused.

``prep_array.sh`` runs here without Slurm, by an srun that only starts what it is given; test_prep_array.py
and test_slurm_operations.py run it on a real cluster.
"""

from __future__ import annotations

import os
import shlex
import shutil
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.forged import rewrite_json
from tests.slurm.fake_slurm import Desk, FakeSlurm, array, ended, squeue_line

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes


def records(desk: Desk) -> list[str]:
    folder = desk.data / "jobs" / "attempts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


# --- the batch script's record


def test_an_srun_that_ends_with_0_where_its_node_failed_leaves_the_record(desk: Desk, tmp_path: Path) -> None:
    srun = "#!/bin/sh\necho 'srun: error: Node failure on n1'\n"
    with (tmp_path / "a log").open("wb") as file:
        desk.task(srun=srun, stdout=file)
    assert records(desk) == ["7_0.r0"]
    (failure,) = desk.status()["failures"]
    assert (failure["cause"], failure["node"]) == ("NODE_FAIL", "n1")
    assert failure["log"] == str(tmp_path / "a log")


def test_retry_asks_for_what_a_plain_task_had_and_says_the_workers_words(desk: Desk) -> None:
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)  # an older Slurm does not tell it
    desk.task("--input_dir", "/no/such/folder", index=1, code=66, environ=environ)
    (failure,) = desk.status()["failures"]
    assert (failure["shard"], failure["cause"]) == (1, "no such input or shard (66)")
    assert "/no/such/folder" in failure["message"]
    script = desk.slurm("retry", "--shards", 1, "--dry_run")
    assert "shards_of=(1)" in script
    for option in ("partition=amx-part", "account=mine", "mem=3000M", "time=45", "cpus-per-task=1"):
        assert f"#SBATCH --{option}\n" in script, option


def test_a_record_can_be_read_whatever_the_folder_is_called(desk: Desk, tmp_path: Path) -> None:
    desk.data = desk.data.rename(tmp_path / 'it\'s "a" \\ 데이터 $(touch INJECTED)\nfolder')
    desk.task("--input_dir", "/no/such/folder", index=1, code=66)
    assert desk.status()["causes"] == {"no such input or shard (66)": "1"}


@pytest.mark.parametrize("link", ["jobs", "jobs/attempts", "jobs/attempts/7_2.r0"])
def test_a_task_keeps_no_record_through_a_link(desk: Desk, tmp_path: Path, link: str) -> None:
    """Nor does its work stop: it is another user who put the link there."""
    other = tmp_path / "other"
    (other / "attempts").mkdir(parents=True)
    (other / "file").touch()
    (desk.data / link).parent.mkdir(parents=True, exist_ok=True)
    (desk.data / link).symlink_to(other / "file" if link.endswith("r0") else other)
    desk.task("--max_bad_fraction", "-1", index=2, code=2)
    assert sorted(path.name for path in other.rglob("*")) == ["attempts", "file"]
    assert not (other / "file").read_bytes()


def test_where_no_record_can_be_written_the_shard_is_made_all_the_same(desk: Desk) -> None:
    (desk.data / "jobs").write_text("a file in the way")
    desk.task()
    assert (desk.data / "shard-00000.tar").exists()


# --- run's record


def test_shards_that_a_run_could_not_make_have_their_cause_without_any_slurm(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw, desk = tmp_path / "raw", Desk(data=tmp_path / "data", fake=fake)
    raw.mkdir()
    for name in ("a", "b"):
        (raw / f"{name}.txt").write_bytes(b"a line\n" * 50 + b"\xff\n" * (20 if name == "b" else 0))
    prep.plan(raw, desk.data)
    for _ in range(2):
        desk.command("run", "--num_proc", 1, code=65)
    assert len(records(desk)) == 2, "a record of each run that failed"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert desk.status()["causes"] == {"bad input (65)": "1"}
    name, _, *words = shlex.split(desk.next().removeprefix("next: shardprep "))
    desk.command(name, *words[:-1], "1", "--num_proc", 1)  # with another share
    desk.command("verify")
    assert records(desk) == []


@pytest.mark.parametrize(
    ("host", "is_same", "state"),
    [("here", True, "running"), ("here", False, "failed"), ("elsewhere", True, "not_visible")],
)
def test_a_run_without_an_end_runs_was_killed_or_cannot_be_seen_from_this_host(
    desk: Desk, host: str, is_same: bool, state: str
) -> None:
    """Where it is not the same, the process has gone, and another one has its number."""
    node = socket.gethostname() if host == "here" else "another.host"
    desk.run_record("1-2", node, os.getpid(), is_this_process=is_same)
    assert desk.status()[state] == "1-2"
    desk.slurm("submit")
    assert desk.sent_shards() == ["0 1 2 3 4" if state == "failed" else "0 3 4"]


# --- several attempts


def test_the_newest_attempt_says_the_cause_where_an_older_one_has_no_record(desk: Desk) -> None:
    desk.submitted()
    desk.submitted(array("3"), verify="4", number=1, submitted=2.5)
    desk.record("3_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    desk.queue(squeue_line("0", "NODE_FAIL"))
    assert desk.status()["causes"] == {"OUT_OF_MEMORY": "0"}


@pytest.mark.parametrize("has_moved", [False, True])
def test_of_a_task_that_was_started_again_each_start_has_the_cause_of_its_own_part_of_the_log(
    desk: Desk, has_moved: bool
) -> None:
    """A submission's log goes on; plain sbatch's is moved away when Slurm starts the task again."""
    desk.submitted()
    parts = [
        f"shardprep: node {node}: shard 0 begins\n*** JOB 7 ON {node} CANCELLED AT now DUE TO {why} ***\n"
        for node, why in (("n1", "NODE FAILURE"), ("n2", "TIME LIMIT"))
    ]
    if has_moved:
        desk.log("1_0.before-restart-1.log", parts.pop(0))
    log = desk.log("1_0.log", "".join(parts))
    for number in range(2):
        desk.record("1_0", SLURM_RESTART_COUNT=number, time=1000 + number, log=str(log))
    state = desk.status()
    assert (state["causes"], state["restarts"]) == ({"TIMEOUT": "0"}, {"NODE_FAIL on n1": 1})


def test_logs_shows_the_attempts_at_a_shard_newest_last_with_the_ends_of_their_logs(
    desk: Desk, tmp_path: Path
) -> None:
    frame = "shardprep: node n1: shard 2"
    worker = " 10%\r 20%\nerror: of job {}\nsrun: error: n1: task 0: Exited"
    for number, (job, code) in enumerate((("1", 74), ("3", 65), ("5", 75))):
        log = tmp_path / f"{job}.log"
        if job == "5":
            os.mkfifo(log)  # which holds nobody
        else:
            log.write_text(f"{frame} begins\n{worker.format(job)}\n{frame} ended with exit code {code}\n")
        desk.record(f"{job}_2", ended(code), time=1000 + number, log=str(log))
    said = [line.strip() for line in desk.slurm("logs", 2).splitlines() if line.startswith("  |")]
    assert said == ["|  20%", "| error: of job 1", "|  20%", "| error: of job 3"], "not the frame, nor srun"


# --- submissions on disk; tests/faults puts wrong values at all places of a record, by status


FORGED: dict[str, Any] = {
    "version": 99, "user": ["root"], "verify.job_id": "7; rm", "arrays.0.job_id": 1, "arrays.0.mem_mb": 2**70,
    "arrays.0.request.partition": "a\ntouch X", "arrays.0.request.cpus_per_task": "8",
    "arrays.0.tasks": ["0-99999999999"],
}  # fmt: skip


CONTENTS = (b"", b"[]", b"\xff\xfe", b"[" * 100_000, b'{"format": Infinity}')


@pytest.mark.parametrize("name", [*FORGED, "fifty tasks of all shards", "altered by hand", "no record"])
def test_a_submission_with_a_wrong_field_is_named_though_its_hash_is_right(desk: Desk, name: str) -> None:
    path = desk.submitted()
    if name in FORGED:
        rewrite_json(path, **{name: FORGED[name]})
    elif name == "fifty tasks of all shards":
        rewrite_json(path, **{"arrays.0.tasks": ["0-99998"] * 50})
    altered = path.read_bytes().replace(b'"job_id": "1"', b'"job_id": "3"')
    of_name = {"altered by hand": [altered], "no record": CONTENTS}
    for content in of_name.get(name, [path.read_bytes()]):
        path.write_bytes(content)
        for command in ("status", "submit"):
            assert "jobs/0000.json" in desk.slurm(command, code=65)


# What stands in the place of a file or a folder -> what it is, and the exit code of submit.
INSTEAD: dict[str, tuple[str, Callable[[Path], object], int]] = {
    "a folder": ("data/jobs/0000.json", Path.mkdir, 65),
    "a FIFO": ("data/jobs/0000.json", os.mkfifo, 65),
    "a dangling link": ("data/jobs/0000.json", lambda path: path.symlink_to("gone"), 74),
    "a file for jobs/": ("data/jobs", Path.touch, 73),
    "a data set that links to itself": ("data", lambda path: path.symlink_to(path), 74),
}


@pytest.mark.parametrize("what", INSTEAD)
def test_what_cannot_be_read_is_named_and_holds_nobody(desk: Desk, what: str) -> None:
    name, make, code = INSTEAD[what]
    path = desk.data.parent / name
    if path == desk.data:
        shutil.rmtree(path)
    path.parent.mkdir(exist_ok=True)
    make(path)
    assert str(path) in desk.slurm("submit", code=code)
