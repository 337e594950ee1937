"""Ids as ``sbatch --array``, ``--shards`` and ``--ranks`` write them: ``0-2,5,7-9``."""

from __future__ import annotations

import re
from collections.abc import Iterable

_PART = re.compile(r"\s*([0-9]{1,7})(?:-([0-9]{1,7}))?\s*")


def id_ranges(ids: Iterable[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``0-2,5``, in ascending order; nothing for none."""
    parts: list[list[int]] = []
    for number in sorted(ids):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def ids_of_ranges(text: str, *, end: int = 10**7) -> list[int]:
    """``0-2,5`` -> [0, 1, 2, 5], each below ``end``, in the order written; one named twice comes twice.

    Raises ValueError for anything else, and for more than ``end`` ids. A range that runs backwards is empty.
    """
    ids: list[int] = []
    for part in text.split(","):
        match = _PART.fullmatch(part)
        last = int(match[2] or match[1]) if match else end
        if not match or last >= end or len(ids) > end:
            raise ValueError(f"{text[:40]!r} is no list of ids such as 0-2,5")
        ids += range(int(match[1]), last + 1)
    return ids
