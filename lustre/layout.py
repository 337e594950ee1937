"""Layouts as values: what ``lfs getstripe`` prints, what a user names, and which one suits shards of a size.

Lustre 2.15 and 2.17 print a layout differently. The few keys that are needed stand one per line in all forms,
or on a single line in the classic one, so they are read by key in order and no YAML is parsed.

What a user names is refused here where lfs would refuse it, and also where lfs takes it and does harm: past
the end of the last component writes fail, and a size of 128 means 128 KiB there.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from lustre.lfs import kind_of, lustre_mount, run_lfs
from shardprep.command_line import parse_size
from shardprep.console import counted
from shardprep.errors import LustreError, UsageError
from shardprep.format.names import id_ranges

ALL_OSTS = -1
ANY_OST = -1  # as the place to start: the server chooses
FILE_SYSTEM_DEFAULT = 0  # as a stripe count: whatever the file system gives
NO_POOL = "none"  # Lustre reserves the name
DOM_LIMIT_BYTES = 1 << 20  # lod.*.dom_stripesize as the server has it where nobody changed it
_DEFAULT_STRIPE_BYTES = 4 << 20  # Lustre's own from 2.16 on, and what the shards are written in
_MAX_STRIPE_COUNT = 2000  # of lfs
_STRIPE_UNIT_BYTES = 64 << 10  # of lfs: sizes and ends are multiples of it
# A value never ends in a colon: where one is empty (`pattern:` of 2.17) the next word is the next key.
_KEY_VALUE = re.compile(r"([\w.]+):[ \t]*([^\s:]*)(?=\s|$)")
_OBJECT_ROW = re.compile(r"\t\s*(\d+)\t\s*\d+\t\s*0x[0-9a-f]+\t.*")  # of the classic form, below `obdidx`
_GIB = 1 << 30


def size_text(num_bytes: int) -> str:
    """``4 MiB``: the largest binary unit that leaves a whole number."""
    for unit, size in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}iB"
    return f"{num_bytes} bytes"


def size_flag(num_bytes: int) -> str:
    """``4M``: the same, as a flag takes it."""
    return size_text(num_bytes).replace(" bytes", "").replace(" ", "").replace("iB", "")


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

    @property
    def is_on_mdt(self) -> bool:
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

    def num_stripes(self, num_osts: int) -> int:
        """Objects of a file that reaches into it; 0 OSTs: their number is unknown."""
        if self.is_on_mdt:
            return 0
        if self.stripe_count < 0:
            return -self.stripe_count * max(1, num_osts)
        most = self.stripe_count if self.is_overstriped or not num_osts else num_osts
        return max(1, min(self.stripe_count, most))

    def text(self) -> str:
        """For a person: ``4 stripes of 1 MiB``."""
        if self.is_on_mdt:
            return "on the metadata server"
        special = {
            FILE_SYSTEM_DEFAULT: "the file system's default number of stripes",
            ALL_OSTS: "a stripe on every OST",
        }
        text = special.get(self.stripe_count) or counted(abs(self.stripe_count), "stripe")
        text += " on every OST" * (self.stripe_count < ALL_OSTS)
        text += f" of {size_text(self.stripe_size_bytes)}" if self.stripe_size_bytes else ""
        text += " (overstriped: several on one OST)" if self.is_overstriped else ""
        text += f" in pool {self.pool}" if self.pool else ""
        return f"{text}, {self.place}" if self.place else text


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a file, or the default that a directory gives to new ones."""

    components: tuple[Component, ...]
    is_composite: bool

    @property
    def is_inherited(self) -> bool:
        """Whether a directory surely has no default of its own.

        Where the file system's root has a default, lfs prints that for a folder without one: they look alike.
        """
        return not self.is_composite and self.components[0].pattern in {"", "0"}

    @property
    def striped(self) -> list[Component]:
        """The components whose bytes lie on OSTs."""
        return [part for part in self.components if not part.is_on_mdt]

    @property
    def pools(self) -> list[str]:
        """The pools of the striped components, in their order; empty text: no pool."""
        return list(dict.fromkeys(part.pool for part in self.striped))

    @property
    def pool(self) -> str:
        """The one pool of all stripes; empty where there is none, or several."""
        return self.pools[0] if len(self.pools) == 1 else ""

    @property
    def on_mdt(self) -> Component | None:
        return next((part for part in self.components if part.is_on_mdt), None)

    @property
    def has_tiers(self) -> bool:
        """Whether a file's bytes lie on several kinds of storage: the metadata server, several pools."""
        return len(self.striped) < len(self.components) or len(self.pools) > 1

    def with_striped(self, **changes: Any) -> Layout:
        """The same but for these values of the striped components."""
        parts = (part if part.is_on_mdt else replace(part, **changes) for part in self.components)
        return replace(self, components=tuple(parts))

    @property
    def fixed_place(self) -> str:
        """Where a directory puts every file, for a person; empty where the server chooses."""
        return next((part.place for part in self.components if part.place), "")

    def of_file(self, num_bytes: int) -> list[tuple[Component, int]]:
        """The components that a file of so many bytes reaches, each with its bytes."""
        reached = [part for part in self.components if part.start_bytes < max(1, num_bytes)]
        return [(part, min(num_bytes, part.end_bytes or num_bytes) - part.start_bytes) for part in reached]

    def text(self) -> str:
        """For a person, on one line."""
        if not self.is_composite:
            return f"plain: {self.components[0].text()}"
        return f"progressive (PFL): {', '.join(f'{part.text()} {_reach(part)}' for part in self.components)}"


