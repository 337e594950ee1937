"""Reads raw input slowly and simply, as docs/inputs.md and docs/format.md say: the oracle of inputs.

It shares no code with the packages. The standard library opens and decompresses a file, Python decodes it by
lines, ``json`` parses it, and pyarrow gives whole rows. A file is read from its beginning to its end:
the shards of a plan, one behind the other, must hold what the whole files hold.
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
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

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
    suffixes = [suffix.lower() for suffix in path.suffixes]
    compression = suffixes.pop() if suffixes[-1:] and suffixes[-1] in _OPENERS else ""
    suffix = suffixes[-1] if suffixes else ""
    if suffix in (".parquet", ".pq"):
        yield from _in_rows(_parquet_rows(path), wanted)
    elif suffix in (".arrow", ".ipc", ".feather"):
        yield from _in_rows(_arrow_rows(path), wanted)
    else:
        with _OPENERS[compression](path) as stream:
            data = stream.read()
        is_json = suffix in (".jsonl", ".ndjson", ".jsonlines", ".json")
        yield from _in_json(data, wanted) if is_json else _in_text(data, wanted, is_held=bool(compression))


def _read_zstandard(path: Path) -> io.BytesIO:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    with path.open("rb") as file:
        return io.BytesIO(decompressor.stream_reader(file, read_across_frames=True).read())


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".gzip": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _read_zstandard,
    ".zstd": _read_zstandard,
}


def _in_text(data: bytes, options: PlainOptions, *, is_held: bool) -> Iterator[PlainRecord]:
    codec = options.encoding.removesuffix("-sig")
    # Of bytes, splitlines takes LF, CR and CRLF for line ends, and nothing else.
    lines = [data] if options.doc == "file" else data.splitlines(keepends=True)
    offset = 0
    for number, line in enumerate(lines):
        begin, text = offset, line
        offset += len(line)
        if number == 0 and options.encoding == "utf-8-sig" and line.startswith(codecs.BOM_UTF8):
            begin, text = 3, line[3:]
            if not text and options.doc == "line":
                continue  # a file that is nothing else
        if is_held and len(text) > _MOST_HELD_BYTES:
            yield PlainRecord(begin, reason="too_long")
            continue
        try:
            decoded = text.decode(codec)
        except UnicodeDecodeError:
            yield PlainRecord(begin, reason="undecodable")
            continue
        yield PlainRecord(begin, decoded.replace("\r\n", "\n").replace("\r", "\n").strip())


def _in_json(data: bytes, options: PlainOptions) -> Iterator[PlainRecord]:
    fields, offset = _Fields(options), 0
    for line in io.BytesIO(data):  # of bytes: a line ends with LF alone
        begin = offset
        offset += len(line)
        text = line.removeprefix(codecs.BOM_UTF8) if begin == 0 else line
        if len(line) > _MOST_HELD_BYTES:
            yield PlainRecord(begin, reason="too_long")
        elif not text.strip(b" \t\r\n"):
            yield PlainRecord(begin)
        else:
            yield _record(begin, fields, functools.partial(_JsonValues, text))


class _Twice:
    """The value of a key that stands more than once in its object: the last one."""

    def __init__(self, last: Any) -> None:
        self.last = last


class _JsonValues:
    """The values of a line of JSON. Raises _BadError and UnicodeDecodeError."""

    def __init__(self, line: bytes) -> None:
        text = line.decode()
        try:
            self._value = json.loads(
                text,
                object_pairs_hook=_object,
                parse_constant=_finite,
                parse_float=_finite,
                parse_int=lambda digits: (_finite(digits), int(digits))[1],
            )
            if "\\u" in text:
                json.dumps(self._value, ensure_ascii=False, default=_last).encode()
        except UnicodeEncodeError:  # half of a surrogate pair
            raise _BadError("surrogate") from None
        except (ValueError, RecursionError):
            raise _BadError("bad_json") from None
        if not isinstance(self._value, dict):
            raise _BadError("bad_json")

    def at(self, path: Sequence[str], *, is_text: bool) -> Any:
        value = self._value
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
    if hasattr(value, "isoformat"):
        return value.isoformat()
    raise TypeError(type(value).__name__)


class _RowValues:
    """The values of a table's row, however deep in its structs; null where what it stands in is null."""

    def __init__(self, rows: Any, number: int) -> None:
        self._rows, self._number = rows, number

    def at(self, path: Sequence[str], *, is_text: bool) -> Any:
        """Return a value; the error where it cannot be decoded."""
        names = [name] if (name := ".".join(path)) in self._rows.column_names else path
        if names[0] not in self._rows.column_names:
            return _MISSING
        scalar = self._rows.column(names[0])[self._number]
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


