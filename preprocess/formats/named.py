"""The format of a file, by its name."""

from __future__ import annotations

from collections.abc import Iterable

from preprocess.formats.compression import COMPRESSIONS, load_zstandard
from preprocess.formats.format import Format
from preprocess.formats.json_lines import JsonLines
from preprocess.formats.text_lines import CompressedText, TextLines

_COMPRESSED = tuple(COMPRESSIONS)
_JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")
# What others put beside their data: no documents.
_COMPANIONS = frozenset({"dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json"})
SUFFIXES = (
    ".txt, .jsonl, .ndjson or .json (of lines), each also with .gz, .zst, .xz or .bz2; .parquet; .arrow"
)


def format_of(name: str) -> Format | None:
    """The format that a file's name says, None for no input. The modules of rows are imported when needed."""
    stem, compression = name, None
    if name.endswith(_COMPRESSED):
        stem, _, suffix = name.rpartition(".")
        compression = COMPRESSIONS[f".{suffix}"]
    if stem.endswith(".txt"):
        return TextLines() if compression is None else CompressedText(compression=compression)
    if stem.endswith(_JSON_SUFFIXES) and name.rpartition("/")[2] not in _COMPANIONS:
        return JsonLines(compression=compression, may_be_a_list=stem.endswith(".json"))
    if name.endswith(".parquet"):
        from preprocess.formats.parquet import Parquet

        return Parquet()
    if name.endswith(".arrow"):
        from preprocess.formats.arrow import Arrow

        return Arrow()
    return None


def load_libraries(names: Iterable[str]) -> None:
    """Import what reading files of these names takes, before any work. Raises UsageError where it is missing.

    pyarrow takes 0.1 s of CPU, which else would count as work of the first shard.
    """
    suffixes = {name.rpartition(".")[2] for name in names}
    if suffixes & {"parquet", "arrow"}:
        from preprocess.formats.columns import load_arrow

        load_arrow()
    if "zst" in suffixes:
        load_zstandard()
