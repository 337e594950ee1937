"""A disk that is really full: a tmpfs with few free pages, or without root a limit on the size of a file."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tests.faults.at_calls import Hit, hits, judged
from tests.faults.forked_case import Ended
from tests.faults.judging import Undisturbed
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet

HITS = hits({"plan": 0.5, "shard": 1, "run": 0.2, "verify": 0.5, "stage": 1})
_PAGE_BYTES = 4096
_MOST_FILE_BYTES = 16_384


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Each command with less space than it needs, then again with enough."""
    for data_set in data_sets:
        with _small_disk(data_set.place) as limit:
            for hit in HITS:
                yield from _of_command(data_set, hit, limit, hit.number(num_faults))


def _of_command(
    data_set: SmallDataSet, hit: Hit, limit: Callable[[int | None], None] | None, number: int
) -> Iterator[Outcome]:
    data_set.reset(hit.stage)
    used = _used_pages(data_set.place)
    ended = data_set.run(hit.command)
    needed = 2 * (_used_pages(data_set.place) - used) + 2  # temporaries are gone by now
    if ended.how != "ended" or ended.code:
        message = f"{data_set.form}: {hit.name} failed undisturbed: {ended}"
        raise RuntimeError(message)
    expected = Undisturbed(ended.value, data_set.published())
    for space in spread(needed if limit else _MOST_FILE_BYTES, number):
        data_set.reset(hit.stage)
        ended = _in_little_space(data_set, hit, limit, space)
        kind, what = judged(data_set, hit, expected, ended)
        file = "the disk" if limit else "any file"
        words = f"{space} free pages" if limit else f"no file beyond {space} bytes"
        yield Outcome("full_disks", data_set.form, file, hit.name, words, kind, what)


def _in_little_space(
    data_set: SmallDataSet, hit: Hit, limit: Callable[[int | None], None] | None, space: int
) -> Ended:
    if limit is None:
        return data_set.run(hit.command, lambda: _limit_files(space))
    limit(space)
    ended = data_set.run(hit.command)
    limit(None)
    return ended


def _limit_files(num_bytes: int) -> None:
    """The soft limit: the harness raises it again to say how the run ended."""
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))


def _used_pages(place: Path) -> int:
    now = os.statvfs(place)
    return (now.f_blocks - now.f_bfree) * now.f_frsize // _PAGE_BYTES


@contextlib.contextmanager
def _small_disk(place: Path) -> Iterator[Callable[[int | None], None] | None]:
    """A tmpfs at ``place`` and what sets its free pages (None: many), or None where none can be mounted."""
    if os.geteuid() or not _mount("-t", "tmpfs", "-o", "size=64m", "faults", place):
        yield None
        return

    def limit(num_free: int | None) -> None:
        size = (64 << 20) if num_free is None else (_used_pages(place) + max(1, num_free)) * _PAGE_BYTES
        if not _mount("-o", f"remount,size={size}", place):
            message = f"{place} cannot be given {size} bytes"
            raise RuntimeError(message)

    try:
        yield limit
    finally:
        subprocess.run(["umount", "--lazy", place], check=False)


def _mount(*args: object) -> bool:
    return not subprocess.run(["mount", *map(str, args)], check=False, capture_output=True).returncode
