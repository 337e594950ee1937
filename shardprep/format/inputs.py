"""What the name of an input file says: its format, its compression, and the unit of places in it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Literal, NamedTuple


class InputFormat(NamedTuple):
    """A format of input files, see docs/inputs.md. CONTRIBUTING.md, "An input format", adds one."""

    suffixes: tuple[str, ...]  # lower case, the usual one first
    # Of an offset: a byte of the (decompressed) file, a row, or the byte of the file where a record begins.
    unit: Literal["byte", "row", "record"] = "byte"
    can_be_compressed: bool = False
    has_fields: bool = True  # whether records have named fields; False for plain text
    is_text: bool = True  # whether its bytes, decompressed, are text
    is_json: bool = False  # whether its lines are objects of JSON, of which ``plan`` can say what is wrong


INPUT_FORMATS = (
    InputFormat((".txt", ".text"), can_be_compressed=True, has_fields=False),
    InputFormat((".jsonl", ".ndjson", ".jsonlines"), can_be_compressed=True, is_json=True),
    InputFormat((".json",), can_be_compressed=True, is_json=True),  # one object per line
    InputFormat((".csv",), unit="row", can_be_compressed=True),
    InputFormat((".tsv",), unit="row", can_be_compressed=True),
    InputFormat((".parquet", ".pq"), unit="row", is_text=False),
    InputFormat((".arrow", ".ipc", ".feather"), unit="row", is_text=False),
    InputFormat((".warc", ".wet"), unit="record", can_be_compressed=True, is_text=False),
)
PLAIN_TEXT = INPUT_FORMATS[0]  # also for files of `--also` with an unknown suffix
COMPRESSION_SUFFIXES = {  # suffix -> the usual suffix of the same compression
    ".gz": ".gz", ".gzip": ".gz", ".zst": ".zst", ".zstd": ".zst", ".xz": ".xz", ".bz2": ".bz2"
}  # fmt: skip
_BY_SUFFIX = {suffix: each for each in INPUT_FORMATS for suffix in each.suffixes}


class InputKind(NamedTuple):
    """The format and compression of an input, from its name."""

    format: InputFormat
    compression: str  # the usual suffix, or ""

    @property
    def unit(self) -> str:
        """Return the unit of a document's offset, in words."""
        return "byte of the text" if self.compression and self.format.unit == "byte" else self.format.unit

    @property
    def is_in_bytes(self) -> bool:
        """Return whether offsets are bytes of the file, like the plan's cuts."""
        return self.unit == "byte"


def known_input_kind(path: str) -> InputKind | None:
    """Return the kind of a file from its name, ignoring case, or None for an unknown suffix."""
    stem, dot, last = path.rpartition("/")[2].lower().rpartition(".")
    suffix = dot + last
    before = ""
    if suffix in COMPRESSION_SUFFIXES:
        _, dot, last = stem.rpartition(".")
        before = dot + last
    return _kind_of_suffixes(suffix, before)


@functools.lru_cache(maxsize=64)  # asked for each file, several times
def _kind_of_suffixes(suffix: str, before: str) -> InputKind | None:
    """``before``: the suffix before that of the compression."""
    compression = COMPRESSION_SUFFIXES.get(suffix, "")
    file_format = _BY_SUFFIX.get(before if compression else suffix)
    if file_format is None or (compression and not file_format.can_be_compressed):
        return None
    return InputKind(file_format, compression)


def input_kind(path: str) -> InputKind:
    """Return the kind of an input. A file with an unknown suffix (``--also``) is plain text."""
    known = known_input_kind(path)
    if known is not None:
        return known
    return InputKind(PLAIN_TEXT, COMPRESSION_SUFFIXES.get("." + path.lower().rpartition(".")[2], ""))


def place_text(path: str, offset: int) -> str:
    """Return a place in words: ``ko_1.txt byte 4512``, ``a.parquet row 17``."""
    return f"{path} {input_kind(path).unit} {offset}"


def name_of_input(names: Sequence[str], number: int) -> str:
    """Return the name of an input, or words for a wrong number, as an idx or a side file may have."""
    return names[number] if 0 <= number < len(names) else f"input {number}, which the plan does not have,"


def known_suffixes() -> str:
    """Return the suffixes of all formats, for messages."""
    compressible = [each.suffixes[0] for each in INPUT_FORMATS if each.can_be_compressed]
    others = [each.suffixes[0] for each in INPUT_FORMATS if not each.can_be_compressed]
    compressions = dict.fromkeys(COMPRESSION_SUFFIXES.values())
    return "; ".join([f"{', '.join(compressible)}, each also with {', '.join(compressions)}", *others])
