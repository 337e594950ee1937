"""A folder for what planning writes and does not keep."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from shardprep import errors


@contextlib.contextmanager
def scratch_folder() -> Iterator[Path]:
    """Create an empty folder under TMPDIR, and remove it at the end of the block. Raises CannotWrite."""
    try:
        folder = Path(tempfile.mkdtemp(prefix="shardprep-"))
    except OSError as error:
        found = f"no scratch folder can be created: {error.strerror}"
        raise errors.CannotWrite(found=found, expected="a folder with some space in TMPDIR") from None
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # rmtree does not ignore errors of close()
            shutil.rmtree(folder, ignore_errors=True)
