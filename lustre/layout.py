"""What ``lfs getstripe`` prints, as values: plain and progressive (PFL) layouts, both dialects.

Lustre 2.15 and 2.17 indent YAML differently, call components a list or a mapping, and prefix keys
with ``lmm_`` for files alone. The few keys needed are one a line in all of them, or on a single
line in the classic form, so they are read by key in order, which depends on none of that.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from lustre.byte_sizes import size_text
from lustre.errors import LustreError
from lustre.lfs import run_lfs

ALL_OSTS = -1
FILE_SYSTEM_DEFAULT = 0  # as a stripe count: whatever the file system gives
# A value never ends in a colon: where one is empty (`pattern:` of 2.17) the next word is the next key.
_KEY_VALUE = re.compile(r"([\w.]+):[ \t]*([^\s:]*)(?=\s|$)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """How the bytes of one extent of a file are spread; a plain layout is one component for all bytes."""

    start_bytes: int = 0
    end_bytes: int | None = None  # None: to the end of the file
    stripe_count: int  # ALL_OSTS for every target
    stripe_size_bytes: int
    pattern: str = ""  # raid0, mdt (the data lies on the metadata server), ... ; "" or "0" if inherited
    pool: str = ""

    def text(self) -> str:
        """For a person: ``4 stripes of 1 MiB``."""
        if self.pattern == "mdt":
            return "on the metadata server"
        if self.stripe_count == FILE_SYSTEM_DEFAULT:
            num = "the file system's default number of stripes"
        elif self.stripe_count == ALL_OSTS:
            num = "a stripe on every OST"
        else:
            num = f"{self.stripe_count} stripe{'s' * (self.stripe_count != 1)}"
        size = f" of {size_text(self.stripe_size_bytes)}" if self.stripe_size_bytes else ""
        return f"{num}{size}{f' in pool {self.pool}' if self.pool else ''}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a file, or the default that a directory gives to new ones."""

    components: tuple[Component, ...]
    is_composite: bool

    @property
    def is_own(self) -> bool:
        """Whether a directory has a default of its own, or shows the one it inherits."""
        return self.is_composite or self.components[0].pattern not in {"", "0"}

    def text(self) -> str:
        """For a person, on one line."""
        if not self.is_composite:
            return f"plain: {self.components[0].text()}"
        ends = (part.end_bytes for part in self.components)
        reaches = ["from there on" if end is None else f"up to {size_text(end)}" for end in ends]
        parts = (f"{part.text()} {reach}" for part, reach in zip(self.components, reaches, strict=True))
        return f"progressive (PFL): {', '.join(parts)}"


def parse_layout(output: str) -> Layout:
    """Read what ``lfs getstripe`` printed, with or without ``-d`` and ``-y``, of one path.

    Raises LustreError where the output names no stripe count, or holds a value that is no number.
    """
    plain: dict[str, str] = {}
    components: list[dict[str, str]] = []
    for line in output.splitlines():
        if line.lstrip().startswith("/"):  # the path; it may hold anything
            continue
        for key, value in _KEY_VALUE.findall(line):
            if key == "lcme_id":
                components.append({})
            target = components[-1] if components else plain
            # the first value wins: a mirror or object further down does not change a component
            target.setdefault(key.removeprefix("lmm_").removeprefix("lcme_"), value)
    try:
        parts = tuple(_component(values) for values in components or [plain])
    except (KeyError, ValueError) as error:
        raise LustreError(
            f"lfs getstripe printed {output.strip()[:200]!r}, expected stripe_count, stripe_size ({error}); "
            "is this `lfs` a site's wrapper? Report it with the output of `lfs --version`"
        ) from None
    return Layout(components=parts, is_composite=bool(components))


def _component(values: dict[str, str]) -> Component:
    end = values.get("extent.e_end", "EOF")
    return Component(
        start_bytes=int(values.get("extent.e_start", "0")),
        end_bytes=None if end == "EOF" else int(end),
        stripe_count=int(values["stripe_count"]),
        stripe_size_bytes=int(values.get("stripe_size", "0")),
        pattern=values.get("pattern", ""),
        pool=values.get("pool", ""),
    )


def read_layout(path: Path) -> Layout:
    """The layout of a file, or what a directory gives to new files. ``path`` stands on Lustre."""
    is_folder = path.is_dir()
    result = run_lfs(["getstripe", *(["-d"] if is_folder else []), "-y"], path)
    return parse_layout(result.checked("look at the path, and at `lfs check servers`"))
