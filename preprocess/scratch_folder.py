"""A folder for what planning tries out, gone afterwards."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from preprocess.shard_format import CannotWrite


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """An empty folder under TMPDIR for the time of a ``with``. Raises CannotWrite where none can be made."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        raise CannotWrite(
            f"no scratch folder can be made: {error.strerror}; let TMPDIR name a folder with some space"
        ) from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
