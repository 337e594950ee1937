"""Every example of training keeps documents apart, and ends each with EOS, as README says."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.documented import examples_of

# A page is read from top to bottom: an example may use a dictionary of one above it.
# Conversations are packed by plan.
SCRIPTS = {
    page: "\n".join(code for code in examples_of(page) if "SFTTrainer" not in code)
    for page in ("README.md", *sorted(path.name for path in (ROOT / "docs").glob("*.md")))
}
SCRIPTS |= {path.name: path.read_text("utf-8") for path in (ROOT / "examples").glob("*.py")}
# `make demo` prints the beginning of a training script at its end.
SCRIPTS["demo.sh"] = "\n".join(
    re.findall(r"^dataloader = .*$", (ROOT / "examples/demo.sh").read_text("utf-8"), re.MULTILINE)
)


def arguments_of_loaders(code: str) -> list[set[str]]:
    """Return the names of the arguments of each loader that a script makes, of dictionaries, too."""
    tree = ast.parse(code)
    dictionaries = {
        str(target): {key.value for key in node.value.keys if isinstance(key, ast.Constant)}
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        for target in (each.id for each in node.targets if isinstance(each, ast.Name))
    }
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "get_llama3_dataloader":
            names: set[str] = set()
            for keyword in node.keywords:
                if keyword.arg:
                    names.add(keyword.arg)
                elif isinstance(keyword.value, ast.Name):
                    names |= {str(name) for name in dictionaries.get(keyword.value.id, ())}
            found.append(names)
    return found


def test_every_loader_of_an_example_packs_documents_and_keeps_them_apart() -> None:
    loaders = [(name, names) for name, code in SCRIPTS.items() for names in arguments_of_loaders(code)]
    assert len(loaders) > 15
    for name, names in loaders:
        assert {"seq_len", "boundaries"} <= names, (name, names)


@pytest.mark.processes
def test_tasks_of_a_node_that_begin_together_enter_one_unpacked_environment(tmp_path: Path) -> None:
    environment, shared = tmp_path / "ENV", tmp_path / "shared"
    (environment / "bin").mkdir(parents=True)
    shared.mkdir()
    (environment / "bin/python").write_text("#!/bin/sh\necho from_the_tar\n")
    (environment / "bin/python").chmod(0o755)
    setup = shutil.copy(ROOT / "examples/environment_on_node.sh", shared)
    subprocess.run(["tar", "-C", environment, "-cf", shared / "environment.tar", "."], check=True)
    command = ["bash", "-c", f"source {setup}; echo $environment; python"]
    tasks = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    told = {task.communicate()[0] for task in tasks}
    (place, words) = told.pop().split()
    try:
        assert (told, words) == (set(), "from_the_tar")
        assert [*Path("/tmp").glob(f"{Path(place).name}*")] == [Path(place)], "no half is left"
    finally:
        shutil.rmtree(place)
