"""What the genuine lfs of two versions printed is read right, and the fake one prints the same.

The genuine programs ran over an emulated file system of 8 OSTs, one MDT and the pools flash, disk and empty.
"""

from __future__ import annotations

import errno
import json
import subprocess
from typing import Any

import pytest

from lustre import Need, space_lines
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


def replays(on_lustre: FakeLustre, **answers: str) -> None:
    """Put an lfs in place that prints these texts, by its command; ``df_i`` is of ``df -i``."""
    place = on_lustre.state_file.parent
    for name in ("getstripe", "df", "df_i", "quota"):
        (place / f"says-{name}").write_text(answers.get(name, "stripe_count: 1\nstripe_size: 4194304\n"))
    lfs = place / "bin" / "lfs"
    names = f"""#!/bin/bash\nname=$1; [[ $2 != -i ]] || name+=_i\ncat '{place}'/says-$name\n"""
    lfs.write_text(names)


@both_dialects
@pytest.mark.processes
def test_layouts_of_folders_are_read_as_the_options_that_made_them(on_lustre: FakeLustre) -> None:
    texts: dict[str, list[str]] = {}
    for each in recorded(on_lustre.dialect):
        texts.setdefault(each["case"], []).append(each["stdout"])
    expected = {
        texts["their layout"][0]: "-E 256K -L mdt -E 8M -c 1 -S 1M -p flash -E -1 -c 4 -S 1M -p disk",
        texts["read back"][0]: "-c 1 -S 4M -i 3",
        texts["read back"][1]: "-E 64M -c 1 -S 4M -E 1G -z 64M -E 1G -c 4 -S 4M -E -1 -z 128M",
    }
    for text, options in expected.items():
        replays(on_lustre, getstripe=text)
        assert f"new files get {options}" in on_lustre.command("show", on_lustre.folder)[1]
    for text in (
        "",
        "please see our wiki",
        "/a has no stripe info\n",
        "stripe_count: many\nstripe_size: 1\n",
    ):
        replays(on_lustre, getstripe=text)
        assert on_lustre.command("show", on_lustre.folder)[0] == 73


@both_dialects
@pytest.mark.processes
def test_targets_in_trouble_are_told_apart(on_lustre: FakeLustre) -> None:
    texts = {each["case"]: each["stdout"] for each in recorded(on_lustre.dialect)}
    blocks = texts["df: OST 1 ESHUTDOWN, 2 EAGAIN, 4 full (S), 5 without inodes (I), MDT full (S)"]
    replays(on_lustre, df=blocks, df_i=texts["its inodes"])
    said = on_lustre.command("show", on_lustre.folder)[1]
    warned = [" ".join(line.split()[1:3]) for line in said.splitlines() if line.startswith("warning")]
    assert warned == ["OST 4", "OST 5", "MDT 0", "MDT 0", "OST 1"], "the MDT has neither space nor inodes"
    line, *_ = space_lines(on_lustre.folder, Need(num_bytes=1, num_shards=1))
    assert "4 OSTs: 3.30 TB left" in line, "of those that take files and answered"
    replays(on_lustre, df=texts["df"], df_i=texts["df of inodes"])
    said = on_lustre.command("show", on_lustre.folder)[1]
    assert "8 OSTs" in said
    assert "warning" not in said


GRACE_OVER_2_15 = """\
     Filesystem  kbytes   quota   limit   grace   files   quota   limit   grace
/mnt/fakefs
                9*       5    1000    none     100       0       0       -
"""


@pytest.mark.parametrize(
    ("case", "left"),
    [
        ("quota, within", ["11.3 GB", "100 files"]),
        ("quota, over the soft limit", ["1.02 GB", "100 files"]),
        ("quota, inaccurate", ["1.02 GB", "100 files"]),
        ("quota, no limit", []),
        ("quota, its grace over", ["0 B", "100 files"]),
        (GRACE_OVER_2_15, ["0 B"]),
        ("  Filesystem  kbytes", ["unknown"]),
    ],
)
@pytest.mark.processes
def test_quotas_are_read_as_what_they_leave(on_lustre: FakeLustre, case: str, left: list[str]) -> None:
    on_lustre.monkeypatch.setattr("os.getuid", lambda: 1000)  # no quota binds root
    texts = {each["case"]: each["stdout"] for each in recorded("2.17")}
    replays(on_lustre, df=texts["df"], df_i=texts["df of inodes"], quota=texts.get(case, case))
    line, *_ = space_lines(on_lustre.folder, Need(num_bytes=1, num_shards=0))
    rooms = [words for words in line.split("; ") if words.startswith("your quota")]
    assert [bool(each.startswith(f"your quota: {it}")) for each, it in zip(rooms, left, strict=True)] == [
        True
    ] * len(left), line
    if case in texts:
        no_limits = {each["case"]: each["stdout"] for each in recorded("2.15")}
        replays(on_lustre, df=texts["df"], df_i=texts["df of inodes"], quota=no_limits[case])
        assert "quota" not in space_lines(on_lustre.folder, Need(num_bytes=1, num_shards=0))[0]
