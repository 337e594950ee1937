"""The fixture of all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lustre.fake_lustre import FakeLustre, install_fake_lfs
from tests.slurm.fake_slurm import FakeSlurm, install_fake_slurm


@pytest.fixture
def on_lustre(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeLustre]:
    """An empty folder on a Lustre of 8 OSTs. The trap: the test fails where setstripe was run on more."""
    install_fake_lfs(tmp_path, monkeypatch)
    root = tmp_path / "scratch file"
    (root / "O").mkdir(parents=True)
    dialect = getattr(request, "param", "2.17")
    monkeypatch.setenv("FAKE_LFS_DIALECT", dialect)
    monkeypatch.delenv("FAKE_LFS_FAULT", raising=False)
    escaped = str(root).replace(" ", "\\040")
    table = f"/dev/vda / ext4 rw 0 0\n10.0.0.1@tcp:/fakefs {escaped} lustre rw,flock 0 0\n"
    monkeypatch.setattr("lustre.lfs.read_mounts_table", lambda: table)
    state_file = tmp_path / "lfs.state"
    fake = FakeLustre(folder=root / "O", dialect=dialect, state_file=state_file, monkeypatch=monkeypatch)
    yield fake
    assert fake.state().get("violations", []) == [], "setstripe ran on a file or a folder with files"


@pytest.fixture
def fake_slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    """Stand-ins for Slurm's commands beside those of Lustre."""
    return install_fake_slurm(tmp_path, monkeypatch)
