"""Layouts as values, and as ``lfs getstripe`` prints them.

Lustre 2.15 and 2.17 print a layout differently: YAML is indented in two ways, components are a list or a
mapping, and keys have the prefix ``lmm_`` for files alone. The few keys that are needed stand one per line in
all forms, or on a single line in the classic one, so they are read by key in order and no YAML is parsed.

A folder's default may name where its files begin (``lfs setstripe -i 3`` or ``-o 1,3``): then every file
begins there. A file's own layout always says where it begins.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lustre.lfs import kind_of, run_lfs
from shardprep.errors import LustreError
from shardprep.format.names import id_ranges

ALL_OSTS = -1
ANY_OST = -1  # as the place to start: the server chooses
FILE_SYSTEM_DEFAULT = 0  # as a stripe count: whatever the file system gives
# A value never ends in a colon: where one is empty (`pattern:` of 2.17) the next word is the next key.
_KEY_VALUE = re.compile(r"([\w.]+):[ \t]*([^\s:]*)(?=\s|$)")
_OBJECT_ROW = re.compile(r"\t\s*(\d+)\t\s*\d+\t\s*0x[0-9a-f]+\t.*")  # of the classic form, below `obdidx`
_UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """How the bytes of one extent of a file are spread; a plain layout is one component for all bytes."""

    start_bytes: int = 0
    end_bytes: int | None = None  # None: to the end of the file
    stripe_count: int  # ALL_OSTS for every target; -N of 2.17: N stripes on every target (overstriped)
    stripe_size_bytes: int  # 0: not told
    pattern: str = ""  # raid0, mdt (the data lies on the metadata server), ... ; "" or "0" if inherited
    pool: str = ""
    start_ost: int = ANY_OST
    osts: tuple[int, ...] = ()  # of a file: those of its stripes; of a folder: those named for its files
    extension_bytes: int = 0  # more than 0: this piece grows by so much, as OSTs have room (SEL)

    @property
    def is_on_mdt(self) -> bool:
        """Whether it has no stripe at all."""
        return self.pattern == "mdt"

    @property
    def is_overstriped(self) -> bool:
        """Whether one OST may have several stripes (``lfs setstripe -C``)."""
        return "overstriped" in self.pattern or self.stripe_count < ALL_OSTS

    @property
    def place(self) -> str:
        """Where stripes lie, for a person: ``on OSTs 1, 3-5``; empty where the server chooses."""
        if self.osts:
            return f"on OST{'s' * (len(set(self.osts)) > 1)} {id_ranges(set(self.osts)).replace(',', ', ')}"
        return "" if self.start_ost == ANY_OST or self.is_on_mdt else f"starting on OST {self.start_ost}"

    def text(self) -> str:
        """For a person: ``4 stripes of 1 MiB``."""
        if self.is_on_mdt:
            return "on the metadata server"
        if self.extension_bytes:
            return f"grown by {size_text(self.extension_bytes)} at a time while OSTs have room (SEL)"
        size = f" of {size_text(self.stripe_size_bytes)}" if self.stripe_size_bytes else ""
        over = " (overstriped: several on one OST)" if self.is_overstriped else ""
        pool = f" in pool {self.pool}" if self.pool else ""
        return f"{self._number()}{size}{over}{pool}{f', {self.place}' if self.place else ''}"

    def _number(self) -> str:
        if self.stripe_count == FILE_SYSTEM_DEFAULT:
            return "the file system's default number of stripes"
        if self.stripe_count == ALL_OSTS:
            return "a stripe on every OST"
        if self.stripe_count < ALL_OSTS:
            return f"{-self.stripe_count} stripes on every OST"
        return f"{self.stripe_count} stripe{'s' * (self.stripe_count != 1)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a file, or the default that a directory gives to new ones."""

    components: tuple[Component, ...]
    is_composite: bool

    @property
    def is_inherited(self) -> bool:
        """Whether a directory surely has no default of its own.

        Where the file system's root has a default, lfs prints that for a folder without one, and the two
        cannot be told apart.
        """
        return not self.is_composite and self.components[0].pattern in {"", "0"}

    @property
    def pool(self) -> str:
        """The pool of all components that have stripes; empty where they have none, or several."""
        pools = {part.pool for part in self.components if not part.is_on_mdt}
        return pools.pop() if len(pools) == 1 else ""

    @property
    def fixed_place(self) -> str:
        """Where a directory puts every file, for a person; empty where the server chooses."""
        return next((part.place for part in self.components if part.place), "")

    @property
    def mirrors(self) -> list[tuple[Component, ...]]:
        """The components of each mirror: a new one begins at byte 0 again."""
        starts = [number for number, part in enumerate(self.components) if not part.start_bytes]
        ends = [*starts[1:], len(self.components)]
        return [self.components[start:end] for start, end in zip(starts, ends, strict=True)]

    def of_file(self, num_bytes: int) -> list[Component]:
        """The components in which a file of so many bytes has any."""
        return [part for part in self.components if part.start_bytes < max(1, num_bytes)]

    def num_objects(self, num_bytes: int, num_osts: int) -> int:
        """On how many OSTs (counted once a stripe) a file of so many bytes has an object; 0 OSTs: unknown."""
        return sum(_num_stripes(part, num_osts) for part in self.of_file(num_bytes))

    def text(self) -> str:
        """For a person, on one line."""
        if not self.is_composite:
            return f"plain: {self.components[0].text()}"
        texts = [_extents_text(parts) for parts in self.mirrors]
        if len(texts) == 1:
            return f"progressive (PFL): {texts[0]}"
        return f"{len(texts)} mirrors, each file that many times: {'; '.join(texts)}"


