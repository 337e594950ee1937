"""The fixture of all tests here."""

from __future__ import annotations

import os
import py_compile
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.lustre.fake_lustre import FakeLustre
from tests.slurm.fake_slurm import FakeSlurm, install_fake_slurm


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
    fake = FakeLustre(folder=root / "O", dialect=dialect, state_file=state_file, monkeypatch=monkeypatch)
    fake.mounts("/dev/vda / ext4 rw 0 0", f"10.0.0.1@tcp:/fakefs {escaped} lustre rw,flock 0 0")
    yield fake
    assert fake.state().get("violations", []) == [], "setstripe ran on a file or a folder with files"


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins for Slurm's commands beside those of Lustre."""
    return install_fake_slurm(tmp_path, monkeypatch)
