"""Sample documents from evenly spread places of the inputs."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from preprocess.read import documents, formats
from preprocess.read.documents import DocumentBatch
from preprocess.read.fields import text_fields_of
from preprocess.read.inputs import OpenInput
from preprocess.read.text_fields import RecordFields
from preprocess.read.transform import Transform
from shardprep.format.plan import Cut, InputFile, Plan, ranges_between
from shardprep.format.plan_options import PlanOptions

_FIRST_BYTES = 256 << 10  # of a file, that are looked at as records
_GOLDEN_RATIO = 0.618034  # its multiples are spread evenly over 0 to 1


def sample_documents(
    input_dir: Path,
    inputs: Sequence[InputFile],
    options: PlanOptions,
    *,
    num_bytes: int,
    num_places: int,
    max_files: int = sys.maxsize,
    transform: Transform | None = None,
) -> Iterator[DocumentBatch]:
    """Yield about ``num_bytes`` of text, the same from each place. The next place makes up for less.

    Smaller inputs are read whole, unless there are more than ``max_files``. A file that can only be read
    from its beginning (gzip) gives its head. No document is sampled twice, and a long one is not cut.
    """
    fields = text_fields_of(options)
    ends = list(itertools.accumulate((item.num_bytes for item in inputs), initial=0))
    places = [Cut(0, 0)]  # ascending, several may be equal
    number = 0
    is_whole = ends[-1] <= num_bytes and (len(inputs) <= max_files or not ends[-1])
    for interval in range(1, 1 if is_whole else num_places):
        # The place varies within each interval: a fixed one might always be at the head of a file.
        target = int(ends[-1] * (interval + (0.5 + interval * _GOLDEN_RATIO) % 1) / num_places)
        while ends[number + 1] <= target:
            number += 1
        file = OpenInput(input_dir / inputs[number].path)
        byte = target - ends[number]
        (start,) = formats.format_of(file.path.name).starts(
            file, [(byte, sys.maxsize)], fields.of_file(inputs[number].path)
        )
        if start is not None and start.byte < inputs[number].num_bytes:
            places.append(Cut(number, start.byte, start.text_byte))
        elif len(places) > 1 and places[-1].input_number == number:  # no place follows in this file
            places.append(places[-1])
        else:
            places.append(Cut(number, 0))
    bytes_each = num_bytes // len(places)
    files_each = max(1, max_files // len(places))
    allowed = taken = 0
    for place, following in itertools.pairwise([*places, Cut(len(inputs), 0)]):
        allowed += bytes_each
        if taken >= allowed:
            continue
        # The files are not compared with their stamps: workers do that.
        ranges = ranges_between(input_dir, inputs, place, following)
        unchecked = (replace(each, planned=None) for each in ranges if each.start < each.end)
        some = list(itertools.islice(unchecked, files_each))
        batch_bytes = max(1, min(formats.BATCH_BYTES, bytes_each))
        batches = documents.DocumentReader(options, transform).read_ranges(some, batch_bytes)
        with contextlib.closing(batches):
            for batch in batches:
                yield batch
                taken += sum(map(len, batch.texts)) + len(batch.bad) * formats.SHORT_LINE_BYTES
                if taken >= allowed:
                    break


def first_records(input_dir: Path, item: InputFile, options: PlanOptions) -> list[Any]:
    """Return records from the beginning of an input."""
    byte_range = next(ranges_between(input_dir, [item], Cut(0, 0), Cut(1, 0)))
    batch = next(documents.read_records([byte_range], RecordFields(options), _FIRST_BYTES), None)
    return list(batch.columns.get("record", ())) if batch else []


NUM_PLACES = 8  # of a sample


def sample_of_plan(plan: Plan, num_bytes: int, transform: Transform | None) -> Iterator[DocumentBatch]:
    """Yield the documents of about ``num_bytes`` of a plan's input, from evenly spread places."""
    # Few files are opened, as each is a round trip on a network file system.
    how: dict[str, Any] = {"num_places": NUM_PLACES, "max_files": 2 * NUM_PLACES, "transform": transform}
    return sample_documents(plan.input_dir, plan.inputs, plan.options, num_bytes=num_bytes, **how)
