"""The lustre package against a fake lfs that refuses what the real one refuses."""

from __future__ import annotations

import errno
import json
import os
import re
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

from lustre import LustreError, Need, space_lines, stripe_line
from tests.checkout import ROOT
from tests.slurm.fake_slurm import install_fake_slurm
from tests.world import World, call_main

if TYPE_CHECKING:
    from tests.lustre.conftest import FakeLustre

pytestmark = pytest.mark.processes

MIB = 1 << 20
both_dialects = pytest.mark.parametrize("on_lustre", ["2.15", "2.17"], indirect=True)
RAID: dict[str, Any] = {"end": None, "count": 1, "size": 4 * MIB, "pattern": "raid0"}
PFL = [{**RAID, "end": 256 * MIB}, {**RAID, "count": -1}]
EIGHT = "-E 64M -c 1 -S 4M -E -1 -c 8 -S 4M"
DOM = "-E 64K -L mdt -E -1 -c 2 -S 4M"
OST = {"used": 25 << 20, "available": 75 << 20, "flags": ""}


# --- a layout is asked for, set and read back


class Apply(NamedTuple):
    """``apply --stripe`` for an empty folder: what is asked for, and what comes of it."""

    stripe: str
    sets: str = ""  # the options of the one lfs setstripe; none where it is not run
    says: Sequence[str] = ()
    code: int = 0
    by_hand: str = ""  # options of somebody's own lfs setstripe before
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
    # The pool of a folder stays unless another or none is named.
    "the folder's pool": Apply("1", "-c 1 -p flash", by_hand=BY_HAND_IN_POOL),
    "the folder's pool given up": Apply("1,none", "-c 1", by_hand=BY_HAND_IN_POOL),
    "another pool": Apply("1,disk", "-c 1 -p disk", by_hand=BY_HAND_IN_POOL),
    # Tiers and mirrors are dropped by a layout as typed alone.
    "tiers": refused(
        "4", "mdt", "flash", "disk", "--stripe '-c 8'",
        by_hand="-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"),
    "data on the metadata server": refused("4", "mdt", by_hand="-E 64K -L mdt -E -1 -c 1 -S 1M"),
    "mirrors": refused("4", "-N -E -1 -c 2 -S 4M -N -E -1 -c 2 -S 4M", by_hand="-N2 -c 2"),
    "tiers, and a layout as typed": Apply("-c 8", "-c 8", by_hand="-E 64K -L mdt -E -1 -c 1 -S 1M"),
    # What the server refuses is told with what to do; lfs 2.16 and later remove an empty folder after EACCES.
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
    # A wrapper that rewrites options is noticed in any component, by what new files get.
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
def test_a_layout_is_set_as_asked_and_read_back_or_refused(on_lustre: FakeLustre, name: str) -> None:
    row = APPLY[name]
    on_lustre.patch.setenv("LC_ALL", "ko_KR.UTF-8")
    on_lustre.set_by_hand(row.by_hand)
    on_lustre.give(**{**row.state, "calls": []})
    on_lustre.fault(row.fault)
    code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", row.stripe)
    assert (code, on_lustre.setstripe_calls()) == (row.code, [row.sets] if row.sets else []), text
    assert all(words in text for words in row.says), text
    asked = [call for call in on_lustre.calls() if call[0] in {"setstripe", "getstripe"}]
    assert {call[-1] for call in asked} == {"LC_ALL=C"}
    assert on_lustre.folder.is_dir()


# lfs reads 1000 as KiB, b as blocks of 512, an empty size as the default and 0 as the default number. It
# takes a layout without an end, past which writes fail. -d clears a layout; a path would be changed.
WRONG = (
    *("0", "-2", "2001", "8x", "", "1e3", " 8", "٨", "Auto"),
    *("8,1000", "8,131072b", "8,", "8,4G", "8,96K"),
    *("8,128M", "8,4M,a_pool_of_16_char", "8,fakefs.flash", "8,inherit", "8,4M,flash,x", "1G:1,-1:8"),
    *("-d", "-E 1G -c 1", "-c", "-c 8 /tmp", "--yaml=x", "-c 8 'x", "-f file", "--copy /tmp"),
)


