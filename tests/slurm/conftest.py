"""A folder of stand-ins for Slurm's commands, first on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.fake_slurm import Desk, FakeSlurm, install_fake_slurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def desk(fake: FakeSlurm, data_dir: Path) -> Desk:
    """A data set of five shards, none of them made."""
    return Desk(data=data_dir, fake=fake)
