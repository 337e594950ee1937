"""The fake lfs prints what the genuine one printed, where the recorded outputs are at hand."""

from __future__ import annotations

import errno
import json
import subprocess
from typing import Any

import pytest

from tests.checkout import SHARED
from tests.lustre.fake_lustre import FakeLustre, both_dialects

pytestmark = pytest.mark.processes

MOUNT = "/mnt/fakefs"
OST = {"used": 268435456, "available": 805306368, "flags": "", "state": "ACTIVE"}
FULL = {"used": 1073741000, "available": 824, "flags": "S", "state": "ACTIVE"}
TROUBLE: dict[str, Any] = {
    "osts": [
        OST,
        {**OST, "error": errno.ESHUTDOWN},
        {**OST, "error": errno.EAGAIN},
        OST,
        FULL,
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
NOT_SPOKEN = {"with inactive ones", "bad size"}  # an option of df that nobody here uses; a long usage text


@both_dialects
def test_the_fake_prints_and_exits_as_the_genuine_lfs_did(on_lustre: FakeLustre) -> None:
    file = SHARED / "lfs_recorded" / f"lfs-{ {'2.15': '2_15_8', '2.17': '2_17_57'}[on_lustre.dialect] }.json"
    if not file.is_file():
        pytest.skip(f"{file.parent} is missing; SHARDPREP_TEST_SHARED names the folder that has it")
    on_lustre.monkeypatch.setenv("FAKE_LFS_DEFAULT_BYTES", str(4 << 20))
    root = on_lustre.folder.parent
    for name in ("orion", "i3", "d"):
        (root / name).mkdir()
    usual: dict[str, Any] = {"osts": [OST] * 8, "inaccurate": False, "inodes": 1000000}
    usual |= {"mdt": {key: OST[key] for key in ("used", "available", "flags")}}
    usual |= {"pools": {"flash": [0, 1], "disk": [2, 3, 4, 5, 6, 7], "empty": []}}
    different = []
    for case in json.loads(file.read_text(encoding="utf-8"))["cases"]:
        words = [word.replace(MOUNT, str(root)) for word in case["argv"]]
        # The toolkit does not ask for these any more: pools' room, quotas of others, files in an archive.
        others = {"df": {"-p"}, "quota": {"-g", "-p", "--pool"}}.get(words[1], set())
        is_asked = words[1] not in {"hsm_state", "hsm_restore", "project"} and not others & set(words)
        if case["case"] in NOT_SPOKEN or not is_asked:
            continue
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
    on_lustre.give(violations=[])
