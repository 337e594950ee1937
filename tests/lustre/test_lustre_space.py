"""Quota and free space before a job, and files that lie in an archive alone."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lustre.restore
from lustre import LustreError, Need, space_lines
from lustre.restore import restore
from lustre.space import parse_quota
from shardprep.command_line import Program
from slurm.__main__ import PROGRAM as SLURM
from tests.lustre.fake_lustre import FakeLustre, both_dialects
from tests.slurm.fake_slurm import FakeSlurm

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

NEED = Need(num_bytes=10**12, num_shards=1000)
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
    on_lustre.give(quota={"-u": PLENTY, "-g": PLENTY}, project=12)
    (line,) = space_lines(on_lustre.folder, NEED)
    assert line == (
        "it needs about 1.00 TB in 3,000 files; 8 OSTs: 6.60 TB left; inodes of MDTs and OSTs: 1.00 M files "
        "left; your quota: 1.13 PB and 1.10 T files left; the group's quota: 1.13 PB and "
        "1.10 T files left; the project's quota: no limit"
    )
    asked = [call[1:3] for call in on_lustre.calls() if call[0] == "quota"]
    assert asked == [["-u", "1000"], ["-g", "2000"], ["-p", "12"]]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("state", "warning"),
    [
        ({"quota": {"-u": [5, 0, 1005, 7, 0, 0]}}, "your quota: 1.02 MB left"),
        ({"quota": {"-g": [5, 1005, 0, 7, 0, 0]}}, "the group's quota: 1.02 MB left"),
        ({"quota": {"-u": [2000, 0, 1000, 7, 0, 0]}}, "your quota: 0 B left"),
        ({"quota": {"-u": [5, 0, 0, 7, 10, 9]}}, "your quota: 2 files left"),
        ({"quota": {"-p": [5, 0, 6, 7, 0, 0]}, "project": 3}, "the project's quota: 1.02 kB left"),
        ({"osts": [OST, {**OST, "available": 1}]}, "2 OSTs: 80.5 GB left"),
        ({"osts": [OST, {**OST, "flags": "S", "available": 1 << 40}]}, "1 OST: 80.5 GB left"),
        ({"inodes": 2999}, "inodes of MDTs and OSTs: 2,999 files left"),
        ({"mdt": {**OST, "flags": "S"}}, "inodes of MDTs and OSTs: 0 files left"),
        ({"osts": [{**OST, "available": 1 << 40, "inodes": 7}]}, "inodes of MDTs and OSTs: 7 files left"),
        # over the soft limit, and its grace is over: every write fails, whatever the hard limit leaves
        ({"quota": {"-u": [9, 5, 1 << 40, 7, 0, 0, "expired", "-"]}}, "your quota: 0 B left"),
        ({"quota": {"-u": [9, 5, 1 << 40, 7, 0, 0, "none", "-"]}}, "your quota: 0 B left"),
    ],
)
def test_each_limit_that_is_too_small_is_a_warning(
    on_lustre: FakeLustre, state: dict[str, object], warning: str
) -> None:
    on_lustre.give(**state)
    lines = [line for line in space_lines(on_lustre.folder, NEED) if line.startswith("warning")]
    assert lines == [f"warning: it will not fit: {warning}, and it needs {NEED.text()}"]


@both_dialects
@pytest.mark.usefixtures("as_user")
def test_a_quota_that_was_refused_is_said_to_be_unknown(on_lustre: FakeLustre) -> None:
    on_lustre.fault("quota-refused")
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "your quota: unknown (failed with exit code 1: Permission denied.)" in line
    assert "the group's quota: unknown (failed with exit code 1: Permission denied.)" in line


@pytest.mark.usefixtures("as_user")
def test_an_inaccurate_quota_counts_and_is_called_so(on_lustre: FakeLustre) -> None:
    """It stands in brackets, and 2.17 exits with 5."""
    on_lustre.give(quota={"-u": [9, 0, 1000, 7, 0, 0]}, inaccurate=True)
    line, warning = space_lines(on_lustre.folder, NEED)
    assert "your quota: 1.01 MB left (inaccurate: a server did not answer)" in line
    assert "it will not fit: your quota: 1.01 MB left" in warning


@pytest.mark.usefixtures("as_user")
def test_a_soft_limit_that_is_passed_is_told_with_the_time_that_is_left(on_lustre: FakeLustre) -> None:
    on_lustre.give(quota={"-u": [9, 5, 1 << 40, 7, 0, 0, "3d1h1m1s", "-"]})
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "your quota: 1.13 PB left (over the soft limit: writes fail in 3d1h1m1s)" in line


@both_dialects
@pytest.mark.usefixtures("as_user")
def test_of_a_folder_with_a_pool_the_room_and_quota_of_the_pool_count(on_lustre: FakeLustre) -> None:
    full = {**OST, "available": 1}
    on_lustre.give(osts=[full, full, *[{**OST, "available": 1 << 40}] * 6])
    assert [line for line in space_lines(on_lustre.folder, NEED) if "warning" in line] == []
    subprocess.run(["lfs", "setstripe", "-c", "1", "-p", "flash", str(on_lustre.folder)], check=True)
    on_lustre.give(quota={"-u flash": [5, 0, 6, 7, 0, 0]})
    line, *warnings = space_lines(on_lustre.folder, NEED)
    assert "2 OSTs of pool flash: 2.05 kB left" in line
    assert [text.split(", and")[0] for text in warnings] == [
        "warning: it will not fit: 2 OSTs of pool flash: 2.05 kB left",
        "warning: it will not fit: your quota in pool flash: 1.02 kB left",
    ]
    assert ["df", "-p", "fakefs.flash"] in [call[:3] for call in on_lustre.calls()]


ORION = "-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"


@both_dialects
@pytest.mark.usefixtures("as_user")
def test_of_a_folder_with_tiers_each_pool_needs_room_for_its_part_of_a_shard(on_lustre: FakeLustre) -> None:
    subprocess.run(["lfs", "setstripe", *ORION.split(), str(on_lustre.folder)], check=True)
    on_lustre.give(osts=[{**OST, "available": 1 << 20}] * 2 + [{**OST, "available": 1 << 31}] * 6)
    line, *warnings = space_lines(on_lustre.folder, NEED)
    assert "2 OSTs of pool flash: 2.15 GB left" in line
    assert "6 OSTs of pool disk: 13.2 TB left" in line
    lacking = "2 OSTs of pool flash: 2.15 GB left, and 8.13 GB will lie there"
    assert warnings == [f"warning: it will not fit: {lacking}, and it needs {NEED.text()}"], (
        "1,000 shards of 1 GB have 7.75 MiB each between 256 KiB and 8 MiB"
    )


@pytest.mark.usefixtures("as_user")
def test_what_is_not_told_is_unknown_and_never_left_out(on_lustre: FakeLustre) -> None:
    on_lustre.give(quota={"-u": PLENTY})
    on_lustre.fault("df-fails")
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "free space: unknown (`lfs df" in line
    assert "your quota: 1.13 PB" in line
    on_lustre.fault("gibberish")
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "the pool of new files: unknown (lfs getstripe printed" in line
    assert "8 OSTs: 6.60 TB left" in line


@pytest.mark.parametrize("fault", ["hang", "hang-df"])
def test_a_server_that_is_silent_is_asked_once(on_lustre: FakeLustre, fault: str) -> None:
    on_lustre.fault(fault)
    (line,) = space_lines(on_lustre.folder, NEED)
    assert "free space: unknown (`lfs " in line
    assert "gave no answer" in line
    assert "quota: unknown" in line
    assert len([call for call in on_lustre.calls() if call[0] != "getstripe"]) <= 1


def test_show_tells_of_metadata_servers_without_room(on_lustre: FakeLustre) -> None:
    on_lustre.give(mdt={"used": 67108000, "available": 864, "flags": "S"}, inodes=0)
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "1 MDT, 100% full; free inodes: 0" in text
    assert "warning: MDT 0 is out of space: a file that gets its file there fails" not in text
    assert "warning: MDT 0 is out of space: no file can be made there (lfs df says S)" in text
    assert "warning: MDT 0 is out of inodes: it takes no new file (lfs df says S)" in text


@pytest.mark.usefixtures("as_user")
def test_doctor_warns_of_a_limit_that_statvfs_does_not_know(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path
) -> None:
    on_lustre.give(quota={"-u": [9, 5, 1 << 40, 7, 0, 0, "expired", "-"]})
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "2"]
    ended = prep.command("doctor", *options, "--output_dir", on_lustre.folder)
    assert "your quota: 0 B left (over the soft limit, and its time of grace is over)" in ended.text
    assert "it will not fit: your quota: 0 B left" in ended.text


def test_root_is_bound_by_no_quota(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 0)
    monkeypatch.setattr(os, "getgid", lambda: 0)
    on_lustre.give(quota={"-u": [5, 0, 1, 7, 0, 1]})
    assert "quota" not in "".join(space_lines(on_lustre.folder, NEED))
    assert not any(call[0] == "quota" for call in on_lustre.calls())


def test_off_lustre_and_without_lfs_nothing_is_said(
    on_lustre: FakeLustre, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert space_lines(tmp_path, NEED) == []
    monkeypatch.setenv("PATH", "/nonexistent")
    assert space_lines(on_lustre.folder, NEED) == []


@pytest.mark.parametrize("output", ["", "usr quotas are not enabled.\n", "Filesystem kbytes quota\n 1 2 3\n"])
def test_what_is_no_quota_is_not_taken_for_one(output: str) -> None:
    with pytest.raises(ValueError, match="printed no figures"):
        parse_quota(output)


@pytest.mark.usefixtures("as_user")
def test_plan_and_submit_warn_and_go_on(
    on_lustre: FakeLustre, prep: Prep, sample_dir: Path, fake_slurm: FakeSlurm
) -> None:
    on_lustre.give(quota={"-u": [5, 0, 6, 7, 0, 9]})
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", "5"]
    ended = prep.command("plan", *options, "--output_dir", on_lustre.folder)
    assert ended.code == 0
    assert "B in 15 files; 8 OSTs: 6.60 TB left; " in ended.text
    assert "warning: it will not fit: your quota: 2 files left, and it needs about" in ended.text
    prep.make(on_lustre.folder, 0, 1)
    code, text = run(SLURM, on_lustre, "submit", on_lustre.folder, "--mem_gb", 1)
    assert code == 0, text
    assert "B in 9 files" in text, "three shards are missing"
    assert "warning: it will not fit: your quota: 1.02 kB left" in text
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


def test_restore_queues_what_is_released_and_ends_when_all_is_back(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.give(slow=2)
    said: list[str] = []
    slept: list[float] = []
    line = restore(on_lustre.folder, wait=True, say=said.append, sleep=slept.append)
    assert line == "all 7 files are on Lustre; 5 of them were brought back"
    (queued,) = (call[1:-1] for call in on_lustre.calls() if call[0] == "hsm_restore")
    assert sorted(queued) == sorted(str(file) for file in released[:5])
    assert on_lustre.state()["released"] == []
    assert slept == [10.0, 10.0, 10.0]
    assert said[-1] == "5 of 5 files are back"


def make_released(on_lustre: FakeLustre, number: int, **state: object) -> list[Path]:
    folder = on_lustre.folder
    files = [folder / f"f{count:04d}" for count in range(number)]
    for file in files:
        file.touch()
    on_lustre.give(released=[str(file) for file in files], slow=0, **state)
    return files


@both_dialects
@pytest.mark.parametrize("number", [1, 53, 300])
def test_any_number_of_files_is_restored_in_requests_that_the_client_takes(
    on_lustre: FakeLustre, number: int
) -> None:
    files = make_released(on_lustre, number)
    line = restore(on_lustre.folder, wait=True, say=lambda _: None, sleep=lambda _: None)
    assert line == f"all {number} file{'s' * (number > 1)} are on Lustre; {number} of them were brought back"
    asked = [call[1:-1] for call in on_lustre.calls() if call[0] == "hsm_restore"]
    assert sorted(name for names in asked for name in names) == [str(file) for file in files]
    assert max(map(len, asked)) <= 50
    assert len(asked) < number / 50 + number / 256 + 2


@both_dialects
def test_files_that_are_gone_unreadable_or_oddly_named_do_not_keep_the_others_away(
    on_lustre: FakeLustre,
) -> None:
    files = make_released(on_lustre, 60)
    odd = on_lustre.folder / "f0000 of\ntwo lines\r"
    odd.touch()
    gone, closed = files[7], files[20]
    on_lustre.give(
        released=[*map(str, files), str(odd)], vanishing=[str(gone)], unreadable=[str(closed)], slow=1
    )
    said: list[str] = []
    with pytest.raises(LustreError) as caught:
        restore(on_lustre.folder, wait=True, say=said.append, sleep=lambda _: None)
    assert caught.value.exit_code == 73
    assert f"2 paths below {on_lustre.folder} could not be restored: " in str(caught.value)
    assert "All others are back" in str(caught.value)
    assert [line for line in said if line.startswith("error: ")] == [
        f"error: {gone}: No such file or directory",
        f"error: {closed}: Permission denied",
    ]
    assert on_lustre.state()["released"] == [str(gone), str(closed)]
    assert said[-1] == "59 of 59 files are back"


@both_dialects
def test_a_file_that_vanishes_while_it_is_waited_for_does_not_end_the_waiting(on_lustre: FakeLustre) -> None:
    files = make_released(on_lustre, 3)
    on_lustre.give(slow=2)

    def vanish(seconds: float) -> None:
        assert seconds == 10.0
        files[1].unlink(missing_ok=True)

    said: list[str] = []
    with pytest.raises(LustreError, match=r"1 path below .*f0001 \(No such file or directory\)\. All others"):
        restore(on_lustre.folder, wait=True, say=said.append, sleep=vanish)
    assert said[-1] == "2 of 3 files are back"


def test_the_reason_is_the_sites_rule_only_where_lfs_says_so(on_lustre: FakeLustre) -> None:
    make_released(on_lustre, 60)
    on_lustre.fault("hsm-refused")
    code, text = on_lustre.command("restore", on_lustre.folder)
    assert code == 73
    assert "none of the first 50 released files can be queued" in text
    assert "Operation not permitted; restoring may be root's alone at your site" in text
    assert len([call for call in on_lustre.calls() if call[0] == "hsm_restore"]) < 100


def test_one_file_that_is_refused_does_not_cost_the_others_their_restore(on_lustre: FakeLustre) -> None:
    files = make_released(on_lustre, 120)
    real = subprocess.Popen

    def vanishes(words: list[str], **keywords: Any) -> subprocess.Popen[bytes]:
        if words[1] == "hsm_restore" and str(files[60]) in words:
            state = on_lustre.state()  # between the look and the request it was copied back by a reader
            on_lustre.give(released=[name for name in state["released"] if name != str(files[60])])
        return real(words, **keywords)

    on_lustre.monkeypatch.setattr(subprocess, "Popen", vanishes)
    code, text = on_lustre.command("restore", on_lustre.folder)
    assert code == 73
    assert "1 path below" in text
    assert "All other released files are queued" in text
    assert len(on_lustre.state()["queued"]) == 119


def test_restore_without_wait_queues_and_says_how_many(on_lustre: FakeLustre, released: list[Path]) -> None:
    code, text = on_lustre.command("restore", on_lustre.folder)
    assert code == 0
    assert "5 of 7 files are queued; with --wait the command ends when they are there" in text
    on_lustre.give(released=[], queued={})
    assert "none of them released: nothing to restore" in on_lustre.command("restore", released[0])[1]


def test_a_restore_that_makes_no_progress_is_queued_again(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.monkeypatch.setattr(lustre.restore, "IDLE_ROUNDS", 2)
    on_lustre.give(slow=9)
    restore(on_lustre.folder / "sub", wait=True, say=lambda _: None, sleep=lambda _: on_lustre.give(slow=0))
    assert [call[0] for call in on_lustre.calls()].count("hsm_restore") == 2


def test_a_file_that_is_lost_in_the_archive_is_told_and_the_others_come_back(
    on_lustre: FakeLustre, released: list[Path]
) -> None:
    on_lustre.give(lost=[str(released[2])])
    with pytest.raises(LustreError, match=r"1 path below .*/c \(released, and lost .*All others are back"):
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
