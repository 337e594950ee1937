"""Cut a shard into stretches, which processes read and encode at the same time.

A stretch begins where its format allows (``Format.starts``). What cannot be cut so is read by one process:
compressed files, tables with large row groups, and all of a shard whose bytes are hashed in order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator
from dataclasses import replace

from preprocess.read.documents import DocumentBatch, check_digest, read_records
from preprocess.read.fields import text_fields_of
from preprocess.read.formats import BATCH_BYTES, format_of_kind
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import TextFields
from shardprep.format.plan import ByteRange, PlannedShard
from shardprep.format.plan_options import PlanOptions

_MOST_STRETCHES = 4  # a part of this many times the size that was asked for is read by one process

Stretch = list[ByteRange]


def stretches_of(
    shard: PlannedShard, options: PlanOptions, stretch_bytes: int, batch_bytes: int = BATCH_BYTES
) -> Iterator[Stretch | DocumentBatch]:
    """Yield a shard in order: stretches that are still to be read, and documents that are read here.

    The documents are as in the input: no function, template or list of exclusions was applied. Their lines
    are numbered from any number. Raises as ``DocumentReader.read_shard``.
    """
    fields = text_fields_of(options)
    digest = None if shard.sha256 is None else hashlib.sha256()
    if digest is not None:
        yield from read_records(shard.ranges, fields, batch_bytes, digest)
        check_digest(shard, digest)
        return
    stretch: Stretch = []
    num_bytes = 0
    for byte_range in shard.ranges:
        parts = _parts(byte_range, fields.of_file(byte_range.name), stretch_bytes)
        if parts is None:
            if stretch:
                yield stretch
            stretch, num_bytes = [], 0
            yield from read_records([byte_range], fields, batch_bytes)
            continue
        for part in parts:
            stretch.append(part)
            num_bytes += part.end - part.start
            if num_bytes >= stretch_bytes:
                yield stretch
                stretch, num_bytes = [], 0
    if stretch:
        yield stretch


def _parts(byte_range: ByteRange, fields: TextFields, stretch_bytes: int) -> list[ByteRange] | None:
    """Cut a range of an input. Return None if it cannot be cut into parts that are small enough."""
    size = byte_range.end - byte_range.start
    if byte_range.kind.compression:
        return None
    if size <= stretch_bytes:
        return [byte_range]
    targets = range(byte_range.start + stretch_bytes, byte_range.end, stretch_bytes)
    wanted = [(target, min(target + stretch_bytes, byte_range.end)) for target in targets]
    found = format_of_kind(byte_range.kind).starts(OpenInput(byte_range.path), wanted, fields)
    borders = [byte_range.start]
    for start in found:
        if start is not None and borders[-1] < start.byte < byte_range.end:
            borders.append(start.byte)
    borders.append(byte_range.end)
    parts = [replace(byte_range, start=begin, end=end) for begin, end in itertools.pairwise(borders)]
    if max(part.end - part.start for part in parts) > _MOST_STRETCHES * stretch_bytes:
        return None
    return parts
