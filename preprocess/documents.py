"""The byte ranges of a shard -> its documents, in batches, each with the input and byte that it came from.

A range is read in blocks of whole lines, as bytes; a block is decoded whole and split into lines. Only where
it cannot be decoded are its lines decoded one by one, to find the bad ones. A document of more than 4 MiB is
not read here: it comes as a LongDocument, which says where it lies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from preprocess.inputs import BadDocument, ByteRange, OpenInput, Place
from preprocess.long_documents import LONG_BYTES, LongDocument
from preprocess.options import Doc

_SCAN_BYTES = 1 << 19


class Digest(Protocol):
    """A hash of hashlib."""

    def update(self, data: memoryview, /) -> None:
        """Take more bytes."""


class RangeReader:
    """Reads a range from its open file, for one thread; hashes, in order, each byte that it meets first."""

    def __init__(self, file: OpenInput, part: ByteRange, digest: Digest | None) -> None:
        self.file = file
        self.part = part
        self._digest = digest
        self._num_hashed = part.start  # byte up to which the range is hashed

    def read(self, start: int, end: int) -> bytes:
        """The bytes [start, end). Raises ReadWriteError."""
        data = self.file.read_all(start, end)
        if self._digest is not None and end > self._num_hashed:
            self._digest.update(memoryview(data)[self._num_hashed - start :])
            self._num_hashed = end
        return data

    def hash_rest(self) -> None:
        """Hash what was not read, if the range is hashed at all."""
        while self._digest is not None and self._num_hashed < self.part.end:
            self.read(self._num_hashed, min(self._num_hashed + _SCAN_BYTES, self.part.end))


def codec_at(reader: RangeReader, encoding: str) -> tuple[str, int]:
    """The codec of a range without any byte order mark, and where its text begins."""
    part = reader.part
    head = reader.read(part.start, min(part.start + 4, part.end))
    if encoding == "utf-8-sig":
        return "utf-8", part.start + 3 * (part.start == 0 and head.startswith(b"\xef\xbb\xbf"))
    if encoding not in ("utf-16", "utf-32"):
        return encoding, part.start
    unit = 2 if encoding == "utf-16" else 4
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        if head[:unit] == "\ufeff".encode(codec):
            return codec, part.start + unit
    return f"{encoding}-le", part.start


def _unit_bytes(codec: str) -> int:
    return 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1


def _units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = _unit_bytes(codec)
    order = ">" if codec.endswith("-be") else "<"
    return np.frombuffer(block, f"{order}u{num_bytes}", len(block) // num_bytes)


def line_blocks(
    reader: RangeReader, start: int, codec: str, batch_bytes: int
) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut a range into blocks of whole lines: (byte where it begins, where it ends, its bytes).

    Reads ``batch_bytes`` at once, or the whole code units in them. A line of more than LONG_BYTES is a
    block of its own, without its bytes.
    """
    unit = _unit_bytes(codec)
    batch_bytes = max(unit, batch_bytes // unit * unit)
    carriage_return = "\r".encode(codec)
    held: list[bytes] = []  # the beginning of a line that ends in a later block
    offset = position = start
    end = reader.part.end
    while position < end:
        block = reader.read(position, min(position + batch_bytes, end))
        cut = len(block) if position + len(block) == end else _last_line_end(block, codec)
        if not cut and held and held[-1].endswith(carriage_return):  # no line end goes on in this block
            yield offset, position, b"".join(held)
            offset, held = position, []
        position += len(block)
        if not cut and position - offset > LONG_BYTES:
            position = _next_line(reader, position - len(block), codec)
            yield offset, position, None
            offset, held = position, []
            continue
        if cut:
            held.append(block[:cut])
            line_end = position - len(block) + cut
            yield offset, line_end, b"".join(held)
            offset, held = line_end, []
        if cut < len(block):
            held.append(block[cut:])


def _next_line(reader: RangeReader, position: int, codec: str) -> int:
    """The byte after the next line end at or behind ``position``, or the range's end."""
    unit, range_end = _unit_bytes(codec), reader.part.end
    scan_bytes = max(2, _SCAN_BYTES // unit) * unit
    while position < range_end:
        block = reader.read(position, min(position + scan_bytes, range_end))
        units = _units(block, codec)
        ends = np.flatnonzero((units == 10) | (units == 13))
        if len(ends):
            first = int(ends[0])
            if units[first] == 13 and first + 1 == len(units) and position + len(block) < range_end:
                position += first * unit  # it may be half of a line end: read on from it
                continue
            first += bool(units[first] == 13 and first + 1 < len(units) and units[first + 1] == 10)
            return position + (first + 1) * unit
        position += len(block)
    return range_end


def _last_line_end(block: bytes, codec: str) -> int:
    """Bytes of a block up to and with its last line end; a ``\\r`` at its very end may be half of one."""
    units = _units(block, codec)
    if units.itemsize == 1:
        return max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
    ends = np.flatnonzero((units == 10) | (units == 13))
    if len(ends) and ends[-1] == len(units) - 1 and units[-1] == 13:
        ends = ends[:-1]
    return (int(ends[-1]) + 1) * units.itemsize if len(ends) else 0


def line_starts(block: bytes, codec: str) -> npt.NDArray[np.int64]:
    """Byte of each line's start in a block of whole lines."""
    units = _units(block, codec)
    is_end = units == 10
    carriage_return = units == 13
    if carriage_return.any():
        carriage_return[:-1] &= ~is_end[1:]
        is_end |= carriage_return
    starts = np.flatnonzero(is_end) + 1
    if len(starts) and starts[-1] * units.itemsize == len(block):
        starts = starts[:-1]
    return np.concatenate(([0], starts)) * units.itemsize


# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32


@dataclass(kw_only=True)
class DocumentBatch:
    """Consecutive documents of one file; empty ones are left out but counted."""

    texts: list[str]  # stripped
    lines: npt.NDArray[np.int64]  # int64[n]: line of each document in the shard, from 0
    input_number: int  # position of the file in the plan
    input_offsets: npt.NDArray[np.int64]  # int64[n]: byte of the line's start in the file
    num_lines: int
    num_bytes: int
    bad: list[BadDocument] = field(default_factory=list)


def read_documents(
    ranges: list[ByteRange],
    *,
    doc: Doc,
    encoding: str,
    batch_bytes: int,
    digest: Digest | None = None,
) -> Iterator[DocumentBatch | LongDocument]:
    """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``, and not too many.

    A document of more than LONG_BYTES comes alone, unread, as a LongDocument. ``digest`` is told all bytes
    of the ranges, in their order.

    A line ends as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``. Ranges begin and end
    at line ends. Raises NotFound where a file cannot be opened, ReadWriteError where reading fails, Refused
    where a file was written to while it was read and nobody hashes it.
    """
    line = 0
    for part in ranges:
        reader = RangeReader(part.open(), part, digest)
        for item in _read_range(reader, doc, encoding, line, batch_bytes):
            line += item.num_lines
            yield item
        if digest is None:  # else the hash tells, and a touch does no harm
            reader.file.check_unchanged()


def _read_range(
    reader: RangeReader, doc: Doc, encoding: str, line: int, batch_bytes: int
) -> Iterator[DocumentBatch | LongDocument]:
    part = reader.part
    codec, start = codec_at(reader, encoding)

    def place(begin: int, end: int) -> Place:
        num_mark_bytes = start - part.start if begin == start else 0
        return Place(
            file=reader.file,
            input_number=part.input_number,
            start=begin,
            end=end,
            line=line,
            codec=codec,
            num_bytes=end - begin + num_mark_bytes,
        )

    if doc == "file":
        whole = place(start, part.end)
        if part.end - start > LONG_BYTES:
            reader.hash_rest()
            yield LongDocument(place=whole)
        else:
            yield _decode(reader.read(start, part.end), np.zeros(1, np.int64), whole, doc)
        return
    for offset, end, block in line_blocks(reader, start, codec, batch_bytes):
        if block is None:
            yield LongDocument(place=place(offset, end))
            line += 1
            continue
        for begin, starts, lines in _few_lines(block, line_starts(block, codec), batch_bytes):
            batch = _decode(lines, starts, place(offset + begin, offset + begin + len(lines)), doc)
            line += batch.num_lines
            yield batch
    if start == part.end > part.start:  # a file that is a byte order mark alone
        yield _decode(b"", np.empty(0, np.int64), place(start, start), doc)


def _few_lines(
    block: bytes, starts: npt.NDArray[np.int64], batch_bytes: int
) -> Iterator[tuple[int, npt.NDArray[np.int64], bytes]]:
    """Parts of a block of lines: (byte where it begins, where its lines start in it, its bytes).

    Each line may become two headers and two blocks of a tar, 2 KiB however short it is: so there are at
    most as many in a part as a batch's share of memory allows for (see resources.py).
    """
    most = max(1, batch_bytes // SHORT_LINE_BYTES)
    if len(starts) <= most:
        yield 0, starts, block
        return
    firsts = [*starts[::most].tolist(), len(block)]
    for number, (begin, end) in enumerate(itertools.pairwise(firsts)):
        yield begin, starts[number * most : (number + 1) * most] - begin, block[begin:end]


def _decode(block: bytes, starts: npt.NDArray[np.int64], place: Place, doc: Doc) -> DocumentBatch:
    """Decode a block of documents that lies at ``place``; ``starts`` are their first bytes in it."""
    bad: list[BadDocument] = []
    try:
        text = block.decode(place.codec)
    except UnicodeDecodeError:
        texts = list(_decode_each(block, starts, place, bad))
    else:
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        texts = [text.strip()] if doc == "file" else [item.strip() for item in text.split("\n")]
        del texts[len(starts) :]  # behind the last line end there is no line
    kept = np.fromiter(map(bool, texts), np.bool_, len(texts))
    return DocumentBatch(
        texts=[text for text in texts if text],
        lines=np.flatnonzero(kept) + place.line,
        input_number=place.input_number,
        input_offsets=starts[kept] + place.start,
        num_lines=len(starts),
        num_bytes=place.num_bytes,
        bad=bad,
    )


def _decode_each(
    block: bytes, starts: npt.NDArray[np.int64], place: Place, bad: list[BadDocument]
) -> Iterator[str]:
    """Decode documents one by one; one that cannot be decoded is empty, and told of in ``bad``."""
    ends = [*starts[1:].tolist(), len(block)]
    for number, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        raw = block[start:end]
        try:
            yield raw.decode(place.codec).replace("\r\n", "\n").replace("\r", "\n").strip()
        except UnicodeDecodeError as error:
            error.start += place.start + start
            one = dataclasses.replace(
                place, start=place.start + start, end=place.start + end, line=place.line + number
            )
            bad.append(one.undecodable(error))
            yield ""
