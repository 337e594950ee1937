"""Find the current files of tables that keep former versions of their rows: Delta, Hudi, Iceberg, datasets.

A folder that other tools wrote may have files that are no longer part of its data, or only part of a copy.
``former_files`` names those to leave out. If a table's own notes do not decide which files are current, the
table is refused: then its rows would be read twice, or not at all.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

from shardprep import files
from shardprep.command_line import needs
from shardprep.console import counted
from shardprep.errors import BadInput, ShardprepError, UsageError

_MAX_NOTE_BYTES = 256 << 20
_DELTA_LOG = "_delta_log"
_HUDI_NOTES = ".hoodie"
_ICEBERG_NOTES = "metadata"
_HUB_SNAPSHOTS = "snapshots"
_DATASETS_STATE = "state.json"


class _Undecided(Exception):
    """Which files are current cannot be determined. ``args``: why."""


class TableOfOthers(NamedTuple):
    """A folder in which another tool keeps a table."""

    folder: Path
    kind: str  # a key of ``_KINDS``
    below: str  # what paths in the table begin with in the listing: "", or "a/table/"
    inside: str  # path of the input folder in the table, if it is a part of it: "", or "day=1/"

    def path_of(self, listed: str) -> str | None:
        """Return the path in the table of a file in the listing, None if it is elsewhere."""
        if not listed.startswith(self.below):
            return None
        return self.inside + listed.removeprefix(self.below)


def kind_of_note(name: str) -> str | None:
    """Return the kind of the table that has a file or a folder of this name, None if it is no table's."""
    return name if name in _KINDS else None


def tables_around(input_dir: Path) -> list[TableOfOthers]:
    """Return the tables of which the input folder is a part, such as a partition."""
    folder = Path(os.path.abspath(input_dir))  # noqa: PTH100 - resolve() would follow links
    inside = ""
    tables: list[TableOfOthers] = []
    is_near = True  # all folders so far have names that partitions or parts of a table have
    while folder != folder.parent:
        is_near = is_near and ("=" in folder.name or folder.name in ("data", _HUB_SNAPSHOTS))
        kinds = [_HUDI_NOTES]  # its partitions may have any names
        if is_near:
            kinds += [_DELTA_LOG, _ICEBERG_NOTES]
        if folder.name == _HUB_SNAPSHOTS:
            kinds.append(_HUB_SNAPSHOTS)
        inside = f"{folder.name}/{inside}"
        folder = folder.parent
        tables += [TableOfOthers(folder, kind, "", inside) for kind in kinds if (folder / kind).is_dir()]
    return tables


def former_files(table: TableOfOthers, listed: Collection[str]) -> tuple[str, list[str]]:
    """Return why some of the ``listed`` files are no part of a table's current data, and these files.

    Raises BadInput if this cannot be decided, and OSError.
    """
    paths: dict[str, str] = {}  # path in the table -> in the listing
    for each in listed:
        path = table.path_of(each)
        if path is not None:
            paths[path] = each
    kind = _KINDS[table.kind]
    try:
        former = kind.find(table.folder, paths)
    except _Undecided as error:
        found = f"{kind.what} whose current files cannot be determined ({error})"
        raise BadInput(path=table.folder, found=found, expected=kind.expected) from None
    return kind.reason, [paths[path] for path in former]


def _json_of(path: Path) -> Any:
    try:
        return json.loads(files.read_regular(path, max_bytes=_MAX_NOTE_BYTES))
    except ValueError as error:
        raise _Undecided(f"{path.name}: {error}") from None


def _is_table_file(path: str) -> bool:
    return path.lower().endswith((".parquet", ".pq"))


# Delta. ------------------------------------------------------------------------------------------------


def _former_of_delta(folder: Path, paths: Mapping[str, str]) -> list[str]:
    """Return the files that the log of a Delta table does not name, or has removed."""
    log = folder / _DELTA_LOG
    first = 0  # number of the first commit to read
    commits = {int(path.stem): path for path in log.glob("*.json") if re.fullmatch(r"\d{20}", path.stem)}
    vectors: dict[str, Any] = {}  # path in the log -> its deletion vector, if it has one
    path = log  # the file that is read, for errors
    try:
        checkpoints = sorted(log.glob("*.checkpoint.parquet"))
        if 0 not in commits and checkpoints:
            from pyarrow.parquet import read_table

            path = checkpoints[-1]
            first = int(path.name.partition(".")[0]) + 1
            for added in read_table(path, columns=["add"], use_threads=False)["add"].to_pylist():
                if added is not None:
                    vectors[added["path"]] = added.get("deletionVector")
        numbers = sorted(number for number in commits if number >= first)
        if numbers != list(range(first, first + len(numbers))) or not (numbers or first):
            raise _Undecided("the log has gaps, or its checkpoint has several parts")
        for path in map(commits.__getitem__, numbers):
            for line in path.read_bytes().splitlines():
                action = json.loads(line)
                added = action.get("add")
                removed = action.get("remove")
                if added:
                    vectors[added["path"]] = added.get("deletionVector")
                elif removed:
                    vectors.pop(removed["path"], None)
    except ImportError:
        raise UsageError(needs("the checkpoint of a Delta table", "pyarrow")) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _Undecided(f"{path.name}: {error}") from None
    current = set[str]()
    for name, vector in vectors.items():
        if vector is not None:
            raise _Undecided(f"a deletion vector deletes rows of {name}")
        current.add(_path_of_delta(folder, name, paths))
    return [path for path in paths if _is_table_file(path) and path not in current]


