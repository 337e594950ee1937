"""The lustre package with a fake lfs that refuses what the real one refuses, and with each call broken.

By default a call by a command of another package is broken in one way; ``LFS_BREAKS=all`` (``make torture``)
breaks it in all ways.
"""

from __future__ import annotations

import errno
import json
import marshal
import os
import py_compile
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import pytest

from lustre import LustreError, Need, released_lines, space_lines, stripe_line
from tests.checkout import ROOT
from tests.slurm.fake_slurm import Desk, install_fake_slurm
from tests.world import Ended, World, call_main, refuses

pytestmark = pytest.mark.processes


@dataclass(frozen=True, kw_only=True)
class FakeLustre:
    """A folder that seems to be on Lustre, and the state of the fake lfs on PATH."""

    folder: Path
    lfs: Path
    state_file: Path
    patch: pytest.MonkeyPatch

    def state(self) -> dict[str, Any]:
        return marshal.loads(self.state_file.read_bytes()) if self.state_file.exists() else {}

    def give(self, **values: object) -> None:
        """Change the state of the servers."""
        self.state_file.write_bytes(marshal.dumps({**self.state(), **values}))

    def calls(self, *commands: str) -> list[list[str]]:
        """Return the arguments of calls of these lfs commands (default: all), each with its LC_ALL last."""
        return [call for call in self.state().get("calls", []) if not commands or call[0] in commands]

    def setstripe_calls(self) -> list[str]:
        """Return the options of each call of setstripe."""
        return [" ".join(call[1:-2]) for call in self.calls("setstripe")]

    def set_by_hand(self, options: str) -> None:
        """Set a layout of the folder, unless ``options`` is empty, as a user does with lfs setstripe."""
        if options:
            subprocess.run(["lfs", "setstripe", *options.split(), str(self.folder)], check=True)

    def mounts(self, *lines: str) -> None:
        """Simulate a table of mounted file systems."""
        table = "".join(f"{line}\n" for line in lines)
        self.patch.setattr("lustre.lfs.read_mounts_table", lambda: table)

    def fault(self, name: str) -> None:
        """Set a fault of lfs. Only df gets a short time limit: other calls may be slow on a busy machine."""
        self.patch.setenv("FAKE_LFS_FAULT", name)
        if name == "hang-df":
            self.patch.setattr("lustre.lfs.DF_TIMEOUT_S", 0.1)


