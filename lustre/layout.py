"""Layouts: parse ``lfs getstripe -y``, parse what a user asks for, and set it with ``lfs setstripe``.

A layout is shown as options of ``lfs setstripe``: ``-E 64M -c 1 -S 4M -E -1 -c 8 -S 4M``. It is set only for
a fresh, empty folder. A file is refused, because lfs can empty it. A folder with files is refused, because
these would keep their layouts. lfs may exit with 0 and do something else, so the layout is read back.
"""

from __future__ import annotations

import contextlib
import getopt
import os
import re
import secrets
import shlex
from dataclasses import dataclass, replace
from pathlib import Path

from lustre.lfs import existing_part, lustre_mount, run_lfs, why_not_usable
from lustre.targets import UNKNOWN, count_osts
from shardprep.console import counted, quoted
from shardprep.errors import LustreError, ShardprepError, UsageError
from shardprep.files import is_folder, names_in, size_of_file
from shardprep.option_flags import parse_size

ALL_OSTS = -1  # as a stripe count; from 2.17 on -N means N stripes on every OST
ANY_OST = -1  # as the first OST: the server chooses
NO_POOL = "none"  # asks for no pool, while "" keeps the folder's; the name is reserved by Lustre
SMALL_FILE_BYTES = 64 << 20  # with a layout given as a number, files up to this size get one stripe
MAX_STRIPE_COUNT = 2000  # limit of lfs
DEFAULT_STRIPE_BYTES = 4 << 20  # Lustre's default from 2.16 on, and the size of our writes
# `- lcme_id:   1` in 2.17, `    lcme_id:   1` in 2.15: both have one key per line, indented differently.
_KEY_VALUE = re.compile(r"^[ \t-]*([\w.]+):[ \t]*(\S*)[ \t\r]*$", re.MULTILINE)


