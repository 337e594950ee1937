"""Take texts out of lines of JSON: by a scan of their bytes, or by parsing them, or one by one."""

from __future__ import annotations

import contextlib
import functools
import itertools
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

from preprocess.read import formats, text_fields
from preprocess.read.encodings import UTF_8, UTF_8_WITH_MARK
from preprocess.read.formats import Numbers, Texts
from preprocess.read.lines import BOM, LineFormat, LineTexts
from preprocess.read.text_fields import MOST_DOCUMENT_BYTES, FieldPath, JsonValue, TextFields, UnusableText

# Strings, and other text without brackets. A string that is not closed extends to the end of the line:
# otherwise each later quote would begin a string of its own.
_NO_BRACKETS = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[^"\[\]{}]+', re.DOTALL)
_BLANK = b" \t\r\n"


class JsonLines(LineFormat):
    """``.jsonl``, ``.json``: a document is the text of one object a line.

    A block of lines is read by the first way that works:

    1. ``_scanned_texts`` finds one field in all lines, without making Python objects of their other fields.
    2. orjson parses all lines. This also works for templates, and for fields beside the text.
    3. ``record_of_line`` checks each line by itself. Only this one leaves out lines, each with a reason.

    All give the same texts. In case of doubt, the faster ways give up on a block, which only costs time.
    """

    def texts_of_lines(
        self, fields: TextFields, lines: bytes, starts: Numbers, at: int, codec: str
    ) -> LineTexts:
        """Return the text of each line, "" for a blank one."""
        if codec not in (UTF_8, UTF_8_WITH_MARK):
            return self._of_another_encoding(fields, lines, starts, at, codec)
        if at == 0 and lines.startswith(BOM):
            lines = lines[len(BOM) :]
            starts = np.maximum(starts - len(BOM), 0)
        for number, single in enumerate(fields.in_turn()):
            # A field counts only for lines that have none of those before it.
            if not _may_name_any(lines, fields.text_paths[:number]):
                scanned = _scanned_texts(lines, starts, single)
                if scanned is not None:
                    return scanned, fields.columns_of_single(single, len(starts))
        each = lines.split(b"\n")[: len(starts)]
        if not any(map(is_too_deep, each)) and _names_each_once(lines, len(each), fields, b"\\u" in lines):
            with contextlib.suppress(ValueError, KeyError, TypeError):
                records = list(map(orjson.loads, each))
                name = fields.plain_name
                texts = [record[name] for record in records] if name else list(map(fields.text, records))
                others = _side_values(records, fields)
                # If all texts are strings, no line is left out.
                if {str}.issuperset(map(type, texts)) and all(map(_are_exact, others.values())):
                    return formats.texts_of(texts), fields.columns(others)
        pairs = [record_of_line(line, fields) for line in each]
        records = [record for record, _ in pairs]
        columns = fields.columns(_side_values(records, fields))
        if fields.takes_records:
            columns["record"] = records
        return formats.texts_of([text for _, text in pairs]), columns

    def _of_another_encoding(
        self, fields: TextFields, lines: bytes, starts: Numbers, at: int, codec: str
    ) -> LineTexts:
        """Return the same for lines that are not UTF-8. A line that cannot be decoded is left out."""
        unusable: dict[int, UnusableText] = {}
        try:
            decoded = lines.decode(codec).encode()
        except UnicodeDecodeError:
            each = lines.split(b"\n")
            for number, line in enumerate(each):
                try:
                    each[number] = line.decode(codec).encode()
                except UnicodeDecodeError as error:
                    place = at + int(starts[number]) + error.start
                    unusable[number] = UnusableText(
                        "undecodable", f"byte {place} is not {codec}: {error.reason}"
                    )
                    each[number] = b""
            decoded = b"\n".join(each)
        texts, columns = self.texts_of_lines(fields, decoded, self.line_starts(decoded), -1, UTF_8)
        if unusable:
            texts = [unusable.get(number, text) for number, text in enumerate(texts)]
        return texts, columns


@functools.cache
def _decoder(name: str) -> Any:
    """Return a decoder of lines of objects, which takes one field of each as the bytes of its JSON value."""
    fields = [("text", msgspec.Raw, msgspec.field(name=name))]
    return msgspec.json.Decoder(msgspec.defstruct("Line", fields, gc=False))


_TEXT = operator.attrgetter("text")
_BETWEEN_QUOTES = formats.BETWEEN[1:-1]
_LONG_NUMBER = re.compile(rb"[0-9]{19}")
# By byte: whether white space may begin with it. In UTF-8 other characters begin with some of these, too.
_MAY_BE_SPACE = np.isin(np.arange(256), [*range(9, 14), *range(28, 33), 0xC2, 0xE1, 0xE2, 0xE3])


def _scanned_texts(block: bytes, starts: Numbers, fields: TextFields) -> Texts | None:
    r"""Return the texts of a block of lines by a scan of its bytes, or None if it needs a closer look.

    This is the fast path. Each line must be an object with the field once, as a string that is not blank.
    From ``{"n": 1, "text": "a"}`` and ``{"text": "b\"c"}`` msgspec takes the bytes ``"a"`` and ``"b\"c"``.
    Without a backslash they are the text itself in quotes, and have only to be joined.

    msgspec finds the values four times as fast as orjson makes objects, but it accepts lines that orjson
    rejects. So this checks for invalid UTF-8, infinite numbers, several objects in a line, an object over
    several lines, and a field that is named twice.
    """
    if fields.plain_name is None or fields.named:
        return None
    # Each line begins with { and ends with }.
    if not block.startswith(b"{") or not block.endswith((b"}", b"}\n")):
        return None
    octets = np.frombuffer(block, np.uint8)
    if (octets[starts] != ord("{")).any() or (octets[starts[1:] - 2] != ord("}")).any():
        return None
    # Lines with more opening brackets than may be nested. Those in strings count, too.
    is_opening = octets | 0x20 == ord("{")  # [ and { differ by this bit
    openings_of: dict[int, int] = {}
    if np.count_nonzero(is_opening) - len(starts) >= text_fields.MAX_JSON_DEPTH:
        openings = _num_in_lines(np.flatnonzero(is_opening), starts)
        many = np.flatnonzero(openings > text_fields.MAX_JSON_DEPTH)
        openings_of = dict(zip(many.tolist(), openings[many].tolist(), strict=True))
    # No line names the field twice. Such a line is left out, and no parser reports it.
    escapes = np.flatnonzero(octets == ord("\\"))
    has_unicode_escapes = bool((octets[escapes + 1] == ord("u")).any())
    if not _names_each_once(block, len(starts), fields, has_unicode_escapes):
        return None
    try:
        # Equal numbers of values and lines: no line has several objects, no object has several lines.
        characters = block.decode()
        values = list(map(_TEXT, _decoder(fields.plain_name).decode_lines(block)))
        if len(values) != len(starts):
            return None
        # Brackets in the text, such as links in Markdown, are not nested.
        for number, num_openings in openings_of.items():
            if num_openings - _num_openings(values[number]) > text_fields.MAX_JSON_DEPTH:
                return None
        # msgspec accepts infinite numbers in the fields that it skips. orjson raises ValueError. It gets the
        # lines without their texts, which may be long. If the bytes of a text occur before it, what is left
        # is not JSON.
        line_ends = np.append(starts[1:], len(block))
        for number in _lines_at(_places_of_large_numbers(octets), starts):
            before, _, after = block[starts[number] : line_ends[number]].partition(bytes(values[number]))
            orjson.loads(b'%b""%b' % (before, after))
        # Decode the values of lines with a backslash, all in one call.
        escaped = _lines_at(escapes, starts)
        if len(escaped) > len(values) // 2:  # the others do not change by it
            joined = _unescaped(values)
        else:
            if escaped:
                texts = _unescaped([values[number] for number in escaped]).split(_BETWEEN_QUOTES)
                for number, text in zip(escaped, texts, strict=True):
                    values[number] = text
            joined = _BETWEEN_QUOTES.join(values)
    except (UnicodeDecodeError, msgspec.MsgspecError, RecursionError, ValueError, TypeError):
        return None
    # Each value must be in quotes, so that it is a string. The separators are found by their first byte, NUL.
    # A text with a NUL of its own gives one separator too many.
    octets = np.frombuffer(joined, np.uint8)
    separators = np.flatnonzero(octets == 0)
    begins = np.append(0, separators + len(_BETWEEN_QUOTES))  # of each value: its opening and closing quote
    ends = np.append(separators - 1, len(joined) - 1)
    if len(begins) != len(values) or (octets[np.append(begins, ends)] != ord('"')).any():
        return None
    # No text is blank. Only those that are empty, or may begin with white space, are decoded for this.
    may_be_blank = np.flatnonzero(_MAY_BE_SPACE[octets[begins + 1]] | (begins + 1 == ends))
    for begin, end in zip(begins[may_be_blank].tolist(), ends[may_be_blank].tolist(), strict=True):
        if not joined[begin + 1 : end].decode().strip():
            return None
    if len(joined) > MOST_DOCUMENT_BYTES:
        return None  # one of the texts may be too long
    # With the quotes around it, each separator is BETWEEN.
    joined = joined[1:-1]
    return Texts(joined=joined, num_texts=len(values), characters=None if has_unicode_escapes else characters)


def _may_name_any(block: bytes, paths: Sequence[FieldPath]) -> bool:
    """Return whether a line may have one of these fields."""
    if paths and b"\\u" in block:
        return True
    return any(b'"%b"' % path[-1].encode() in block for path in paths)


def _unescaped(strings: list[bytes]) -> bytes:
    """Decode JSON strings. Returns the texts in quotes, joined. Raises TypeError if one is not a string."""
    return f'"{formats.BETWEEN.decode().join(orjson.loads(b"[%b]" % b",".join(strings)))}"'.encode()


def _lines_at(places: Numbers, starts: Numbers) -> list[int]:
    """Return the numbers of the lines that contain some places of the block, which ascend."""
    numbers: list[int] = np.flatnonzero(_num_in_lines(places, starts)).tolist()
    return numbers


def _num_in_lines(places: Numbers, starts: Numbers) -> Numbers:
    """Return int64[num_lines]: how many of some places of the block, which ascend, each line has."""
    num_before = np.searchsorted(places, starts)
    return np.diff(num_before, append=len(places))


def _num_openings(value: bytes) -> int:
    """Return how many opening brackets a JSON string has, or 0 for another value."""
    raw = bytes(value)
    return raw.count(b"[") + raw.count(b"{") if raw.startswith(b'"') else 0


def _places_of_large_numbers(octets: npt.NDArray[np.uint8]) -> Numbers:
    """Return a byte of each number that may be infinite: it has about 200 digits, or an exponent of 3.

    The bytes ascend.
    """
    is_digit = octets - ord("0") < 10
    is_exponent = octets | 0x20 == ord("e")
    is_exponent[1:] &= is_digit[:-1]
    is_exponent[:-2] &= is_digit[2:]
    is_exponent[:-3] &= is_digit[3:]
    places = np.flatnonzero(is_exponent)
    samples = is_digit[::64]  # an infinite number has over 300 digits, so at least three samples in a row
    long = 64 * np.flatnonzero(samples[:-2] & samples[1:-1] & samples[2:])
    return np.sort(np.concatenate([places, long]))


def _side_values(records: list[JsonValue], fields: TextFields) -> dict[FieldPath, list[JsonValue]]:
    """Return the values that the columns beside the text need, for each path one per record."""
    paths = fields.paths_of_columns
    return {path: [text_fields.value_at(record, path) for record in records] for path in paths}


def _are_exact(values: Sequence[JsonValue]) -> bool:
    """Return whether orjson kept the values as they are: it turns integers beyond 64 bits into floats."""
    kinds = set(map(type, values))
    if float in kinds and any(abs(value) >= 2**63 for value in values if type(value) is float):
        return False
    return kinds.isdisjoint((list, dict))


def _names_each_once(block: bytes, num_lines: int, fields: TextFields, has_unicode_escapes: bool) -> bool:
    """Return whether no line names a field of the text twice, provided that every line has all of them.

    Then each key occurs at least once per line, so as many keys as lines means exactly once. The first four
    bytes of a key occur at least as often as the key: if they occur once per line, so does the key.
    """
    if fields.is_chat or fields.is_first_of or fields.takes_records:
        return False  # each line is checked by itself: what follows takes 20 times as long
    name = fields.plain_name
    # Without unicode escapes a key has one spelling. To count it takes a fifth of a search for all spellings.
    if name and name.isidentifier() and not has_unicode_escapes:
        key = b'"%b"' % name.encode()
        if _count_beginning(block, key) == num_lines or block.count(key) == num_lines:
            return True
    # How often each key is in a line: that of metadata.title has "metadata" once and "title" once.
    paths = {path[:end] for path in fields.text_paths for end in range(1, len(path) + 1)}
    times_of = Counter(path[-1] for path in paths)
    for key_name, times in times_of.items():
        if len(_keys(key_name).findall(block)) != times * num_lines:
            return False
    return True


def _count_beginning(block: bytes, word: bytes) -> int:
    """Count the occurrences of a word's first four bytes, in a third of the time of bytes.count."""
    if len(word) < 4:
        return block.count(word)
    wanted = int.from_bytes(word[:4], "little")
    num_found = 0
    for shift in range(min(4, len(block))):
        # units: uint32[~bytes / 4], each four bytes of the block, from byte ``shift`` on
        units = np.frombuffer(block, "<u4", (len(block) - shift) // 4, shift)
        num_found += int(np.count_nonzero(units == wanted))
    return num_found


_SHORT_ESCAPES = dict(zip('"\\/\b\f\n\r\t', (b'"', b"\\", b"/", b"b", b"f", b"n", b"r", b"t"), strict=True))


@functools.lru_cache(maxsize=256)
def _keys(name: str) -> re.Pattern[bytes]:
    """Return a pattern of a key and its colon, in all spellings of JSON. A text may look like that, too."""
    pattern = b""
    for character in name:  # the character itself, or one of its escapes
        units = struct.iter_unpack(">H", character.encode("utf-16-be", "surrogatepass"))
        spellings = [b"".join(rb"\\u(?i:%04x)" % number for (number,) in units)]
        if character in _SHORT_ESCAPES:
            spellings.append(rb"\\" + re.escape(_SHORT_ESCAPES[character]))
        if character not in '"\\':
            spellings.append(re.escape(character.encode("utf-8", "surrogatepass")))
        pattern += b"(?:%b)" % b"|".join(spellings)
    # With the empty group findall returns empty matches, and makes no object for each key.
    return re.compile(b'"%b"(?::|[ \\t\\r]+:)()' % pattern)


def record_of_line(line: bytes, fields: TextFields) -> tuple[JsonValue, str | UnusableText]:
    """Return the object of a line, and its text, or why the line is left out.

    A line that names a field of the text twice is left out. For other keys the last value counts.
    """
    if not line.strip(_BLANK):
        return None, ""
    try:
        record = orjson.loads(line)
    except ValueError:
        return None, why_not_json(line)
    if is_too_deep(line):
        return None, _TOO_DEEP
    fields = fields.chosen(record)
    if fields.takes_records:
        is_exact = _LONG_NUMBER.search(line) is None
    else:
        others = [text_fields.value_at(record, path) for path in fields.named.values()]
        is_exact = _names_each_once(line, 1, fields, b"\\u" in line) and _are_exact(others)
    if not is_exact:
        try:
            record = json.loads(line, object_pairs_hook=_Object)
        except ValueError:  # an integer with more digits than Python converts
            return None, _TOO_DEEP
        twice = next(_named_twice(record, fields), None)
        if twice:
            return record, UnusableText("bad_json", f"the key {twice} occurs twice in one object")
    text = fields.text(record)
    if fields.takes_records and isinstance(text, str):
        text = line.decode()
    return record, text


class _Object(dict[str, JsonValue]):
    """A JSON object that remembers which of its keys occur twice."""

    def __init__(self, pairs: list[tuple[str, JsonValue]]) -> None:
        super().__init__(pairs)
        self.twice: list[str] = []
        if len(self) < len(pairs):
            self.twice = [name for name, times in Counter(name for name, _ in pairs).items() if times > 1]


def _named_twice(record: JsonValue, fields: TextFields) -> Iterator[str]:
    """Yield the keys of the text's fields that occur twice in their object, and any such key in messages."""
    for path in fields.text_paths:
        inner = record
        for name in path:
            if isinstance(inner, _Object) and name in inner.twice:
                yield name
            inner = text_fields.value_at(inner, (name,))
        inside = [inner] if fields.is_chat else []
        while inside:
            value = inside.pop()
            if isinstance(value, _Object):
                yield from value.twice
                inside += reversed(value.values())
            elif isinstance(value, list):
                inside += reversed(value)


def why_not_json(line: bytes) -> UnusableText:
    """Return why a line is not JSON, in words that no version of a library changes."""
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
    half = re.search(r"\\u[dD][89a-fA-F][0-9a-fA-F]{2}", text)
    if half:
        return UnusableText("surrogate", f"it has half of a surrogate pair, {half[0]} or another")
    return UnusableText("bad_json", "the line has NaN, Infinity or a number beyond 1.8e308")


_TOO_DEEP = UnusableText(
    "bad_json",
    f"it is nested too deep, more than {text_fields.MAX_JSON_DEPTH} levels, or has too long a number",
)


def is_too_deep(raw: bytes | bytearray) -> bool:
    """Return whether objects and lists are nested more than MAX_JSON_DEPTH deep.

    Takes 0.2 us for a line with no more brackets than that, otherwise as much per bracket and string.
    """
    most = text_fields.MAX_JSON_DEPTH
    if len(raw) <= 2 * most or raw.count(b"[") + raw.count(b"{") <= most:
        return False
    steps = (1 if bracket in b"[{" else -1 for bracket in _NO_BRACKETS.sub(b"", raw))
    return max(itertools.accumulate(steps), default=0) > most