@pytest.fixture
def on_lustre(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeLustre]:
    """An empty folder on Lustre with 8 OSTs. A test fails if setstripe runs on a file or non-empty folder."""
    tools, state_file = tmp_path / "bin", tmp_path / "lfs.state"
    tools.mkdir()
    # Compiled once, because tests call it often.
    compiled = tmp_path.parent / "fake_lfs.pyc"
    if not compiled.exists():
        py_compile.compile(str(ROOT / "tests" / "fake_lfs"), str(compiled), doraise=True)
    (tools / "lfs").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", str(compiled)])} "$@"\n')
    (tools / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LFS_STATE", str(state_file))
    monkeypatch.setenv("FAKE_LFS_DIALECT", getattr(request, "param", "2.17"))
    folder = tmp_path / "scratch file" / "O"
    folder.mkdir(parents=True)
    fake = FakeLustre(folder=folder, lfs=tools / "lfs", state_file=state_file, patch=monkeypatch)
    fake.fault("")
    root = str(folder.parent).replace(" ", "\\040")
    fake.mounts("/dev/vda / ext4 rw 0 0", f"10.0.0.1@tcp:/fakefs {root} lustre rw,flock 0 0")
    yield fake
    assert fake.state().get("violations", []) == [], "setstripe ran on a file or a folder with files"


def show(path: Path) -> Ended:
    return call_main("lustre", "show", path)


def apply(path: Path, stripe: str, *flags: str) -> Ended:
    return call_main("lustre", "apply", path, "--stripe", stripe, *flags)


MIB = 1 << 20
both_dialects = pytest.mark.parametrize("on_lustre", ["2.15", "2.17"], indirect=True)
RAID: dict[str, Any] = {"end": None, "count": 1, "size": 4 * MIB, "pattern": "raid0"}
PFL = [{**RAID, "end": 256 * MIB}, {**RAID, "count": -1}]
EIGHT = "-E 64M -c 1 -S 4M -E -1 -c 8 -S 4M"
DOM = "-E 64K -L mdt -E -1 -c 2 -S 4M"
OST = {"used": 25 << 20, "available": 75 << 20, "flags": ""}


# --- setting a layout and reading it back


class Apply(NamedTuple):
    """``apply --stripe`` on an empty folder, and its result."""

    stripe: str
    sets: str = ""  # options of the lfs setstripe call; "" if there is none
    says: Sequence[str] = ()
    code: int = 0
    by_hand: str = ""  # options of an earlier lfs setstripe by a user
    fault: str = ""
    state: Mapping[str, Any] = {}


def refused(stripe: str, *says: str, **facts: Any) -> Apply:
    return Apply(stripe, says=says, code=73, **facts)


PLAIN = {"1": "-c 1", "8": EIGHT, "1,4M": "-c 1 -S 4M", "1,flash": "-c 1 -p flash"}
ALL_OSTS, BY_HAND_IN_POOL = EIGHT.replace("-c 8", "-c -1"), "-c 2 -p flash"
IN_BOTH_VERSIONS = {
    "one stripe": Apply("1", "-c 1", ["-c 1 -S"]),
    "eight": Apply("8", EIGHT, [EIGHT]),
    "all": Apply("-1", ALL_OSTS, ["-c -1 -S 4M"]),
    "a size": Apply("8,1M", EIGHT.replace("-S 4M", "-S 1M"), ["-c 8 -S 1M"]),
    "a size and a pool": Apply("1,64K,disk", "-c 1 -S 64K -p disk", ["-c 1 -S 64K -p disk"]),
    "a pool": Apply("1,flash", "-c 1 -p flash", ["-p flash"]),
    "no pool": Apply("1,none", "-c 1", ["-c 1 -S"]),
    "as typed": Apply("-c 8", "-c 8", ["-c 8 -S"]),
    "more than the pool has": Apply("-c8 -p disk", "-c8 -p disk", ["-c 6", "-p disk"]),
    "as typed, on the metadata server": Apply(DOM, DOM, [DOM]),
    "no such pool": refused("2,nope", "nope", state={"pools": {"flash": [0]}}),
    "a pool without OSTs": refused("2,empty", "empty", state={"pools": {"empty": []}}),
}
APPLY = {
    **IN_BOTH_VERSIONS,
    "fewer, and a wrapper adds a pool": Apply(
        "-1", ALL_OSTS, ["-c 4 -S 4M -p disk"], fault="wrapper-pool", state={"count_cap": 4}),
    "one OST": Apply("8", EIGHT, ["-E -1 -c 1"], state={"osts": [OST]}),
    # A folder keeps its pool unless another pool or none is given.
    "the folder's pool": Apply("1", "-c 1 -p flash", by_hand=BY_HAND_IN_POOL),
    "the folder's pool given up": Apply("1,none", "-c 1", by_hand=BY_HAND_IN_POOL),
    "another pool": Apply("1,disk", "-c 1 -p disk", by_hand=BY_HAND_IN_POOL),
    # Only options for lfs as typed may replace tiers and mirrors.
    "tiers": refused(
        "4", "mdt", "flash", "disk", "--stripe '-c 8'",
        by_hand="-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"),
    "data on the metadata server": refused("4", "mdt", by_hand="-E 64K -L mdt -E -1 -c 1 -S 1M"),
    "mirrors": refused("4", "-N -E -1 -c 2 -S 4M -N -E -1 -c 2 -S 4M", by_hand="-N2 -c 2"),
    "tiers, and a layout as typed": Apply("-c 8", "-c 8", by_hand="-E 64K -L mdt -E -1 -c 1 -S 1M"),
    # Refusals of the server are printed with a remedy. After EACCES, lfs 2.16 removes an empty folder.
    **{
        f"{fault}, {stripe}": Apply(
            stripe, PLAIN[stripe], [f"exit code {code if stripe == '1' else 1}: ", *words], 73, fault=fault
        )
        for stripe in ("1", "8")
        for fault, code, words in (
            ("no-space", 28, ["No space left on device", "lfs df"]),
            ("no-quota", 122, ["Disk quota exceeded", "lfs quota -u"]),
            ("inactive-ost", 121, ["inactive OST among your specified 1 OST(s)"]),
            ("not-owner", 1, ["Operation not permitted", "owner"]),
            ("read-only", 30, ["Read-only", "node"]),
            ("eacces", 13, ["Permission denied"]),
        )
    },
    # A wrapper that changes options is noticed in any component, by the layout of new files.
    **{
        fault: Apply(stripe, PLAIN[stripe], [gets], 73, fault=fault)
        for fault, stripe, gets in (
            ("wrapper-size", "1,4M", "-c 1 -S 64K"),
            ("wrapper-no-pool", "1,flash", "-p flash"),
            ("wrapper-count-1", "8", "-E -1 -c 1"),
            ("wrapper-drops-last", "8", "-E 64M -c 1 -S 4M,"),
            ("wrapper-plain", "8", "-c 1 -S 4M,"),
            ("wrapper-ignores", "8", "-c 1 -S"),
            ("wrapper-start", "1", "-i 3"),
        )
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("name", "on_lustre"),
    [*((name, "2.17") for name in APPLY), *((name, "2.15") for name in IN_BOTH_VERSIONS)],
    indirect=["on_lustre"],
)
def test_apply_sets_the_requested_layout_and_checks_it_or_refuses(on_lustre: FakeLustre, name: str) -> None:
    row = APPLY[name]
    on_lustre.patch.setenv("LC_ALL", "ko_KR.UTF-8")
    on_lustre.set_by_hand(row.by_hand)
    on_lustre.give(**{**row.state, "calls": []})
    on_lustre.fault(row.fault)
    ended = apply(on_lustre.folder, row.stripe).ends(row.code, *row.says)
    assert on_lustre.setstripe_calls() == ([row.sets] if row.sets else []), ended.text
    assert {call[-1] for call in on_lustre.calls("setstripe", "getstripe")} == {"LC_ALL=C"}
    assert on_lustre.folder.is_dir()


# lfs reads 1000 as KiB, b as blocks of 512 bytes, an empty size as the default, and 0 as the default count.
# It accepts a layout without an end, after which writes fail. -d clears a layout; a path would be changed.
WRONG = (
    *("0", "-2", "2001", "8x", "", "1e3", " 8", "٨", "Auto"),
    *("8,1000", "8,131072b", "8,", "8,4G", "8,96K"),
    *("8,128M", "8,4M,a_pool_of_16_char", "8,fakefs.flash", "8,inherit", "8,4M,flash,x", "1G:1,-1:8"),
    *("-d", "-E 1G -c 1", "-c", "-c 8 /tmp", "--yaml=x", "-c 8 'x", "-f file", "--copy /tmp"),
)


def test_options_that_lfs_refuses_or_misinterprets_are_refused_before_it_runs(on_lustre: FakeLustre) -> None:
    for stripe in WRONG:
        apply(on_lustre.folder, stripe).ends(2)
    assert on_lustre.calls() == []


def test_apply_sets_a_layout_once_and_only_on_a_folder_without_shards(on_lustre: FakeLustre) -> None:
    """Otherwise it prints the lfs command, which changes only new files."""
    folder, shard = on_lustre.folder, on_lustre.folder / "shard-00000.tar"
    for name in ("jobs", "logs"):
        (folder / name).mkdir()
    apply(folder, "20", "--dry_run").ends(0, f"lfs setstripe {EIGHT.replace('-c 8', '-c 20')} '/")
    assert on_lustre.setstripe_calls() == [], "a dry run"
    link = folder.parent.parent / "link"  # lfs must get the real path
    link.symlink_to(folder)
    for _ in range(2):
        apply(link, "100").ends(0)
        shard.write_bytes(b"precious")
    assert {call[-2] for call in on_lustre.calls("setstripe")} == {str(folder)}
    on_lustre.fault("empties-files")
    for path in (shard, folder / "absent", folder):
        apply(path, "4").ends(73)
        apply(path, "-c 4", "--dry_run").ends(73)
    with refuses(LustreError, remedy=f"lfs setstripe {EIGHT.replace('-c 8', '-c 2')} '{folder}'"):
        stripe_line(folder, "2")
    assert shard.read_bytes() == b"precious"
    assert len(on_lustre.setstripe_calls()) == 1


# --- show


# Options of a user's lfs setstripe -> what show and plan print about the folder.
BY_HAND = {
    "": r"new files get -c 1 -S .M \(inherited",
    "-E 256M -c 1 -S 4M -E -1 -c -1 -S 4M": r"{} \(its own default",
    "-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk": r"{} \(its own default",
    "-c 1 -S 4M -i 3": r"warning: new files get {}",
    "-C 4": r"new files get -C 4 -S .M",
    "-E 1G -c 1 -S 4M -z 64M -E -1 -c 4 -S 4M -z 128M":
        r"get -E 64M -c 1 -S 4M -E 1G -z 64M -E 1G -c 4 -S 4M -E -1 -z 128M",
    "of the root": r"-E 256M -c 1 -S 4M -E -1 -c -1 -S 4M \(the file system's default",
}  # fmt: skip


@both_dialects
@pytest.mark.parametrize("options", BY_HAND)
def test_show_and_stripe_auto_print_the_layout_of_new_files_and_its_origin(
    on_lustre: FakeLustre, options: str
) -> None:
    if options == "of the root":
        on_lustre.give(layouts={str(on_lustre.folder.parent): PFL})
    else:
        on_lustre.set_by_hand(options)
    num_calls, shown = len(on_lustre.setstripe_calls()), BY_HAND[options].format(options)
    text = show(on_lustre.folder).ends(0, "lustre at").out
    lines = [stripe_line(on_lustre.folder, stripe) for stripe in ("auto", "none")]
    for printed in (text, lines[0]):
        assert re.search(shown, printed), printed
    assert all("not changed" in line for line in lines), lines
    assert len(on_lustre.setstripe_calls()) == num_calls


def test_show_prints_the_layout_of_a_file_and_the_distribution_of_shards(on_lustre: FakeLustre) -> None:
    shards = [on_lustre.folder / f"shard-{number:05d}.tar" for number in range(8)]
    for path in shards:
        path.touch()
        path.with_suffix(".idx").touch()
    (file := on_lustre.folder / "stripe_count: 77").touch()
    layouts, first_ost = ({str(path): it for path in shards} for it in ([RAID], 5))
    on_lustre.give(layouts={**layouts, str(file): PFL}, first_ost=dict(zip(layouts, range(8), strict=True)))
    assert "-E 256M -c 1" in show(file).out
    lie = ("8 of 8 shards looked at have -c 1 -S 4M\n", "they are on 8 OSTs; OST 0 has most: 1")
    assert "warning" not in show(on_lustre.folder).ends(0, *lie).text
    on_lustre.give(first_ost=first_ost)
    show(on_lustre.folder).ends(0, "warning: OST 5")
    on_lustre.give(no_layout=[str(shards[3])])
    show(on_lustre.folder).ends(0, "are unknown")


def test_show_warns_of_full_or_closed_targets_and_of_a_df_that_hangs(on_lustre: FakeLustre) -> None:
    changes: list[dict[str, Any]] = [{"flags": flag} for flag in "SNDRI"]
    changes += [{"available": 1 << 20}, {"error": errno.ENODATA}, {"error": errno.ESHUTDOWN}]
    on_lustre.give(osts=[{**OST, **each} for each in changes], mdt={**OST, "flags": "S"})
    troubles = (
        *("OST 0 is out of space", "OST 1 is closed to new files", "OST 2 is degraded", "OST 3 is read-only"),
        *("OST 4 is out of inodes", "OST 5 is 96% full", "OST 6 is inactive", "OST 7 does not answer"),
        "MDT 0 is out of space",
    )
    show(on_lustre.folder).ends(0, *(f"warning: {trouble}" for trouble in troubles))
    on_lustre.fault("hang-df")
    show(on_lustre.folder).ends(0, "new files get -c 1", "unknown")
    apply(on_lustre.folder, "8").ends(0)


def test_the_longest_and_last_mount_point_wins(on_lustre: FakeLustre) -> None:
    place = on_lustre.folder.parent / "m"
    for name in ("data/x/y", "data/xy", "database"):
        (place / name).mkdir(parents=True)
    root = str(place).replace(" ", "\\040")
    on_lustre.mounts(
        f"a {root} ext4 rw", f"b {root}/data nfs rw", f"c {root}/data/x lustre rw", f"d {root}/data/x xfs rw",
        f"e {root}/da tmpfs rw", "broken",
    )  # fmt: skip
    wanted = {".": "ext4", "data": "nfs", "data/x/y": "xfs", "database": "ext4", "data/xy": "nfs"}
    for name, file_system in wanted.items():
        show(place / name).ends(0, f"is on {file_system}, not on Lustre")


@pytest.mark.parametrize("words", ["not on Lustre", "there is no lfs on PATH"])
def test_without_lustre_or_lfs_commands_print_a_note(on_lustre: FakeLustre, words: str) -> None:
    folder = on_lustre.folder
    (folder / "file").touch()
    if words == "not on Lustre":
        on_lustre.mounts("/dev/vda / ext4 rw 0 0")
    else:
        on_lustre.patch.setenv("PATH", "/nonexistent")
    for path in (folder, folder / "file"):
        show(path).ends(0, words)
        apply(path, "8").ends(0, words)
    assert words in stripe_line(folder, "8")
    assert on_lustre.calls() == []


# --- space


NEED = Need(num_bytes=10**12, num_shards=1000)
ROOM = "inodes of MDTs and OSTs"
# State of the servers, and the only warning.
LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"quota": {"-u": [5, 1005, 0, 7, 0, 0]}}, "your quota: 1.02 MB left"),
    ({"quota": {"-u": [5, 0, 0, 7, 10, 9]}}, "your quota: 2 files left"),
    ({"osts": [OST, {**OST, "available": 1}]}, "2 OSTs: 80.5 GB left"),
    ({"osts": [OST, {**OST, "flags": "S", "available": 1 << 40}]}, "1 OST: 80.5 GB left"),
    ({"inodes": 2999}, f"{ROOM}: 2,999 files left"),
    ({"mdt": {**OST, "flags": "S"}}, f"{ROOM}: 0 files left"),
    ({"osts": [{**OST, "available": 1 << 40, "inodes": 7}]}, f"{ROOM}: 7 files left"),
]


