"""Files of O/jobs and manifests as ``status`` reads them: whatever they hold, an error names them.

Only regular files are opened (a FIFO would hold the command for ever), and only what fits is read.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from shardprep.errors import BrokenShard

MAX_NUMBER = 2**53  # what a JSON number holds exactly
_MOST_BYTES = 64 << 20  # a submission of 99,999 shards takes 2 MB


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises OSError where it cannot be read, BrokenShard where it is none."""
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    with open(fd, "rb") as file:  # noqa: PTH123 - a descriptor has no path
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise BrokenShard(f"{path} is no regular file")
        if status.st_size > _MOST_BYTES:
            raise BrokenShard(f"{path} has {status.st_size} bytes, expected at most {_MOST_BYTES}")
        raw = file.read()
    try:
        data = orjson.loads(raw)
    except ValueError as error:
        raise BrokenShard(f"{path} is not JSON ({error})") from None
    if not isinstance(data, dict):
        raise BrokenShard(f"{path} holds {type(data).__name__}, expected an object")
    return data


class Fields:
    """The fields of a JSON object, each taken with the type it must have.

    Every method raises BrokenShard that says which field of which file holds what.
    """

    def __init__(self, path: Path, data: object, where: str = "") -> None:
        self.path = path
        self.where = where
        if not isinstance(data, Mapping):
            raise self._wrong("", data, "an object")
        self._data = data

    def values(self, names: Iterable[str]) -> dict[str, Any]:
        """Fields as they are, none missing and no other there."""
        found = {name: self._get(name) for name in names}
        if others := sorted(set(self._data) - set(found)):
            raise self._wrong(others[0], self._data[others[0]], "no such field")
        return found

    def text(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise self._wrong(name, value, "text")
        return value

    def integer(self, name: str, *, at_least: int = 0) -> int:
        value = self._get(name)
        if not isinstance(value, int) or isinstance(value, bool) or not at_least <= value <= MAX_NUMBER:
            raise self._wrong(name, value, f"a whole number from {at_least}")
        return value

    def number(self, name: str) -> float:
        value = self._get(name)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 <= value <= MAX_NUMBER:
            raise self._wrong(name, value, "a number from 0")
        return float(value)

    def optional_integer(self, name: str) -> int | None:
        return None if self._get(name) is None else self.integer(name, at_least=1)

    def inner(self, name: str) -> Fields:
        return Fields(self.path, self._get(name), self._full(name))

    def list_of(self, name: str) -> list[Any]:
        value = self._get(name)
        if not isinstance(value, list) or not value:
            raise self._wrong(name, value, "a list that is not empty")
        return value

    def objects(self, name: str) -> list[Fields]:
        items = enumerate(self.list_of(name))
        return [Fields(self.path, item, f"{self._full(name)}[{number}]") for number, item in items]

    def texts(self, name: str) -> list[str]:
        values = self.list_of(name)
        for value in values:
            if not isinstance(value, str):
                raise self._wrong(name, value, "texts")
        return values

    def _get(self, name: str) -> object:
        if name not in self._data:
            raise BrokenShard(f"{self.path} has no {self._full(name)}")
        return self._data[name]

    def _full(self, name: str) -> str:
        return ".".join(part for part in (self.where, name) if part)

    def _wrong(self, name: str, value: object, expected: str) -> BrokenShard:
        found = repr(value)
        shown = found if len(found) < 60 else f"{found[:56]} ..."
        return BrokenShard(f"{self.path}: {self._full(name) or 'it'} is {shown}, expected {expected}")
