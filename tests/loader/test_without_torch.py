"""Where torch is not installed: what needs it says which extra to install, and what does not works."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.waiting import HANG_S

pytestmark = pytest.mark.processes

HIDE_TORCH = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else found(name, *rest)
"""


def run(tmp_path: Path, *words: object) -> subprocess.CompletedProcess[str]:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    (hidden / "sitecustomize.py").write_text(HIDE_TORCH)
    return subprocess.run(
        [sys.executable, *map(str, words)],
        env={**os.environ, "PYTHONPATH": f"{hidden}{os.pathsep}{ROOT}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=HANG_S,
    )


def test_importing_the_loader_names_the_extra(tmp_path: Path) -> None:
    done = run(tmp_path, "-c", "from loader import get_llama3_dataloader")
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == (
        "ModuleNotFoundError: loader.get_llama3_dataloader needs torch, which is not installed; "
        "run: pip install 'shardprep[loader]'"
    )
    assert "During handling" not in done.stderr


@pytest.mark.parametrize("words", [[], ["where", "--state", "checkpoint.pt"]])
def test_a_command_that_needs_torch_names_the_extra_in_one_line(
    tmp_path: Path, made_dir: Path, words: list[str]
) -> None:
    done = run(tmp_path, "-m", "loader", *words[:1], made_dir, *words[1:])
    assert (done.returncode, done.stderr) == (
        2,
        "error: this command needs torch, which is not installed; run: pip install 'shardprep[loader]'\n",
    )


def test_staging_needs_no_torch(tmp_path: Path, made_dir: Path) -> None:
    done = run(tmp_path, "-m", "loader", "stage", made_dir, "--to", tmp_path / "staged")
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list((tmp_path / "staged").rglob("*.tar"))) == 3
