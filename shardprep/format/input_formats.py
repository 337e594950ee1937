"""The registry of input formats: the one table that planner, worker, verify, peek, reports and docs ask.

docs/architecture.md ("An input format") says what else to write for a new line.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple


class InputFormat(NamedTuple):
    """One format of input files. docs/inputs.md says what its documents are, and where a shard may begin."""

    suffixes: tuple[str, ...]  # in lower case; the first is the usual one
    reader: str  # module and class in preprocess/read, "json_lines:JsonLines"
    unit: Literal["byte", "row"] = "byte"  # of a place: of the file (decompressed: of its text), or rows
    can_be_compressed: bool = False
    has_fields: bool = True  # records with named fields; else plain text
    library: str = ""  # that the reader imports, of the extra [columns]


INPUT_FORMATS = (
    InputFormat((".txt", ".text"), "lines:TextLines", can_be_compressed=True, has_fields=False),
    InputFormat((".jsonl", ".ndjson", ".jsonlines"), "json_lines:JsonLines", can_be_compressed=True),
    InputFormat((".json",), "json_lines:JsonFile", can_be_compressed=True),  # one object per line
    InputFormat((".parquet", ".pq"), "tables:Parquet", unit="row", library="pyarrow"),
    InputFormat((".arrow", ".ipc", ".feather"), "tables:Arrow", unit="row", library="pyarrow"),
)
PLAIN_TEXT = INPUT_FORMATS[0]  # also what `--also` takes with another suffix
# Each suffix of a compression, and the usual one of the same meaning.
COMPRESSION_SUFFIXES = {
    ".gz": ".gz", ".gzip": ".gz", ".zst": ".zst", ".zstd": ".zst", ".xz": ".xz", ".bz2": ".bz2"
}  # fmt: skip
_BY_SUFFIX = {suffix: each for each in INPUT_FORMATS for suffix in each.suffixes}


class InputKind(NamedTuple):
    """What an input's name says of it."""

    format: InputFormat
    compression: str  # its usual suffix; "" for none

    @property
    def unit(self) -> str:
        """Return what the offset of a document counts."""
        return "byte of the text" if self.compression and self.format.unit == "byte" else self.format.unit

    @property
    def is_in_bytes(self) -> bool:
        """Return whether offsets are bytes of the file itself, as the cuts of the plan are."""
        return self.unit == "byte"


def known_input_kind(path: str) -> InputKind | None:
    """Return the kind of a file by its name, upper or lower case, or None for a suffix that is not known."""
    stem, dot, suffix = path.rpartition("/")[2].lower().rpartition(".")
    compression = COMPRESSION_SUFFIXES.get(dot + suffix, "")
    if compression:
        _, dot, suffix = stem.rpartition(".")
    found = _BY_SUFFIX.get(dot + suffix)
    if found is None or (compression and not found.can_be_compressed):
        return None
    return InputKind(found, compression)


def input_kind(path: str) -> InputKind:
    """Return the kind of a file that is an input: with an unknown suffix (``--also``), plain text."""
    compression = COMPRESSION_SUFFIXES.get("." + path.lower().rpartition(".")[2], "")
    return known_input_kind(path) or InputKind(PLAIN_TEXT, compression)


def place_text(path: str, offset: int) -> str:
    """Return ``ko_1.txt byte 4512``, ``a.parquet row 17``."""
    return f"{path} {input_kind(path).unit} {offset}"


def name_of_input(names: Sequence[str], number: int) -> str:
    """Return the name of an input by its number, which an idx or a side file may have got wrong."""
    return names[number] if 0 <= number < len(names) else f"input {number}, which the plan does not have,"


def known_suffixes() -> str:
    """Return the suffixes of all formats, for messages."""
    can_be, cannot_be = (
        [each.suffixes[0] for each in INPUT_FORMATS if each.can_be_compressed == wanted]
        for wanted in (True, False)
    )
    compressions = dict.fromkeys(COMPRESSION_SUFFIXES.values())
    return "; ".join([f"{', '.join(can_be)}, each also with {', '.join(compressions)}", *cannot_be])
