"""slurm/prep_array.sh without Slurm: an srun of the test starts what it is given."""

from __future__ import annotations

import re
import shutil
import sys
from pathlib import Path

import pytest

from tests.checkout import ROOT, SLURM_STARTER
from tests.children import run_child
from tests.slurm.fake_slurm import FakeSlurm, run_task

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "slurm" / "prep_array.sh"


def srun_that(body: str) -> str:
    return f"#!/bin/bash\n{body}\n"


@pytest.mark.parametrize("code", [0, 2, 65, 66, 73, 74, 75, 78])
def test_the_workers_exit_codes_are_the_tasks(fake: FakeSlurm, tmp_path: Path, code: int) -> None:
    run_task(fake, "DATA", cwd=tmp_path, code=code, srun=srun_that(f"exit {code}"))


@pytest.mark.parametrize(("code", "words"), [(137, "signal 9"), (255, "srun failed")])
def test_a_worker_that_was_killed_or_not_started_ends_with_75_as_slurm_mangles_such_codes(
    fake: FakeSlurm, tmp_path: Path, code: int, words: str
) -> None:
    assert words in run_task(fake, "DATA", cwd=tmp_path, code=75, srun=srun_that(f"exit {code}"))


@pytest.mark.parametrize("sizes", [{"SLURM_NTASKS": "2"}, {"SLURM_NTASKS": "2", "SLURM_JOB_NUM_NODES": "2"}])
def test_more_than_one_task_is_refused(fake: FakeSlurm, tmp_path: Path, sizes: dict[str, str]) -> None:
    run_task(fake, "DATA", cwd=tmp_path, code=2, srun=srun_that("touch started"), environ=sizes)
    assert not (tmp_path / "started").exists()


def test_outside_a_job_array_it_prints_the_line_to_type(fake: FakeSlurm, tmp_path: Path) -> None:
    said = run_child([SCRIPT, "my data"], cwd=tmp_path, code=2).stderr
    assert said.endswith(f"type: sbatch --array=0-9 {SCRIPT.resolve()} my\\ data\n")


@pytest.mark.parametrize("what", ["nothing", "an old preprocess.py", "the package alone"])
def test_a_python_without_the_package_or_its_dependencies_is_named_with_what_it_lacks(
    fake: FakeSlurm, tmp_path: Path, what: str
) -> None:
    bare = tmp_path / "bare"
    run_child([sys.executable, "-m", "venv", "--without-pip", bare])
    environ = {"SHARDPREP_PYTHON": str(bare / "bin" / "python"), "PYTHONPATH": ""}
    if what == "the package alone":
        environ["PYTHONPATH"] = str(ROOT)
    if what == "an old preprocess.py":
        (tmp_path / "preprocess.py").write_text("print('the old script')")
    said = run_task(fake, "DATA", cwd=tmp_path, code=2, environ=environ)
    assert re.search(rf"node n1: python {bare}/bin/python \(3\.\d+\.\d+\).*SHARDPREP_SETUP", said)
    assert ("preprocess.plan, numpy" in said) == (what != "the package alone")
    assert "numpy, orjson, tokenizers, tqdm" in said
    assert (f"{tmp_path}/preprocess.py" in said) == (what == "an old preprocess.py")
    assert "the old script" not in said


def test_files_named_as_packages_in_the_folder_of_submission_are_left_alone(
    fake: FakeSlurm, data_dir: Path, tmp_path: Path
) -> None:
    for name in ("preprocess", "loader", "platform", "json"):
        (tmp_path / f"{name}.py").write_text("print('the old script')")
    said = run_task(fake, data_dir, index=1, cwd=tmp_path)
    assert "the old script" not in said
    assert (data_dir / "shard-00001.tar").exists()


@pytest.mark.parametrize("name", ["SHARDPREP_PYTHON", "SHARDPREP_SETUP"])
def test_a_wrong_setting_is_named(fake: FakeSlurm, tmp_path: Path, name: str) -> None:
    said = run_task(fake, "DATA", cwd=tmp_path, code=2, environ={name: "/no/such/file"})
    assert re.search(rf"node n1: .*/no/such/file.*{name}|node n1: {name}=/no/such/file", said)


def test_setup_srun_arguments_and_container_are_used(fake: FakeSlurm, tmp_path: Path) -> None:
    # a set-up file as they are: unset variables, a failing line, its own look at the arguments
    (tmp_path / "setup.sh").write_text('echo "$# arguments $NOT_SET"\nfalse\nexport MARK=setup\n')
    environ = {"SHARDPREP_SETUP": "setup.sh", "SHARDPREP_SRUN_ARGS": "--label --job-name=other"}
    environ["SHARDPREP_EXEC"] = "env MARK=container"
    said = run_task(fake, "O", cwd=tmp_path, srun=srun_that('echo "$MARK: $*"'), environ=environ).splitlines()
    assert said[0] == "0 arguments "
    assert re.match(r"setup: .*--label --job-name=other env MARK=container sh -c", said[1])


@pytest.mark.parametrize("what", ["another output", "a file named logs"])
def test_a_log_that_the_user_named_or_that_cannot_be_moved_stays_there(
    fake: FakeSlurm, tmp_path: Path, what: str
) -> None:
    name = "mine.txt" if what == "another output" else "shardprep-7_0.log"
    if what == "a file named logs":
        (tmp_path / "logs").write_text("in the way")
    with (tmp_path / name).open("wb") as file:
        run_task(fake, "DATA", cwd=tmp_path, srun=srun_that("echo the worker speaks"), stdout=file)
    assert "the worker speaks" in (tmp_path / name).read_text()
    assert not (tmp_path / "logs").is_dir()


def test_both_scripts_are_clean_to_shellcheck() -> None:
    if shutil.which("shellcheck") is None:
        pytest.skip("NO SHELLCHECK here: the scripts are not linted")
    run_child(["shellcheck", SCRIPT, SLURM_STARTER])
