"""The power goes: what a command has not synced may be lost, in any combination that file systems allow.

SIGKILL keeps the page cache, so it shows no missing fsync. Here the command stops before each call that
changes something, and the workplace is looked at. From these pictures and the calls follows what the disk
must hold at each moment, and what it may hold besides:

- The bytes of a file are safe once an fsync of the file has returned, its names once one of the folder has.
- Before that, each change of names is there or not, whatever became of the others. A rename is one change.
- The bytes of a file that was not synced are the last synced ones, the new ones, half of them, or zeros.

Such disks are laid out as the workplace. No wrong file may count there, the command run again must give equal
bytes, and where it had ended with 0, all that it made must be there. ``without`` takes fsync away from the
command: then this campaign has to find something, or it would show nothing.
"""

from __future__ import annotations

import os
import random
import shutil
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.at_calls import Hit, hits, wrong_state
from tests.faults.commands import BLANKED_NAME, STATE_NAME
from tests.faults.forked_case import Ended
from tests.faults.judging import Undisturbed, Verdict
from tests.faults.os_calls import Call, OsCalls
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet

_HITS = hits(
    {"plan": 1, "shard": 1, "run": 0.25, "verify": 1, "stage": 0.25, "blank": 0.25, "export nanogpt": 0.25}
)
_UNTOUCHED = frozenset(
    {"raw", "model", "tmp", STATE_NAME, BLANKED_NAME}
)  # of a workplace: no command writes there what lasts
_NUM_DISKS = 4  # of each moment

Node = int  # an inode of one file's or folder's whole life
Content = bytes | dict[str, Node]  # of a file, or of a folder


@dataclass(frozen=True)
class Picture:
    """What the workplace holds at a moment, as its commands see it."""

    root: Node
    contents: dict[Node, Content]

    def at(self, path: str) -> Node | None:
        """The node of a path below the workplace."""
        node = self.root
        for name in Path(path.strip("/")).parts:
            content = self.contents[node]
            if not isinstance(content, dict) or name not in content:
                return None
            node = content[name]
        return node


@dataclass
class Camera:
    """Takes pictures. An inode that was free for a while and is used again is another node."""

    place: Path
    _nodes: dict[int, Node] = field(default_factory=dict)
    _num_nodes: int = 0

    def take(self) -> Picture:
        contents: dict[Node, Content] = {}
        seen: dict[int, Node] = {}

        def look(path: Path) -> Node:
            status = path.lstat()
            if status.st_ino not in self._nodes:
                self._nodes[status.st_ino] = self._num_nodes
                self._num_nodes += 1
            node = seen[status.st_ino] = self._nodes[status.st_ino]
            if stat.S_ISDIR(status.st_mode):
                left_out = _UNTOUCHED if path == self.place else frozenset[str]()
                inner = [each for each in sorted(path.iterdir()) if each.name not in left_out]
                contents[node] = {each.name: look(each) for each in inner}
            else:
                contents[node] = path.read_bytes()
            return node

        root = look(self.place)
        self._nodes = seen
        return Picture(root, contents)


Change = list[tuple[Node, str, Node | None]]  # folder, name, what it names from now on


