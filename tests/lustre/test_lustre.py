"""The lustre package against a fake lfs that refuses what the real one refuses."""

from __future__ import annotations

import errno
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from lustre import LustreError, Need, space_lines
from tests.lustre.fake_lustre import MIB, FakeLustre, apply_stripe, both_dialects
from tests.slurm.fake_slurm import FakeSlurm
from tests.world import World, call_main

pytestmark = pytest.mark.processes

RAID: dict[str, Any] = {"end": None, "count": 1, "size": 4 * MIB, "pattern": "raid0"}
PFL = [{**RAID, "end": 256 * MIB}, {**RAID, "count": -1}]
EIGHT = "-E 64M -c 1 -S 4M -E -1 -c 8 -S 4M"
DOM = "-E 64K -L mdt -E -1 -c 2 -S 4M"
OST = {"used": 25 << 20, "available": 75 << 20, "flags": ""}


def set_by_hand(on_lustre: FakeLustre, options: str) -> None:
    """Somebody's own ``lfs setstripe`` of the folder."""
    subprocess.run(["lfs", "setstripe", *options.split(), str(on_lustre.folder)], check=True)
    on_lustre.give(calls=[])


# --- a layout is asked for, set and read back


@both_dialects
@pytest.mark.parametrize(
    ("stripe", "options", "gives"),
    [
        ("1", "-c 1", "-c 1 -S"),
        ("8", EIGHT, EIGHT),
        ("-1", EIGHT.replace("-c 8", "-c -1"), "-c -1 -S 4M"),
        ("8,1M", EIGHT.replace("4M", "1M").replace("61M", "64M"), "-c 8 -S 1M"),
        ("1,64K,disk", "-c 1 -S 64K -p disk", "-c 1 -S 64K -p disk"),
        ("1,flash", "-c 1 -p flash", "-p flash"),
        ("1,none", "-c 1", "-c 1 -S"),
        ("-c 8", "-c 8", "-c 8 -S"),
        ("-c8 -S 4M -p disk", "-c8 -S 4M -p disk", "-c 6 -S 4M -p disk"),
        (DOM, DOM, DOM),
    ],
)
def test_a_layout_is_set_as_asked_on_a_fresh_folder_and_read_back(
    on_lustre: FakeLustre, stripe: str, options: str, gives: str
) -> None:
    on_lustre.monkeypatch.setenv("LC_ALL", "ko_KR.UTF-8")
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
    assert code == 0, text
    assert gives in text
    assert on_lustre.setstripe_calls() == [options]
    asked = [call for call in on_lustre.calls() if call[0] in {"setstripe", "getstripe"}]
    assert {call[-1] for call in asked} == {"LC_ALL=C"}
    assert {call[-2] for call in asked} == {str(on_lustre.folder)}, "lfs gets absolute paths"


@pytest.mark.parametrize(
    "stripe",
    # lfs reads 1000 as KiB, b as blocks of 512, an empty size as the default and 0 as the default number. It
    # takes a layout without an end, past which writes fail. -d clears a layout; a path would be changed.
    [
        *("0", "-2", "2001", "8x", "", "1e3", " 8", "٨", "Auto"),
        *("8,1000", "8,131072b", "8,", "8,4G", "8,96K"),
        *("8,128M", "8,4M,a_pool_of_16_char", "8,fakefs.flash", "8,inherit", "8,4M,flash,x", "1G:1,-1:8"),
        *("-d", "-E 1G -c 1", "-c", "-c 8 /tmp", "--yaml=x", "-c 8 'x", "-f file", "--copy /tmp"),
    ],
)
def test_what_lfs_refuses_or_takes_amiss_is_refused_before_it_runs(
    on_lustre: FakeLustre, stripe: str
) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
    assert (code, on_lustre.calls()) == (2, []), text


def test_a_layout_that_is_there_already_is_not_set_again(on_lustre: FakeLustre) -> None:
    for _ in range(2):
        assert on_lustre.command("apply", on_lustre.folder, "--stripe", "100")[0] == 0
        (on_lustre.folder / "shard-00000.tar").touch()
    assert len(on_lustre.setstripe_calls()) == 1


def test_a_dry_run_tells_the_command_and_sets_nothing(on_lustre: FakeLustre) -> None:
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", "20", "--dry-run")
    assert (code, f"lfs setstripe {EIGHT.replace('-c 8', '-c 20')} '/" in text) == (0, True)
    (on_lustre.folder / "a").touch()
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", "8", "--dry_run")[0] == 73
    assert on_lustre.setstripe_calls() == []


