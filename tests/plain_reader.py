"""Reads raw input slowly and simply, as docs/inputs.md and docs/format.md say: the oracle of inputs.

It shares no code with the packages. The standard library opens and decompresses a file, Python decodes it by
lines, ``json`` parses it, and pyarrow gives whole rows. A file is read from its beginning to its end:
the shards of a plan, one behind the other, must hold what the whole files hold.
"""

from __future__ import annotations

import bz2
import codecs
import contextlib
import functools
import gzip
import io
import json
import lzma
import math
import re
import string
from collections import Counter
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

    offset: int  # where it begins in its file, as docs/format.md counts places
    text: str = ""  # "": it is empty, or left out; a conversation is its messages in JSON
    reason: str = ""  # why it is left out as bad
    id: str = ""  # of ``id_field``


@dataclass(frozen=True, kw_only=True)
class PlainOptions:
    """What a plan's options say of reading; named and set as there."""

    doc: str = "line"
    encoding: str = "utf-8"
    text_field: str = "text"
    text_template: str = ""
    record: str = "documents"
    id_field: str = ""


class _BadError(Exception):
    """A record gives no text; the argument is the reason."""


def plain_records(path: Path, **options: str) -> Iterator[PlainRecord]:
    """Yield every line, row or file of an input in order, the empty and the bad ones included."""
    wanted = PlainOptions(**options)
    suffixes = ["", *(suffix.lower() for suffix in path.suffixes)]
    compression = suffixes.pop() if suffixes[-1] in _OPENERS else ""
    suffix = suffixes[-1]
    if suffix in (".parquet", ".pq", ".arrow", ".ipc", ".feather"):
        first = 0
        for table in (_parquet if suffix.startswith(".p") else _arrow)(path):
            for number in range(table.num_rows):
                yield _record(first + number, wanted, functools.partial(tuple, (table, number)), _in_row)
            first += table.num_rows
    else:
        with _OPENERS[compression](path) as stream:
            data = stream.read()
        is_json = suffix in (".jsonl", ".ndjson", ".jsonlines", ".json")
        yield from _in_json(data, wanted) if is_json else _in_text(data, wanted, is_held=bool(compression))


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


def _in_text(data: bytes, options: PlainOptions, *, is_held: bool) -> Iterator[PlainRecord]:
    codec = options.encoding.removesuffix("-sig")
    # Of bytes, splitlines takes LF, CR and CRLF for line ends, and nothing else.
    lines = [data] if options.doc == "file" else data.splitlines(keepends=True)
    begin = 0
    if options.encoding == "utf-8-sig" and data.startswith(codecs.BOM_UTF8):
        begin, lines[0] = 3, lines[0][3:]
        if data == codecs.BOM_UTF8 and options.doc == "line":
            return  # a file that is nothing else
    for line in lines:
        is_too_long = is_held and len(line) > _MOST_HELD_BYTES
        try:
            text = "" if is_too_long else line.decode(codec).replace("\r\n", "\n").replace("\r", "\n")
            yield PlainRecord(begin, text.strip(), "too_long" if is_too_long else "")
        except UnicodeDecodeError:
            yield PlainRecord(begin, reason="undecodable")
        begin += len(line)


def _in_json(data: bytes, options: PlainOptions) -> Iterator[PlainRecord]:
    offset = 0
    for line in io.BytesIO(data):  # of bytes: a line ends with LF alone
        begin = offset
        offset += len(line)
        text = line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line
        if len(line) > _MOST_HELD_BYTES:
            yield PlainRecord(begin, reason="too_long")
        elif not text.strip(b" \t\r\n"):
            yield PlainRecord(begin)
        else:
            yield _record(begin, options, functools.partial(_parse, text), _in_object)


class _Twice:
    """The value of a key that stands more than once in its object: the last one."""

    def __init__(self, last: Any) -> None:
        self.last = last


def _parse(line: bytes) -> dict[str, Any]:
    """Return the object of a line of JSON. Raises _BadError and UnicodeDecodeError."""
    text = line.decode()
    try:
        value = json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=_finite,
            parse_float=_finite,
            parse_int=lambda digits: (_finite(digits), int(digits))[1],
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False, default=_last).encode()
    except UnicodeEncodeError:  # half of a surrogate pair
        raise _BadError("surrogate") from None
    except (ValueError, RecursionError):
        raise _BadError("bad_json") from None
    if not isinstance(value, dict):
        raise _BadError("bad_json")
    return value


