"""A folder that looks as if it stood on Lustre, with the fake lfs on PATH."""

from __future__ import annotations

import marshal
import os
import py_compile
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.world import call_main


@dataclass(frozen=True, kw_only=True)
class FakeLustre:
    """A folder that looks as if it stood on Lustre, and what the fake lfs was asked."""

    folder: Path
    dialect: str
    state_file: Path
    patch: pytest.MonkeyPatch

    def state(self) -> dict[str, Any]:
        return marshal.loads(self.state_file.read_bytes()) if self.state_file.exists() else {}

    def calls(self) -> list[list[str]]:
        """Argument lists, each with its LC_ALL last."""
        calls: list[list[str]] = self.state().get("calls", [])
        return calls

    def setstripe_calls(self) -> list[str]:
        """Options alone, without the path and LC_ALL."""
        return [" ".join(call[1:-2]) for call in self.calls() if call[0] == "setstripe"]

    def set_by_hand(self, options: str) -> None:
        """Give the folder a layout by somebody's own lfs setstripe; "" is none."""
        if options:
            subprocess.run(["lfs", "setstripe", *options.split(), str(self.folder)], check=True)

    def mounts(self, *lines: str) -> None:
        """Have these file systems mounted."""
        table = "".join(f"{line}\n" for line in lines)
        self.patch.setattr("lustre.lfs.read_mounts_table", lambda: table)

    def give(self, **values: object) -> None:
        self.state_file.write_bytes(marshal.dumps({**self.state(), **values}))

    def fault(self, name: str) -> None:
        """A df that hangs gets a short time limit, and no other call: a busy machine may be slow."""
        self.patch.setenv("FAKE_LFS_FAULT", name)
        if name == "hang-df":
            self.patch.setattr("lustre.lfs.DF_TIMEOUT_S", 0.1)

    def command(self, *args: object) -> tuple[int, str]:
        """``shardprep lustre ARGS``: exit code, and what it printed on both."""
        ended = call_main("lustre", *args)
        return ended.code, ended.text


@pytest.fixture
def on_lustre(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeLustre]:
    """An empty folder on a Lustre of 8 OSTs. The trap: the test fails where setstripe was run on more."""
    tools, state_file = tmp_path / "bin", tmp_path / "lfs.state"
    tools.mkdir()
    # Compiled once and run by this very Python: tests call it often.
    compiled = tmp_path.parent / "fake_lfs.pyc"
    if not compiled.exists():
        py_compile.compile(str(ROOT / "tests" / "fake_lfs"), str(compiled), doraise=True)
    (tools / "lfs").write_text(f'#!/bin/sh\nexec {shlex.join([sys.executable, "-IS", str(compiled)])} "$@"\n')
    (tools / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LFS_STATE", str(state_file))
    root = tmp_path / "scratch file"
    (root / "O").mkdir(parents=True)
    dialect = getattr(request, "param", "2.17")
    monkeypatch.setenv("FAKE_LFS_DIALECT", dialect)
    monkeypatch.delenv("FAKE_LFS_FAULT", raising=False)
    escaped = str(root).replace(" ", "\\040")
    fake = FakeLustre(folder=root / "O", dialect=dialect, state_file=state_file, patch=monkeypatch)
    fake.mounts("/dev/vda / ext4 rw 0 0", f"10.0.0.1@tcp:/fakefs {escaped} lustre rw,flock 0 0")
    yield fake
    assert fake.state().get("violations", []) == [], "setstripe ran on a file or a folder with files"
