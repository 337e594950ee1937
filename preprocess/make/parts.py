"""The shards that one of several equal processes makes: ``run`` under srun, mpirun, or with ``--part``.

The shards are dealt like cards, the longest first. A process that has made its own makes those of others that
nobody has begun, and at the end it waits for those that are being made. If one of these is late, its process
may have died, and it is made again. Two processes that make one shard write equal bytes, so there is no lock:
only the last few shards may be made twice.

A process sees what others have begun by the marks of attempts, see ``preprocess.make.attempt``. Marks older
than its own start are of attempts that were killed, and do not count.

Price: a listing of the folder at the start, one when the own shards are made, and then one every few seconds
while it waits; two calls more per shard.
"""

from __future__ import annotations

import os
import re
import time
from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field

from preprocess.make.attempt import clean_done_shards, marks_of
from shardprep.errors import UsageError
from shardprep.format.attempts import Failure, bad_inputs_of_job
from shardprep.format.data_folder import DataFolder
from shardprep.format.done import done_manifest, read_findings
from shardprep.format.manifest import Manifest, manifest_ids
from shardprep.format.plan import Plan
from shardprep.launch import ArrayPlace, NodePlace, find_array_place, find_launch, find_node_place

_STARTS_DIFFER_S = 30.0  # between the processes of a launch
_OF_ARRAY = "SLURM_ARRAY_TASK_ID/COUNT"
_PART = re.compile(r"([0-9]{1,9})/([0-9]{1,9})")
_SLOW_BYTES_PER_S = 2e6  # of input, of a process whose speed is not known
_TIMES_LONGER = 2  # than it should take: then a shard is late
_LEAST_PATIENCE_S = 10.0
_LATER_S = 5.0  # that each further process waits for a late shard, so that not all make it again
_MOST_LATER_S = 120.0
_LOOK_EVERY_S = 5.0
_FIRST_LOOK_S = 0.5
_ORPHAN_S = 1.0  # without a mark: by then a process that has just taken the shard has made one


@dataclass(frozen=True, kw_only=True)
class Part:
    """One of several processes that share the shards."""

    number: int = 0  # from 0
    num_parts: int = 1
    said_by: str = ""  # the variables or the flag that say so
    place: NodePlace = field(default_factory=NodePlace)
    is_first: bool = True  # of the parts whose output is mixed with its own

    @property
    def is_alone(self) -> bool:
        return self.num_parts == 1

    @property
    def is_of_array(self) -> bool:
        """Return whether the tasks of a job array are parts."""
        return self.said_by.startswith(_OF_ARRAY)


def find_part(given: str | None, environ: Mapping[str, str], *, shares_array: bool = False) -> Part:
    """Return the part of this process: ``--part I/N``, or what its launcher says. Raises UsageError.

    ``shares_array``: the tasks of a job array share the shards, too.
    """
    if given is not None and shares_array:
        raise UsageError(found="--part and --array", expected="one of them")
    if given is not None:
        match = _PART.fullmatch(given)
        if not match or int(match[1]) >= int(match[2]):
            expected = "I/N with I from 0 to N-1, such as 0/4, 1/4, 2/4 and 3/4"
            raise UsageError.of_value("--part", given, expected)
        return Part(number=int(match[1]), num_parts=int(match[2]), said_by="--part")
    launch = find_launch(environ, otherwise="or --part I/N")
    array = ArrayPlace()
    if shares_array:
        array = find_array_place(environ)
    if launch is None or launch.num_processes == 1:
        if array.num_tasks == 1:
            return Part()
        return Part(number=array.number, num_parts=array.num_tasks, said_by=_OF_ARRAY)
    if not 0 <= launch.rank < launch.num_processes:
        found = f"process {launch.rank} of {launch.num_processes} (from {launch.said_by})"
        raise UsageError(found=found, expected="numbers from 0 on; or name them: --part I/N")
    said_by = launch.said_by
    if array.num_tasks > 1:
        said_by = f"{_OF_ARRAY}, {said_by}"
    return Part(
        number=array.number * launch.num_processes + launch.rank,
        num_parts=array.num_tasks * launch.num_processes,
        said_by=said_by,
        place=find_node_place(environ),
        is_first=launch.rank == 0,
    )


def shards_of_part(wanted: Collection[int], sizes: list[int], part: Part) -> list[int]:
    """Return the shards of a part, the longest first.

    >>> shards_of_part(range(5), [10, 50, 20, 40, 30], Part(number=0, num_parts=2))
    [1, 4, 0]
    """
    longest_first = sorted(wanted, key=lambda shard_id: (-sizes[shard_id], shard_id))
    return longest_first[part.number :: part.num_parts]


class ShardQueue:
    """The shards that this process has still to make, in order."""

    def __init__(self, shard_ids: Iterable[int]) -> None:
        self._left = deque(shard_ids)

    def known_left(self) -> Collection[int]:
        """Return the shards known to be left."""
        return self._left

    def look_for(self, num_wanted: int) -> Collection[int]:  # noqa: ARG002 - of PartQueue
        """Return the shards that are left. With fewer than ``num_wanted`` a part looks, once, for others'."""
        return self._left

    def take(self) -> int | None:
        """Return the next shard, or None if there is none."""
        return self._left.popleft() if self._left else None


