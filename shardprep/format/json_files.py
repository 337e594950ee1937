"""The JSON files of the contract: written with a hash of their content, read into dataclasses with bounds.

Each file has a ``format``, a ``version`` and a ``content_sha256``, the hash of its other values: a bit that
flips on a disk is refused, and so is a hand that edits what is frozen. The fields of a dataclass say the type
and the bounds of each value; msgspec checks them. An error names the file, the place in it, what was found
and what was expected.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from shardprep.errors import BrokenShard, UnknownVersion
from shardprep.files import read_regular

T = TypeVar("T")

FORMAT_VERSION = 3  # of all that this package describes
CONTENT_HASH = "content_sha256"
RUN = "run"  # what varies between equal files; outside of the content's hash, with one of its own
RUN_HASH = "run_sha256"
MOST = 2**63 - 1  # the largest number that the columns of an index can hold

Count = Annotated[int, Meta(ge=0, le=MOST)]
Seconds = Annotated[float, Meta(ge=0, le=MOST)]
Text = Annotated[str, Meta(pattern=r"\A[^\0]*\Z")]  # which a path and a message can hold

_WORDS = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text",
          "array": "a list", "object": "an object"}  # fmt: skip
_SURROGATE = re.compile("[\ud800-\udfff]")
_canonical = json.JSONEncoder(sort_keys=True, separators=(",", ":")).encode
_STEP = re.compile(r"\.(\w+)|\[(\d+)\]")  # of the place in an error of msgspec, such as $.shards[3]


def content_sha256(data: Mapping[str, Any]) -> str:
    """Return the sha256, in hex, of an object's values, without its hash and ``run``."""
    kept = {name: value for name, value in data.items() if name not in {CONTENT_HASH, RUN}}
    return hashlib.sha256(_canonical(kept).encode("ascii")).hexdigest()


def with_content_hash(
    file_format: str, content: Mapping[str, Any], run: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the whole object of a file: format, version, ``content`` and its hash, ``run`` and its hash."""
    data = {"format": file_format, "version": FORMAT_VERSION, **content}
    data[CONTENT_HASH] = content_sha256(data)
    return data if run is None else {**data, RUN: {**run, RUN_HASH: content_sha256(run)}}


def read_file(path: Path, file_format: str, kind: type[T], *, max_bytes: int) -> T:
    """Read one of our files into ``kind``.

    Raises FileNotFoundError, NotADirectoryError, BrokenShard, UnknownVersion or ReadWriteError.
    """
    return as_type(path, checked_object(path, read_regular(path, max_bytes=max_bytes), file_format), kind)


def checked_object(path: Path, raw: bytes | bytearray, file_format: str) -> dict[str, Any]:
    """Return what a file holds, once format, version and hashes are right, without these.

    Raises BrokenShard, UnknownVersion.
    """
    try:
        data: Any = msgspec.json.decode(raw)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # a ValueError: it is no UTF-8
        raise BrokenShard(path=path, found=str(error), expected="JSON") from None
    found = data.get("format") if isinstance(data, dict) else type(data).__name__
    if found != file_format:
        raise BrokenShard(path=path, found=f"format {_shown(found)}", expected=file_format)
    version = data.get("version")
    if type(version) is not int or version != FORMAT_VERSION:
        raise unknown_version(path, version)
    _check_hash(path, CONTENT_HASH, data)
    if isinstance(data.get(RUN), dict):
        _check_hash(path, RUN_HASH, data[RUN])
    fields: dict[str, Any] = data
    del fields["format"], fields["version"]
    return fields


def _check_hash(path: Path, name: str, data: dict[str, Any]) -> None:
    """Take the hash out of an object, and compare it. Raises BrokenShard."""
    found, expected = data.pop(name, None), content_sha256(data)
    if found != expected:
        what = f"altered since it was written: {name} {_shown(found)}"
        raise BrokenShard(path=path, found=what, expected=expected[:12])


_known_types: set[Any] = set()
_one_thread = threading.Lock()


def prepare_type(kind: Any) -> None:
    """Have msgspec look at a type, and at those of its fields, in one thread.

    It does so when it first meets a type, and two threads that do it at once end the process: 12 threads of
    msgspec 0.20 by SIGSEGV, in 10 of 60 tries.
    """
    if kind not in _known_types:
        with _one_thread:
            with contextlib.suppress(msgspec.ValidationError):
                msgspec.convert(None, kind)
            _known_types.add(kind)


def as_type(path: Path, data: Any, kind: type[T]) -> T:
    """Return values of JSON as a dataclass, or another type, whose bounds they meet. Raises BrokenShard."""
    prepare_type(kind)
    try:
        return msgspec.convert(data, kind)
    except msgspec.ValidationError as error:
        what, _, place = str(error).removesuffix("`").partition(" - at `$")
        found = data
        for name, number in _STEP.findall(place):
            # The place of a value below a key that any file may choose ends in [...].
            inside = found.get(name, ...) if isinstance(found, dict) else ...
            found = found[int(number)] if number and isinstance(found, (list, tuple)) else inside
        expected = re.sub(r"Expected |, got `\w+`", "", what)
        for name, words in _WORDS.items():
            expected = re.sub(rf"`{name}( \| null)?`", rf"{words}\1", expected)
        raise wrong_value(path, place.removeprefix("."), found, expected) from None


def wrong_value(path: Path, place: str, found: object, expected: str) -> BrokenShard:
    """Return the error of a value that is not what was expected."""
    shown = "a value" if found is ... else _shown(found)
    return BrokenShard(path=path, found=f"{place or 'all of it'} is {shown}", expected=expected)


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


def _shown(value: object) -> str:
    """Return a value as an error repeats it: short, and printable whatever it is."""
    try:
        text = ascii(value) if isinstance(value, str) else repr(value)
    except (ValueError, RecursionError):  # a number of thousands of digits, say
        text = f"a {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:60]}..."


def load_json(raw: bytes | bytearray) -> Any:
    """Parse JSON in UTF-8. Raises ValueError, too deep JSON included."""
    try:
        return json.loads(raw.decode("utf-8"))
    except RecursionError:
        raise ValueError("it is nested too deep") from None


def is_text(value: object) -> bool:
    """Return whether a value is a str that can be written: it holds no half of a surrogate pair."""
    return isinstance(value, str) and _SURROGATE.search(value) is None
