"""Fixtures that several test modules share, the layers of tests, and what this run of tests changes."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import lzma
import os
import re
import runpy
import sys
import unittest.mock
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from tests.checkout import ROOT, SHARED
from tests.children import run_child
from tests.world import call_main, flags_of

LAYERS_OVER_QUICK = ("slow", "processes", "slurm")
# No property test has a deadline, because the machine may be busy.
hypothesis.settings.register_profile(
    "untimed", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("untimed")
_running_quick_tests: list[pytest.Item] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--quick", action="store_true", help="only fast tests that start no process")
    parser.addoption("--frameworks", action="store_true", help="only tests of frameworks; none may skip")


def pytest_configure() -> None:
    """Fail a test of the quick layer that starts a process: it needs a mark."""
    events = {"os.exec", "os.fork", "os.forkpty", "os.posix_spawn", "os.system", "subprocess.Popen"}

    def refuse(name: str, args: tuple[Any, ...]) -> None:
        of_slurm = (("scontrol",), ("sinfo",), ("squeue",))  # plan, status and report call them if installed
        if _running_quick_tests and name in events and args[:1] not in of_slurm:
            pytest.fail(f"it started a process; mark it with @pytest.mark.processes: {name} {args!s:.200}")

    sys.addaudithook(refuse)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, None, None]:
    if not any(map(item.get_closest_marker, LAYERS_OVER_QUICK)):
        _running_quick_tests.append(item)
    try:
        yield
    finally:
        _running_quick_tests.clear()


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import modules that belong to another layer as a whole: some imports take seconds."""
    layers = list(LAYERS_OVER_QUICK) if config.getoption("--quick") else []
    if not config.getoption("--frameworks"):
        layers.append("frameworks")
    if collection_path.suffix != ".py":
        return None
    marks = re.search(r"^pytestmark = (.*)", collection_path.read_text(encoding="utf-8"), re.MULTILINE)
    return True if marks and any(f"pytest.mark.{layer}" in marks[1] for layer in layers) else None


def _rank(item: pytest.Item) -> tuple[int, int]:
    """Return when a test starts: first modules on a cluster, which mostly wait, then long ones, then others.

    Of each, the largest files come first, so that no process works on a long module when the others are done.
    """
    is_on_cluster = item.get_closest_marker("slurm") is not None
    is_long = item.get_closest_marker("long") is not None
    turn = 2
    if is_long:
        turn = 0 if is_on_cluster else 1
    return turn, -item.path.stat().st_size


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Keep the tests of the selected layer, the longest modules first."""
    slow = {item for item in items if any(map(item.get_closest_marker, LAYERS_OVER_QUICK))}
    items.sort(key=_rank)
    wants_frameworks, is_quick = config.getoption("--frameworks"), config.getoption("--quick")
    others = set()
    for item in items:
        is_of_frameworks = item.get_closest_marker("frameworks") is not None
        if is_of_frameworks != wants_frameworks or (is_quick and item in slow):
            others.add(item)
    config.hook.pytest_deselected(items=list(others))
    items[:] = [item for item in items if item not in others]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported: there is little, and it takes a seventh of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Exclude everything imported so far from garbage collection, which took a fifth of the CPU time.

    After that, look for garbage as rarely as newer Pythons do.
    """
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """With --frameworks, turn a skip for a missing framework into a failure."""
    report = yield
    if report.skipped and item.config.getoption("--frameworks") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
    return report


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Run the tests of a module in one process when several processes test."""
    from xdist.scheduler import LoadScopeScheduling

    class ByModule(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return nodeid.partition("::")[0]

        def _reschedule(self, node: Any) -> None:
            """Assign a module to a node with one test left: two may take a minute while others are idle."""
            if not self.workqueue or self._pending_of(self.assigned_work[node]) < 2:
                super()._reschedule(node)

    return ByModule(config, log)


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Give this run of tests a cache of its own for ``plan``, and no access to the hub."""
    run_dir = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        run_dir = run_dir.parent  # each process of the run has its own folder below the one of the run
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(run_dir / "cache"))
        patch.setenv("HF_HUB_OFFLINE", "1")
        # With this variable a fork of a test would wait for threads of tokenizers, which forks do not have.
        patch.delenv("TOKENIZERS_PARALLELISM", raising=False)
        yield


@pytest.fixture(autouse=True)
def _own_environment() -> Iterator[None]:
    """Restore the variables that a test, or what it calls, sets in this process."""
    with unittest.mock.patch.dict(os.environ):
        yield


@pytest.fixture(scope="session", autouse=True)
def _no_waits_that_no_test_sees() -> Iterator[None]:
    """Skip work that libraries repeat for each command in this process: a quarter of the time of small tests.

    Processes that tests start do all of it, and tests/faults/power_loss.py tests the calls of fsync.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda fd: os.fstat(fd) and None)
        # A lookup takes 6 ms. The cache is keyed by ``distribution``, which some tests replace.
        version_by = functools.cache(lambda distribution, name: distribution(name).version)
        metadata = importlib.metadata
        patch.setattr(metadata, "version", lambda name: version_by(metadata.distribution, name))
        # argparse looks for translations of its messages 8 times per parser, and there are none.
        patch.setattr(argparse, "_", str)
        yield


@pytest.fixture(scope="session")
def sample_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six files, Korean and English, 840 documents, 450 KB. Never written to."""
    folder = tmp_path_factory.mktemp("sample")
    runpy.run_path(str(ROOT / "examples" / "sample_text.py"))["write_sample_text"](folder)
    return folder


@pytest.fixture(scope="session")
def model_dir(sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer trained on the sample text."""
    folder = tmp_path_factory.mktemp("model") / "tokenizer"
    words = {"input_dir": sample_dir, "vocab_size": 600, "output_dir": folder}
    call_main("train_tokenizer", *flags_of(words)).ends(0)
    return folder


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built and installed into a folder of its own, without its dependencies or a network."""
    folder = tmp_path_factory.mktemp("wheel")
    run_child([sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)])
    (wheel,) = folder.glob("*.whl")
    quiet = ("--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", "--no-compile")
    run_child([sys.executable, "-m", "pip", "install", *quiet, "--target", str(folder / "site"), str(wheel)])
    return folder / "site"


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder with the Llama 3 tokenizer and the corpora, which are not part of the project."""
    wanted = ("tokenizers/llama3/tokenizer.json", "corpora/ko_reviews.txt.xz", "corpora/en_paragraphs.txt.xz")
    for path in (SHARED / name for name in wanted):
        if not path.is_file():
            pytest.skip(f"{path} is missing; SHARDPREP_TEST_SHARED names the folder that has it")
    return SHARED


@pytest.fixture(scope="session")
def corpora_dir(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """20 MB of Korean reviews and 16 MB of English paragraphs as .txt files."""
    folder = tmp_path_factory.mktemp("corpora")
    for path in (shared_dir / "corpora").glob("*.txt.xz"):
        (folder / path.stem).write_bytes(lzma.decompress(path.read_bytes()))
    return folder
