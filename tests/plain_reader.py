"""Read raw input slowly and simply, as docs/inputs.md and docs/format.md describe it: the oracle for inputs.

It shares no code with the packages. The standard library decompresses a file, Python decodes its lines,
``json`` parses them, and pyarrow reads whole rows. A file is read from beginning to end, and the shards of a
plan together must have the same documents.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import json
import lzma
import math
import operator
import re
import string
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import zstandard
from pyarrow import ipc

_MOST_HELD_BYTES = 64 << 20  # see "Documents left out" in docs/format.md
_MOST_CHAT_BYTES = 4 << 20
_MISSING = object()


@dataclass(frozen=True)
class PlainRecord:
    """One line, row or file of the input: its text, or why it gives none."""

    offset: int  # its place in the file, as docs/format.md counts places
    text: str = ""  # "" if it is empty or left out; a conversation as JSON
    reason: str = ""  # why it is left out
    id: str = ""  # of ``id_field``


class _LeftOutError(Exception):
    """A record has no text; the argument is the reason, or "" if the record is empty."""


def plain_records(
    path: Path,
    *,
    doc: str = "line",
    encoding: str = "utf-8",
    text_field: str = "text",
    text_template: str = "",
    record: str = "documents",
    id_field: str = "",
) -> Iterator[PlainRecord]:
    """Yield every line, row or file of an input in order, including empty and bad ones.

    The options are those of ``plan``.
    """
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = suffixes.pop() if suffixes[-1] in _OPENERS else ""
    is_chat = record == "chat"
    if suffixes[-1] in (".parquet", ".pq", ".arrow", ".ipc", ".feather"):
        values = _in_tables((_parquet if suffixes[-1].startswith(".p") else _arrow)(path))
    else:
        with _OPENERS[compression](path) as stream:
            data = stream.read()
        if suffixes[-1] not in (".jsonl", ".ndjson", ".jsonlines", ".json"):
            yield from _in_text(data, doc, encoding, is_held=bool(compression))
            return
        values = _in_json(data, is_chat=is_chat)
    literals, paths = _parts_of(text_template) if text_template else (["", ""], [text_field.split(".")])
    most_bytes = _MOST_CHAT_BYTES if is_chat else _MOST_HELD_BYTES
    for offset, value_at in values:
        try:
            found = [value_at(place, is_text=True) for place in paths]
            text = literals[0]
            for value, literal in zip(found, literals[1:], strict=True):
                text += _text_of(value, is_chat=is_chat) + literal
            name = _name(value_at(id_field.split("."), is_text=False)) if id_field else ""
            if len(text) > most_bytes or len(text.encode()) > _MOST_HELD_BYTES:
                yield PlainRecord(offset, reason="too_long")
            else:
                yield PlainRecord(offset, "" if text.isspace() else text, id=name)
        except UnicodeDecodeError:
            yield PlainRecord(offset, reason="undecodable")
        except _LeftOutError as left_out:
            yield PlainRecord(offset, reason=str(left_out))


def _open_zstandard(path: Path) -> Any:
    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    return decompressor.stream_reader(path.open("rb"), read_across_frames=True)


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".gzip": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _open_zstandard,
    ".zstd": _open_zstandard,
}


def _in_text(data: bytes, doc: str, encoding: str, *, is_held: bool) -> Iterator[PlainRecord]:
    # For bytes, splitlines knows only LF, CR and CRLF as line ends.
    lines = [data] if doc == "file" else data.splitlines(keepends=True)
    begin = 0
    if encoding in ("utf-8", "utf-8-sig") and data.startswith(codecs.BOM_UTF8):
        begin, lines[0] = 3, lines[0][3:]
        if data == codecs.BOM_UTF8 and doc == "line":
            return  # the file is only a byte order mark
    for line in lines:
        is_too_long = is_held and len(line) > _MOST_HELD_BYTES
        try:
            text = "" if is_too_long else line.decode(encoding.removesuffix("-sig"))
            text = text.replace("\r\n", "\n").replace("\r", "\n").strip()
            yield PlainRecord(begin, text, "too_long" if is_too_long else "")
        except UnicodeDecodeError:
            yield PlainRecord(begin, reason="undecodable")
        begin += len(line)


Values = Iterator[tuple[int, Callable[..., Any]]]  # per record: its place, and a getter for values by path


def _in_json(data: bytes, *, is_chat: bool) -> Values:
    offset = 0
    for line in io.BytesIO(data):  # for bytes, only LF ends a line
        text = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
        yield offset, functools.partial(_in_object, text, is_chat=is_chat)
        offset += len(line)


def _in_object(line: bytes, path: Sequence[str], *, is_text: bool, is_chat: bool) -> Any:
    """Return the value at a path of a JSON line.

    Keys of a text and keys in messages must be unique. Of other repeated keys the last value counts.
    """
    value = _parse(line)
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        if is_text and len(value[name]) > 1:
            raise _LeftOutError("bad_json")
        value = value[name][-1]
    return _with_last_values(value, is_once=is_text and is_chat)


@functools.lru_cache(maxsize=1)
def _parse(line: bytes) -> dict[str, list[Any]]:
    """Parse the object of a JSON line. In every object, a key maps to the list of its values."""

    def collect(pairs: list[tuple[str, Any]]) -> dict[str, list[Any]]:
        found: dict[str, list[Any]] = {}
        for name, value in pairs:
            found.setdefault(name, []).append(value)
        return found

    if len(line) > _MOST_HELD_BYTES:
        raise _LeftOutError("too_long")
    if not line.strip(b" \t\r\n"):
        raise _LeftOutError("")
    text = line.decode()
    try:
        value = json.loads(
            text,
            object_pairs_hook=collect,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=lambda digits: (_finite(digits), int(digits))[1],
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise _LeftOutError("surrogate") from None
    except (ValueError, RecursionError):
        raise _LeftOutError("bad_json") from None
    if not isinstance(value, dict):
        raise _LeftOutError("bad_json")
    return value


def _finite(text: str) -> float:
    """Convert a number. Raises ValueError if it is too large, NaN or Infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is not a number in JSON")
    return number


