"""The list of ``plan --exclude`` in a data set, and which of its names match no document.

The line of an excluded document in the quarantine file has the keys that name it, so ``verify`` can tell
which names match no document.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from shardprep import errors, files
from shardprep.errors import BrokenShard
from shardprep.files import FileStamp
from shardprep.format import commands, names
from shardprep.format.data_folder import OF_THIS_COMMAND, DataFolder
from shardprep.format.documents import (
    DIGEST,
    EXCLUDED_DETAIL,
    HEX_DIGITS,
    MAX_LINE_CHARS,
    MOST_NAMES,
    DocumentNames,
    as_digests,
    key_of_name,
    name_in_line,
    names_of_list,
)
from shardprep.format.manifest import side_file_lines

_NUM_EXAMPLES = 3  # names that match no document


def read_excluded(folder: DataFolder, sha256: str) -> DocumentNames:
    """Read the list of a plan's --exclude. ``sha256``: its hash in the options. Raises BrokenShard."""
    path = folder.path_of(names.EXCLUDED_NAME)
    try:
        raw = folder.read(names.EXCLUDED_NAME, max_bytes=MOST_NAMES * names.DIGEST_BYTES + 1)
        sha256_here = hashlib.sha256(raw).hexdigest()
    except files.NOT_THERE:
        raw = b""
        sha256_here = "missing"
    if sha256_here != sha256:
        advice = "run the plan command again with the same --exclude list"
        raise BrokenShard(path=path, found=f"sha256 {sha256_here[:12]}", expected=sha256[:12], advice=advice)
    return DocumentNames(keys=as_digests(path, raw))


class _Quarantined(msgspec.Struct):
    """What is needed of a line of a quarantine file."""

    reason: str
    detail: str


_QUARANTINED = msgspec.json.Decoder(_Quarantined)


class UnmatchedNames(NamedTuple):
    """The names of a plan's --exclude list that match no document."""

    num_names: int  # in the list
    num_unmatched: int
    examples: list[str]  # a few of them, as they are in the list

    def sentence(self, some_id: str = "") -> str:
        """Say how many names match no document. ``some_id``: of any document, to compare with the names."""
        if not self.num_unmatched:
            return f"--exclude: all of the {self.num_names:,} names match documents"
        shown = f", such as {', '.join(self.examples)}" if self.examples else ""
        compared = f"; ids of documents are such as {some_id}" if some_id else ""
        if any(map(HEX_DIGITS.fullmatch, self.examples)):
            compared += "; the sha256 of a text is written sha256:HEX"
        return (
            f"warning: {self.num_unmatched:,} of {self.num_names:,} names of --exclude match no document"
            f"{shown}{compared}"
        )


def unmatched_names(
    folder: DataFolder, sha256: str, id_field: str, quarantines: Iterable[tuple[int, FileStamp]]
) -> UnmatchedNames | None:
    """Find the names that match no document, by the quarantine files of all shards with excluded documents.

    Returns None for shards of versions that did not record the names. ``sha256``: as in ``read_excluded``.
    ``quarantines``: shards and the stamps of their quarantine files.
    """
    listed = read_excluded(folder, sha256)
    is_matched = np.zeros(len(listed.keys), np.bool_)
    for shard_id, stamp in quarantines:
        name = names.quarantine_name(shard_id)
        path = folder.path_of(name)
        for line in side_file_lines(folder, name, shard_id, stamp):
            try:
                entry = _QUARANTINED.decode(line)
                if entry.reason != "excluded":
                    continue
                if not entry.detail.startswith(EXCLUDED_DETAIL):
                    return None
                raw = bytes.fromhex(entry.detail.removeprefix(EXCLUDED_DETAIL))
            except (msgspec.MsgspecError, ValueError):
                remedy = commands.shard_again(shard_id, folder)
                raise BrokenShard(path=path, found=f"the line {line[:60]!r}", remedy=remedy) from None
            positions = listed.find(as_digests(path, raw))
            is_matched[positions[positions >= 0]] = True
    lines = _kept_lines(folder, listed, ~is_matched, has_ids=bool(id_field))
    return unmatched_of(listed, is_matched, lines)


def _kept_lines(
    folder: DataFolder, listed: DocumentNames, wanted: npt.NDArray[np.bool_], *, has_ids: bool
) -> Iterator[str]:
    """Yield the lines of DATA/excluded.txt, which is only for people, that are ``wanted``: bool[names]."""
    for raw in folder.lines(names.EXCLUDED_LIST_NAME, max_line_bytes=4 * MAX_LINE_CHARS):
        line = raw.decode("utf-8", "replace").rstrip("\n")
        key, _ = key_of_name(name_in_line(line), has_ids=has_ids)
        position = listed.find(np.frombuffer(key, DIGEST))[0]
        if position >= 0 and wanted[position]:
            yield line


def unmatched_of(
    listed: DocumentNames, is_matched: npt.NDArray[np.bool_], lines: Iterator[str]
) -> UnmatchedNames:
    """Return the names of a list that are not matched. ``lines``: of them, as in the list, for examples."""
    num_unmatched = int((~is_matched).sum())
    examples: list[str] = []
    if num_unmatched:
        # The list is only for people: without it there are no examples.
        with contextlib.suppress(errors.ShardprepError, OSError, ValueError):
            examples = list(itertools.islice(lines, _NUM_EXAMPLES))
    return UnmatchedNames(len(listed.keys), num_unmatched, examples)


def stamps_of_given(
    folder: DataFolder, path: Path, listed: DocumentNames, *, id_field: str
) -> dict[str, FileStamp]:
    """Return the stamps of what ``publish_excluded`` writes, of the lines only if they are compared."""
    stamps = {names.EXCLUDED_NAME: FileStamp.of(listed.keys.tobytes())}
    if folder.status_of(names.EXCLUDED_LIST_NAME) is not None:
        lines = "".join(f"{line}\n" for line, _, _ in names_of_list(path, id_field))
        stamps[names.EXCLUDED_LIST_NAME] = FileStamp.of(lines.encode())
    return stamps


def stamps_of_excluded(folder: DataFolder, listed: DocumentNames) -> dict[str, FileStamp]:
    """Return the stamps of the two files about excluded documents that a copy of a data set has."""
    stamps = {names.EXCLUDED_NAME: FileStamp.of(listed.keys.tobytes())}
    with contextlib.suppress(*files.NOT_THERE):  # it is only for people
        stamps[names.EXCLUDED_LIST_NAME] = folder.stamp_of(names.EXCLUDED_LIST_NAME)
    return stamps


def publish_excluded(
    folder: DataFolder, path: Path, listed: DocumentNames, *, id_field: str, is_first: bool
) -> None:
    """Write the keys of a list into a data set, and its lines, which are only for people.

    ``is_first``: before the plan; then Refused is raised for other keys, which stay. Else they are replaced.
    """
    keys = listed.keys.tobytes()
    if is_first:
        folder.publish_equal(names.EXCLUDED_NAME, keys, what=OF_THIS_COMMAND)
    else:
        folder.publish(names.EXCLUDED_NAME, keys)
    with folder.new_file(names.EXCLUDED_LIST_NAME) as file:
        for line, _, _ in names_of_list(path, id_field):
            file.write(f"{line}\n".encode())
        file.sync()
        file.rename_into_place()