@pytest.mark.parametrize(
    ("held", "named"),
    [
        ("-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk", ["mdt", "flash", "disk"]),
        ("-E 64K -L mdt -E -1 -c 1 -S 1M", ["mdt"]),
        ("-N2 -c 2", ["-N -E -1 -c 2 -S 4M -N -E -1 -c 2 -S 4M"]),
    ],
)
def test_tiers_and_mirrors_are_dropped_by_a_layout_as_typed_alone(
    on_lustre: FakeLustre, held: str, named: list[str]
) -> None:
    set_by_hand(on_lustre, held)
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", "4")
    assert (code, on_lustre.setstripe_calls()) == (73, []), text
    assert all(name in text for name in named), text
    typed = re.findall(r"--stripe '(-c 8)'", text)
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", *typed)[0] == 0


@pytest.mark.parametrize(
    ("stripe", "options"), [("1", "-c 1 -p flash"), ("1,none", "-c 1"), ("1,disk", "-c 1 -p disk")]
)
def test_the_pool_of_a_folder_stays_unless_another_or_none_is_named(
    on_lustre: FakeLustre, stripe: str, options: str
) -> None:
    set_by_hand(on_lustre, "-c 2 -p flash")
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)[0] == 0
    assert on_lustre.setstripe_calls() == [options]


@both_dialects
@pytest.mark.parametrize("pool", ["nope", "empty"])
def test_a_pool_that_is_not_there_or_has_no_ost_is_refused(on_lustre: FakeLustre, pool: str) -> None:
    on_lustre.give(pools={"flash": [0], "empty": []})
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", f"2,{pool}")
    assert (code, on_lustre.setstripe_calls(), pool in text) == (73, [], True)


def test_a_file_or_nothing_is_refused_and_a_file_keeps_its_bytes(on_lustre: FakeLustre) -> None:
    on_lustre.fault("empties-files")
    file = on_lustre.folder / "shard-00000.tar"
    file.write_bytes(b"precious")
    for path in (file, on_lustre.folder / "absent", on_lustre.folder):
        assert on_lustre.command("apply", path, "--stripe", "8")[0] == 73
        assert on_lustre.command("apply", path, "--stripe", "-c 8", "--dry_run")[0] == 73
    assert file.read_bytes() == b"precious"
    assert on_lustre.setstripe_calls() == []


def test_a_folder_that_holds_more_than_jobs_and_logs_is_refused_with_the_command_for_new_files_alone(
    on_lustre: FakeLustre,
) -> None:
    for name in ("jobs", "logs"):
        (on_lustre.folder / name).mkdir()
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", "1")[0] == 0
    (on_lustre.folder / "file").touch()
    with pytest.raises(LustreError) as caught:
        apply_stripe(on_lustre.folder, "2")
    assert caught.value.remedy == f"lfs setstripe {EIGHT.replace('-c 8', '-c 2')} '{on_lustre.folder}'"


@pytest.mark.parametrize(
    ("fault", "code_of_plain", "words"),
    [
        ("no-space", 28, ["No space left on device", "lfs df"]),
        ("no-quota", 122, ["Disk quota exceeded", "lfs quota -u"]),
        ("inactive-ost", 121, ["inactive OST among your specified 1 OST(s)"]),
        ("not-owner", 1, ["Operation not permitted", "owner"]),
        ("read-only", 30, ["Read-only", "node"]),
        ("eacces", 13, ["Permission denied"]),
    ],
)
def test_what_the_server_refuses_is_told_with_what_to_do(
    on_lustre: FakeLustre, fault: str, code_of_plain: int, words: list[str]
) -> None:
    on_lustre.fault(fault)
    for stripe, exit_code in (("1", code_of_plain), ("8", 1)):
        code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
        assert (code, f"exit code {exit_code}: " in text) == (73, True), text
        assert all(word in text for word in words), text
    assert on_lustre.folder.is_dir(), "lfs 2.16 and later remove an empty folder after EACCES"


