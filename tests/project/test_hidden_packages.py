"""A user's own preprocess.py and loader.py, beside a script or in the current folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

MAKE = "from slurm.submitit_executor import MakeShards; import os, sys; os.chdir(sys.argv[2]); "
MAKE += "MakeShards()(sys.argv[1], '0')"


@pytest.fixture(scope="module")
def shardprep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The console command, as pip writes it."""
    script = tmp_path_factory.mktemp("bin") / "shardprep"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nfrom shardprep.__main__ import main\n"
        "if __name__ == '__main__':\n    sys.exit(main())\n"
    )
    script.chmod(0o755)
    return script


@pytest.fixture
def desk(tmp_path: Path) -> Path:
    """A folder with the baseline's files, which say that they were run."""
    folder = tmp_path / "desk"
    folder.mkdir()
    for name in ("preprocess", "loader"):
        (folder / f"{name}.py").write_text("raise SystemExit('the old script was run')\n")
    return folder


def run(prep: Prep, folder: Path, *command: object) -> subprocess.CompletedProcess[str]:
    done = run_child([str(word) for word in command], cwd=folder, env=prep.environ(), code=None)
    assert "the old script was run" not in done.stdout + done.stderr
    return done


def test_the_command_shardprep_works_in_a_folder_with_a_preprocess_py(
    prep: Prep, sample_dir: Path, desk: Path, tmp_path: Path, shardprep: Path
) -> None:
    data = tmp_path / "data"
    plan = ("--input_dir", sample_dir, "--output_dir", data, "--model_id", prep.model_dir, "--num_shards", 2)
    for words in (("plan", *plan), ("run", data, "--num_proc", 2), ("verify", data)):
        done = run(prep, desk, shardprep, *words)
        assert done.returncode == 0, done.stderr
    assert (data / "index.json").exists()


def test_submitits_tasks_make_their_shards_in_such_a_folder(prep: Prep, data_dir: Path, desk: Path) -> None:
    done = run(prep, data_dir, sys.executable, "-c", MAKE, data_dir, desk)
    assert done.returncode == 0, done.stderr
    assert (data_dir / "shard-00000.json").exists()


def test_a_command_in_such_a_folder_names_the_file_and_what_to_do(
    prep: Prep, data_dir: Path, desk: Path
) -> None:
    done = run(prep, desk, sys.executable, "-m", "slurm", "status", data_dir)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {desk / 'preprocess.py'} hides shardprep's package of the same")
    assert "rename it" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("hiding", ["file", "package", "imported before"])
def test_a_script_beside_a_preprocess_py_is_told_which_file_to_rename(
    prep: Prep, tmp_path: Path, hiding: str
) -> None:
    script, theirs = tmp_path / "train.py", tmp_path / "preprocess.py"
    if hiding == "package":
        theirs = tmp_path / "preprocess" / "__init__.py"
        theirs.parent.mkdir()
    theirs.write_text("" if hiding == "imported before" else "raise SystemExit('the old script was run')")
    script.write_text(("import preprocess\n" if hiding == "imported before" else "") + "import slurm\n")
    done = run(prep, tmp_path, sys.executable, script)
    assert done.returncode == 1
    assert f"ImportError: {theirs} hides shardprep's package of the same name" in done.stderr.splitlines()[-1]


def test_a_preprocess_py_beside_the_training_script_is_no_matter_to_the_loader(
    prep: Prep, tmp_path: Path
) -> None:
    (tmp_path / "preprocess.py").write_text("raise SystemExit('the old script was run')\n")
    (tmp_path / "train.py").write_text("from loader import get_llama3_dataloader\nprint('imported')\n")
    done = run(prep, tmp_path, sys.executable, "train.py")
    assert done.stdout == "imported\n", done.stderr


def test_a_loader_py_beside_the_training_script_is_named_by_python_itself(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "loader.py").write_text("")
    (tmp_path / "train.py").write_text("from loader import get_llama3_dataloader\n")
    done = run(prep, tmp_path, sys.executable, "train.py")
    assert str(tmp_path / "loader.py") in done.stderr.splitlines()[-1]
