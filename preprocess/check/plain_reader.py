"""Reads the input of a shard slowly and simply, for ``verify --deep``: nothing of ``formats/`` is used here.

A check that reads with the worker's readers cannot see their errors. So this reader follows docs/format.md by
other means: the standard library opens and decompresses a file from its beginning, Python decodes it by
lines, ``json`` parses it, and pyarrow gives whole rows. In common are the plan, the look whether a file is
the planned one, and the libraries that change text (``text_changes``). Held in memory are a line, a row group
or record batch, all of a file in UTF-16 or UTF-32, and a document that is a file.
"""

from __future__ import annotations

import bz2
import codecs
import functools
import gzip
import io
import itertools
import json
import lzma
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from preprocess.formats.inputs import ByteRange
from preprocess.formats.text_changes import change_text
from preprocess.formats.text_fields import UnusableText
from preprocess.options import PlanOptions
from preprocess.plan.plan_file import Plan
from shardprep.errors import Refused
from shardprep.format.input_formats import InputKind, input_kind

_MOST_HELD_BYTES = 64 << 20  # see "Documents left out" in docs/format.md
_MOST_CHAT_BYTES = 4 << 20
_MISSING = object()


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
    messages: str = ""  # of a rendered conversation, in JSON


class _BadError(Exception):
    """A record gives no text; the argument is the reason."""


_Read = tuple[str, "str | None", str]  # text, id, source
_Records = Iterator[tuple[int, Callable[[], _Read]]]  # where each begins; reading it may raise _BadError


def plain_records(plan: Plan, shard_id: int) -> Iterator[PlainRecord]:
    """Yield every line, row or file of a shard's input in order, the empty and the bad ones included.

    Conversations come as their messages in JSON. ``--limit`` is left to the caller. Raises NotFound where a
    file is missing and Refused where it is another one than planned.
    """
    line = 0
    for part in plan.ranges(shard_id):
        part.open()  # compares it with the plan
        is_cut = plan.text_starts is not None and part.end < part.path.stat().st_size
        text_stop = plan.text_starts[shard_id + 1] if is_cut and plan.text_starts is not None else None
        for offset, read in _READERS[_suffix(part.path.name)](part, text_stop, plan.options):
            try:
                text, name, source = read()
                record = PlainRecord(offset, text, id=name, named=source)
            except UnicodeDecodeError:
                record = PlainRecord(offset, reason="undecodable")
            except _BadError as bad:
                record = PlainRecord(offset, reason=str(bad))
            yield replace(_changed(record, part, plan.options), line=line, source=part.input_number)
            line += 1


def check_readable(paths: Iterable[str]) -> None:
    """That this reader knows the formats of all inputs. Raises Refused naming the first that it doesn't."""
    for path in paths:
        if (suffix := _suffix(path)) not in _READERS:
            raise Refused(
                f"verify --deep has no second reader of {suffix}, and {path} is an input; run verify without "
                "--deep, or add one to preprocess/check/plain_reader.py"
            )


def _suffix(path: str) -> str:
    return input_kind(path).format.suffixes[0]


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


def _zstd(path: Path) -> Any:
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    return zstd.open(path, options={zstd.DecompressionParameter.window_log_max: 31})


