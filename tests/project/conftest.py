"""What tests of the project share: Python with the wheel imported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import environ_of_children
from tests.warm_python import WarmPython


@pytest.fixture(scope="session")
def warm(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python with the wheel's packages imported; behind them stands this checkout, for tests' own modules."""
    environ = environ_of_children(PYTHONPATH=f"{site}:{ROOT}")
    modules = ["transformers", "loader.dataloader", "preprocess.__main__", "slurm.__main__"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ) as server:
        yield server
