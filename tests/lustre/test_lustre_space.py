"""Quota and free space before a job, and files that lie in an archive alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lustre.released_files
from lustre import LustreError, Need, space_lines
from lustre.free_space import parse_quota
from lustre.released_files import restore
from shardprep.command_line import Program
from slurm.__main__ import PROGRAM as SLURM
from tests.lustre.fake_lustre import FakeLustre, both_dialects
from tests.slurm.fake_slurm import FakeSlurm

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

NEED = Need(num_bytes=10**12, num_files=3000)
OST = {"used": 25 << 20, "available": 75 << 20, "flags": "", "state": "ACTIVE"}
PLENTY = [5, 0, 1 << 40, 7, 0, 1 << 40]


@pytest.fixture
def as_user(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota binds root, so nobody asks for root's."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    monkeypatch.setattr(os, "getgid", lambda: 2000)


@both_dialects
@pytest.mark.usefixtures("as_user")
def test_what_fits_is_one_line_without_a_warning(on_lustre: FakeLustre) -> None:
    on_lustre.give(quota={"-u": PLENTY, "-g": PLENTY, "-p": PLENTY}, project=12)
    (line,) = space_lines(on_lustre.folder, NEED)
    assert line.startswith(
        "it needs about 1e+03 GB in 3000 files; 8 OSTs: 6.6e+03 GB left; inodes of MDT and OSTs: "
    )
    assert "your quota: 1.13e+06 GB and 1099511627769 files left" in line
    assert "the group's quota: " in line
    assert "the project's quota: " in line
    asked = [call[1:3] for call in on_lustre.calls() if call[0] == "quota"]
    assert asked == [["-u", "1000"], ["-g", "2000"], ["-p", "12"]]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("state", "warning"),
    [
        ({"quota": {"-u": [5, 0, 1005, 7, 0, 0]}}, "your quota leaves 0.00102 GB"),
        ({"quota": {"-g": [5, 1005, 0, 7, 0, 0]}}, "the group's quota leaves 0.00102 GB"),
        ({"quota": {"-u": [2000, 0, 1000, 7, 0, 0]}}, "your quota leaves 0 GB"),
        ({"quota": {"-u": [5, 0, 0, 7, 10, 9]}}, "your quota leaves 2 files"),
        ({"quota": {"-p": [5, 0, 6, 7, 0, 0]}, "project": 3}, "the project's quota leaves 1.02e-06 GB"),
        ({"osts": [OST, {**OST, "available": 1}]}, "2 OSTs leaves 80.5 GB"),
        ({"osts": [OST, {**OST, "flags": "S", "available": 1 << 40}]}, "1 OSTs leaves 80.5 GB"),
        ({"inodes": 2999}, "inodes of MDT and OSTs leaves 2999 files"),
    ],
)
def test_each_limit_that_is_too_small_is_a_warning(
    on_lustre: FakeLustre, state: dict[str, object], warning: str
) -> None:
    on_lustre.give(**state)
    lines = [line for line in space_lines(on_lustre.folder, NEED) if line.startswith("warning")]
    assert lines == [f"warning: it will not fit: {warning}, and it needs {NEED.text()}"]


@pytest.mark.usefixtures("as_user")
def test_limits_that_are_not_told_are_left_out_and_without_any_a_note_says_so(on_lustre: FakeLustre) -> None:
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "quota" not in line
    on_lustre.fault("df-fails")
    (line,) = space_lines(on_lustre.folder, NEED)
    assert line.startswith("note: whether it will fit cannot be told")


def test_a_server_that_is_silent_is_asked_no_more_than_twice(on_lustre: FakeLustre) -> None:
    on_lustre.fault("hang")
    (line,) = space_lines(on_lustre.folder, NEED)
    assert line.startswith("note: whether it will fit cannot be told")
    assert len(on_lustre.calls()) <= 2  # a call that is killed early has not written itself down


def test_root_is_bound_by_no_quota(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "getgid", lambda: 0)
    on_lustre.give(quota={"-u": [5, 0, 1, 7, 0, 1]})
    assert len(space_lines(on_lustre.folder, NEED)) == 1
    assert not any(call[0] == "quota" for call in on_lustre.calls())


def test_off_lustre_and_without_lfs_nothing_is_said(
    on_lustre: FakeLustre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert space_lines(tmp_path, NEED) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert space_lines(on_lustre.folder, NEED) == []


@pytest.mark.parametrize("output", ["", "usr quotas are not enabled.\n", "Filesystem kbytes quota\n 1 2 3\n"])
def test_what_is_no_quota_is_not_taken_for_one(output: str) -> None:
    with pytest.raises(ValueError, match="no quota in"):
        parse_quota(output)


@pytest.mark.usefixtures("as_user")
def test_plan_and_submit_warn_and_go_on(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path, fake_slurm: FakeSlurm
) -> None:
    on_lustre.give(quota={"-u": [5, 0, 6, 7, 0, 9]})
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "5"]
    ended = prep.command("plan", *options, "--output_dir", on_lustre.folder)
    assert ended.code == 0
    assert "GB in 15 files; 8 OSTs: " in ended.text
    assert "warning: it will not fit: your quota leaves 2 files, and it needs about" in ended.text
    prep.make(on_lustre.folder, 0, 1)
    code, text = run(SLURM, on_lustre, "submit", on_lustre.folder, "--mem_gb", 1)
    assert code == 0, text
    assert "GB in 9 files" in text, "three shards are missing"
    assert "warning: it will not fit: your quota leaves 1.02e-06 GB" in text
    assert fake_slurm.sent(), "the job was sent all the same"


def run(program: Program, on_lustre: FakeLustre, *words: object) -> tuple[int, str]:
    code = program.run([str(word) for word in words])
    captured = on_lustre.capsys.readouterr()
    return code, captured.out + captured.err


# --- restore


@pytest.fixture
def released(on_lustre: FakeLustre) -> list[Path]:
    """Seven files in two folders and a link; five of them are released."""
    files = [
        on_lustre.folder / name for name in ("a", "b: (0x0000000d) released", "c", "sub/d", "sub/e", "x", "y")
    ]
    (on_lustre.folder / "sub").mkdir()
    for file in files:
        file.touch()
    (on_lustre.folder / "link").symlink_to(files[0])
    on_lustre.give(released=[str(file) for file in files[:5]])
    return files


def test_restore_queues_what_is_released_in_batches_and_ends_when_all_is_back(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.give(slow=2)
    said: list[str] = []
    slept: list[float] = []
    line = restore(on_lustre.folder, wait=True, say=said.append, sleep=slept.append, batch=3)
    assert line == "all 7 files are on Lustre; 5 of them were brought back"
    queued = [call[1:-1] for call in on_lustre.calls() if call[0] == "hsm_restore"]
    assert [len(names) for names in queued] == [3, 1, 1]
    assert sorted(name for names in queued for name in names) == sorted(str(file) for file in released[:5])
    assert on_lustre.state()["released"] == []
    assert slept == [10.0, 10.0, 10.0]
    assert said[-1] == "5 of 5 files are back"


def test_restore_without_wait_queues_and_says_how_many(on_lustre: FakeLustre, released: list[Path]) -> None:
    code, text = on_lustre.command("restore", on_lustre.folder)
    assert code == 0
    assert "5 of 7 files are queued; with --wait the command ends when they are there" in text
    on_lustre.give(released=[], queued={})
    assert "none of them released: nothing to restore" in on_lustre.command("restore", released[0])[1]


def test_a_restore_that_makes_no_progress_is_queued_again(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.monkeypatch.setattr(lustre.released_files, "_IDLE_ROUNDS", 2)
    on_lustre.give(slow=9)
    restore(on_lustre.folder / "sub", wait=True, say=lambda _: None, sleep=lambda _: on_lustre.give(slow=0))
    assert [call[0] for call in on_lustre.calls()].count("hsm_restore") == 2


def test_a_file_that_is_lost_in_the_archive_is_told_and_the_others_come_back(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.give(lost=[str(released[2])])
    with pytest.raises(
        LustreError, match=r"1 of 7 files, .*/c the first, are released and lost .*All others are back"
    ):
        restore(on_lustre.folder, wait=True, say=lambda _: None, sleep=lambda _: None)
    assert on_lustre.state()["released"] == [str(released[2])]


def test_restore_says_what_it_cannot_do(on_lustre: FakeLustre, tmp_path: Path) -> None:
    code, text = on_lustre.command("restore", on_lustre.folder / "absent")
    assert (code, "is not there" in text) == (66, True)
    code, text = on_lustre.command("restore", tmp_path)
    assert (code, "nothing to restore: " in text, "not on Lustre" in text) == (0, True, True)
    (on_lustre.folder / "a").touch()
    on_lustre.fault("hang-hsm_state")
    code, text = on_lustre.command("restore", on_lustre.folder)
    assert (code, "gave no answer" in text) == (73, True)


def test_the_fake_refuses_to_restore_what_is_not_released(on_lustre: FakeLustre) -> None:
    (on_lustre.folder / "a").touch()
    done = subprocess.run(
        ["lfs", "hsm_restore", str(on_lustre.folder / "a")], check=False, capture_output=True
    )
    assert done.returncode == 22
