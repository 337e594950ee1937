"""Documents too long to be held in memory: they are read in pieces, never whole.

The bytes, text and ids of a line of 200 MB take some gigabytes together. A first pass proves that it can be
decoded and encoded in pieces, and counts its text. Later passes yield its text in pieces, which end where a
tokenizer would split the text anyway. The price is a second read, and a third where the text is kept.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from preprocess.read.inputs import BadDocument, Place
from preprocess.read.text_fields import TOLD_NOTHING, Told, UnusableText
from shardprep.errors import Refused

LONG_BYTES = 4 << 20  # a document of more is never held whole, where its file can be read in pieces again
# What cannot be read again in pieces (JSON, a cell, a compressed line) is held, up to so many bytes.
# The same on all machines, so that all leave out the same documents.
MOST_HELD_BYTES = 64 << 20
_READ_BYTES = 1 << 18

# Text in one piece that may be encoded, of a document of more than LONG_BYTES: 50 bytes of memory a character
# (a line of 32 million letters took 1.9 GB, documents as JSON; 44 MB of Chinese 0.35 GB). The same on all
# machines, so that all leave out the same documents.
MOST_UNCUT_CHARS = 32 << 20

# Between a letter or digit and white space or punctuation the patterns of engines.py end a match,
# whatever stands around, and what follows is matched as if it stood alone: a run of letters or of digits
# takes in nothing behind it. Only characters that no Unicode version disputes, and no punctuation that
# stands in the names of control tokens.
CUT = re.compile(
    "[0-9A-Za-z\u00c0-\u00d6\u0410-\u044f\u0627-\u063a\u0904-\u0939\u0e01-\u0e30\u3041-\u3096"
    "\u30a1-\u30fa\u4e00-\u9fa5\uac00-\ud7a3]"
    '[ \t\n,.;:!?"()+/=\u2026\u3001\u3002\u300a-\u300f\uff01\uff08\uff09\uff0c\uff1a\uff1b\uff1f]'
)


@dataclass(frozen=True, kw_only=True)
class LongDocument:
    """A document of more than LONG_BYTES: where it lies; what it says only if it cannot be read again."""

    place: Place
    num_lines: int = 1
    held: str | None = None  # its text, as it is to be encoded
    told: Told = TOLD_NOTHING  # what its record tells beside the text
    _checksums: dict[str, int] = field(default_factory=dict)  # of the first pass over its bytes

    @property
    def num_bytes(self) -> int:
        return self.place.num_bytes

    @property
    def source(self) -> str:
        """The source that its record names, "" for the file's."""
        return self.told.sources[0] if self.told.sources else ""

    def text_bytes(self, *, can_be_cut: bool, digest: hashlib._Hash | None = None) -> int | BadDocument:
        """The first pass: bytes of its text as UTF-8, or why it is left out. Raises as ``text`` does.

        ``digest`` is told these bytes.
        """
        num_bytes = 0
        try:
            for piece in encodable_pieces(self.text(), can_be_cut=can_be_cut):
                encoded = piece.encode()
                num_bytes += len(encoded)
                if digest is not None:
                    digest.update(encoded)
            return num_bytes  # noqa: TRY300
        except UnicodeDecodeError as error:
            return self.place.undecodable(error)
        except UncuttableText:
            detail = f"more than {MOST_UNCUT_CHARS} characters without a place where the tokenizer may be cut"
            return self.place.left_out(UnusableText("uncuttable", detail))

    def text(self) -> Iterator[str]:
        """The text in pieces of about 256 KiB. What is read is stripped, with line ends as in text mode.

        Raises UnicodeDecodeError, whose ``start`` is a byte of the file, ReadWriteError, and at its end
        Refused where the file was written to, or gave other bytes than in an earlier pass.
        """
        if self.held is not None:
            text = self.held
            return (text[begin : begin + _READ_BYTES] for begin in range(0, len(text), _READ_BYTES))
        return self._stripped()

    def _stripped(self) -> Iterator[str]:
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
        decoder = codecs.getincrementaldecoder(self.place.codec)()
        lines = io.IncrementalNewlineDecoder(None, translate=True)
        file, position, end, checksum = self.place.file, self.place.start, self.place.end, 0
        while position < end:
            block = file.read_all(position, min(position + _READ_BYTES, end))
            checksum = zlib.crc32(block, checksum)
            pending = len(decoder.getstate()[0])
            try:
                text = decoder.decode(block, final=position + len(block) == end)
            except UnicodeDecodeError as error:
                error.start += position - pending
                raise
            position += len(block)
            yield lines.decode(text, final=position == end)
        # It must be what the first pass read: sizes are declared before the bytes are written.
        file.check_unchanged()
        if self._checksums.setdefault("first", checksum) != checksum:
            raise Refused(
                f"input {file.path} changed while it was read: bytes {self.place.start} to {end} were others "
                "the second time; nothing is published: once nobody writes to it, run this again"
            )


class UncuttableText(Exception):
    """A document has too much text in one piece: see MOST_UNCUT_CHARS."""


def encodable_pieces(pieces: Iterator[str], *, can_be_cut: bool) -> Iterator[str]:
    """The same text in pieces whose ids, one after the other, are those of the whole.

    Cut where CUT says, if the tokenizer can be cut at all; pieces grow until there is such a place. Raises
    UncuttableText above MOST_UNCUT_CHARS.
    """
    held: list[str] = []
    num_held, last = 0, ""
    for piece in pieces:
        cut = _last_cut(last + piece) if can_be_cut else None
        if cut is not None:
            cut -= len(last)
            yield "".join([*held, piece[:cut]])
            held, num_held = [], 0
            piece = piece[cut:]
        held.append(piece)
        num_held += len(piece)
        last = (last + piece)[-1:]
        if num_held > MOST_UNCUT_CHARS:
            raise UncuttableText
    if num_held:
        yield "".join(held)


def _last_cut(text: str) -> int | None:
    """The last place where ``text`` may be cut; most often it is near its end."""
    for num_chars in (1 << 8, 1 << 12, len(text)):
        begin = max(0, len(text) - num_chars)
        cuts = [match.end() - 1 for match in CUT.finditer(text, begin)]
        if cuts:
            return cuts[-1]
    return None
