"""Layouts as values: read from ``lfs getstripe``, named by a user's options, written for ``lfs setstripe``.

Lustre 2.15 and 2.17 print a layout differently: YAML is indented in two ways, components are a list or a
mapping, and keys have the prefix ``lmm_`` for files alone. The few keys that are needed stand one per line in
all forms, or on a single line in the classic one, so they are read by key in order and no YAML is parsed.

What a user names is refused here where lfs would refuse it, and also where lfs takes it and does harm: a
layout whose last component does not reach the end of the file is set, and later writes past its end fail;
a size of 128 means 128 KiB there.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from lustre.lfs import run_lfs
from shardprep import command_line
from shardprep.errors import LustreError, LustreUsageError, UsageError

ALL_OSTS = -1
FILE_SYSTEM_DEFAULT = 0  # as a stripe count: whatever the file system gives
# A value never ends in a colon: where one is empty (`pattern:` of 2.17) the next word is the next key.
_KEY_VALUE = re.compile(r"([\w.]+):[ \t]*([^\s:]*)(?=\s|$)")
MAX_STRIPE_COUNT = 2000  # lfs's own limit
STRIPE_UNIT_BYTES = 64 << 10  # sizes and ends are multiples of it
MAX_STRIPE_BYTES = 4 << 30  # exclusive
MAX_DOM_BYTES = 1 << 30
MAX_POOL_CHARS = 15
DEFAULT_STRIPE_BYTES = 4 << 20  # Lustre's own from 2.16 on, and what the shards are written in
_UNITS = (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10))


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


def read_layout(path: Path) -> Layout:
    """The layout of a file, or what a directory gives to new files. ``path`` stands on Lustre."""
    is_folder = path.is_dir()
    result = run_lfs(["getstripe", *(["-d"] if is_folder else []), "-y"], path)
    return parse_layout(result.checked("look at the path, and at `lfs check servers`"))


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


def parse_layout_options(
    *,
    count: str | None = None,
    size: str | None = None,
    pool: str | None = None,
    pfl: str | None = None,
    dom: str | None = None,
) -> Layout | None:
    """The layout that the options of ``apply`` name; None if they name none. Raises LustreUsageError.

    ``pfl`` is ``1G:1,10G:4,-1:8``: up to 1 GiB one stripe, up to 10 GiB four, from there on eight; a
    third number is that component's stripe size (``10G:4:8M``), else ``size``, else 4 MiB. ``dom``
    keeps the first bytes on the metadata server; nothing else ever does.
    """
    if pfl is not None and count is not None:
        raise LustreUsageError("--count and --pfl exclude each other: a component names its own count")
    if (count, size, pool, pfl, dom) == (None,) * 5:
        return None
    plain = Component(
        stripe_count=FILE_SYSTEM_DEFAULT if count is None else stripe_count(count, "--count"),
        stripe_size_bytes=0 if size is None else _stripe_size(size, "--size"),
        pattern="raid0",
        pool="" if pool is None else _pool(pool),
    )
    if pfl is None and dom is None:
        return Layout(components=(plain,), is_composite=False)
    if pfl is None and count is None:
        raise LustreUsageError("--dom names the first component alone; name the rest: --count or --pfl")
    plain = replace(plain, stripe_size_bytes=plain.stripe_size_bytes or DEFAULT_STRIPE_BYTES)
    parts = [plain] if pfl is None else [_component_option(text, plain) for text in pfl.split(",")]
    if dom is not None:
        end = _multiple(parse_size(dom, "--dom"), "--dom", STRIPE_UNIT_BYTES)
        parts.insert(0, Component(end_bytes=end, stripe_count=0, stripe_size_bytes=0, pattern="mdt"))
    return Layout(components=_with_starts(parts), is_composite=True)


def setstripe_options(layout: Layout) -> list[str]:
    """What ``lfs setstripe`` is told, sizes in plain bytes. Pure; runs nothing.

    A composite layout has a size in every component: after ``-L mdt`` 2.15 would take 64 KiB and 2.17
    4 MiB. The component on the metadata server has none, nor a count or pool: lfs refuses them there.
    """
    options: list[str] = []
    for part in layout.components:
        if layout.is_composite:
            options += ["-E", "-1" if part.end_bytes is None else str(part.end_bytes)]
        if part.pattern == "mdt":
            options += ["-L", "mdt"]
            continue
        if part.stripe_count != FILE_SYSTEM_DEFAULT:
            options += ["-c", str(part.stripe_count)]
        if part.stripe_size_bytes:
            options += ["-S", str(part.stripe_size_bytes)]
        if part.pool:
            options += ["-p", part.pool]
    return options


def apply_flags(layout: Layout) -> str:
    """The flags of ``apply`` that name this layout, which has one stripe size and no pool."""
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
        raise LustreUsageError(f"{name}: expected END:COUNT or END:COUNT:SIZE, such as 10G:4 or -1:8:4M")
    size = _stripe_size(fields[2], name) if len(fields) == 3 else model.stripe_size_bytes
    end = None if fields[0] == "-1" else _multiple(parse_size(fields[0], name), name, STRIPE_UNIT_BYTES)
    if end is not None and end % size:
        raise LustreUsageError(
            f"{name} ends at {size_text(end)}, expected a multiple of its stripe size, {size_text(size)}"
        )
    return replace(model, end_bytes=end, stripe_count=stripe_count(fields[1], name), stripe_size_bytes=size)


def _with_starts(parts: list[Component]) -> tuple[Component, ...]:
    """The components with their starts; ends must ascend, and only the last may reach the file's end."""
    if parts[-1].end_bytes is not None:
        raise LustreUsageError(
            f"the last component of --pfl ends at {size_text(parts[-1].end_bytes)}, expected -1, the end of "
            "the file: lfs would take it, and writes past that would fail"
        )
    if parts[0].pattern == "mdt" and (parts[0].end_bytes or 0) > MAX_DOM_BYTES:
        raise LustreUsageError(f"--dom is more than {size_text(MAX_DOM_BYTES)}, the largest that lfs takes")
    placed: list[Component] = []
    start = 0
    for number, part in enumerate(parts):
        if part.end_bytes is None and number < len(parts) - 1:
            raise LustreUsageError("a component that ends at -1 is not the last one, expected it last")
        if part.end_bytes is not None and part.end_bytes <= start:
            raise LustreUsageError(
                f"component {number + 1} ends at {size_text(part.end_bytes)}, expected more than "
                f"{size_text(start)}, where it starts"
            )
        placed.append(replace(part, start_bytes=start))
        start = part.end_bytes or 0
    return tuple(placed)


