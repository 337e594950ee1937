"""A data set, and stand-ins for Slurm's commands first on PATH."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.slurm.fake_slurm import Desk, install_fake_slurm
from tests.world import World


@pytest.fixture(scope="session")
def made(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The sample text in 5 shards. Never written to."""
    return World(tmp_path_factory.mktemp("made"), raw_dir=sample_dir).plan(num_shards=5).run()


@pytest.fixture
def desk(made: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """A planned data set of five shards, none of them made."""
    data = made.copy(tmp_path, but=["shard-*"]).data_dir
    place = install_fake_slurm(tmp_path, monkeypatch)
    return Desk(data=data, place=place, made=made.data_dir, patch=monkeypatch)