def _path_of_delta(folder: Path, name: str, paths: Mapping[str, str]) -> str:
    """Return the path in the table of a file that its log names: a URI, relative to the table or absolute."""
    try:
        parts = urlsplit(name)
    except ValueError:
        raise _Undecided(f"the log names {name[:200]!r}") from None
    is_url = len(parts.scheme) > 1  # not C:
    # Some writers do not encode names, so the name itself may be the path.
    candidates = [unquote(parts.path)] if is_url else [unquote(name), name]
    if is_url and (parts.scheme != "file" or parts.netloc not in ("", "localhost")):
        raise _Undecided(f"the log names {name[:200]}, which is not in this folder")
    for candidate in candidates:
        path = candidate
        if candidate.startswith("/"):
            path = _below(folder, candidate)
        path = os.path.normpath(path)
        if path in paths or (not path.startswith("..") and (folder / path).exists()):
            return path
    raise _Undecided(f"the log names {name[:200]}, which is not in this folder")


def _below(folder: Path, path: str) -> str:
    """Return the path in a folder of an absolute path, or itself if it is elsewhere."""
    for root in (folder, folder.resolve()):
        if Path(path).is_relative_to(root):
            return str(Path(path).relative_to(root))
    real = Path(path).resolve()
    return str(real.relative_to(folder.resolve())) if real.is_relative_to(folder.resolve()) else f"../{path}"


# Hudi. -------------------------------------------------------------------------------------------------

# An instant that is completed: 20240101093000123.commit, since Hudi 1.0 with the time of its completion.
_HUDI_INSTANT = re.compile(r"(\d{14,17})(?:_\d{14,17})?\.(\w+)(\.requested|\.inflight)?")
_HUDI_FILE = re.compile(r"(.+)_[^_/]+_(\d{14,17})\.parquet")
# What adds files, or says nothing about them.
_HUDI_ACTIONS = {"commit", "clean", "rollback", "savepoint", "indexing", "restore"}


def _former_of_hudi(folder: Path, paths: Mapping[str, str]) -> list[str]:
    """Return the files of a copy-on-write table that a later commit replaced, or whose commit failed."""
    completed = set[str]()
    pending = set[str]()
    if not (folder / _HUDI_NOTES).is_dir():
        return []
    for timeline in (folder / _HUDI_NOTES, folder / _HUDI_NOTES / "timeline"):
        for name in files.names_in(timeline) if timeline.is_dir() else ():
            match = _HUDI_INSTANT.fullmatch(name)
            if match is None:
                continue
            if match[3] or match[2] in ("inflight", "requested"):
                pending.add(match[1])
                continue
            if match[2] not in _HUDI_ACTIONS:
                raise _Undecided(f"its timeline has {name}, which may replace or delete rows")
            if match[2] == "commit":
                completed.add(match[1])
    if not completed:
        raise _Undecided("its timeline has no commit")
    oldest = min(completed | pending)  # older ones are in the archive, so they are completed
    newest: dict[str, tuple[str, str]] = {}  # file group -> (instant, path)
    for path in filter(_is_table_file, paths):
        match = _HUDI_FILE.fullmatch(path)
        if match is None:
            raise _Undecided(f"{path} has no name of Hudi")
        if match[2] in completed or match[2] < oldest:
            newest[match[1]] = max(newest.get(match[1], ("", "")), (match[2], path))
    current = {path for _, path in newest.values()}
    return [path for path in paths if _is_table_file(path) and path not in current]


# Iceberg. ----------------------------------------------------------------------------------------------

_ICEBERG_NOTE = re.compile(r"(?:v(\d+)|(\d+)-[\w-]+)\.metadata\.json")