def _reach(part: Component) -> str:
    return "from there on" if part.end_bytes is None else f"up to {size_text(part.end_bytes)}"


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
    except (KeyError, ValueError) as error:
        raise LustreError(
            f"lfs getstripe printed {output.strip()[:200]!r}, expected stripe_count, stripe_size ({error}); "
            "is this `lfs` a site's wrapper? Report it with the output of `lfs --version`"
        ) from None
    return Layout(components=parts, is_composite=len(groups) > 1)


def _component(values: dict[str, str], osts: list[str]) -> Component:
    """An empty number (a client without Lustre's parameters) is one that is not told."""
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


# --- what a user names


def parse_layout_options(
    *,
    count: str | None = None,
    size: str | None = None,
    pool: str | None = None,
    pfl: str | None = None,
    dom: str | None = None,
) -> Layout | None:
    """Return the layout that the options of ``apply`` name; None if they name none. Raises UsageError.

    ``pfl`` is ``1G:1,10G:4:8M,-1:8``; a component without a stripe size has ``size``, or 4 MiB. ``pool`` may
    be ``none``, which gives up the one that a folder has; left out, that one stays.
    """
    if pfl is not None and count is not None:
        raise UsageError("--count and --pfl exclude each other: a component names its own count")
    if (count, size, pool, pfl, dom) == (None,) * 5:
        return None
    plain = Component(
        stripe_count=FILE_SYSTEM_DEFAULT if count is None else parse_stripe_count(count, "--count"),
        stripe_size_bytes=0 if size is None else _stripe_size(size, "--size"),
        pattern="raid0",
        pool="" if pool is None else _pool(pool),
    )
    if pfl is None and dom is None:
        return Layout(components=(plain,), is_composite=False)
    if pfl is None and count is None:
        raise UsageError("--dom names the first component alone; name the rest: --count or --pfl")
    plain = replace(plain, stripe_size_bytes=plain.stripe_size_bytes or _DEFAULT_STRIPE_BYTES)
    parts = [plain] if pfl is None else [_component_option(text, plain) for text in pfl.split(",")]
    if dom is not None:
        end = _multiple(dom, "--dom")
        if end > _GIB:
            raise UsageError("--dom is more than 1 GiB, the largest that lfs takes")
        parts.insert(0, Component(end_bytes=end, stripe_count=0, stripe_size_bytes=0, pattern="mdt"))
    return Layout(components=_with_starts(parts), is_composite=True)