@dataclass
class Disk:
    """What surely lies on the disk, and the changes of names that may."""

    safe: dict[Node, Content]
    changes: list[Change]

    def go_on(self, before: Picture, call: Call, after: Picture) -> None:
        """A call has returned."""
        if call.op == "fsync":
            node = before.at(call.path)
            if node is not None:
                self._sync(node, before)
        change: Change = []
        for node, content in after.contents.items():
            if isinstance(content, dict):
                self.safe.setdefault(node, {})
                old = before.contents.get(node, {})
                assert isinstance(old, dict)
                for name in sorted({*old, *content}):
                    if old.get(name) != content.get(name):
                        change.append((node, name, content.get(name)))
        if change:
            self.changes.append(change)

    def copy(self) -> Disk:
        """Return a disk of its own that holds the same."""
        safe: dict[Node, Content] = {}
        for node, content in self.safe.items():
            safe[node] = dict(content) if isinstance(content, dict) else content
        return Disk(safe, list(self.changes))

    def _sync(self, node: Node, picture: Picture) -> None:
        content = picture.contents[node]
        if isinstance(content, bytes):
            self.safe[node] = content
            return
        waiting = []
        for change in self.changes:
            if any(folder == node for folder, _, _ in change):
                _apply(self.safe, change)
            else:
                waiting.append(change)
        self.changes = waiting

    def states(self, picture: Picture, chance: random.Random) -> Iterator[tuple[str, dict[Node, Content]]]:
        """Disks that may be found after the power went at this moment, in words and with their contents."""
        yield "nothing that was not synced", self._state(picture, lambda: False, lambda new, old: old)
        yield "new names, old contents", self._state(picture, lambda: True, lambda new, old: old)
        yield "new names, zeros", self._state(picture, lambda: True, lambda new, old: bytes(len(new)))
        for number in range(_NUM_DISKS - 3):

            def some(new: bytes, old: bytes) -> bytes:
                return chance.choice([new, old, new[: len(new) // 2], bytes(len(new))])

            yield f"by chance, {number}", self._state(picture, lambda: chance.random() < 0.5, some)

    def _state(
        self, picture: Picture, is_kept: Callable[[], bool], unsynced: Callable[[bytes, bytes], bytes]
    ) -> dict[Node, Content]:
        state = {
            node: dict(content) if isinstance(content, dict) else content
            for node, content in self.safe.items()
        }
        for change in self.changes:
            if is_kept():
                _apply(state, change)
        for node, content in picture.contents.items():
            old = self.safe.get(node, b"")
            if isinstance(content, bytes) and isinstance(old, bytes):
                state[node] = content if content == old else unsynced(content, old)
        return state


def _apply(contents: dict[Node, Content], change: Change) -> None:
    for folder, name, node in change:
        entries = contents.setdefault(folder, {})
        assert isinstance(entries, dict)
        if node is None:
            entries.pop(name, None)
        else:
            entries[name] = node


@dataclass(frozen=True)
class Moment:
    """The command stands before this call, or has ended where there is none."""

    call: Call | None
    disk: Disk
    picture: Picture


def record(
    data_set: SmallDataSet, calls: OsCalls, hit: Hit, before: Callable[[], None] = lambda: None
) -> tuple[Ended, list[Moment]]:
    """Run a command undisturbed; all its moments, the last one behind its end."""
    data_set.reset(hit.stage)
    camera = Camera(data_set.place)
    picture = camera.take()
    disk = Disk(safe=dict(picture.contents), changes=[])  # what stood there before is safe
    seen: list[tuple[Call, Picture]] = []

    def arm() -> None:
        before()
        calls.arm()

    with calls.ordered("each change"):
        ended = data_set.run(
            hit.command, arm, meanwhile=lambda: seen.append((calls.calls()[-1], camera.take()))
        )
    if ended.how != "ended" or ended.code or not seen:
        message = f"{data_set.form}: {hit.name} failed undisturbed, with {len(seen)} changes: {ended}"
        raise RuntimeError(message)
    moments: list[Moment] = []
    pictures = [*(picture for _, picture in seen[1:]), camera.take()]
    for (call, picture), after in zip(seen, pictures, strict=True):
        moments.append(Moment(call, disk.copy(), picture))
        disk.go_on(picture, call, after)
    moments.append(Moment(None, disk, pictures[-1]))
    return ended, moments


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Moments of each command, the last one always; of each some disks. Then the commands without fsync."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in [hit for hit in _HITS if hit.number(num_faults)]:
            ended, moments = record(data_set, calls, hit)
            expected = Undisturbed(ended.value, data_set.published())
            chosen = {*spread(len(moments), hit.number(num_faults)), len(moments) - 1}
            for number in sorted(chosen):
                yield from _of_moment(data_set, hit, expected, moments[number], number)
            if hit.command not in ("run", "blank"):  # whose workers are started anew, with fsync
                yield from _without(data_set, calls, hit, expected)


def _of_moment(
    data_set: SmallDataSet, hit: Hit, expected: Undisturbed, moment: Moment, number: int
) -> Iterator[Outcome]:
    for words, state in moment.disk.states(moment.picture, random.Random(number)):
        lay_out(data_set, hit, state, moment.picture.root)
        verdict = _judged(data_set, hit, expected, has_ended=moment.call is None)
        where = f"before {moment.call.op} {moment.call.path}" if moment.call else "after its end"
        yield Outcome("power_loss", data_set.form, "the disk", hit.name, f"{where}: {words}", *verdict)


def _judged(data_set: SmallDataSet, hit: Hit, expected: Undisturbed, *, has_ended: bool) -> Verdict:
    """What counts is right, run again it ends, and a training that was stopped goes on from it."""
    if wrong := wrong_state(data_set, hit, expected, has_ended=has_ended):
        return wrong
    if hit.stage == "verified":
        ended = data_set.run("load resumed")
        if ended.how != "ended" or ended.code or ended.value != data_set.rest:
            return "wrong", f"a state of a loader does not go on: {ended.how} {ended.code} {ended.text}"
    return "equal", ""


def lay_out(data_set: SmallDataSet, hit: Hit, state: dict[Node, Content], root: Node) -> None:
    """Make the workplace what a disk holds."""
    data_set.reset(hit.stage)
    for path in data_set.place.iterdir():
        if path.name not in _UNTOUCHED:
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    def fill(folder: Path, node: Node) -> None:
        entries = state[node]
        assert isinstance(entries, dict)
        for name, inner in entries.items():
            content = state.get(inner, b"")
            if isinstance(content, bytes):
                (folder / name).write_bytes(content)
            else:
                (folder / name).mkdir()
                fill(folder / name, inner)

    fill(data_set.place, root)


def _take_away(kinds: str) -> None:
    """In the process of a command: fsync returns at once, of files or of folders or of both."""
    fsync = os.fsync

    def heedless(number: int) -> None:
        kind = "folders" if stat.S_ISDIR(os.fstat(number).st_mode) else "files"
        if kind not in kinds:
            fsync(number)

    os.fsync = heedless  # type: ignore[assignment]


def _without(data_set: SmallDataSet, calls: OsCalls, hit: Hit, expected: Undisturbed) -> Iterator[Outcome]:
    """With fsync taken away a command must leave a wrong disk, or this campaign sees nothing."""
    for kinds in ("files", "folders", "files and folders"):
        _, moments = record(data_set, calls, hit, before=partial(_take_away, kinds))
        disks = _of_moment(data_set, hit, expected, moments[-1], 0)
        is_noticed = any(outcome.kind == "wrong" for outcome in disks)  # the first one ends it
        verdict: Verdict = ("equal", "") if is_noticed else ("wrong", "not noticed")
        yield Outcome(
            "power_loss", data_set.form, f"{kinds} without fsync", hit.name, "must be wrong", *verdict
        )
