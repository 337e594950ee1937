"""The layouts that files really have, and how evenly they lie on the OSTs.

``lfs getstripe`` without options names for each file its components and the OSTs of their stripes: one call
for 256 files. A file's layout is its own from its first byte on, whatever its folder's default says later.
"""

from __future__ import annotations

import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from lustre.layout import Layout, parse_layout
from lustre.lfs import file_system_of, run_lfs
from lustre.osts import UNKNOWN, count_osts_if_told
from shardprep.errors import LustreError

NOT_KNOWN = -1
FILES_A_CALL = 256  # the longest paths of so many fit into one argument list
_FAR_MORE = 2  # times its share, and one file more, is beyond the chance of a few files
_CHANCE = 3  # files on the only OST that is seen, where nobody tells how many there are


def read_file_layouts(folder: Path, names: Sequence[str]) -> list[Layout | None] | None:
    """The layout of each file; None where the folder is not on Lustre.

    None for a file without a layout: a symbolic link, or one that was never written to. One call of lfs
    takes 256 files, and asks the metadata server once per file. Raises LustreError where lfs is missing or
    fails, as it does for a file that is not there, does not answer, or prints something else.
    """
    mount = file_system_of(folder)
    if mount is None or not mount.is_lustre:
        return None
    real = os.path.realpath(folder)
    paths = [f"{real}/{name}" for name in names]
    found: list[Layout | None] = []
    for first in range(0, len(paths), FILES_A_CALL):
        asked = paths[first : first + FILES_A_CALL]
        result = run_lfs(["getstripe", *asked[:-1]], asked[-1])
        if result.exit_code:
            raise LustreError(
                f"`lfs getstripe` of {len(asked)} files of {folder} {result.failure}; look at the files, and "
                "at `lfs check servers`"
            )
        found += [_layout_of(part) for part in split_by_file(result.stdout, asked)]
    return found


def split_by_file(output: str, paths: Sequence[str]) -> list[str]:
    """What ``lfs getstripe`` said of each path; it names them in their order, each at a line's beginning.

    Raises LustreError where one is missing.
    """
    places: list[tuple[int, int]] = []  # where its line begins, and where what is said of it begins
    at = 0
    for path in paths:
        match = re.compile(rf"^{re.escape(path)}(?=$| has no stripe info$)", re.MULTILINE).search(output, at)
        if match is None:
            raise LustreError(
                f"`lfs getstripe` of {len(paths)} files printed {output.strip()[:200]!r}, "
                f"expected the layouts of {paths[0]} and on; is this `lfs` a site's wrapper?"
            )
        places.append((match.start(), match.end()))
        at = match.end()
    ends = [*(start for start, _ in places[1:]), len(output)]
    return [output[begin:end] for (_, begin), end in zip(places, ends, strict=True)]


def _layout_of(said: str) -> Layout | None:
    return None if said.strip() == "has no stripe info" else parse_layout(said)


def first_ost(layout: Layout | None) -> int:
    """The OST of a file's first stripe; NOT_KNOWN for a file without one.

    Of a progressive layout the first component that lies on an OST counts: one on the metadata server has
    none, and one not yet written to says -1.
    """
    parts = layout.components if layout else ()
    return next((part.start_ost for part in parts if not part.is_on_mdt and part.start_ost >= 0), NOT_KNOWN)


