"""Folders and files that a command fills, and that it refuses to take from another program."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

import msgspec

from shardprep import files, publishing
from shardprep.errors import CannotWrite, Refused
from shardprep.files import FileStamp
from shardprep.folders import Folder

_BEGINNING_BYTES = 1000  # of a file that may be replaced
_RECORD = "written.jsonl"  # a line for each file that ``remember`` was told of
_NO_NAME = re.compile(r"(?!)")


class OutputFolder(Folder):
    """A folder that a command fills, and nobody else: new, empty, or claimed by an earlier run of it.

    ``mark`` is the name of the file that claims it. The folder keeps a record of what was written, by which a
    later run tells a whole file from one that was cut or altered.
    """

    def __init__(
        self, path: Path | str, *, mark: str, writable: re.Pattern[str], may_be_link: bool = True
    ) -> None:
        with_record = re.compile(f"(?:{writable.pattern})|{re.escape(_RECORD)}")
        super().__init__(path, writable=with_record, may_be_link=may_be_link)
        self._mark = mark

    def claim(self, content: bytes) -> None:
        """Create the folder if it is missing, and write the mark.

        Raises Refused, with the name of a file of another program, if there is one but no mark, and if the
        mark has another content; CannotWrite or ReadWriteError.
        """
        self.make_folder()
        others = [name for name in self.names() if not publishing.TEMPORARY_NAME.fullmatch(name)]
        if others and self._mark not in others:
            expected = f"a new or an empty folder, or one with {self._mark}; nothing was changed"
            raise Refused(path=self.path_of(others[0]), found="a file of somebody else", expected=expected)
        what = "the same settings"
        if self._mark in others:
            self._refuse_other(self._mark, content, what)
        else:
            self.publish_equal(self._mark, content, what=what)

    def remember(self, name: str, stamp: FileStamp) -> None:
        """Record a file that was published. If the line is lost, a later run writes the file again."""
        line = {"name": name, "num_bytes": stamp.num_bytes, "sha256": stamp.sha256}
        with files.errors_named(self.path_of(_RECORD)):
            self.append(_RECORD, json.dumps(line).encode() + b"\n")

    def remembered(self) -> dict[str, FileStamp]:
        """Return the stamps of files by name, as they were written last. Lines that were cut are ignored."""
        stamps: dict[str, FileStamp] = {}
        with contextlib.suppress(*files.NOT_THERE):
            for line in self.lines(_RECORD):
                with contextlib.suppress(msgspec.MsgspecError, ValueError):
                    written = _WRITTEN_LINE.decode(line)
                    stamps[written.name] = FileStamp(num_bytes=written.num_bytes, sha256=written.sha256)
        return stamps

    def is_as_written(self, name: str, remembered: Mapping[str, FileStamp]) -> bool:
        """Return whether a file is as an earlier run wrote it. Reads all of it."""
        stamp = remembered.get(name)
        if stamp is None or self.size_of(name) != stamp.num_bytes:
            return False
        try:
            return self.stamp_of(name) == stamp
        except files.NOT_THERE:  # removed since
            return False


class _WrittenLine(msgspec.Struct):
    """A line of the record."""

    name: str
    num_bytes: int
    sha256: str


_WRITTEN_LINE = msgspec.json.Decoder(_WrittenLine)


def claim_file(path: Path, ours: re.Pattern[bytes]) -> None:
    """Check that a file may be replaced: the command wrote it, as ``ours`` matches where its own begin.

    Also remove what killed runs left beside it.

    Raises Refused if another program wrote it, CannotWrite if it is a folder, and BrokenShard if it is a
    link or no regular file.
    """
    folder = Folder(path.parent, writable=_NO_NAME)
    if folder.is_subfolder(path.name):
        raise CannotWrite(path=path, found="a folder", expected="a file, or a name that is free")
    beginning = folder.read_beginning(path.name, _BEGINNING_BYTES)
    if beginning and ours.match(beginning) is None:
        expected = "a name for a new file, or a file that this command wrote"
        advice = "move it away"
        raise Refused(path=path, found="another file, which stays", expected=expected, advice=advice)
    remove_unfinished(path)


def remove_unfinished(path: Path) -> None:
    """Remove old temporaries that killed runs left beside a file or folder that they did not finish."""
    folder = Folder(path.parent, writable=_NO_NAME)
    folder.remove_temporaries(path.name, older_than_s=publishing.STALE_AFTER_S)
