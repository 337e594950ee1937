"""What the tests of the wheel share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.conftest import Prep
from tests.warm_python import WarmPython


@pytest.fixture(scope="session")
def warm(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python with the wheel's packages imported; behind them stands this checkout, for tests' own modules."""
    environ = {**Prep.environ(), "PYTHONPATH": f"{site}:{ROOT}"}
    modules = ["transformers", "loader.dataloader", "preprocess.__main__", "slurm.__main__"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ) as server:
        yield server
