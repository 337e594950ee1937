"""Reads the input of a shard slowly and simply, for ``verify --deep``: nothing of ``formats/`` is used here.

A check that reads with the worker's readers cannot see their errors. So this reader follows docs/format.md by
other means: the standard library opens and decompresses a file from its beginning, Python decodes it by
lines, ``json`` parses it, and pyarrow gives whole rows. In common are the plan, the look whether a file is
the planned one, and the libraries that change text (``text_changes``).

A compressed file is read from its beginning for each shard. Held in memory are a line, a row group or record
batch, all of a file in UTF-16 or UTF-32, and a document that is a file.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import json
import lzma
import re
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any, NoReturn, cast

from preprocess.formats.inputs import ByteRange
from preprocess.formats.text_changes import change_text
from preprocess.formats.text_fields import UnusableText
from preprocess.options import PlanOptions
from preprocess.plan.plan_file import Plan
from shardprep.errors import Refused
from shardprep.format.input_formats import InputKind, input_kind

_MOST_HELD_BYTES = 64 << 20  # see "Documents left out" in docs/format.md
_MOST_CHAT_BYTES = 4 << 20


@dataclass(frozen=True)
class PlainRecord:
    """One line, row or file of the input: its text, or why it gives none."""

    offset: int  # where it begins in its file, as docs/format.md counts places
    text: str = ""  # "": it is empty, or left out
    reason: str = ""  # why it is left out as bad
    id: str | None = None  # of --id_field; None: lines of text have none
    named: str = ""  # the source that the record names
    is_filtered: bool = False  # left out by --min_chars or --max_chars
    line: int = 0  # in the shard, from 0
    source: int = 0  # position of the input file in the plan


def plain_records(plan: Plan, shard_id: int) -> Iterator[PlainRecord]:
    """Yield every line, row or file of a shard's input in order, the empty and the bad ones included.

    Conversations come as their messages in JSON. ``--limit`` is left to the caller. Raises NotFound where a
    file is missing and Refused where it is another one than planned.
    """
    options, line = plan.options, 0
    for part in plan.ranges(shard_id):
        part.open()  # compares it with the plan
        text_stop = None
        if plan.text_starts is not None and part.end < _size_of(part):
            text_stop = plan.text_starts[shard_id + 1]
        for record in _records_in(part, text_stop, options):
            yield replace(_changed(record, part, options), line=line, source=part.input_number)
            line += 1


def _size_of(part: ByteRange) -> int:
    return part.path.stat().st_size


def _changed(record: PlainRecord, part: ByteRange, options: PlanOptions) -> PlainRecord:
    """The record with its text as it is to be encoded."""
    if not record.text or not options.changes_text:
        return record
    text = change_text(record.text, options)
    if isinstance(text, UnusableText):
        return replace(record, text="", reason=text.reason)
    if text is None:
        return replace(record, text="", is_filtered=True)
    return replace(record, text=text if _kind(part).format.has_fields else text.strip())


def _kind(part: ByteRange) -> InputKind:
    return input_kind(part.path.name)


def check_readable(paths: Iterable[str]) -> None:
    """That this reader knows the formats of all inputs. Raises Refused naming the first that it doesn't."""
    for path in paths:
        suffix = input_kind(path).format.suffixes[0]
        if suffix not in (".txt", ".jsonl", ".json", ".parquet", ".arrow"):
            raise Refused(
                f"verify --deep has no second reader of {suffix}, and {path} is an input; run verify without "
                "--deep, or add one to preprocess/check/plain_reader.py"
            )


def _records_in(part: ByteRange, text_stop: int | None, options: PlanOptions) -> Iterator[PlainRecord]:
    suffix = _kind(part).format.suffixes[0]
    if suffix == ".txt":
        yield from _in_text(part, text_stop, options)
    elif suffix == ".parquet":
        yield from _in_rows(_parquet_rows, part, options)
    elif suffix == ".arrow":
        yield from _in_rows(_arrow_rows, part, options)
    else:
        yield from _in_json(part, text_stop, options)


# --- Bytes and lines


def _zstandard(path: Path) -> IO[bytes]:
    import zstandard

    decompressor = zstandard.ZstdDecompressor(max_window_size=1 << 31)
    stream = decompressor.stream_reader(path.open("rb"), read_across_frames=True, closefd=True)
    return io.BufferedReader(cast("io.RawIOBase", stream))


