"""JSON lines, plain or compressed: a line is an object, and a field, or a template of fields, is the text.

A block of whole lines is parsed by orjson. Only where a line of it fails is each looked at by itself, and a
bad one left out with a reason. Lines end at ``\\n`` alone, and JSON is UTF-8.
"""

from __future__ import annotations

import contextlib
import functools
import json
import operator
import re
import struct
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from preprocess.read.documents import BETWEEN, Inspected, OpenInput, RangeReader, Records, Texts, texts_of
from preprocess.read.lines import LineEnds, LineFormat, Numbers
from preprocess.read.text_fields import (
    MAX_JSON_DEPTH,
    MOST_DOCUMENT_BYTES,
    FieldPath,
    MessageFields,
    RecordFields,
    TextFields,
    UnusableText,
    value_at,
)
from shardprep.console import quoted
from shardprep.errors import BadInput
from shardprep.format.plan import PlanOptions

# A string that does not end goes up to the end: from each of its quotes another one would begin else.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)

_HEAD_BYTES = 4 << 10
_MARK = b"\xef\xbb\xbf"
_BLANK = b" \t\r\n"


class JsonLines(LineFormat):
    """``.jsonl``."""

    line_ends = LineEnds(with_cr=False)

    def read(self, reader: RangeReader, fields: TextFields, batch_bytes: int) -> Iterator[Records]:
        pieces = self.text_of_part(reader, fields.options, batch_bytes)
        read_lines = functools.partial(_texts_of, fields)
        yield from self.records_of(reader.part, pieces, batch_bytes, read_lines)


class JsonFile(JsonLines):
    """``.json``, which has often one list in it."""

    def inspect(self, file: OpenInput, options: PlanOptions) -> Inspected:
        if self.compression is None:
            self.check_beginning(file, file.read(0, min(file.stamp.num_bytes, _HEAD_BYTES)))
        return super().inspect(file, options)

    def check_beginning(self, file: OpenInput, text: bytes) -> None:
        if text.removeprefix(_MARK).lstrip(_BLANK).startswith(b"["):
            target = quoted(str(file.path).rpartition(".json")[0])
            remedy = f"jq -c '.[]' {quoted(file.path)} > {target}.jsonl"
            expected = "an object in each line; convert it, unpacked if need be, and move it away"
            raise BadInput(path=file.path, found="one list of JSON", expected=expected, remedy=remedy)


def _texts_of(
    fields: TextFields, block: bytes, starts: Numbers, at: int
) -> tuple[Texts | Sequence[bytes | UnusableText], dict[str, list[Any]]]:
    """Return what whole lines hold, the first of which begins at byte ``at``; "" for a blank line."""
    if at == 0 and block.startswith(_MARK):
        block, starts = block[len(_MARK) :], np.maximum(starts - len(_MARK), 0)
    if (found := _joined_texts(block, starts, fields)) is not None:
        return found, {}
    lines = block.split(b"\n")
    del lines[len(starts) :]
    may_be_deep = int(np.diff(starts, append=len(block)).max(initial=0)) > 2 * MAX_JSON_DEPTH
    if not (may_be_deep and any(map(is_too_deep, lines))) and _names_each_once(block, len(lines), fields):
        # Most often: all lines are objects with the field, and nothing in them needs a second look.
        with contextlib.suppress(ValueError, KeyError, TypeError):
            records, name = list(map(orjson.loads, lines)), fields.plain_name
            texts = [record[name] for record in records] if name else list(map(fields.text, records))
            others = _others(records, fields)
            if {str}.issuperset(map(type, texts)) and all(map(_are_exact, others.values())):
                return texts_of(texts), fields.columns(others)
    pairs = [_record_of(line, fields) for line in lines]
    records = [record for record, _ in pairs]
    columns = fields.columns(_others(records, fields))
    if isinstance(fields, RecordFields):
        columns = {**columns, "record": records}
    return texts_of([text for _, text in pairs]), columns