def test_what_lfs_refuses_or_takes_amiss_is_refused_before_it_runs(on_lustre: FakeLustre) -> None:
    for stripe in WRONG:
        code, text = on_lustre.command("apply", on_lustre.folder, "--stripe", stripe)
        assert (code, on_lustre.calls()) == (2, []), text


def test_a_layout_is_set_once_and_never_for_what_holds_more_than_jobs_and_logs(on_lustre: FakeLustre) -> None:
    """The line of lfs is told, by which new files alone get it."""
    folder, dry = on_lustre.folder, "--dry_run"
    for name in ("jobs", "logs"):
        (folder / name).mkdir()
    code, text = on_lustre.command("apply", folder, "--stripe", "20", dry)
    assert (code, f"lfs setstripe {EIGHT.replace('-c 8', '-c 20')} '/" in text) == (0, True)
    assert on_lustre.setstripe_calls() == [], "dry"
    link = folder.parent.parent / "link"  # lfs is asked for the folder's own name
    link.symlink_to(folder)
    for _ in range(2):
        assert on_lustre.command("apply", link, "--stripe", "100")[0] == 0
        (folder / "shard-00000.tar").write_bytes(b"precious")
    assert {call[-2] for call in on_lustre.calls() if call[0] == "setstripe"} == {str(folder)}
    on_lustre.fault("empties-files")
    for path in (folder / "shard-00000.tar", folder / "absent", folder):
        assert on_lustre.command("apply", path, "--stripe", "4")[0] == 73
        assert on_lustre.command("apply", path, "--stripe", "-c 4", dry)[0] == 73
    with pytest.raises(LustreError) as caught:
        stripe_line(folder, "2")
    assert caught.value.remedy == f"lfs setstripe {EIGHT.replace('-c 8', '-c 2')} '{folder}'"
    assert (folder / "shard-00000.tar").read_bytes() == b"precious"
    assert len(on_lustre.setstripe_calls()) == 1


# --- what is shown


# What somebody gave a folder by hand -> what show and plan tell of it.
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
def test_show_and_auto_tell_what_new_files_get_and_whose_choice_it_is(
    on_lustre: FakeLustre, options: str
) -> None:
    if options == "of the root":
        on_lustre.give(layouts={str(on_lustre.folder.parent): PFL})
    else:
        on_lustre.set_by_hand(options)
    num_calls, shown = len(on_lustre.setstripe_calls()), BY_HAND[options].format(options)
    code, text = on_lustre.command("show", on_lustre.folder)
    assert (code, "lustre at" in text) == (0, True)
    assert re.search(shown, text), text
    line = stripe_line(on_lustre.folder, "auto")
    assert ("left as it is" in line, bool(re.search(shown, line))) == (True, True), line
    assert len(on_lustre.setstripe_calls()) == num_calls


def test_show_tells_the_layout_of_a_file_and_of_what_is_not_there_yet(on_lustre: FakeLustre) -> None:
    file = on_lustre.folder / "stripe_count: 77"
    file.write_bytes(b"")
    on_lustre.give(layouts={str(file): PFL})
    assert "-E 256M -c 1" in on_lustre.command("show", file)[1]
    code, text = on_lustre.command("show", on_lustre.folder / "not" / "yet")
    assert (code, f"shardprep lustre show '{on_lustre.folder}'\n" in text) == (66, True)
    on_lustre.fault("gibberish")
    assert on_lustre.command("show", file)[0] == 73