def named_layout(text: str, *, size: str | None = None, pool: str | None = None) -> Layout:
    """Return the layout of ``text``, a number of stripes or what ``--pfl`` takes. Raises UsageError."""
    layout = parse_layout_options(**{"pfl" if ":" in text else "count": text}, size=size, pool=pool)
    assert layout is not None
    return layout


def setstripe_options(layout: Layout) -> list[str]:
    """Return what ``lfs setstripe`` is told, sizes in plain bytes. Pure; runs nothing.

    Each component has its size: after ``-L mdt`` 2.15 would take 64 KiB and 2.17 4 MiB. That one itself has
    none, nor a count or pool: lfs refuses them there.
    """
    options: list[str] = []
    for part in layout.components:
        if layout.is_composite:
            options += ["-E", "-1" if part.end_bytes is None else str(part.end_bytes)]
        if part.is_on_mdt:
            options += ["-L", "mdt"]
            continue
        if part.stripe_count != FILE_SYSTEM_DEFAULT:
            options += ["-c", str(part.stripe_count)]
        if part.stripe_size_bytes:
            options += ["-S", str(part.stripe_size_bytes)]
        if part.pool not in {"", NO_POOL}:
            options += ["-p", part.pool]
    return options


def apply_flags(layout: Layout) -> str:
    """Return the flags of ``apply`` that name this layout, which has one stripe size and no pool."""
    parts = layout.components
    size = f"--size {size_flag(parts[0].stripe_size_bytes)}"
    if not layout.is_composite:
        return f"--count {parts[0].stripe_count} {size}"
    ends = ("-1" if part.end_bytes is None else size_flag(part.end_bytes) for part in parts)
    text = ",".join(f"{end}:{part.stripe_count}" for end, part in zip(ends, parts, strict=True))
    return f"--pfl '{text}' {size}"


def _component_option(text: str, model: Component) -> Component:
    """``10G:4`` or ``10G:4:8M``, the rest as in ``model``."""
    name = f"component {text!r} of --pfl"
    fields = text.strip().split(":")
    if len(fields) not in {2, 3}:
        raise UsageError(f"{name}: expected END:COUNT or END:COUNT:SIZE, such as 10G:4 or -1:8:4M")
    size = _stripe_size(fields[2], name) if len(fields) == 3 else model.stripe_size_bytes
    end = None if fields[0] == "-1" else _multiple(fields[0], name)
    if end is not None and end % size:
        raise UsageError(
            f"{name} ends at {size_text(end)}, expected a multiple of its stripe size, {size_text(size)}"
        )
    count = parse_stripe_count(fields[1], name)
    return replace(model, end_bytes=end, stripe_count=count, stripe_size_bytes=size)


def _with_starts(parts: list[Component]) -> tuple[Component, ...]:
    """The components with their starts. Ends must ascend, and only the last reaches the file's end."""
    if parts[-1].end_bytes is not None:
        raise UsageError(
            f"the last component of --pfl ends at {size_text(parts[-1].end_bytes)}, expected -1, the end of "
            "the file: lfs would take it, and writes past that would fail"
        )
    ends = [part.end_bytes or 0 for part in parts[:-1]]
    starts = [0, *ends]
    for number, (start, end) in enumerate(zip(starts, ends, strict=False), 1):
        if not end:
            raise UsageError("a component that ends at -1 is not the last one, expected it last")
        if end <= start:
            raise UsageError(
                f"component {number} ends at {size_text(end)}, expected more than {size_text(start)}, where "
                "it starts"
            )
    return tuple(replace(part, start_bytes=start) for part, start in zip(parts, starts, strict=True))