@pytest.mark.parametrize(
    ("fault", "stripe", "difference"),
    [
        ("wrapper-size", "1,4M", "-c 1 -S 64K"),
        ("wrapper-no-pool", "1,flash", "-p flash"),
        ("wrapper-count-1", "8", "-E -1 -c 1"),
        ("wrapper-drops-last", "8", "-E 64M -c 1 -S 4M,"),
        ("wrapper-plain", "8", "-c 1 -S 4M,"),
        ("wrapper-ignores", "8", "-c 1 -S"),
        ("wrapper-start", "1", "-i 3"),
    ],
)
def test_a_wrapper_that_rewrites_options_is_noticed_in_any_component(
    on_lustre: FakeLustre, fault: str, stripe: str, difference: str
) -> None:
    on_lustre.fault(fault)
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
    assert (code, difference in text) == (73, True), text


@pytest.mark.parametrize(
    ("state", "fault", "stripe", "gives"),
    [
        ({"count_cap": 4}, "wrapper-pool", "-1", "-c 4 -S 4M -p disk"),
        ({"osts": [OST]}, "", "8", "-E -1 -c 1"),
    ],
)
def test_fewer_stripes_and_a_pool_that_a_wrapper_adds_are_accepted_and_told(
    on_lustre: FakeLustre, state: dict[str, Any], fault: str, stripe: str, gives: str
) -> None:
    on_lustre.give(**state)
    on_lustre.fault(fault)
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
    assert (code, gives in text) == (0, True), text


# --- what is shown


@both_dialects
@pytest.mark.parametrize(
    ("layout", "of", "shown"),
    [
        (None, "", r"new files get -c 1 -S .M \(inherited"),
        (PFL, "root", r"-E 256M -c 1 -S 4M -E -1 -c -1 -S 4M \(the file system's default"),
        (PFL, "folder", r"-E 256M -c 1 -S 4M -E -1 -c -1 -S 4M \(its own default"),
        ([{**RAID, "start": 3}], "folder", r"warning: new files get -c 1 -S 4M -i 3"),
        ([{**RAID, "count": 4, "pattern": "raid0,overstriped"}], "folder", r"-C 4"),
    ],
)
def test_show_and_auto_change_nothing_and_tell_what_new_files_get_and_whose_choice_it_is(
    on_lustre: FakeLustre, layout: list[dict[str, Any]] | None, of: str, shown: str
) -> None:
    if layout:
        on_lustre.give_layout(on_lustre.folder.parent if of == "root" else on_lustre.folder, layout)
    code, text = on_lustre.command("show", on_lustre.folder)
    assert code == 0
    assert "lustre at" in text
    assert re.search(shown, text), text
    line = apply_stripe(on_lustre.folder, "auto")
    assert "left as it is" in line
    assert re.search(shown, line), line
    assert on_lustre.setstripe_calls() == []


def test_show_tells_the_layout_of_a_file_and_of_what_is_not_there_yet(on_lustre: FakeLustre) -> None:
    file = on_lustre.folder / "stripe_count: 77"
    file.write_bytes(b"")
    on_lustre.give_layout(file, PFL)
    assert "-E 256M -c 1" in on_lustre.command("show", file)[1]
    code, text = on_lustre.command("show", on_lustre.folder / "not" / "yet")
    assert (code, f"shardprep lustre show '{on_lustre.folder}'\n" in text) == (66, True)
    on_lustre.fault("gibberish")
    assert on_lustre.command("show", file)[0] == 73


def test_show_tells_how_shards_lie_and_warns_where_one_ost_has_far_more_than_its_share(
    on_lustre: FakeLustre,
) -> None:
    shards = [on_lustre.folder / f"shard-{number:05d}.tar" for number in range(20)]
    for path in shards:
        path.touch()
        path.with_suffix(".idx").touch()
    first_ost = {str(path): number % 8 for number, path in enumerate(shards)}
    on_lustre.give(layouts={str(path): [RAID] for path in shards}, first_ost=first_ost)
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "20 of 20 shards looked at have -c 1 -S 4M\n" in text
    assert "they lie on 8 OSTs; OST 0 has most: 3" in text
    assert "warning" not in text
    on_lustre.give(first_ost=dict.fromkeys(map(str, shards), 5))
    assert "warning: OST 5" in on_lustre.command("show", on_lustre.folder)[1]
    on_lustre.give(no_layout=[str(shards[3])])
    assert "cannot be told" in on_lustre.command("show", on_lustre.folder)[1]


