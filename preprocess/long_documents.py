"""Documents too long to be held in memory: read twice, in pieces, never whole.

A line of 200 MB is as good a document as any other, but its bytes, its text and its ids together
are some gigabytes. The first pass proves that it can be decoded and finds where it begins and ends
without white space; the second yields its text in pieces, cut where a tokenizer cuts anyway.
"""

from __future__ import annotations

import codecs
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from preprocess.open_input import OpenInput
from preprocess.shard_format import Refused

LONG_BYTES = 4 << 20  # a document of more is never held whole
_READ_BYTES = 1 << 18

# Between a letter and a space the patterns of cuttable_tokenizers.py end a match, whatever stands around,
# and what follows is matched as if it stood alone. Only letters that no Unicode version disputes.
_CUT = re.compile("[A-Za-z\u00c0-\u00d6\u0410-\u044f\u0627-\u063a\u3041-\u3096\u4e00-\u9fa5\uac00-\ud7a3] ")


@dataclass(frozen=True, kw_only=True)
class BadDocument:
    """A document left out, as a line of the shard's quarantine file says it."""

    source: int
    source_offset: int
    num_bytes: int
    line: int
    reason: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class LongDocument:
    """A document of more than LONG_BYTES, as it lies in its file."""

    file: OpenInput
    source: int  # position of the file in the plan
    start: int  # byte
    end: int
    line: int  # in the shard, from 0
    codec: str
    num_bytes: int  # of input that it accounts for, a byte order mark included
    num_lines: int = 1
    _checksums: dict[str, int] = field(default_factory=dict)  # of the first pass over its bytes

    def undecodable(self, error: UnicodeDecodeError) -> BadDocument:
        """What the quarantine file says of a document for which ``text`` raised ``error``."""
        return BadDocument(
            source=self.source,
            source_offset=self.start,
            num_bytes=self.end - self.start,
            line=self.line,
            reason="undecodable",
            detail=f"byte {error.start} is not {self.codec}: {error.reason}",
        )

    def text(self) -> Iterator[str]:
        """The text in pieces of about 256 KiB, stripped as a whole, line ends as in text mode.

        Raises UnicodeDecodeError, whose ``start`` is a byte of the file, ReadWriteError, and at its end
        Refused where the file was written to, or gave other bytes than in an earlier pass.
        """
        held = ""  # white space that is left out if nothing follows it
        began = False
        for piece in self._decoded():
            if not began:
                piece = piece.lstrip()
                began = bool(piece)
            kept = piece.rstrip()
            if kept:
                yield held + kept
                held = piece[len(kept) :]
            else:
                held += piece

    def _decoded(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder(self.codec)()
        lines = io.IncrementalNewlineDecoder(None, translate=True)
        position, checksum = self.start, 0
        while position < self.end:
            block = self.file.read_all(position, min(position + _READ_BYTES, self.end))
            checksum = zlib.crc32(block, checksum)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=position + len(block) == self.end)
            except UnicodeDecodeError as error:
                error.start += position - pending
                raise
            position += len(block)
            yield lines.decode(text, final=position == self.end)
        self._check_same(checksum)

    def _check_same(self, checksum: int) -> None:
        """That this pass read what the first one did: sizes are declared before the bytes are written."""
        self.file.check_unchanged()
        if self._checksums.setdefault("first", checksum) != checksum:
            raise Refused(
                f"input {self.file.path} changed while it was read: bytes {self.start} to {self.end} were "
                "others the second time; nothing is published: once nobody writes to it, run this again"
            )


def recut(pieces: Iterator[str]) -> Iterator[str]:
    """The same text, cut only between a letter and a space; pieces grow until there is such a place."""
    held = ""
    for piece in pieces:
        held += piece
        tail_start = max(0, len(held) - (1 << 16))
        cuts = [match.end() - 1 for match in _CUT.finditer(held, tail_start)]
        if cuts:
            yield held[: cuts[-1]]
            held = held[cuts[-1] :]
    if held:
        yield held