def size_text(num_bytes: int) -> str:
    """Format a size for lfs: ``4M``."""
    for unit, size in (("T", 1 << 40), ("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if num_bytes and num_bytes % size == 0:
            return f"{num_bytes // size}{unit}"
    return str(num_bytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Component:
    """The striping of one extent of a file. A plain layout is one component for all bytes."""

    start_bytes: int = 0
    end_bytes: int | None = None  # None: to the end of the file
    stripe_count: int
    stripe_bytes: int = 0  # 0: unknown, or the default
    extension_bytes: int = 0  # of a self-extending layout: the extent grows by this size
    pattern: str = "raid0"  # mdt: data on the metadata server; "" or "0": inherited
    pool: str = ""
    start_ost: int = ANY_OST
    osts: tuple[int, ...] = ()  # of a file: its OSTs; of a folder: the OSTs chosen for new files

    @property
    def is_on_mdt(self) -> bool:
        return self.pattern == "mdt"

    @property
    def is_overstriped(self) -> bool:
        """Return whether one OST may get several stripes."""
        return "overstriped" in self.pattern or self.stripe_count < ALL_OSTS

    @property
    def has_fixed_place(self) -> bool:
        """Return whether the stripes are bound to certain OSTs."""
        return bool(self.osts) or (self.start_ost != ANY_OST and not self.is_on_mdt)

    def options(self) -> list[str]:
        """Return the options of ``lfs setstripe``, except for the end of the extent."""
        if self.is_on_mdt:
            return ["-L", "mdt"]
        if self.extension_bytes:
            return ["-z", size_text(self.extension_bytes)]
        words = ["-C" if self.is_overstriped else "-c", str(self.stripe_count)]
        if self.stripe_bytes:
            words += ["-S", size_text(self.stripe_bytes)]
        if self.pool not in {"", NO_POOL}:
            words += ["-p", self.pool]
        if self.osts:
            words += ["-o", ",".join(map(str, self.osts))]
        elif self.start_ost != ANY_OST:
            words += ["-i", str(self.start_ost)]
        return words


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """The layout of a file, or a directory's default for new files."""

    components: tuple[Component, ...]  # mirror by mirror
    is_composite: bool = False
    num_mirrors: int = 1
    typed: tuple[str, ...] = ()  # options of lfs setstripe as the user typed them; ``components`` is empty

    @property
    def is_inherited(self) -> bool:
        """Return whether a directory certainly has no default. If False, lfs may have printed the root's."""
        return not self.is_composite and self.components[0].pattern in {"", "0"}

    def options(self) -> list[str]:
        """Return the options of ``lfs setstripe`` for this layout."""
        words = list(self.typed)
        for part in self.components:
            if self.num_mirrors > 1 and part.start_bytes == 0:
                words.append("-N")
            if self.is_composite:
                words += ["-E", "-1" if part.end_bytes is None else size_text(part.end_bytes)]
            words += part.options()
        return words

    def text(self) -> str:
        """Return the options as one string for people."""
        return " ".join(self.options())


def read_layout(path: Path) -> Layout:
    """Read the layout of a file on Lustre, or a directory's default for new files. Raises LustreError."""
    options = ["-d", "-y"] if is_folder(path) else ["-y"]
    output = run_lfs("getstripe", *options, path).checked("look at the path, and at `lfs check servers`")
    if output.rstrip().endswith("has no stripe info"):
        expected = "a layout; a link (look at its target) or a file never written to has none"
        raise LustreError(found=output.strip()[-200:], expected=expected)
    # Split into the head and one text per component.
    head, *texts = re.split(r"^[ \t-]*lcme_id:.*$", output, flags=re.MULTILINE)
    try:
        parts = tuple(_component(text) for text in texts or [head])
        num_mirrors = int(dict(_KEY_VALUE.findall(head)).get("lcm_mirror_count") or "1")
    except (KeyError, ValueError) as error:
        found = f"lfs getstripe printed {output.strip()[:200]!r} ({error})"
        expected = "stripe_count, stripe_size; is this `lfs` a site's wrapper? See `lfs --version`"
        raise LustreError(found=found, expected=expected) from None
    return Layout(components=parts, is_composite=bool(texts), num_mirrors=num_mirrors)


def _component(text: str) -> Component:
    """Parse a component. A number that is empty, as on a client without Lustre's parameters, is unknown."""
    pairs = _KEY_VALUE.findall(text)
    # The first value of a key counts: later ones belong to objects of the component.
    values = {key.removeprefix("lmm_").removeprefix("lcme_"): value for key, value in reversed(pairs)}
    pattern = values.get("pattern", "")
    end = values.get("extent.e_end", "EOF")
    return Component(
        start_bytes=int(values.get("extent.e_start", "0")),
        end_bytes=None if end == "EOF" else int(end),
        stripe_count=int(values["stripe_count"] or "0"),
        stripe_bytes=int(values.get("stripe_size") or "0"),
        extension_bytes=int(values.get("extension_size") or "0"),
        pattern=pattern,
        pool=values.get("pool", ""),
        start_ost=ANY_OST if pattern == "mdt" else int(values.get("stripe_offset") or "-1"),
        osts=tuple(int(value) for key, value in pairs if key == "l_ost_idx"),
    )


_NUMBERS = re.compile(r"(-1|[0-9]{1,4})(?:,([0-9]\w*))?(?:,(\w[\w-]{0,14}))?", re.ASCII)
_NUMBERS_TEXT = (
    f"auto, none, N[,SIZE][,POOL] such as 8,4M (N: 1 to {MAX_STRIPE_COUNT} stripes, -1: on every OST; "
    f"SIZE: a multiple of 64K that divides {size_text(SMALL_FILE_BYTES)}; POOL: its name without the file "
    f"system's, or {NO_POOL}), or the options of lfs setstripe, such as '-E 1G -c 1 -E -1 -c 8'"
)
# Options with one value. lfs has more, but these clear a layout, or read one from a file.
_SHORT = "c:C:S:i:o:p:E:L:z:N:"
_LONG = "stripe-count= overstripe-count= stripe-size= stripe-index= ost= pool= component-end= layout= "
_LONG += "extension-size= mirror-count="


def parse_stripe(text: str) -> Layout:
    """Parse ``N[,SIZE][,POOL]``, or options of ``lfs setstripe``, which are passed on as typed.

    N above 1 becomes a progressive layout with one stripe for the first 64 MiB and N stripes after them: with
    N plain stripes each small file of a data set would have N objects. Raises UsageError.
    """
    if text.startswith("-") and not re.match(r"-1(,|$)", text):
        return Layout(components=(), typed=_typed_options(text))
    match = _NUMBERS.fullmatch(text)
    count = int(match[1]) if match else 0
    size, pool = (match[2], match[3]) if match else (None, None)
    stripe_bytes = 0 if count == 1 else DEFAULT_STRIPE_BYTES
    is_size = True
    if size:
        stripe_bytes = parse_size(size, "--stripe", such_as="4194304, 4M or 2G")
        is_size = stripe_bytes > 0 and stripe_bytes % (64 << 10) == 0 and SMALL_FILE_BYTES % stripe_bytes == 0
    is_count = count == ALL_OSTS or 1 <= count <= MAX_STRIPE_COUNT
    if not (is_count and is_size) or pool in {"inherit", "ignore"}:  # reserved by Lustre
        raise UsageError.of_value("--stripe", text, _NUMBERS_TEXT)
    one = Component(stripe_count=1, stripe_bytes=stripe_bytes, pool=pool or "")
    if count == 1:
        return Layout(components=(one,))
    small = replace(one, end_bytes=SMALL_FILE_BYTES)
    large = replace(one, start_bytes=SMALL_FILE_BYTES, stripe_count=count)
    return Layout(components=(small, large), is_composite=True)


def _typed_options(text: str) -> tuple[str, ...]:
    """Split the options into words. Raises UsageError for a path, or an option that does not set a layout."""
    try:
        words = shlex.split(text)
        options, paths = getopt.getopt(words, _SHORT, _LONG.split())
    except (ValueError, getopt.GetoptError) as error:
        expected = f"options of lfs setstripe that describe a layout ({error})"
        raise UsageError.of_value("--stripe", text, expected) from None
    if paths or not all(value for _, value in options):
        raise UsageError.of_value("--stripe", text, "options of lfs setstripe with their values, and no path")
    ends = [value.lower() for name, value in options if name in {"-E", "--component-end"}]
    if ends and ends[-1] not in {"-1", "eof"}:  # lfs would accept it, but writes past the end would fail
        raise UsageError.of_value("--stripe", text, "a last component that ends with the file: -E -1")
    return tuple(words)


_OWN_FOLDERS = frozenset({"jobs", "logs"})  # contain no shards: a folder with only these counts as empty
_KEEPER = re.compile(r"\.layout-\d+-[0-9a-f]{8}\.tmp")  # left by set_directory_layout if it was killed
_WHAT_TO_DO = (
    "look at `lfs df`, `lfs quota -u $USER` and `lfs check servers`; the owner of the folder can set the "
    "layout, on a node that mounts the file system for writing; or keep the site's layout"
)

_CORRECT_OPTIONS = "correct the options of --stripe: man lfs-setstripe, or give N[,SIZE][,POOL] such as 8,4M"


def set_directory_layout(folder: Path, stripe: Layout, *, dry_run: bool = False) -> str:
    """Set the layout of new files in ``folder`` on Lustre, and return a line to print.

    ``dry_run`` only checks. Raises LustreError, also if the folder has another layout afterwards.
    """
    if size_of_file(folder) is None:
        remedy = f"mkdir -p {quoted(folder)}"
        raise LustreError(path=folder, found="does not exist", expected="an empty directory", remedy=remedy)
    if not is_folder(folder):  # never change the layout of a file, because lfs can empty the file
        expected = "an empty directory; create one and copy the file into it"
        raise LustreError(path=folder, found="a file", expected=expected)
    before = read_layout(folder)
    notes: list[str] = []
    num_osts = UNKNOWN
    for pool in _typed_pools(stripe):
        count_osts(folder, pool)  # raises for a pool without OSTs, which lfs accepts
    if not stripe.typed:
        stripe = _with_pool(stripe, before, folder)
        num_osts = count_osts(folder, stripe.components[0].pool)
        wanted = stripe.components[-1].stripe_count
        if 0 < num_osts < wanted:
            notes.append(f"{wanted} stripes are more than the {counted(num_osts, 'OST')} here")
        if not before.is_inherited and is_as_asked(stripe, before, num_osts):
            return "; ".join([f"{folder} has it already; new files get {before.text()}", *notes])
    command = setstripe_command(folder, stripe)
    for name in names_in(folder):
        if name not in _OWN_FOLDERS and not _KEEPER.fullmatch(name):
            expected = "an empty directory, as files keep their layout; use one, or set it for new files only"
            raise LustreError(path=folder, found=f"contains {name}", expected=expected, remedy=command)
    if dry_run:
        return "; ".join([f"new files get {before.text()}; would run: {command}", *notes])
    # From 2.16 on, lfs removes an empty folder after EACCES. A file in it prevents that.
    keeper = folder / f".layout-{os.getpid()}-{secrets.token_hex(4)}.tmp"
    try:
        keeper.touch(exist_ok=False)
    except OSError as error:
        expected = f"a folder in which you can create files; {_WHAT_TO_DO}"
        raise LustreError(path=folder, found=error.strerror, expected=expected) from None
    try:
        result = run_lfs("setstripe", *stripe.options(), folder)
    finally:
        with contextlib.suppress(OSError):
            keeper.unlink()
    result.checked(_CORRECT_OPTIONS if result.is_usage_error else _WHAT_TO_DO)
    after = read_layout(folder)
    if not stripe.typed and not is_as_asked(stripe, after, num_osts):
        found = f"`{command}` exited with 0, but new files get {after.text()}"
        expected = f"{stripe.text()}; ask the site whether it restricts layouts, or keep this layout"
        raise LustreError(path=folder, found=found, expected=expected)
    return "; ".join([f"{folder}: {new_files_text(folder, after)}, before {before.text()}", *notes])


def _typed_pools(stripe: Layout) -> list[str]:
    """Return the pools that a user named in options of lfs setstripe."""
    options, _ = getopt.getopt(list(stripe.typed), _SHORT, _LONG.split())
    pools = [value.rpartition(".")[2] for name, value in options if name in {"-p", "--pool"}]
    return [pool for pool in pools if pool not in {NO_POOL, "inherit", "ignore"}]


def setstripe_command(folder: Path, stripe: Layout) -> str:
    """Return the command to run, quoted for a shell."""
    return shlex.join(["lfs", "setstripe", *stripe.options(), str(folder.absolute())])


def _with_pool(wanted: Layout, before: Layout, folder: Path) -> Layout:
    """Add the folder's pool to a layout given as numbers, because lfs would drop it. Raises LustreError."""
    pools = {part.pool for part in before.components}
    if before.num_mirrors > 1 or len(pools) > 1 or any(part.is_on_mdt for part in before.components):
        found = f"new files get {before.text()}, and numbers would drop a part of this"
        expected = "a whole layout in options of lfs setstripe, such as --stripe '-c 8'"
        raise LustreError(path=folder, found=found, expected=expected, remedy="--stripe '-c 8'")
    pool = wanted.components[0].pool or pools.pop()
    parts = tuple(replace(part, pool="" if pool == NO_POOL else pool) for part in wanted.components)
    return replace(wanted, components=parts)


def is_as_asked(wanted: Layout, found: Layout, num_osts: int) -> bool:
    """Return whether ``found`` is the layout ``wanted``. Parts that ``wanted`` leaves open are not compared.

    Fewer stripes are accepted, because there may be fewer OSTs and sites limit the number; but 1 stripe only
    with one OST. A fixed start is never accepted: it would fill one OST with every file.
    """
    if wanted.is_composite != found.is_composite or len(wanted.components) != len(found.components):
        return False
    for want, have in zip(wanted.components, found.components, strict=True):
        most = MAX_STRIPE_COUNT if want.stripe_count == ALL_OSTS else want.stripe_count
        least = 1 if num_osts == 1 else 2
        if (
            not (have.stripe_count == want.stripe_count or least <= have.stripe_count < most)
            or want.end_bytes != have.end_bytes
            or want.stripe_bytes not in {0, have.stripe_bytes}
            or want.pool not in {"", have.pool}
            or have.is_on_mdt
            or have.is_overstriped
            or have.has_fixed_place
        ):
            return False
    return True


def stripe_line(folder: Path, stripe: str, *, is_planned: bool = False, dry_run: bool = False) -> str:
    """Apply ``plan --stripe`` to the directory ``folder``, and return one line to print.

    ``auto`` and ``none`` change nothing and never fail. Raises LustreError, UsageError.
    """
    name = f"stripe {stripe}"
    if stripe == "none":
        return f"{name}: the layout is not changed"
    if stripe == "auto":
        try:
            reason = why_not_usable(folder)
            if reason:
                return f"{name}: nothing to do, {reason}"
            there = existing_part(folder)
            layout = read_layout(there)
            return f"{name}: not changed; {new_files_text(there, layout)} ({origin_text(there, layout)})"
        except (ShardprepError, OSError) as error:
            return f"{name}: not changed; the layout of new files is unknown: {error}"
    wanted = parse_stripe(stripe)
    reason = why_not_usable(folder)
    if reason:
        return f"{name}: nothing to do, {reason}"
    if is_planned:
        return f"{name}: not changed: {folder} is planned, and files keep their layout; plan into a fresh one"
    if dry_run and size_of_file(folder) is None:
        return f"{name}: would create {folder}; would run: {setstripe_command(folder, wanted)}"
    return f"{name}: {set_directory_layout(folder, wanted, dry_run=dry_run)}"


def origin_text(folder: Path, layout: Layout) -> str:
    """Return where the layout of a folder comes from, as far as lfs reports it."""
    if layout.is_inherited:
        return "inherited; the folder has no default of its own"
    with contextlib.suppress(LustreError):
        if layout == read_layout(Path(lustre_mount(folder).mount_point)):
            return "the file system's default; lfs does not report whether the folder has its own, too"
    return "its own default"


def new_files_text(folder: Path, layout: Layout) -> str:
    """Describe the layout that new files of a folder get, with a warning if it binds them to an OST."""
    if not any(part.has_fixed_place for part in layout.components):
        return f"new files get {layout.text()}"
    remedy = f"lfs setstripe -c {layout.components[-1].stripe_count or 1} {quoted(folder)}"
    why = "all of them start on the same OST, and would fill it"
    return f"warning: new files get {layout.text()}: {why}; to change that: {remedy}"