def parse_stripe_count(text: str, name: str, also: str = "") -> int:
    """Read 1 to 2000, or -1 for ALL_OSTS. Raises UsageError; ``also`` is what else is allowed.

    0, which lfs takes for 'the default', is refused: that is said by leaving it out.
    """
    count = int(text) if re.fullmatch(r"-1|[0-9]{1,9}", text) else 0
    if not (count == ALL_OSTS or 1 <= count <= _MAX_STRIPE_COUNT):
        raise UsageError(
            f"{name} asks for {text!r} stripes, expected {also}a number of OSTs from 1 to "
            f"{_MAX_STRIPE_COUNT}, or -1 for all of them",
            found=f"{name} {text}",
            expected=f"a number of OSTs from 1 to {_MAX_STRIPE_COUNT}",
        )
    return count


def _stripe_size(text: str, name: str) -> int:
    size = _multiple(text, name)
    if size >= 4 * _GIB:
        raise UsageError(f"{name} asks for stripes of {size_text(size)}, expected less than 4 GiB")
    return size


def _multiple(text: str, name: str) -> int:
    """Its bytes. Unlike lfs, where a bare number below 4096 means KiB, a bare number is bytes."""
    num_bytes = parse_size(text, name, such_as="4194304, 4M or 2G")
    if num_bytes == 0 or num_bytes % _STRIPE_UNIT_BYTES:
        raise UsageError(f"{name} is {size_text(num_bytes)}, expected a multiple of 64 KiB")
    return num_bytes


def _pool(name: str) -> str:
    """Its name. Lustre reserves two more words beside ``none``, and they name no pool either."""
    if name in {"inherit", "ignore"} or not re.fullmatch(r"\w[\w-]{0,14}", name, re.ASCII):
        raise UsageError(
            f"--pool is {name!r}, expected a pool's own name, without the file system's: "
            "1 to 15 letters, digits, _ and -, or none for no pool"
        )
    return name


# --- which layout suits: published advice as a table, nothing of it measured here. A shard has one writer and
# many readers. Too many stripes cost a lock and an object on every OST per file, and a file is lost with any
# of its OSTs; with too few, one OST gets most of the load.

MANY = 4  # shards per OST that readers can keep busy with a stripe each. An inference, no source says so.
_NERSC = "docs.nersc.gov/performance/io/lustre (one file per process: keep one stripe)"
_WIKI = "wiki.lustre.org/Lustre_Striping_Best_Practices"
_AWS = "docs.aws.amazon.com/fsx/latest/LustreGuide/performance.html#striping-data"
# Of FSx file systems made since 2023-08-25: -E 100M -c 1 -E 10G -c 8 -E 100G -c 16 -E -1 -c 32
_FSX = [(100 << 20, 1), (10 << 30, 8), (100 << 30, 16), (None, 32)]


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSize:
    """The shards that a layout is chosen for; None where it is not known."""

    shard_bytes: int | None = None
    num_shards: int | None = None
    num_readers: int | None = None

    def __post_init__(self) -> None:
        """Refuse what no data set has, with UsageError."""
        for name in ("shard_bytes", "num_shards", "num_readers"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name} is {value}, expected 1 or more")

    def text(self) -> str:  # 500 shards of 2 GiB
        number = "shards" if self.num_shards is None else counted(self.num_shards, "shard")
        return f"{number} of {'unknown size' if self.shard_bytes is None else size_text(self.shard_bytes)}"


class Row(NamedTuple):
    """One row: from the bytes of the row before up to ``below_bytes``, for few or many shards, or both."""

    below_bytes: int
    for_few: bool | None
    pfl_or_count: str
    why: str
    source: str


class Choice(NamedTuple):
    """A layout for shards, and the lines that say for which, why, and whose advice it is."""

    layout: Layout
    lines: list[str]


