"""Reads the JSON files of the contract: whatever one holds, the error names file, key, found and expected.

Every such file has a ``format``, a ``version`` and a ``content_sha256``, the hash of its other values: a bit
that flips on a disk is refused, and so is a hand that edits what is frozen.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import re
import typing
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, TypeVar

from shardprep.errors import BrokenShard, UnknownVersion
from shardprep.files import Digest, FileStamp, read_regular
from shardprep.format.names import FORMAT_VERSION

T = TypeVar("T")

CONTENT_HASH = "content_sha256"
RUN = "run"  # what varies between equal files; outside of the content's hash, with one of its own
RUN_HASH = "run_sha256"
MOST = 2**63 - 1  # the largest number that the columns of an index can hold
_HEX = re.compile("[0-9a-f]*")
# Python's own limit is what is left of its stack, another one in each version; orjson's is 1,024.
MAX_JSON_DEPTH = 512
# A string that does not end goes up to the end: from each of its quotes another one would begin else.
_STRING_OR_BRACKET = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"?|[\[\]{}]', re.DOTALL)


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


def load_json(raw: bytes | bytearray, **hooks: Any) -> Any:
    """Parse JSON in UTF-8; ``hooks`` are those of json.loads. Raises ValueError, too deep JSON included."""
    if is_too_deep(raw):
        raise ValueError(f"it is nested more than {MAX_JSON_DEPTH} levels deep")
    return json.loads(raw.decode("utf-8"), **hooks)


def with_content_hash(
    file_format: str,
    content: Mapping[str, Any],
    run: Mapping[str, Any] | None = None,
    *,
    version: int = FORMAT_VERSION,
) -> dict[str, Any]:
    """The whole object of a file: format, version, ``content``, its hash; ``run``, with its own, if given."""
    data = {"format": file_format, "version": version, **content}
    data[CONTENT_HASH] = content_sha256(data)
    return data if run is None else {**data, RUN: {**run, RUN_HASH: content_sha256(run)}}


def content_sha256(data: Mapping[str, Any]) -> str:
    """sha256, in hex, of an object's values, however they are spelled; without its hash and ``run``."""
    kept = {name: value for name, value in data.items() if name not in {CONTENT_HASH, RUN}}
    canonical = json.dumps(kept, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode("ascii")).hexdigest()


def read_checked(path: Path, file_format: str, *, max_bytes: int) -> Fields:
    """The fields of one of our files, once its format, version and hash are right.

    Raises FileNotFoundError, NotADirectoryError, BrokenShard, UnknownVersion or ReadWriteError.
    """
    return checked_fields(path, read_regular(path, max_bytes=max_bytes), file_format)


def checked_fields(
    path: Path, raw: bytes | bytearray, file_format: str, *, version: int = FORMAT_VERSION
) -> Fields:
    """``read_checked`` of the bytes of a file. Raises BrokenShard, UnknownVersion."""
    try:
        data = load_json(raw, object_pairs_hook=_object, parse_constant=_no_constant)
        if not isinstance(data, dict) or data.get("format") != file_format:
            found = data.get("format") if isinstance(data, dict) else type(data).__name__
            raise BrokenShard(
                f"{path} is not a {file_format}: its format is {_shown(found)}",
                path=path,
                found=_shown(found),
                expected=file_format,
            )
        found = data.get("version")
        if type(found) is not int or found != version:
            raise unknown_version(path, found)
        found, expected = data.pop(CONTENT_HASH, None), content_sha256(data)
    except ValueError as error:
        raise BrokenShard(f"{path} is not JSON ({error})", path=path, expected="JSON") from None
    if found != expected:
        raise _altered(path, CONTENT_HASH, found, expected)
    del data["format"], data["version"]
    return Fields(path, data, content_sha256=expected)