def _plain(path: Path) -> IO[bytes]:
    return path.open("rb")


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": _plain,
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstandard,
}


def _opened(part: ByteRange) -> Any:
    """The text of a file, as a binary file."""
    return _OPENERS[_kind(part).compression](part.path)


def _lines(
    part: ByteRange, text_stop: int | None, split: Callable[[bytes], list[bytes]]
) -> Iterator[tuple[int, bytes]]:
    """Each line that belongs to the part, with its end, and the byte of the text where it begins.

    A part that begins inside of a compressed file has the lines that begin behind ``text_start``, up to the
    one that begins where the next part's ``text_start`` is.
    """
    is_plain = not _kind(part).compression
    at = part.start if is_plain else 0
    first = at if is_plain or not part.start else part.text_start + 1
    last = part.end - 1 if is_plain else text_stop
    with _opened(part) as stream:
        if is_plain:
            stream.seek(at)
        for chunk in stream:
            for line in split(chunk):
                if last is not None and at > last:
                    return
                if at >= first:
                    yield at, line
                at += len(line)


# --- Text


def _in_text(part: ByteRange, text_stop: int | None, options: PlanOptions) -> Iterator[PlainRecord]:
    if options.doc == "file" or options.encoding.startswith(("utf-16", "utf-32")):
        with _opened(part) as stream:
            data = stream.read()
        codec, at = _codec_of(data, options.encoding)
        whole = data[at:]
        lines = iter([(at, whole)]) if options.doc == "file" else _wide_lines(whole, codec, at)
    else:
        codec = options.encoding
        lines = _lines(part, text_stop, lambda chunk: chunk.splitlines(keepends=True))
    is_held = bool(_kind(part).compression) or options.changes_text
    for offset, line in lines:
        if offset == 0 and codec == "utf-8-sig" and line.startswith(codecs.BOM_UTF8):
            offset, line = 3, line[3:]
            if not line:
                continue  # a file that is nothing else
        if is_held and len(line) > _MOST_HELD_BYTES:
            yield PlainRecord(offset, reason="too_long")
            continue
        try:
            text = line.decode("utf-8" if codec == "utf-8-sig" else codec)
        except UnicodeDecodeError:
            yield PlainRecord(offset, reason="undecodable")
            continue
        text = text.replace("\r\n", "\n").replace("\r", "\n")
        # A no-break space may be half of a character that --fix_text repairs: it goes later.
        yield PlainRecord(offset, text.strip(" \t\n\r\v\f") if options.fix_text else text.strip())


def _codec_of(data: bytes, encoding: str) -> tuple[str, int]:
    """The codec without a byte order mark, and the bytes of the mark."""
    marks = {
        "utf-8-sig": [("utf-8", codecs.BOM_UTF8)],
        "utf-16": [("utf-16-le", codecs.BOM_UTF16_LE), ("utf-16-be", codecs.BOM_UTF16_BE)],
        "utf-32": [("utf-32-le", codecs.BOM_UTF32_LE), ("utf-32-be", codecs.BOM_UTF32_BE)],
    }
    for codec, mark in marks.get(encoding, []):
        if data.startswith(mark):
            return codec, len(mark)
    return marks[encoding][0][0] if encoding in marks else encoding, 0


def _wide_lines(data: bytes, codec: str, at: int) -> Iterator[tuple[int, bytes]]:
    """The lines of UTF-16 or UTF-32. What cannot be decoded is one character here, and bad later."""
    text = data.decode(codec, "replace")
    begin = 0
    for line in re.findall(r"[^\r\n]*(?:\r\n|\r|\n)|[^\r\n]+", text):
        if codec.startswith("utf-32"):
            num_bytes = 4 * len(line)
        else:
            num_bytes = 2 * (len(line) + sum(char > "\uffff" for char in line))
        yield at + begin, data[begin : begin + num_bytes]
        begin += num_bytes


# --- JSON


