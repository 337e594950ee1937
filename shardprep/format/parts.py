"""JSON files whose long lists are read by parts: a process reads the head, and the blocks that it needs.

The first line of such a file, closed by a brace, is the head: all but the lists, a hash of that, and for each
list the offset (from the end of the first line), size and sha256 of its blocks of ``ROWS_PER_BLOCK`` rows.
"""

from __future__ import annotations

import hashlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, overload

import orjson

from shardprep.errors import BrokenShard
from shardprep.files import ReadFile, errors_named
from shardprep.format.checked_json import Fields, checked_fields, is_digest, with_content_hash

T = TypeVar("T")
VERSION = 3  # of these files, so that an older reader says which shardprep it needs
ROWS_PER_BLOCK = 512
_HEAD_BYTES = 64 << 10  # read at once
_MAX_BLOCK_BYTES = 16 << 20  # a path has at most 4 KiB


def blocks_of(rows: Sequence[Any]) -> list[bytes]:
    """The blocks of a list: rows of JSON with commas between them."""
    starts = range(0, len(rows), ROWS_PER_BLOCK)
    return [orjson.dumps(rows[start : start + ROWS_PER_BLOCK])[1:-1] for start in starts]


def sha256s_of(rows: Sequence[Any]) -> list[str]:
    """The hash of each block of a list; of one that is read from a file no block is read for it."""
    if isinstance(rows, Rows):
        return [sha256 for _, _, sha256 in rows.blocks]
    return [_sha256(block) for block in blocks_of(rows)]


def _sha256(block: bytes | bytearray) -> str:
    return hashlib.sha256(block).hexdigest()


def json_by_parts(file_format: str, content: Mapping[str, Any], lists: Mapping[str, Sequence[Any]]) -> bytes:
    """The bytes of a file with ``content`` in its head, and ``lists`` in parts."""
    parts, body = {}, bytearray()
    for name, rows in lists.items():
        body += b',"%s":[' % name.encode()
        blocks: list[tuple[int, int, str]] = []
        for block in blocks_of(rows):
            body += b",\n" if blocks else b"\n"
            blocks.append((len(body), len(block), _sha256(block)))
            body += block
        body += b"]\n"
        parts[name] = {"num_rows": len(rows), "blocks": blocks}
    head = with_content_hash(file_format, {**content, "parts": parts}, version=VERSION)
    return orjson.dumps(head)[:-1] + b"\n" + body + b"}\n"


