"""slurm/prep_array.sh without Slurm: an srun of the test starts what it is given."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.children import run_child
from tests.slurm.fake_slurm import Desk

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "slurm" / "prep_array.sh"


def srun_that(body: str) -> str:
    return f"#!/bin/bash\n{body}\n"


SLURM_MANGLES = {137: 75, 255: 75}  # a worker that was killed, and one that srun could not start


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78, *SLURM_MANGLES])
def test_the_workers_exit_codes_are_the_tasks_but_for_those_that_slurm_mangles(
    desk: Desk, tmp_path: Path, code: int
) -> None:
    desk.task(cwd=tmp_path, code=SLURM_MANGLES.get(code, code), srun=srun_that(f"exit {code}"))


@pytest.mark.parametrize("num_nodes", ["1", "2"])
def test_more_than_one_task_is_refused(desk: Desk, tmp_path: Path, num_nodes: str) -> None:
    sizes = {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": num_nodes}
    desk.task(cwd=tmp_path, code=2, srun=srun_that("touch started"), environ=sizes)
    assert not (tmp_path / "started").exists()


def test_outside_a_job_array_it_prints_the_line_to_type(tmp_path: Path) -> None:
    said = run_child([SCRIPT, "my data"], cwd=tmp_path, code=2).stderr
    assert said.endswith(f"type: sbatch --array=0-9 {SCRIPT.resolve()} my\\ data\n")


@pytest.mark.parametrize("what", ["nothing", "an old preprocess.py", "the package alone"])
def test_a_python_without_the_package_or_its_dependencies_is_named_with_what_it_lacks(
    desk: Desk, tmp_path: Path, what: str
) -> None:
    bare = tmp_path / "bare"
    run_child([sys.executable, "-m", "venv", "--without-pip", bare])
    path = str(ROOT) if what == "the package alone" else ""
    environ = {"SHARDPREP_PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": path}
    if what == "an old preprocess.py":
        (tmp_path / "preprocess.py").write_text("print('the old script')")
    said = desk.task(cwd=tmp_path, code=2, environ=environ)
    assert re.search(rf"node n1: python {bare}/bin/python \(3\.\d+\.\d+\).*SHARDPREP_SETUP", said)
    assert ("preprocess.plan, numpy" in said) == (what != "the package alone")
    assert "numpy, orjson, tokenizers, tqdm" in said
    assert (f"{tmp_path}/preprocess.py" in said) == (what == "an old preprocess.py")
    assert "the old script" not in said


def test_files_named_as_packages_in_the_folder_of_submission_are_left_alone(
    desk: Desk, tmp_path: Path
) -> None:
    for name in ("preprocess", "loader", "platform", "json"):
        (tmp_path / f"{name}.py").write_text("print('the old script')")
    said = desk.task(index=1, cwd=tmp_path)
    assert "the old script" not in said
    assert (desk.data / "shard-00001.tar").exists()


@pytest.mark.parametrize("name", ["SHARDPREP_PYTHON", "SHARDPREP_SETUP"])
def test_a_wrong_setting_is_named(desk: Desk, tmp_path: Path, name: str) -> None:
    said = desk.task(cwd=tmp_path, code=2, environ={name: "/no/such/file"})
    assert re.search(rf"node n1: .*/no/such/file.*{name}|node n1: {name}=/no/such/file", said)


def test_setup_srun_arguments_and_container_are_used(desk: Desk, tmp_path: Path) -> None:
    # a set-up file as they are: unset variables, a failing line, its own look at the arguments
    (tmp_path / "setup.sh").write_text('echo "$# arguments $NOT_SET"\nfalse\nexport MARK=setup\n')
    environ = {"SHARDPREP_SETUP": "setup.sh", "SHARDPREP_SRUN_ARGS": "--label --job-name=other"}
    environ["SHARDPREP_EXEC"] = "env MARK=container"
    said = desk.task(cwd=tmp_path, srun=srun_that('echo "$MARK: $*"'), environ=environ).splitlines()
    assert said[0] == "0 arguments "
    assert re.match(r"setup: .*--label --job-name=other env MARK=container sh -c", said[1])


@pytest.mark.parametrize("what", ["another output", "a file named logs"])
def test_a_log_that_the_user_named_or_that_cannot_be_moved_stays_there(
    desk: Desk, tmp_path: Path, what: str
) -> None:
    log = tmp_path / ("mine.txt" if what == "another output" else "shardprep-7_0.log")
    if what == "a file named logs":
        (tmp_path / "logs").write_text("in the way")
    with log.open("wb") as file:
        desk.task(cwd=tmp_path, srun=srun_that("echo the worker speaks"), stdout=file)
    assert "the worker speaks" in log.read_text()
    assert not (tmp_path / "logs").is_dir()