_OPENERS: dict[str, Callable[[Path], Any]] = {
    "": lambda path: path.open("rb"),
    ".gz": gzip.open,
    ".bz2": bz2.open,
    ".xz": lzma.open,
    ".zst": _zstd,
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


def _in_text(part: ByteRange, text_stop: int | None, options: PlanOptions) -> _Records:
    codec = options.encoding.removesuffix("-sig")
    if options.doc == "file" or codec.startswith(("utf-16", "utf-32")):
        with _opened(part) as stream:
            data = stream.read()
        codec, at = _codec_of(data, codec)
        lines = iter([(at, data[at:])]) if options.doc == "file" else _wide_lines(data, codec, at)
    else:
        lines = _lines(part, text_stop, lambda chunk: chunk.splitlines(keepends=True))
    is_held = bool(_kind(part).compression) or options.changes_text
    # A no-break space may be half of a character that --fix_text repairs: it goes later.
    blanks = " \t\n\r\v\f" if options.fix_text else None
    for offset, line in lines:
        if offset == 0 and options.encoding == "utf-8-sig" and line.startswith(codecs.BOM_UTF8):
            offset, line = 3, line[3:]
            if not line and options.doc == "line":
                continue  # a file that is nothing else
        yield offset, functools.partial(_text_of, line, codec, blanks, is_held=is_held)


def _text_of(line: bytes, codec: str, blanks: str | None, *, is_held: bool) -> _Read:
    if is_held and len(line) > _MOST_HELD_BYTES:
        raise _BadError("too_long")
    return line.decode(codec).replace("\r\n", "\n").replace("\r", "\n").strip(blanks), None, ""


def _codec_of(data: bytes, encoding: str) -> tuple[str, int]:
    """The codec without a byte order mark, and the bytes of the mark."""
    if encoding not in ("utf-16", "utf-32"):
        return encoding, 0
    for codec in (f"{encoding}-le", f"{encoding}-be"):
        mark = "\ufeff".encode(codec)
        if data.startswith(mark):
            return codec, len(mark)
    return f"{encoding}-le", 0


def _wide_lines(data: bytes, codec: str, at: int) -> Iterator[tuple[int, bytes]]:
    """The lines of UTF-16 or UTF-32. What cannot be decoded is one character here, and bad later."""
    for line in io.StringIO(data[at:].decode(codec, "replace"), newline=""):
        num_bytes = len(line.encode(codec))
        yield at, data[at : at + num_bytes]
        at += num_bytes


def _in_json(part: ByteRange, text_stop: int | None, options: PlanOptions) -> _Records:
    fields = _Fields(options)
    for offset, line in _lines(part, text_stop, lambda chunk: [chunk]):
        yield offset, functools.partial(_object_of, line, fields, is_first=offset == 0)


def _object_of(line: bytes, fields: _Fields, *, is_first: bool) -> _Read:
    if len(line) > _MOST_HELD_BYTES:
        raise _BadError("too_long")
    data = line.removeprefix(codecs.BOM_UTF8) if is_first else line
    if not data.strip(b" \t\r\n"):
        return "", None, ""
    return fields.read(functools.partial(_value_at, _parsed(data)))


_MOST_LEVELS = 512  # of objects and lists within each other


class _Twice:
    """The value of a key that stands more than once in its object: the last one."""

    def __init__(self, last: Any) -> None:
        self.last = last


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    times = Counter(name for name, _ in pairs)
    return {name: _Twice(value) if times[name] > 1 else value for name, value in pairs}


def _parsed(line: bytes) -> dict[str, Any]:
    """The object of a line of JSON. Raises _BadError and UnicodeDecodeError."""
    text = line.decode()
    if _is_nested_too_deep(text):
        raise _BadError("bad_json")
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
    except ValueError:
        raise _BadError("bad_json") from None
    if not isinstance(value, dict):
        raise _BadError("bad_json")
    return value


def _is_nested_too_deep(text: str) -> bool:
    if text.count("[") + text.count("{") <= _MOST_LEVELS:
        return False
    outside_of_strings = re.sub(r'"(\\.|[^"\\])*"', "", text, flags=re.DOTALL)
    steps = ((char in "[{") - (char in "]}") for char in outside_of_strings)
    return max(itertools.accumulate(steps), default=0) > _MOST_LEVELS


def _finite(text: str) -> float:
    """Raises ValueError for a number that is too large, for NaN and for Infinity."""
    if not math.isfinite(number := float(text)):
        raise ValueError(f"{text} is no number of JSON")
    return number


def _last(value: Any) -> Any:
    """What ``json.dumps`` takes for a _Twice. Raises TypeError for all else."""
    if isinstance(value, _Twice):
        return value.last
    raise TypeError(type(value).__name__)


def _once(value: Any) -> Any:
    """The same for a text, where a key may stand once."""
    if isinstance(value, _Twice):
        raise _BadError("bad_json")
    raise TypeError(type(value).__name__)


def _value_at(record: Any, path: Sequence[str], *, is_text: bool) -> Any:
    for name in path:
        if not isinstance(record, dict) or name not in record:
            return _MISSING
        record = record[name]
        if isinstance(record, _Twice):
            record = (_once if is_text else _last)(record)
    return record


_Groups = Iterator[tuple[int, int, Callable[[list[str]], Any]]]
"""Of each row group or record batch the byte where it begins, its rows, and what reads some columns of it."""


def _in_rows(
    groups_of: Callable[[Path], _Groups], part: ByteRange, _: int | None, options: PlanOptions
) -> _Records:
    fields, first = _Fields(options), 0
    for begin, num_rows, read in groups_of(part.path) if part.end else ():
        if part.start <= begin < part.end:
            table = read(fields.columns)
            for number in range(num_rows):
                value_of = functools.partial(_cell_at, table, number)
                yield first + number, functools.partial(fields.read, value_of)
        first += num_rows


def _parquet_groups(path: Path) -> _Groups:
    import pyarrow.parquet

    with pyarrow.parquet.ParquetFile(path) as file:
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        begins = []
        for column in (group.column(0) for group in groups):
            dictionary, data = column.dictionary_page_offset, column.data_page_offset
            begins.append(dictionary if dictionary and dictionary < data else data)
        if begins != sorted(set(begins)):
            begins = [0] * len(begins)  # all of them are one part
        for number, (begin, group) in enumerate(zip([0, *begins[1:]], groups, strict=bool(groups))):
            yield begin, group.num_rows, functools.partial(_row_group, file, number)


def _row_group(file: Any, number: int, columns: Sequence[str]) -> Any:
    names = [name for name in file.schema_arrow.names if name in columns]
    return file.read_row_group(number, columns=names)


def _arrow_groups(path: Path) -> _Groups:
    """The record batches of an Arrow file, of the file or the stream format."""
    import pyarrow

    def wanted(batch: Any, columns: Sequence[str]) -> Any:
        return pyarrow.Table.from_batches([batch]).select([n for n in batch.schema.names if n in columns])

    with path.open("rb") as file:
        is_file = file.read(6) == b"ARROW1"
        batches = _listed_batches(path) if is_file else _streamed_batches(file)
        for begin, batch in batches:
            yield begin, batch.num_rows, functools.partial(wanted, batch)


def _streamed_batches(file: IO[bytes]) -> Iterator[tuple[int, Any]]:
    """The record batches of streams that follow each other, each with its first byte."""
    from pyarrow import ipc

    end = file.seek(0, io.SEEK_END)
    begin = file.seek(0)
    while begin < end:
        first, begins = begin, []
        for message in ipc.MessageReader.open_stream(file):
            begins += [begin] if message.type == "record batch" else []
            begin = file.tell()
        begin = file.tell()
        file.seek(first)
        yield from zip(begins, list(ipc.open_stream(file)), strict=True)
        file.seek(begin)


def _listed_batches(path: Path) -> Iterator[tuple[int, Any]]:
    """The record batches of the file format, each with the first byte that pyarrow reads for it."""
    import pyarrow
    from pyarrow import ipc

    noting = _NotingFile(path)
    reader = ipc.open_file(pyarrow.PythonFile(noting))
    for number in range(reader.num_record_batches):
        reader.get_batch(number)  # and the dictionaries before it
        noting.places.clear()
        batch = reader.get_batch(number)
        yield min(noting.places), batch


class _NotingFile(io.FileIO):
    """A file that notes where it is read: pyarrow does not tell where a record batch begins."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.places: list[int] = []

    def read(self, size: int | None = -1, /) -> bytes:
        self.places.append(self.tell())
        return super().read(-1 if size is None else size)


def _cell_at(rows: Any, number: int, path: Sequence[str], *, is_text: bool) -> Any:  # noqa: ARG001
    """A value of a row, however deep in its structs; null where what it stands in is null.

    The error where it cannot be given.
    """
    names = [name] if (name := ".".join(path)) in rows.column_names else path
    if names[0] not in rows.column_names:
        return _MISSING
    scalar = rows.column(names[0])[number]
    for name in names[1:]:
        if not scalar.is_valid:
            return None
        try:
            scalar = scalar[name]
        except (KeyError, TypeError, IndexError):
            return _MISSING
    try:
        return _value_of_scalar(scalar)
    except (UnicodeDecodeError, _BadError) as error:
        return error


def _value_of_scalar(scalar: Any) -> Any:
    """A scalar of pyarrow as JSON has it, by the table of docs/format.md.

    Raises _BadError, or UnicodeDecodeError.
    """
    import pyarrow
    from pyarrow import types

    kind = scalar.type
    if not scalar.is_valid:
        return None
    if isinstance(kind, pyarrow.BaseExtensionType):
        if kind.extension_name == "arrow.uuid":
            return str(scalar.as_py())
        value = _value_of_scalar(scalar.value)
        if kind.extension_name == "arrow.json":
            return _unpacked(value)
        return bool(value) if kind.extension_name == "arrow.bool8" else value
    if types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return _value_of_scalar(scalar.value if types.is_dictionary(kind) else scalar.as_py())
    if hasattr(scalar, "as_buffer"):  # strings and bytes
        return scalar.as_buffer().to_pybytes().decode()
    if types.is_map(kind):
        return [[_value_of_scalar(pair[0]), _value_of_scalar(pair[1])] for pair in scalar.values]
    if types.is_struct(kind):
        names = [kind.field(number).name for number in range(kind.num_fields)]
        if len({*names}) < len(names):
            raise _BadError("wrong_type")
        return {name: _value_of_scalar(scalar[number]) for number, name in enumerate(names)}
    if hasattr(scalar, "values"):  # lists
        return [_value_of_scalar(item) for item in scalar.values]
    if types.is_interval(kind):
        return [*scalar.as_py()]
    if types.is_duration(kind):
        parts = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}[kind.unit]
        seconds, rest = divmod(abs(scalar.value), parts)
        sign = "-" if scalar.value < 0 else ""
        return f"{sign}PT{seconds}{_fraction(str(parts + rest)[1:])}S"
    if types.is_temporal(kind):
        zone = types.is_timestamp(kind) and kind.tz is not None
        text = str(scalar.cast(pyarrow.timestamp(kind.unit) if zone else kind).cast(pyarrow.string()))
        whole, _, digits = text.partition(".")
        if not re.match(r"\d\d:" if types.is_time(kind) else r"(?!0000)\d{4}-", whole):
            raise _BadError("wrong_type")
        return whole.replace(" ", "T") + _fraction(digits) + ("+00:00" if zone else "")
    if types.is_decimal(kind):
        return format(scalar.as_py(), "f")
    return float(scalar.as_py()) if types.is_float16(kind) else scalar.as_py()


def _fraction(digits: str) -> str:
    """A fraction of a second, as docs/format.md writes it."""
    digits = digits.ljust(9, "0")
    if digits == "0" * 9:
        return ""
    return "." + digits.removesuffix("000")


def _if_json(value: Any) -> Any:
    """What a string says as JSON, if it is; any other value as it is."""
    try:
        return _unpacked(value) if isinstance(value, str) else value
    except (_BadError, UnicodeError):
        return value


def _unpacked(value: str) -> Any:
    """What a string says as JSON. Raises _BadError."""
    found = {"value": None, **_parsed(f'{{"value":{value}}}'.encode())}["value"]
    try:
        return json.loads(json.dumps(found, default=_once))
    except TypeError:
        raise _BadError("bad_json") from None


_READERS: dict[str, Callable[[ByteRange, int | None, PlanOptions], _Records]] = {
    ".txt": _in_text,
    ".jsonl": _in_json,
    ".json": _in_json,
    ".parquet": functools.partial(_in_rows, _parquet_groups),
    ".arrow": functools.partial(_in_rows, _arrow_groups),
}


class _Fields:
    """The fields of the text, the id and the source, and those to keep."""

    def __init__(self, options: PlanOptions) -> None:
        self._literals, names = ["", ""], [options.messages_field or options.text_field]
        if options.text_template:
            letters = {"n": "\n", "t": "\t", "r": "\r"}
            unescaped = re.sub(r"\\([ntr\\])", lambda m: letters.get(m[1], m[1]), options.text_template)
            self._literals, names = [""], []
            for literal, name, _, _ in string.Formatter().parse(unescaped):
                self._literals[-1] += literal
                if name is not None:
                    names.append(name)
                    self._literals.append("")
        self._is_chat = options.is_chat
        self._text = [name.split(".") for name in names]
        self._id, self._source = (
            name.split(".") if name else [] for name in (options.id_field, options.source_field)
        )
        paths = [path for path in (*self._text, self._id, self._source) if path]
        self.columns = [name for path in paths for name in (path[0], ".".join(path))]

    def read(self, value_of: Callable[..., Any]) -> _Read:
        """What a record gives, whose values ``value_of`` tells by their paths.

        Raises _BadError, or UnicodeDecodeError of the text.
        """
        values = [value_of(path, is_text=True) for path in self._text]
        text = self._literals[0]
        for value, literal in zip(map(self._text_of, values), self._literals[1:], strict=True):
            text += value + literal
        most_bytes = _MOST_CHAT_BYTES if self._is_chat else _MOST_HELD_BYTES
        if len(text) > most_bytes or len(text.encode()) > _MOST_HELD_BYTES:
            raise _BadError("too_long")
        text = "" if text.isspace() else text
        return text, _name(self._id, value_of), _name(self._source, value_of)

    def _text_of(self, value: Any) -> str:
        if isinstance(value, Exception):
            raise value
        if value is _MISSING or value is None:
            raise _BadError("null_field" if value is None else "no_field")
        if not self._is_chat:
            if not isinstance(value, str):
                raise _BadError("wrong_type")
            return value
        value = _if_json(value)
        if isinstance(value, list):
            value = [_if_json(message) for message in value]
        try:
            text = json.dumps(
                value, ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=_once
            )
        except (TypeError, ValueError):
            raise _BadError("wrong_type") from None
        if not isinstance(value, list):
            raise _BadError("wrong_type")
        return text


def _name(path: Sequence[str], value_of: Callable[..., Any]) -> str:
    """An id or a source: a string as it is, another value as JSON, nothing where there is none."""
    value = value_of(path, is_text=False) if path else None
    if value is _MISSING or value is None or isinstance(value, Exception):
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=_last)