class PartsFile:
    """A file with lists in parts, open for reading; closed when nobody holds it or a list of it any more."""

    def __init__(self, path: Path) -> None:
        with errors_named(path):
            self._file = ReadFile(path)
        weakref.finalize(self, self._file.close)
        self._file.expect_scattered_reads()
        self._first = 0  # byte behind the head

    def read_head(self, file_format: str, *, max_bytes: int) -> Fields:
        """The fields of the head, with ``parts``; without, all fields of a file that stands in one piece.

        Raises BrokenShard, UnknownVersion, ReadWriteError.
        """
        path, size = self._file.path, self._file.num_bytes
        if size > max_bytes:
            raise BrokenShard(f"{path} has {size} bytes, expected at most {max_bytes}")
        with_parts = b'{"format":"%s","version":%d,' % (file_format.encode(), VERSION)
        raw = self._read(0, min(size, _HEAD_BYTES))
        if not raw.startswith(with_parts):
            return checked_fields(path, raw + self._read(len(raw), size - len(raw)), file_format)
        while b"\n" not in raw and len(raw) < size:
            raw += self._read(len(raw), min(size - len(raw), len(raw)))
        head = bytes(raw.partition(b"\n")[0])
        self._first = len(head) + 1
        return checked_fields(path, head + b"}", file_format, version=VERSION)

    def rows(self, parts: Fields, name: str, rows_of: Callable[[Fields, str, int], list[T]]) -> Rows[T]:
        """A list, given the head's ``parts``, of which no row is read yet. Raises BrokenShard.

        ``rows_of`` takes the rows of a block from Fields by this name, and is told which row is its first.
        """
        table = parts.fields(name)
        num_rows = table.whole("num_rows")
        blocks = table.list_of("blocks", _is_block, "an offset, bytes and a sha256")
        table.end()
        if len(blocks) != -(-num_rows // ROWS_PER_BLOCK):
            raise table.wrong("blocks", f"{len(blocks)} blocks", f"those of {num_rows} rows")
        if (num_bytes := sum(size for _, size, _ in blocks)) > self._file.num_bytes:  # some are one another
            raise table.wrong("blocks", f"{num_bytes} bytes", f"{self._file.num_bytes} at most")
        return Rows(self, name, num_rows, blocks, rows_of)

    def read_block(self, name: str, block: tuple[int, int, str], num_rows: int) -> Fields:
        """The rows of a block as a list of this name. Raises BrokenShard, also for another hash."""
        offset, num_bytes, expected = self._first + block[0], block[1], block[2]
        raw = self._read(offset, num_bytes)
        where = f"{self._file.path}: in its {name}, bytes {offset} to {offset + num_bytes}"
        if (found := _sha256(raw)) != expected:
            raise BrokenShard(
                f"{where} were altered since they were written: sha256 {found[:12]}..., the head says "
                f"{expected[:12]}...; bring the file back as it was"
            )
        try:
            rows = orjson.loads(b"[" + raw + b"]")
        except ValueError as error:
            raise BrokenShard(f"{where} are not JSON ({error}); bring the file back as it was") from None
        if len(rows) != num_rows:
            raise BrokenShard(
                f"{where} are {len(rows)} rows, expected {num_rows}; bring the file back as it was"
            )
        return Fields(self._file.path, {name: rows})

    def _read(self, offset: int, num_bytes: int) -> bytearray:
        if offset + num_bytes > self._file.num_bytes:
            raise BrokenShard(
                f"{self._file.path} has {self._file.num_bytes} bytes, its head says {offset + num_bytes} or "
                "more; bring the file back as it was"
            )
        with errors_named(self._file.path):
            return self._file.read(offset, num_bytes)


@dataclass(eq=False)
class Rows(Sequence[T]):
    """A list of a file, each block of which is read when one of its rows is asked for, and then held."""

    file: PartsFile
    name: str
    num_rows: int
    blocks: list[tuple[int, int, str]]  # offset, bytes and sha256
    rows_of: Callable[[Fields, str, int], list[T]]
    held: dict[int, list[T]] = field(default_factory=dict)

    def __len__(self) -> int:
        return self.num_rows

    def __iter__(self) -> Iterator[T]:
        return itertools.chain.from_iterable(map(self._block, range(len(self.blocks))))

    @overload
    def __getitem__(self, key: int) -> T: ...
    @overload
    def __getitem__(self, key: slice) -> list[T]: ...
    def __getitem__(self, key: int | slice) -> T | list[T]:
        places = range(self.num_rows)[key]
        if isinstance(places, range):
            return [self[place] for place in places]
        number, place = divmod(places, ROWS_PER_BLOCK)
        return self._block(number)[place]

    def _block(self, number: int) -> list[T]:
        if number not in self.held:
            first = number * ROWS_PER_BLOCK
            num_rows = min(ROWS_PER_BLOCK, self.num_rows - first)
            fields = self.file.read_block(self.name, self.blocks[number], num_rows)
            self.held[number] = self.rows_of(fields, self.name, first)
        return self.held[number]


def _is_block(value: Any) -> bool:
    if type(value) is not list or [type(part) for part in value] != [int, int, str]:
        return False
    offset, num_bytes, sha256 = value
    return offset >= 0 and 0 <= num_bytes <= _MAX_BLOCK_BYTES and is_digest(sha256, 64)
