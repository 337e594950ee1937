"""Layouts: what ``lfs getstripe`` prints, and what a user asks ``lfs setstripe`` for.

Lustre 2.15 and 2.17 print a layout differently. The few keys that are needed stand one per line in all forms,
or on a single line in the classic one, so they are read by key in order and no YAML is parsed.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from lustre.lfs import kind_of, lustre_mount, run_lfs
from shardprep.command_line import parse_size
from shardprep.console import counted
from shardprep.errors import LustreError, UsageError
from shardprep.format.names import id_ranges

ALL_OSTS = -1
ANY_OST = -1  # as the place to start: the server chooses
DEFAULT_COUNT = 0  # as a stripe count: whatever the file system gives
NO_POOL = "none"  # Lustre reserves the name
SMALL_FILE_BYTES = 64 << 20  # files up to this size get one stripe of a layout that a number asks for
MAX_STRIPE_COUNT = 2000  # of lfs
DEFAULT_STRIPE_BYTES = 4 << 20  # Lustre's own from 2.16 on, and what the shards are written in
# A value never ends in a colon: where one is empty (`pattern:` of 2.17) the next word is the next key.
_KEY_VALUE = re.compile(r"([\w.]+):[ \t]*([^\s:]*)(?=\s|$)")
_OBJECT_ROW = re.compile(r"\t\s*(\d+)\t\s*\d+\t\s*0x[0-9a-f]+\t.*")  # of the classic form, below `obdidx`


def size_text(num_bytes: int) -> str:
    """Return ``4 MiB``: the largest binary unit that leaves a whole number."""
    for unit, size in (("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}"
    return f"{num_bytes} bytes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """How the bytes of one extent of a file are spread; a plain layout is one component for all bytes."""

    start_bytes: int = 0
    end_bytes: int | None = None  # None: to the end of the file
    stripe_count: int  # ALL_OSTS for every target; -N of 2.17: N stripes on every target
    stripe_size_bytes: int = 0  # 0: not told, or not asked for
    pattern: str = ""  # raid0, mdt (the data lies on the metadata server), ... ; "" or "0" if inherited
    pool: str = ""
    start_ost: int = ANY_OST
    osts: tuple[int, ...] = ()  # of a file: those of its stripes; of a folder: those named for its files

    @property
    def is_on_mdt(self) -> bool:
        return self.pattern == "mdt"

    @property
    def is_overstriped(self) -> bool:
        """Whether one OST may have several stripes (``lfs setstripe -C``)."""
        return "overstriped" in self.pattern or self.stripe_count < ALL_OSTS

    @property
    def place(self) -> str:
        """Where somebody put the stripes, for a person; empty where the server chooses."""
        if self.osts:
            return f"on OST{'s' * (len(set(self.osts)) > 1)} {id_ranges(set(self.osts)).replace(',', ', ')}"
        return "" if self.start_ost == ANY_OST or self.is_on_mdt else f"starting on OST {self.start_ost}"

    def text(self) -> str:
        """Return ``4 stripes of 1 MiB in pool flash``."""
        if self.is_on_mdt:
            return "on the metadata server"
        if self.stripe_count == DEFAULT_COUNT:
            text = "the file system's default number of stripes"
        elif self.stripe_count == ALL_OSTS:
            text = "a stripe on every OST"
        else:
            text = counted(abs(self.stripe_count), "stripe")
        if self.stripe_count < ALL_OSTS:
            text += " on every OST"
        if self.stripe_size_bytes:
            text += f" of {size_text(self.stripe_size_bytes)}"
        if self.is_overstriped:
            text += " (overstriped: several on one OST)"
        if self.pool:
            text += f" in pool {self.pool}"
        return f"{text}, {self.place}" if self.place else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a file, or the default that a directory gives to new ones."""

    components: tuple[Component, ...]
    is_composite: bool = False
    num_mirrors: int = 1

    @property
    def is_inherited(self) -> bool:
        """Whether a directory surely has no default of its own.

        Where the file system's root has a default, lfs prints that for a folder without one: they look alike.
        """
        return not self.is_composite and self.components[0].pattern in {"", "0"}

    @property
    def pools(self) -> list[str]:
        """The pools of the components on OSTs, in their order; empty text: no pool."""
        return list(dict.fromkeys(part.pool for part in self.components if not part.is_on_mdt))

    @property
    def pool(self) -> str:
        """The one pool of all stripes; empty where there is none, or several."""
        return self.pools[0] if len(self.pools) == 1 else ""

    @property
    def fixed_place(self) -> str:
        """Where a directory puts every file, for a person; empty where the server chooses."""
        return next((part.place for part in self.components if part.place), "")

    def only_typed(self) -> list[str]:
        """Return what a request by numbers would drop without a word: only a layout as typed replaces it."""
        found = []
        if self.num_mirrors > 1:
            found.append(f"{self.num_mirrors} mirrors of each file")
        if any(part.is_on_mdt for part in self.components):
            found.append("data on the metadata server")
        if len(self.pools) > 1:
            found.append(f"the pools {', '.join(pool or 'of no name' for pool in self.pools)}")
        return found

    def text(self) -> str:
        """Return the layout for a person, on one line."""
        if not self.is_composite:
            return f"plain: {self.components[0].text()}"
        if self.num_mirrors == 1:
            return f"progressive (PFL): {_extents_text(self.components)}"
        # The components of a mirror follow those of the one before; each mirror begins at byte 0.
        mirrors: list[list[Component]] = []
        for part in self.components:
            if part.start_bytes == 0 or not mirrors:
                mirrors.append([])
            mirrors[-1].append(part)
        return f"{self.num_mirrors} mirrors: {'; '.join(map(_extents_text, mirrors))}"


