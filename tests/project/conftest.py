"""What tests of the project share: system calls that fail, and Python with the wheel imported."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.children import environ_of_children
from tests.warm_python import WarmPython

Fail = Callable[..., list[str]]


@pytest.fixture(scope="session")
def warm(site: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[WarmPython]:
    """Python with the wheel's packages imported; behind them stands this checkout, for tests' own modules."""
    environ = environ_of_children(PYTHONPATH=f"{site}:{ROOT}")
    modules = ["transformers", "loader.dataloader", "preprocess.__main__", "slurm.__main__"]
    with WarmPython(tmp_path_factory.mktemp("warm"), modules, environ) as server:
        yield server


@pytest.fixture
def fail(monkeypatch: pytest.MonkeyPatch) -> Fail:
    """``fail("open", "a.txt", errno.EIO, times=2)``: that call of ``os`` fails for files of that name.

    For a path, and for a descriptor that is open. Returns a list that gets the path of each failure.
    """
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def apply(call: str, name: str, error: int, *, times: int = 10**9) -> list[str]:
        failed: list[str] = []
        real = getattr(os, call)

        def failing(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            shown = (
                Path(f"/proc/self/fd/{path}").readlink() if isinstance(path, int) else Path(os.fspath(path))
            )
            if shown.name == name and len(failed) < times:
                failed.append(str(shown))
                raise OSError(error, os.strerror(error), None if isinstance(path, int) else path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, call, failing)
        return failed

    return apply