def test_each_limit_that_is_too_small_is_a_warning(on_lustre: FakeLustre) -> None:
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # root has no quota
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 1 << 40]})
    (line,) = space_lines(on_lustre.folder, NEED)
    for words in ("1.00 TB in 3,000 files", "8 OSTs: 6.60 TB", "1.00 M files", "1.13 PB", "1.10 T files"):
        assert words in line
    for state, warning in LIMITS:
        on_lustre.state_file.unlink()
        on_lustre.give(**state)
        (line,) = (each for each in space_lines(on_lustre.folder, NEED) if each.startswith("warning"))
        assert warning in line


def test_plan_and_submit_warn_of_missing_space_and_continue(on_lustre: FakeLustre, tmp_path: Path) -> None:
    desk = Desk(data=on_lustre.folder, place=install_fake_slurm(tmp_path, on_lustre.patch))
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # root has no quota
    on_lustre.give(quota={"-u": [5, 0, 6, 7, 0, 9]})
    world = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "a line of text\n" * 500})
    world.try_plan(num_shards=5).ends(0, "warning: it will not fit: your quota: 2 files left")
    world.run(1, 2)
    missing = ("B in 9 files", "warning: it will not fit: your quota: 1.02 kB left")  # three shards
    call_main("submit", desk.data, "--mem_gb", 1).ends(0, *missing)
    assert desk.sent(), "the job is sent anyway"


