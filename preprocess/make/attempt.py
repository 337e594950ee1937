"""Attempts at a shard: how those that run at the same time see each other, and who removes whose files.

Several attempts may make one shard: Slurm has started a task again whose first process still runs, or two
parts of ``run`` have taken the same shard. Nobody locks, because they write equal bytes. The protocol:

1. An attempt creates the mark ``.shard-N.begun.tmp``, and removes it when it ends. That of a killed attempt
   stays. An attempt that finds a mark is a *rival*: it creates ``.shard-N.second.tmp``, so that the first one
   learns of it, and removes temporary files of the shard that are older than 24 hours.
2. An attempt that has published the manifest has won. If it is a rival or has one, it removes all temporary
   files and marks of the shard, ``end_other_attempts``. Nobody can tell whether the others still run.
3. A loser that still runs gets a ReadWriteError or a CannotWrite at the next use of a temporary file's name.
   ``Worker.run_shard`` then finds the winner's manifest, and returns it in place of the error; with --again
   it raises the error, because the manifest may be the old one. What the loser renamed before replaced equal
   bytes.
4. An attempt at a shard that is done removes what killed attempts left, ``clean_if_done``, and so does
   ``run``, ``clean_done_shards``.

``--again`` makes a shard whose old manifest stays until the new one replaces it. If it is killed in between,
the old manifest stands over a new tar. That is safe: the new tar has the bytes that the plan demands. If they
are not those of the old manifest, the size differs, or ``verify`` notices the hash. A finding of ``verify``
names the hash of the manifest, so it stands until that is replaced.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Collection, Iterable

from shardprep import publishing
from shardprep.errors import CannotWrite
from shardprep.format import done, names
from shardprep.format.data_folder import SHARD_FOLDERS, DataFolder
from shardprep.format.done import done_manifest
from shardprep.format.manifest import Manifest


def marks_of(shard_id: int) -> tuple[str, str]:
    """Return the names of the two marks, which show other attempts at a shard without a listing of DATA."""
    stem = f".{names.shard_name(shard_id)}"
    return f"{stem}.begun.tmp", f"{stem}.second.tmp"


class AttemptMark:
    """The mark of an attempt that runs in this process. ``release`` removes it, as does the object's end."""

    def __init__(self, folder: DataFolder, shard_id: int) -> None:
        self._folder = folder
        self._shard_id = shard_id
        self._begun, self._second = marks_of(shard_id)
        self._own = [self._begun]  # before it is created: a signal may come in between
        # A finalizer, in case a second signal interrupts the cleanup.
        self.release = weakref.finalize(self, _remove_marks, folder, self._own)
        self.is_rival = False  # whether another attempt began before this one

    def make(self) -> None:
        """Create the mark. If it cannot be created, the error of the tar will say why."""
        try:
            self._folder.create(self._begun)
        except FileExistsError:
            self.is_rival = True
            self._own.clear()
            with contextlib.suppress(OSError, CannotWrite):  # a third attempt finds it
                self._folder.create(self._second)
            _remove_temporaries(self._folder, [self._shard_id], older_than_s=publishing.STALE_AFTER_S)
        except (OSError, CannotWrite):
            pass

    def others_came(self) -> bool:
        """Return whether another attempt has begun before this one, or meanwhile."""
        return self.is_rival or self._folder.status_of(self._second) is not None


def _remove_marks(folder: DataFolder, marks: list[str]) -> None:
    for mark in marks:
        with contextlib.suppress(OSError, CannotWrite):
            folder.remove(mark)


def end_other_attempts(folder: DataFolder, shard_id: int) -> None:
    """Remove the temporary files and marks of all attempts at a shard that is done, also of running ones."""
    _remove_temporaries(folder, [shard_id])


def _remove_temporaries(folder: DataFolder, shard_ids: Iterable[int], *, older_than_s: float = 0) -> None:
    """Remove the temporary files and marks of attempts at some shards, with one listing of the folder."""
    stems = map(names.shard_name, shard_ids)
    folder.remove_temporaries(*stems, older_than_s=older_than_s, subfolders=SHARD_FOLDERS)


def clean_if_done(folder: DataFolder, plan_id: str, shard_id: int) -> Manifest | None:
    """Remove what attempts at a shard left if it is done. Return its manifest, or None.

    Looks for marks alone, so what an attempt left without them stays. Raises as ``done_manifest``.
    """
    manifest = done_manifest(folder, shard_id, plan_id)
    if manifest and any(folder.status_of(mark) is not None for mark in marks_of(shard_id)):
        end_other_attempts(folder, shard_id)
    return manifest


def clean_done_shards(folder: DataFolder, plan_id: str, shard_ids: Collection[int]) -> list[int]:
    """Remove what attempts left at the shards that are done, with one listing. Return the other shards.

    Raises as ``done_manifest``.
    """
    findings = done.read_findings(folder, plan_id)
    made = [number for number in shard_ids if done_manifest(folder, number, plan_id, findings)]
    if made:
        _remove_temporaries(folder, made)
    return sorted({*shard_ids} - {*made})
