"""Threads that read facts on disk at the same time, as those of verify and of a loader do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.world import World

# In processes that have met none of the types of these facts.
SCRIPT = """
import importlib, os, pkgutil, sys
from shardprep.__main__ import main
for name in ("preprocess", "shardprep.format"):
    package = importlib.import_module(name)
    for each in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{name}.{each.name}")

sys.setswitchinterval(1e-6)
for _ in range(12):
    child = os.fork()
    if child == 0:
        os._exit(main(["verify", sys.argv[1], "--fast"]))
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"verify ended with the status {status}"
"""


@pytest.mark.slow
@pytest.mark.processes
def test_threads_that_read_the_first_manifests_at_the_same_time_do_not_end_verify(tmp_path: Path) -> None:
    """msgspec 0.20 looks at a type when it first meets it, and ended the process where two threads did so."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 400}).make(num_shards=40)
    run_child([sys.executable, "-c", SCRIPT, str(world.data_dir)], cwd=ROOT)
