"""What tests of the project share: a small data set, and Python with the wheel imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import environ_of_children
from tests.warm_python import WarmPython
from tests.world import World


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three verified shards. Never written to."""
    return World(tmp_path_factory.mktemp("whole")).raw({"a.txt": "a line of text\n" * 90}).make(num_shards=3)


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    """A copy of three verified shards."""
    return whole.copy(tmp_path)


@pytest.fixture(scope="session")
def warm(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python with the wheel's packages imported; behind them stands this checkout, for tests' own modules."""
    # One thread: on small models more of them spin for most of the time.
    environ = environ_of_children(PYTHONPATH=f"{site}:{ROOT}", OMP_NUM_THREADS="1")
    modules = ["transformers", "loader.dataloader", "preprocess.__main__", "slurm.__main__"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ) as server:
        yield server