def _in_json(part: ByteRange, text_stop: int | None, options: PlanOptions) -> Iterator[PlainRecord]:
    fields = _Fields(options)
    for offset, line in _lines(part, text_stop, lambda chunk: [chunk]):
        data = line.removeprefix(codecs.BOM_UTF8) if offset == 0 else line
        if len(line) > _MOST_HELD_BYTES:
            yield PlainRecord(offset, reason="too_long")
        elif not data.strip(b" \t\r\n"):
            yield PlainRecord(offset, id="")
        else:
            record = _parsed(data)
            if isinstance(record, UnusableText):
                yield PlainRecord(offset, reason=record.reason)
            elif not isinstance(record, dict) or fields.has_text_twice(record):
                yield PlainRecord(offset, reason="bad_json")
            else:
                yield fields.found(offset, functools.partial(_value_at, record))


class _Object(dict[str, Any]):
    """An object of JSON, with the keys that stand in it more than once."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        names = [name for name, _ in pairs]
        self.twice = {name for name in names if names.count(name) > 1} if len(self) < len(pairs) else set()


def _has_any_twice(value: Any) -> bool:
    if isinstance(value, _Object) and value.twice:
        return True
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return any(map(_has_any_twice, inner))


def _parsed(line: bytes) -> Any:
    """The value of a line of JSON, or why it is none."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", str(error))
    try:
        value = json.loads(
            text,
            object_pairs_hook=_Object,
            parse_constant=_no_number,
            parse_float=_finite_number,
            parse_int=_finite_whole_number,
        )
        if "\\u" in text:
            json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:  # half of a surrogate pair
        return UnusableText("surrogate", str(error))
    except (ValueError, RecursionError) as error:
        return UnusableText("bad_json", str(error))
    return value


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _finite_number(text: str) -> float:
    if (number := float(text)) in (float("inf"), float("-inf")):
        raise ValueError(f"{text} is too large")
    return number


def _finite_whole_number(text: str) -> int:
    _finite_number(text)
    return int(text)


# --- Rows


_Rows = Iterator[tuple[int, Any]]  # number of the first row, and a table of rows of the columns in use


def _parquet_rows(part: ByteRange, columns: set[str]) -> _Rows:
    """The row groups that belong to the part."""
    import pyarrow.parquet

    if not _size_of(part):
        return
    with pyarrow.parquet.ParquetFile(part.path) as file:
        names = [name for name in file.schema_arrow.names if name in columns]
        begins = []
        for number in range(file.metadata.num_row_groups):
            column = file.metadata.row_group(number).column(0)
            dictionary, data = column.dictionary_page_offset, column.data_page_offset
            begins.append(dictionary if dictionary and dictionary < data else data)
        if begins != sorted(set(begins)):
            begins = [0] * len(begins)  # all of them are one part
        begins[:1] = [0]
        row = 0
        for number, begin in enumerate(begins):
            if part.start <= begin < part.end:
                yield row, file.read_row_group(number, columns=names)
            row += file.metadata.row_group(number).num_rows


def _arrow_rows(part: ByteRange, columns: set[str]) -> _Rows:
    """The record batches that belong to the part."""
    import pyarrow

    if not _size_of(part):
        return
    row = 0
    for begin, batch in _arrow_batches(part.path):
        if part.start <= begin < part.end:
            names = [name for name in batch.schema.names if name in columns]
            yield row, pyarrow.Table.from_batches([batch]).select(names)
        row += batch.num_rows


def _arrow_batches(path: Path) -> Iterator[tuple[int, Any]]:
    """Each record batch of an Arrow file, of the file or the stream format, and the byte where it begins."""
    import pyarrow
    from pyarrow import ipc

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
    if is_file:
        noting = _NotingFile(path)
        reader = ipc.open_file(pyarrow.PythonFile(noting))
        for number in range(reader.num_record_batches):
            reader.get_batch(number)  # and the dictionaries before it
            noting.places.clear()
            batch = reader.get_batch(number)
            yield min(noting.places), batch
        return
    begins = []
    with path.open("rb") as file:
        messages = ipc.MessageReader.open_stream(file)
        begin = 0
        for message in messages:
            if message.type == "record batch":
                begins.append(begin)
            begin = file.tell()
    with ipc.open_stream(path) as stream:
        yield from zip(begins, stream, strict=True)


