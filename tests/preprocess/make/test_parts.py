"""``run`` as one of several processes: under srun or mpirun, or with ``--part``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardprep.launch import ArrayPlace, find_array_place
from tests.children import child, end_of, environ_of_children, shardprep
from tests.world import World, hostile_text


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "0/0", ""])
def test_a_part_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"}).plan(num_shards=1)
    world.main("run", world.data_dir, f"--part={text}").ends(2, "--part")


@pytest.mark.parametrize(("index", "number"), [(3, 0), (5, 1), (9, 3)])
def test_a_task_of_a_job_array_knows_its_place(index: int, number: int) -> None:
    """The indices are 3, 5, 7 and 9."""
    values = {"ID": str(index), "COUNT": "4", "MIN": "3", "STEP": "2"}
    environ = {f"SLURM_ARRAY_TASK_{name}": value for name, value in values.items()}
    assert find_array_place(environ) == ArrayPlace(number=number, num_tasks=4)
    assert find_array_place({}) == ArrayPlace()


@pytest.mark.processes
def test_an_array_is_shared_only_if_asked_for_and_not_with_a_part(tmp_path: Path) -> None:
    """Other arrays have a data set a task."""
    world = World(tmp_path).raw({"a.txt": "a line\n" * 4}).plan(num_shards=2)
    environ = {"SLURM_ARRAY_TASK_ID": "1", "SLURM_ARRAY_TASK_COUNT": "4"}
    assert "part 1 of 4" not in world.main("run", world.data_dir, environ=environ).ends(0).err
    world.main("run", world.data_dir, "--array", "--part=0/2", environ=environ).ends(2, "--array")


@pytest.mark.processes
def test_parts_make_all_shards_with_equal_bytes_whoever_comes(tmp_path: Path) -> None:
    """Parts 0 and 2 of 3 come, part 1 never does; it was killed at a shard before, and left a mark."""
    world = World(tmp_path).raw({"a.txt": hostile_text(200)}).plan(num_shards=9)
    expected = world.copy(tmp_path / "expected").run().contents()
    mark = world.data_dir / ".shard-00001.begun.tmp"
    mark.touch()
    os.utime(mark, (1, 1))
    environ = environ_of_children()
    commands = [shardprep("run", world.data_dir, "--part", part, "--num_proc", 1) for part in ("0/3", "2/3")]
    with child(commands[0], env=environ, stderr=-2) as one, child(commands[1], env=environ, stderr=-2) as two:
        texts = [end_of(one), end_of(two)]
    assert world.contents() == expected, texts
    assert world.temporaries() == []
    assert "part 2 of 3" in texts[1]
