"""Addresses of documents, as ``peek``, ``where`` and ``loader.origin`` print them.

``SHARD:SAMPLE``, ``SHARD:ROW:DOCUMENT``, ``FILE:BYTE`` of an input (of tables: a row), and ``id:ID``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import orjson

from shardprep.console import Progress, quoted
from shardprep.errors import BrokenShard, NotFound, UsageError
from shardprep.files import read_lines
from shardprep.format.idx import read_idx, samples_holding
from shardprep.format.input_formats import input_kind
from shardprep.format.manifest import manifest_ids, read_manifest
from shardprep.format.names import ids_path, manifest_path, remake_command, shard_name
from shardprep.format.plan import Plan, PlannedShard

_IN_SHARD = re.compile(r"([0-9]{1,9}):([0-9]{1,9})(?::([0-9]{1,9}))?")


class InShard(NamedTuple):
    """A sample of a shard, or one document of a row."""

    shard_id: int
    sample: int
    document: int | None  # counted from the row's begin, with the rest of one that began before; None: all


class InInput(NamedTuple):
    """A place of an input: the document that begins there, or the last one before."""

    input_number: int
    offset: int  # in the unit of its format


def find_address(folder: Path, plan: Plan, address: str) -> InShard | InInput:
    """What an address says. Raises NotFound, UsageError."""
    if address.startswith("id:"):
        return _place_of_id(folder, plan, address.removeprefix("id:"))
    if (found := _IN_SHARD.fullmatch(address)) is None:
        name, _, offset = address.rpartition(":")
        if not (name and offset.isdecimal() and len(offset) < 19):
            raise UsageError(
                f"{address} is no address, expected SHARD:SAMPLE, SHARD:ROW:DOCUMENT, FILE:BYTE "
                "or id:ID, such as 3:17",
                found=address,
                expected="SHARD:SAMPLE, SHARD:ROW:DOCUMENT, FILE:BYTE or id:ID",
            )
        number, place = _input_number(plan, address, name), int(offset)
        item = plan.inputs[number]
        # Of other inputs a place counts decompressed bytes, or rows, and nobody has counted these.
        if input_kind(item.path).is_in_bytes and place >= item.num_bytes:
            raise NotFound(
                f"{address}: {item.path} has bytes 0 to {item.num_bytes - 1}",
                path=item.path,
                found=place,
                expected=f"0 to {item.num_bytes - 1}",
            )
        return InInput(number, place)
    shard_id = _made_shard(folder, plan, address, int(found[1]))
    number, num_samples = int(found[2]), len(read_idx(folder, plan.spec, shard_id))
    if number >= num_samples:
        raise NotFound(
            f"{address}: {shard_name(shard_id)} has samples 0 to {num_samples - 1}",
            found=address,
            expected=f"samples 0 to {num_samples - 1}",
        )
    return InShard(shard_id, number, int(found[3]) if found[3] else None)


def _made_shard(folder: Path, plan: Plan, address: str, shard_id: int) -> int:
    """The shard that an address names, once it is made. Raises NotFound, UsageError."""
    if shard_id >= plan.num_shards:
        expected = f"ids of 0 to {plan.num_shards - 1}"
        raise UsageError(
            f"the shard of {address} is {shard_id}, expected {expected}", found=shard_id, expected=expected
        )
    if shard_id not in set(manifest_ids(folder)):
        path, again = manifest_path(folder, shard_id), f"shardprep run {quoted(folder)}"
        raise NotFound(f"shard {shard_id:05d} is not made: {path} is missing", path=path, remedy=again)
    return shard_id


def _input_number(plan: Plan, address: str, name: str) -> int:
    """The input that an address names, by its path in the plan. Raises NotFound."""
    paths = [item.path for item in plan.inputs]
    if name not in paths:
        raise NotFound(
            f"{address}: {name} is no input of the plan; the inputs are named as {paths[0]}",
            found=name,
            expected=paths[0],
        )
    return paths.index(name)


def _place_of_id(folder: Path, plan: Plan, wanted: str) -> InInput:
    if not plan.options.id_field:
        raise UsageError(
            f"{folder} keeps no ids of its documents: its plan has no --id_field; name the document by "
            "SHARD:SAMPLE or FILE:BYTE",
            path=folder,
            expected="SHARD:SAMPLE or FILE:BYTE",
        )
    if not wanted:
        raise UsageError("id: names no id, expected one of --id_field, such as id:web/17")
    shard_ids = made_shards(folder)
    with Progress("looking for an id", len(shard_ids), unit="shards") as progress:
        for shard_id in shard_ids:
            for place, kept in ids_kept(folder, shard_id):
                if kept == wanted and 0 <= place.input_number < len(plan.inputs):
                    return place
            progress.add(1)
    raise NotFound(f"no document of a finished shard has the id {wanted}")


def ids_kept(folder: Path, shard_id: int) -> Iterator[tuple[InInput, str]]:
    """Place and id of each document of a shard, as --id_field keeps them. Raises BrokenShard."""
    path, remedy = ids_path(folder, shard_id), f"run: {remake_command(shard_id, folder)}"
    for line in read_lines(path):
        try:
            input_number, offset, kept = orjson.loads(line)
            is_right = [type(input_number), type(offset), type(kept)] == [int, int, str]
        except (ValueError, TypeError):
            is_right = False
        if not is_right:
            raise BrokenShard(f"{path} has the line {line[:60]!r}; {remedy}") from None
        yield InInput(input_number, offset), kept


def samples_at(folder: Path, plan: Plan, place: InInput) -> list[tuple[int, int]]:
    """The samples that hold the document at a place of an input: shard and number. Raises NotFound."""
    found: list[tuple[int, int]] = []
    for shard in shards_of_input(folder, plan, place.input_number):
        shard_id = shard.shard_id
        records = read_idx(folder, plan.spec, shard_id)
        holding = samples_holding(records, place, num_train_samples(folder, shard_id, len(records)))
        found = [(shard_id, number) for number in holding] or found
    if not found:
        raise no_document_at(plan, place)
    return found


def shards_of_input(folder: Path, plan: Plan, input_number: int) -> list[PlannedShard]:
    """The finished shards that have a part of an input."""
    shards = map(plan.shard, made_shards(folder))
    return [shard for shard in shards if input_number in shard.input_numbers]


def no_document_at(plan: Plan, place: InInput) -> NotFound:
    """The error of a place that no document of a finished shard begins at or before."""
    path = plan.inputs[place.input_number].path
    return NotFound(f"{path}:{place.offset}: no document of a finished shard begins there or before")


def num_train_samples(folder: Path, shard_id: int, num_samples: int) -> int:
    """The samples of a shard before those for validation."""
    held = read_manifest(folder, shard_id).counts.validation
    return num_samples - (0 if held is None else held.num_samples)


def made_shards(folder: Path) -> list[int]:
    """The finished shards of a data set, at least one. Raises NotFound."""
    if not (made := sorted(manifest_ids(folder))):
        again = f"shardprep run {quoted(folder)}"
        raise NotFound(f"{folder} has no finished shard", path=folder, remedy=again)
    return made
