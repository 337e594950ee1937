"""The interface of the input formats: what a format is asked, and the records that it returns.

A part of a file is a range of its bytes as they are on disk, so each byte of the input is in one shard. The
format decides where a part may begin: at a line, a row group or a frame, or only at byte 0.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol, cast

import numpy as np
import numpy.typing as npt
from msgspec import Struct, field

from preprocess.read import text_fields
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, InputRecord, TextFields, UnusableText
from shardprep.command_line import needs
from shardprep.errors import UsageError
from shardprep.format.inputs import InputKind, input_kind

Numbers = npt.NDArray[np.int64]
SearchRanges = Sequence[tuple[int, int]]  # of a file, (byte, end), ascending; each is searched for a start
BATCH_BYTES = 512 << 10  # of raw text in a batch; of packed rows see preprocess/make/shared_work.py
# A batch has at most as many lines as if each had this size: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32
_FIRST_SCAN_BYTES = 16 << 10  # read at first to find where a part may begin
_MAX_SCAN_BYTES = 1 << 20  # read at once, at most, to find it


class Inspected(NamedTuple):
    """Facts about a file, for planning."""

    text_bytes: int  # estimated, to make even shards
    is_whole: bool  # whether it can only be read as a whole
    head: bytes = b""  # the beginning of its text, if it is compressed
    names: Sequence[str] = ()  # of its columns, if it has some


class Start(NamedTuple):
    """A place where a part of a file may begin."""

    byte: int  # of the file
    text_byte: int = 0  # of the decompressed text; 0 if the file is not compressed


# Separates joined texts. JSON strings have quotes of their own, so they are joined with the part between the
# quotes. Two separators can overlap only in a quote.
BETWEEN = b'"\0\1document\2"'


class Texts:
    """Texts of consecutive documents, as UTF-8: joined, and as a list that is made when it is first used.

    They are given as ``each``; or as ``joined`` with BETWEEN, which none of the ``num_texts`` texts contains.
    ``characters``: a string with all their characters beyond ASCII, which saves decoding them again.
    """

    def __init__(
        self,
        each: list[bytes] | None = None,
        *,
        joined: bytes = b"",
        num_texts: int = 0,
        characters: str | None = None,
    ) -> None:
        self.joined = joined
        self.num_texts = num_texts
        if each is not None:
            self.each, self.joined, self.num_texts = each, BETWEEN.join(each), len(each)
        self.num_bytes = len(self.joined) - max(0, self.num_texts - 1) * len(BETWEEN)  # without separators
        self.characters = characters

    @staticmethod
    def of_strings(texts: Iterable[str]) -> Texts:
        """Encode strings."""
        return Texts([text.encode() for text in texts])

    @functools.cached_property
    def each(self) -> list[bytes]:
        return self.joined.split(BETWEEN) if self.num_texts else []

    def only(self, numbers: Iterable[int]) -> Texts:
        """Return some of the texts."""
        return Texts([self.each[number] for number in numbers])

    def __len__(self) -> int:
        return self.num_texts

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.each)


class InputRecords(Struct, frozen=True, kw_only=True):
    """Consecutive lines or rows of a file: their texts, and where they are in the file."""

    texts: Texts | Sequence[bytes | UnusableText] = ()  # as UTF-8; in a list an empty text is not a document
    starts: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # byte of the text, or row
    sizes: Numbers = field(default_factory=lambda: np.empty(0, np.int64))  # bytes of a line, 1 for a row
    num_bytes: int  # bytes of the file that were read for these records
    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)  # values beside the texts, by name
    # Instead of texts and columns: the records themselves, or why there is none. documents.py takes texts,
    # ids and sources out of them. It is the plain way; a format that finds texts sooner gives these.
    records: Sequence[InputRecord | UnusableText] | None = None


class Format(Protocol):
    """A format of input files. It keeps no state, so that all methods may run in several threads."""

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:
        """Estimate a file's text with few reads. Raises BadInput if it is not of this format."""

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:
        """Return for each (byte, end) the first place at or after ``byte`` where a part may begin.

        If there is none, return the file's size; if it is not before ``end``, None. Raises BadInput.
        """

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        """Yield the records of a part in order, about ``batch_bytes`` of text at a time.

        Their ``num_bytes`` add up to the size of the part. Raises BadInput, ReadWriteError.
        """