# --- inputs that are released to an archive


def test_plan_and_run_say_how_many_inputs_are_released_until_they_are_restored(on_lustre: FakeLustre) -> None:
    root = on_lustre.folder.parent
    world = World(root / "raw's", data_dir=root / "D")
    world.raw({f"{name}.txt": "a line of text\n" * 100 for name in "abcd"})
    on_lustre.give(released=["a.txt", "c.txt"])
    found = "2 of 4 inputs are released"
    world.try_plan(num_shards=1).ends(0, found, "3.00 kB")
    assert len(on_lustre.calls("hsm_state")) == 1
    said = call_main("run", world.data_dir).ends(0, found).text
    [command] = re.findall(r"To restore all at once: (.*)$", said, re.MULTILINE)
    subprocess.run(["bash", "-c", command], check=True)
    assert "released" not in call_main("run", world.data_dir, "--shards", 0, "--again").ends(0).text


def test_of_many_inputs_a_sample_is_looked_at_by_one_call(on_lustre: FakeLustre) -> None:
    root = on_lustre.folder.parent
    paths = [root / f"{number:04d}.txt" for number in range(2500)]
    for path in paths:
        path.write_text("x" * 1000)
    on_lustre.give(released=[path.name for path in paths[::2]] + [path.name for path in paths[1::4]])
    [line] = released_lines(root, paths)
    [call] = on_lustre.calls("hsm_state")
    assert len(call) - 2 <= 1000
    [number] = re.findall(r"about ([0-9,]+) of 2,500 inputs", line)
    assert 1700 <= int(number.replace(",", "")) <= 2050, "three quarters are released"


