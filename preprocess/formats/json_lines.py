"""JSON lines, plain or compressed: a line is an object, and a field, or a template of fields, is the text.

A block of whole lines is parsed by orjson. Only where a line of it fails is each looked at by itself, and a
bad one left out with a reason. Lines end at ``\\n`` alone, and JSON is UTF-8.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import orjson

from preprocess.formats.compression import (
    Compression,
    TextPiece,
    frame_starts,
    has_frames,
    text_bytes_about,
    text_of_part,
)
from preprocess.formats.format import (
    SHORT_LINE_BYTES,
    DocumentBatch,
    Inspected,
    Reading,
    RecordBlock,
    Start,
    batches_of,
    no_documents,
    one_left_out,
    too_long,
)
from preprocess.formats.line_ends import first_line_start, first_newline, last_newline
from preprocess.formats.line_streams import LineBlock, line_blocks_of, plain_pieces
from preprocess.formats.text_lines import whole_file_starts
from preprocess.inputs import OpenInput, Place, RangeReader
from preprocess.long_documents import LongDocument
from preprocess.text_fields import TextFields, UnusableText
from shardprep.errors import BadInput

_HEAD_BYTES = 4 << 10
_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


@dataclass(frozen=True, kw_only=True)
class JsonLines:
    """``.jsonl``, ``.ndjson``, and ``.json`` that holds lines; plain or compressed."""

    compression: Compression | None
    may_be_a_list: bool = False  # .json has often one list in it

    @property
    def is_in_bytes(self) -> bool:
        """See Format."""
        return self.compression is None

    def inspect(self, file: OpenInput, reading: Reading) -> Inspected:  # noqa: ARG002
        """See Format. Raises BadInput for one list of JSON."""
        if self.compression is None and not self.may_be_a_list:
            return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)
        if self.compression is None:
            num_bytes, head = file.stamp.num_bytes, file.read(0, min(file.stamp.num_bytes, _HEAD_BYTES))
        else:
            num_bytes, head = text_bytes_about(file, self.compression)
        if self.may_be_a_list and head.removeprefix(_MARK).lstrip(_BLANK).startswith(b"["):
            raise BadInput(_ONE_LIST.format(path=file.path, stem=_stem(file)))
        is_whole = self.compression is not None and not has_frames(file, self.compression)
        return Inspected(text_bytes=num_bytes, is_whole=is_whole)

    def starts(
        self,
        file: OpenInput,
        stretches: Sequence[tuple[int, int]],
        reading: Reading,  # noqa: ARG002
    ) -> list[Start | None]:
        """See Format."""
        if self.compression is None:
            file.expect_scattered_reads()
            found = (first_line_start(file, byte, end, first_newline) for byte, end in stretches)
            return [None if byte is None else Start(byte) for byte in found]
        if has_frames(file, self.compression):
            return frame_starts(file, self.compression, stretches)
        return whole_file_starts(file, stretches)

    def read(
        self, reader: RangeReader, reading: Reading, line: int
    ) -> Iterator[DocumentBatch | LongDocument]:
        """See Format."""
        part = reader.part
        place = Place(
            file=reader.file,
            input_number=part.input_number,
            start=part.text_start,
            end=part.text_start,
            line=line,
            num_bytes=part.end - part.start,
        )
        for start, pieces in self._text(reader, reading):
            for block in line_blocks_of(pieces, start, last_newline):
                place = dataclasses.replace(
                    place, start=block.start, end=block.start + block.size, num_bytes=block.num_bytes
                )
                for item in _block_documents(block, place, reading):
                    yield item
                    place = dataclasses.replace(place, line=place.line + item.num_lines)
            return
        yield no_documents(place)

    def _text(self, reader: RangeReader, reading: Reading) -> Iterator[tuple[int, Iterator[TextPiece]]]:
        if self.compression is None:
            yield reader.part.start, plain_pieces(reader, reading.batch_bytes)
        else:
            yield from text_of_part(reader, self.compression, reading.batch_bytes, first_newline)


_ONE_LIST = (
    "input {path} is one list of JSON, which cannot be cut; expected an object in each line; convert it: "
    "jq -c '.[]' {path} > {stem}.jsonl (unpack a compressed one first), and move {path} away"
)


def _stem(file: OpenInput) -> str:
    return str(file.path).rpartition(".json")[0]


def _block_documents(
    block: LineBlock, place: Place, reading: Reading
) -> Iterator[DocumentBatch | LongDocument]:
    """The documents of a block of lines that lies at ``place``."""
    if block.data is None:
        yield one_left_out(place, *too_long("the line"))
        return
    if not block.data:
        yield no_documents(place)
        return
    lines = block.data.split(b"\n")
    if not lines[-1]:
        del lines[-1]
    sizes = np.fromiter(map(len, lines), np.int64, len(lines)) + 1
    if not block.data.endswith(b"\n"):
        sizes[-1] -= 1
    starts = np.cumsum(sizes) - sizes
    if place.start == 0:
        lines[0] = lines[0].removeprefix(_MARK)
    most = max(1, reading.batch_bytes // SHORT_LINE_BYTES)
    num_left, line = place.num_bytes, place.line
    for first in range(0, len(lines), most):
        part = slice(first, first + most)
        data = block.data if len(lines) <= most else b"\n".join(lines[part])
        is_unsure = _may_name_twice(data, len(lines[part]), reading.fields)
        texts, ids, sources = _records(lines[part], reading.fields, one_by_one=is_unsure)
        records = RecordBlock(
            texts=texts,
            starts=starts[part] + place.start,
            sizes=sizes[part],
            num_bytes=num_left,
            ids=ids,
            sources=sources,
        )
        num_left = 0
        yield from batches_of(records, dataclasses.replace(place, line=line))
        line += len(texts)


Columns = tuple[Sequence["str | UnusableText"], "list[str] | None", "list[str] | None"]


def _records(lines: list[bytes], fields: TextFields, *, one_by_one: bool) -> Columns:
    """Texts, ids and sources of lines; "" for a blank line."""
    records: list[Any] = []
    texts: Sequence[str | UnusableText] | None = None
    loads, name = orjson.loads, fields.plain_name
    if name is not None and not one_by_one and not (fields.id_path or fields.source_path):
        # No object lives on: thousands of them at once would start the garbage collector.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            found = [loads(line)[name] for line in lines]
            if {str}.issuperset(map(type, found)):
                return found, None, None
    if not one_by_one:
        with contextlib.suppress(ValueError, KeyError, TypeError):
            records = list(map(orjson.loads, lines))
            texts = _texts(records, fields)
    if texts is None:
        records, texts = _records_one_by_one(lines, fields)
    ids = list(map(fields.id, records)) if fields.id_path else None
    sources = list(map(fields.source, records)) if fields.source_path else None
    return texts, ids, sources


def _texts(records: list[Any], fields: TextFields) -> Sequence[str | UnusableText] | None:
    """The texts of parsed lines; None, KeyError or TypeError where some line needs a look of its own."""
    if fields.plain_name is None:
        return list(map(fields.text, records))
    name = fields.plain_name
    texts = [record[name] for record in records]
    return texts if {str}.issuperset(map(type, texts)) else None


def _may_name_twice(block: bytes, num_lines: int, fields: TextFields) -> bool:
    """Whether some line could name a field of the text twice; most blocks say no at once."""
    for path in fields.text_paths:
        key = _key(path[-1])
        if block.count(key + b":") + block.count(key + b" :") > num_lines:
            return True
    return False


def _key(name: str) -> bytes:
    return orjson.dumps(name)


def _records_one_by_one(
    lines: list[bytes], fields: TextFields
) -> tuple[list[Any], Sequence[str | UnusableText]]:
    records: list[Any] = []
    texts: list[str | UnusableText] = []
    for line in lines:
        record: Any = None
        if not line.strip(_BLANK):
            text: str | UnusableText = ""
        else:
            try:
                record = orjson.loads(line)
            except ValueError:
                text = why_not_json(line)
            else:
                text = _named_twice(line, fields) or fields.text(record)
        records.append(record)
        texts.append(text)
    return records, texts


class _Pairs(dict[str, Any]):
    """An object of JSON that remembers a key that stands in it twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.names = [name for name, _ in pairs]


