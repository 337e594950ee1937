"""A folder that looks as if it stood on Lustre, with the fake lfs on PATH."""

from __future__ import annotations

import marshal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

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

    def set_by_hand(self, options: str) -> None:
        """Give the folder a layout by somebody's own lfs setstripe; "" is none."""
        if options:
            subprocess.run(["lfs", "setstripe", *options.split(), str(self.folder)], check=True)

    def mounts(self, *lines: str) -> None:
        """Have these file systems mounted."""
        table = "".join(f"{line}\n" for line in lines)
        self.monkeypatch.setattr("lustre.lfs.read_mounts_table", lambda: table)

    def give(self, **values: object) -> None:
        self.state_file.write_bytes(marshal.dumps({**self.state(), **values}))

    def fault(self, name: str) -> None:
        """A df that hangs gets a short time limit, and no other call: a busy machine may be slow."""
        self.monkeypatch.setenv("FAKE_LFS_FAULT", name)
        if name == "hang-df":
            self.monkeypatch.setattr("lustre.lfs.DF_TIMEOUT_S", 0.1)

    def command(self, *args: object) -> tuple[int, str]:
        """``shardprep lustre ARGS``: exit code, and what it printed on both."""
        ended = call_main("lustre", *args)
        return ended.code, ended.text
