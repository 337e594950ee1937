"""Every call of lfs broken: no command of preprocess, slurm or loader fails because of lfs.

By itself each call is broken in one way; ``LFS_BREAKS=all`` (``make torture``) breaks it in all ways. An
answer of the fake lfs is asked for once and kept: no command here changes anything that lfs tells.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import pytest

from tests.slurm.fake_slurm import install_fake_slurm
from tests.world import Ended, World, call_main

if TYPE_CHECKING:
    from tests.lustre.conftest import FakeLustre

pytestmark = pytest.mark.processes

GARBAGE = b"\0lmm_stripe_count: many\n/ [OST:x] \xff 12%: (0xzz) quota\nFilesystem kbytes \n1 2 3 4 5 6 7 x\n"
NO_ANSWER = subprocess.TimeoutExpired("lfs", 1)
HOWS: dict[str, dict[str, Any]] = {  # what becomes of a call: of the process, if one can be started
    "exit": {"communicate.return_value": (b"", b""), "returncode": 71},
    "garbage": {"communicate.return_value": (GARBAGE, b""), "returncode": 0},
    "signal": {"communicate.return_value": (b"", b""), "returncode": -11},
    "hang": {"communicate.side_effect": NO_ANSWER, "wait.side_effect": NO_ANSWER, "returncode": None},
    "cannot start": {},
}


class Calls:
    """Counts the calls of lfs, and breaks one of them."""

    def __init__(self) -> None:
        self.answers: dict[tuple[str, ...], Mock] = {}
        self.seen: list[tuple[str, ...]] = []
        self.broken, self.how = -1, ""

    def popen(self, words: Sequence[str], *, env: dict[str, str], **_: Any) -> Mock:
        key = tuple(words)
        self.seen.append(key[1:])
        if len(self.seen) - 1 == self.broken:
            if self.how == "cannot start":
                raise OSError(8, "Exec format error")
            return Mock(**HOWS[self.how])
        if key not in self.answers:
            done = subprocess.run(words, check=False, capture_output=True, env=env)
            answer = {"communicate.return_value": (done.stdout, done.stderr), "returncode": done.returncode}
            self.answers[key] = Mock(**answer)
        return self.answers[key]

    def run(self, command: Callable[[], Ended], *, broken: int = -1, how: str = "") -> int:
        self.seen, self.broken, self.how = [], broken, how
        return command().code


@pytest.fixture
def calls(on_lustre: FakeLustre) -> Calls:
    calls = Calls()
    names = {**vars(subprocess), "Popen": calls.popen}
    on_lustre.patch.setattr("lustre.lfs.subprocess", SimpleNamespace(**names))
    on_lustre.patch.setattr(os, "getuid", lambda: 1000)  # no quota binds root
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 0]})
    return calls


def test_no_command_fails_because_of_lfs(calls: Calls, on_lustre: FakeLustre, tmp_path: Path) -> None:
    install_fake_slurm(tmp_path, on_lustre.patch)
    made = World(tmp_path, data_dir=on_lustre.folder).raw({"a.txt": "one\ntwo\n" * 9}).make()
    missing = World(tmp_path, data_dir=made.data_dir / "M").plan()
    new = World(tmp_path, data_dir=made.data_dir / "N")

    def plan() -> Ended:
        shutil.rmtree(new.data_dir, ignore_errors=True)
        return new.try_plan(num_shards=2)

    def shard() -> Ended:
        for path in missing.data_dir.glob("shard-*"):
            path.unlink()
        return missing.try_shard(0)

    def submit() -> Ended:
        shutil.rmtree(missing.data_dir / "jobs", ignore_errors=True)
        return call_main("submit", missing.data_dir, "--mem_gb", 1)

    done = set[tuple[str, ...]]()
    for command, asked in (
        (plan, ["getstripe", "df", "df", "quota"]),
        (shard, []),
        (submit, ["df", "df", "quota"]),
        (lambda: call_main("status", made.data_dir), []),
        (lambda: call_main("verify", made.data_dir), []),
        (lambda: call_main("stage", made.data_dir, "--to", tmp_path / "staged"), []),
    ):
        assert calls.run(command) == 0
        assert [words[0] for words in calls.seen] == asked, command
        for broken, words in enumerate(list(calls.seen)):
            is_all = os.environ.get("LFS_BREAKS") == "all"
            hows = [*HOWS] if is_all else [] if words in done else [[*HOWS][broken % len(HOWS)]]
            for how in hows:
                assert calls.run(command, broken=broken, how=how) == 0, (words, how)
                assert len(calls.seen) > broken, "the call that was to be broken was made"
            done.add(words)


@pytest.mark.parametrize(
    "command",
    ["show O", "apply O/empty --stripe 2", "apply O/empty --stripe 2,disk --dry_run"],
)
def test_show_and_apply_end_with_73_where_no_layout_can_be_told(
    calls: Calls, on_lustre: FakeLustre, command: str
) -> None:
    (on_lustre.folder / "empty").mkdir()
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    words = [word.replace("O", str(on_lustre.folder)) for word in command.split()]
    usual = calls.run(lambda: call_main("lustre", *words))
    codes = {usual}
    for broken in range(len(calls.seen)):
        for how in HOWS:
            code = calls.run(lambda: call_main("lustre", *words), broken=broken, how=how)
            assert code == usual or calls.seen[broken][0] != "df", "nothing but a note depends on it"
            codes.add(code)
    assert {73} <= codes <= {0, 73}
    assert (on_lustre.folder / "shard-00000.tar").read_bytes() == b"precious"
