"""Batches and tars equal those of commit 707a289 on every number of ranks and workers.

``python -m tests.oracle.test_streams`` regenerates the table of hashes. A change of the table changes what a
running training would see next, and needs a good reason. tests/preprocess/test_chat.py compares the ids and
masks of conversations with those of transformers.
"""

from __future__ import annotations

import hashlib
import json
import os
import tarfile
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain, product
from pathlib import Path
from typing import Any

import pytest

from tests.oracle.forms import FORMS, NUM_STEPS, RESUME_AT, SHARDPREP_SETS, WORLD_SIZES, DataSets
from tests.world import GlobalBatch

pytestmark = pytest.mark.long

PATH = Path(__file__).with_name("frozen.json")
# ``streams``: form -> field -> a hash per step. ``members``: data set -> a dict per shard.
TABLE: dict[str, Any] = json.loads(PATH.read_bytes())
FIELDS = ("input_ids", "labels", "attention_mask", "position_ids", "segment_ids", "origins")
Hashes = dict[str, str]


def write_table(data: DataSets) -> None:
    """Write the table from the batches on one rank, a line per field of a form."""
    streams: dict[str, dict[str, str]] = {}
    for name in FORMS:
        steps = [found for _, found in stream(data, name, world_size=1, num_workers=(0, 0), resume_on=1)]
        streams[name] = {field: " ".join(found[field] for found in steps) for field in steps[0]}
    members = {name: members_of(data[name]) for name in SHARDPREP_SETS}
    PATH.write_text(json.dumps({"streams": streams, "members": members}, indent=1) + "\n", encoding="utf-8")


def short_hash(parts: Iterable[bytes]) -> str:
    """Hash parts with their lengths, so that moving a byte from one part to the next changes the hash."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(len(part).to_bytes(8, "little") + part)
    return sha256.hexdigest()[:12]


def hashes_of(batch: GlobalBatch) -> Hashes:
    """Hash each field of a global batch in sample order, and all samples regardless of their order."""
    names = [name for name in FIELDS if name in batch[0]]
    fields = {name: [array("q", sample[name]).tobytes() for sample in batch] for name in names}
    in_any_order = chain(*sorted(zip(*fields.values(), strict=True)))
    hashes = {name: short_hash(of_samples) for name, of_samples in fields.items()}
    return {**hashes, "in_any_order": short_hash(in_any_order)}


def stream(
    data: DataSets, name: str, world_size: int, num_workers: tuple[int, int], resume_on: int
) -> Iterator[tuple[str, Hashes]]:
    """Yield a description and the hashes of each global batch.

    After ``RESUME_AT`` steps the run resumes from its state on ``resume_on`` ranks. ``num_workers`` are the
    workers per rank before and after that.
    """
    state = None
    stages = [(world_size, range(RESUME_AT)), (resume_on, range(RESUME_AT, NUM_STEPS))]
    for (num_ranks, steps), per_rank in zip(stages, num_workers, strict=True):
        resumed = "" if state is None else f", resumed at {RESUME_AT} from world size {world_size}"
        run = f"form {name}, world size {num_ranks}, {per_rank} workers{resumed}"
        with data.ranks(name, num_ranks, num_workers=per_rank, state=state) as ranks:
            for step in steps:
                where = f"{run}: global batch {step}"
                try:
                    batch = ranks.step()
                except Exception as error:
                    raise AssertionError(f"{where}: {error}") from error
                yield where, hashes_of(batch)
            state = ranks.state()


def compare(name: str, step: int, where: str, found: Hashes) -> None:
    """Compare a global batch with the table. An AssertionError names the first field that differs."""
    expected = {field: of_steps.split()[step] for field, of_steps in TABLE["streams"][name].items()}
    assert found.keys() == expected.keys(), where
    differing = [field for field in found if found[field] != expected[field]]
    is_order_alone = differing and "in_any_order" not in differing
    assert not is_order_alone, f"{where} has the right samples in another order"
    assert not differing, f"{where} differs first in {differing[0]} (differing: {differing})"


def members_of(folder: Path) -> list[dict[str, Any]]:
    """Return per shard: the number of members of its tar, a hash of their names, and one of their bytes."""
    shards = []
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            items = [(item.name, tar.extractfile(item).read()) for item in tar]  # type: ignore[union-attr]
        names = short_hash(name.encode() for name, _ in items)
        data = short_hash(content for _, content in items)
        shards.append({"num_members": len(items), "names": names, "bytes": data})
    return shards


def cases() -> Iterator[Any]:
    """Yield (form, world size, workers before and after the resume).

    Each form begins on every second world size and resumes on the other ones; one form begins on all. Workers
    are expensive, because they are processes. So each form has them on one small world size, and one form on
    all, before or after the resume. ORACLE=all tests all forms on all sizes, without workers and with them.
    """
    for (number, name), (turn, world_size) in product(enumerate(FORMS), enumerate(WORLD_SIZES)):
        choices = [(0, 0)]
        if os.environ.get("ORACLE") == "all":
            choices = [(0, 0), (2, 2)]
        elif name != "documents" and turn % 2 != number % 2:
            choices = []
        elif name == "documents" or world_size == 1 + number % 2:
            choices = [(0, 2) if (number // 2 + turn) % 2 else (2, 0)]
        for num_workers in choices:
            marks = [pytest.mark.processes] * any(num_workers)
            yield pytest.param(name, world_size, num_workers, marks=marks)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> DataSets:
    """The data sets of all forms. Never written to."""
    sets = DataSets(tmp_path_factory.mktemp("oracle"))
    assert sets["chat"]  # made here, because it starts a process and tests without a mark may not
    return sets


@pytest.mark.parametrize(("name", "world_size", "num_workers"), [*cases()])
def test_a_form_delivers_the_frozen_batches_and_resumes_on_another_number_of_ranks(
    data: DataSets, name: str, world_size: int, num_workers: tuple[int, int]
) -> None:
    resume_on = WORLD_SIZES[(WORLD_SIZES.index(world_size) + 1) % len(WORLD_SIZES)]
    for step, (where, found) in enumerate(stream(data, name, world_size, num_workers, resume_on)):
        compare(name, step, where, found)


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.accumulates])
def test_a_run_that_stopped_inside_a_global_batch_gets_the_rest_of_it(data: DataSets, name: str) -> None:
    step = 5
    with data.ranks(name, 2) as ranks:
        ranks.take(step)
        begun = [ranks.batches_of_step(rank, most=1) for rank in range(2)]
        state = ranks.state()
    with data.ranks(name, 2, state=state) as ranks:
        assert {loader.first_batch for loader in ranks.loaders} == {3 * step + 1}
        rest = [ranks.batches_of_step(rank) for rank in range(2)]
        batch = ranks.join([[*first, *last] for first, last in zip(begun, rest, strict=True)])
        assert [len(each) for each in rest] == [2, 2]
        following = ranks.step()
    where = f"form {name}, world size 2, resumed inside a global batch: global batch"
    for number, found in [(step, batch), (step + 1, following)]:
        compare(name, number, f"{where} {number}", hashes_of(found))


@pytest.mark.parametrize("name", SHARDPREP_SETS)
def test_the_members_of_tars_are_the_frozen_ones(data: DataSets, name: str) -> None:
    expected = TABLE["members"][name]
    found = members_of(data[name])
    assert len(found) == len(expected), f"data set {name} has {len(found)} shards"
    for shard_id, (of_shard, of_table) in enumerate(zip(found, expected, strict=True)):
        assert of_shard == of_table, f"data set {name}, shard {shard_id}: its tar's members are others"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        write_table(DataSets(Path(name) / "data"))