def test_what_is_not_known_about_released_inputs_is_a_note(on_lustre: FakeLustre) -> None:
    """Also: nothing is said about other file systems, and names with line breaks count as not looked at."""
    root = on_lustre.folder.parent
    broken = root / "b\nc: (0x0000000d) released"
    for path in (root / "a", broken):
        path.touch()
    on_lustre.give(released=["a"])
    assert released_lines(Path("/"), [root / "a"]) == []
    [line] = released_lines(root, [root / "a", broken])
    assert "about 2 of 2 inputs" in line
    [line] = released_lines(root, [root / "gone"])
    assert line.startswith("note: ")
    on_lustre.fault("not-lustre")
    [line] = released_lines(root, [root / "a"])
    assert line.startswith("note: ")


# --- setstripe never runs on files


def test_the_fixture_notices_a_setstripe_on_a_file_or_a_folder_with_files(on_lustre: FakeLustre) -> None:
    file = on_lustre.folder / "file"
    file.write_bytes(b"precious")
    on_lustre.fault("empties-files")
    for path in (on_lustre.folder, file):
        subprocess.run(["lfs", "setstripe", "-c", "2", str(path)], check=True)
    assert file.read_bytes() == b""
    assert on_lustre.state()["violations"] == [str(on_lustre.folder), str(file)]
    on_lustre.give(violations=[])


