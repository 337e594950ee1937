"""The power goes: what a command has not synced may be lost, in any combination that file systems allow.

The command stops before each call that changes something, and the workplace is looked at. From what was seen
and the calls follows what the disk must hold at each moment, and what it may hold besides:

- The bytes of a file are safe once an fsync of the file has returned, its names once one of the folder has.
- Before that, each change of names is there or not, whatever became of the others. A rename is one change.
- The bytes of a file that was not synced are the last synced ones, the new ones, half of them, or zeros.

Such disks are laid out as the workplace, and judged. ``_without`` takes fsync away from the command: then
this campaign has to find something, or it would show nothing.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.judging import (
    EQUAL,
    Failure,
    Outcome,
    Verdict,
    check_state,
    failures,
    outcome_of,
    spread,
)  # fmt: skip
from tests.faults.os_calls import Call
from tests.faults.small_data_sets import Hit, SmallDataSet, hits

_HITS = {
    "plan": 1,
    "shard": 1,
    "verify": 1,
    "run": 0.25,
    "stage": 0.25,
    "blank": 0.25,
    "export nanogpt": 0.25,
}
# Of a workplace: no command writes there what lasts.
_UNTOUCHED = {"raw", "model", "tmp", "state", "blanked"}

Node = int  # an inode of one file's or folder's whole life; the workplace is 0
Names = dict[tuple[Node, str], Node | None]  # of a folder: what they name, or are to name from now on


@dataclass
class Tree:
    """Files and names. What names give and is no file is a folder."""

    files: dict[Node, bytes] = field(default_factory=dict)
    names: Names = field(default_factory=dict)

    def copy(self) -> Tree:
        return Tree({**self.files}, {**self.names})


class Camera:
    """Looks at a workplace. An inode that was free for a while and is used again is another node."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._nodes: dict[int, Node] = {}  # of what is there now
        self._new_nodes = itertools.count()

    def look(self) -> Tree:
        tree, nodes = Tree(), dict[int, Node]()
        for path in [self._place, *sorted(self._place.rglob("*"))]:
            if _UNTOUCHED.isdisjoint(path.relative_to(self._place).parts[:1]):
                status = path.lstat()
                known = nodes.get(status.st_ino, self._nodes.get(status.st_ino))
                node = nodes[status.st_ino] = next(self._new_nodes) if known is None else known
                if path != self._place:
                    tree.names[nodes[path.parent.lstat().st_ino], path.name] = node
                if not stat.S_ISDIR(status.st_mode):
                    tree.files[node] = path.read_bytes()
        self._nodes = nodes
        return tree


