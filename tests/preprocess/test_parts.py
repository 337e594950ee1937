"""``run`` as one of several processes: under srun or mpirun, or with ``--part``."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.children import child, end_of, environ_of_children, shardprep
from tests.world import World, hostile_text


@pytest.mark.parametrize("text", ["3/3", "1", "a/2", "-1/2", "0/0", ""])
def test_a_part_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"}).plan(num_shards=1)
    world.main("run", world.data_dir, f"--part={text}").ends(2, "--part")


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
