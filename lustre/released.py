"""Which inputs are released: their data lie in an archive (HSM, S3 behind FSx), for which a first read waits.

Lustre knows it by a flag of each file, which ``lfs hsm_state`` prints. Nothing is restored here, because that
may fill the file system and cost money.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Sequence
from pathlib import Path

from lustre.lfs import run_lfs, why_not_usable
from shardprep.console import counted, quoted, short_bytes, short_time
from shardprep.errors import LustreError
from shardprep.files import size_of_file

MAX_ASKED = 1000  # files of one call, spread evenly; each costs a request to a metadata server
_RELEASED = 0x4  # HS_RELEASED of lustre_user.h
_STATE = re.compile(r"(.*): \(0x([0-9a-f]{8})\)[^()]*")
_RESTORED_BYTES_PER_S = 1e9  # an assumption: from S3 by FSx; tape is slower
_UNKNOWN = "note: whether inputs are released to an archive (HSM) is unknown"
_AT_ONCE = 50  # files of one hsm_restore, which takes 52 at most


def released_lines(folder: Path, paths: Sequence[Path]) -> list[str]:
    """Return a warning if some of the inputs in a folder are released, and what to type, or [].

    One call of lfs and one stat for each of at most ``MAX_ASKED`` files. Returns [] off Lustre or without
    lfs. Never raises.
    """
    if not paths or why_not_usable(folder):
        return []
    asked = paths[:: -(-len(paths) // MAX_ASKED)]
    try:
        result = run_lfs("hsm_state", *asked)
    except LustreError as error:
        return [f"{_UNKNOWN}: {error}"]
    sizes = {os.path.realpath(path): size_of_file(path) or 0 for path in asked}
    is_released = _parse_states(result.stdout, sizes)
    if not is_released:
        why = (result.stderr.strip() or "no message").splitlines()[0]
        return [f"{_UNKNOWN}: lfs hsm_state: {why}"]
    num_released = sum(is_released.values())
    if not num_released:
        return []
    num_bytes = sum(sizes[path] for path, released in is_released.items() if released)
    share = len(paths) / len(is_released)
    about = "" if len(paths) == len(is_released) else "about "
    found = f"{about}{round(num_released * share):,} of {counted(len(paths), 'input')}"
    num_bytes = round(num_bytes * share)
    took = short_time(max(1, round(num_bytes / _RESTORED_BYTES_PER_S)))
    restore = f"find {quoted(folder)} -type f -print0 | xargs -0 -n {_AT_ONCE} lfs hsm_restore"
    return [
        (
            f"warning: {found} are released to an archive (S3, tape): the first read of each waits for it. "
            f"{short_bytes(num_bytes)} take about {took} at {_RESTORED_BYTES_PER_S / 1e9:g} GB/s, more from "
            f"tape. To restore all at once: {restore}"
        )
    ]


def _parse_states(output: str, paths: Container[str]) -> dict[str, bool]:
    """Return path -> whether it is released, for the given ones of which lfs printed a line."""
    found = {}
    # A name may contain a line break, so that its line is no line of lfs. Such files are left out.
    for line in output.split("\n"):
        match = _STATE.fullmatch(line)
        if match and match[1] in paths:
            found[match[1]] = bool(int(match[2], 16) & _RELEASED)
    return found