def _former_of_iceberg(folder: Path, paths: Mapping[str, str]) -> list[str]:
    """Return no file. Raises _Undecided unless the current snapshot has as many files as the folder.

    The lists of a snapshot's files are Avro, which no library here reads, but its summary counts them.
    """
    newest = -1
    note = ""
    for name in files.names_in(folder / _ICEBERG_NOTES):
        match = _ICEBERG_NOTE.fullmatch(name)
        if match is not None and int(match[1] or match[2]) > newest:
            newest = int(match[1] or match[2])
            note = name
    num_files = sum(map(_is_table_file, paths))
    if not note or not num_files:
        return []
    metadata = _json_of(folder / _ICEBERG_NOTES / note)
    try:
        number = metadata.get("current-snapshot-id")
        snapshots = [each for each in metadata.get("snapshots") or () if each["snapshot-id"] == number]
        totals = snapshots[0]["summary"] if snapshots else {}
        num_current = int(totals["total-data-files"])
        num_deletes = int(totals["total-delete-files"])
    except (AttributeError, KeyError, TypeError, ValueError):
        raise _Undecided(f"{note} does not count the files of the current snapshot") from None
    if num_deletes:
        raise _Undecided(f"{counted(num_deletes, 'file')} of deletes, which are not read")
    if num_current != num_files:
        raise _Undecided(f"the current snapshot has {num_current} of the {num_files} data files here")
    return []


# datasets and the hub. ---------------------------------------------------------------------------------


def _former_of_datasets(folder: Path, paths: Mapping[str, str]) -> list[str]:
    """Return the files of ``save_to_disk`` that a later call with another number of files left behind."""
    listed: Any = None
    with contextlib.suppress(_Undecided, ShardprepError, AttributeError):  # another tool's state.json
        listed = _json_of(folder / _DATASETS_STATE).get("_data_files")
    if not isinstance(listed, list):
        return []
    current = {each.get("filename") for each in listed if isinstance(each, dict)}
    return [path for path in paths if "/" not in path and path.endswith(".arrow") and path not in current]


_BUILD = re.compile(r"(.*/)?([0-9a-f]{32,64})/dataset_info\.json")


def refuse_several_builds(input_dir: Path, notes: Collection[str]) -> None:
    """Raise BadInput if the cache of datasets has several builds of one data set, each with all rows.

    ``notes``: the files dataset_info.json in the listing. A build is in a folder named by a hash.
    """
    builds: dict[str, list[str]] = {}  # folder of a data set -> hashes
    for note in notes:
        match = _BUILD.fullmatch(note)
        if match is not None:
            builds.setdefault(match[1] or "", []).append(match[2])
    for folder, hashes in sorted(builds.items()):
        if len(hashes) > 1:
            found = f"{len(hashes)} builds of a data set by datasets: {', '.join(sorted(hashes))}"
            expected = "one of these folders as --input_dir; each has all rows"
            raise BadInput(path=input_dir / folder, found=found, expected=expected)


def _former_of_hub(folder: Path, paths: Mapping[str, str]) -> list[str]:
    """Return the files of other revisions in the cache of a repository than the one of its only ref."""
    # folder/refs/main names the revision of folder/snapshots/REVISION.
    revisions = {path.split("/")[1] for path in paths if path.startswith(f"{_HUB_SNAPSHOTS}/")}
    refs = folder / "refs"
    if len(revisions) < 2 or not refs.is_dir():
        return []
    named: set[str] = set()
    for path in filter(Path.is_file, refs.rglob("*")):
        named.add(files.read_regular(path, max_bytes=1024).decode(errors="replace").strip())
    current = revisions & named
    if len(current) != 1:
        raise _Undecided(f"{len(revisions)} revisions, {len(current)} of which are named in refs/")
    before = f"{_HUB_SNAPSHOTS}/{current.pop()}/"
    return [path for path in paths if path.startswith(f"{_HUB_SNAPSHOTS}/") and not path.startswith(before)]


class _Kind(NamedTuple):
    """How the current files of a table are found."""

    reason: str  # why others are left out, in plan.json
    what: str
    find: Callable[[Path, Mapping[str, str]], list[str]]  # (folder, paths in it) -> those to leave out
    expected: str  # if the current files are unknown


# By the name of a file or a folder in the table.
_KINDS = {
    _DELTA_LOG: _Kind(
        "old version in a Delta table",
        "a Delta table",
        _former_of_delta,
        "its current rows, written from deltalake's DeltaTable(...).to_pyarrow_table()",
    ),
    _HUDI_NOTES: _Kind(
        "old version in a Hudi table",
        "a Hudi table",
        _former_of_hudi,
        "its current rows, written from Spark: spark.read.format('hudi').load(TABLE).write.parquet(RAW)",
    ),
    _ICEBERG_NOTES: _Kind(
        "old version in an Iceberg table",
        "an Iceberg table",
        _former_of_iceberg,
        "its current rows, written from pyiceberg's load_table(...).scan().to_arrow()",
    ),
    _DATASETS_STATE: _Kind(
        "file of an earlier save_to_disk",
        "a data set of save_to_disk",
        _former_of_datasets,
        "the files that it names",
    ),
    _HUB_SNAPSHOTS: _Kind(
        "other revision in a cache of the hub",
        "a cache of the hub",
        _former_of_hub,
        "one revision: pass its folder, .../snapshots/REVISION, as --input_dir",
    ),
}