def test_from_plan_to_verify_setstripe_runs_once(on_lustre: FakeLustre, tmp_path: Path) -> None:
    """With an lfs that empties files."""
    on_lustre.fault("empties-files")
    world = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "a line of text\n" * 20})
    full = World(tmp_path, data_dir=on_lustre.folder.parent / "full")
    full.data_dir.mkdir()
    (full.data_dir / "precious").write_bytes(b"precious")
    full.try_plan(num_shards=2, stripe=4).ends(73)
    full.plan(num_shards=2, stripe="auto")
    on_lustre.fault("gibberish")
    world.try_plan(num_shards=2, stripe=4).ends(73)
    on_lustre.fault("empties-files")
    for _ in range(2):
        world.plan(num_shards=2, stripe=4)
    world.main("run", world.data_dir, num_proc=1).ends(0)
    world.run(1).verify()
    show(world.data_dir).ends(0)
    assert on_lustre.setstripe_calls() == [EIGHT.replace("-c 8", "-c 4")]
    assert (full.data_dir / "precious").read_bytes() == b"precious"


# --- recordings of two versions of lfs


MOUNT = "/mnt/fakefs"


def recorded(version: str) -> dict[str, Any]:
    path = ROOT / "tests" / "data" / "lfs_recorded" / f"{version}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


