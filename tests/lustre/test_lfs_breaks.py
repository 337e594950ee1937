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
from typing import Any

import pytest

from tests.lustre.fake_lustre import FakeLustre
from tests.slurm.fake_slurm import FakeSlurm
from tests.world import Ended, World, call_main

pytestmark = pytest.mark.processes

GARBAGE = (
    "\0lmm_stripe_count: many\n/ [OST:x] \ufffd 12%: (0xzz) quota\nFilesystem kbytes \n1 2 3 4 5 6 7 x\n"
)
HOWS = {  # what a broken call prints, and its exit code; the others give no answer, or cannot be started
    "exit": ("", 71),
    "garbage": (GARBAGE, 0),
    "signal": ("", -11),
    "hang": None,
    "cannot start": None,
}


class Process:
    """A process of lfs; one without an answer hangs."""

    def __init__(self, answer: tuple[bytes, bytes, int] | None) -> None:
        self.answer = answer
        self.returncode = answer[2] if answer else None

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        if self.answer is None:
            raise subprocess.TimeoutExpired("lfs", timeout)
        return self.answer[:2]

    def kill(self) -> None:
        assert self.answer is None

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("lfs", timeout)


class Calls:
    """Counts the calls of lfs, and breaks one of them."""

    DEVNULL, PIPE, TimeoutExpired = subprocess.DEVNULL, subprocess.PIPE, subprocess.TimeoutExpired

    def __init__(self) -> None:
        self.answers: dict[tuple[str, ...], tuple[bytes, bytes, int]] = {}
        self.seen: list[tuple[str, ...]] = []
        self.broken, self.how = -1, ""

    def Popen(self, words: Sequence[str], *, env: dict[str, str], **_: Any) -> Process:  # noqa: N802
        key = tuple(words)
        self.seen.append(key[1:])
        if len(self.seen) - 1 == self.broken:
            if self.how == "cannot start":
                raise OSError(8, "Exec format error")
            answer = HOWS[self.how]
            return Process(answer and (answer[0].encode(), b"", answer[1]))
        if key not in self.answers:
            done = subprocess.run(words, check=False, capture_output=True, env=env)
            self.answers[key] = (done.stdout, done.stderr, done.returncode)
        return Process(self.answers[key])

    def run(self, command: Callable[[], Ended], *, broken: int = -1, how: str = "") -> int:
        self.seen, self.broken, self.how = [], broken, how
        return command().code


@pytest.fixture
def calls(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr("lustre.lfs.subprocess", calls)
    monkeypatch.setattr(os, "getuid", lambda: 1000)  # no quota binds root
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 0]})
    return calls


def test_no_command_fails_because_of_lfs(
    calls: Calls, on_lustre: FakeLustre, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    pytest.importorskip("torch", reason="the loader needs it")
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
    "words",
    [
        ["show", "O"],
        ["apply", "O/empty", "--stripe", "2"],
        ["apply", "O/empty", "--stripe", "2,disk", "--dry_run"],
    ],
)
def test_the_commands_for_lustre_end_with_73_where_a_layout_or_a_pool_cannot_be_told_and_else_go_on(
    calls: Calls, on_lustre: FakeLustre, words: list[str]
) -> None:
    (on_lustre.folder / "empty").mkdir()
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    argv = [word.replace("O", str(on_lustre.folder), 1) if word.startswith("O") else word for word in words]
    usual = calls.run(lambda: call_main("lustre", *argv))
    codes = {usual}
    for broken in range(len(calls.seen)):
        for how in HOWS:
            code = calls.run(lambda: call_main("lustre", *argv), broken=broken, how=how)
            assert code == usual or calls.seen[broken][0] != "df", "nothing but a note depends on it"
            codes.add(code)
    assert {73} <= codes <= {0, 73}
    assert (on_lustre.folder / "shard-00000.tar").read_bytes() == b"precious"
