"""A folder that looks as if it stood on Lustre, with the fake lfs on PATH."""

from __future__ import annotations

import marshal
import os
import py_compile
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lustre import stripe_line
from tests.world import call_main

MIB = 1 << 20
both_dialects = pytest.mark.parametrize("on_lustre", ["2.15", "2.17"], indirect=True)


@dataclass(frozen=True, kw_only=True)
class FakeLustre:
    """A folder that looks as if it stood on Lustre, and what the fake lfs was asked."""

    folder: Path
    dialect: str
    state_file: Path
    monkeypatch: pytest.MonkeyPatch

    def state(self) -> dict[str, Any]:
        return marshal.loads(self.state_file.read_bytes()) if self.state_file.exists() else {}

    def calls(self) -> list[list[str]]:
        """Argument lists, each with its LC_ALL last."""
        calls: list[list[str]] = self.state().get("calls", [])
        return calls

    def setstripe_calls(self) -> list[str]:
        """Options alone, without the path and LC_ALL."""
        return [" ".join(call[1:-2]) for call in self.calls() if call[0] == "setstripe"]

    def give_layout(self, path: Path, layout: Sequence[Mapping[str, object]]) -> None:
        self.give(layouts={str(path): layout})

    def give(self, **values: object) -> None:
        self.state_file.write_bytes(marshal.dumps({**self.state(), **values}))

    def fault(self, name: str) -> None:
        """A command that hangs gets a short time limit, and no other one: a busy machine may be slow."""
        self.monkeypatch.setenv("FAKE_LFS_FAULT", name)
        if name == "hang":
            self.monkeypatch.setattr("lustre.lfs.TIMEOUT_S", 0.1)
        if name.startswith("hang"):
            self.monkeypatch.setattr("lustre.lfs.DF_TIMEOUT_S", 0.1)

    def command(self, *args: object) -> tuple[int, str]:
        """``shardprep lustre ARGS``: exit code, and what it printed on both."""
        ended = call_main("lustre", *args)
        return ended.code, ended.text


def apply_stripe(folder: Path, stripe: str) -> str:
    """``plan --stripe`` for a folder."""
    return stripe_line(folder, stripe)


def install_fake_lfs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the fake lfs first on PATH, compiled once and run by this very Python: tests call it often."""
    tools = tmp_path / "bin"
    tools.mkdir()
    compiled = tmp_path.parent / "fake_lfs.pyc"
    if not compiled.exists():
        py_compile.compile(str(Path(__file__).parents[1] / "fake_lfs"), str(compiled), doraise=True)
    command = shlex.join([sys.executable, "-IS", str(compiled)])
    (tools / "lfs").write_text(f'#!/bin/sh\nexec {command} "$@"\n', encoding="utf-8")
    (tools / "lfs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("FAKE_LFS_STATE", str(tmp_path / "lfs.state"))
