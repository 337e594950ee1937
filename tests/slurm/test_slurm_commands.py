"""python -m slurm against stand-ins for Slurm's commands that record what they are given."""

from __future__ import annotations

import itertools
import json
import os
import pwd
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from shardprep.errors import BrokenShard, ReadWriteError, ShardprepError, UsageError
from shardprep.format.done import find_made_shards
from shardprep.format.json_files import content_sha256
from shardprep.format.names import shard_name
from shardprep.format.plan import Plan, need_plan
from slurm.commands import slurm_answer, slurm_output
from slurm.queue import parse_queue
from slurm.request import JobRequest
from slurm.script import array_script, verify_script
from slurm.send import parse_job
from slurm.site import check_folder
from slurm.submissions import read_submissions
from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import JOB, NAME, QUEUES, WHEN, FakeSlurm, make_done, slurm, status, submitted

pytestmark = pytest.mark.processes


def test_submit_sends_what_its_dry_run_printed_also_in_a_task_of_another_job(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = slurm("submit", data_dir, "--dry_run")
    assert not fake.sent()
    own = {"JOB_ID": "9", "ARRAY_JOB_ID": "8", "ARRAY_TASK_ID": "1", "CPUS_PER_TASK": "2", "JOB_NAME": "mine"}
    for name, value in own.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    slurm("submit", data_dir)
    assert "\n".join(fake.sent()) + "\n" == shown


@pytest.mark.parametrize("version", QUEUES)
def test_status_retry_and_cancel_work_on_an_old_and_on_a_new_slurm(
    fake: FakeSlurm, data_dir: Path, version: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    submitted(data_dir)
    fake.answers("squeue", QUEUES[version])
    state = status(data_dir)
    assert (state["running"], state["pending"]) == ("2-3", "4")
    assert state["causes"] == {"bad input (65)": "0", "killed by signal 9": "1"}
    assert "left: shard 00000: bad input (65)" in slurm("retry", data_dir, "--dry_run")
    monkeypatch.setenv("SLURM_ARRAY_JOB_ID", "1")  # as a task of the array itself, which ends with it
    monkeypatch.setenv("SLURM_ARRAY_TASK_ID", "2")
    words = "warning: this runs in job 1, which is one of 1, 2, and ends with it"
    assert words in slurm("cancel", data_dir)
    assert fake.calls("scancel") == ["1 2"], "job 3 is another's"
    assert "this runs in job 1_2, which is one of 1_2" in slurm("cancel", data_dir, "--shards", "2")
    assert "this runs in" not in slurm("cancel", data_dir, "--shards", "3")


@pytest.mark.parametrize("change", ["another plan's name", "another user"])
def test_cancel_leaves_jobs_alone_that_only_have_the_same_numbers(
    fake: FakeSlurm, data_dir: Path, change: str
) -> None:
    """As after a controller lost its state and began again to count at 1."""
    submitted(data_dir)
    queue = QUEUES["24.11.5"]
    changed = (
        queue.replace("0123456789ab", "ba9876543210") if "plan" in change else queue.replace("root", "kim")
    )
    fake.answers("squeue", changed)
    assert "nothing is queued" in slurm("cancel", data_dir)
    assert fake.calls("scancel") == []
    assert status(data_dir)["running"] == ""


def test_a_site_that_renames_jobs_is_followed(fake: FakeSlurm, data_dir: Path) -> None:
    fake.answers("job", JOB.replace("{name}", "the sites name"))
    slurm("submit", data_dir)
    sent = read_submissions(data_dir)[0]
    assert ({job.name for job in sent.jobs}, sent.user) == ({"the sites name"}, "root")
    fake.answers("squeue", f"1|0-4|PENDING|None|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|the sites name|\n")
    assert status(data_dir)["pending"] == "0-4"


def test_wait_where_all_is_queued_already_waits_and_does_not_end_with_0_unverified(
    fake: FakeSlurm, data_dir: Path
) -> None:
    """The same line again after Ctrl-C. The queue is empty when it looks again."""
    submitted(data_dir)
    queue = fake.place / "squeue"
    queue.write_text(f"1|0-4|PENDING|None|0:0||0:00|1|root|{WHEN}|N/A|N/A|0|{NAME}|\n")
    once = f"cat {shlex.quote(str(queue))}; : >{shlex.quote(str(queue))}"
    fake.answers_by("squeue", f'case "$*" in *--user=root*) {once} ;; esac')
    said = slurm("submit", data_dir, "--wait", code=74)
    assert "5 shards wait or run already" in said
    assert "ended before they began: shards 0-4" in said


def test_wait_where_all_is_done_but_nothing_verified_is_no_success(fake: FakeSlurm, data_dir: Path) -> None:
    make_done(data_dir, *range(5))
    said = slurm("submit", data_dir, "--wait", code=74)
    assert "nothing to submit: 5 of 5 shards are done" in said
    assert f"next: shardprep verify {data_dir}" in said


def test_a_dry_run_of_submit_needs_no_controller(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    (fake.place / "away").touch()
    said = slurm("submit", data_dir, "--dry_run")
    assert "shards_of=(0 1 2 3 4)" in said
    assert "Unable to contact slurm controller" in said
    assert "left out of this dry run" in said
    slurm("submit", data_dir, code=74)
    assert not fake.sent()


def test_a_dry_run_of_submit_needs_no_slurm_at_all(
    data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    done = run_child([sys.executable, "-m", "slurm", "submit", data_dir, "--dry_run"])
    assert "#SBATCH --array=0-4%5" in done.stdout
    assert "scontrol cannot be run here" in done.stderr


# What a folder, a flag's value or an environment variable may hold, and a shell must not run or split.
NASTY = [
    "a b", " a ", "it's", 'say "a"', "$(touch INJECTED)", "`touch INJECTED`", "; touch INJECTED #", "a;b&c|d",
    "-n", "--wrap=x", "데이터 1", "50% of $HOME", "*?[a]", "~", "#x", "!!", "a\u0085b", "a\u2028b",
]  # fmt: skip
REFUSED = ["data\ntouch INJECTED #", "a\rb", "a\tb", "a\x1b[0mb", "no\udcffutf8"]
PLACES = ["folder", "flag", "worker_args", "sbatch_args"]


def run_head(script: str, folder: Path) -> list[str]:
    """What bash makes of a rendered script: the words that the worker would get."""
    head = script.partition("\nset -euo pipefail\n")[0]
    (folder / "job.sh").write_text(head + '\nprintf "%s\\0" "${shardprep_command[@]}" "$SHARDPREP_EXEC"\n')
    done = run_child(["bash", "job.sh"], cwd=folder, env={"PATH": os.environ["PATH"]}, encoding="utf-8")
    return done.stdout.split("\0")[:-1]


@pytest.mark.parametrize("name", NASTY)
def test_a_value_reaches_the_worker_as_it_is_and_no_shell_runs_it(tmp_path: Path, name: str) -> None:
    folder = Path("/data") / name / "x"
    words = shlex.join(["--input_dir", name])
    request = JobRequest(worker_args=words, partition=name, account=name, container=name)
    script = array_script(folder, "shardprep-0", ["3"], request)
    expected = ["--shard_id", "3", "--planned", "--output_dir", str(folder), "--input_dir", name, name]
    assert run_head(script, tmp_path) == expected
    script = verify_script(folder, "shardprep-0", 5, request)
    assert run_head(script, tmp_path) == ["verify", str(folder), name]
    assert [path.name for path in tmp_path.iterdir()] == ["job.sh"], "nothing was run"


@pytest.mark.parametrize(("name", "where"), [*itertools.product(REFUSED, PLACES), ("back\\slash", "folder")])
def test_what_cannot_stand_in_a_script_is_refused_by_name(name: str, where: str) -> None:
    fields = {
        "folder": {},
        "flag": {"constraint": name},
        "worker_args": {"worker_args": shlex.join(["--input_dir", name])},
        "sbatch_args": {"sbatch_args": shlex.join([f"--comment={name}"])},
    }[where]
    folder = Path("/data", name if where == "folder" else "x")

    def render() -> str:
        request = JobRequest(**fields)  # type: ignore[arg-type]
        return array_script(folder, "shardprep-0", ["3"], request)

    with pytest.raises(UsageError, match=r"cannot stand in|is not|backslash"):
        render()


@pytest.mark.parametrize("name", [b"data\ntouch INJECTED #", b"\xff\xfe"])
def test_submit_of_a_folder_with_such_a_name_ends_with_2_and_sends_nothing(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, name: bytes
) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/" + name))
    data_dir.rename(folder)
    said = slurm("submit", folder, code=2)
    assert "rename the folder" in said
    assert not fake.sent()
    assert not (folder / "jobs").exists()


def test_a_training_whose_folder_of_checkpoints_was_forgotten_is_told_what_to_type(tmp_path: Path) -> None:
    """Its third word is a flag, which find and mkdir would take for theirs."""
    words = ["bash", str(ROOT / "slurm" / "train_ddp.sh"), "train.py", "DATA", "--num_steps", "9"]
    done = run_child(words, cwd=tmp_path, env={**os.environ, "SLURM_JOB_ID": "1"}, code=2)
    assert "type: sbatch --nodes=2 slurm/train_ddp.sh PROGRAM.py DATA CHECKPOINTS" in done.stderr


def test_a_folder_whose_links_go_round_is_an_error(fake: FakeSlurm, tmp_path: Path) -> None:
    (tmp_path / "round").symlink_to("round")
    for command in ("status", "submit", "cancel", "retry"):
        assert "round" in slurm(command, tmp_path / "round", code=74)


def test_a_data_set_that_cannot_be_listed_is_an_error(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = need_plan(data_dir)
    with pytest.raises(ReadWriteError, match=r"plan\.json cannot be listed \(Not a directory\)"):
        find_made_shards(data_dir / "plan.json", plan.spec)


GARBAGE = ["x", "1|0|RUN", "|||||||||\n", "\0\0", "1|0|FAILED|x|many|n1|0:00|4|root|n|\n", "\ufffd" * 99]


@pytest.mark.parametrize("text", GARBAGE)
def test_an_answer_that_is_cut_short_or_garbage_is_an_error_that_shows_it(
    fake: FakeSlurm, data_dir: Path, text: str
) -> None:
    submitted(data_dir)
    fake.answers("squeue", text)
    words = "squeue --noheader --user=root answered what cannot be read"
    assert words in slurm("cancel", data_dir, code=74)
    assert not fake.calls("scancel")
    state = status(data_dir)
    assert words in state["slurm_away"]
    assert (state["not_visible"], state["failed"]) == ("0-4", ""), "it may run, and is not called failed"


def test_bytes_that_are_no_utf8_in_an_answer_are_an_error(fake: FakeSlurm, data_dir: Path) -> None:
    submitted(data_dir)
    fake.answers("squeue", b"\xff\xfe\n")
    assert "answered what cannot be read" in slurm("status", data_dir)
    fake.answers("squeue", "")
    fake.answers("config", b"\xff")
    assert "no MaxArraySize" in slurm("submit", data_dir, code=74)


@pytest.mark.parametrize("parse", [parse_queue, parse_job])
def test_every_cut_of_an_answer_is_read_or_an_error(fake: FakeSlurm, parse: Any) -> None:
    text = {parse_queue: QUEUES["24.11.5"], parse_job: JOB}[parse]
    num_refused = 0
    for size in range(len(text)):
        fake.answers("sinfo", text[:size])
        try:
            parse(text[:size])
        except (ValueError, LookupError, TypeError, ArithmeticError):
            num_refused += 1
    assert num_refused > 10
    fake.answers("sinfo", "x")
    with pytest.raises(ReadWriteError, match="sinfo answered what cannot be read"):
        slurm_answer(parse, "sinfo")


WRONG: dict[str, Any] = {
    "nothing": b"",
    "no object": b"[]",
    "not utf-8": b"\xff\xfe",
    "deep": b"[" * 100_000 + b"]" * 100_000,
    "infinity": b'{"format": Infinity}',
    "another form": b'{"format": "x", "version": 1}',
}
CHANGES: dict[str, Any] = {
    "version": 99, "number": "0", "plan_id": None, "user": ["root"], "submitted": 1e300, "arrays": {},
    "verify_job_id": "7; rm", "verify_name": 1,
}  # fmt: skip
ARRAY_CHANGES: dict[str, Any] = {
    "job_id": 1, "name": None, "tasks": [1], "mem_mb": 2**70, "time_min": -1, "request": [],
}  # fmt: skip


def edit_record(folder: Path, edit: Callable[[dict[str, Any]], object], name: str = "0000.json") -> None:
    """Write O/jobs/0000.json anew, under this name, with a hash that is right, whatever it holds."""
    data = json.loads((folder / "jobs" / "0000.json").read_text())
    edit(data)
    text = json.dumps({**data, "content_sha256": content_sha256(data)})
    (folder / "jobs" / name).write_text(text)


def _refused(data: Path, words: str) -> None:
    with pytest.raises(BrokenShard, match=words):
        read_submissions(data)


@pytest.mark.parametrize("what", WRONG)
def test_a_file_in_jobs_that_is_no_submission_is_named(data_dir: Path, what: str) -> None:
    (data_dir / "jobs").mkdir()
    (data_dir / "jobs" / "0000.json").write_bytes(WRONG[what])
    _refused(data_dir, r"jobs/0000\.json.*move it away")


@pytest.mark.parametrize("name", [*CHANGES, *(f"arrays.{name}" for name in ARRAY_CHANGES)])
@pytest.mark.parametrize("change", ["another value", "missing"])
def test_a_submission_with_a_wrong_or_missing_field_is_named(data_dir: Path, name: str, change: str) -> None:
    submitted(data_dir)
    outer, _, inner = name.partition(".")

    def edit(data: dict[str, Any]) -> None:
        place, key = (data["arrays"][0], inner) if inner else (data, outer)
        place[key] = ARRAY_CHANGES[inner] if inner else CHANGES[outer]
        if change == "missing":
            del place[key]

    edit_record(data_dir, edit)
    key = inner or outer
    _refused(
        data_dir, rf"jobs/0000\.json.*{key}|another plan" if key != "version" else r"0000\.json.*version"
    )


def test_a_submission_that_was_altered_by_hand_is_refused(data_dir: Path) -> None:
    submitted(data_dir)
    path = data_dir / "jobs" / "0000.json"
    path.write_text(path.read_text().replace('"job_id": "1"', '"job_id": "3"'))
    _refused(data_dir, r"jobs/0000\.json was altered since it was written.*move it away")


@pytest.mark.parametrize(
    ("tasks", "words"),
    [(["0-99999999999"], "no list of ids"), (["0-99998"] * 50, "expected at most 99999"), (["x"], "no list")],
)
def test_a_submission_of_impossibly_many_shards_is_refused_before_they_are_laid_out(
    data_dir: Path, tasks: list[str], words: str
) -> None:
    submitted(data_dir)
    edit_record(data_dir, lambda data: data["arrays"][0].update(tasks=tasks))
    _refused(data_dir, words)


@pytest.mark.parametrize(
    ("name", "value"),
    [("partition", "a\ntouch X"), ("cpus_per_task", "8"), ("mem_gb", True), ("other", 1)],
)
def test_requests_in_a_file_are_checked_like_flags(data_dir: Path, name: str, value: object) -> None:
    submitted(data_dir)
    edit_record(data_dir, lambda data: data["arrays"][0]["request"].update({name: value}), "0001.json")
    _refused(data_dir, rf"0001\.json.*{name}")


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
    with pytest.raises(ShardprepError, match=r"jobs"):
        read_submissions(data_dir)
    assert "jobs" in slurm("status", data_dir, code=65 if what in {"folder", "fifo"} else 74)


def test_where_nothing_waits_or_runs_status_reads_no_sizes_of_the_plan(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_done(data_dir, 0, 1)
    monkeypatch.setattr(Plan, "shard_bytes", lambda _: pytest.fail("10,000 shards take 0.1 s of CPU"))
    assert status(data_dir)["done"] == "0-1"


def test_a_manifest_of_wrong_types_does_not_end_a_status(fake: FakeSlurm, data_dir: Path) -> None:
    for shard_id in range(5):
        for suffix in ("tar", "idx"):
            (data_dir / f"{shard_name(shard_id)}.{suffix}").touch()
    contents = [b"[" * 100_000, b'{"run": 1}', b'{"run": {"wall_s": "long"}}', b"\xff", b"{}"]
    for shard_id, content in enumerate(contents):
        (data_dir / f"{shard_name(shard_id)}.json").write_bytes(content)
    text = slurm("status", data_dir)
    assert "0 of 5 shards are done" in text
    assert "not done, " in text


def test_slurm_gets_no_variables_of_the_allocation_that_submit_runs_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("SLURM_MEM_PER_CPU", "SLURM_CPU_BIND", "SLURM_JOB_ID", "SLURM_CONF", "SLURM_CLUSTERS"):
        monkeypatch.setenv(name, "7")
    names = {line.partition("=")[0] for line in slurm_output("env").splitlines()}
    assert {name for name in names if name.startswith("SLURM_")} == {
        "SLURM_CONF", "SLURM_CLUSTERS", "SLURM_BITSTR_LEN", "SLURM_TIME_FORMAT",
    }  # fmt: skip


def test_a_setup_file_of_an_impossible_name_is_no_file(data_dir: Path) -> None:
    with pytest.raises(UsageError, match="is no file"):
        check_folder(data_dir, JobRequest(setup="x" * 5000))


def test_a_user_without_a_name_on_this_machine_can_use_every_command(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user id without a passwd entry and without HOME, as containers have it; Slurm shows its number."""

    def nobody(number: int) -> NoReturn:
        raise KeyError(f"getpwuid(): uid not found: {number}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "USER", "LOGNAME", "LNAME", "USERNAME"):
        monkeypatch.delenv(name, raising=False)
    fake.answers("squeue", "")
    slurm("submit", data_dir)
    for words in (["retry", "--dry_run"], ["status"], ["report"], ["cancel"], ["logs", 0]):
        slurm(words[0], data_dir, *words[1:], cwd=tmp_path)
    assert f"--user={os.getuid()}" in "\n".join(fake.calls("squeue"))