def _parquet_rows(path: Path) -> Iterator[Any]:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        for number in range(file.metadata.num_row_groups):
            yield file.read_row_group(number)


def _arrow_rows(path: Path) -> Iterator[Any]:
    import pyarrow
    from pyarrow import ipc

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


def _in_rows(groups: Iterator[Any], options: PlainOptions) -> Iterator[PlainRecord]:
    fields, first = _Fields(options), 0
    for rows in groups:
        for number in range(rows.num_rows):
            yield _record(first + number, fields, functools.partial(_RowValues, rows, number))
        first += rows.num_rows


def _record(offset: int, fields: _Fields, read: Callable[[], Any]) -> PlainRecord:
    try:
        text, name = fields.read(read())
    except UnicodeDecodeError:
        return PlainRecord(offset, reason="undecodable")
    except _BadError as bad:
        return PlainRecord(offset, reason=str(bad))
    return PlainRecord(offset, text, id=name)


class _Fields:
    """The fields of the text and of the id."""

    def __init__(self, options: PlainOptions) -> None:
        self._literals, names = ["", ""], [options.text_field]
        if options.text_template:
            letters = {"n": "\n", "t": "\t", "r": "\r"}
            unescaped = re.sub(r"\\([ntr\\])", lambda m: letters.get(m[1], m[1]), options.text_template)
            self._literals, names = [""], []
            for literal, name, _, _ in string.Formatter().parse(unescaped):
                self._literals[-1] += literal
                if name is not None:
                    names.append(name)
                    self._literals.append("")
        self._is_chat = options.record == "chat"
        self._text = [name.split(".") for name in names]
        self._id = options.id_field.split(".") if options.id_field else []

    def read(self, values: Any) -> tuple[str, str]:
        """Return text and id. Raises _BadError, or UnicodeDecodeError of the text."""
        found = [values.at(path, is_text=True) for path in self._text]
        text = self._literals[0]
        for value, literal in zip(map(self._text_of, found), self._literals[1:], strict=True):
            text += value + literal
        most_bytes = _MOST_CHAT_BYTES if self._is_chat else _MOST_HELD_BYTES
        if len(text) > most_bytes or len(text.encode()) > _MOST_HELD_BYTES:
            raise _BadError("too_long")
        return "" if text.isspace() else text, _name(self._id, values)

    def _text_of(self, value: Any) -> str:
        if isinstance(value, UnicodeDecodeError):
            raise value
        if value is _MISSING or value is None:
            raise _BadError("null_field" if value is None else "no_field")
        if not self._is_chat:
            if not isinstance(value, str):
                raise _BadError("wrong_type")
            return value
        try:
            text = json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_once
            )
        except (TypeError, ValueError):
            raise _BadError("wrong_type") from None
        if not isinstance(value, list):
            raise _BadError("wrong_type")
        return text


def _name(path: Sequence[str], values: Any) -> str:
    """Return an id: a string as it is, another value as JSON, nothing where there is none."""
    value = values.at(path, is_text=False) if path else None
    if value is _MISSING or value is None or isinstance(value, UnicodeDecodeError):
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False, default=_last)
    except (TypeError, ValueError):
        return str(value)
