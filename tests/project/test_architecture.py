"""The arrows between the packages, and that a worker loads none of the heavy libraries."""

from __future__ import annotations

import ast
import functools
import json
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.checkout import ROOT
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
HEAVY = {"torch", "transformers", "webdataset"}


def imports_of(path: Path) -> set[str]:
    """Every module that a file imports, inside functions too; relative ones resolved."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = path.relative_to(ROOT).parent.parts
                base = ".".join([*parts[: len(parts) - node.level + 1], *([base] if base else [])])
            found |= {base} | {f"{base}.{name.name}" for name in node.names}
    return found


@functools.cache
def modules(package: str) -> dict[str, set[str]]:
    """File of a package -> the modules of this project that it imports."""
    paths = (ROOT / package).rglob("*.py")
    return {
        path.relative_to(ROOT).as_posix(): {
            name for name in imports_of(path) if name.split(".")[0] in PACKAGES
        }
        for path in paths
    }


def others(package: str) -> dict[str, set[str]]:
    """File of a package -> what it imports of the other four."""
    return {
        path: {name for name in names if name.split(".")[0] != package}
        for path, names in modules(package).items()
    }


@pytest.mark.slow
def test_the_packages_are_there_and_their_imports_are_seen() -> None:
    for package in PACKAGES:
        assert modules(package), package
    assert "preprocess.make.worker" in modules("preprocess")["preprocess/make/local_run.py"]
    assert any(names for names in others("loader").values()), "it stands on the format"


def test_shardprep_imports_nothing_of_ours_but_its_own() -> None:
    for path, names in others("shardprep").items():
        lent = {"loader", "loader.get_llama3_dataloader"} if path == "shardprep/__init__.py" else set()
        assert names <= lent, path  # from shardprep import get_llama3_dataloader, when it is asked for


def test_of_shardprep_the_format_stands_on_the_rest_and_not_the_other_way() -> None:
    """Nor do strings that are imported by name: the command's table alone has the packages' names."""
    for path, names in modules("shardprep").items():
        assert path.startswith("shardprep/format/") or not any("format" in name for name in names), path
    named = {
        path.name
        for path in (ROOT / "shardprep").rglob("*.py")
        if re.search(r'"(preprocess|loader|slurm|lustre)[".:]', path.read_text(encoding="utf-8"))
    }
    assert named == {"__main__.py"}


def test_the_loader_imports_shardprep_alone() -> None:
    for path, names in others("loader").items():
        assert {name.split(".")[0] for name in names} <= {"shardprep"}, path


@pytest.mark.slow
def test_inside_of_the_loader_imports_go_one_way() -> None:
    way = ["order", "external_tars", "shards", "url_copies", "find_shards", "withdrawn", "chunks", "reading"]
    way += ["decode", "tokenizer", "ranks", "samples", "run", "sources", "state", "rounds", "workers"]
    way += ["boundaries", "context_parallel", "batches", "origins", "describe", "token_loader", "dataloader"]
    files = modules("loader")
    for number, stage in enumerate(way):
        found = {name for name in files[f"loader/{stage}.py"] if name.startswith("loader.")}
        before = [f"loader.{name}" for name in way[:number]]
        if stage == "token_loader":
            before.append("loader.collator")  # in a function: transformers' collator, if it is looked at
        if stage == "describe":
            before.append("loader.token_loader")  # for its type alone
        assert all(name.startswith(tuple(before)) for name in found), (stage, found)


def test_lustre_imports_shardprep_alone() -> None:
    for path, names in others("lustre").items():
        assert {name.split(".")[0] for name in names} <= {"shardprep"}, path


@pytest.mark.slow
def test_nobody_imports_slurm() -> None:
    for package in PACKAGES:
        for path, names in others(package).items():
            assert not any(name.split(".")[0] == "slurm" for name in names), path


def test_slurm_imports_shardprep_and_lustre_and_starts_the_worker_as_a_command() -> None:
    for path, names in others("slurm").items():
        assert {name.split(".")[0] for name in names} <= {"shardprep", "lustre"}, path


@pytest.mark.slow
def test_of_preprocess_few_modules_import_lustre_and_none_imports_the_loader() -> None:
    users = {
        path
        for path, names in others("preprocess").items()
        if {n.split(".")[0] for n in names} - {"shardprep"}
    }
    commands = {"preprocess/__main__.py", "preprocess/plan/planning.py"}
    assert users == {*commands, "preprocess/make/task.py", "preprocess/look/doctor.py"}
    for names in others("preprocess").values():
        assert {name.split(".")[0] for name in names} <= {"shardprep", "lustre"}


@pytest.mark.slow
def test_inside_of_preprocess_imports_follow_the_way_of_the_text() -> None:
    """Each stage imports stages before it alone; a shard's writer knows neither rows nor options."""
    way = [
        "read.text_fields",
        "read.text_changes",
        "read.inputs",
    ]
    way += [f"read.{name}" for name in ("chat", "format", "lines", "compressed", "text_lines", "json_lines")]
    way += [f"read.{name}" for name in ("table_values", "columns", "parquet", "arrow", "documents")]
    way += [f"make.{name}" for name in ("engines", "packing", "members")]
    files = modules("preprocess")
    for number, stage in enumerate(way):
        found = {
            name
            for name in files[f"preprocess/{stage.replace('.', '/')}.py"]
            if name.startswith("preprocess.") and name != "preprocess.read"  # a package without code
        }
        before = tuple(f"preprocess.{name}" for name in way[:number])
        assert all(name.startswith(before) for name in found), (stage, found)
    writer = files["preprocess/make/shard_writer.py"]
    assert "preprocess.make.members" in writer
    assert not any(
        name.startswith(("preprocess.make.packing", "shardprep.format.options")) for name in writer
    )