@both_dialects
def test_the_fake_prints_and_exits_as_the_genuine_lfs_did(on_lustre: FakeLustre) -> None:
    on_lustre.patch.setenv("FAKE_LFS_DEFAULT_BYTES", str(4 << 20))
    root, record = on_lustre.folder.parent, recorded(os.environ["FAKE_LFS_DIALECT"])
    for name in ("orion", "i3", "d"):
        (root / name).mkdir()
    for name in ("f00", "f01", "f02"):
        (root / name).touch()
    for case in record["cases"]:
        words = [word.replace(MOUNT, str(root)) for word in case["argv"]]
        if words[1] == "getstripe":
            words.insert(2, "-y")
        on_lustre.give(**{**record["servers"], **case.get("state", {})})
        on_lustre.fault(case.get("fault", ""))
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        said = [text.replace(str(root), MOUNT) for text in (done.stdout, done.stderr)]
        assert (done.returncode, *said) == (case["exit"], case["stdout"], case["stderr"]), case


GRACE_OVER_2_15 = """Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/mnt/fakefs
                9*       5    1000    none     100       0       0       -
"""
SOFT = "1.02 GB left (over the soft limit: writes fail in 3d1h1m1s)"
# A recorded answer of lfs (or another one) -> the begin of each quota in the line about space.
QUOTAS: dict[str, list[str]] = {
    "quota, within": ["11.3 GB left", "100 files left"],
    "quota, over the soft limit": [SOFT, "100 files left"],
    "quota, inaccurate": ["1.02 GB left", "100 files left"],
    "quota, no limit": [],
    "quota, its grace over": ["0 B left", "100 files left"],
    "quota refused (EPERM)": ["unknown"],
    GRACE_OVER_2_15: ["0 B left"],
    "  Filesystem  kbytes": ["unknown"],
}


def test_quotas_are_read_as_what_they_leave(on_lustre: FakeLustre) -> None:
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # root has no quota
    answers = {case["case"]: case for case in recorded("2.17")["cases"]}
    fake = on_lustre.lfs.read_text().partition("\n")[2]
    for name, rooms in QUOTAS.items():
        answer = answers.get(name, {"stdout": name, "stderr": "", "exit": 0})
        said = f"printf %s {shlex.quote(answer['stdout'])}; printf %s {shlex.quote(answer['stderr'])} >&2"
        on_lustre.lfs.write_text(
            f"#!/bin/sh\n[ $1 != quota ] || {{ {said}; exit {answer['exit']}; }}\n{fake}"
        )
        line, *_ = space_lines(on_lustre.folder, Need(num_bytes=1, num_shards=0))
        printed = re.findall("your quota: ([^;]*)", line)
        assert len(printed) == len(rooms), line
        assert all(words.startswith(room) for words, room in zip(printed, rooms, strict=True)), line


# --- broken calls of lfs


GARBAGE = b"\0lmm_stripe_count: many\n/ [OST:x] \xff 12%: (0xzz) quota\nFilesystem kbytes \n1 2 3 4 5 6 7 x\n"
NO_ANSWER = subprocess.TimeoutExpired("lfs", 1)
HOWS: dict[str, dict[str, Any]] = {  # kind of fault -> attributes of the process, if it starts
    "exit": {"communicate.return_value": (b"", b""), "returncode": 71},
    "garbage": {"communicate.return_value": (GARBAGE, b""), "returncode": 0},
    "signal": {"communicate.return_value": (b"", b""), "returncode": -11},
    "hang": {"communicate.side_effect": NO_ANSWER, "wait.side_effect": NO_ANSWER, "returncode": None},
    "cannot start": {},
}
# Command (O is the folder) -> its calls of lfs.
PLAN = "plan --input_dir O/raw --output_dir O/new --model_id O/made/tokenizer"
COMMANDS = {
    PLAN: "hsm_state getstripe df df quota",
    "shard --shard_id 0 --output_dir O/planned": "",
    "submit O/planned --mem_gb 1": "df df quota",
    "status O/made": "",
    "verify O/made": "",
    "stage O/made --to O/staged": "",
    "lustre show O/made": "getstripe df df getstripe getstripe",
    "lustre apply O/empty --stripe 2": "getstripe df df setstripe getstripe",
    "lustre apply O/empty --stripe 2,disk --dry_run": "getstripe pool_list pool_list",
}