def test_show_warns_of_targets_that_are_full_closed_or_inactive(on_lustre: FakeLustre) -> None:
    changes: list[dict[str, Any]] = [
        *({"flags": flag} for flag in "SNDRI"),
        {"available": 1 << 20},
        {"error": errno.ENODATA},
        {"error": errno.ESHUTDOWN},
    ]
    on_lustre.give(osts=[{**OST, **each} for each in changes], mdt={**OST, "flags": "S"})
    text = on_lustre.command("show", on_lustre.folder)[1]
    for line in (
        *("OST 0 is out of space", "OST 1 is closed to new files", "OST 2 is degraded", "OST 3 is read-only"),
        *("OST 4 is out of inodes", "OST 5 is 96% full", "OST 6 is inactive", "OST 7 does not answer"),
        "MDT 0 is out of space",
    ):
        assert f"warning: {line}" in text, text


def test_show_and_apply_go_on_where_only_a_note_depends_on_lfs(on_lustre: FakeLustre) -> None:
    on_lustre.fault("hang-df")
    code, text = on_lustre.command("show", on_lustre.folder)
    assert (code, "new files get -c 1" in text, "unknown" in text) == (0, True, True), text
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", "8")[0] == 0


def test_a_folder_behind_a_link_is_asked_for_by_its_own_name(on_lustre: FakeLustre) -> None:
    link = on_lustre.folder.parent.parent / "link"
    link.symlink_to(on_lustre.folder)
    assert on_lustre.command("apply", link, "--stripe", "1")[0] == 0
    assert {call[-2] for call in on_lustre.calls() if call[0] == "setstripe"} == {str(on_lustre.folder)}


def test_the_longest_and_last_mount_point_wins(on_lustre: FakeLustre) -> None:
    place = on_lustre.folder.parent / "m"
    for name in ("data/x/y", "data/xy", "database"):
        (place / name).mkdir(parents=True)
    root = str(place).replace(" ", "\\040")
    table = f"""a {root} ext4 rw\nb {root}/data nfs rw\nc {root}/data/x lustre rw\nd {root}/data/x xfs rw
e {root}/da tmpfs rw\nbroken\n"""
    on_lustre.monkeypatch.setattr("lustre.lfs.read_mounts_table", lambda: table)
    wanted = {".": "ext4", "data": "nfs", "data/x/y": "xfs", "database": "ext4", "data/xy": "nfs"}
    for name, file_system in wanted.items():
        assert f"is on {file_system}, not on Lustre" in on_lustre.command("show", place / name)[1], name


# --- off Lustre, and without lfs


@pytest.mark.parametrize("where", ["off Lustre", "without lfs"])
def test_off_lustre_and_without_lfs_every_command_says_so_and_touches_nothing(
    on_lustre: FakeLustre, where: str
) -> None:
    folder, words = on_lustre.folder, "there is no lfs on PATH"
    if where == "off Lustre":
        on_lustre.monkeypatch.setattr("lustre.lfs.read_mounts_table", lambda: "/dev/vda / ext4 rw 0 0\n")
        words = "not on Lustre"
    else:
        on_lustre.monkeypatch.setenv("PATH", "/nonexistent")
    (folder / "x").write_bytes(b"precious")
    for name in ("", "x"):
        code, text = on_lustre.command("show", folder / name)
        assert (code, words in text) == (0, True)
    for name in ("", "x", "no"):
        code, text = on_lustre.command("apply", folder / name, "--stripe", "8")
        assert (code, words in text) == (0, True)
    assert words in apply_stripe(folder, "8")
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("x", b"precious")]
    assert on_lustre.calls() == []


def test_auto_never_fails_and_none_does_not_even_ask(on_lustre: FakeLustre) -> None:
    on_lustre.fault("gibberish")
    assert "left as it is" in apply_stripe(on_lustre.folder, "none")
    assert on_lustre.calls() == []
    assert "cannot be told" in apply_stripe(on_lustre.folder, "auto")


# --- room


NEED = Need(num_bytes=10**12, num_shards=1000)