def unknown_version(path: Path, found: object) -> UnknownVersion:
    """Return the error of a file of another version, with what is to be done about it."""
    remedy = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"
    return UnknownVersion(
        f"{path} has format version {_shown(found)}, this shardprep reads {FORMAT_VERSION} alone; install "
        f"the shardprep that wrote it, or make the data set anew in a new folder: {remedy}",
        path=path,
        found=_shown(found),
        expected=FORMAT_VERSION,
        remedy=remedy if type(found) is int and found < FORMAT_VERSION else None,
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    data = dict(pairs)
    if len(data) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {_shown(twice)} stands twice in one object")
    return data


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


def _shown(value: object) -> str:
    """A value as an error repeats it: short, and printable whatever it is."""
    try:
        text = ascii(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, say
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def _altered(path: Path, name: str, found: object, expected: str) -> BrokenShard:
    return BrokenShard(
        f"{path} was altered since it was written: its {name} is {_shown(found)}, its content gives "
        f"{expected[:12]}...",
        path=path,
        found=_shown(found),
        expected=f"{expected[:12]}...",
    )


class Fields:
    """The keys of one JSON object. Each is taken by its type, and ``end`` refuses those that nobody took.

    Every error is a BrokenShard that names the file, the key, what was found and what was expected.
    """

    def __init__(
        self, path: Path, data: Mapping[str, Any], place: str = "", *, content_sha256: str = ""
    ) -> None:
        self.path = path
        self.content_sha256 = content_sha256  # of a whole file's values
        self._data = dict(data)
        self._place = place

    def wrong(self, key: str, found: object, expected: str) -> BrokenShard:
        """The error of a value that is not what was expected."""
        return BrokenShard(
            f"{self.path}: {self._place}{key} is {_shown(found)}, expected {expected}",
            path=self.path,
            found=_shown(found),
            expected=expected,
        )

    def take(self, key: str) -> Any:
        """A value of any type."""
        try:
            return self._data.pop(key)
        except KeyError:
            raise BrokenShard(f"{self.path} is not whole: it has no {self._place}{key}") from None

    def has(self, key: str) -> bool:
        """Whether there is such a key, and nobody took it."""
        return key in self._data

    def rest(self) -> dict[str, Any]:
        """Take all keys that nobody took."""
        rest, self._data = self._data, {}
        return rest

    def end(self) -> None:
        """Every key was taken."""
        if self._data:
            raise BrokenShard(f"{self.path}: {self._place}{_shown(min(self._data))} is no key that is known")

    def right(self, key: str, is_right: Callable[[Any], bool], expected: str) -> Any:
        """A value of which ``is_right`` holds."""
        value = self.take(key)
        if not is_right(value):
            raise self.wrong(key, value, expected)
        return value

    def whole(self, key: str, least: int = 0, most: int = MOST) -> int:
        """A whole number; true and 1.0 are none."""
        value = self.take(key)
        if type(value) is not int or not least <= value <= most:
            raise self.wrong(key, value, f"a whole number, {least} to {most}")
        return value

    def number(self, key: str, most: float = MOST) -> float:
        """A number from 0, whole or not."""
        value = self.take(key)
        if type(value) not in {int, float} or not 0 <= value <= most:
            raise self.wrong(key, value, f"a number, 0 to {most}")
        return float(value)

    def flag(self, key: str) -> bool:
        """true or false; 0 and "false" are neither."""
        return bool(self.right(key, lambda value: type(value) is bool, "true or false"))

    def text(self, key: str) -> str:
        """Characters that a path and a message can hold: no NUL, no half of a surrogate pair."""
        return str(self.right(key, lambda value: is_text(value) and "\0" not in value, "a text"))

    def digest(self, key: str) -> str:
        """A sha256 in lower-case hex digits."""
        return str(self.right(key, lambda value: is_digest(value, 64), "64 hex digits"))

    def mapping(self, key: str) -> dict[str, Any]:
        """An object of any values."""
        found: dict[str, Any] = self.right(key, lambda value: isinstance(value, dict), "an object")
        return found

    def value(self, key: str, kind: Any) -> Any:
        """A value of a type, see ``_reader_of``."""
        return _reader_of(kind)(self, key)

    def all_of(self, kind: type[T], **given: Any) -> T:
        """A dataclass made of all keys, each of its field's type, but for those that are ``given``.

        A key whose field has a default may be absent.
        """
        readers = _readers_of(kind)  # type: ignore[arg-type]  # a class can be hashed
        values = {
            name: read(self, name)
            for name, read, is_optional in readers
            if name not in given and not (is_optional and not self.has(name))
        }
        self.end()
        return kind(**values, **given)

    def digests(self, key: str) -> list[str]:
        """A list of hashes of 64 hex digits."""
        return self.list_of(key, lambda value: is_digest(value, 64), "64 hex digits")

    def stamp(self, key: str) -> FileStamp:
        """Size and sha256 of a file."""
        return self.fields(key).all_of(FileStamp)

    def run(self) -> dict[str, Any]:
        """The ``run`` of a file, without its hash, which has to be right; an empty one needs none."""
        run = dict(self.mapping(RUN))
        found, expected = run.pop(RUN_HASH, None), content_sha256(run)
        if found != expected and (found is not None or run):
            raise _altered(self.path, RUN_HASH, found, expected)
        return run

    def fields(self, key: str) -> Fields:
        """An object whose values are to be taken one by one."""
        return Fields(self.path, self.mapping(key), f"{self._place}{key}.")

    def or_none(self, key: str, read: Callable[[str], T]) -> T | None:
        """null, or what ``read`` takes."""
        if self._data.get(key, self) is None:
            return self.take(key)  # type: ignore[no-any-return]  # it is None
        return read(key)

    def list_of(self, key: str, is_right: Callable[[Any], bool], expected: str) -> list[Any]:
        """A list whose entries are all right."""
        value = self.take(key)
        if not isinstance(value, list):
            raise self.wrong(key, value, f"a list, each {expected}")
        for number, entry in enumerate(value):
            if not is_right(entry):
                raise self.wrong(f"{key}[{number}]", entry, expected)
        return value

    def texts(self, key: str) -> list[str]:
        """A list of texts, which may hold NULs."""
        return self.list_of(key, is_text, "a text")

    def wholes(self, key: str, least: int = 0) -> list[int]:
        """A list of whole numbers."""
        return self.list_of(
            key, lambda value: type(value) is int and least <= value <= MOST, f"a whole number from {least}"
        )

    def objects(self, key: str) -> Iterator[Fields]:
        """A list of objects."""
        for number, entry in enumerate(self.list_of(key, lambda value: isinstance(value, dict), "an object")):
            yield Fields(self.path, entry, f"{self._place}{key}[{number}].")

    def each(self, key: str, read: Callable[[Fields, str], T]) -> dict[str, T]:
        """An object whose values are all of one kind."""
        inner = self.fields(key)
        return {name: read(inner, name) for name in list(inner._data)}  # noqa: SLF001 - one of this class


_READERS: dict[Any, Callable[[Fields, str], Any]] = {
    bool: Fields.flag,
    int: Fields.whole,
    float: Fields.number,
    str: Fields.text,
    Any: Fields.take,
    Digest: Fields.digest,
    list[int]: Fields.wholes,
    list[str]: Fields.texts,
    Path: lambda fields, key: Path(fields.text(key)),
}


@functools.cache
def _reader_of(kind: Any) -> Callable[[Fields, str], Any]:
    """What reads a type: one of _READERS, a dataclass, a Literal, a dict by name, each or None.

    ``Annotated[int, least, most]`` and ``Annotated[float, most]`` have bounds.
    """
    if kind in _READERS:
        return _READERS[kind]
    if dataclasses.is_dataclass(kind):
        return lambda fields, key: fields.fields(key).all_of(kind)  # type: ignore[arg-type]  # a class
    origin, (inner, *bounds) = typing.get_origin(kind), typing.get_args(kind)
    if origin is Literal:
        choices = (inner, *bounds)
        expected = f"one of {', '.join(choices)}"
        return lambda fields, key: fields.right(key, lambda value: value in choices, expected)
    if origin is Annotated:
        return lambda fields, key: (fields.whole if inner is int else fields.number)(key, *bounds)
    read = _reader_of(bounds[0] if origin is dict else inner)
    if origin is dict:
        return lambda fields, key: fields.each(key, read)
    return lambda fields, key: fields.or_none(key, lambda key: read(fields, key))


@functools.cache
def _readers_of(kind: Any) -> list[tuple[str, Callable[[Fields, str], Any], bool]]:
    """The name of each field, what reads it, and whether it has a default."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return [
        (item.name, _reader_of(hints[item.name]), item.default is not dataclasses.MISSING)
        for item in dataclasses.fields(kind)
        if item.init
    ]


def is_digest(value: object, num_digits: int) -> bool:
    """Whether a value is a text of so many lower-case hex digits."""
    return isinstance(value, str) and len(value) == num_digits and _HEX.fullmatch(value) is not None


def is_text(value: object) -> bool:
    """Whether a value is a str that can be written: it holds no half of a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True