@dataclass
class CallsOfLfs:
    """Replaces Popen and breaks one of the calls. Answers of the fake lfs are cached."""

    answers: dict[tuple[str, ...], Mock] = field(default_factory=dict)
    seen: list[str] = field(default_factory=list)
    broken: int = -1
    how: str = ""

    def popen(self, words: Sequence[str], *, env: dict[str, str], **_: Any) -> Mock:
        key = (*words, *self.seen)  # the answer may depend on an earlier setstripe
        self.seen.append(words[1])
        if len(self.seen) - 1 == self.broken:
            if self.how == "cannot start":
                raise OSError(8, "Exec format error")
            return Mock(**HOWS[self.how])
        if key not in self.answers:
            done = subprocess.run(words, check=False, capture_output=True, env=env)
            answer = {"communicate.return_value": (done.stdout, done.stderr), "returncode": done.returncode}
            self.answers[key] = Mock(**answer)
        return self.answers[key]


def test_a_broken_lfs_fails_no_command_except_show_and_apply(on_lustre: FakeLustre, tmp_path: Path) -> None:
    folder, template, calls = on_lustre.folder, tmp_path / "template", CallsOfLfs()
    names = {**vars(subprocess), "Popen": calls.popen}
    on_lustre.patch.setattr("lustre.lfs.subprocess", SimpleNamespace(**names))
    install_fake_slurm(tmp_path, on_lustre.patch)
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # root has no quota
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 0]})
    World(folder, data_dir=folder / "made").raw({"a.txt": "one\ntwo\n" * 9}).make()
    World(folder, data_dir=folder / "planned").plan()
    (folder / "empty").mkdir()
    folder.rename(template)

    def run(command: str, broken: int = -1, how: str = "") -> int:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(template, folder)
        calls.seen, calls.broken, calls.how = [], broken, how
        return call_main(*(word.replace("O/", f"{folder}/") for word in command.split())).code

    for command, asked in COMMANDS.items():
        assert (run(command), " ".join(calls.seen)) == (0, asked), command
        codes = set()
        for broken, call in enumerate(asked.split()):
            is_all = os.environ.get("LFS_BREAKS") == "all" or command.startswith("lustre")
            for how in HOWS if is_all else [[*HOWS][broken % len(HOWS)]]:
                code = run(command, broken, how)
                assert len(calls.seen) > broken, "the broken call was not reached"
                assert code == 0 or call != "df", "df is only for a note"
                codes.add(code)
        assert codes <= ({0, 73} if command.startswith("lustre") else {0}), command
        assert 73 in codes or not command.startswith("lustre"), command


# --- pools and options as typed


@both_dialects
@pytest.mark.parametrize(
    "stripe", ["-c 4 -p empty", "-E 1G -c 1 -p flash -E -1 -c 4 --pool=fakefs.empty", "-p gone"]
)
def test_a_typed_pool_without_osts_is_refused_before_setstripe(on_lustre: FakeLustre, stripe: str) -> None:
    on_lustre.give(pools={"flash": [0, 1], "empty": []})
    apply(on_lustre.folder, stripe).ends(73, "one of: ")
    assert not on_lustre.setstripe_calls()


@both_dialects
def test_space_is_that_of_the_folders_pool(on_lustre: FakeLustre) -> None:
    """Its OSTs are full, although others are empty."""
    full = {"used": 1 << 30, "available": 1, "flags": ""}
    on_lustre.give(osts=[full, full, *[OST] * 6], pools={"flash": [0, 1], "disk": [2, 3]})
    on_lustre.set_by_hand("-c 2 -p flash")
    lines = space_lines(on_lustre.folder, Need(num_bytes=10 << 20, num_shards=1))
    assert "2 OSTs of pool flash" in lines[0]
    assert any(line.startswith("warning: it will not fit: 2 OSTs of pool flash") for line in lines)
    on_lustre.set_by_hand("-c 2 -p disk")
    lines = space_lines(on_lustre.folder, Need(num_bytes=10 << 20, num_shards=1))
    assert not any("will not fit" in line for line in lines)


@both_dialects
@pytest.mark.parametrize("stripe", ["-c 2001", "-S 100", "-c many"])
def test_wrong_options_are_answered_with_their_page_not_with_the_servers(
    on_lustre: FakeLustre, stripe: str
) -> None:
    said = apply(on_lustre.folder, stripe).ends(73).err
    assert "man lfs-setstripe" in said
    assert "lfs df" not in said
