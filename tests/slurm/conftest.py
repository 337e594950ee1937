"""A folder of stand-ins for Slurm's commands, first on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.fake_slurm import FakeSlurm, install_fake_slurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)
