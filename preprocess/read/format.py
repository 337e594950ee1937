"""What a format of raw input is: three questions about a file, and the records of a part of it.

A part is a range of the file's own bytes, whatever the format: so each byte of the input is in exactly one
shard. Where a part may begin is the format's to say: at a line, a row group, a frame; or at byte 0 alone.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.format.options import PlanOptions

# A longer document is left out by name. The same on all machines, so that all leave out the same documents.
MOST_DOCUMENT_BYTES = 64 << 20
# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32


class Inspected(NamedTuple):
    """What planning wants to know of a file."""

    text_bytes: int  # about; shards are made even by it
    is_whole: bool  # no part of it begins inside it


class Start(NamedTuple):
    """A place where a part of a file may begin."""

    byte: int  # of the file
    text_byte: int = 0  # of the text, where that is compressed; else 0


# Stands between two texts that are joined. None of its beginnings is an end of it, so it cannot overlap
# itself. The quotes are those of two strings of JSON, which are joined as they are.
BETWEEN = b'"\0\1document\2"'


class Texts(Sequence[bytes]):
    """Texts of consecutive documents, as UTF-8: joined, and one by one where somebody asks for that.

    Args:
        each: the texts; or instead
        joined: all texts in one buffer, with BETWEEN between two of them, and in none of them.
        num_texts: in ``joined``.
        characters: any string that has all their characters beyond ASCII, if there is one already.
    """

    def __init__(
        self,
        each: list[bytes] | None = None,
        *,
        joined: bytes = b"",
        num_texts: int = 0,
        characters: str | None = None,
    ) -> None:
        self.joined, self.num_texts = joined, num_texts
        if each is not None:
            self.each, self.joined, self.num_texts = each, BETWEEN.join(each), len(each)
        self.num_bytes = len(self.joined) - max(0, self.num_texts - 1) * len(BETWEEN)  # of the texts alone
        self.characters = characters

    @functools.cached_property
    def each(self) -> list[bytes]:
        return self.joined.split(BETWEEN) if self.num_texts else []

    def only(self, numbers: Iterable[int]) -> Texts:
        """Return some of the texts."""
        each = self.each
        return Texts([each[number] for number in numbers])

    def __len__(self) -> int:
        return self.num_texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.each)

    def __getitem__(self, number: Any) -> Any:
        return self.each[number]


@dataclass(frozen=True, kw_only=True)
class Records:
    """Consecutive lines or rows of a file: what each says, and where it lies."""

    texts: Texts | Sequence[bytes | UnusableText]  # as UTF-8; of a list an empty one is no document
    starts: npt.NDArray[np.int64]  # int64[n]: byte of the file's text, or row, of each
    sizes: npt.NDArray[np.int64]  # int64[n]: bytes of each, or 1 for a row
    num_bytes: int  # of the file, that these account for
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # what each tells beside its text


class Format(Protocol):
    """One format of input files. It keeps nothing of a file; every method may run in several threads."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        """Weigh a file for planning, with few reads. Raises BadInput where it cannot be of this format."""

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], options: PlanOptions
    ) -> list[Start | None]:
        """For each (byte, end), ascending, the first place at or behind ``byte`` where a part may begin.

        None where there is none before ``end``; the file's size where none follows in the file.
        Raises BadInput.
        """

    def read(
        self, reader: RangeReader, options: PlanOptions, fields: TextFields, batch_bytes: int
    ) -> Iterator[Records]:
        """Yield the records of a part in order, about ``batch_bytes`` of text at a time.

        Their ``num_bytes`` sum up to the part's bytes. Raises BadInput, ReadWriteError.
        """


def starts_among(
    places: Iterable[Start], file: OpenInput, stretches: Sequence[tuple[int, int]]
) -> list[Start | None]:
    """Answer ``Format.starts`` for a file with these places, ascending, behind its beginning.

    Without any it is a file that is only read whole.
    """
    end_of_file, remaining, place = Start(file.stamp.num_bytes), iter(places), Start(0)
    found: list[Start | None] = []
    for byte, end in stretches:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        found.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return found


def no_records(num_bytes: int) -> Records:
    """Account for bytes of a file in which no record begins."""
    none = np.empty(0, np.int64)
    return Records(texts=[], starts=none, sizes=none, num_bytes=num_bytes)


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {MOST_DOCUMENT_BYTES} bytes")


def texts_of(values: Sequence[str | UnusableText]) -> list[bytes | UnusableText]:
    """Return the texts of records as UTF-8, none of white space alone; all others stay as they are."""
    if {str}.issuperset(map(type, values)):  # nearly always, and twice as fast
        found: list[bytes | UnusableText] = [
            b"" if text.isspace() else text.encode()  # type: ignore[union-attr]  # all are str
            for text in values
        ]
    else:
        found = [
            value if isinstance(value, UnusableText) else b"" if value.isspace() else value.encode()
            for value in values
        ]
    if max(map(_size, found), default=0) > MOST_DOCUMENT_BYTES:
        found = [too_long("its text") if _size(text) > MOST_DOCUMENT_BYTES else text for text in found]
    return found


def _size(text: bytes | UnusableText) -> int:
    return 0 if isinstance(text, UnusableText) else len(text)
