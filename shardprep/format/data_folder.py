"""The folder of a data set: the one way to its files, for reading, publishing, listing and removing.

Whatever lies in the folder of a data set is untrusted, because others may have written it. ``DataFolder``
reaches it by descriptors, see ``shardprep/folders.py``, and writes and removes only names of the format.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from shardprep.errors import Refused
from shardprep.files import FileStamp
from shardprep.folders import Folder
from shardprep.format import names
from shardprep.publishing import TEMPORARY_NAME

ATTEMPTS_FOLDER = "jobs/attempts"
LOGS_FOLDER = "jobs/logs"
JOBS_FOLDER = "jobs"
OVERLAP_FOLDER = "overlap"  # lists that are no part of the data set
# Subfolders in which files are written under temporary names first.
SUBFOLDERS = (
    names.QUARANTINE_DIR, names.IDS_DIR, names.DIGESTS_DIR, names.BLANKED_DIR, names.TOKENIZER_DIR,
    names.TRANSFORM_DIR, JOBS_FOLDER, ATTEMPTS_FOLDER, LOGS_FOLDER, OVERLAP_FOLDER,
)  # fmt: skip
SHARD_FOLDERS = (names.QUARANTINE_DIR, names.IDS_DIR, names.DIGESTS_DIR)  # of files in the manifests
_NAME = r"(?!\.\.?(?:/|\Z))[^/\0]+"  # of a file, not "." or ".."
_WRITABLE = re.compile(
    rf"""
    (?: plan | index | findings )\.json | excluded\.(?: keys | txt )
    | shard-\d{{5}} \. (?: tar | idx | json )
    | (?: quarantine | ids ) / shard-\d{{5}} \.jsonl | digests / shard-\d{{5}} \.digests
    | blanked / shard-\d{{5}} \.json
    | (?: tokenizer | jobs | jobs/attempts | jobs/logs | overlap ) / {_NAME}
    | transform (?: / {_NAME} )+
    | {"|".join(SUBFOLDERS)}
    | \.shard-\d{{5}} \. (?: begun | second ) \.tmp | \.(?:plan|index)\.json\.claimed\.tmp
    | verify  # a folder that exists under a temporary name only
    """,
    re.VERBOSE | re.ASCII,
)


class DataFolder(Folder):
    """The folder of a data set."""

    def __init__(self, path: Path | str) -> None:
        super().__init__(path, writable=_WRITABLE)


# ``plan`` and ``blank`` write these before the plan, and compare those that are there. If they are killed
# before plan.json is there, a plan of the same inputs and options goes on; one of others is refused.
_BEFORE_PLAN = frozenset(
    {
        names.TOKENIZER_DIR,
        names.BLANKED_DIR,
        names.EXCLUDED_NAME,
        names.EXCLUDED_LIST_NAME,
        names.TRANSFORM_DIR,
    }
)
OF_THIS_COMMAND = "the one that this command writes"
_NOTHING_REPLACED = frozenset({JOBS_FOLDER, OVERLAP_FOLDER, "verify"})  # in folders of these names


def refuse_foreign_files(folder: DataFolder, own: Mapping[str, FileStamp] | None = None) -> None:
    """Check that a folder without a plan has no files with names of the format, which would be replaced.

    ``own``: what the caller writes before the plan. Such a file may be there if it is equal, after a run that
    was stopped. Raises Refused for the first other file, unless the caller compares it.
    """
    present = folder.names()
    # The plan of another run may have come meanwhile, and shards of it. Publishing this one compares the two.
    has_plan = names.PLAN_NAME in present
    for name in present:
        if has_plan or name in _BEFORE_PLAN | _NOTHING_REPLACED or TEMPORARY_NAME.fullmatch(name):
            continue
        if _WRITABLE.fullmatch(name):
            found = f"it is there, but no {names.PLAN_NAME} that it belongs to"
            expected = "a folder without such files: move them away, restore the plan, or use another folder"
            raise Refused(path=folder.path_of(name), found=found, expected=expected)
    for name, stamp in (own or {}).items():
        if folder.status_of(name) is not None and folder.stamp_of(name) != stamp:
            found = "another file, which stays"
            expected = f"nothing, or {OF_THIS_COMMAND}"
            advice = "move it away, or name another folder"
            raise Refused(path=folder.path_of(name), found=found, expected=expected, advice=advice)
