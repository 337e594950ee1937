"""The oracle stands on commands, the loader's public names and the errors alone, so that rooms may move."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import loader
from tests.checkout import ROOT

PACKAGES = {"shardprep", "preprocess", "loader", "slurm", "lustre"}
HELD = [
    *(ROOT / "tests" / f"{name}.py" for name in ("world", "forged", "plain_reader", "word_tokenizers")),
    *(ROOT / "tests").glob("*mutants.py"),
    *sorted((ROOT / "tests").glob("oracle*/**/*.py")),
    *sorted((ROOT / "tests").glob("oracle*.py")),
]


def imported(path: Path) -> Iterator[tuple[str, str]]:
    """Yield the module and the name of each import of a file; the name is empty for a module as a whole."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.module or "", alias.name) for alias in node.names)


def is_public(module: str, name: str) -> bool:
    if module in ("shardprep.__main__", "preprocess.__main__", "slurm.__main__"):
        return name == "main"
    return module == "shardprep.errors" or (module == "loader" and name in ("", *loader.__all__))


def test_the_oracle_imports_main_the_loader_and_the_errors_alone() -> None:
    held = set(HELD)
    assert len(held) > 4
    for path in HELD:
        for module, name in imported(path):
            if module.split(".")[0] in PACKAGES:
                assert is_public(module, name), f"{path} imports {module} {name}"
            if module.split(".")[0] == "tests":
                # Helpers of tests may be used, if they obey the same rule.
                file = ROOT.joinpath(*module.split(".")).with_suffix(".py")
                inner = ROOT.joinpath(*module.split("."), f"{name}.py")
                used = file if file.is_file() else inner
                assert used in held or used.name == "checkout.py", f"{path} imports {module} {name}"


def test_no_door_but_the_command_is_used_to_reach_a_room() -> None:
    """A patched attribute or a name in a string would nail a test to a room, too."""
    for path in HELD:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                first, _, rest = node.value.partition(".")
                room = ROOT.joinpath(first, *rest.split("."))
                is_room = first in PACKAGES and (room.is_dir() or room.with_suffix(".py").is_file())
                is_door = rest in ("", "__main__", "errors")
                assert is_door or not is_room, f"{path} names {node.value}"
