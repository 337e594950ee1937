"""Answers that say what happened, where a command did nothing or printed a line for each shard."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=12)


@pytest.mark.parametrize("ids", ["2-1", "", "12", "0-"])
def test_shards_that_name_none_are_refused_with_ids_that_could_be_typed(world: World, ids: str) -> None:
    ended = world.main("run", world.data_dir, "--shards", ids)
    assert (ended.code, "0 to 11" in ended.err) == (2, True)
    assert not [*world.data_dir.glob("shard-*")]


def test_a_dry_run_says_that_it_wrote_nothing_and_prints_no_command_that_needs_its_plan(world: World) -> None:
    flags = ["--input_dir", world.raw_dir, "--output_dir", world.data_dir.with_name("new")]
    ended = world.main("plan", *flags, "--model_id", world.tokenizer, "--dry_run")
    assert ended.code == 0
    assert "--dry_run" in ended.out
    assert "submit" not in ended.out
    assert not world.data_dir.with_name("new").exists()


def test_verify_of_shards_that_nobody_made_is_a_few_lines(world: World) -> None:
    ended = world.main("verify", world.data_dir)
    assert ended.code == 66
    lines = ended.err.splitlines()
    assert len(lines) < 10
    assert any("5-11" in line for line in lines)