def test_show_tells_how_shards_lie_and_warns_of_an_ost_with_most(on_lustre: FakeLustre) -> None:
    shards = [on_lustre.folder / f"shard-{number:05d}.tar" for number in range(8)]
    for path in shards:
        path.touch()
        path.with_suffix(".idx").touch()
    layouts, first_ost = ({str(path): it for path in shards} for it in ([RAID], 5))
    on_lustre.give(layouts=layouts, first_ost={name: number for number, name in enumerate(layouts)})
    text = on_lustre.command("show", on_lustre.folder)[1]
    assert "8 of 8 shards looked at have -c 1 -S 4M\n" in text
    assert "they lie on 8 OSTs; OST 0 has most: 1" in text
    assert "warning" not in text
    on_lustre.give(first_ost=first_ost)
    assert "warning: OST 5" in on_lustre.command("show", on_lustre.folder)[1]
    on_lustre.give(no_layout=[str(shards[3])])
    assert "cannot be told" in on_lustre.command("show", on_lustre.folder)[1]


def test_show_warns_of_full_or_closed_targets_and_notes_a_df_that_hangs(on_lustre: FakeLustre) -> None:
    changes: list[dict[str, Any]] = [{"flags": flag} for flag in "SNDRI"]
    changes += [{"available": 1 << 20}, {"error": errno.ENODATA}, {"error": errno.ESHUTDOWN}]
    on_lustre.give(osts=[{**OST, **each} for each in changes], mdt={**OST, "flags": "S"})
    text = on_lustre.command("show", on_lustre.folder)[1]
    for line in (
        *("OST 0 is out of space", "OST 1 is closed to new files", "OST 2 is degraded", "OST 3 is read-only"),
        *("OST 4 is out of inodes", "OST 5 is 96% full", "OST 6 is inactive", "OST 7 does not answer"),
        "MDT 0 is out of space",
    ):
        assert f"warning: {line}" in text, text
    on_lustre.fault("hang-df")
    code, text = on_lustre.command("show", on_lustre.folder)
    assert (code, "new files get -c 1" in text, "unknown" in text) == (0, True, True), text
    assert on_lustre.command("apply", on_lustre.folder, "--stripe", "8")[0] == 0


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
        assert f"is on {file_system}, not on Lustre" in on_lustre.command("show", place / name)[1], name


# --- off Lustre, and without lfs


@pytest.mark.parametrize("words", ["not on Lustre", "there is no lfs on PATH"])
def test_off_lustre_and_without_lfs_commands_say_so(on_lustre: FakeLustre, words: str) -> None:
    folder = on_lustre.folder
    (folder / "x").write_bytes(b"precious")
    assert "left as it is" in stripe_line(folder, "none")
    if words == "not on Lustre":
        on_lustre.mounts("/dev/vda / ext4 rw 0 0")
    else:
        on_lustre.patch.setenv("PATH", "/nonexistent")
    told = [on_lustre.command("show", folder / name) for name in ("", "x")]
    told += [on_lustre.command("apply", folder / name, "--stripe", "8") for name in ("", "x", "no")]
    told += [(0, stripe_line(folder, "8"))]
    assert all((code, words in text) == (0, True) for code, text in told), told
    assert [(path.name, path.read_bytes()) for path in folder.iterdir()] == [("x", b"precious")]
    assert on_lustre.calls() == []


# --- room


NEED = Need(num_bytes=10**12, num_shards=1000)
ROOM = "inodes of MDTs and OSTs"
# What the servers hold -> the one warning.
LIMITS: list[tuple[dict[str, Any], str]] = [
    ({"quota": {"-u": [5, 1005, 0, 7, 0, 0]}}, "your quota: 1.02 MB left"),
    ({"quota": {"-u": [5, 0, 0, 7, 10, 9]}}, "your quota: 2 files left"),
    ({"osts": [OST, {**OST, "available": 1}]}, "2 OSTs: 80.5 GB left"),
    ({"osts": [OST, {**OST, "flags": "S", "available": 1 << 40}]}, "1 OST: 80.5 GB left"),
    ({"inodes": 2999}, f"{ROOM}: 2,999 files left"),
    ({"mdt": {**OST, "flags": "S"}}, f"{ROOM}: 0 files left"),
    ({"osts": [{**OST, "available": 1 << 40, "inodes": 7}]}, f"{ROOM}: 7 files left"),
]


