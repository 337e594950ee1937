"""Read web archives with fastwarc: the texts of WET files, and the HTML of WARC files for a user's function.

A record of the type "conversion" (WET) has the fields ``text``, ``url``, ``id``, ``date`` and ``language``;
an answer of a server that is HTML (WARC) has ``html``, as bytes, in place of ``text``. Other records are no
documents. In ``.gz`` each record is a member of gzip, as the standard of WARC has it: a shard may begin at
one, and it is the place of the document.
"""

from __future__ import annotations

import contextlib
import io
import re
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
from fastwarc.warc import ArchiveIterator, WarcRecordType

from preprocess.read import formats, inputs
from preprocess.read.compressed import COMPRESSIONS, HEAD_TEXT_BYTES, beginning_of_text, decompressed
from preprocess.read.formats import InputRecords, Inspected, SearchRanges, Start
from preprocess.read.inputs import OpenInput, RangeReader
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, InputRecord, TextFields, UnusableText, too_long
from shardprep.errors import BadInput, ReadWriteError, UsageError

_MAGIC = b"WARC/"
_MEMBER = b"\x1f\x8b\x08"  # a member of gzip begins with it, and other bytes may have it, too
_TRIED_BYTES = 4 << 10  # of a member, to see what is in it
_CHECKED_BYTES = 256 << 10  # decompressed at once to see whether a member is complete
_MAX_HEADER_BYTES = 64 << 10
_HTML_TYPES = ("text/html", "application/xhtml+xml")
_HEADERS = {
    "url": "WARC-Target-URI",
    "id": "WARC-Record-ID",
    "date": "WARC-Date",
    "language": "WARC-Identified-Content-Language",
}


class _Span(io.RawIOBase):
    """A part of an input, as a file for fastwarc."""

    def __init__(self, reader: RangeReader) -> None:
        super().__init__()
        self._reader = reader
        self._position = reader.byte_range.start
        self.error: ReadWriteError | None = None  # of a failed read: fastwarc raises its own instead

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position - self._reader.byte_range.start

    def read(self, size: int | None = -1) -> bytes:
        part = self._reader.byte_range
        end = part.end if size is None or size < 0 else min(part.end, self._position + size)
        try:
            data = self._reader.read(self._position, end)
        except ReadWriteError as error:
            self.error = error
            raise OSError(str(error)) from None
        self._position = end
        return data


class WebArchive:
    """``.warc`` and ``.wet``, plain or ``.gz``."""

    def __init__(self, suffix: str) -> None:
        """``suffix``: of a compressed file. Raises UsageError if it is another one than .gz."""
        if suffix not in ("", ".gz"):
            expected = ".warc.gz or .wet.gz, with a member of gzip for each record"
            advice = "decompress it"
            raise UsageError(
                found=f"a web archive with the suffix {suffix}", expected=expected, advice=advice
            )
        self.compression = COMPRESSIONS[suffix] if suffix else None

    def inspect(self, file: OpenInput, fields: TextFields) -> Inspected:  # noqa: ARG002
        """Estimate the text. Raises BadInput if the file does not begin with a record of its own."""
        if not file.stamp.num_bytes:
            return Inspected(text_bytes=0, is_whole=True)
        if self.compression is not None:
            _check_first_member(file)
        head, text_bytes = beginning_of_text(file, self.compression, 0)
        if not head.startswith(_MAGIC):
            expected = f"{_MAGIC!r} of a web archive"
            advice = "rename it, or move it away, and plan again"
            raise BadInput(path=file.path, found=f"{head[:8]!r}", expected=expected, advice=advice)
        return Inspected(text_bytes, is_whole=self.compression is None)

    def starts(self, file: OpenInput, ranges: SearchRanges, fields: TextFields) -> list[Start | None]:  # noqa: ARG002
        if self.compression is None:
            return formats.starts_among((), file, ranges)
        return [_first_member(file, byte, end) for byte, end in ranges]

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[InputRecords]:
        del fields  # documents.py takes them out of the records
        part = reader.byte_range
        counted_end = part.start
        some: list[InputRecord | UnusableText] = []
        places: list[int] = []
        num_text_bytes = 0
        for place, record, num_bytes in self._records(reader):
            if num_text_bytes and num_text_bytes + num_bytes > batch_bytes:
                yield _of_records(some, places, place - counted_end)
                counted_end = place
                some = []
                places = []
                num_text_bytes = 0
            some.append(record)
            places.append(place)
            num_text_bytes += num_bytes + formats.SHORT_LINE_BYTES
        reader.hash_rest()
        if some or counted_end < part.end:
            yield _of_records(some, places, part.end - counted_end)

    def _records(self, reader: RangeReader) -> Iterator[tuple[int, InputRecord | UnusableText, int]]:
        """Yield (place, record, bytes of its text) of the documents of a part. Raises BadInput."""
        part = reader.byte_range
        if part.start == part.end:
            return
        stream = _Span(reader)
        place = -1  # of the last record, which may be of any type
        with _refused_by_name(reader.file, stream):
            for record in ArchiveIterator(stream, record_types=WarcRecordType.any_type, parse_http=False):
                before = place
                place = record.stream_pos
                if place <= before:
                    raise BadInput(path=reader.file.path, found="several records in a member", **_RECOMPRESS)
                found = _document_of(record)
                if found is not None:
                    yield part.start + place, *found
        self._check_end(reader.file, part.start + max(0, place), part.end)

    def _check_end(self, file: OpenInput, place: int, end: int) -> None:
        """Raise BadInput if the last record, at ``place``, is cut short: fastwarc may end without a word."""
        if self.compression is not None:
            for _ in decompressed(file, self.compression, file.read_all, (place, end), _CHECKED_BYTES, 0):
                pass
            return
        header, mark, _ = file.read_all(place, min(end, place + _MAX_HEADER_BYTES)).partition(b"\r\n\r\n")
        lengths = re.findall(rb"(?im)^content-length:[ \t]*(\d+)\r?$", header)
        if not mark or not lengths or place + len(header + mark) + int(lengths[0]) > end:
            raise inputs.unreadable(file, f"is cut short: the record at byte {place} is not complete")