_ENOUGH = f"at least {MANY} shards an OST keep every OST busy with a stripe each"
_FEW = f"fewer than {MANY} shards an OST: stripes spread them and their readers"
_SHARED = "one writer a shard and many shards: OSTs are shared by shards, not by stripes"
_GROWS = "sizes that are mixed, unknown or above 10 GiB: stripes are added as a file grows"
_AZURE = "Azure Managed Lustre, optimize-file-layouts (1 below 1 GiB)"
_WIDE = f"{_WIKI} (4 to 8); {_AWS}; which of 4 and 8 is an inference"
ROWS = (
    Row(100_000_000, None, "1", "below 100 MB more stripes bring nothing", f"OLCF's advice; {_AWS}"),
    Row(_GIB, None, "1", _SHARED, f"{_NERSC}; {_WIKI} (1 to 4); {_AZURE}"),
    Row(4 * _GIB, False, "1", _ENOUGH, f"{_NERSC}; the threshold of {MANY} is an inference"),
    Row(4 * _GIB, True, "4", _FEW, f"{_WIKI} (4 to 8 above 1 GiB for one client)"),
    Row(10 * _GIB, False, "4", "large shards, enough of them to share the OSTs", _WIDE),
    Row(10 * _GIB, True, "8", "large shards, and few of them", _WIDE),
)
_MIXED = Row(0, None, "1G:1,10G:4,-1:8", _GROWS, "composed of the rows above it")


def choose_layout(size: DataSize, num_osts: int) -> Choice:
    """Return the table's layout for these shards on ``num_osts`` OSTs, 0 if unknown. Pure.

    An unknown number of shards counts as few. Readers that are fewer than the OSTs cannot keep all busy: the
    shards are many where they are many for the OSTs that can be busy. No count is above the OSTs there are.
    """
    num_busy = min(num_osts or size.num_readers or 0, size.num_readers or num_osts)
    is_few = size.num_shards is None or size.num_shards < MANY * num_busy
    shard_bytes = math.inf if size.shard_bytes is None else size.shard_bytes
    fitting = (row for row in ROWS if shard_bytes < row.below_bytes and row.for_few in {None, is_few})
    row = next(fitting, _MIXED)
    layout = named_layout(row.pfl_or_count, size="4M")
    parts = (
        replace(part, stripe_count=min(part.stripe_count, num_osts or part.stripe_count))
        for part in layout.components
    )
    layout = replace(layout, components=tuple(parts))
    why, source = f"  why: {row.why}", f"  source: {row.source}"
    return Choice(layout, [f"for {size.text()}: {layout.text()}", why, source])


def why_leave(layout: Layout, of_file_system: Layout | None) -> str | None:
    """Say why a layout is left alone unless a user names another one; None for Lustre's plain one.

    A composite layout, a pool, several stripes, a start or a default of the folder's own is somebody's
    choice; whose, shows where the file system's root has the same (``of_file_system``).
    """
    if [(part.end_bytes, part.stripe_count) for part in layout.components] == _FSX:
        return "this is the default of FSx for Lustre, which is right for shards"
    if layout.is_composite:
        who = "the site" if layout == of_file_system else "somebody"
        return f"{who} chose this progressive layout"
    if not layout.is_inherited and layout != of_file_system:
        return "this folder has a default of its own"
    part = layout.components[0]
    return "the site chose this default" if part.pool or part.stripe_count != 1 or part.place else None


def load_text(layout: Layout, size: DataSize, num_osts: int) -> str:
    """Say how many shards the readers have open at once, and on how many OSTs: arithmetic, no measurement.

    The number of shards and of readers are known.
    """
    num_shards, num_readers = size.num_shards or 1, size.num_readers or 1
    num_open = min(num_shards, num_readers)
    # Most bytes of a file lie in the component with the most stripes.
    each = max(part.num_stripes(num_osts) for part, _ in layout.of_file(size.shard_bytes or 1))
    busy = min(num_osts, max(1, each) * (1 if layout.fixed_place else num_open))
    text = (
        f"{counted(num_readers, 'reader')} have {num_open} of {counted(num_shards, 'shard')} open at once: "
        f"{busy} of {num_osts} OSTs at work, about {num_readers / max(1, busy):.3g} readers on each"
    )
    if num_readers > num_shards:
        text += f"; {num_readers / num_shards:.3g} readers share a shard, more shards would spread them"
    if layout.fixed_place:
        text += f", because every new file lies {layout.fixed_place}"
    return text
