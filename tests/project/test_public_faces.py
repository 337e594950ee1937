"""Tests use the product as users do: by commands, ``loader``, errors, and names in the documentation.

So they need not change when internal modules move.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.checkout import PACKAGES, ROOT

# Modules whose names are all public, and public names of other modules.
PUBLIC_MODULES = {
    "loader",
    "lustre",
    "slurm",
    "shardprep",
    "shardprep.errors",
    "shardprep.meanings",
    "loader.other_loaders",
}
# The doors of docs/architecture.md have tests of their own, too.
PUBLIC_NAMES = {
    "main", "COMMANDS", "DataFolder", "has_bounded_cost", "AttemptMark", "end_other_attempts",
}  # fmt: skip
# What parses text, in modules that also run commands.
PUBLIC_NAMES |= {"Job", "parse_queue", "parse_stripe", "size_text"}
# Modules that read and write nothing have tests of their own, in a file of their name.
PURE_MODULES = {
    "loader.batch.fields",
    "loader.order.amendment",
    "loader.order.forecast",
    "loader.order.hashes",
    "loader.order.mixture",
    "loader.order.order",
    "loader.order.planned",
    "loader.read.json_ids",
    "preprocess.make.packing",
    "preprocess.make.tar_headers",
    "preprocess.make.token_ids",
    "preprocess.read.json_lines",
    "preprocess.read.text_fields",
    "shardprep.format.plan_options",
    "shardprep.format.spec",
    "shardprep.launch",
}
FOLDERS = [
    ".", "faults", "format", "loader", "loader/batch", "loader/order", "loader/read", "lustre", "oracle",
    "preprocess", "preprocess/make", "preprocess/plan", "preprocess/read", "project", "slurm",
]  # fmt: skip


@functools.cache
def names_of_pages() -> set[str]:
    """Return ``loader.trainer.LoaderMixin`` and other names that the documentation mentions."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    imported = re.findall(r"^\s*from ([a-z_.]+) import (\w+)", text, re.MULTILINE)
    return {".".join(each) for each in imported} | set(re.findall(r"`([a-z_]+\.[a-z_]+\.\w+)", text))


def inner_names_and_sentences(path: Path) -> set[str]:
    """Return imports of internal names, and the ``match`` arguments with which sentences are compared."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            for name in node.names:
                is_module = (ROOT / str(node.module).replace(".", "/") / f"{name.name}.py").exists()
                whole = f"{node.module}.{name.name}"
                is_public = whole in PUBLIC_MODULES or (node.module in PUBLIC_MODULES and not is_module)
                is_public |= node.module in PURE_MODULES and not name.name.startswith("_")
                if not is_public and whole not in names_of_pages() and name.name not in PUBLIC_NAMES:
                    found.add(whole)
        elif isinstance(node, ast.Import):
            ours = {name.name for name in node.names if name.name.partition(".")[0] in PACKAGES}
            found |= {name for name in ours - PUBLIC_MODULES if not name.endswith(".__main__")}
        elif isinstance(node, ast.Call):
            found |= {ast.unparse(each) for each in node.keywords if each.arg == "match"}
    return found


@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_import_no_internal_names_and_match_no_sentences(folder: str) -> None:
    paths = sorted((ROOT / "tests" / folder).glob("*.py"))
    assert paths
    assert {path.name: found for path in paths if (found := inner_names_and_sentences(path))} == {}


def test_the_check_finds_internal_names_and_sentences(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(
        "from loader import get_llama3_dataloader\n"
        "from loader.order import lane, block\n"
        "import shardprep.files, preprocess.__main__\n"
        "with pytest.raises(ValueError, match='no'): pass\n"
    )
    inner = {"loader.order.lane", "loader.order.block", "shardprep.files", "match='no'"}
    assert inner_names_and_sentences(tmp_path / "test_it.py") == inner