def _with_last_values(value: Any, *, is_once: bool) -> Any:
    """Return a JSON value with the last value of each key. ``is_once``: repeated keys are an error."""
    if isinstance(value, list):
        return [_with_last_values(each, is_once=is_once) for each in value]
    if not isinstance(value, dict):
        return value
    if is_once and any(len(values) > 1 for values in value.values()):
        raise _LeftOutError("bad_json")
    return {name: _with_last_values(values[-1], is_once=is_once) for name, values in value.items()}


def _in_tables(tables: Iterator[Any]) -> Values:
    first = 0
    for table in tables:
        for number in range(table.num_rows):
            yield first + number, functools.partial(_in_row, table, number)
        first += table.num_rows


def _in_row(table: Any, number: int, path: Sequence[str], *, is_text: bool) -> Any:
    """Return a value of a table's row, at any depth of structs, or None if a struct above it is null.

    Undecodable bytes are an error in a text, and count as missing in an id.
    """
    names = [name] if (name := ".".join(path)) in table.column_names else path
    if names[0] not in table.column_names:
        return _MISSING
    scalar = table.column(names[0])[number]
    for name in names[1:]:
        if not scalar.is_valid:
            return None
        try:
            scalar = scalar[name]
        except (KeyError, TypeError, IndexError):
            return _MISSING
    try:
        value = scalar.as_py()
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        if is_text:
            raise
        return _MISSING


def _parquet(path: Path) -> Iterator[Any]:
    with pyarrow.parquet.ParquetFile(path) as file:
        for number in range(file.metadata.num_row_groups):
            yield file.read_row_group(number)


def _arrow(path: Path) -> Iterator[Any]:
    with path.open("rb") as file:
        is_file_format = file.read(6) == b"ARROW1"
    if is_file_format:
        reader = ipc.open_file(path)
        batches = [reader.get_batch(number) for number in range(reader.num_record_batches)]
    else:
        batches = list(ipc.open_stream(path))
    for batch in batches:
        for column in batch.columns:
            if column.type == pyarrow.string():  # otherwise pyarrow follows damaged offsets anywhere
                column.view(pyarrow.binary()).validate(full=True)
        yield pyarrow.Table.from_batches([batch])


def _parts_of(template: str) -> tuple[list[str], list[list[str]]]:
    """Split a template into the texts around its fields and the paths of the fields."""
    letters = {"n": "\n", "t": "\t", "r": "\r"}
    unescaped = re.sub(r"\\([ntr\\])", lambda m: letters.get(m[1], m[1]), template)
    literals, paths = [""], []
    for literal, name, _, _ in string.Formatter().parse(unescaped):
        literals[-1] += literal
        if name is not None:
            paths.append(name.split("."))
            literals.append("")
    return literals, paths


def _text_of(value: Any, *, is_chat: bool) -> str:
    if value is _MISSING or value is None:
        raise _LeftOutError("null_field" if value is None else "no_field")
    if not isinstance(value, list if is_chat else str):
        raise _LeftOutError("wrong_type")
    if not is_chat:
        return str(value)
    try:  # times in tables become strings
        iso = operator.methodcaller("isoformat")
        return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=iso)
    except (AttributeError, TypeError, ValueError):
        raise _LeftOutError("wrong_type") from None


def _name(value: Any) -> str:
    """Return an id: strings unchanged, other values as JSON, "" for a missing value."""
    if isinstance(value, str):
        return value
    try:
        return "" if value is _MISSING or value is None else json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