def test_what_fits_is_one_line_and_each_limit_that_is_too_small_is_a_warning(on_lustre: FakeLustre) -> None:
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # no quota binds root, so nobody asks for it
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 1 << 40]})
    (line,) = space_lines(on_lustre.folder, NEED)
    for words in ("1.00 TB in 3,000 files", "8 OSTs: 6.60 TB", "1.00 M files", "1.13 PB", "1.10 T files"):
        assert words in line
    for state, warning in LIMITS:
        on_lustre.state_file.unlink()
        on_lustre.give(**state)
        (line,) = (each for each in space_lines(on_lustre.folder, NEED) if each.startswith("warning"))
        assert warning in line


def test_plan_and_submit_warn_of_what_is_missing_and_go_on(on_lustre: FakeLustre, tmp_path: Path) -> None:
    fake_slurm = install_fake_slurm(tmp_path, on_lustre.patch)
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)
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


def test_from_plan_to_verify_setstripe_runs_once(on_lustre: FakeLustre, tmp_path: Path) -> None:
    """On a Lustre whose lfs empties files. The loader knows no lfs."""
    on_lustre.fault("empties-files")
    world = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "a line of text\n" * 20})
    full = World(tmp_path, data_dir=on_lustre.folder.parent / "full")
    full.data_dir.mkdir()
    (full.data_dir / "precious").write_bytes(b"precious")
    assert full.try_plan(num_shards=2, stripe=4).code == 73
    assert full.try_plan(num_shards=2, stripe="auto").code == 0
    assert world.try_plan(num_shards=2, stripe="8x").code == 2
    on_lustre.fault("gibberish")
    assert world.try_plan(num_shards=2, stripe=4).code == 73
    on_lustre.fault("empties-files")
    for _ in range(2):
        world.plan(num_shards=2, stripe=4)
    for ended in (world.main("run", world.data_dir, num_proc=1), world.try_shard(1)):
        assert ended.code == 0
    world.verify()
    assert on_lustre.command("show", world.data_dir)[0] == 0
    assert on_lustre.setstripe_calls() == [EIGHT.replace("-c 8", "-c 4")]
    assert (full.data_dir / "precious").read_bytes() == b"precious"


# --- what the genuine lfs of two versions printed, over 8 OSTs, one MDT and the pools flash, disk, empty


MOUNT = "/mnt/fakefs"
BIG_OST = {"used": 268435456, "available": 805306368, "flags": ""}
TROUBLE: dict[str, Any] = {
    "osts": [
        *(
            BIG_OST,
            {**BIG_OST, "error": errno.ESHUTDOWN},
            {**BIG_OST, "error": errno.EAGAIN},
            BIG_OST,
        ),
        *({"used": 1073741000, "available": 824, "flags": "S"}, {**BIG_OST, "flags": "I", "inodes": 0}),
        *(BIG_OST, BIG_OST),
    ],
    "mdt": {"used": 67108000, "available": 864, "flags": "S"},
    "inodes": 0,
}
WITHIN = [9000000, 18000000, 20000000, 100, 0, 200]
INACCURATE = [9000000, 8000000, 10000000, 100, 0, 200]
OVER = [19000000, 18000000, 20000000, 100, 0, 200]
# What the emulated servers held in a case, by its name. To 2.15 they gave no limits of quotas.
STATES: dict[str, dict[str, Any]] = {
    "df: OST 1 ESHUTDOWN, 2 EAGAIN, 4 full (S), 5 without inodes (I), MDT full (S)": TROUBLE,
    "its inodes": TROUBLE,
    "quota, within": {"quota": {"-u": WITHIN}},
    "quota, over the soft limit": {"quota": {"-u": [*OVER, "3d1h1m1s", "-"]}},
    "quota, inaccurate": {"quota": {"-u": [*INACCURATE, "3d1h1m1s", "-"]}, "inaccurate": True},
    "quota, no limit": {"quota": {"-u": [9000000, 0, 0, 100, 0, 0]}},
    "quota, its grace over": {"quota": {"-u": [*OVER, "expired", "-"]}},
}