def _extents_text(components: tuple[Component, ...] | list[Component]) -> str:
    texts = []
    for part in components:
        if part.end_bytes is not None:
            texts.append(f"{part.text()} up to {size_text(part.end_bytes)}")
        else:
            texts.append(f"{part.text()} from there on" if part.start_bytes else part.text())
    return ", ".join(texts)


# --- what lfs getstripe prints


def read_layout(path: Path) -> Layout:
    """Read the layout of a file, or what a directory gives to new files. ``path`` stands on Lustre."""
    options = ["-d", "-y"] if kind_of(path) == "folder" else ["-y"]
    result = run_lfs("getstripe", *options, path)
    return parse_layout(result.checked("look at the path, and at `lfs check servers`"))


def layout_of_file_system(folder: Path) -> Layout | None:
    """Return what the root of the file system gives to new files; None where that cannot be read."""
    try:
        return read_layout(Path(lustre_mount(folder).mount_point))
    except LustreError:
        return None


def parse_layout(output: str) -> Layout:
    """Read what ``lfs getstripe`` printed of one path, with or without ``-d`` and ``-y``."""
    if output.rstrip().endswith("has no stripe info"):
        raise LustreError(
            f"lfs getstripe says {output.strip()[-200:]!r}: it has no layout, as a symbolic link and a file "
            "that was never written to have none; look at what the link points to"
        )
    # What stands before the first component, and of each: the values by key, the numbers of the OSTs.
    groups: list[tuple[dict[str, str], list[str]]] = [({}, [])]
    for line in output.split("\n"):
        if line.lstrip().startswith("/"):  # the path; it may hold anything
            continue
        row = _OBJECT_ROW.fullmatch(line)
        for key, value in [("l_ost_idx", row[1])] if row else _KEY_VALUE.findall(line):
            if key == "lcme_id":
                groups.append(({}, []))
            values, osts = groups[-1]
            if key == "l_ost_idx":
                osts.append(value.rstrip(","))
            else:  # the first value wins: an object further down does not change a component
                values.setdefault(key.removeprefix("lmm_").removeprefix("lcme_"), value)
    try:
        parts = tuple(_component(*group) for group in groups[1:] or groups)
        num_mirrors = int(groups[0][0].get("lcm_mirror_count") or "1")
    except (KeyError, ValueError) as error:
        raise LustreError(
            f"lfs getstripe printed {output.strip()[:200]!r}, expected stripe_count, stripe_size ({error}); "
            "is this `lfs` a site's wrapper? Report it with the output of `lfs --version`"
        ) from None
    return Layout(components=parts, is_composite=len(groups) > 1, num_mirrors=num_mirrors)


def _component(values: dict[str, str], osts: list[str]) -> Component:
    """Make a component; an empty number (a client without Lustre's parameters) is one that is not told."""
    pattern, end = values.get("pattern", ""), values.get("extent.e_end", "EOF")
    return Component(
        start_bytes=int(values.get("extent.e_start", "0")),
        end_bytes=None if end == "EOF" else int(end),
        stripe_count=int(values["stripe_count"] or "0"),
        stripe_size_bytes=int(values.get("stripe_size") or "0"),
        pattern=pattern,
        pool=values.get("pool", ""),
        start_ost=ANY_OST if pattern == "mdt" else int(values.get("stripe_offset") or "-1"),
        osts=tuple(map(int, osts)),
    )


def why_leave(layout: Layout, of_file_system: Layout | None) -> str | None:
    """Say why a layout is left alone unless a user names another one; None for Lustre's plain one.

    A composite layout, a pool, several stripes, a start or a default of the folder's own is somebody's
    choice; whose, shows where the file system's root has the same (``of_file_system``).
    """
    if layout.is_composite:
        return f"{'the site' if layout == of_file_system else 'somebody'} chose this layout"
    if not layout.is_inherited and layout != of_file_system:
        return "this folder has a default of its own"
    part = layout.components[0]
    return "the site chose this default" if part.pool or part.stripe_count != 1 or part.place else None


# --- what a user asks for