class PartQueue(ShardQueue):
    """The shards of a part, and after them those of others that nobody has begun."""

    def __init__(self, folder: DataFolder, plan: Plan, wanted: Collection[int], part: Part) -> None:
        self._folder = folder
        self._plan = plan
        self._wanted = set(wanted)
        self._part = part
        self._sizes = plan.shard_bytes()
        everything = shards_of_part(wanted, self._sizes, Part())
        self._owner = {shard_id: place % part.num_parts for place, shard_id in enumerate(everything)}
        self._own = set(shards_of_part(wanted, self._sizes, part))
        self._has_looked = False
        self._taken: set[int] = set()
        self._began = time.time()
        self.bad: dict[int, Failure] = {}  # that failed in other parts, and would fail here, too
        self.num_missing = len(self._not_listed())
        missing = clean_done_shards(folder, plan.plan_id, self._own)
        super().__init__(shards_of_part(missing, self._sizes, Part()))

    def begins_at(self, began: float) -> None:
        """Set when this process began, by the clock of the file system."""
        self._began = began - _STARTS_DIFFER_S

    def look_for(self, num_wanted: int) -> Collection[int]:
        if len(self._left) < num_wanted and not self._has_looked:
            self._has_looked = True
            self._left.extend(self._of_others(self._not_listed() - self._own))
        return self._left

    def take(self) -> int | None:
        while self.look_for(1):
            shard_id = self._left.popleft()
            if shard_id not in self._taken and not self._is_begun(shard_id) and not self._is_done(shard_id):
                self._taken.add(shard_id)
                return shard_id
        return None

    def _of_others(self, shard_ids: Collection[int]) -> list[int]:
        """Return shards in an order that differs between the parts: from the end at which no owner begins."""
        others = shards_of_part(shard_ids, self._sizes, Part())
        others.reverse()
        start = len(others) * self._part.number // self._part.num_parts
        return others[start:] + others[:start]

    def _not_listed(self) -> set[int]:
        """Return the wanted shards whose manifest is not listed, or that verify found wrong.

        A listed shard may not be done: its tar may have another size. Opening all manifests would cost each
        part as much as all together, so a part opens those of its own shards alone, at its start. Until such
        a shard is made again, the other parts take it for done, and they may end before its owner does.
        """
        listed = set(manifest_ids(self._folder)) - read_findings(self._folder, self._plan.plan_id).keys()
        return self._wanted - listed

    def _is_begun(self, shard_id: int) -> bool:
        for mark in marks_of(shard_id):
            status = self._folder.status_of(mark)
            if status is not None and status.st_mtime >= self._began:
                return True
        return False

    def _is_done(self, shard_id: int) -> bool:
        return done_manifest(self._folder, shard_id, self._plan.plan_id) is not None

    def rest(self, made: Collection[Manifest], failed: Collection[int]) -> ShardQueue | None:
        """Wait until all shards are made and return None, or return those that this process has to make.

        These are nobody's any more, or late. ``made`` by this process, whose speed says what is late;
        ``failed`` ones are not waited for.
        """
        slowest_s = max((each.run.wall_s / max(1, each.counts.input_bytes) for each in made), default=0.0)
        s_per_byte = slowest_s or 1 / _SLOW_BYTES_PER_S
        first_seen: dict[tuple[int, int], float] = {}
        look_s = _FIRST_LOOK_S
        while True:
            missing = self._not_listed().difference(failed, self.bad)
            if not missing:
                return None
            listed = set(self._folder.names())
            now = time.monotonic()
            orphans = []
            late = []
            for shard_id in sorted(missing):
                num_marks = sum(mark in listed for mark in marks_of(shard_id))
                waited_s = now - first_seen.setdefault((shard_id, num_marks), now)
                if not num_marks and waited_s >= _ORPHAN_S:
                    orphans.append(shard_id)
                elif waited_s > self._patience_s(shard_id, s_per_byte):
                    late.append(shard_id)
            if orphans:
                self.bad |= bad_inputs_of_job(self._folder, self._plan.plan_id)
                orphans = [each for each in orphans if each not in self.bad and not self._is_done(each)]
            if orphans:
                self._taken.difference_update(orphans)
                self._left.extend(self._of_others(orphans))
                return self
            late = [each for each in late if not self._is_done(each)]
            if late:
                return ShardQueue(late)
            time.sleep(look_s)
            look_s = min(2 * look_s, _LOOK_EVERY_S)

    def _patience_s(self, shard_id: int, s_per_byte: float) -> float:
        """Return how long this process waits for a shard. Each further part waits longer."""
        wait_s = max(_LEAST_PATIENCE_S, _TIMES_LONGER * s_per_byte * self._sizes[shard_id])
        distance = (self._part.number - self._owner[shard_id]) % self._part.num_parts
        return wait_s + min(_MOST_LATER_S, _LATER_S * distance)


def time_of_file_system(path: str | None) -> float:
    """Return when a file was written, in seconds since 1970 by its file system's clock, now without one."""
    if path:
        try:
            return os.stat(path).st_mtime  # noqa: PTH116 - text
        except OSError:
            pass
    return time.time()