def starts_among(places: Iterable[Start], file: OpenInput, ranges: SearchRanges) -> list[Start | None]:
    """Return ``Format.starts`` of a file whose parts may begin at ``places``, which ascend."""
    end_of_file = Start(file.stamp.num_bytes)
    remaining = iter(places)
    place = Start(0)
    starts: list[Start | None] = []
    for byte, end in ranges:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        starts.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return starts


def first_place(
    file: OpenInput,
    byte: int,
    end: int,
    find: Callable[[bytes, int], int | None],
    *,
    before: int = 0,
    overlap: int = 0,
) -> int | None:
    """Return the first place at or after ``byte`` that ``find`` finds, or the file's size if there is none.

    If it is not before ``end``, the result may be None. A file's beginning is such a place, too.

    Args:
        find: (block of the file, its first byte in the file) -> the place or None.
        before: bytes before ``byte`` with which the search begins.
        overlap: bytes at the end of a block that are read again with the next one.
    """
    if byte >= end:
        return None
    if byte <= 0:
        return 0
    size = file.stamp.num_bytes
    position = max(0, byte - before)
    num_bytes = _FIRST_SCAN_BYTES
    while position < end and (block := file.read(position, position + num_bytes)):
        place = find(block, position)
        if place is not None:
            return place
        if position + len(block) >= size:
            return size
        position += max(1, len(block) - overlap)
        num_bytes = min(2 * num_bytes, _MAX_SCAN_BYTES)
    return None if position < size else size


def texts_of(values: Iterable[str | UnusableText]) -> list[bytes | UnusableText]:
    """Encode the texts of records. A blank text becomes empty, and a too long one an UnusableText."""
    texts: list[bytes | UnusableText] = []
    for value in values:
        if isinstance(value, UnusableText):
            texts.append(value)
        else:
            text = b"" if value.isspace() else value.encode()
            texts.append(text if len(text) <= MOST_DOCUMENT_BYTES else text_fields.too_long("its text"))
    return texts


def format_of(name: str) -> Format:
    """Return the format of a file by its name. Raises UsageError if a library for it is missing."""
    return format_of_kind(input_kind(name))


class Reader(NamedTuple):
    """The class that reads a format. Its module is imported when a file of the format is read."""

    module: str
    name: str
    library: str = ""  # that it needs, from an extra


# By the usual suffix, see ``INPUT_FORMATS``.
_READERS = {
    ".txt": Reader("preprocess.read.lines", "TextLines"),
    ".jsonl": Reader("preprocess.read.json_lines", "JsonLines"),
    ".json": Reader("preprocess.read.json_lines", "JsonLines"),
    ".csv": Reader("preprocess.read.csv_tables", "Csv", library="pyarrow"),
    ".tsv": Reader("preprocess.read.csv_tables", "Tsv", library="pyarrow"),
    ".warc": Reader("preprocess.read.web_archives", "WebArchive", library="fastwarc"),
    ".parquet": Reader("preprocess.read.parquet", "Parquet", library="pyarrow"),
    ".arrow": Reader("preprocess.read.arrow_files", "Arrow", library="pyarrow"),
}


@functools.cache
def format_of_kind(kind: InputKind) -> Format:
    suffix = kind.format.suffixes[0]
    reader = _READERS[suffix]
    try:
        reader_class = getattr(importlib.import_module(reader.module), reader.name)
    except ImportError:
        if not reader.library:
            raise
        raise UsageError(needs(suffix, reader.library)) from None
    return cast(Format, reader_class(kind.compression) if kind.format.can_be_compressed else reader_class())
