"""A shard's byte ranges -> documents, each with the file and byte it came from."""

from __future__ import annotations

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
        whole = read_bytes(file, start, part.end, part)
        batch = _decode(whole, np.zeros(1, np.int64), start, codec, part.source, line, doc)
        batch.num_bytes = part.end - part.start
        yield batch
        return
    num_mark_bytes = start - part.start
    for offset, end, block in line_blocks(file, start, part, codec, batch_bytes):
        if block is None:
            yield long_document(offset, end, end - offset + num_mark_bytes)
            line += 1
        else:
            batch = _decode(block, line_starts(block, codec), offset, codec, part.source, line, doc)
            batch.num_bytes += num_mark_bytes
            line += batch.num_lines
            yield batch
        num_mark_bytes = 0
    if num_mark_bytes:  # a file that is a byte order mark alone
        yield DocumentBatch(
            texts=[],
            lines=np.empty(0, np.int64),
            source=part.source,
            source_offsets=np.empty(0, np.int64),
            num_lines=0,
            num_bytes=num_mark_bytes,
        )


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
