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
from typing import TYPE_CHECKING, Any

import pytest

from loader.__main__ import main as loader_main
from slurm.__main__ import main as slurm_main
from tests.lustre.fake_lustre import FakeLustre
from tests.slurm.fake_slurm import FakeSlurm

if TYPE_CHECKING:
    from tests.conftest import Prep

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

    def run(self, command: Callable[[], int], *, broken: int = -1, how: str = "") -> int:
        self.seen, self.broken, self.how = [], broken, how
        return command()


@pytest.fixture
def calls(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()
    monkeypatch.setattr("lustre.lfs.subprocess", calls)
    monkeypatch.setattr(os, "getuid", lambda: 1000)  # no quota binds root
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 0]})
    return calls


def test_no_command_fails_because_of_lfs(
    calls: Calls, on_lustre: FakeLustre, prep: Prep, tmp_path: Path, fake_slurm: FakeSlurm
) -> None:
    pytest.importorskip("torch", reason="the loader needs it")
    raw, data, missing, new = (
        tmp_path / "raw",
        on_lustre.folder,
        on_lustre.folder / "M",
        on_lustre.folder / "N",
    )
    raw.mkdir()
    for name in "ab":
        (raw / f"{name}.txt").write_text("one\ntwo\nthree\n" * 9)
    for folder in (data, missing):
        prep.plan(raw, folder, num_shards=2)
    prep.make(data)
    assert prep.command("verify", data).code == 0
    options = ["--input_dir", raw, "--model_id", prep.model_dir, "--num_shards", 2, "--output_dir", new]

    def plan() -> int:
        shutil.rmtree(new, ignore_errors=True)
        return int(prep.command("plan", *options).code)

    def shard() -> int:
        for path in missing.glob("shard-*"):
            path.unlink()
        return int(prep.command("--shard_id", 0, "--output_dir", missing).code)

    def submit() -> int:
        shutil.rmtree(missing / "jobs", ignore_errors=True)
        return slurm_main(["submit", str(missing), "--mem_gb", "1"])

    done = set[tuple[str, ...]]()
    for command, asked in (
        (plan, ["getstripe", "df", "df", "quota"]),
        (shard, []),
        (submit, ["df", "df", "quota"]),
        (lambda: slurm_main(["status", str(data)]), []),
        (lambda: int(prep.command("verify", data).code), []),
        (lambda: loader_main(["stage", str(data), "--to", str(tmp_path / "staged")]), []),
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
def test_the_commands_for_lustre_itself_end_with_73_at_worst(
    calls: Calls, on_lustre: FakeLustre, words: list[str]
) -> None:
    (on_lustre.folder / "empty").mkdir()
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    argv = [word.replace("O", str(on_lustre.folder), 1) if word.startswith("O") else word for word in words]
    assert calls.run(lambda: on_lustre.command(*argv)[0]) in {0, 73}
    codes = set()
    for broken in range(len(calls.seen)):
        for how in HOWS:
            codes.add(calls.run(lambda: on_lustre.command(*argv)[0], broken=broken, how=how))
    assert {73} <= codes <= {0, 73}
    assert (on_lustre.folder / "shard-00000.tar").read_bytes() == b"precious"


@pytest.mark.parametrize("how", ["hang", "garbage"])
def test_a_stripe_count_that_was_asked_for_is_set_or_an_error(
    calls: Calls, on_lustre: FakeLustre, how: str, prep: Prep, sample_dir: Path
) -> None:
    new = on_lustre.folder / "striped"
    options = ["--input_dir", sample_dir, "--model_id", prep.model_dir, "--num_shards", 2]
    calls.broken, calls.how = 0, how  # what the folder has now cannot be read
    assert prep.command("plan", *options, "--output_dir", new, "--stripe", "8").code == 73
    assert not (new / "plan.json").exists()
