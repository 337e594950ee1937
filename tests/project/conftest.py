"""A small data set that tests of the project share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world import World


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A verified data set of three shards. Never written to."""
    return World(tmp_path_factory.mktemp("whole")).raw({"a.txt": "a line of text\n" * 90}).make(num_shards=3)


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    """A copy of the verified data set."""
    return whole.copy(tmp_path)
