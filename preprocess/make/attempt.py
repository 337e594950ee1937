"""Attempts at a shard: their marks and temporary files, and whether the shard is done."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterable

from shardprep.errors import CannotWrite
from shardprep.format import done, names
from shardprep.format.data_folder import SHARD_FOLDERS, DataFolder
from shardprep.format.done import done_manifest
from shardprep.format.manifest import Manifest


def marks_of(shard_id: int) -> tuple[str, str]:
    """Return the names of two marks, which show other attempts at a shard without a listing of DATA.

    The first exists during an attempt, and stays if that is killed. An attempt that finds it adds the second.
    """
    stem = f".{names.shard_name(shard_id)}"
    return f"{stem}.begun.tmp", f"{stem}.again.tmp"


def make_mark(folder: DataFolder, mark: str) -> bool:
    """Create a mark. Return False if it exists. If it cannot be created, the tar's error will say why."""
    try:
        folder.create(mark)
    except (OSError, CannotWrite) as error:
        return not isinstance(error, FileExistsError)
    return True


def remove_marks(folder: DataFolder, marks: list[str]) -> None:
    """Remove the marks of an attempt. Runs as a finalizer, in case a second signal interrupts the cleanup."""
    for mark in marks:
        with contextlib.suppress(OSError, CannotWrite):
            folder.remove(mark)


def remove_temporaries_of(shard_ids: Iterable[int], folder: DataFolder, *, older_than_s: float = 0) -> None:
    """Remove the temporary files and marks of attempts at some shards, with one listing of the folder."""
    stems = map(names.shard_name, shard_ids)
    folder.remove_temporaries(*stems, older_than_s=older_than_s, subfolders=SHARD_FOLDERS)


def finished_manifest(folder: DataFolder, plan_id: str, shard_id: int) -> Manifest | None:
    """Return the manifest of a shard if it is done, and remove temporary files of other attempts at it."""
    manifest = done_manifest(folder, shard_id, plan_id)
    if manifest and any(folder.status_of(mark) is not None for mark in marks_of(shard_id)):
        remove_temporaries_of([shard_id], folder)
    return manifest


def missing_shards(folder: DataFolder, plan_id: str, shard_ids: Collection[int]) -> list[int]:
    """Return the shards that are not done. Remove temporary files of those that are, with one listing."""
    findings = done.read_findings(folder, plan_id)
    made = [number for number in shard_ids if done_manifest(folder, number, plan_id, findings)]
    if made:
        remove_temporaries_of(made, folder)
    return sorted({*shard_ids} - {*made})
