"""Documents from evenly spread places of the inputs: for estimates, and to train a tokenizer on."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from preprocess.read import BATCH_BYTES
from preprocess.read.documents import Documents, read_documents, starts_in
from preprocess.read.format import SHORT_LINE_BYTES, Start
from preprocess.read.inputs import OpenInput
from preprocess.read.transform import Transform
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange, InputFile

_GOLDEN_RATIO = 0.618034  # its multiples are spread evenly over 0 to 1


def sample_documents(
    input_dir: Path,
    inputs: Sequence[InputFile],
    options: PlanOptions,
    *,
    num_bytes: int,
    num_places: int,
    most_files: int = sys.maxsize,
    transform: Transform | None = None,
) -> Iterator[Documents]:
    """Yield about ``num_bytes`` of text, evenly from each place; what one place lacks the next one gives.

    Inputs of fewer bytes are read whole, if they are no more than ``most_files``. Of a file that can be read
    from its beginning alone (gzip), it is the head. No document comes twice, and a very long one comes whole.
    """
    places = [(0, Start(0))]
    total = sum(item.num_bytes for item in inputs)
    if total > num_bytes or (total and len(inputs) > most_files):
        places += _places(input_dir, inputs, options, num_places)
    each, files_each = num_bytes // len(places), max(1, most_files // len(places))
    allowed = taken = 0
    for place, following in itertools.pairwise([*places, (len(inputs), Start(0))]):
        allowed += each
        if taken >= allowed:
            continue
        found = read_documents(
            list(itertools.islice(_ranges(input_dir, inputs, place, following), files_each)),
            options,
            batch_bytes=max(1, min(BATCH_BYTES, each)),
            transform=transform,
        )
        with contextlib.closing(found):
            for documents in found:
                yield documents
                taken += sum(map(len, documents.texts)) + len(documents.bad) * SHORT_LINE_BYTES
                if taken >= allowed:
                    break


def _places(
    input_dir: Path, inputs: Sequence[InputFile], options: PlanOptions, num_places: int
) -> list[tuple[int, Start]]:
    """Return where samples begin behind the first: (input, where in it), ascending; several may be one."""
    ends = list(itertools.accumulate((item.num_bytes for item in inputs), initial=0))
    places: list[tuple[int, Start]] = []
    number = 0
    for place in range(1, num_places):
        # Each lies elsewhere in its stretch: at its beginning, equal files would show their heads alone.
        target = int(ends[-1] * (place + (0.5 + place * _GOLDEN_RATIO) % 1) / num_places)
        while ends[number + 1] <= target:
            number += 1
        file, byte = OpenInput(input_dir / inputs[number].path), target - ends[number]
        (start,) = starts_in(file, [(byte, sys.maxsize)], options)
        if start is None or start.byte == inputs[number].num_bytes:  # none follows in this file
            start = places[-1][1] if places and places[-1][0] == number else Start(0)
        places.append((number, start))
    return places


def _ranges(
    input_dir: Path, inputs: Sequence[InputFile], place: tuple[int, Start], following: tuple[int, Start]
) -> Iterator[ByteRange]:
    """Yield the byte ranges between two places."""
    (number, start), (last, end) = place, following
    while number <= last and number < len(inputs):
        stop = end.byte if number == last else inputs[number].num_bytes
        if start.byte < stop:
            yield ByteRange(
                input_number=number,
                path=input_dir / inputs[number].path,
                start=start.byte,
                end=stop,
                text_start=start.text_byte,
            )
        number, start = number + 1, Start(0)
