"""What ``show`` asks the file system: one look at each shard's tar, none at its idx and manifest.

The looks are counted below libc, in a process that is started for it.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.faults.os_calls import start_preloaded

pytestmark = pytest.mark.processes
_CHILD = """
import json, os, pathlib, sys
import lustre.lfs
from lustre.__main__ import main
from tests.faults.os_calls import OsCalls

folder, answers = map(pathlib.Path, sys.argv[1:])
lustre.lfs.read_mounts_table = lambda: f"10.0.0.1@tcp:/fakefs {folder} lustre rw 0 0"
del os.environ["LD_PRELOAD"]  # what the fake lfs looks at is not counted
calls = OsCalls(folder)
with calls.ordered("count"):
    calls.arm()
    code = main(["show", str(folder)])
answers.write_text(json.dumps([code, [[call.op, call.path] for call in calls.calls()]]))
"""
NUM_SHARDS = 300


@pytest.mark.skipif(sys.platform != "linux", reason="LD_PRELOAD")
@pytest.mark.usefixtures("on_lustre")
def test_show_looks_at_each_tar_once_and_at_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "shards"
    folder.mkdir()
    for number in range(NUM_SHARDS):
        for suffix in ("tar", "idx", "json"):
            (folder / f"shard-{number:05d}.{suffix}").touch()
    answers = tmp_path / "answers"
    assert start_preloaded(tmp_path, ["-c", _CHILD, str(folder), str(answers)]) == 0
    code, calls = json.loads(answers.read_text())
    assert code == 0
    looked = Counter(Path(path).suffix for op, path in calls if op == "stat")
    assert looked == {".tar": NUM_SHARDS, "": looked[""]}
