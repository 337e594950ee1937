"""Which encoding the text of an input has: as --encoding says, or as its samples show.

``--encoding`` is a codec, ``auto``, or codecs of files by patterns: ``ko/*=cp949,*.log=latin-1,utf-8``. What
``auto`` sees is frozen in the plan, file by file, so a task never guesses. It says UTF-8 or CP949, each only
if nothing speaks against it, and nothing else.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from shardprep.format.choices import choices_for
from shardprep.format.plan import ByteRange
from shardprep.format.plan_options import PlanOptions

UTF_8 = "utf-8"
UTF_8_WITH_MARK = "utf-8-sig"  # its byte order mark is dropped where it stands first in a file
CP949 = "cp949"
MARK = codecs.BOM_UTF8
_MIN_WIDE = 8  # characters of two bytes; fewer of them may be another encoding by chance
# Of these, at least so many are Hangul in Korean text. In GBK and EUC-JP read as CP949 about a half are.
_HANGUL_SHARE = 0.8
_CUT_BYTES = 3  # of a character that a sample may begin or end within


class Sample(NamedTuple):
    """Some bytes of a text, and whether they begin and end where it does."""

    data: bytes
    is_first: bool = True
    is_last: bool = True

    def has_whole_line(self) -> bool:
        """Return whether any line lies in the sample as a whole."""
        begin, end = self._whole_part()
        return begin < end

    def whole_lines(self) -> bytes:
        """Return the lines that are whole, or all bytes if none is."""
        begin, end = self._whole_part()
        return self.data[begin:end] if begin < end else self.data

    def _whole_part(self) -> tuple[int, int]:
        begin = 0 if self.is_first else self.data.find(b"\n") + 1
        end = len(self.data) if self.is_last else self.data.rfind(b"\n") + 1
        return begin, end


def samples_as_texts(samples: Sequence[bytes]) -> list[Sample]:
    """Return samples of a plain file: its beginning, middle and end, or all of it as one."""
    last = len(samples) - 1
    return [Sample(data, number == 0, number == last) for number, data in enumerate(samples)]


def encoding_of(byte_range: ByteRange, options: PlanOptions) -> str:
    """Return the codec of an input's text: the one that the plan has for it, or that of --encoding."""
    return byte_range.encoding or options.encoding


def wanted_encoding(options: PlanOptions, name: str) -> str:
    """Return what --encoding says for a file: a codec, or AUTO. ``name``: its path in the input folder."""
    return next(iter(choices_for(name, options.encoding, "=")), UTF_8)


def seen_encoding(samples: Iterable[Sample]) -> str:
    """Return the encoding of all samples, or "" if it is not clear. Text in ASCII is UTF-8."""
    seen = {_encoding_of_lines(sample.whole_lines()) for sample in samples if not sample.data.isascii()}
    if not seen:
        return UTF_8
    return seen.pop() if len(seen) == 1 else ""


def _encoding_of_lines(data: bytes) -> str:
    if _is_utf_8(data):
        return UTF_8
    return CP949 if is_clearly_cp949(data) else ""


def _is_utf_8(data: bytes) -> bool:
    """Return whether bytes are UTF-8, of which the first and the last character may be cut."""
    num_cut = 0
    while num_cut < min(_CUT_BYTES, len(data)) and 0x80 <= data[num_cut] < 0xC0:
        num_cut += 1
    try:
        data[num_cut:].decode()
    except UnicodeDecodeError as error:
        # At the end, only the rest of a character may be missing.
        return error.reason == "unexpected end of data"
    return True


def is_clearly_cp949(data: bytes) -> bool:
    """Return whether bytes are CP949 (EUC-KR with all syllables), and very probably nothing else."""
    try:
        text = data.decode(CP949)
    except UnicodeDecodeError:
        return False
    # units: uint16[num_units], of UTF-16; octets: uint8[num_bytes]
    units = np.frombuffer(text.encode("utf-16-le"), "<u2")
    octets = np.frombuffer(data, np.uint8)
    num_wide = int(np.count_nonzero(units >= 0x80))
    num_hangul = int(np.count_nonzero((units >= 0xAC00) & (units <= 0xD7A3)))
    # The second byte of a common syllable is high, too. In Latin-1 it would mostly be a letter.
    num_low_seconds = 2 * num_wide - int(np.count_nonzero(octets >= 0x80))
    is_korean = num_hangul >= _HANGUL_SHARE * num_wide
    return num_wide >= _MIN_WIDE and is_korean and num_low_seconds <= (1 - _HANGUL_SHARE) * num_wide


def as_utf_8(data: bytes, codec: str) -> bytes:
    """Return text in UTF-8. Raises UnicodeDecodeError. UTF-8 is returned as it is, without a check."""
    return data if codec in (UTF_8, UTF_8_WITH_MARK) else data.decode(codec).encode()


def shown(codec: str) -> str:
    """Return the name of a codec for people."""
    return {UTF_8: "UTF-8", UTF_8_WITH_MARK: "UTF-8", CP949: "CP949"}.get(codec, codec)