def test_the_format_needs_nothing_but_the_standard_library_numpy_orjson_and_msgspec() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "orjson", "msgspec", "shardprep", "typing_extensions"}
    paths = list((ROOT / "shardprep" / "format").glob("*.py"))
    assert paths
    for path in paths:
        for name in imports_of(path):
            assert name.split(".")[0] in allowed, (path.name, name)


LIST_MODULES = """
import json, runpy, sys, threading
import preprocess.make.worker as worker
seen = worker.Worker.run_shard
def run_shard(self, shard, progress):
    manifest = seen(self, shard, progress)
    with open({report!r}, "a") as file:
        file.write(json.dumps(sorted(sys.modules)) + "\\n")
    return manifest
worker.Worker.run_shard = run_shard
"""


@pytest.mark.processes
@pytest.mark.parametrize("form", ["shard of a plan", "plain form", "run"])
def test_a_process_that_makes_a_shard_has_no_heavy_library(
    prep: Prep, planned_dir: Path, data_dir: Path, sample_dir: Path, tmp_path: Path, form: str
) -> None:
    """A small program around main lists sys.modules right after each shard, in workers of ``run``, too."""
    report = tmp_path / "modules.jsonl"
    argv = {
        "shard of a plan": ["--shard_id", "0", "--output_dir", str(data_dir)],
        "plain form": [
            "--shard_id", "0", "--output_dir", str(tmp_path / "fresh"), "--input_dir", str(sample_dir),
            "--model_id", str(prep.model_dir),
        ],
        "run": ["run", str(data_dir), "--num_proc", "2", "--shards", "0-1"],
    }[form]  # fmt: skip
    program = tmp_path / "program.py"
    program.write_text(
        LIST_MODULES.format(report=str(report))
        + f"from preprocess.__main__ import main\nif __name__ == '__main__':\n    sys.exit(main({argv!r}))\n"
    )
    run_child([sys.executable, program], env={**prep.environ(), "PYTHONPATH": str(ROOT)})
    lists = [json.loads(line) for line in report.read_text().splitlines()]
    assert len(lists) == (2 if form == "run" else 1)
    for names in lists:
        assert {"numpy", "preprocess.make.shard_writer"} <= set(names), "this is a worker"
        assert {"gigatoken", "tokenizers"} & set(names), "it has an engine"
        assert not HEAVY & {name.split(".")[0] for name in names}
