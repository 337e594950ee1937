"""Cut a shard into the jobs of helpers.

Most jobs are stretches, byte ranges that a helper reads. A stretch begins where its format allows
(``Format.starts``). What cannot be cut so is read by the task, and a helper gets the documents: compressed
files, tables with large row groups, and all of a shard whose bytes are hashed in order.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator

from msgspec.structs import replace

from preprocess.read.documents import DocumentBatch, check_digest, read_records
from preprocess.read.fields import text_fields_of
from preprocess.read.formats import BATCH_BYTES, format_of_kind
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import TextFields
from shardprep.format.plan import ByteRange, PlannedShard
from shardprep.format.plan_options import PlanOptions

_MOST_STRETCHES = 4  # times the size that was asked for: a longer range without a start is read by the task

Stretch = list[ByteRange]
Job = Stretch | DocumentBatch


def jobs_of(
    shard: PlannedShard, options: PlanOptions, stretch_bytes: int, batch_bytes: int = BATCH_BYTES
) -> Iterator[Job]:
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
        short_ranges = _cut(byte_range, fields.of_file(byte_range.name), stretch_bytes)
        if short_ranges is None:
            if stretch:
                yield stretch
            stretch = []
            num_bytes = 0
            yield from read_records([byte_range], fields, batch_bytes)
            continue
        for short in short_ranges:
            stretch.append(short)
            num_bytes += short.end - short.start
            if num_bytes >= stretch_bytes:
                yield stretch
                stretch = []
                num_bytes = 0
    if stretch:
        yield stretch


def _cut(byte_range: ByteRange, fields: TextFields, stretch_bytes: int) -> list[ByteRange] | None:
    """Cut a range of an input. Return None if it cannot be cut into ranges that are short enough."""
    size = byte_range.end - byte_range.start
    if byte_range.kind.compression:
        return None
    if size <= stretch_bytes:
        return [byte_range]
    targets = range(byte_range.start + stretch_bytes, byte_range.end, stretch_bytes)
    wanted = [(target, min(target + stretch_bytes, byte_range.end)) for target in targets]
    starts = format_of_kind(byte_range.kind).starts(OpenInput(byte_range.path), wanted, fields)
    borders = [byte_range.start]
    for start in starts:
        if start is not None and borders[-1] < start.byte < byte_range.end:
            borders.append(start.byte)
    borders.append(byte_range.end)
    ranges = [replace(byte_range, start=begin, end=end) for begin, end in itertools.pairwise(borders)]
    if max(each.end - each.start for each in ranges) > _MOST_STRETCHES * stretch_bytes:
        return None
    return ranges
