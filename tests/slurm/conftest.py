"""A folder of stand-ins for Slurm's commands, first on PATH."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.slurm.fake_slurm import FakeSlurm, install_fake_slurm


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    return install_fake_slurm(tmp_path, monkeypatch)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The paths that are opened from now on."""
    paths: list[str] = []
    real = os.open

    def noted(path: Any, *args: Any, **settings: Any) -> int:
        paths.append(str(path))
        return real(path, *args, **settings)

    monkeypatch.setattr(os, "open", noted)
    return paths