class _NotingFile(io.FileIO):
    """A file that notes where it is read: pyarrow does not tell where a record batch begins."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.places: list[int] = []

    def read(self, size: int | None = -1, /) -> bytes:
        self.places.append(self.tell())
        return super().read(-1 if size is None else size)


def _in_rows(
    rows_of: Callable[[ByteRange, set[str]], _Rows], part: ByteRange, options: PlanOptions
) -> Iterator[PlainRecord]:
    fields = _Fields(options)
    for first, table in rows_of(part, fields.columns):
        for number in range(table.num_rows):
            yield fields.found(first + number, functools.partial(_cell_at, table, number))


def _cell_at(rows: Any, number: int, path: Sequence[str]) -> Any:
    """A value of a row, however deep in its structs; null where what it stands in is null."""
    name, inner = (".".join(path), ()) if ".".join(path) in rows.column_names else (path[0], path[1:])
    if name not in rows.column_names:
        return _MISSING
    scalar = rows.column(name)[number]
    for each in inner:
        if not scalar.is_valid:
            return None
        try:
            scalar = scalar[each]
        except (KeyError, TypeError, IndexError):
            return _MISSING
    try:
        value = scalar.as_py()
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", str(error))


# --- Fields


_MISSING = object()


class _Fields:
    """The fields of the text, the id and the source."""

    def __init__(self, options: PlanOptions) -> None:
        self._literals = ["", ""]
        names = [options.messages_field or options.text_field]
        if options.text_template:
            unescaped = re.sub(
                r"\\([ntr\\])",
                lambda m: {"n": "\n", "t": "\t", "r": "\r"}.get(m[1], m[1]),
                options.text_template,
            )
            parsed = [(literal, name) for literal, name, _, _ in string.Formatter().parse(unescaped)]
            self._literals, names = [""], []
            for literal, name in parsed:
                self._literals[-1] += literal
                if name is not None:
                    names.append(name)
                    self._literals.append("")
        self._is_chat = options.is_chat
        self._text = [name.split(".") for name in names]
        self._id, self._source = options.id_field, options.source_field
        paths = [*self._text, *(name.split(".") for name in (self._id, self._source) if name)]
        self.columns = {path[0] for path in paths} | {".".join(path) for path in paths}

    def has_text_twice(self, record: dict[str, Any]) -> bool:
        """Whether an object of JSON has a field of the text twice; of messages, any key in them."""
        for path in self._text:
            inner: Any = record
            for name in path:
                if isinstance(inner, _Object) and name in inner.twice:
                    return True
                inner = inner.get(name) if isinstance(inner, _Object) else None
            if self._is_chat and _has_any_twice(inner):
                return True
        return False

    def found(self, offset: int, value_of: Callable[[Sequence[str]], Any]) -> PlainRecord:
        """What a record gives, whose values ``value_of`` tells by their paths."""
        texts = []
        for path in self._text:
            text = self._text_of(value_of(path))
            if isinstance(text, UnusableText):
                return PlainRecord(offset, reason=text.reason)
            texts.append(text)
        text = self._literals[0] + "".join(
            value + literal for value, literal in zip(texts, self._literals[1:], strict=True)
        )
        if len(text) > _MOST_HELD_BYTES // 4 and len(text.encode()) > _MOST_HELD_BYTES:
            return PlainRecord(offset, reason="too_long")
        if self._is_chat and len(text) > _MOST_CHAT_BYTES:
            return PlainRecord(offset, reason="too_long")
        return PlainRecord(
            offset,
            "" if not text or text.isspace() else text,
            id=_name(value_of(self._id.split("."))) if self._id else "",
            named=_name(value_of(self._source.split("."))) if self._source else "",
        )

    def _text_of(self, value: Any) -> str | UnusableText:
        if isinstance(value, UnusableText):
            return value
        if value is _MISSING:
            return UnusableText("no_field", "")
        if value is None:
            return UnusableText("null_field", "")
        if not isinstance(value, list if self._is_chat else str):
            return UnusableText("wrong_type", "")
        if not self._is_chat:
            return str(value)
        try:
            return json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_time_text
            )
        except (TypeError, ValueError):
            return UnusableText("wrong_type", "")


def _time_text(value: Any) -> str:
    """A date or a time of a table, as JSON has it. Raises TypeError for what is none."""
    if hasattr(value, "isoformat"):
        return str(value.isoformat())
    raise TypeError(type(value).__name__)


def _value_at(record: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
    return record


def _name(value: Any) -> str:
    """An id or a source: a string as it is, another value as JSON, nothing where there is none."""
    if value is _MISSING or value is None or isinstance(value, UnusableText):
        return ""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError):
        return str(value)