_RECOMPRESS: dict[str, Any] = {
    "expected": "a member of gzip for each record, as the standard has it",
    "advice": "decompress the file, or type: warcio recompress OLD NEW",
}


@contextlib.contextmanager
def _refused_by_name(file: OpenInput, stream: _Span) -> Iterator[None]:
    """Turn fastwarc's errors into ReadWriteError if a read failed, else into BadInput with the path."""
    try:
        yield
    except (OSError, ValueError, TypeError) as error:
        if stream.error is not None:
            raise stream.error from None
        raise inputs.unreadable(file, f"cannot be read as a web archive ({error})") from None


def _document_of(record: Any) -> tuple[InputRecord | UnusableText, int] | None:
    """Return the fields of a record and the bytes of its text, or None if it is no document."""
    is_text = record.record_type == WarcRecordType.conversion
    if not is_text and record.record_type != WarcRecordType.response:
        return None
    num_bytes = int(record.headers["Content-Length"])
    if num_bytes > MOST_DOCUMENT_BYTES:
        return too_long("the record"), 0
    if is_text:
        data = record.reader.read()
        if len(data) != num_bytes:
            raise ValueError(f"a record of {num_bytes} bytes ends after {len(data)}")
    else:
        record.parse_http(auto_decode="all")
        if record.http_content_type not in _HTML_TYPES:
            return None
        data = record.reader.read(MOST_DOCUMENT_BYTES + 1)
        if len(data) > MOST_DOCUMENT_BYTES:
            return too_long("the page"), 0
    fields: InputRecord = {name: record.headers.get(key) or "" for name, key in _HEADERS.items()}
    if not is_text:
        return {"html": data, **fields}, len(data)
    try:
        return {"text": data.decode(), **fields}, len(data)
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the record's text is not utf-8"), 0


def _of_records(records: list[InputRecord | UnusableText], places: list[int], num_bytes: int) -> InputRecords:
    starts = np.array(places, np.int64)
    return InputRecords(records=records, starts=starts, sizes=np.ones_like(starts), num_bytes=num_bytes)


def _check_first_member(file: OpenInput) -> None:
    """Raise BadInput if the first member of a file has more than one record."""
    member = zlib.decompressobj(31)
    with contextlib.suppress(zlib.error):  # ``decompressed`` will name the fault
        text = member.decompress(file.read(0, HEAD_TEXT_BYTES), HEAD_TEXT_BYTES)
        if text.count(b"\r\n\r\n" + _MAGIC) and text.startswith(_MAGIC):
            raise BadInput(path=file.path, found="several records in one member of gzip", **_RECOMPRESS)


def _first_member(file: OpenInput, byte: int, end: int) -> Start | None:
    """Return where the first member at or after ``byte`` begins, whose text is a record of WARC."""

    def find(block: bytes, position: int) -> int | None:
        at = block.find(_MEMBER)
        while at >= 0:
            if _is_record(file.read(position + at, position + at + _TRIED_BYTES)):
                return position + at
            at = block.find(_MEMBER, at + 1)
        return None

    place = formats.first_place(file, byte, end, find, overlap=len(_MEMBER) - 1)
    return None if place is None else Start(place)


def _is_record(data: bytes) -> bool:
    try:
        return zlib.decompressobj(31).decompress(data, len(_MAGIC)) == _MAGIC
    except zlib.error:
        return False