@functools.cache
def _decoder(name: str) -> Any:
    """Return what decodes lines of objects: of each the value of one field, as it stands there."""
    fields = [("text", msgspec.Raw, msgspec.field(name=name))]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False))


_TEXT = operator.attrgetter("text")
_BETWEEN_QUOTES = BETWEEN[1:-1]
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
# The first byte of each white space, and so of characters that are none.
_MAY_BE_SPACE = np.isin(np.arange(256), [*range(9, 14), *range(28, 33), 0xC2, 0xE1, 0xE2, 0xE3])


def _joined_texts(block: bytes, starts: Numbers, fields: TextFields) -> Texts | None:
    """Return the texts of a block if each line is an object with one string of the field, none of them blank.

    None where that is not sure at a glance. msgspec finds the strings, four times as fast as objects are
    made. It takes for right what orjson refuses, and is looked at here: bytes that are no UTF-8, infinite
    numbers, several objects in a line, one in several lines, and a field that an object names twice.
    """
    if fields.plain_name is None or fields.other_paths:
        return None
    if not block.startswith(b"{") or not block.endswith((b"}", b"}\n")):
        return None
    letters = np.frombuffer(block, np.uint8)
    if (letters[starts] != ord("{")).any() or (letters[starts[1:] - 2] != ord("}")).any():
        return None
    escapes = np.flatnonzero(letters == ord("\\"))
    may_spell = bool((letters[escapes + 1] == ord("u")).any())
    is_opened = letters | 0x20 == ord("{")  # [ and { differ by this bit; each line is an object
    may_be_deep = np.count_nonzero(is_opened) - len(starts) >= MAX_JSON_DEPTH
    if may_be_deep and np.add.reduceat(is_opened, starts, dtype=np.int64).max() > MAX_JSON_DEPTH:
        return None
    if not _names_each_once(block, len(starts), fields, may_spell=may_spell):
        return None
    try:
        characters = block.decode()
        strings = list(map(_TEXT, _decoder(fields.plain_name).decode_lines(block)))
        if len(strings) != len(starts):
            return None
        for number in _lines_at(_perhaps_infinite(letters), starts):
            orjson.loads(block[starts[number] : block.find(b"}\n", starts[number]) + 1 or len(block)])
        # A string without escapes is its own text.
        escaped = _lines_at(escapes, starts)
        if 4 * len(escaped) > len(strings):
            joined = _unescaped(strings)
        else:
            if escaped:
                texts = _unescaped([strings[number] for number in escaped]).split(_BETWEEN_QUOTES)
                for number, text in zip(escaped, texts, strict=True):
                    strings[number] = text
            joined = _BETWEEN_QUOTES.join(strings)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError, ValueError, TypeError):
        return None
    letters = np.frombuffer(joined, np.uint8)
    # No text has the first byte of what stands between them.
    bounds = np.flatnonzero(letters == 0)
    begins, ends = np.append(0, bounds + len(_BETWEEN_QUOTES)), np.append(bounds - 1, len(joined) - 1)
    if len(begins) != len(strings) or (letters[np.append(begins, ends)] != ord('"')).any():
        return None
    may_be_blank = np.flatnonzero(_MAY_BE_SPACE[letters[begins + 1]] | (begins + 1 == ends))
    for begin, end in zip(begins[may_be_blank].tolist(), ends[may_be_blank].tolist(), strict=True):
        if not joined[begin + 1 : end].decode().strip():
            return None
    if len(joined) > MOST_DOCUMENT_BYTES:
        return None
    joined = joined[1:-1]
    return Texts(joined=joined, num_texts=len(strings), characters=None if may_spell else characters)


def _unescaped(strings: list[bytes]) -> bytes:
    """Return what strings of JSON say, in quotes, joined. Raises TypeError where one is no string."""
    return f'"{BETWEEN.decode().join(orjson.loads(b"[%b]" % b",".join(strings)))}"'.encode()