@both_dialects
def test_the_fake_prints_and_exits_as_the_genuine_lfs_did(on_lustre: FakeLustre) -> None:
    on_lustre.patch.setenv("FAKE_LFS_DEFAULT_BYTES", str(4 << 20))
    root = on_lustre.folder.parent
    for name in ("orion", "i3", "d"):
        (root / name).mkdir()
    usual: dict[str, Any] = {
        "osts": [BIG_OST] * 8,
        "inaccurate": False,
        "inodes": 1000000,
        "mdt": BIG_OST,
    }
    usual |= {"pools": {"flash": [0, 1], "disk": [2, 3, 4, 5, 6, 7], "empty": []}}
    recorded = ROOT / "tests" / "data" / "lfs_recorded" / f"{on_lustre.dialect}.json"
    different = []
    for case in json.loads(recorded.read_text(encoding="utf-8"))["cases"]:
        words = [word.replace(MOUNT, str(root)) for word in case["argv"]]
        if words[1] == "getstripe" and "-y" not in words:
            words.insert(2, "-y")
        state = {**usual, **STATES.get(case["case"], {})}
        if on_lustre.dialect == "2.15" and "quota" in state:
            used, *_, files_used, _, _ = STATES[case["case"]]["quota"]["-u"][:6]
            state |= {"quota": {"-u": [used, 0, 0, files_used, 0, 0]}, "inaccurate": False}
        on_lustre.give(**state)
        on_lustre.fault({"not on Lustre": "not-lustre"}.get(case["case"], ""))
        if "EPERM" in case["case"]:
            on_lustre.fault("quota-refused")
        done = subprocess.run(words, check=False, capture_output=True, text=True)
        said = [text.replace(str(root), MOUNT) for text in (done.stdout, done.stderr)]
        if (done.returncode, *said) != (case["exit"], case["stdout"], case["stderr"]):
            different.append((case, done.returncode, said))
    assert different == [], different


GRACE_OVER_2_15 = """Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/mnt/fakefs
                9*       5    1000    none     100       0       0       -
"""
SOFT = "1.02 GB left (over the soft limit: writes fail in 3d1h1m1s)"
# A state of the servers, or lfs's whole answer -> what the line of room begins its words of quotas with.
QUOTAS: dict[str, list[str]] = {
    "quota, within": ["11.3 GB left", "100 files left"],
    "quota, over the soft limit": [SOFT, "100 files left"],
    "quota, inaccurate": ["1.02 GB left", "100 files left"],
    "quota, no limit": [],
    "quota, its grace over": ["0 B left", "100 files left"],
    "EPERM": ["unknown"],
    GRACE_OVER_2_15: ["0 B left"],
    "  Filesystem  kbytes": ["unknown"],
}


@pytest.mark.parametrize("case", QUOTAS)
def test_quotas_are_read_as_what_they_leave(on_lustre: FakeLustre, case: str) -> None:
    on_lustre.patch.setattr("os.getuid", lambda: 1000)  # no quota binds root
    if case == "EPERM":
        on_lustre.fault("quota-refused")
    elif case in STATES:
        on_lustre.give(**STATES[case])
    else:
        lfs = on_lustre.state_file.parent / "bin" / "lfs"
        (lfs.parent / "quota").write_text(case)
        script = lfs.read_text().partition("\n")[2]
        lfs.write_text(f"#!/bin/sh\n[ $1 != quota ] || exec cat '{lfs.parent}/quota'\n{script}")
    line, *_ = space_lines(on_lustre.folder, Need(num_bytes=1, num_shards=0))
    told = re.findall("your quota: ([^;]*)", line)
    assert len(told) == len(QUOTAS[case]), line
    for words, room in zip(told, QUOTAS[case], strict=True):
        assert words.startswith(room), line
