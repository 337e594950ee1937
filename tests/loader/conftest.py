"""Data sets of all tests of the loader: made once, and only read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.external_tars import write_numbered_data
from tests.oracle.forms import DataSets


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Small products gain nothing by threads, which wait for each other by spinning."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def sets(tmp_path_factory: pytest.TempPathFactory) -> DataSets:
    """The oracle's data sets, by name. All but two are of one raw text; rows have SEQ_LEN tokens."""
    return DataSets(tmp_path_factory.mktemp("sets"))


@pytest.fixture(scope="session")
def numbered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three tars of webdataset's with 107 samples and a tokenizer of 200 words. A sample's first id is its
    number, and up to 4 stand behind it."""
    return write_numbered_data(tmp_path_factory.mktemp("numbered"), 107, 3)
