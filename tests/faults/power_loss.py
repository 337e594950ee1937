"""Power cuts: what a command has not synced may be lost, in any combination that file systems allow.

The command is stopped before each call that changes something, and the workplace is recorded. This shows what
the disk must have at each moment, and what it may have:

- The bytes of a file are safe after an fsync of the file, and its name after an fsync of the folder.
- Until then, each change of names may be lost, independently of the others. A rename is one change.
- A file that was not synced has its last synced bytes, the new ones, half of them, or zeros.

The campaign creates such disks as the workplace and judges them. ``_without`` disables fsync in the command:
then the campaign must find a wrong disk, or it would prove nothing.
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

from tests.faults.judging import EQUAL, Failure, Outcome, Verdict, check_state, outcome_of, spread
from tests.faults.os_calls import Call
from tests.faults.small_data_sets import Hit, SmallDataSet, hits

_HITS = {
    "plan": 1, "shard": 1, "verify": 1, "run": 0.25, "stage": 0.25, "blank": 0.25, "export nanogpt": 0.25,
}  # fmt: skip
# Parts of a workplace where commands write nothing that must last.
_UNTOUCHED = {"raw", "model", "tmp", "state", "blanked"}

Node = int  # a file or folder during its whole life; the workplace is 0
Names = dict[tuple[Node, str], Node | None]  # (folder, name) -> what it names, or None once it is removed


@dataclass
class Tree:
    """Files and names. A named node that is not a file is a folder."""

    files: dict[Node, bytes] = field(default_factory=dict)
    names: Names = field(default_factory=dict)

    def copy(self) -> Tree:
        return Tree({**self.files}, {**self.names})


class Camera:
    """Records a workplace. An inode number that is reused for a new file gets a new node."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._nodes: dict[int, Node] = {}  # inode number -> node, for all current files
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
    """The state just before a call of the command, or after its end."""

    call: Call | None  # None: the command has ended
    seen: Tree  # the workplace as commands see it
    safe: Tree  # what is certainly on the disk
    changes: list[Names]  # changes of names that may be on the disk

    def after(self, seen: Tree, call: Call | None) -> Moment:
        """Return the moment after this one's call has returned."""
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
        """Yield disks that a power cut at this moment may leave, with a description."""
        yield "nothing that was not synced", self._disk(lambda: False, lambda new, old: old)
        yield "new names, old contents", self._disk(lambda: True, lambda new, old: old)
        yield "new names, zeros", self._disk(lambda: True, lambda new, old: bytes(len(new)))

        def some(new: bytes, old: bytes) -> bytes:
            return chance.choice([new, old, new[: len(new) // 2], bytes(len(new))])

        yield "at random", self._disk(lambda: chance.random() < 0.5, some)

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
    """Judge disks at some moments of each command and at its end. Then run the commands without fsync."""
    for data_set in data_sets:
        for hit, number in hits(_HITS, num_faults):
            moments = _recorded(data_set, hit)
            for at in sorted({*spread(len(moments), number), len(moments) - 1}):
                yield from _of_moment(data_set, hit, moments[at], at)
            if hit.command not in ("run", "blank"):  # their workers are new processes, with fsync
                yield from _without(data_set, hit)


def _recorded(data_set: SmallDataSet, hit: Hit, before: Callable[[], None] = lambda: None) -> list[Moment]:
    """Run a command undisturbed and return all its moments, the last one after its end."""
    data_set.reset(hit.stage)
    camera, calls = Camera(data_set.place), data_set.calls
    start = camera.look()
    moments = [Moment(None, start, start, [])]  # everything that existed before is safe

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
        _write_disk(data_set, hit, disk)
        yield outcome_of("power_loss", data_set, hit, f"{where}: {words}", judge)


def _judged(data_set: SmallDataSet, hit: Hit, *, has_ended: bool) -> Verdict:
    """Check the files, a second run of the command, and that training resumes from a state."""
    check_state(data_set, hit, data_set.undisturbed(hit.command, hit.stage), has_ended=has_ended)
    if hit.stage == "verified":
        ended = data_set.run("load resumed")
        if not ended.is_well or ended.value != data_set.undisturbed("load resumed", "verified").value:
            raise Failure("wrong", f"training does not resume from a state: {ended}")
    return EQUAL


def _write_disk(data_set: SmallDataSet, hit: Hit, disk: Tree) -> None:
    """Replace the workplace by the contents of a disk."""
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


def _disable_fsync(kinds: str) -> None:
    """Make fsync of files, folders or both do nothing in this process."""
    real = os.fsync

    def fsync(number: int) -> None:
        kind = "folders" if stat.S_ISDIR(os.fstat(number).st_mode) else "files"
        if kind not in kinds:
            real(number)

    os.fsync = fsync  # type: ignore[assignment]


def _without(data_set: SmallDataSet, hit: Hit) -> Iterator[Outcome]:
    """Check that a command without fsync leaves a wrong disk, so that the campaign does find them."""
    for kinds in ("files", "folders", "files and folders"):
        moment = _recorded(data_set, hit, before=partial(_disable_fsync, kinds))[-1]
        # Stops at the first wrong disk.
        is_noticed = any(outcome.kind == "wrong" for outcome in _of_moment(data_set, hit, moment, 0))
        verdict: Verdict = EQUAL if is_noticed else ("wrong", "not noticed")
        yield Outcome("power_loss", data_set.form, hit.name, f"{kinds} without fsync", *verdict)