def _in_object(value: Any, path: Sequence[str], *, is_text: bool) -> Any:
    for name in path:
        if not isinstance(value, dict) or name not in value:
            return _MISSING
        value = value[name]
        if isinstance(value, _Twice):
            value = (_once if is_text else _last)(value)
    return value


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    times = Counter(name for name, _ in pairs)
    return {name: _Twice(value) if times[name] > 1 else value for name, value in pairs}


def _finite(text: str) -> float:
    """Raises ValueError for a number that is too large, for NaN and for Infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _last(value: Any) -> Any:
    """Return what ``json.dumps`` takes for a _Twice. Raises TypeError for all else."""
    if isinstance(value, _Twice):
        return value.last
    raise TypeError(type(value).__name__)


def _once(value: Any) -> Any:
    """Return what ``json.dumps`` takes in a text: a key stands once, and a time of a table is a string."""
    if isinstance(value, _Twice):
        raise _BadError("bad_json")
    return value.isoformat() if hasattr(value, "isoformat") else _last(value)


def _in_row(row: tuple[Any, int], path: Sequence[str], *, is_text: bool) -> Any:
    """Return a value of a table's row, however deep in its structs; null where what it stands in is null, and
    the error where it cannot be decoded."""
    table, number = row
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
    except UnicodeDecodeError as error:
        return error


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
            if column.type == pyarrow.string():  # pyarrow follows a damaged offset to wherever it leads
                column.view(pyarrow.binary()).validate(full=True)
        yield pyarrow.Table.from_batches([batch])


def _record(
    offset: int, options: PlainOptions, parse: Callable[[], Any], value_in: Callable[..., Any]
) -> PlainRecord:
    """Return a record. ``value_in`` gives the value at a path of what ``parse`` gives."""
    try:
        values = parse()
        literals, paths = _template_of(options)
        found = [value_in(values, path, is_text=True) for path in paths]
        text = literals[0]
        for value, literal in zip(found, literals[1:], strict=True):
            text += _text_of(value, is_chat=options.record == "chat") + literal
        most_bytes = _MOST_CHAT_BYTES if options.record == "chat" else _MOST_HELD_BYTES
        if len(text) > most_bytes or len(text.encode()) > _MOST_HELD_BYTES:
            return PlainRecord(offset, reason="too_long")
        name = value_in(values, options.id_field.split("."), is_text=False) if options.id_field else None
    except UnicodeDecodeError:
        return PlainRecord(offset, reason="undecodable")
    except _BadError as bad:
        return PlainRecord(offset, reason=str(bad))
    return PlainRecord(offset, "" if text.isspace() else text, id=_name(name))


def _template_of(options: PlainOptions) -> tuple[list[str], list[list[str]]]:
    """Return the texts around the fields of a document, and the paths of these fields."""
    if not options.text_template:
        return ["", ""], [options.text_field.split(".")]
    letters = {"n": "\n", "t": "\t", "r": "\r"}
    unescaped = re.sub(r"\\([ntr\\])", lambda m: letters.get(m[1], m[1]), options.text_template)
    literals, paths = [""], []
    for literal, name, _, _ in string.Formatter().parse(unescaped):
        literals[-1] += literal
        if name is not None:
            paths.append(name.split("."))
            literals.append("")
    return literals, paths


def _text_of(value: Any, *, is_chat: bool) -> str:
    if isinstance(value, UnicodeDecodeError):
        raise value
    if value is _MISSING or value is None:
        raise _BadError("null_field" if value is None else "no_field")
    if not is_chat and isinstance(value, str):
        return value
    with contextlib.suppress(TypeError, ValueError):
        if is_chat:
            text = json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_once
            )
            if isinstance(value, list):
                return text
    raise _BadError("wrong_type")


def _name(value: Any) -> str:
    """Return an id: a string as it is, another value as JSON, nothing where there is none."""
    if value is _MISSING or value is None or isinstance(value, (str, UnicodeDecodeError)):
        return value if isinstance(value, str) else ""
    try:
        return json.dumps(value, ensure_ascii=False, default=_last)
    except (TypeError, ValueError):
        return str(value)
