"""`| head` ends no command in a traceback, and a log that cannot be written costs no shard."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from shardprep.__main__ import main
from tests.children import environ_of_children, run_child, shardprep
from tests.world import World

COMMANDS = {
    "verify": "verify DATA",
    "plan": "plan --dry_run --num_shards 5 --output_dir NEW --input_dir RAW --model_id MODEL",
    "help": "plan --help",
    "status": "status DATA",
    "lustre": "lustre show DATA",
    "peek": "peek DATA",
}


@pytest.fixture
def closed_pipe() -> Iterator[int]:
    """The writing end of a pipe that nobody reads: the first byte into it fails."""
    reader, writer = os.pipe()
    os.close(reader)
    yield writer
    os.close(writer)


def run_into(number: int, words: str, world: World, *, is_buffered: bool) -> tuple[int, str]:
    """Run a command here whose standard output is this descriptor: its exit code and standard error."""
    places = {"DATA": world.data_dir, "NEW": world.data_dir.with_name("new"), "RAW": world.raw_dir}
    places["MODEL"] = world.tokenizer
    err = io.StringIO()
    raw: Any = io.FileIO(os.dup(number), "w")
    out = io.TextIOWrapper(io.BufferedWriter(raw) if is_buffered else raw, write_through=not is_buffered)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("stdout", "__stdout__"):  # as it is when Python starts
            patch.setattr(sys, name, out)
        patch.setattr(sys, "stderr", err)
        try:
            code = main([str(places.get(word, word)) for word in words.split()])
        except SystemExit as ending:
            code = int(ending.code or 0)
    return code, err.getvalue()


@pytest.mark.parametrize("is_buffered", [True, False])
@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_whose_reader_has_gone_ends_as_if_it_were_read(
    world: World, closed_pipe: int, name: str, is_buffered: bool
) -> None:
    """Both at the first line and, where Python gathers them, at its end."""
    code, said = run_into(closed_pipe, COMMANDS[name], world, is_buffered=is_buffered)
    assert (code, "rror" in said) == (0, False), said
    assert (world.data_dir / "index.json").exists() or name != "verify", "its work is done"


@pytest.mark.parametrize("name", ["verify", "status", "lustre"])
def test_what_was_asked_for_is_not_lost_unseen_on_a_full_disk(world: World, name: str) -> None:
    with Path("/dev/full").open("w") as full:
        code, said = run_into(full.fileno(), COMMANDS[name], world, is_buffered=True)
    assert code == 74
    assert "No space left on device" in said.splitlines()[-1]


@pytest.mark.processes
def test_a_process_whose_reader_has_gone_ends_well_when_python_ends(world: World, closed_pipe: int) -> None:
    """Python itself flushes its streams once more, and would say "Exception ignored"."""
    words = shardprep("status", world.data_dir)
    assert run_child(words, env=environ_of_children(), stdout=closed_pipe).stderr == ""


@pytest.mark.processes
@pytest.mark.parametrize("log", ["closed pipe", "full disk", "closed terminal"])
def test_a_worker_whose_log_cannot_be_written_finishes_its_shard(
    world: World, closed_pipe: int, log: str
) -> None:
    """It speaks before the work (a note on its array) and behind it; on a terminal it draws a bar."""
    stderr = closed_pipe if log == "closed pipe" else os.open("/dev/full", os.O_WRONLY)
    if log == "closed terminal":
        master, stderr = os.openpty()
        os.close(master)
    (world.data_dir / "shard-00000.json").unlink()
    array = {"MIN": "0", "MAX": "0", "STEP": "1", "COUNT": "1"}
    environ = {f"SLURM_ARRAY_TASK_{name}": number for name, number in array.items()}
    words = shardprep("shard", "--shard_id", 0, "--output_dir", world.data_dir)
    run_child(words, env=environ_of_children(**environ), stderr=stderr)
    assert (world.data_dir / "shard-00000.json").exists()
    assert not list(world.data_dir.glob(".*"))
