"""A shard's byte ranges -> documents, each with the file and byte it came from."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import BinaryIO

import numpy as np
import numpy.typing as npt

from preprocess.config import Doc
from preprocess.line_blocks import ByteRange, codec_at, line_blocks, line_starts, read_bytes
from preprocess.long_documents import LONG_BYTES, BadDocument, LongDocument
from preprocess.shard_format import NotFound, ReadWriteError


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

    def part(self, begin: int, end: int) -> DocumentBatch:
        """Documents ``begin`` to ``end`` of the batch; lines, bytes and bad documents stay uncounted."""
        return DocumentBatch(
            texts=self.texts[begin:end],
            lines=self.lines[begin:end],
            source=self.source,
            source_offsets=self.source_offsets[begin:end],
            num_lines=0,
            num_bytes=0,
        )

    @property
    def num_empty(self) -> int:
        return self.num_lines - len(self.texts) - len(self.bad)


def read_documents(
    ranges: list[ByteRange], *, doc: Doc, encoding: str, batch_bytes: int
) -> Iterator[DocumentBatch | LongDocument]:
    """Yield the documents of byte ranges in order, in batches of about ``batch_bytes``.

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
                for item in _read_range(file, part, doc, encoding, line, batch_bytes):
                    line += item.num_lines
                    yield item
            except OSError as error:
                raise ReadWriteError(f"input {part.path} cannot be read: {error.strerror}") from None


def _read_range(
    file: BinaryIO, part: ByteRange, doc: Doc, encoding: str, line: int, batch_bytes: int
) -> Iterator[DocumentBatch | LongDocument]:
    codec, start = codec_at(file, part, encoding)

    def place(begin: int, end: int) -> LongDocument:
        num_mark_bytes = start - part.start if begin == start else 0
        return LongDocument(
            path=part.path,
            source=part.source,
            start=begin,
            end=end,
            line=line,
            codec=codec,
            num_bytes=end - begin + num_mark_bytes,
        )

    if doc == "file":
        whole = place(start, part.end)
        if part.end - start > LONG_BYTES:
            yield whole
        else:
            yield _decode(read_bytes(file, start, part.end, part), np.zeros(1, np.int64), whole, doc)
        return
    for offset, end, block in line_blocks(file, start, part, codec, batch_bytes):
        item = place(offset, end)
        found = item if block is None else _decode(block, line_starts(block, codec), item, doc)
        line += found.num_lines
        yield found
    if start == part.end > part.start:  # a file that is a byte order mark alone
        yield _decode(b"", np.empty(0, np.int64), place(start, start), doc)


def _decode(block: bytes, starts: npt.NDArray[np.int64], place: LongDocument, doc: Doc) -> DocumentBatch:
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
        source=place.source,
        source_offsets=starts[kept] + place.start,
        num_lines=len(starts),
        num_bytes=place.num_bytes,
        bad=bad,
    )


def _decode_each(
    block: bytes, starts: npt.NDArray[np.int64], place: LongDocument, bad: list[BadDocument]
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