def _lines_at(places: Numbers, starts: Numbers) -> list[int]:
    """Return the numbers of the lines that have some places, each once."""
    num_places = np.bincount(np.searchsorted(starts, places, side="right") - 1)
    numbers: list[int] = np.flatnonzero(num_places).tolist()  # np.unique would import numpy.ma, 10 ms
    return numbers


def _perhaps_infinite(letters: npt.NDArray[np.uint8]) -> Numbers:
    """Return places in numbers that may be infinite: of an exponent of 3 digits, or of some 200 digits."""
    is_digit = letters - ord("0") < 10
    is_exponent = letters | 0x20 == ord("e")
    is_exponent[1:] &= is_digit[:-1]
    is_exponent[:-2] &= is_digit[2:]
    is_exponent[:-3] &= is_digit[3:]
    places = np.flatnonzero(is_exponent)
    samples = is_digit[::64]  # three of them in a row
    return np.concatenate([places, 64 * np.flatnonzero(samples[:-2] & samples[1:-1] & samples[2:])])


def _others(records: list[Any], fields: TextFields) -> dict[FieldPath, list[Any]]:
    """Return the values of ``other_paths``."""
    return {path: [value_at(record, path) for record in records] for path in fields.other_paths}


def _are_exact(values: Sequence[Any]) -> bool:
    """Return whether orjson's values are the file's: of an integer beyond 64 bits it makes a float."""
    kinds = set(map(type, values))
    if float in kinds and any(abs(value) >= 2**63 for value in values if type(value) is float):
        return False
    return kinds.isdisjoint((list, dict))


def _names_each_once(
    block: bytes, num_lines: int, fields: TextFields, *, may_spell: bool | None = None
) -> bool:
    """Whether each line that has all fields of the text names each of them once.

    Each such line has a key for each name. So there is no other where a block has as many keys as lines.
    """
    if isinstance(fields, (MessageFields, RecordFields)):
        return False  # each line is looked at: what follows takes 20 times as long
    name = fields.plain_name
    # Without escapes a key is spelled in one way. Counting that takes a fifth of the search for all ways.
    may_spell = b"\\u" in block if may_spell is None else may_spell
    if name and name.isidentifier() and not may_spell:
        key = b'"%b"' % name.encode()
        if _num_beginning(block, key) == num_lines or block.count(key) == num_lines:
            return True
    objects = {path[:end] for path in fields.text_paths for end in range(1, len(path) + 1)}
    times_of = Counter(path[-1] for path in objects)
    return all(len(_keys(name).findall(block)) == times * num_lines for name, times in times_of.items())


