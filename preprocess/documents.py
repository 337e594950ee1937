"""A shard's byte ranges -> documents, each with the file and byte it came from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from preprocess.config import Doc
from preprocess.long_documents import LONG_BYTES, BadDocument, LongDocument
from preprocess.shard_format import NotFound, ReadWriteError

BLOCK_BYTES = 1 << 19  # of raw text a batch; 128 KiB to 2 MiB take the same time


@dataclass(frozen=True, kw_only=True)
class ByteRange:
    """Part of one input file."""

    source: int  # position of the file in the plan
    path: Path
    start: int  # byte
    end: int  # byte, not included


@dataclass(kw_only=True)
class DocumentBatch:
    """Consecutive documents of one file; empty ones are left out but counted."""

    texts: list[str]  # stripped
    lines: npt.NDArray[np.int64]  # int64[n]: line of each document in the shard, from 0
    source: int
    source_offsets: npt.NDArray[np.int64]  # int64[n]: byte of the line's start in the file
    num_lines: int
    num_bytes: int
    bad: list[BadDocument] = field(default_factory=list)

    @property
    def num_empty(self) -> int:
        return self.num_lines - len(self.texts) - len(self.bad)


def read_documents(
    ranges: list[ByteRange], *, doc: Doc, encoding: str
) -> Iterator[DocumentBatch | LongDocument]:
    """Yield the documents of byte ranges in order, in batches of about BLOCK_BYTES.

    A document of more than LONG_BYTES comes alone, unread, as a LongDocument.

    A line ends as in Python's text mode: at ``\\n``, ``\\r\\n`` or ``\\r``. Ranges begin and end
    at line ends. Raises NotFound where a file cannot be opened, ReadWriteError where reading fails.
    """
    line = 0
    for part in ranges:
        try:
            file = part.path.open("rb", buffering=0)
        except OSError as error:
            raise NotFound(f"input {part.path} cannot be opened: {error.strerror}") from None
        with file:
            try:
                for item in _read_range(file, part, doc, encoding, line):
                    line += item.num_lines
                    yield item
            except OSError as error:
                raise ReadWriteError(f"input {part.path} cannot be read: {error.strerror}") from None


def _read_range(
    file: BinaryIO, part: ByteRange, doc: Doc, encoding: str, line: int
) -> Iterator[DocumentBatch | LongDocument]:
    codec, start = _codec_at(file, part, encoding)

    def long_document(begin: int, end: int, num_bytes: int) -> LongDocument:
        return LongDocument(
            path=part.path,
            source=part.source,
            start=begin,
            end=end,
            line=line,
            codec=codec,
            num_bytes=num_bytes,
        )

    if doc == "file" and part.end - start > LONG_BYTES:
        yield long_document(start, part.end, part.end - part.start)
        return
    if doc == "file":
        whole = _read(file, start, part.end, part)
        batch = _decode(whole, np.zeros(1, np.int64), start, codec, part.source, line, doc)
        batch.num_bytes = part.end - part.start
        yield batch
        return
    num_mark_bytes = start - part.start
    for offset, end, block in _line_blocks(file, start, part, codec):
        if block is None:
            yield long_document(offset, end, end - offset + num_mark_bytes)
            line += 1
        else:
            batch = _decode(block, _line_starts(block, codec), offset, codec, part.source, line, doc)
            batch.num_bytes += num_mark_bytes
            line += batch.num_lines
            yield batch
        num_mark_bytes = 0


def _codec_at(file: BinaryIO, part: ByteRange, encoding: str) -> tuple[str, int]:
    """The codec of a range without any byte order mark, and where its text begins."""
    head = _read(file, part.start, min(part.start + 4, part.end), part)
    if encoding == "utf-8-sig":
        return "utf-8", part.start + 3 * (part.start == 0 and head.startswith(b"\xef\xbb\xbf"))
    if encoding not in ("utf-16", "utf-32"):
        return encoding, part.start
    unit = 2 if encoding == "utf-16" else 4
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        if head[:unit] == "\ufeff".encode(codec):
            return codec, part.start + unit
    return f"{encoding}-le", part.start


def _units(block: bytes, codec: str) -> npt.NDArray[np.unsignedinteger[Any]]:
    """A block as the code units of its codec; a last half of one is left out."""
    num_bytes = 2 if codec.startswith("utf-16") else 4 if codec.startswith("utf-32") else 1
    order = ">" if codec.endswith("-be") else "<"
    return np.frombuffer(block, f"{order}u{num_bytes}", len(block) // num_bytes)


def _read(file: BinaryIO, start: int, end: int, part: ByteRange) -> bytes:
    file.seek(start)
    pieces = []
    while start < end:
        piece = file.read(end - start)
        if not piece:
            raise ReadWriteError(f"input {part.path} ended at byte {start}, the plan says {part.end}")
        pieces.append(piece)
        start += len(piece)
    return b"".join(pieces)


def _line_blocks(
    file: BinaryIO, start: int, part: ByteRange, codec: str
) -> Iterator[tuple[int, int, bytes | None]]:
    """Cut a range into blocks of whole lines: (byte where it begins, where it ends, its bytes).

    A line of more than LONG_BYTES is a block of its own, without its bytes.
    """
    held: list[bytes] = []  # the beginning of a line that ends in a later block
    offset = position = start
    while position < part.end:
        block = _read(file, position, min(position + BLOCK_BYTES, part.end), part)
        position += len(block)
        cut = len(block) if position == part.end else _last_line_end(block, codec)
        if not cut and position - offset > LONG_BYTES:
            position = _next_line(file, position - len(block), part, codec)
            yield offset, position, None
            offset, held = position, []
            continue
        if cut:
            held.append(block[:cut])
            end = position - len(block) + cut
            yield offset, end, b"".join(held)
            offset, held = end, []
        if cut < len(block):
            held.append(block[cut:])


def _next_line(file: BinaryIO, position: int, part: ByteRange, codec: str) -> int:
    """The byte after the next line end at or behind ``position``, or the range's end."""
    while position < part.end:
        block = _read(file, position, min(position + max(BLOCK_BYTES, 64), part.end), part)
        units = _units(block, codec)
        ends = np.flatnonzero((units == 10) | (units == 13))
        if len(ends):
            first = int(ends[0])
            if units[first] == 13 and first + 1 == len(units) and position + len(block) < part.end:
                position += first * units.itemsize  # it may be half of a line end: read on from it
                continue
            first += bool(units[first] == 13 and first + 1 < len(units) and units[first + 1] == 10)
            return position + (first + 1) * units.itemsize
        position += len(block)
    return part.end