@dataclass(frozen=True, kw_only=True, slots=True)
class Balance:
    """How files lie on the OSTs. Bytes are shared evenly among the stripes of a component."""

    num_files: int
    layouts: tuple[tuple[str, int], ...]  # in words, and how many files have it; the most frequent first
    bytes_by_ost: dict[int, int]
    files_by_ost: dict[int, int]
    num_osts: int  # that files here could lie on; 0: unknown
    without_layout: int = 0

    @property
    def most_loaded(self) -> int:
        """The OST with the most bytes. There is at least one."""
        return max(self.bytes_by_ost, key=lambda ost: (self.bytes_by_ost[ost], -ost))

    @property
    def times_the_mean(self) -> float:
        """Bytes of the most loaded OST against the mean of all that there are."""
        mean = sum(self.bytes_by_ost.values()) / max(self.num_osts, len(self.bytes_by_ost))
        return self.bytes_by_ost[self.most_loaded] / max(1e-9, mean)

    @property
    def is_lopsided(self) -> bool:
        """Whether one OST has far more files than its share, by more than chance makes of a few files."""
        most = max(self.files_by_ost.values(), default=0)
        if self.num_osts == UNKNOWN and len(self.files_by_ost) == 1:
            return most > _CHANCE
        share = math.ceil(sum(self.files_by_ost.values()) / max(1, self.num_osts, len(self.files_by_ost)))
        return most > _FAR_MORE * share + 1

    def as_json(self) -> dict[str, Any]:
        """The same for programs; counts by OST in the order of their numbers."""
        return {
            "num_shards": self.num_files,
            "without_layout": self.without_layout,
            "layouts": [{"layout": text, "num_shards": number} for text, number in self.layouts],
            "num_osts": self.num_osts or None,
            "osts": [
                {"ost": ost, "num_shards": self.files_by_ost[ost], "num_bytes": self.bytes_by_ost[ost]}
                for ost in sorted(self.bytes_by_ost)
            ],
            "most_loaded_times_the_mean": round(self.times_the_mean, 3) if self.bytes_by_ost else None,
            "is_lopsided": self.is_lopsided,
        }

    def lines(self) -> list[str]:
        """For a person: the layouts, the balance, and a warning where one OST has far more than its share."""
        lines = [f"{number} of {self.num_files} shards have {text}" for text, number in self.layouts]
        if self.without_layout:
            lines.append(f"{self.without_layout} of {self.num_files} shards have no layout (symbolic links?)")
        if not self.bytes_by_ost:
            return lines
        of = f" of {self.num_osts}" if self.num_osts else ""
        ost = self.most_loaded
        lines.append(
            f"they lie on {len(self.bytes_by_ost)}{of} OSTs; OST {ost} has the most: "
            f"{self.files_by_ost[ost]} shards, {self.bytes_by_ost[ost] / 1e9:.3g} GB, "
            f"{self.times_the_mean:.3g} times the mean"
        )
        if self.is_lopsided:
            lines.append(
                f"warning: OST {ost} has far more than its share: it will serve most reads. Was a start "
                "named (lfs setstripe -i, -o)? `python -m lustre show` tells, and how to move shards"
            )
        return lines


def share_out(
    layouts: Sequence[Layout | None], sizes: Sequence[int], num_osts: int, *, max_layouts: int = 4
) -> Balance:
    """How files of these layouts and sizes (bytes) lie on the OSTs. Pure."""
    texts = Counter(_kind_text(layout) for layout in layouts if layout)
    shown = texts.most_common(max_layouts)
    if rest := sum(texts.values()) - sum(number for _, number in shown):
        shown.append(("other layouts", rest))
    bytes_by_ost: Counter[int] = Counter()
    files_by_ost: Counter[int] = Counter()
    for layout, num_bytes in zip(layouts, sizes, strict=True):
        held = _bytes_by_ost(layout, num_bytes) if layout else {}
        bytes_by_ost.update(held)
        files_by_ost.update(dict.fromkeys(held, 1))
    return Balance(
        num_files=len(layouts),
        layouts=tuple(shown),
        bytes_by_ost=dict(bytes_by_ost),
        files_by_ost=dict(files_by_ost),
        num_osts=num_osts,
        without_layout=sum(layout is None for layout in layouts),
    )


def _bytes_by_ost(layout: Layout, num_bytes: int) -> dict[int, int]:
    held: Counter[int] = Counter()
    for part in layout.of_file(num_bytes):
        osts = part.osts or ((part.start_ost,) if part.start_ost >= 0 else ())
        end = num_bytes if part.end_bytes is None else min(num_bytes, part.end_bytes)
        for ost in osts:
            held[ost] += (end - part.start_bytes) // len(osts)
    return dict(held)


def _kind_text(layout: Layout) -> str:
    """The layout without the places, which differ from file to file."""
    parts = tuple(replace(part, start_ost=NOT_KNOWN, osts=()) for part in layout.components)
    return replace(layout, components=parts).text()


def balance_of(folder: Path, layouts: Sequence[Layout | None], sizes: Sequence[int]) -> Balance:
    """How files of these layouts and sizes (bytes) lie on the OSTs that a file of ``folder`` can lie on."""
    mount = file_system_of(folder)
    pools = {layout.pool for layout in layouts if layout}
    pool = pools.pop() if len(pools) == 1 else ""
    num_osts = count_osts_if_told(folder, mount, pool) if mount else UNKNOWN
    return share_out(layouts, sizes, num_osts)


def read_balance(folder: Path, names: Sequence[str], sizes: Sequence[int]) -> Balance | None:
    """How these files of a folder lie on the OSTs; None off Lustre. Raises LustreError as above."""
    layouts = read_file_layouts(folder, names)
    return None if layouts is None else balance_of(folder, layouts, sizes)
