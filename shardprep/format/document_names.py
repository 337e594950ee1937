"""Documents that a user names in a file, for ``plan --exclude`` and ``blank --ids``.

A line is an id of ``--id_field``, or ``sha256:`` and the sha256 of a text, as digests/ has it. Kept of a line
are 16 bytes, so a list of a million names takes 16 MB in each process that looks for them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import orjson

from shardprep.errors import BadInput, BrokenShard, NotFound, UsageError
from shardprep.files import NOT_THERE, errors_named, read_lines, read_regular
from shardprep.format.digests import DIGEST
from shardprep.format.names import DIGEST_BYTES, EXCLUDED_NAME, ids_path, remake_command

_TEXT = b"sha256:"
_MOST_NAMES = 10_000_000


@dataclass(frozen=True, kw_only=True)
class DocumentNames:
    """Names of documents, looked up a batch at a time."""

    keys: npt.NDArray[np.void]  # DIGEST[names], ascending: digests of texts, and hashes of ids
    has_ids: bool = True
    has_texts: bool = True

    def find(self, keys: npt.NDArray[np.void]) -> npt.NDArray[np.intp]:
        """Return where some keys stand among the names: intp[n], -1 for one that is none."""
        places = np.searchsorted(self.keys, keys)
        places[places == len(self.keys)] = 0
        is_there = self.keys[places] == keys if len(self.keys) else np.zeros(len(keys), np.bool_)
        return np.where(is_there, places, -1)


def keys_of_ids(ids: Iterable[str]) -> npt.NDArray[np.void]:
    """Return the keys of ids: DIGEST[n]."""
    found = [hashlib.sha256(b"id:" + name.encode()).digest()[:DIGEST_BYTES] for name in ids]
    return np.frombuffer(b"".join(found), DIGEST)


def read_names(path: Path, *, id_field: str) -> DocumentNames:
    """Read a list that a user wrote; a million lines take 1 s and 50 MB.

    Raises NotFound, BadInput, UsageError, ReadWriteError.

    ``id_field``: of the plan, "" where it keeps no ids.
    """
    keys, kinds = bytearray(), set[bool]()
    for key, is_text in _keys_in(path, id_field):
        keys += key
        kinds.add(is_text)
        if len(keys) > _MOST_NAMES * DIGEST_BYTES:
            raise BadInput(
                f"{path} has more than {_MOST_NAMES:,} names; every process that makes shards would hold "
                "them: filter the input itself",
                path=path,
                expected=f"at most {_MOST_NAMES:,} names",
            )
    if not keys:
        raise BadInput(f"{path} names no document, expected a line for each", path=path)
    found = np.unique(np.frombuffer(keys, DIGEST))
    return DocumentNames(keys=found, has_ids=False in kinds, has_texts=True in kinds)


def lines_of(
    path: Path, names: DocumentNames, wanted: npt.NDArray[np.bool_], *, id_field: str
) -> Iterator[str]:
    """Yield the lines of a list whose names are ``wanted``: bool[names]."""
    for line, (key, _) in zip(_lines_in(path), _keys_in(path, id_field), strict=True):
        if wanted[names.find(np.frombuffer(key, DIGEST))[0]]:
            yield line


def _lines_in(path: Path) -> Iterator[str]:
    try:
        with errors_named(path):
            for number, raw in enumerate(read_lines(path), 1):
                try:
                    line = raw.decode().strip()
                except UnicodeDecodeError as error:
                    raise BadInput(f"{path}:{number} is not UTF-8: {error.reason}", path=path) from None
                if line:
                    yield line
    except NOT_THERE:
        raise NotFound(f"{path} is no file", path=path) from None


def _keys_in(path: Path, id_field: str) -> Iterator[tuple[bytes, bool]]:
    """Yield the key of each line, and whether it names a text."""
    for line in _lines_in(path):
        name = line.encode()
        if not name.startswith(_TEXT):
            if not id_field:
                raise UsageError(
                    f"{path} has the line {line[:60]!r}, an id, and the plan has no --id_field, so it knows "
                    "no ids; name texts, as sha256:HEX",
                    path=path,
                    found=line[:60],
                    expected="sha256:HEX",
                    remedy="--id_field",
                )
            yield hashlib.sha256(b"id:" + name).digest()[:DIGEST_BYTES], False
            continue
        try:
            digest = bytes.fromhex(line.removeprefix(_TEXT.decode()))
        except ValueError:
            digest = b""
        if len(digest) not in (DIGEST_BYTES, 32):
            raise BadInput(
                f"{path} has the line {line[:80]!r}, expected sha256: and 64 hex digits",
                path=path,
                found=line[:80],
                expected="64 hex digits",
            )
        yield digest[:DIGEST_BYTES], True


def read_excluded(folder: Path, sha256: str) -> DocumentNames:
    """Read the names that a plan leaves out. ``sha256``: of its options. Raises BrokenShard."""
    path = folder / EXCLUDED_NAME
    remedy = "run the plan command again, with the same list as --exclude"
    try:
        raw = read_regular(path, max_bytes=_MOST_NAMES * DIGEST_BYTES + 1)
    except NOT_THERE:
        raise BrokenShard(f"{path} is missing; {remedy}", path=path, remedy=remedy) from None
    if (found := hashlib.sha256(raw).hexdigest()) != sha256:
        raise BrokenShard(
            f"{path} has sha256 {found[:12]}, its plan says {sha256[:12]}; {remedy}",
            path=path,
            found=found[:12],
            expected=sha256[:12],
            remedy=remedy,
        )
    return DocumentNames(keys=np.frombuffer(raw, DIGEST))


def kept_ids(folder: Path, shard_id: int) -> Iterator[tuple[int, int, str]]:
    """Yield input, place in it, and id of each document of a shard, as --id_field keeps them.

    Raises BrokenShard, ReadWriteError.
    """
    path, remedy = ids_path(folder, shard_id), remake_command(shard_id, folder)
    for line in read_lines(path):
        try:
            input_number, offset, kept = orjson.loads(line)
            is_right = [type(input_number), type(offset), type(kept)] == [int, int, str]
        except (ValueError, TypeError):
            is_right = False
        if not is_right:
            raise BrokenShard(
                f"{path} has the line {line[:60]!r}; run: {remedy}", path=path, found=line[:60], remedy=remedy
            )
        yield input_number, offset, kept
