"""What a format of raw input is: three questions about a file, and the documents of a part of it.

A part is a range of the file's own bytes, whatever the format: so each byte of the input is in exactly one
shard. Where a part may begin is the format's to say: at a line, a row group, a frame; or at byte 0 alone.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from preprocess.read import long_documents
from preprocess.read.chat import ChatTemplate
from preprocess.read.inputs import BadDocument, OpenInput, Place, RangeReader
from preprocess.read.long_documents import LongDocument
from preprocess.read.text_fields import TOLD_NOTHING, TextFields, Told, UnusableText, text_fields_of
from shardprep.format.digests import canonical_conversation, digests_of
from shardprep.format.document_names import DocumentNames
from shardprep.format.options import Doc, PlanOptions

T = TypeVar("T")
# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32


class SourceTexts(NamedTuple):
    name: str  # empty where the records name none
    positions: slice | list[int]
    num_bytes: int  # as UTF-8
    num_chars: int


@dataclass(kw_only=True)
class DocumentBatch:
    """Consecutive documents of one file; empty ones are left out but counted."""

    texts: list[str]
    lines: npt.NDArray[np.int64]  # int64[n]: line, or row, of each document in the shard, from 0
    input_number: int  # position of the file in the plan
    input_offsets: npt.NDArray[np.int64]  # int64[n]: where each begins in the file, see docs/format.md
    first_line: int  # in the shard
    num_lines: int
    num_bytes: int  # of the file
    bad: list[BadDocument] = field(default_factory=list)
    ids: list[str] | None = None  # of --id_field, one per document
    sources: list[str] | None = None  # of --source_field, one per document; None: the file's
    spans: list[list[tuple[int, int]]] | None = None  # of conversations: the characters by the assistant
    conversations: list[str] | None = None  # the messages in JSON that the texts are rendered from
    keeps_space: bool = False  # white space beyond ASCII is not yet stripped
    filtered: list[int] = field(default_factory=list)  # lines that the user's own limits leave out

    def only(self, numbers: npt.NDArray[np.int64]) -> DocumentBatch:
        """The same with some of its documents alone; the counts stay."""
        picked = numbers.tolist()
        kept: dict[str, Any] = {"lines": self.lines[numbers], "input_offsets": self.input_offsets[numbers]}
        for name in ("texts", *Told._fields, "spans", "conversations"):
            if (values := getattr(self, name)) is not None:
                kept[name] = [values[number] for number in picked]
        return dataclasses.replace(self, **kept)

    def digests(self) -> npt.NDArray[np.void]:
        """DIGEST[n]: what each document is known by, see shardprep/format/digests.py."""
        if self.conversations is None:
            return digests_of(self.texts)
        return digests_of(map(canonical_conversation, self.conversations))

    def source_texts(self) -> list[SourceTexts]:
        if self.sources is None:
            return [_source_texts("", slice(None), self.texts)]
        by_name: dict[str, list[int]] = {}
        for position, name in enumerate(self.sources):
            by_name.setdefault(name, []).append(position)
        return [_source_texts(name, of, [self.texts[n] for n in of]) for name, of in by_name.items()]

    def sorted_out(self, results: Iterable[T | UnusableText | None]) -> tuple[DocumentBatch, list[T]]:
        """The documents with a result that is not empty, and these results.

        An UnusableText says why one is left out, with the size of its text; None leaves out one that the
        user's own limits do not let through.
        """
        kept, found, bad, filtered = list[int](), list[T](), [*self.bad], [*self.filtered]
        for number, result in enumerate(results):
            if isinstance(result, UnusableText):
                bad.append(
                    BadDocument(
                        source=self.input_number,
                        source_offset=int(self.input_offsets[number]),
                        num_bytes=len(self.texts[number].encode()),
                        line=int(self.lines[number]),
                        reason=result.reason,
                        detail=result.detail,
                        named=self.sources[number] if self.sources else "",
                    )
                )
            elif result is None:
                filtered.append(int(self.lines[number]))
            elif result:
                kept.append(number)
                found.append(result)
        bad.sort(key=lambda one: one.line)
        batch = self.only(np.array(kept, np.int64))
        return dataclasses.replace(batch, bad=bad, filtered=filtered), found


def _source_texts(name: str, positions: slice | list[int], texts: list[str]) -> SourceTexts:
    joined = "".join(texts)
    return SourceTexts(
        name, positions, len(joined) if joined.isascii() else len(joined.encode()), len(joined)
    )


@dataclass(frozen=True, kw_only=True)
class Reading:
    doc: Doc  # of .txt: what a document is
    encoding: str  # of .txt
    batch_bytes: int  # of raw text in a batch, about
    fields: TextFields = field(default_factory=TextFields)  # what of a record is the text
    # Lines of .txt are not stripped by their format: a no-break space may be half of a character.
    keeps_space: bool = False
    changes: PlanOptions | None = None  # what is done to the texts, where anything is
    chat: ChatTemplate | None = None  # renders the texts, which are conversations
    zstd_long: int = 0  # log2 of the largest window of a .zst; 0: 27
    excluded: DocumentNames | None = None  # documents that are left out by name


def reading_of(options: PlanOptions, batch_bytes: int) -> Reading:
    template = ChatTemplate(options.chat_template, options.chat_tokens, options.allow_special_tokens)
    return Reading(
        doc=options.doc,
        encoding=options.encoding,
        batch_bytes=batch_bytes,
        fields=text_fields_of(options),
        keeps_space=options.fix_text,
        changes=options if options.changes_text else None,
        chat=template if options.is_chat else None,
        zstd_long=options.zstd_long,
    )


class Inspected(NamedTuple):
    """What planning wants to know of a file."""

    text_bytes: int  # about; shards are made even by it
    is_whole: bool  # no part of it begins inside it


class Start(NamedTuple):
    byte: int  # of the file
    text_byte: int = 0  # of the text, where that is compressed; else 0


class Format(Protocol):
    """One format of input files. It keeps nothing of a file; every method may run in several threads."""

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:
        """Weigh a file for planning, with few reads. Raises BadInput where it cannot be of this format."""

    def starts(
        self, file: OpenInput, stretches: Sequence[tuple[int, int]], reading: Reading
    ) -> list[Start | None]:
        """For each (byte, end), ascending, the first place at or behind ``byte`` where a part may begin.

        None where there is none before ``end``; the file's size where none follows in the file.
        Raises BadInput.
        """

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        """The documents of a part in order; ``line`` is the number of the first one's line in the shard.

        ``num_lines`` of what it yields count lines or rows, and ``num_bytes`` sum up to the part's bytes.
        Raises BadInput where the file cannot be read further, ReadWriteError.
        """


def starts_among(
    places: Iterable[Start], file: OpenInput, stretches: Sequence[tuple[int, int]]
) -> list[Start | None]:
    """``Format.starts`` of a file with these places, ascending, behind its beginning; without any, of one
    that is only read whole.
    """
    end_of_file, remaining, place = Start(file.stamp.num_bytes), iter(places), Start(0)
    found: list[Start | None] = []
    for byte, end in stretches:
        while place.byte < min(byte, end_of_file.byte):  # a file may have become shorter
            place = next(remaining, end_of_file)
        found.append(place if place.byte < end or place.byte == end_of_file.byte else None)
    return found


@dataclass(frozen=True, kw_only=True)
class RecordBlock:
    """Consecutive records of a file, lines or rows: what each says, and where it lies."""

    texts: Sequence[str | UnusableText]
    starts: npt.NDArray[np.int64]  # int64[n]: byte or row of each in the file
    sizes: npt.NDArray[np.int64]  # int64[n]: bytes of each
    num_bytes: int  # of the file, that the block accounts for
    told: Told = TOLD_NOTHING  # what the records tell beside their texts
    is_text: bool = False  # they are lines of text: stripped, and none is too long


def batches_of(block: RecordBlock, place: Place) -> Iterator[DocumentBatch | LongDocument]:
    """A block of records as batches, each long document alone. ``place``: of the first record.

    A text of white space alone counts as an empty line; all others stay as they are.
    """
    is_good = {str}.issuperset(map(type, block.texts))
    most, long = long_documents.LONG_BYTES, []
    if not is_good or max(map(len, block.texts), default=0) > most:  # type: ignore[arg-type]  # str
        long = [n for n, text in enumerate(block.texts) if isinstance(text, str) and len(text) > most]
    begins = sorted({0, *long, *(number + 1 for number in long), len(block.texts)})
    parts = list(itertools.pairwise(begins))
    for begin, end in parts:
        num_bytes = block.num_bytes if (begin, end) == parts[-1] else 0
        if begin in long:
            yield _long_document(block, begin, _place(block, begin, place, num_bytes))
        else:
            yield _batch(block, slice(begin, end), place, num_bytes, is_good=is_good)
    if not parts:
        yield no_documents(dataclasses.replace(place, num_bytes=block.num_bytes))


def _place(block: RecordBlock, number: int, place: Place, num_bytes: int = 0) -> Place:
    start = int(block.starts[number])
    end = start + int(block.sizes[number])
    return dataclasses.replace(place, start=start, end=end, line=place.line + number, num_bytes=num_bytes)


def _long_document(block: RecordBlock, number: int, place: Place) -> DocumentBatch | LongDocument:
    text = block.texts[number]
    assert isinstance(text, str)
    # Four bytes a character at most: only texts above a quarter of the limit have to be measured.
    most = long_documents.MOST_HELD_BYTES
    if not block.is_text and len(text) > most // 4 and len(text.encode()) > most:
        return one_left_out(place, too_long("its text"))
    return LongDocument(
        place=place,
        held=text,
        told=Told(*(None if names is None else [names[number]] for names in block.told)),
    )


def _batch(block: RecordBlock, part: slice, place: Place, num_bytes: int, *, is_good: bool) -> DocumentBatch:
    """Documents that follow each other. ``is_good``: none of the block's is an UnusableText."""
    texts = block.texts[part]
    numbers = np.arange(part.start, part.stop)
    if not is_good or not all(texts) or (not block.is_text and any(map(str.isspace, texts))):  # type: ignore[arg-type]  # all are str
        strings = [(number, text) for number, text in enumerate(texts, part.start) if isinstance(text, str)]
        kept = [number for number, text in strings if text and (block.is_text or not text.isspace())]
        numbers = np.array(kept, np.int64)
        texts = [block.texts[number] for number in kept]
    picked = numbers.tolist()
    told = Told(*(None if names is None else [names[number] for number in picked] for names in block.told))
    bad = []
    if not is_good:
        sources = block.told.sources
        bad = [
            _place(block, number, place).left_out(why, sources[number] if sources else "")
            for number, why in enumerate(block.texts[part], part.start)
            if isinstance(why, UnusableText)
        ]
    return DocumentBatch(
        texts=list(texts),  # type: ignore[arg-type]  # all are str
        lines=numbers + place.line,
        input_number=place.input_number,
        input_offsets=block.starts[numbers],
        first_line=place.line + part.start,
        num_lines=part.stop - part.start,
        num_bytes=num_bytes,
        bad=bad,
        keeps_space=place.keeps_space,
        **told._asdict(),
    )


def too_long(what: str) -> UnusableText:
    return UnusableText("too_long", f"{what} has more than {long_documents.MOST_HELD_BYTES} bytes")


def one_left_out(place: Place, why: UnusableText | None) -> DocumentBatch:
    """A batch of nothing but one line that is left out; None: by the user's own limits."""
    none = dataclasses.replace(no_documents(place), num_lines=1)
    if why is None:
        return dataclasses.replace(none, filtered=[place.line])
    return dataclasses.replace(none, bad=[place.left_out(why)])


def no_documents(place: Place) -> DocumentBatch:
    """A batch of nothing, which accounts for the bytes of ``place``."""
    none = np.empty(0, np.int64)
    return DocumentBatch(
        texts=[],
        lines=none,
        input_number=place.input_number,
        input_offsets=none,
        first_line=place.line,
        num_lines=0,
        num_bytes=place.num_bytes,
    )