def _num_stripes(part: Component, num_osts: int) -> int:
    if part.is_on_mdt or part.extension_bytes:
        return 0
    if part.stripe_count < 0:
        return -part.stripe_count * max(1, num_osts)
    most = part.stripe_count if part.is_overstriped or not num_osts else num_osts
    return max(1, min(part.stripe_count, most))


def _extents_text(parts: tuple[Component, ...]) -> str:
    ends = (part.end_bytes for part in parts)
    reaches = ["from there on" if end is None else f"up to {size_text(end)}" for end in ends]
    return ", ".join(f"{part.text()} {reach}" for part, reach in zip(parts, reaches, strict=True))


def read_layout(path: Path) -> Layout:
    """The layout of a file, or what a directory gives to new files. ``path`` stands on Lustre."""
    is_folder = kind_of(path) == "folder"
    result = run_lfs(["getstripe", *(["-d"] if is_folder else []), "-y"], path)
    return parse_layout(result.checked("look at the path, and at `lfs check servers`"))


def parse_layout(output: str) -> Layout:
    """Read what ``lfs getstripe`` printed, with or without ``-d`` and ``-y``, of one path.

    Raises LustreError where the output names no stripe count, or holds a value that is no number.
    """
    if output.rstrip().endswith("has no stripe info"):
        raise LustreError(
            f"lfs getstripe says {output.strip()[-200:]!r}: it has no layout, as a symbolic link and a file "
            "that was never written to have none; look at what the link points to"
        )
    plain, components = _values(output)
    try:
        parts = tuple(_component(values) for values in components or [plain])
    except (KeyError, ValueError) as error:
        raise LustreError(
            f"lfs getstripe printed {output.strip()[:200]!r}, expected stripe_count, stripe_size ({error}); "
            "is this `lfs` a site's wrapper? Report it with the output of `lfs --version`"
        ) from None
    return Layout(components=parts, is_composite=bool(components))


def _values(output: str) -> tuple[dict[str, str], list[dict[str, str]]]:
    """The values before the first component, and those of each; ``osts`` are numbers with blanks between."""
    plain: dict[str, str] = {}
    components: list[dict[str, str]] = []
    for line in output.split("\n"):
        if line.lstrip().startswith("/"):  # the path; it may hold anything
            continue
        row = _OBJECT_ROW.fullmatch(line)
        found = [("l_ost_idx", row[1])] if row else _KEY_VALUE.findall(line)
        for key, value in found:
            if key == "lcme_id":
                components.append({})
            target = components[-1] if components else plain
            if key == "l_ost_idx":
                target["osts"] = f"{target.get('osts', '')} {value.rstrip(',')}"
            else:  # the first value wins: an object further down does not change a component
                target.setdefault(key.removeprefix("lmm_").removeprefix("lcme_"), value)
    return plain, components


def _component(values: dict[str, str]) -> Component:
    """An empty number (a client without Lustre's parameters) is one that is not told."""
    end = values.get("extent.e_end", "EOF")
    pattern = values.get("pattern", "")
    is_extension = "extension" in values.get("flags", "")
    size = int(values.get("extension_size" if is_extension else "stripe_size") or "0")
    return Component(
        start_bytes=int(values.get("extent.e_start", "0")),
        end_bytes=None if end == "EOF" else int(end),
        stripe_count=int(values["stripe_count"] or "0"),
        stripe_size_bytes=0 if is_extension else size,
        pattern=pattern,
        pool=values.get("pool", ""),
        start_ost=ANY_OST if pattern == "mdt" else int(values.get("stripe_offset") or "-1"),
        osts=tuple(int(number) for number in values.get("osts", "").split()),
        extension_bytes=size if is_extension else 0,
    )


def size_text(num_bytes: int) -> str:
    """``4 MiB``: the largest binary unit that leaves a whole number."""
    for unit, size in _UNITS:
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}iB"
    return f"{num_bytes} bytes"


def size_flag(num_bytes: int) -> str:
    """``4M``: the same, as ``parse_size`` reads it."""
    return size_text(num_bytes).replace(" bytes", "").replace(" ", "").replace("iB", "")
