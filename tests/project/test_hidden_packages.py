"""A user's own preprocess.py and loader.py, beside a script or in the current folder."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import environ_of_children, run_child
from tests.world import World

pytestmark = pytest.mark.processes

THEIRS = "raise SystemExit('the old script was run')\n"
# The console command, as pip writes it.
COMMAND = """
import sys
from shardprep.__main__ import main
if __name__ == "__main__":
    sys.exit(main())
"""
MAKE = "from slurm.send import MakeShards; import os, sys; os.chdir(sys.argv[2]); "
MAKE += "MakeShards()(sys.argv[1], '0')"


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the first script's files, which say that they were run."""
    folder = tmp_path / "desk"
    folder.mkdir()
    for name in ("preprocess", "loader"):
        (folder / f"{name}.py").write_text(THEIRS)
    return folder


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).raw({"a.txt": "a line\n" * 40}).plan(num_shards=3)


def run(folder: Path, *command: object, code: int = 0) -> tuple[str, str]:
    """Run a command there: its standard output and the last line of its standard error."""
    done = run_child([str(word) for word in command], cwd=folder, env=environ_of_children(), code=code)
    assert "the old script was run" not in done.stdout + done.stderr
    return done.stdout, (done.stderr.splitlines() or [""])[-1]


def test_the_command_shardprep_its_workers_and_submitits_tasks_work_in_a_folder_with_a_preprocess_py(
    world: World, desk: Path, tmp_path: Path
) -> None:
    run(ROOT, sys.executable, "-c", MAKE, world.data_dir, desk)
    assert (world.data_dir / "shard-00000.json").exists()
    script = tmp_path / "shardprep"
    script.write_text(COMMAND)
    run(desk, sys.executable, script, "run", world.data_dir, "--num_proc", 2)
    assert len(list(world.data_dir.glob("shard-*.json"))) == 3


@pytest.mark.parametrize("module", ["slurm", "shardprep"])
def test_a_command_in_such_a_folder_names_the_file(world: World, desk: Path, module: str) -> None:
    _, said = run(desk, sys.executable, "-m", module, "status", world.data_dir, code=2)
    assert said.startswith(f"error: {desk / 'preprocess.py'} ")


@pytest.mark.parametrize("hiding", ["file", "package", "imported before"])
def test_a_script_beside_a_preprocess_py_is_told_which_file_to_rename(tmp_path: Path, hiding: str) -> None:
    script, theirs = tmp_path / "train.py", tmp_path / "preprocess.py"
    if hiding == "package":
        theirs = tmp_path / "preprocess" / "__init__.py"
        theirs.parent.mkdir()
    theirs.write_text("" if hiding == "imported before" else THEIRS)
    script.write_text(("import preprocess\n" if hiding == "imported before" else "") + "import slurm\n")
    _, said = run(tmp_path, sys.executable, script, code=1)
    assert said.startswith(f"ImportError: {theirs} ")


def test_a_preprocess_py_beside_the_training_script_is_no_matter_to_the_loader_and_a_loader_py_is_named(
    tmp_path: Path,
) -> None:
    (tmp_path / "preprocess.py").write_text(THEIRS)
    (tmp_path / "train.py").write_text("from loader import get_llama3_dataloader\nprint('imported')\n")
    assert run(tmp_path, sys.executable, "train.py")[0] == "imported\n"
    (tmp_path / "loader.py").write_text("")
    assert str(tmp_path / "loader.py") in run(tmp_path, sys.executable, "train.py", code=1)[1]
