"""The frozen table: what is hashed, and how a difference is told.

``python -m tests.oracle.frozen`` writes it anew. The table in the repository was made with commit 707a289; a
change of it changes what a running training would see next, and needs as good a reason as that. That ids and
masks of conversations are transformers' own is compared by tests/preprocess/test_chat.py.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import tarfile
import tempfile
from array import array
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from tests.oracle import forms
from tests.oracle.forms import FORMS, NUM_STEPS, RESUME_AT, DataSets, arguments_of
from tests.world import GlobalBatch, Ranks

PATH = Path(__file__).with_name("frozen.json")
FIELDS = ("input_ids", "labels", "attention_mask", "position_ids", "segment_ids", "origins")
Hashes = dict[str, str]


@functools.cache
def read_table() -> dict[str, Any]:
    """Return the table: ``streams`` by form and field, a hash a step; ``members`` by data set and shard."""
    table: dict[str, Any] = json.loads(PATH.read_bytes())
    return table


def write_table(data: DataSets) -> None:
    """Write the table of what is delivered on one rank, a field of a form in a line."""
    streams: dict[str, dict[str, str]] = {}
    for name in FORMS:
        steps = [found for _, found in stream(data, name, world_size=1, num_workers=(0, 0), resume_on=1)]
        streams[name] = {field: " ".join(found[field] for found in steps) for field in steps[0]}
    members = {name: members_of(data[name]) for name in forms.SHARDPREP_SETS}
    PATH.write_text(json.dumps({"streams": streams, "members": members}, indent=1) + "\n", encoding="utf-8")


def short_hash(parts: Iterable[bytes]) -> str:
    """Hash parts with their lengths: moving a byte from one part to the next changes the hash."""
    sha256 = hashlib.sha256()
    for part in parts:
        sha256.update(len(part).to_bytes(8, "little") + part)
    return sha256.hexdigest()[:12]


def hashes_of(batch: GlobalBatch) -> Hashes:
    """Hash each field of a global batch, in the order of its samples, and the samples in any order."""
    names = [name for name in FIELDS if name in batch[0]]
    fields = {name: [array("q", sample[name]).tobytes() for sample in batch] for name in names}
    in_any_order = chain(*sorted(zip(*fields.values(), strict=True)))
    hashes = {name: short_hash(of_samples) for name, of_samples in fields.items()}
    return {**hashes, "in_any_order": short_hash(in_any_order)}


def stream(
    data: DataSets, name: str, world_size: int, num_workers: tuple[int, int], resume_on: int
) -> Iterator[tuple[str, Hashes]]:
    """Yield where a global batch was delivered, in words, and its hashes.

    The run goes on from its state after ``RESUME_AT`` steps on ``resume_on`` ranks. A rank has
    ``num_workers`` before that and behind it.
    """
    form = FORMS[name]
    state = None
    stages = [(world_size, range(RESUME_AT)), (resume_on, range(RESUME_AT, NUM_STEPS))]
    for (num_ranks, steps), of_rank in zip(stages, num_workers, strict=True):
        resumed = "" if state is None else f", resumed at {RESUME_AT} from world size {world_size}"
        told = f"form {name}, world size {num_ranks}, {of_rank} workers{resumed}"
        with Ranks(
            data.of(form),
            world_size=num_ranks,
            batch_size=form.batch_size(num_ranks),
            num_workers=of_rank,
            state=state,
            **arguments_of(form),
        ) as ranks:
            for step in steps:
                where = f"{told}: global batch {step}"
                try:
                    batch = ranks.step()
                except Exception as error:
                    raise AssertionError(f"{where}: {error}") from error
                yield where, hashes_of(batch)
            state = ranks.state()


def compare(name: str, step: int, where: str, found: Hashes) -> None:
    """Raise AssertionError that says in which field a global batch of a form first differs from the table."""
    expected = {field: of_steps.split()[step] for field, of_steps in read_table()["streams"][name].items()}
    assert found.keys() == expected.keys(), where
    differing = [field for field in found if found[field] != expected[field]]
    is_order_alone = differing and "in_any_order" not in differing
    assert not is_order_alone, f"{where} has the right samples in another order"
    assert not differing, f"{where} differs first in {differing[0]} (differing: {differing})"


def members_of(folder: Path) -> list[dict[str, Any]]:
    """Of each shard: how many members its tar has, a hash of their names and one of their bytes, in order."""
    shards = []
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            items = [(item.name, tar.extractfile(item).read()) for item in tar]  # type: ignore[union-attr]
        names = short_hash(name.encode() for name, _ in items)
        data = short_hash(content for _, content in items)
        shards.append({"num_members": len(items), "names": names, "bytes": data})
    return shards


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        os.environ["XDG_CACHE_HOME"] = name
        write_table(DataSets(Path(name) / "data"))
