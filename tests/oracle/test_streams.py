"""Batches and tars are those of commit 707a289, on every number of ranks and workers."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.oracle import frozen
from tests.oracle.forms import FORMS, SHARDPREP_SETS, WORLD_SIZES, DataSets, arguments_of
from tests.world import Ranks, World, hostile_text


def cases() -> Iterator[Any]:
    """Yield forms on numbers of ranks, with workers before and behind the resume.

    Workers are processes, which cost: each form has them on one small number of ranks, and one form on all,
    before the run resumes or behind it. ORACLE=all tries all forms with none, and with both.
    """
    for (number, name), (turn, world_size) in itertools.product(enumerate(FORMS), enumerate(WORLD_SIZES)):
        by_id = {f"{name}-{world_size}": (0, 0)}
        if os.environ.get("ORACLE") == "all":
            by_id[f"{name}-{world_size}-workers"] = (2, 2)
        elif name == "documents" or world_size == 1 + number % 2:
            by_id[f"{name}-{world_size}"] = (0, 2) if (number // 2 + turn) % 2 else (2, 0)
        for told, num_workers in by_id.items():
            marks = [pytest.mark.processes] * any(num_workers)
            yield pytest.param(name, world_size, num_workers, id=told, marks=marks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSets:
    """The data sets of all forms. Never written to."""
    sets = DataSets(tmp_path_factory.mktemp("oracle"))
    assert sets["chat"]  # made here, not in a test: templates are rendered in a process beside
    return sets


@pytest.mark.parametrize(("name", "world_size", "num_workers"), [*cases()])
def test_a_form_delivers_the_frozen_batches_and_resumes_on_another_number_of_ranks(
    data: DataSets, name: str, world_size: int, num_workers: tuple[int, int]
) -> None:
    resume_on = WORLD_SIZES[(WORLD_SIZES.index(world_size) + 1) % len(WORLD_SIZES)]
    for step, (where, found) in enumerate(frozen.stream(data, name, world_size, num_workers, resume_on)):
        frozen.compare(name, step, where, found)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.accumulates])
def test_a_run_that_stopped_inside_a_global_batch_gets_the_rest_of_it(data: DataSets, name: str) -> None:
    form, step = FORMS[name], 5
    arguments = {**arguments_of(form), "world_size": 2, "batch_size": form.batch_size(2)}
    with Ranks(data.of(form), **arguments) as ranks:
        ranks.take(step)
        begun = [ranks.batches_of_step(rank, most=1) for rank in range(2)]
        state = ranks.state()
    with Ranks(data.of(form), state=state, **arguments) as ranks:
        assert {loader.first_batch for loader in ranks.loaders} == {3 * step + 1}
        rest = [ranks.batches_of_step(rank) for rank in range(2)]
        batch = ranks.join([[*first, *last] for first, last in zip(begun, rest, strict=True)])
        assert [len(each) for each in rest] == [2, 2]
        following = ranks.step()
    where = f"form {name}, world size 2, resumed inside a global batch: global batch"
    for number, found in [(step, batch), (step + 1, following)]:
        frozen.compare(name, number, f"{where} {number}", frozen.hashes_of(found))


@pytest.mark.parametrize("name", SHARDPREP_SETS)
def test_the_members_of_tars_are_the_frozen_ones(data: DataSets, name: str) -> None:
    expected = frozen.read_table()["members"][name]
    found = frozen.members_of(data[name])
    assert len(found) == len(expected), f"data set {name} has {len(found)} shards"
    for shard_id, (of_shard, of_table) in enumerate(zip(found, expected, strict=True)):
        assert of_shard == of_table, f"data set {name}, shard {shard_id}: its tar's members are others"


@pytest.mark.parametrize(
    "name",
    ["shard-00000.tar", "shard-00000.idx", "digests/shard-00000.digests", "quarantine/shard-00000.jsonl"],
)
def test_a_shard_has_no_manifest_before_its_other_files_are_in_place(tmp_path: Path, name: str) -> None:
    """A folder with the file's name makes the renaming fail, as a full disk would."""
    raw = hostile_text(30).encode() + b"\nbad \xff byte\n"
    world = World(tmp_path).raw({"a.txt": raw}).plan(num_shards=1, digests=True, max_bad_fraction=1)
    (world.data_dir / name / "taken").mkdir(parents=True)
    ended = world.main("shard", shard_id=0, output_dir=world.data_dir)
    assert ended.code == 74, ended.text
    assert name in ended.err
    manifest = world.data_dir / "shard-00000.json"
    assert not manifest.exists(), f"the manifest stands there, and {name} could not be put in its place"
