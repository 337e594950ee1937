"""The arrows between the packages and inside of them, and that a worker loads none of the heavy libraries."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.checkout import PACKAGES, ROOT
from tests.children import environ_of_children, run_child, shardprep
from tests.world import World

HEAVY = {"torch", "transformers", "webdataset"}
# Folder -> what of ours its modules may import: a package, or a folder of one.
ARROWS = {
    "shardprep": {"shardprep"},
    "shardprep/format": {"shardprep", "shardprep.format"},
    "lustre": {"lustre", "shardprep"},
    "loader": {"loader", "shardprep"},
    "slurm": {"slurm", "shardprep", "lustre"},
    "preprocess": {"preprocess", "shardprep", "lustre"},
    "preprocess/read": {"preprocess.read", "shardprep"},
    "preprocess/plan": {"preprocess.read", "preprocess.make", "preprocess.plan", "shardprep", "lustre"},
    "preprocess/make": {"preprocess.read", "preprocess.make", "shardprep", "lustre"},
}
# The one place of shardprep that lends a name of another package: ``from shardprep import ...``.
LENT = {"shardprep/__init__.py": {"loader"}}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too, but for types alone."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            for_types |= set(ast.walk(node))
    found = set()
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return found


@functools.cache
def modules(folder: str) -> dict[str, set[str]]:
    """File of a package, or of a folder alone -> the modules of this project that it imports."""
    paths = (ROOT / folder).rglob("*.py") if folder in PACKAGES else (ROOT / folder).glob("*.py")
    found = {}
    for path in paths:
        ours = {name for name in imports_of(path) if name.partition(".")[0] in PACKAGES}
        found[path.relative_to(ROOT).as_posix()] = {name for name in ours if is_module(name)}
    assert found
    return found


@functools.cache
def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.with_suffix(".py").exists() or (path / "__init__.py").exists()


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_what_stands_before_it_alone(folder: str) -> None:
    allowed = ARROWS[folder]
    for path, names in modules(folder).items():
        for name in names - LENT.get(path, set()):
            package = name.partition(".")[0]
            is_own = name == path.partition("/")[0]  # as ``from preprocess import read`` names it, too
            assert is_own or {package, ".".join(name.split(".")[:2])} & allowed, f"{path} imports {name}"
            if folder == "shardprep" and "/format/" not in path:
                assert not name.startswith("shardprep.format"), f"{path} imports {name}"


@pytest.mark.parametrize("package", PACKAGES)
def test_inside_of_a_package_imports_go_one_way(package: str) -> None:
    """No module imports one that imports it, by however many others: the error names such a circle."""
    imported = {name.removesuffix(".py").replace("/", "."): names for name, names in modules(package).items()}
    TopologicalSorter({name: names - {name} for name, names in imported.items()}).prepare()


def test_names_of_packages_stand_in_no_string_of_shardprep_but_the_table_of_commands() -> None:
    """Nobody imports another package by its name."""
    named = {
        path.name
        for path in (ROOT / "shardprep").rglob("*.py")
        if re.search(r'"(preprocess|loader|slurm|lustre)[".:]', path.read_text(encoding="utf-8"))
    }
    assert named == {"__main__.py"}


def test_the_format_needs_nothing_but_the_standard_library_numpy_orjson_and_msgspec() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "orjson", "msgspec", "shardprep", "typing_extensions"}
    for path in (ROOT / "shardprep" / "format").glob("*.py"):
        assert {name.partition(".")[0] for name in imports_of(path)} <= allowed, path.name


# Read by each Python that starts: what a process that makes shards has imported by its end.
REPORTING = """
import atexit, json, multiprocessing.util, os, sys
def tell(*_):
    if "preprocess.make.shard_writer" in sys.modules:
        with open(os.environ["REPORT"], "a") as file:
            file.write(json.dumps(sorted(sys.modules)) + "\\n")
atexit.register(tell)
multiprocessing.util.Finalize(None, tell, exitpriority=0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("form", ["shard of a plan", "plain form", "run"])
def test_a_process_that_makes_a_shard_has_no_heavy_library(tmp_path: Path, form: str) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 90})
    words = ["shard", "--shard_id", "0", "--output_dir", world.data_dir]
    if form == "plain form":
        words += ["--input_dir", world.raw_dir, "--model_id", world.tokenizer]
    else:
        world.plan(num_shards=2)
    if form == "run":
        words = ["run", world.data_dir, "--num_proc", "2"]
    (tmp_path / "sitecustomize.py").write_text(REPORTING)
    report = tmp_path / "modules.jsonl"
    environ = environ_of_children(PYTHONPATH=f"{tmp_path}:{ROOT}", REPORT=str(report))
    run_child(shardprep(*words), env=environ)
    lists = [set(json.loads(line)) for line in report.read_text().splitlines()]
    assert any({"gigatoken", "tokenizers"} & names for names in lists), "one of them has an engine"
    for names in lists:
        assert not HEAVY & {name.split(".")[0] for name in names}