# Each has one value. lfs knows more options, which clear a layout, or read one from a file.
_TYPED_OPTIONS = {
    *("-c", "-C", "-S", "-i", "-o", "-p", "-E", "-L", "-z", "-N"),
    *("--stripe-count", "--overstripe-count", "--stripe-size", "--stripe-index", "--ost", "--pool"),
    *("--component-end", "--layout", "--extension-size", "--mirror-count"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class StripeRequest:
    """A layout that a user asks for: by numbers, or as he would type it for ``lfs setstripe``."""

    layout: Layout | None  # by numbers: what is set, and read back
    typed: tuple[str, ...] = ()  # as typed: handed on; what it gives is told, not foretold
    gives_up_pool: bool = False

    @classmethod
    def parse(cls, text: str) -> StripeRequest:
        """Read ``N[,SIZE][,POOL]``, or options as ``lfs setstripe`` takes them. Raises UsageError.

        A number N above 1 becomes a progressive layout, one stripe up to 64 MiB and N from there on: a plain
        one of N stripes would give each small file of a data set N objects.
        """
        if text.startswith("-") and not re.match(r"-1(,|$)", text):
            return cls(layout=None, typed=_typed_options(text))
        return cls(layout=_layout_of_numbers(text), gives_up_pool=text.endswith(f",{NO_POOL}"))

    def words(self) -> list[str]:
        """Return what ``lfs setstripe`` is told. Sizes are plain bytes: lfs reads 4M and 4 as it likes."""
        if self.layout is None:
            return list(self.typed)
        words: list[str] = []
        for part in self.layout.components:
            if self.layout.is_composite:
                words += ["-E", "-1" if part.end_bytes is None else str(part.end_bytes)]
            words += ["-c", str(part.stripe_count)]
            if part.stripe_size_bytes:
                words += ["-S", str(part.stripe_size_bytes)]
            if part.pool:
                words += ["-p", part.pool]
        return words


def _layout_of_numbers(text: str) -> Layout:
    count_text, *rest = text.split(",")
    count = int(count_text) if re.fullmatch(r"-1|[0-9]{1,9}", count_text) else 0
    size = rest.pop(0) if rest and rest[0][:1].isdigit() else None
    pool = rest.pop(0) if rest else NO_POOL
    if not (count == ALL_OSTS or 1 <= count <= MAX_STRIPE_COUNT) or rest:
        raise UsageError(
            f"--stripe is {text!r}, expected auto, none, N[,SIZE][,POOL] with N stripes from 1 to "
            f"{MAX_STRIPE_COUNT} or -1 for one on every OST, such as 8,4M, or the options of lfs setstripe, "
            "such as '-E 1G -c 1 -E -1 -c 8'",
            found=f"--stripe {text}",
            expected="auto, none, N[,SIZE][,POOL], or options of lfs setstripe",
        )
    if pool in {"inherit", "ignore"} or not re.fullmatch(r"\w[\w-]{0,14}", pool, re.ASCII):
        raise UsageError(
            f"--stripe names the pool {pool!r}, expected a pool's own name, without the file system's: 1 to "
            f"15 letters, digits, _ and -, or {NO_POOL} for no pool"
        )
    size_bytes = 0 if count == 1 else DEFAULT_STRIPE_BYTES
    if size is not None:
        size_bytes = parse_size(size, "--stripe", such_as="4194304, 4M or 2G")
        if size_bytes == 0 or size_bytes % (64 << 10) or SMALL_FILE_BYTES % size_bytes:
            raise UsageError(
                f"--stripe asks for stripes of {size_text(size_bytes)}, expected a multiple of 64 KiB that "
                f"divides {size_text(SMALL_FILE_BYTES)}; for another one name the whole layout: "
                f"--stripe '-c {count} -S {size}'"
            )
    one = Component(
        stripe_count=1, stripe_size_bytes=size_bytes, pattern="raid0", pool="" if pool == NO_POOL else pool
    )
    if count == 1:
        return Layout(components=(one,))
    small = replace(one, end_bytes=SMALL_FILE_BYTES)
    large = replace(one, start_bytes=SMALL_FILE_BYTES, stripe_count=count)
    return Layout(components=(small, large), is_composite=True)


def _typed_options(text: str) -> tuple[str, ...]:
    """Return the words as lfs gets them; one that it would take for a path, or that clears, is refused."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise UsageError(f"--stripe is {text!r}, expected the options of lfs setstripe: {error}") from None
    last_end = "-1"
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if name[:2] in _TYPED_OPTIONS and len(name) > 2:  # -c8
            name, value = word[:2], word[2:]
        elif name in _TYPED_OPTIONS and not equals:
            value = next(waiting, "")
        if name not in _TYPED_OPTIONS or not value:
            raise UsageError(
                f"--stripe is {text!r}: {word!r} is not taken, expected options of lfs setstripe, each with "
                f"its value, and no path: {', '.join(sorted(_TYPED_OPTIONS))}"
            )
        if name in {"-E", "--component-end"}:
            last_end = value
    if last_end.lower() not in {"-1", "eof"}:
        raise UsageError(
            f"--stripe is {text!r}: the last component ends at {last_end}, expected -E -1, the end of the "
            "file: lfs would take it, and writes past that would fail"
        )
    return tuple(words)