def _named_twice(line: bytes, fields: TextFields) -> UnusableText | None:
    """Why a line has no text that is sure: it names a field of it twice."""
    if not any(line.count(_key(path[-1])) > 1 for path in fields.text_paths):
        return None
    try:
        whole = json.loads(line, object_pairs_hook=_Pairs)
    except (ValueError, RecursionError):
        return None
    for path in fields.text_paths:
        inner = whole
        for name in path:
            if not isinstance(inner, _Pairs):
                break
            if inner.names.count(name) > 1:
                return UnusableText("bad_json", f"the key {name} stands twice in one object")
            inner = inner.get(name)
    return None


def why_not_json(line: bytes) -> UnusableText:
    """Why a line is not JSON, in words that no version of a library changes; bytes count within the line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the line is not utf-8")
    try:
        json.loads(text, parse_constant=_refuse)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        what = "ends in the middle" if not text[error.pos :].strip() else f"is not JSON from byte {at} on"
        return UnusableText("bad_json", f"the line {what}")
    except _NoNumberError as error:
        return UnusableText("bad_json", f"{error} is no number of JSON")
    except (ValueError, RecursionError):
        return UnusableText("bad_json", "it is nested too deep, or has too long a number")
    if half := re.search(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", text):
        return UnusableText("surrogate", f"it has half of a surrogate pair, {half[0]} or another")
    return UnusableText("bad_json", "the line is not strict JSON")


class _NoNumberError(Exception):
    """NaN, Infinity or -Infinity."""


def _refuse(name: str) -> NoReturn:
    raise _NoNumberError(name)