@pytest.fixture
def as_user(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> None:
    """No quota binds root, so nobody asks for root's."""
    monkeypatch.setattr(os, "getuid", lambda: 1000)


@pytest.mark.usefixtures("as_user")
def test_what_fits_is_one_line_without_a_warning(on_lustre: FakeLustre) -> None:
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 1 << 40]})
    (line,) = space_lines(on_lustre.folder, NEED)
    for words in ("1.00 TB in 3,000 files", "8 OSTs: 6.60 TB", "1.00 M files", "1.13 PB", "1.10 T files"):
        assert words in line


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("state", "warning"),
    [
        ({"quota": {"-u": [5, 0, 1005, 7, 0, 0]}}, "your quota: 1.02 MB left"),
        ({"quota": {"-u": [5, 1005, 0, 7, 0, 0]}}, "your quota: 1.02 MB left"),
        ({"quota": {"-u": [5, 0, 0, 7, 10, 9]}}, "your quota: 2 files left"),
        ({"osts": [OST, {**OST, "available": 1}]}, "2 OSTs: 80.5 GB left"),
        ({"osts": [OST, {**OST, "flags": "S", "available": 1 << 40}]}, "1 OST: 80.5 GB left"),
        ({"inodes": 2999}, "inodes of MDTs and OSTs: 2,999 files left"),
        ({"mdt": {**OST, "flags": "S"}}, "inodes of MDTs and OSTs: 0 files left"),
        ({"osts": [{**OST, "available": 1 << 40, "inodes": 7}]}, "inodes of MDTs and OSTs: 7 files left"),
    ],
)
def test_each_limit_that_is_too_small_is_a_warning(
    on_lustre: FakeLustre, state: dict[str, object], warning: str
) -> None:
    on_lustre.give(**state)
    lines = [line for line in space_lines(on_lustre.folder, NEED) if line.startswith("warning")]
    (line,) = lines
    assert warning in line


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("quota-refused", "your quota: unknown"),
        ("df-fails", "free space: unknown"),
        ("hang", "your quota: unknown"),
        ("", "over the soft limit: writes fail in 3d1h1m1s"),
    ],
)
def test_what_is_not_told_is_unknown_and_no_warning(on_lustre: FakeLustre, fault: str, told: str) -> None:
    on_lustre.give(quota={"-u": [9, 5, 1 << 40, 7, 0, 0, "3d1h1m1s", "-"]})
    on_lustre.fault(fault)
    (line,) = space_lines(on_lustre.folder, NEED)
    assert told in line


@pytest.mark.usefixtures("as_user")
def test_plan_and_submit_warn_of_what_is_missing_and_go_on(
    on_lustre: FakeLustre, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    on_lustre.give(quota={"-u": [5, 0, 6, 7, 0, 9]})
    world = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "a line of text\n" * 500})
    planned = world.try_plan(num_shards=5)
    assert (planned.code, "warning: it will not fit: your quota: 2 files left" in planned.text) == (0, True)
    world.run(1, 2)
    submitted = call_main("submit", on_lustre.folder, "--mem_gb", 1)
    assert submitted.code == 0
    assert "B in 9 files" in submitted.text, "three shards are missing"
    assert "warning: it will not fit: your quota: 1.02 kB left" in submitted.text
    assert fake_slurm.sent(), "the job was sent all the same"


# --- no file is ever harmed


def test_the_trap_sees_a_setstripe_on_a_file_and_on_a_folder_with_files(on_lustre: FakeLustre) -> None:
    """What the fixture checks after every test is not vacuous."""
    file = on_lustre.folder / "file"
    file.write_bytes(b"precious")
    on_lustre.fault("empties-files")
    for path in (on_lustre.folder, file):
        subprocess.run(["lfs", "setstripe", "-c", "2", str(path)], check=True)
    assert file.read_bytes() == b""
    assert on_lustre.state()["violations"] == [str(on_lustre.folder), str(file)]
    on_lustre.give(violations=[])


def test_from_plan_to_batch_setstripe_runs_once_on_the_fresh_folder(
    on_lustre: FakeLustre, tmp_path: Path
) -> None:
    """Every command of the toolkit, on a Lustre whose lfs empties files."""
    pytest.importorskip("torch", reason="the loader needs it")
    on_lustre.fault("empties-files")
    world = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "a line of text\n" * 20})
    full = World(tmp_path, data_dir=on_lustre.folder.parent / "full")
    full.data_dir.mkdir()
    (full.data_dir / "precious").write_bytes(b"precious")
    assert full.try_plan(num_shards=2, stripe=4).code == 73
    assert full.try_plan(num_shards=2, stripe="auto").code == 0
    assert world.try_plan(num_shards=2, stripe="8x").code == 2
    for _ in range(2):
        world.plan(num_shards=2, stripe=4)
    for ended in (world.main("run", world.data_dir, num_proc=1), world.try_shard(1)):
        assert ended.code == 0
    world.verify()
    world.batches(1, global_batch_size=4)
    assert on_lustre.command("show", world.data_dir)[0] == 0
    assert on_lustre.setstripe_calls() == [EIGHT.replace("-c 8", "-c 4")]
    assert (full.data_dir / "precious").read_bytes() == b"precious"
