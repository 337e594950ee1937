"""The JSON files of a data set: each has a ``format``, a ``version`` and hashes, and its values are checked.

``content_sha256``, the hash of its other values, detects flipped bits and edits by hand. The fields of a
dataclass or Struct define the type and the bounds of each value; msgspec checks them. An error names the
file, the place in it, what was found and what was expected. What a task imports is a Struct where it can be:
each dataclass takes 0.7 ms to define, a Struct 0.02.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shardprep.errors import BrokenShard, UnknownVersion
from shardprep.folders import Folder

T = TypeVar("T")
FORMAT_VERSION = 4  # of all files in this package
CONTENT_HASH = "content_sha256"
RUN = "run"  # the part that may vary between equal files; it has a hash of its own
RUN_HASH = "run_sha256"
_MAX_VALUES = 3_000_000  # in a JSON file; the index of 99,999 shards has 800,000
MAX_INT64 = 2**63 - 1  # the largest number in the columns of an index
Count = Annotated[int, Meta(ge=0, le=MAX_INT64)]
Seconds = Annotated[float, Meta(ge=0, le=MAX_INT64)]
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]  # usable in paths and messages
_TYPE_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
          "array": "a list", "object": "an object"}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_canonical_json = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_PLACE_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of a place in an error of msgspec, such as $.shards[3]


def content_sha256(data: Mapping[str, object]) -> str:
    """Return the sha256, in hex, of an object's values except its hash and ``run``."""
    kept = {name: value for name, value in data.items() if name not in {CONTENT_HASH, RUN}}
    return hashlib.sha256(_canonical_json(kept).encode("ascii")).hexdigest()


def with_content_hash(
    file_format: str, content: Mapping[str, object], run: Mapping[str, object] | None = None
) -> dict[str, object]:
    """Return the object of a file: format, version, ``content`` and its hash, ``run`` and its hash."""
    data = {"format": file_format, "version": FORMAT_VERSION, **content}
    data[CONTENT_HASH] = content_sha256(data)
    return data if run is None else {**data, RUN: {**run, RUN_HASH: content_sha256(run)}}


def read_file(folder: Folder, name: str, file_format: str, kind: type[T], *, max_bytes: int) -> T:
    """Read a JSON file as a dataclass. Raises FileNotFoundError, which the caller explains."""
    raw = folder.read(name, max_bytes=max_bytes)
    path = folder.path_of(name)
    return as_type(path, checked_object(path, raw, file_format), kind)


def checked_object(path: Path, raw: bytes | bytearray, file_format: str) -> dict[str, object]:
    """Check format, version and hashes of a JSON file. Return its other values."""
    # Types are checked after decoding. A value takes up to 90 bytes of memory, but two bytes in the file.
    if len(raw) > _MAX_VALUES:
        num_values = raw.count(b",") + raw.count(b"[") + raw.count(b"{")
        if num_values > _MAX_VALUES:
            raise BrokenShard(path=path, found=f"{num_values} values", expected=f"at most {_MAX_VALUES}")
    try:
        data: object = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: not UTF-8
        raise BrokenShard(path=path, found=str(error), expected="JSON") from None
    if not isinstance(data, dict):
        raise BrokenShard(path=path, found=f"format {_shown(type(data).__name__)}", expected=file_format)
    fields: dict[str, object] = data
    written = fields.get("format")
    if written != file_format:
        raise BrokenShard(path=path, found=f"format {_shown(written)}", expected=file_format)
    version = fields.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise unknown_version(path, version)
    _check_hash(path, CONTENT_HASH, fields)
    run = fields.get(RUN)
    if isinstance(run, dict):
        _check_hash(path, RUN_HASH, run)
    del fields["format"], fields["version"]
    return fields


def _check_hash(path: Path, name: str, data: dict[str, object]) -> None:
    written = data.pop(name, None)
    expected = content_sha256(data)
    if written != expected:
        raise BrokenShard(path=path, found=f"altered: {name} {_shown(written)}", expected=expected[:12])


# msgspec inspects a type at its first use. Two threads that do so at once crash the process: with 12
# threads, msgspec 0.20 ended in SIGSEGV in 10 of 60 tries.
_msgspec_lock = threading.Lock()


@contextmanager
def type_errors_named(path: Path, data: object = ...) -> Iterator[None]:
    """Turn msgspec's errors about JSON ``data`` into a BrokenShard with the place and the value."""
    try:
        with _msgspec_lock:
            yield
    except (UnicodeEncodeError, UnicodeDecodeError) as error:  # a lone surrogate, which JSON can escape
        raise BrokenShard(path=path, found=_shown(error.object), expected="text in UTF-8") from None
    except msgspec.ValidationError as error:
        what, _, place = str(error).removesuffix("`").partition(" - at `$")
        value = data
        for name, number in _PLACE_STEP.findall(place):
            if number and isinstance(value, (list, tuple)):
                value = value[int(number)]
            else:  # msgspec writes [...] for a key that is not a field, and the value is not found
                value = value.get(name, ...) if isinstance(value, dict) else ...
        expected = re.sub(r"Expected |, got `\w+`", "", what)
        for name, words in _TYPE_WORDS.items():
            expected = re.sub(rf"`{name}( \| null)?`", rf"{words}\1", expected)
        raise wrong_value(path, place.removeprefix("."), value, expected) from None
    except msgspec.DecodeError as error:
        raise BrokenShard(path=path, found=str(error), expected="JSON") from None


def as_type(path: Path, data: object, kind: type[T]) -> T:
    """Convert parsed JSON to a dataclass or another type. Raises BrokenShard if it does not fit."""
    with type_errors_named(path, data):
        return msgspec.convert(data, kind)


def wrong_value(path: Path, place: str, value: object, expected: str) -> BrokenShard:
    shown = "a value" if value is ... else _shown(value)
    return BrokenShard(path=path, found=f"{place or 'all of it'} is {shown}", expected=expected)


def unknown_version(path: Path, written: object) -> UnknownVersion:
    """Build the error for a file of another version, with what to do about it."""
    plan = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"
    remedy = plan if type(written) is int and written < FORMAT_VERSION else None
    advice = "install the shardprep that wrote it, or plan again into a new folder"
    version = f"format version {_shown(written)}"
    return UnknownVersion(path=path, found=version, expected=FORMAT_VERSION, advice=advice, remedy=remedy)


def _shown(value: object) -> str:
    """Return a value for an error message: short and printable."""
    try:
        text = ascii(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # such as a number with thousands of digits
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def load_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8. Raises ValueError, also if it is nested too deeply."""
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def is_text(value: object) -> bool:
    """Return whether a value is a str without lone surrogates, so that it can be written."""
    return isinstance(value, str) and _SURROGATE.search(value) is None
