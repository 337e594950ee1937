"""On which storage target (OST) each file of a folder begins."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from lustre.errors import LustreError
from lustre.lfs import run_lfs
from lustre.mounts import file_system_of

NOT_KNOWN = -1
FILES_A_CALL = 256  # the longest paths of so many fit into one argument list
_VALUE = re.compile(r"\s*lmm_(pattern|stripe_offset):\s*(\S+)\s*")


def first_osts(folder: Path, names: Sequence[str]) -> list[int] | None:
    """The OST of the first stripe of each file; None where the folder is not on Lustre.

    NOT_KNOWN for a file that has no stripe, as one that lies on the metadata server alone. One call of
    lfs for 256 files, which asks the metadata server once a file. Raises LustreError where lfs is missing
    or fails, as it does for a file that is not there, does not answer, or prints something else.
    """
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return None
    paths = [str((folder / name).absolute()) for name in names]
    found: list[int] = []
    for first in range(0, len(paths), FILES_A_CALL):
        asked = paths[first : first + FILES_A_CALL]
        result = run_lfs(["getstripe", *asked[:-1]], asked[-1])
        if result.exit_code:
            words = (result.stderr.strip() or result.stdout.strip() or "no message").splitlines()
            raise LustreError(
                f"`lfs getstripe` of {len(asked)} files of {folder} failed with exit code "
                f"{result.exit_code}: {words[0]}; look at the files, and at `lfs check servers`"
            )
        osts = parse_first_osts(result.stdout)
        if [path for path, _ in osts] != asked:
            raise LustreError(
                f"`lfs getstripe` of {len(asked)} files of {folder} printed {result.stdout.strip()[:200]!r}, "
                f"expected the layouts of {asked[0]} and on; is this `lfs` a site's wrapper?"
            )
        found += [ost for _, ost in osts]
    return found


def parse_first_osts(output: str) -> list[tuple[str, int]]:
    """Path and first OST of each file that ``lfs getstripe``, without options, printed.

    A file's part begins with its absolute path. Of a progressive layout the first component that lies on
    an OST counts: one on the metadata server (``mdt``) has none, and one not yet written to says -1.
    """
    found: list[tuple[str, int]] = []
    pattern = ""
    for line in output.split("\n"):
        if line.startswith("/"):
            found.append((line, NOT_KNOWN))
        elif found and (match := _VALUE.fullmatch(line)):
            path, ost = found[-1]
            if match[1] == "pattern":
                pattern = match[2]
            elif ost == NOT_KNOWN and pattern != "mdt" and match[2].isdigit():
                found[-1] = (path, int(match[2]))
    return found