def _last_line_end(block: bytes, codec: str) -> int:
    """Bytes of a block up to and with its last line end; a ``\\r`` at its very end may be half of one."""
    units = _units(block, codec)
    if units.itemsize == 1:
        return max(block.rfind(b"\n"), block.rfind(b"\r", 0, -1)) + 1
    ends = np.flatnonzero((units == 10) | (units == 13))
    if len(ends) and ends[-1] == len(units) - 1 and units[-1] == 13:
        ends = ends[:-1]
    return (int(ends[-1]) + 1) * units.itemsize if len(ends) else 0


def _line_starts(block: bytes, codec: str) -> npt.NDArray[np.int64]:
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


def _decode(
    block: bytes,
    starts: npt.NDArray[np.int64],
    offset: int,
    codec: str,
    source: int,
    line: int,
    doc: Doc,
) -> DocumentBatch:
    """Decode a block of documents; those that cannot be decoded are told apart one by one."""
    bad: list[BadDocument] = []
    try:
        text = block.decode(codec)
    except UnicodeDecodeError:
        texts = list(_decode_each(block, starts, offset, codec, source, line, bad))
    else:
        if "\r" in text:
            text = text.replace("\r\n", "\n").replace("\r", "\n")
        texts = [text.strip()] if doc == "file" else [item.strip() for item in text.split("\n")]
        del texts[len(starts) :]  # behind the last line end there is no line
    kept = np.fromiter(map(bool, texts), np.bool_, len(texts))
    return DocumentBatch(
        texts=[text for text in texts if text],
        lines=np.flatnonzero(kept) + line,
        source=source,
        source_offsets=starts[kept] + offset,
        num_lines=len(starts),
        num_bytes=len(block),
        bad=bad,
    )


def _decode_each(
    block: bytes,
    starts: npt.NDArray[np.int64],
    offset: int,
    codec: str,
    source: int,
    line: int,
    bad: list[BadDocument],
) -> Iterator[str]:
    ends = [*starts[1:].tolist(), len(block)]
    for number, (start, end) in enumerate(zip(starts.tolist(), ends, strict=True)):
        raw = block[start:end]
        try:
            yield raw.decode(codec).replace("\r\n", "\n").replace("\r", "\n").strip()
        except UnicodeDecodeError as error:
            bad.append(
                BadDocument(
                    source=source,
                    source_offset=offset + start,
                    num_bytes=len(raw),
                    line=line + number,
                    reason="undecodable",
                    detail=f"byte {offset + start + error.start} is not {codec}: {error.reason}",
                )
            )
            yield ""