def stripe_count(text: str, name: str, also: str = "") -> int:
    """1 to MAX_STRIPE_COUNT, or ALL_OSTS. Raises LustreUsageError; ``also`` is what else is allowed.

    0, which lfs takes for 'the default', is refused: that is said by leaving it out.
    """
    count = int(text) if re.fullmatch(r"-1|[0-9]{1,9}", text) else 0
    if not (count == ALL_OSTS or 1 <= count <= MAX_STRIPE_COUNT):
        raise LustreUsageError(
            f"{name} asks for {text!r} stripes, expected {also}a number of OSTs from 1 to "
            f"{MAX_STRIPE_COUNT}, or -1 for all of them"
        )
    return count


def _stripe_size(text: str, name: str) -> int:
    size = _multiple(parse_size(text, name), name, STRIPE_UNIT_BYTES)
    if size >= MAX_STRIPE_BYTES:
        raise LustreUsageError(f"{name} asks for stripes of {size_text(size)}, expected less than 4 GiB")
    return size


def _multiple(num_bytes: int, name: str, unit_bytes: int) -> int:
    if num_bytes == 0 or num_bytes % unit_bytes:
        raise LustreUsageError(
            f"{name} is {size_text(num_bytes)}, expected a multiple of {size_text(unit_bytes)}"
        )
    return num_bytes


def _pool(name: str) -> str:
    if not re.fullmatch(rf"\w[\w-]{{0,{MAX_POOL_CHARS - 1}}}", name, re.ASCII):
        raise LustreUsageError(
            f"--pool is {name!r}, expected a pool's own name, without the file system's: "
            f"1 to {MAX_POOL_CHARS} letters, digits, _ and -"
        )
    return name


def parse_size(text: str, name: str) -> int:
    """``4M``, ``4MB``, ``4MiB`` or ``4194304`` -> 4194304 bytes. Raises LustreUsageError, naming ``name``.

    Two habits of lfs are refused rather than shared: there a bare number below 4096 means KiB, and
    ``128b`` means blocks of 512 bytes. Here a bare number is bytes, whatever its size.
    """
    try:
        return command_line.parse_size(text, name, such_as="4194304, 4M or 2G")
    except UsageError as error:
        raise LustreUsageError(str(error)) from None


def size_text(num_bytes: int) -> str:
    """``4 MiB``: the largest binary unit that leaves a whole number."""
    for unit, size in _UNITS:
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size} {unit}iB"
    return f"{num_bytes} bytes"


def size_flag(num_bytes: int) -> str:
    """``4M``: the same, as ``parse_size`` reads it."""
    return size_text(num_bytes).replace(" bytes", "").replace(" ", "").replace("iB", "")
