"""Attempt records: who writes them, what status and the others read off them, and whose they are.

``prep_array.sh`` runs here without Slurm, by an srun that only starts what it is given; test_prep_array.py
and test_slurm_operations.py run it on a real cluster.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import socket
import sys
import time
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.attempts import RunRecord, folder_identity, read_attempts
from shardprep.format.names import tar_path
from shardprep.format.plan import need_plan
from slurm.request import JobRequest
from slurm.script import names_begin
from slurm.state import find_state
from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import (
    NAME,
    WHEN,
    FakeSlurm,
    ended,
    make_done,
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

LATER = "2026-11-22T09:00:00"
SRUN = '#!/bin/bash\nwhile [[ $1 = --* ]]; do shift; done\nexec "$@"\n'


def task(
    fake: FakeSlurm, data: Path, index: int, *args: str, code: int = 0, srun: str = SRUN, **environ: str
) -> str:
    """Task ``index`` of ``sbatch --array slurm/prep_array.sh DATA``, started by hand; its output."""
    command = fake.place / "bin" / "srun"
    command.write_text(srun)
    command.chmod(0o755)
    slurm = {"SLURM_JOB_ID": "8", "SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": str(index)}
    slurm |= {"SLURMD_NODENAME": "n1", "SLURM_JOB_USER": "root", "SLURM_CPUS_PER_TASK": "1"}
    settings = {**os.environ, **slurm, "SHARDPREP_PYTHON": sys.executable, **environ}
    done = run_child([ROOT / "slurm" / "prep_array.sh", data, *args], cwd=ROOT, env=settings, code=code)
    return done.stdout + done.stderr


def records(data: Path) -> list[str]:
    folder = data / "jobs" / "attempts"
    return sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []


def plain_line(indices: str, state: str, words: str = "") -> str:
    fields = f"7|{indices}|{state}|Priority|0:0|n1|0:02|7|root|{WHEN}|N/A|N/A|0|shardprep"
    return f"{fields}|/home|/home/kim/prep_array.sh{words}|\n"


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


def test_the_newest_attempt_says_the_cause_where_an_older_one_has_no_record(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    again = [dataclasses.replace(submission().arrays[0], job_id="3")]
    submitted(data_dir, number=1, arrays=again, submitted=2.5, verify_job_id="4")
    write_record(data_dir, "3_0", ended(75, stopped_by="OUT_OF_MEMORY"))
    fake.answers("squeue", squeue_line("0", "NODE_FAIL"))
    assert status(data_dir)["causes"] == {"OUT_OF_MEMORY": "0"}


def test_a_set_up_file_that_exits_leaves_a_record_that_says_so(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    setup = tmp_path / "setup.sh"
    setup.write_text("exit 3\n")
    task(fake, data_dir, 2, code=3, SHARDPREP_SETUP=str(setup))
    assert records(data_dir) == ["7_2.r0"]
    (attempt,) = read_attempts(data_dir, need_plan(data_dir).plan_id).own
    assert (attempt.shards, attempt.node, attempt.exit_code, attempt.stage) == ([2], "n1", 3, "set-up")
    state = status(data_dir)
    assert state["causes"] == {"the set-up file ended the task": "2"}
    assert "must not exit" in state["remedies"]["the set-up file ended the task"]


def test_a_worker_that_fails_says_why_in_the_record_and_retry_sends_it_again(
    fake: FakeSlurm, data_dir: Path
) -> None:
    task(fake, data_dir, 1, "--input_dir", "/no/such/folder", code=66)
    state = status(data_dir)
    assert state["failed"] == "1"
    assert "/no/such/folder" in state["failures"][0]["message"]
    slurm("retry", data_dir, "--shards", "1")
    assert "shards_of=(1)" in fake.sent()[0]
    slurm("retry", data_dir, "--shards", "7", code=2)


@pytest.mark.parametrize("name", ['it\'s "a" \\ folder', "데이터 $(touch INJECTED)", "line\nend"])
def test_a_record_can_be_read_whatever_the_folder_is_called(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: str
) -> None:
    folder = tmp_path / name
    data_dir.rename(folder)
    task(fake, folder, 1, "--input_dir", "/no/such/folder", code=66)
    (attempt,) = read_attempts(folder, need_plan(folder).plan_id).own
    assert (attempt.shards, attempt.exit_code) == ([1], 66)


def test_where_no_record_can_be_written_the_shard_is_made_all_the_same(
    fake: FakeSlurm, data_dir: Path
) -> None:
    (data_dir / "jobs").write_text("a file in the way")
    task(fake, data_dir, 0)
    assert tar_path(data_dir, 0).exists()


def test_a_copy_leaves_the_jobs_of_its_original_alone_and_says_how_to_end_them(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    submitted(data_dir, identity=folder_identity(data_dir))
    write_record(data_dir, "1_0")
    copy = Path(shutil.copytree(data_dir, tmp_path / "copy"))
    fake.answers("squeue", f"1|0-4|RUNNING|None|0:0|n1|0:02|1|root|{WHEN}|N/A|N/A|0|x|\n")
    assert status(data_dir)["running"] == "0-4"
    state = status(copy)
    assert (state["running"], state["not_submitted"]) == ("", "0-4")
    assert "are left alone: 1 (to end them: scancel 1)" in slurm("status", copy)
    assert "scancel 1\n" in slurm("cancel", copy)
    assert not fake.calls("scancel")
    moved = data_dir.rename(tmp_path / "moved")
    assert status(moved)["running"] == "0-4", "a move keeps what a folder is"


def test_plain_sbatch_that_waits_is_seen_by_what_was_typed_and_not_sent_again(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    other = Path(shutil.copytree(data_dir, tmp_path / "other"))
    fake.answers("squeue", plain_line("0-2", "PENDING", f" {data_dir} --input_dir /raw"))
    assert status(data_dir)["pending"] == "0-2"
    assert status(other)["pending"] == ""
    slurm("submit", data_dir)
    assert "shards_of=(3 4)" in fake.sent()[0]
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["7"]


@pytest.mark.parametrize("known_by", ["a task that began", "nothing"])
def test_a_plain_array_is_seen_where_squeue_shows_the_script_without_its_arguments(
    fake: FakeSlurm, data_dir: Path, known_by: str
) -> None:
    fake.answers("config", "ClusterName = test\nMaxArraySize = 1001\nSLURM_VERSION = 24.11.5\n")
    fake.answers("squeue", plain_line("0", "RUNNING") + plain_line("[1-2%1]", "PENDING"))
    if known_by == "a task that began":
        began = datetime.strptime(f"{WHEN}+0000", "%Y-%m-%dT%H:%M:%S%z").timestamp() + 1
        write_record(data_dir, "7_0", by="sbatch", time=began)
    state = status(data_dir)
    assert state["pending"] == ("" if known_by == "nothing" else "1-2")
    assert state["running"] == ("" if known_by == "nothing" else "0")


def test_an_old_record_of_the_same_job_id_claims_no_array(fake: FakeSlurm, data_dir: Path) -> None:
    """A controller that lost its state gives ids again."""
    fake.answers("config", "ClusterName = test\nMaxArraySize = 1001\nSLURM_VERSION = 24.11.5\n")
    fake.answers("squeue", plain_line("1-2", "PENDING"))
    write_record(data_dir, "7_0", ended(1), by="sbatch", time=1000)
    assert status(data_dir)["pending"] == ""


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


def test_a_verify_that_fails_by_hand_is_known_to_all_until_the_shard_is_made_anew(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    prep.plan(sample_dir, data, num_shards=2)
    assert prep.command("run", data).code == 0
    assert prep.command("verify", data).code == 0
    tar = bytearray(tar_path(data, 1).read_bytes())
    tar[600] ^= 1  # of the same size
    tar_path(data, 1).write_bytes(tar)
    assert prep.command("verify", data).code == 65
    assert not (data / "index.json").exists()
    found = json.loads(run_child([sys.executable, "-m", "slurm", "status", data, "--json"], cwd=ROOT).stdout)
    assert (found["done"], found["wrong"], found["verified"]) == ("0", "1", False)
    assert prep.command("run", data).code == 0
    assert prep.command("verify", data).code == 0
    assert not (data / "findings.json").exists()
    found = json.loads(run_child([sys.executable, "-m", "slurm", "status", data, "--json"], cwd=ROOT).stdout)
    assert found["verified"]


def test_logs_shows_the_attempts_at_a_shard_newest_last_with_the_ends_of_their_logs(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    for number, (job, code) in enumerate((("1", 74), ("3", 65))):
        log = tmp_path / f"{job}.log"
        log.write_text(f"error: of job {job}\n")
        write_record(data_dir, f"{job}_2", ended(code), time=1000 + number, log=str(log))
    lines = slurm("logs", data_dir, 2).splitlines()
    assert lines[0] == "shard 00002: failed, 2 attempts"
    said = [line.strip() for line in lines if "error: of job" in line]
    assert said == ["| error: of job 1", "| error: of job 3"]
    assert "there is no shard 9" in slurm("logs", data_dir, 9, code=66)


def test_cancel_of_some_shards_ends_their_tasks_alone_and_no_part_of_a_task(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, identity=folder_identity(data_dir))
    fake.answers("squeue", f"1|0-4|PENDING|Priority|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|x|\n")
    assert "cancelled: 1_1, 1_3" in slurm("cancel", data_dir, "--shards", "1,3")
    assert fake.calls("scancel") == ["1_1 1_3"]
    events = [json.loads(line)["event"] for line in (data_dir / "jobs" / "history.jsonl").open()]
    assert events == ["cancel"]


def test_next_is_never_a_retry_that_would_be_refused(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, 0, 1, 2, 3)
    for number in range(3):
        write_record(data_dir, f"{number + 1}_4", ended(74), time=1000 + number)
    text = slurm("status", data_dir)
    assert f"shardprep retry {data_dir} --max_attempts 6" in text
    slurm("retry", data_dir, code=74)
    slurm("retry", data_dir, "--max_attempts", 6)
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
        arrays = [dataclasses.replace(array, job_id=str(100 + number), request=JobRequest(worker_args=args))]
        submitted(data_dir, number=number, arrays=arrays, verify_job_id=str(200 + number))
        write_record(data_dir, f"{100 + number}_4", ended(65), time=1000 + number)
        (line,) = [each for each in slurm("status", data_dir).splitlines() if each.startswith("next: ")]
        if fraction == "1":
            assert line == "next: correct the input and plan into a new folder"
        else:
            words = shlex.split(line.removeprefix("next: shardprep "))
            slurm(*words, "--dry_run")
            assert words[-1].startswith(f"{given} --max_bad_fraction ")


def test_who_may_not_write_is_shown_no_command_that_writes(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "access", lambda *_, **__: False)  # root may write everywhere
    last = slurm("status", data_dir).splitlines()[-1]
    assert last == f"next: its owner goes on, as you may not write into {data_dir}"


def test_of_the_folder_that_a_copy_was_made_from_only_jobs_that_go_on_are_named(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, identity=folder_identity(data_dir) + "0")
    fake.answers(
        "squeue", squeue_line("0-4", "CANCELLED") + squeue_line("N/A", "RUNNING", job="2", submit=LATER)
    )
    assert status(data_dir)["foreign_jobs"] == []
    assert "copied from" not in slurm("status", data_dir) + slurm("cancel", data_dir)
    fake.answers("squeue", squeue_line("0-4", "RUNNING"))
    assert status(data_dir)["foreign_jobs"] == ["1"]
    assert "scancel 1\n" in slurm("cancel", data_dir)
    assert not fake.calls("scancel")


def events(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (data / "jobs" / "history.jsonl").read_text().splitlines()]


def test_until_done_leaves_a_controller_behind_the_jobs_that_does_the_same_behind_what_it_sends(
    fake: FakeSlurm, data_dir: Path
) -> None:
    slurm("submit", data_dir, "--until_done", "--max_rounds", 2)
    controller = fake.sent()[2]
    assert f"retry {data_dir} --until_done --max_rounds 2 --round 1" in controller
    assert "--job-name=" + names_begin(data_dir, need_plan(data_dir).plan_id) + "0-control" in controller
    assert "--dependency=afterany:1:2" in fake.calls("sbatch")[-1]
    make_done(data_dir, 0, 1, 2, 3)
    write_record(data_dir, "1_4", ended(75, stopped_by="OUT_OF_MEMORY"))
    slurm("retry", data_dir, "--until_done", "--max_rounds", 2, "--round", 1)
    assert "shards_of=(4)" in fake.sent()[3]
    assert "#SBATCH --mem=200M" in fake.sent()[3], "twice the 100 MB that it had"
    assert "--round 2" in fake.sent()[5]
    assert events(data_dir)[-1]["causes"] == {"OUT_OF_MEMORY": {"shards": "4", "nodes": {"n1": 1}}}
    said = slurm("retry", data_dir, "--until_done", "--max_rounds", 2, "--round", 3, code=74)
    assert "not made after 2 rounds (--max_rounds): shard 4" in said
    assert events(data_dir)[-1]["event"] == "stopped"
    assert len(fake.sent()) == 6


def test_until_done_stops_with_a_sentence_where_only_people_can_help(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, 0, 1, 2, 3)
    write_record(data_dir, "1_4", ended(65))
    said = slurm("retry", data_dir, "--until_done", code=74)
    assert "only a person can help now: shard 4: bad input (65), the same input fails in the same way" in said
    assert not fake.sent()
    assert "stopped" in events(data_dir)[-1]["event"]


def test_a_controller_that_cannot_go_on_says_so_in_the_history(fake: FakeSlurm, data_dir: Path) -> None:
    write_record(data_dir, "1_4", ended(74))
    slurm("retry", data_dir, "--until_done", "--setup", "/no/such/file", code=2)
    assert "/no/such/file is no file" in events(data_dir)[-1]["why"]


def test_until_done_verifies_what_is_done_and_writes_the_report(
    fake: FakeSlurm, prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    prep.plan(sample_dir, data, num_shards=2)
    assert prep.command("run", data).code == 0
    slurm("retry", data, "--until_done")
    assert status(data)["verified"]
    assert "<html" in (data / "report.html").read_text()
    assert events(data)[-1]["event"] == "finished"


def test_cancel_ends_the_controller_first_as_it_would_send_again_what_is_cancelled(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir, identity=folder_identity(data_dir))
    name = f"{names_begin(data_dir, need_plan(data_dir).plan_id)}0-control"
    jobs = f"1|0-4|PENDING|Priority|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|x|\n"
    jobs += f"9|N/A|PENDING|Dependency|0:0||0:00|9|root|{WHEN}|N/A|N/A|0|{name}|\n"
    fake.answers("squeue", jobs)
    assert status(data_dir)["controller_jobs"] == ["9"]
    slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["9 1"]


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
    facts = {"by": "run", "job_id": "", "shards": "1-2", "node": node, "pid": os.getpid(), "pid_began": ticks}
    path = write_record(data_dir, "1_1", **facts)
    path.rename(path.with_name(f"{node}-{os.getpid()}.1000"))
    assert status(data_dir)[state] == "1-2"
    if state != "failed":
        slurm("submit", data_dir)
        assert "shards_of=(0 3 4)" in fake.sent()[0]


@pytest.mark.skipif(shutil.which("setpriv") is None, reason="no setpriv")
@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_a_colleague_sees_what_is_done_of_a_set_submitted_with_umask_077(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    write_record(data_dir, "1_4", ended(65))
    make_done(data_dir, 0, 1)
    jobs = data_dir / "jobs"
    jobs.chmod(0o700)
    os.chown(jobs, 65534, 65534)
    colleague = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search", sys.executable]
    said = run_child([*colleague, "-m", "slurm", "status", data_dir]).stdout
    assert "2 of 5 shards are done" in said
    assert "not visible" in said
    assert f"its owner can type: chmod -R a+rX {shlex.quote(str(data_dir))}" in said
    assert "failed" not in said


def killed_log(data: Path, words: str) -> Path:
    path = data / "jobs" / "logs" / "1_0.log"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"shardprep: node n1: shard 0 begins\n{words}\n")
    return path


@pytest.mark.parametrize("has_moved", [False, True])
def test_of_a_task_that_was_started_again_each_start_has_the_cause_of_its_own_part_of_the_log(
    fake: FakeSlurm, data_dir: Path, has_moved: bool
) -> None:
    """A submission's log goes on; plain sbatch's is moved away when Slurm starts the task again."""
    submitted(data_dir)
    log = killed_log(data_dir, "*** JOB 7 ON n1 CANCELLED AT now DUE TO NODE FAILURE ***")
    if has_moved:
        log.rename(log.with_name("1_0.before-restart-1.log"))
    with log.open("a") as file:
        file.write(
            "shardprep: node n2: shard 0 begins\n*** JOB 7 ON n2 CANCELLED AT now DUE TO TIME LIMIT ***\n"
        )
    for number in range(2):
        write_record(data_dir, "1_0", num_restarts=number, time=1000 + number, log=str(log))
    assert status(data_dir)["causes"] == {"TIMEOUT": "0"}
    assert status(data_dir)["restarts"] == {"NODE_FAIL on n1": 1}


def test_a_task_without_a_record_that_slurm_has_forgotten_is_said_to_have_left_none(
    fake: FakeSlurm, data_dir: Path
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0, 1, 2, 3)
    said = slurm("status", data_dir)
    assert "ended before they began: shard 4" in said
    assert "sacct -D -j 1_4 " in said


def test_two_folders_of_one_inode_number_on_two_file_systems_are_two(data_dir: Path, tmp_path: Path) -> None:
    identity = folder_identity(data_dir)
    assert identity.partition(".")[0] == str(data_dir.stat().st_ino)
    shown = run_child(["stat", "-fLc", "%i", data_dir]).stdout.strip()
    assert identity.partition(".")[2] == shown, "as the batch script, which runs on nodes, has it from stat"


@pytest.mark.parametrize("is_told", [True, False])
def test_retry_after_plain_sbatch_asks_for_what_the_task_had(
    fake: FakeSlurm, data_dir: Path, is_told: bool
) -> None:
    """An older Slurm does not tell a task its time limit."""
    environ = {"SLURM_JOB_PARTITION": "amx-part", "SLURM_MEM_PER_NODE": "3000", "SLURM_JOB_ACCOUNT": "mine"}
    if is_told:
        environ["SLURM_JOB_END_TIME"] = str(round(time.time()) + 45 * 60)
    fake.answers_by("squeue", '[[ "$*" != *%l* ]] || echo 45:00')
    task(fake, data_dir, 1, "--input_dir", "/no/such/folder", code=66, **environ)
    script = slurm("retry", data_dir, "--shards", 1, "--dry_run")
    for option in ("partition=amx-part", "account=mine", "mem=3000M", "time=45", "cpus-per-task=1"):
        assert f"#SBATCH --{option}\n" in script, option


@pytest.mark.parametrize(
    ("reason", "command"),
    [
        ("launch failed requeued held", "scontrol release 1"),
        ("PartitionTimeLimit", "shardprep cancel {}"),
        ("QOSGrpCPUMinutesLimit", "shardprep cancel {}"),
        ("AssocMaxWallDurationPerJobLimit", "shardprep cancel {}"),
        ("QOSGrpCPURunMinutesLimit", None),
        ("Resources", None),
    ],
)
def test_what_waits_for_a_person_is_told_with_what_to_type_and_ends_a_wait(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch, reason: str, command: str | None
) -> None:
    submitted(data_dir)
    verify = f"1|0-4|PENDING|{reason}|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|x|\n"
    verify += f"2|N/A|PENDING|Dependency|0:0||0:00|2|root|{WHEN}|N/A|N/A|0|y|\n"
    fake.answers("squeue", verify)
    said = slurm("status", data_dir)
    assert ("left" in said.splitlines()[1]) is False, "nobody knows when they begin"
    last = said.splitlines()[-1]
    if command is None:
        assert last.endswith("--watch")
        return
    assert command.format(data_dir) in last
    clock = SimpleNamespace(**{**vars(time), "sleep": lambda _: pytest.fail("it waits")})
    monkeypatch.setattr("slurm.status.time", clock)
    slurm("submit", data_dir, "--wait", code=74)


def test_a_controller_that_died_is_told_with_its_log_and_what_to_type(
    fake: FakeSlurm, data_dir: Path
) -> None:
    slurm("submit", data_dir, "--until_done")
    assert "job 3 of --until_done is gone" in slurm("status", data_dir)
    assert "control-3.log" in slurm("status", data_dir)
    name = f"{names_begin(data_dir, need_plan(data_dir).plan_id)}0-control"
    fake.answers("squeue", f"3|N/A|PENDING|Dependency|0:0||0:00|3|root|{WHEN}|N/A|N/A|0|{name}|\n")
    assert "is gone" not in slurm("status", data_dir)
    slurm("cancel", data_dir)
    fake.answers("squeue", "")
    assert "is gone" not in slurm("status", data_dir), "somebody ended it"


def test_another_submit_with_until_done_leaves_one_controller(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--until_done", "--shards", "0-2")
    name = f"{names_begin(data_dir, need_plan(data_dir).plan_id)}0-control"
    fake.answers("squeue", f"3|N/A|PENDING|Dependency|0:0||0:00|3|root|{WHEN}|N/A|N/A|0|{name}|\n")
    assert "--shards 0-2" in fake.sent()[2], "it keeps to the shards that were asked for"
    slurm("submit", data_dir, "--until_done", "--shards", "3")
    assert fake.calls("scancel") == ["3"]
    make_done(data_dir, *range(5))
    assert "job 3 waits already" in slurm("submit", data_dir, "--until_done")
    assert len(fake.sent()) == 6


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
    said = slurm("submit", data_dir, "--until_done")
    assert "5 shards become 2 tasks" in said
    assert fake.calls("scancel") == ["1 2"], "what was sent before, not yet released"
    assert [call for call in fake.calls("scontrol") if "release" in call] == ["release 3,4"]


def test_the_verify_job_has_time_for_all_bytes_where_a_task_has_it_for_a_shard(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shardprep.format.plan.Plan.shard_bytes", lambda _: [3 * 10**9] * 5)
    shown = slurm("submit", data_dir, "--time_min", 2, "--until_done", "--dry_run").splitlines()
    limits = [line for line in shown if line.startswith("#SBATCH --time=")]
    assert limits == ["#SBATCH --time=2", "#SBATCH --time=52", "#SBATCH --time=52"]
    fake.answers("sinfo", "cpu*|idle|4000|4|30:00\n")
    assert "#SBATCH --time=30\n" in slurm("submit", data_dir, "--time_min", 2, "--dry_run"), "the partition's"


def test_a_dependency_of_the_users_own_is_passed_on(fake: FakeSlurm, data_dir: Path) -> None:
    slurm("submit", data_dir, "--sbatch_args", "--dependency=afterok:99")
    assert "#SBATCH --dependency=afterok:99\n" in fake.sent()[0]
    assert "--dependency=afterany:1" in fake.calls("sbatch")[-1], "the verify job waits for its array"
    slurm("retry", data_dir)
    assert "afterok:99" not in fake.sent()[2], "which may be gone by then"


def test_a_poll_asks_slurm_once_and_reads_no_manifest_again(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    make_done(data_dir, 0, 1)
    fake.answers("squeue", squeue_line("2-4", "RUNNING"))
    plan = need_plan(data_dir)
    state = find_state(data_dir, plan)
    before = {name: len(fake.calls(name)) for name in ("squeue", "scontrol")}
    make_done(data_dir, 2)
    opened = []
    real = os.open
    monkeypatch.setattr(
        os, "open", lambda path, *args, **kw: (opened.append(str(path)), real(path, *args, **kw))[1]
    )
    again = find_state(data_dir, plan, before=state)
    assert again.ids("done") == [0, 1, 2]
    assert [path[-9:] for path in opened if "shard-" in path] == ["0002.json"]
    now = {name: len(fake.calls(name)) for name in before}
    assert now == {**before, "squeue": before["squeue"] + 1}


def test_until_done_tells_whom_notify_names_once_at_its_end(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    told = tmp_path / "told"
    notify = f'echo "$SHARDPREP_RESULT" >>{told}'
    slurm("submit", data_dir, "--until_done", "--notify", notify)
    assert not any("shardprep_notify=" in script for script in fake.sent()), (
        "no verify job before the end does"
    )
    make_done(data_dir, 0, 1, 2, 3)
    write_record(data_dir, "1_4", ended(65))
    slurm("retry", data_dir, "--until_done", code=74)
    assert told.read_text() == "not verified\n"


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


def test_a_verify_job_that_ran_out_of_time_is_told_with_its_log(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    make_done(data_dir, *range(5))
    log = data_dir / "jobs" / "logs" / "verify-2.log"
    log.parent.mkdir()
    log.write_text("*** JOB 2 ON n1 CANCELLED AT 2026-11-22T01:52:04 DUE TO TIME LIMIT ***\n")
    write_record(data_dir, "2_0", shards="", log=str(log))
    said = slurm("status", data_dir)
    assert f"the verify job ended, TIMEOUT; its log: {log}" in said
    assert said.splitlines()[-1] == f"next: shardprep verify {data_dir}"
    waits = squeue_line("N/A", "PENDING", "PartitionTimeLimit", job="2", name=f"{NAME}-verify")
    fake.answers("squeue", waits)
    assert "the verify job waits for PartitionTimeLimit: " in slurm("status", data_dir)