@dataclass(frozen=True)
class Moment:
    """The command stands before this call, or has ended where there is none."""

    call: Call | None
    seen: Tree  # as commands see the workplace
    safe: Tree  # what surely lies on the disk
    changes: list[Names]  # which may lie there

    def after(self, seen: Tree, call: Call | None) -> Moment:
        """Return the moment once this one's call has returned."""
        safe, changes = self.safe.copy(), self.changes
        if self.call and self.call.op == "fsync":
            node: Node | None = 0
            for name in Path(self.call.path.strip("/")).parts:
                node = None if node is None else self.seen.names.get((node, name))
            if node in self.seen.files:
                safe.files[node] = self.seen.files[node]
            changes = []
            for change in self.changes:
                if any(folder == node for folder, _ in change):
                    safe.names.update(change)
                else:
                    changes.append(change)
        for node in seen.files:
            safe.files.setdefault(node, b"")
        old, new = self.seen.names, seen.names
        change = {name: new.get(name) for name in {*old, *new} if old.get(name) != new.get(name)}
        return Moment(call, seen, safe, [*changes, change] if change else changes)

    def disks(self, chance: random.Random) -> Iterator[tuple[str, Tree]]:
        """Disks that may be found after the power went at this moment, in words and with their contents."""
        yield "nothing that was not synced", self._disk(lambda: False, lambda new, old: old)
        yield "new names, old contents", self._disk(lambda: True, lambda new, old: old)
        yield "new names, zeros", self._disk(lambda: True, lambda new, old: bytes(len(new)))

        def some(new: bytes, old: bytes) -> bytes:
            return chance.choice([new, old, new[: len(new) // 2], bytes(len(new))])

        yield "by chance", self._disk(lambda: chance.random() < 0.5, some)

    def _disk(self, is_kept: Callable[[], bool], unsynced: Callable[[bytes, bytes], bytes]) -> Tree:
        disk = self.safe.copy()
        for change in self.changes:
            if is_kept():
                disk.names.update(change)
        for node, content in self.seen.files.items():
            old = self.safe.files[node]
            disk.files[node] = content if content == old else unsynced(content, old)
        return disk


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Moments of each command, the last one always; of each some disks. Then the commands without fsync."""
    for data_set in data_sets:
        for hit, number in hits(_HITS, num_faults):
            moments = _recorded(data_set, hit)
            for at in sorted({*spread(len(moments), number), len(moments) - 1}):
                yield from _of_moment(data_set, hit, moments[at], at)
            if hit.command not in ("run", "blank"):  # whose workers are started anew, with fsync
                yield from _without(data_set, hit)


def _recorded(data_set: SmallDataSet, hit: Hit, before: Callable[[], None] = lambda: None) -> list[Moment]:
    """Run a command undisturbed; all its moments, the last one behind its end."""
    data_set.reset(hit.stage)
    camera, calls = Camera(data_set.place), data_set.calls
    start = camera.look()
    moments = [Moment(None, start, start, [])]  # what stood there before is safe

    def arm() -> None:
        before()
        calls.arm()

    def look() -> None:
        moments.append(moments[-1].after(camera.look(), calls.calls()[-1]))

    with calls.ordered("each change"):
        ended = data_set.start(hit.command, arm).end(look)
    assert ended.is_well, f"{data_set.form}: {hit.name} fails undisturbed: {ended}"
    assert len(moments) > 1, f"{data_set.form}: {hit.name} changes nothing"
    return [*moments[1:], moments[-1].after(camera.look(), None)]


def _of_moment(data_set: SmallDataSet, hit: Hit, moment: Moment, number: int) -> Iterator[Outcome]:
    where = f"before {moment.call.op} {moment.call.path}" if moment.call else "after its end"
    judge = partial(_judged, data_set, hit, has_ended=moment.call is None)
    for words, disk in moment.disks(random.Random(number)):
        _lay_out(data_set, hit, disk)
        yield outcome_of("power_loss", data_set, "the disk", hit.name, f"{where}: {words}", judge)


def _judged(data_set: SmallDataSet, hit: Hit, *, has_ended: bool) -> Verdict:
    """What counts is right, run again it ends, and a training that was stopped goes on from it."""
    check_state(data_set, hit, data_set.undisturbed(hit.command, hit.stage), has_ended=has_ended)
    if hit.stage == "verified":
        ended = data_set.run("load resumed")
        if not ended.is_well or ended.value != data_set.undisturbed("load resumed", "verified").value:
            raise Failure("wrong", f"a state of a loader does not go on: {ended}")
    return EQUAL


def _lay_out(data_set: SmallDataSet, hit: Hit, disk: Tree) -> None:
    """Make the workplace what a disk holds."""
    data_set.reset(hit.stage)
    for path in data_set.place.iterdir():
        if path.name not in _UNTOUCHED:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def fill(folder: Path, node: Node) -> None:
        folder.mkdir(exist_ok=True)
        for (parent, name), inner in disk.names.items():
            if parent == node and inner in disk.files:
                (folder / name).write_bytes(disk.files[inner])
            elif parent == node and inner is not None:
                fill(folder / name, inner)

    fill(data_set.place, 0)


def _take_away(kinds: str) -> None:
    """In the process of a command: fsync returns at once, of files or of folders or of both."""
    fsync = os.fsync

    def heedless(number: int) -> None:
        kind = "folders" if stat.S_ISDIR(os.fstat(number).st_mode) else "files"
        if kind not in kinds:
            fsync(number)

    os.fsync = heedless  # type: ignore[assignment]


def _without(data_set: SmallDataSet, hit: Hit) -> Iterator[Outcome]:
    """With fsync taken away a command must leave a wrong disk, or this campaign sees nothing."""
    for kinds in ("files", "folders", "files and folders"):
        moment = _recorded(data_set, hit, before=partial(_take_away, kinds))[-1]
        # The first wrong disk ends it.
        is_noticed = any(failures([outcome]) for outcome in _of_moment(data_set, hit, moment, 0))
        verdict: Verdict = EQUAL if is_noticed else ("wrong", "not noticed")
        file = f"{kinds} without fsync"
        yield Outcome("power_loss", data_set.form, file, hit.name, "must be wrong", *verdict)
