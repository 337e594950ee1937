"""Data sets for all tests of the loader, made once and never written to, and a Python with torch imported."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from tests.checkout import ROOT
from tests.external_tars import write_numbered_data
from tests.oracle.forms import DataSets
from tests.warm_python import WarmPython
from tests.world import World

LAUNCHERS = ("SLURM_", "OMPI_", "PMI", "ACCELERATE_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE")


def environ_of_tests() -> dict[str, str]:
    """Return the environment without launchers' variables."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHERS)}
    return kept | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


@pytest.fixture(scope="module", autouse=True)
def _environ() -> Iterator[None]:
    torch.set_num_threads(1)  # on small tensors more threads only spin while they wait for each other
    with mock.patch.dict(os.environ, environ_of_tests(), clear=True):
        yield


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> DataSets:
    """The oracle's data sets by name. All but two have the same raw text; rows have SEQ_LEN tokens."""
    return DataSets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def rows(sets: DataSets, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Packed rows of 97 tokens: 96 inputs, and the target of the last one."""
    world = World(tmp_path_factory.mktemp("rows"), raw_dir=sets["documents"].parent / "raw")
    options: dict[str, Any] = {"record": "packed", "seq_len": 97, "pack": "best_fit"}
    return world.make(num_shards=1, max_bad_fraction=1, **options).data_dir


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tars by webdataset with 107 samples, and a tokenizer of 200 words. A sample has up to 5 ids; the
    first is its number."""
    return write_numbered_data(tmp_path_factory.mktemp("numbered"), 107, 3)


@pytest.fixture(scope="session")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Processes with torch already imported."""
    modules = ["torch", "torch.utils.data", "torch.distributed", "transformers", "loader.dataloader"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ_of_tests()) as server:
        yield server