def _num_beginning(block: bytes, word: bytes) -> int:
    """Count where the first four bytes of a word stand in a block, in a third of bytes.count's time."""
    if len(word) < 4:
        return block.count(word)
    shifted = (np.frombuffer(block, "<u4", (len(block) - k) // 4, k) for k in range(min(4, len(block))))
    return sum(int(np.count_nonzero(units == int.from_bytes(word[:4], "little"))) for units in shifted)


_SHORT_ESCAPES = dict(zip('"\\/\b\f\n\r\t', (b'"', b"\\", b"/", b"b", b"f", b"n", b"r", b"t"), strict=True))


@functools.lru_cache(maxsize=256)
def _keys(name: str) -> re.Pattern[bytes]:
    """Find each key of this name with its colon, however JSON spells it; and few strings that look so."""
    pattern = b""
    for character in name:  # as it is, and its escapes
        units = struct.iter_unpack(">H", character.encode("utf-16-be", "surrogatepass"))
        found = [b"".join(rb"\\u(?i:%04x)" % number for (number,) in units)]
        if character in _SHORT_ESCAPES:
            found.append(rb"\\" + re.escape(_SHORT_ESCAPES[character]))
        if character not in '"\\':
            found.append(re.escape(character.encode("utf-8", "surrogatepass")))
        pattern += b"(?:%b)" % b"|".join(found)
    # The group is empty: so findall makes no object for each key.
    return re.compile(b'"%b"(?::|[ \\t\\r]+:)()' % pattern)


def _record_of(line: bytes, fields: TextFields) -> tuple[Any, str | UnusableText]:
    """Return the object of a line, and its text; whatever other lines there are.

    Of a key of the text that stands twice the line is bad; of any other one the last value counts.
    """
    if not line.strip(_BLANK):
        return None, ""
    try:
        record = orjson.loads(line)
    except ValueError:
        return None, why_not_json(line)
    if is_too_deep(line):
        return None, _TOO_DEEP
    if isinstance(fields, RecordFields):
        is_exact = _LONG_NUMBER.search(line) is None
    else:
        others = [value_at(record, path) for path in fields.other_paths]
        is_exact = _names_each_once(line, 1, fields) and _are_exact(others)
    if not is_exact:
        try:
            record = json.loads(line, object_pairs_hook=_Object)
        except ValueError:  # a number of more digits than Python reads
            return None, _TOO_DEEP
        if twice := next(_named_twice(record, fields), None):
            return record, UnusableText("bad_json", f"the key {twice} stands twice in one object")
    text = fields.text(record)
    if isinstance(fields, RecordFields) and isinstance(text, str):
        text = line.decode()  # of a record that is given whole
    return record, text


class _Object(dict[str, Any]):
    """An object of JSON that remembers which keys stand in it twice."""

    def __init__(self, pairs: list[tuple[str, Any]]) -> None:
        super().__init__(pairs)
        self.twice: list[str] = []
        if len(self) < len(pairs):
            self.twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]


def _named_twice(record: Any, fields: TextFields) -> Iterator[str]:
    """Return the names of the text's fields that stand twice in their object; of messages, of all in them."""
    for path in fields.text_paths:
        inner = record
        for name in path:
            if not isinstance(inner, _Object):
                break
            if name in inner.twice:
                yield name
            inner = inner.get(name)
        if isinstance(fields, MessageFields):
            yield from _all_twice(inner)


def _all_twice(value: Any) -> Iterator[str]:
    if isinstance(value, _Object):
        yield from value.twice
    if isinstance(value, (dict, list)):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _all_twice(item)


def why_not_json(line: bytes) -> UnusableText:
    """Return why a line is not JSON, in words that no version of a library changes; bytes are of the line."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return UnusableText("undecodable", f"byte {error.start} of the line is not utf-8")
    if is_too_deep(line):
        return _TOO_DEEP
    try:
        json.loads(text)
    except json.JSONDecodeError as error:
        at = len(text[: error.pos].encode())
        what = "ends in the middle" if not text[error.pos :].strip() else f"is not JSON from byte {at} on"
        return UnusableText("bad_json", f"the line {what}")
    except ValueError:
        return _TOO_DEEP
    if half := re.search(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", text):
        return UnusableText("surrogate", f"it has half of a surrogate pair, {half[0]} or another")
    return UnusableText("bad_json", "the line has NaN, Infinity or a number beyond 1.8e308")


_TOO_DEEP = UnusableText(
    "bad_json", f"it is nested too deep, more than {MAX_JSON_DEPTH} levels, or has too long a number"
)


def is_too_deep(raw: bytes | bytearray) -> bool:
    """Return whether JSON has objects and lists within each other more than MAX_JSON_DEPTH deep.

    Costs 0.2 us for a line that has no more brackets than that, else 0.2 us for each bracket and string.
    """
    if len(raw) <= 2 * MAX_JSON_DEPTH or raw.count(b"[") + raw.count(b"{") <= MAX_JSON_DEPTH:
        return False
    depth = 0
    for found in _STRING_OR_BRACKET.finditer(raw):
        first = raw[found.start()]
        if first in b"[{":
            depth += 1
            if depth > MAX_JSON_DEPTH:
                return True
        elif first in b"]}":
            depth -= 1
    return False
