"""What the genuine lfs of two versions printed is read right, and the fake one prints the same.

The genuine programs ran over an emulated file system of 8 OSTs, one MDT and the pools flash, disk and empty.
"""

from __future__ import annotations

import errno
import json
import re
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
        *(OST, {**OST, "error": errno.ESHUTDOWN}, {**OST, "error": errno.EAGAIN}, OST),
        *({"used": 1073741000, "available": 824, "flags": "S"}, {**OST, "flags": "I", "inodes": 0}, OST, OST),
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
@pytest.mark.processes
def test_the_fake_prints_and_exits_as_the_genuine_lfs_did(on_lustre: FakeLustre) -> None:
    on_lustre.monkeypatch.setenv("FAKE_LFS_DEFAULT_BYTES", str(4 << 20))
    root = on_lustre.folder.parent
    for name in ("orion", "i3", "d"):
        (root / name).mkdir()
    usual: dict[str, Any] = {"osts": [OST] * 8, "inaccurate": False, "inodes": 1000000, "mdt": OST}
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


@pytest.mark.processes
@pytest.mark.parametrize("case", QUOTAS)
def test_quotas_are_read_as_what_they_leave(on_lustre: FakeLustre, case: str) -> None:
    on_lustre.monkeypatch.setattr("os.getuid", lambda: 1000)  # no quota binds root
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
