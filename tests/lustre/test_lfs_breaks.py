"""Every call of lfs broken in every way: no command of preprocess, slurm or loader fails because of lfs.

By itself a fourth of it runs, each call broken in one way; ``LFS_BREAKS=all`` (``make torture``) runs all. An
answer of the fake lfs is asked for once and kept: no command here changes anything that lfs tells.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

import lustre.lfs
from loader.__main__ import main as loader_main
from lustre.__main__ import main as lustre_main
from slurm.__main__ import main as slurm_main
from tests.lustre.fake_lustre import FakeLustre
from tests.slurm.fake_slurm import FakeSlurm

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

HOWS = ("exit", "hang", "garbage", "signal", "cannot start")
GARBAGE = "\0lmm_stripe_count: many\n/ [OST:x] \ufffd 12%: (0xzz) quota\nFilesystem kbytes\n1 2 3 4 5 6 7 x\n"


@dataclass
class Answer:
    """What stands for a process of lfs."""

    stdout: bytes
    stderr: bytes
    returncode: int
    is_silent: bool = False

    def communicate(self, timeout: float) -> tuple[bytes, bytes]:
        if self.is_silent:
            raise subprocess.TimeoutExpired("lfs", timeout)
        return self.stdout, self.stderr

    def kill(self) -> None:
        assert self.is_silent

    def wait(self, timeout: float) -> int:
        raise subprocess.TimeoutExpired("lfs", timeout)


@dataclass
class Calls:
    """Counts the calls of lfs, and breaks one of them."""

    answers: dict[tuple[str, ...], Answer] = field(default_factory=dict)
    seen: list[tuple[str, ...]] = field(default_factory=list)
    broken: int = -1
    how: str = ""

    def start(self, words: Sequence[str], **keywords: Any) -> Answer:
        self.seen.append(tuple(words[1:]))
        if len(self.seen) - 1 != self.broken:
            if tuple(words) not in self.answers:
                for name in ("stdin", "stdout", "stderr"):
                    keywords.pop(name)
                done = subprocess.run(words, check=False, capture_output=True, **keywords)
                self.answers[tuple(words)] = Answer(done.stdout, done.stderr, done.returncode)
            return self.answers[tuple(words)]
        if self.how == "cannot start":
            raise OSError(8, "Exec format error")
        codes = {"exit": 71, "signal": -11}
        return Answer(
            GARBAGE.encode() if self.how == "garbage" else b"",
            b"",
            codes.get(self.how, 0),
            is_silent=self.how == "hang",
        )

    def run(self, command: Callable[[], int], *, broken: int = -1, how: str = "") -> int:
        self.seen, self.broken, self.how = [], broken, how
        return command()


@pytest.fixture
def calls(on_lustre: FakeLustre, monkeypatch: pytest.MonkeyPatch) -> Calls:
    calls = Calls()

    class Subprocess:
        Popen, DEVNULL, PIPE = calls.start, subprocess.DEVNULL, subprocess.PIPE
        TimeoutExpired = subprocess.TimeoutExpired

    monkeypatch.setattr(lustre.lfs, "subprocess", Subprocess)
    monkeypatch.setattr(os, "getuid", lambda: 1000)  # no quota binds root
    on_lustre.give(quota={"-u": [5, 0, 1 << 40, 7, 0, 0]})
    return calls


@pytest.fixture
def commands(
    on_lustre: FakeLustre, prep: Prep, tmp_path: Path, fake_slurm: FakeSlurm
) -> dict[str, Callable[[], int]]:
    """Each command on a data set of two shards, which are made but for ``plan`` and ``shard``."""
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
    plan = ["plan", "--input_dir", raw, "--model_id", prep.model_dir, "--num_shards", 2, "--output_dir", new]

    def shard() -> int:
        for path in missing.glob("shard-*"):
            path.unlink()
        return int(prep.command("--shard_id", 0, "--output_dir", missing).code)

    def planned(*options: str) -> int:
        shutil.rmtree(new, ignore_errors=True)
        return int(prep.command(*plan, *options).code)

    def submit() -> int:
        shutil.rmtree(missing / "jobs", ignore_errors=True)
        return slurm_main(["submit", str(missing), "--mem_gb", "1"])

    def stage() -> int:
        shutil.rmtree(tmp_path / "staged", ignore_errors=True)
        return loader_main(["stage", str(data), "--to", str(tmp_path / "staged")])

    return {
        "plan": planned,
        "plan --dry_run": lambda: planned("--dry_run"),
        "shard": shard,
        "verify": lambda: int(prep.command("verify", data).code),
        "verify --fast": lambda: int(prep.command("verify", "--fast", data).code),
        "submit": submit,
        "doctor": lambda: int(prep.command("doctor", *plan[1:-1], new).code),
        "status": lambda: slurm_main(["status", str(data)]),
        "load": lambda: loader_main([str(data)]),
        "stage": stage,
    }


def hows_of(number: int, *, done: bool) -> Sequence[str]:
    """The ways in which a call is broken in this run; none where another command has made the same."""
    if os.environ.get("LFS_BREAKS") == "all":
        return HOWS
    return [] if done else [HOWS[number % len(HOWS)]]


def test_no_command_fails_because_of_lfs(
    calls: Calls, commands: dict[str, Callable[[], int]], capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the loader needs it")
    num_calls, done = {}, set[tuple[str, ...]]()
    if os.environ.get("LFS_BREAKS") != "all":  # they ask what others here ask, too
        del commands["plan --dry_run"], commands["verify"]
    for name, command in commands.items():
        assert calls.run(command) == 0, (name, capsys.readouterr())
        seen = num_calls[name] = list(calls.seen)
        for broken in range(len(seen)):
            for how in hows_of(broken, done=seen[broken] in done):
                code = calls.run(command, broken=broken, how=how)
                assert code == 0, (name, seen[broken], how, capsys.readouterr())
                assert len(calls.seen) > broken, "the call that was to be broken was made"
        done.update(seen)
    asked = {name: [words[0] for words in seen] for name, seen in num_calls.items()}
    assert {"df", "quota"} <= set(asked["plan"]) & set(asked["submit"])
    assert asked["shard"] == ["getstripe"]
    assert {name for name, words in asked.items() if not words} >= {
        "verify --fast",
        "status",
        "load",
        "stage",
    }


@pytest.mark.parametrize(
    "words",
    [
        ["show", "O"],
        ["apply", "O/empty", "--stripe", "2"],
        ["apply", "O/empty", "--stripe", "2,disk", "--dry_run"],
    ],
)
def test_the_commands_for_lustre_itself_end_with_73_at_worst(
    calls: Calls, on_lustre: FakeLustre, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    (on_lustre.folder / "empty").mkdir()
    (on_lustre.folder / "shard-00000.tar").write_bytes(b"precious")
    argv = [word.replace("O", str(on_lustre.folder), 1) if word.startswith("O") else word for word in words]
    codes = set()
    assert calls.run(lambda: lustre_main(argv)) in {0, 73}, capsys.readouterr()
    seen = list(calls.seen)
    assert seen
    for broken in range(len(seen)):
        for how in HOWS:
            codes.add(calls.run(lambda: lustre_main(argv), broken=broken, how=how))
            assert codes <= {0, 73}, (seen[broken], how, capsys.readouterr())
            assert "Traceback" not in capsys.readouterr().err
    assert 73 in codes
    assert (on_lustre.folder / "shard-00000.tar").read_bytes() == b"precious"


@pytest.mark.parametrize("how", ["hang", "garbage"])
def test_a_stripe_count_that_was_asked_for_is_set_or_an_error(
    calls: Calls,
    commands: dict[str, Callable[[], int]],
    on_lustre: FakeLustre,
    how: str,
    prep: Prep,
    tmp_path: Path,
) -> None:
    new = on_lustre.folder / "striped"
    options = ["--input_dir", tmp_path / "raw", "--model_id", prep.model_dir, "--num_shards", 2]
    plan = ["plan", *options, "--output_dir", new, "--stripe", "8"]
    calls.broken, calls.how = 0, how  # what the folder has now cannot be read
    ended = prep.command(*plan)
    assert ended.code == 73, ended.text
    assert not (new / "plan.json").exists()
    assert ended.text.count("error: ") == 1
