"""`| head` ends no command in a traceback, and a log that cannot be written costs no shard."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

COMMANDS = {
    "verify": ["preprocess", "verify"],
    "plan": ["preprocess", "plan", "--dry_run", "--num_shards", "5", "--output_dir"],
    "help": ["preprocess", "plan", "--help"],
    "status": ["slurm", "status"],
    "lustre": ["lustre", "show"],
    "loader": ["loader"],
}
OF_AN_ARRAY = {
    f"SLURM_ARRAY_TASK_{name}": number
    for name, number in (("MIN", "0"), ("MAX", "0"), ("STEP", "1"), ("COUNT", "1"))
}
WATCH = """
import sys
from slurm import __main__ as slurm, status
from slurm.state import DatasetState
DatasetState.live_job_ids = lambda state: ["7"]
status.POLL_S = 0.1
sys.exit(slurm.main(["status", sys.argv[1], "--watch"]))
"""


@pytest.fixture(scope="module")
def made_dir(prep: Prep, planned_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = Path(shutil.copytree(planned_dir, tmp_path_factory.mktemp("made") / "data"))
    prep.make(folder)
    return folder


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads: the first byte into it fails."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_into(stdout: int, words: list[object], prep: Prep, unbuffered: str, *, code: int = 0) -> str:
    """``python -m`` some words, with this standard output; returns what came by standard error."""
    environ = {**prep.environ(), "PYTHONUNBUFFERED": unbuffered}
    return run_child([sys.executable, "-m", *map(str, words)], env=environ, stdout=stdout, code=code).stderr


@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_reader_has_gone_ends_as_if_it_were_read(
    prep: Prep, made_dir: Path, sample_dir: Path, closed_pipe: int, name: str, unbuffered: str
) -> None:
    """Both at the first line and, where Python gathers them, at its end."""
    if name == "plan":
        words = [*COMMANDS[name], made_dir, "--input_dir", sample_dir, "--model_id", prep.model_dir]
    else:
        words = [*COMMANDS[name], made_dir]
    said = run_into(closed_pipe, words, prep, unbuffered)
    assert "rror" not in said, "neither a traceback nor 'Exception ignored'"
    assert (made_dir / "index.json").exists() or name != "verify", "its work is done"


def test_a_status_that_is_watched_ends_with_its_reader(prep: Prep, data_dir: Path, closed_pipe: int) -> None:
    command = [sys.executable, "-c", WATCH, str(data_dir)]
    assert run_child(command, env=prep.environ(), stdout=closed_pipe).stderr == ""


@pytest.mark.parametrize("log", ["closed pipe", "full disk", "closed terminal"])
def test_a_worker_whose_log_cannot_be_written_finishes_its_shard(
    prep: Prep, data_dir: Path, closed_pipe: int, log: str
) -> None:
    """It speaks before the work (a note on its array) and behind it; on a terminal it draws a bar."""
    if log == "closed terminal":
        master, stderr = os.openpty()
        os.close(master)
    else:
        stderr = closed_pipe if log == "closed pipe" else os.open("/dev/full", os.O_WRONLY)
    command = [sys.executable, "-m", "preprocess", "--shard_id", "0", "--output_dir", str(data_dir)]
    run_child(command, env={**prep.environ(), **OF_AN_ARRAY}, stderr=stderr)
    assert (data_dir / "shard-00000.json").exists()
    assert not prep.temporaries(data_dir)


@pytest.mark.parametrize(
    ("name", "unbuffered"),
    [("verify", ""), ("verify", "1"), ("status", ""), ("lustre", ""), ("loader", "")],
)
def test_what_was_asked_for_is_not_lost_unseen_on_a_full_disk(
    prep: Prep, made_dir: Path, name: str, unbuffered: str
) -> None:
    with Path("/dev/full").open("w") as full:
        said = run_into(full.fileno(), [*COMMANDS[name], made_dir], prep, unbuffered, code=74)
    assert said.splitlines()[-1] == "error: standard output cannot be written: No space left on device"
    assert "Traceback" not in said
