"""Tests see the product as its users do: by commands, by ``loader``, by errors and by what the pages name.

Tests on inner names had to be changed with every module that moved; those on public faces had not.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path

import pytest

from tests.checkout import ROOT

PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
# Modules whose names are public, and of others the names that are.
PUBLIC_MODULES = {"loader", "lustre", "slurm", "shardprep", "shardprep.errors", "shardprep.removed"}
PUBLIC_NAMES = {"main", "COMMANDS"}
FOLDERS = [".", "faults", "format", "loader", "lustre", "oracle", "preprocess", "project", "slurm"]


@functools.cache
def imports_and_calls(folder: Path) -> list[ast.Import | ast.ImportFrom | ast.Call]:
    """Return these nodes of all modules of a folder."""
    paths = sorted(folder.glob("*.py"))
    assert paths
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in paths]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return [node for node in nodes if isinstance(node, (ast.Import, ast.ImportFrom, ast.Call))]


@functools.cache
def names_of_pages(root: Path) -> set[str]:
    """Return ``loader.trainer.LoaderMixin`` and other names that the pages tell users to import."""
    pages = [root / "README.md", *sorted((root / "docs").glob("*.md"))]
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages if page.exists())
    imported = re.findall(r"^\s*from ([a-z_.]+) import (\w+)", text, re.MULTILINE)
    return {".".join(each) for each in imported} | set(re.findall(r"`([a-z_]+\.[a-z_]+\.\w+)", text))


def inner_names(folder: str) -> set[str]:
    """``module.name`` of each import of the product that is no public face."""
    found = set()
    for node in imports_and_calls(ROOT / "tests" / folder):
        if isinstance(node, ast.ImportFrom) and str(node.module).partition(".")[0] in PACKAGES:
            for name in node.names:
                is_module = (ROOT / str(node.module).replace(".", "/") / f"{name.name}.py").exists()
                whole = f"{node.module}.{name.name}"
                is_public = whole in PUBLIC_MODULES or (node.module in PUBLIC_MODULES and not is_module)
                is_public |= whole in names_of_pages(ROOT)
                if not is_public and name.name not in PUBLIC_NAMES:
                    found.add(whole)
        elif isinstance(node, ast.Import):
            for name in node.names:
                is_ours = name.name.partition(".")[0] in PACKAGES
                if is_ours and name.name not in PUBLIC_MODULES and not name.name.endswith(".__main__"):
                    found.add(name.name)
    return found


def matched_sentences(folder: str) -> int:
    """How often a test matches the text of an error."""
    calls = [node for node in imports_and_calls(ROOT / "tests" / folder) if isinstance(node, ast.Call)]
    return sum(keyword.arg == "match" for call in calls for keyword in call.keywords)


@pytest.mark.parametrize("folder", FOLDERS)
def test_tests_import_no_inner_names_and_match_no_sentences(folder: str) -> None:
    assert inner_names(folder) == set()
    assert matched_sentences(folder) == 0


def test_an_inner_name_and_a_sentence_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.project.test_public_faces.ROOT", tmp_path)
    (tmp_path / "tests" / "some").mkdir(parents=True)
    (tmp_path / "tests" / "some" / "test_it.py").write_text(
        "from loader import get_llama3_dataloader\n"
        "from loader.order import lane, block\n"
        "import shardprep.files, preprocess.__main__\n"
        "with pytest.raises(ValueError, match='no'): pass\n"
    )
    assert inner_names("some") == {"loader.order.lane", "loader.order.block", "shardprep.files"}
    assert matched_sentences("some") == 1
