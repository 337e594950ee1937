"""The oracle stands on commands, the loader's public names and the errors alone, so that rooms may move."""

from __future__ import annotations

import ast

import loader
from tests.checkout import ROOT

PACKAGES = {"shardprep", "preprocess", "loader", "slurm", "lustre"}
TESTS = ROOT / "tests"
HELPERS = ("world", "forged", "plain_reader", "input_writers", "word_tokenizers")
HELD = {
    *(TESTS / f"{name}.py" for name in HELPERS),
    *TESTS.glob("*mutants.py"),
    *TESTS.glob("oracle/*.py"),
}


def is_public(module: str, name: str) -> bool:
    if module in ("shardprep.__main__", "preprocess.__main__", "slurm.__main__"):
        return name == "main"
    return module == "shardprep.errors" or (module == "loader" and name in ("", *loader.__all__))


def test_the_oracle_imports_main_the_loader_and_the_errors_and_no_string_names_a_room() -> None:
    assert len(HELD) > 4
    for path in HELD:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            imported: list[tuple[str, str]] = []
            if isinstance(node, ast.Import):
                imported = [(alias.name, "") for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                imported = [(node.module or "", alias.name) for alias in node.names]
            for module, name in imported:
                if module.split(".")[0] in PACKAGES:
                    assert is_public(module, name), f"{path} imports {module} {name}"
                if module.split(".")[0] == "tests":  # helpers that obey the same rule
                    files = {ROOT.joinpath(*module.split(".")).with_suffix(".py")}
                    files.add(ROOT.joinpath(*module.split("."), f"{name}.py"))
                    assert files & {*HELD, TESTS / "checkout.py"}, f"{path} imports {module} {name}"
            if isinstance(node, ast.Constant) and isinstance(node.value, str):  # as of an attribute to patch
                first, _, rest = node.value.partition(".")
                room = ROOT.joinpath(first, *rest.split("."))
                is_room = first in PACKAGES and (room.is_dir() or room.with_suffix(".py").is_file())
                assert not is_room or rest in ("", "__main__", "errors"), f"{path} names {node.value}"
