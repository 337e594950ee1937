"""What the genuine lfs of two versions printed is read right, and the fake one prints the same.

The genuine programs ran over an emulated file system of 8 OSTs, one MDT and the pools flash, disk and empty.
"""

from __future__ import annotations

import errno
import json
import subprocess
from typing import Any

import pytest

from lustre.layout import parse_layout
from lustre.space import parse_df, parse_quota
from shardprep.errors import LustreError
from tests.checkout import ROOT
from tests.lustre.fake_lustre import FakeLustre, both_dialects

MOUNT = "/mnt/fakefs"
OST = {"used": 268435456, "available": 805306368, "flags": ""}
TROUBLE: dict[str, Any] = {
    "osts": [
        OST,
        {**OST, "error": errno.ESHUTDOWN},
        {**OST, "error": errno.EAGAIN},
        OST,
        {"used": 1073741000, "available": 824, "flags": "S"},
        {**OST, "flags": "I", "inodes": 0},
        OST,
        OST,
    ],
    "mdt": {"used": 67108000, "available": 864, "flags": "S"},
    "inodes": 0,
}
WITHIN = [9000000, 18000000, 20000000, 100, 0, 200]
OVER = [19000000, 18000000, 20000000, 100, 0, 200]
# What the emulated servers held in a case, by its name. To 2.15 they gave no limits of quotas.
STATES: dict[str, dict[str, Any]] = {
    "df: OST 1 ESHUTDOWN, 2 EAGAIN, 4 full (S), 5 without inodes (I), MDT full (S)": TROUBLE,
    "its inodes": TROUBLE,
    "quota, within": {"quota": {"-u": WITHIN}},
    "quota, over the soft limit": {"quota": {"-u": [*OVER, "3d1h1m1s", "-"]}},
    "quota, inaccurate": {
        "quota": {"-u": [9000000, 8000000, 10000000, 100, 0, 200, "3d1h1m1s", "-"]},
        "inaccurate": True,
    },
    "quota, no limit": {"quota": {"-u": [9000000, 0, 0, 100, 0, 0]}},
    "quota, its grace over": {"quota": {"-u": [*OVER, "expired", "-"]}},
}


def recorded(version: str) -> list[dict[str, Any]]:
    file = ROOT / "tests" / "data" / "lfs_recorded" / f"{version}.json"
    cases: list[dict[str, Any]] = json.loads(file.read_text(encoding="utf-8"))["cases"]
    return cases


@both_dialects
@pytest.mark.processes
def test_the_fake_prints_and_exits_as_the_genuine_lfs_did(on_lustre: FakeLustre) -> None:
    on_lustre.monkeypatch.setenv("FAKE_LFS_DEFAULT_BYTES", str(4 << 20))
    root = on_lustre.folder.parent
    for name in ("orion", "i3", "d"):
        (root / name).mkdir()
    usual: dict[str, Any] = {"osts": [OST] * 8, "inaccurate": False, "inodes": 1000000, "mdt": OST}
    usual |= {"pools": {"flash": [0, 1], "disk": [2, 3, 4, 5, 6, 7], "empty": []}}
    different = []
    for case in recorded(on_lustre.dialect):
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


@pytest.mark.parametrize("version", ["2.15", "2.17"])
def test_layouts_of_folders_are_read_as_the_options_that_made_them(version: str) -> None:
    texts: dict[str, list[str]] = {each["case"]: [] for each in recorded(version)}
    for each in recorded(version):
        texts[each["case"]].append(each["stdout"])
    tiers, *_ = texts["their layout"]
    start, extending = texts["read back"]
    assert parse_layout(tiers).text() == "-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk"
    assert not parse_layout(tiers).has_numbers_alone
    assert parse_layout(start).text() == "-c 1 -S 4M -i 3"
    assert parse_layout(start).has_fixed_place
    assert parse_layout(extending).text() == "-E 64M -c 1 -S 4M -E 1G -z 64M -E 1G -c 4 -S 4M -E -1 -z 128M"
    for text in (
        "",
        "please see our wiki",
        "/a has no stripe info\n",
        "stripe_count: many\nstripe_size: 1\n",
    ):
        with pytest.raises(LustreError):
            parse_layout(text)


@pytest.mark.parametrize("version", ["2.15", "2.17"])
def test_targets_in_trouble_are_told_apart(version: str) -> None:
    texts = {each["case"]: each["stdout"] for each in recorded(version)}
    blocks = texts["df: OST 1 ESHUTDOWN, 2 EAGAIN, 4 full (S), 5 without inodes (I), MDT full (S)"]
    targets = parse_df(blocks, texts["its inodes"])
    osts = targets.answered["OST"]
    assert [ost.name for ost in osts if ost.takes_files] == [f"OST {number}" for number in (0, 3, 6, 7)]
    assert {ost.name: ost.flags for ost in osts if ost.flags} == {"OST 4": "S", "OST 5": "I"}
    assert [mdt.takes_files for mdt in targets.answered["MDT"]] == [False]
    assert list(targets.silent) == ["OST 1"]
    assert osts[0].free_bytes == 805306368 << 10
    whole = parse_df(texts["df"], texts["df of inodes"])
    assert len(whole.answered["OST"]) == 8
    assert not [line for line in whole.lines() if "warning" in line]


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("quota, within", [11000000 << 10, 100]),
        ("quota, over the soft limit", [1000000 << 10, 100]),
        ("quota, inaccurate", [1000000 << 10, 100]),
        ("quota, no limit", []),
        ("quota, its grace over", [0, 100]),
    ],
)
def test_quotas_are_read_as_what_they_leave(case: str, left: list[int]) -> None:
    texts = {each["case"]: each["stdout"] for each in recorded("2.17")}
    rooms = parse_quota(texts[case])
    assert [room.num_left for room in rooms] == left
    assert [room.is_of_files for room in rooms] == [False, True][: len(left)]
    assert all(bool(room.note) == (case != "quota, within") for room in rooms[:1])
    no_limits = {each["case"]: each["stdout"] for each in recorded("2.15")}
    assert parse_quota(no_limits[case]) == []


def test_a_quota_of_2_15_whose_grace_is_over_leaves_nothing() -> None:
    heads = "     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace\n"
    rooms = parse_quota(
        f"{heads}/mnt/fakefs\n                9*       5    1000    none     100       0       0       -\n"
    )
    assert [room.num_left for room in rooms] == [0]
    with pytest.raises(ValueError, match="figures"):
        parse_quota(heads)
