"""A shard's byte ranges -> documents, each with the file and byte it came from."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from preprocess.config import Doc
from preprocess.line_blocks import ByteRange, Digest, RangeReader, codec_at, line_blocks, line_starts
from preprocess.long_documents import LONG_BYTES, BadDocument, LongDocument
from preprocess.open_input import OpenInput

# A batch of shorter lines, on average, is cut by their number: a million lines of one letter took 0.35 GB.
SHORT_LINE_BYTES = 32


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
    ranges: list[ByteRange],
    *,
    doc: Doc,
    encoding: str,
    batch_bytes: int,
    open_part: Callable[[ByteRange], OpenInput] = lambda part: OpenInput(part.path),
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
        reader = RangeReader(open_part(part), part, digest)
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

    def place(begin: int, end: int) -> LongDocument:
        num_mark_bytes = start - part.start if begin == start else 0
        return LongDocument(
            file=reader.file,
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
            reader.hash_rest()
            yield whole
        else:
            yield _decode(reader.read(start, part.end), np.zeros(1, np.int64), whole, doc)
        return
    for offset, end, block in line_blocks(reader, start, codec, batch_bytes):
        if block is None:
            yield place(offset, end)
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
    most as many in a part as a batch's share of memory allows for (see worker_settings.py).
    """
    most = max(1, batch_bytes // SHORT_LINE_BYTES)
    if len(starts) <= most:
        yield 0, starts, block
        return
    firsts = [*starts[::most].tolist(), len(block)]
    for number, (begin, end) in enumerate(itertools.pairwise(firsts)):
        yield begin, starts[number * most : (number + 1) * most] - begin, block[begin:end]


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
