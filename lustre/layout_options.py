"""Layouts as a user names them, checked, and written for ``lfs setstripe``.

What a user names is refused here where lfs would refuse it, and also where lfs takes it and does harm: a
layout whose last component does not reach the end of the file is set, and later writes past its end fail;
a size of 128 means 128 KiB there.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import replace
from pathlib import Path

from lustre.layout import ALL_OSTS, FILE_SYSTEM_DEFAULT, Component, Layout, size_flag, size_text
from shardprep import command_line
from shardprep.errors import LustreUsageError, UsageError

MAX_STRIPE_COUNT = 2000  # lfs's own limit
STRIPE_UNIT_BYTES = 64 << 10  # sizes and ends are multiples of it
MAX_STRIPE_BYTES = 4 << 30  # exclusive
MAX_DOM_BYTES = 1 << 30  # of lfs; the server cuts to its own limit
DOM_LIMIT_BYTES = 1 << 20  # lod.*.dom_stripesize as the server has it where nobody changed it
MAX_POOL_CHARS = 15
NO_POOL = "none"  # Lustre reserves the name
DEFAULT_STRIPE_BYTES = 4 << 20  # Lustre's own from 2.16 on, and what the shards are written in


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
    keeps the first bytes on the metadata server; nothing else ever does. ``pool`` may be ``none``, which
    gives up the one that a folder has; left out, that one stays.
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
        if part.pool not in {"", NO_POOL}:
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


def migrate_command(layout: Layout, folder: Path, pattern: str) -> str:
    """The shell line that moves the files of a folder that match ``pattern`` to this layout."""
    options = shlex.join(setstripe_options(layout))
    names = f"find {shlex.quote(str(folder))} -maxdepth 1 -type f -name {shlex.quote(pattern)} -print0"
    return f"{names} | xargs -0 -n 1 lfs migrate {options}"


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
    """Its name. Lustre reserves two more words beside ``none``, and they name no pool either."""
    if name in {"inherit", "ignore"} or not re.fullmatch(
        rf"\w[\w-]{{0,{MAX_POOL_CHARS - 1}}}", name, re.ASCII
    ):
        raise LustreUsageError(
            f"--pool is {name!r}, expected a pool's own name, without the file system's: "
            f"1 to {MAX_POOL_CHARS} letters, digits, _ and -, or none for no pool"
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
