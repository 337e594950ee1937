"""The oracle uses only commands, the loader's public names and the errors, so that modules can move."""

from __future__ import annotations

import ast
import re

import loader
from tests.checkout import ROOT

TESTS = ROOT / "tests"
# Helpers of the oracle follow the same rule.
HELPERS = ("world", "forged", "plain_reader", "input_writers", "random_inputs", "word_tokenizers")
HELD = [*(TESTS / f"{name}.py" for name in HELPERS), *TESTS.glob("*mutants.py"), *TESTS.glob("oracle/*.py")]
FREE = {"shardprep.__main__.main", "shardprep.errors", "loader", *map("loader.{}".format, loader.__all__)}
OURS = re.compile(r"(?:shardprep|preprocess|loader|slurm|lustre|tests)(?:\.\w+)*")


def test_the_oracle_imports_only_main_the_loader_and_the_errors_and_no_string_names_a_module() -> None:
    helpers = {".".join(path.relative_to(ROOT).with_suffix("").parts) for path in HELD} | {"tests.checkout"}
    for path in HELD:
        names = []
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                names += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module in helpers | {"shardprep.errors"}:
                names.append(node.module)
            elif isinstance(node, ast.ImportFrom):
                names += [f"{node.module}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Constant) and OURS.fullmatch(text := str(node.value)):  # e.g. a patch
                names += [text] if (ROOT / f"{text.replace('.', '/')}.py").is_file() else []
        assert {*filter(OURS.fullmatch, names)} <= FREE | helpers, path
