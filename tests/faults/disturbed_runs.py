"""Eight campaigns that disturb a run at its k-th call to the operating system, or before or during it."""

from __future__ import annotations

import errno
import itertools
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from pathlib import Path

from tests.faults.forked_case import Ended, ForkedRun
from tests.faults.judging import Fault, Outcome, spread, struck
from tests.faults.os_calls import ERRORS, Call, Mode
from tests.faults.small_data_sets import EXPORTS, LISTS, WITH_HELPERS, Hit, SmallDataSet, hits

_OF_EXPORTS = dict.fromkeys(EXPORTS, 0.12)
_OF_LISTS = dict.fromkeys(LISTS, 0.5)
# Command -> its share of the faults.
_ERROR_HITS = {
    "plan": 3, "shard": 5, "shard, done": 3, "run": 0.5, "verify": 3, "verify --fast": 1.5, "load": 4,
    "load, no index": 1.5, "stage": 3, "status": 1.5, "submit": 1.5, "peek": 0.5, "doctor": 0.5,
    "train_tokenizer": 0.5, "report": 0.5, "blank": 0.12, "clean": 0.5, **_OF_EXPORTS,
}  # fmt: skip
# With --quick, a command gets its share rounded: those with 0.51 get one kill.
_KILL_HITS = {
    "plan": 1, "shard": 2, "shard, done": 0.5, "run": 0.51, "verify": 1, "stage": 1, "submit": 0.51,
    "train_tokenizer": 0.5, "report": 0.5, "blank": 0.51, "clean": 0.51, **_OF_LISTS, "overlap": 0.51,
    **_OF_EXPORTS,
}  # fmt: skip
_SHORT_HITS = {
    "plan": 1.5, "shard": 1.5, "verify": 1.5, "load": 1.5, "load tars": 1, "stage": 1.5, "status": 0.5,
}  # fmt: skip
# For the data set with all input formats, only reading differs.
_HITS_OF_FORMATS = {"formats that are cut": 0.5, "formats read whole": 0.5}
_WRITERS = {
    "plan": 0.25, "shard": 1, "run": 0.2, "verify": 0.5, "export nanogpt": 0.25, "export megatron": 0.25
}  # fmt: skip
# Each takes four runs. The short form leaves out what has 0.2.
_CROWDS = {"shard": 0.3, "stage": 0.3, "run": 0.2, "verify": 0.2, "blank": 0.2, "overlap": 0.2, "report": 0.2}
_CROWDS |= dict.fromkeys(_OF_EXPORTS, 0.2)
_READING_INPUTS = {"plan": 0.25, "shard": 1}
_READING_SHARDS = {"verify": 0.5, "load": 0.5, "stage": 0.5}
_DISK_HITS = {"plan": 0.5, "shard": 1, "run": 0.2, "verify": 0.5, "stage": 1}
_CLOCK_HITS = dict.fromkeys(
    ("plan", "shard", "shard, done", "verify", "load", "stage", "status", "submit"), 1
)
_PAGE_BYTES = 4096
_MANY_PAGES = (64 << 20) // _PAGE_BYTES
_YEAR_S = 365 * 24 * 3600
_TEMPORARY = ".shard-00000.tar.other-1-0000.tmp"
_NUM_WRITERS = 4
_MOST_STOPS = 40
_MOST_STOP_S = 0.02


FaultsOf = Callable[[SmallDataSet, Hit, int], Iterator[Fault]]


def _tried(
    campaign: str,
    shares: Mapping[str, float],
    faults_of: FaultsOf,
    data_sets: Sequence[SmallDataSet],
    *,
    num_faults: int,
) -> Iterator[Outcome]:
    """Run each command with its share of the faults."""
    for data_set in data_sets:
        for hit, number in hits(_HITS_OF_FORMATS if data_set.form == "formats" else shares, num_faults):
            for fault in faults_of(data_set, hit, number):
                yield struck(campaign, data_set, hit, fault)


def _calls(data_set: SmallDataSet, hit: Hit, number: int) -> list[tuple[int, Call]]:
    """Return up to ``number`` evenly spread calls with their positions. A single one is in the middle."""
    made = data_set.undisturbed(hit.command, hit.stage).calls
    if number == 1:
        return [(len(made) // 2, made[len(made) // 2])]
    return [(at, made[at]) for at in spread(len(made), number)]


def _errors(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    """Fail calls with their errors in turn. Every third error is lasting: all later calls fail, too."""
    for count, (at, call) in enumerate(_calls(data_set, hit, number)):
        errors = ERRORS[call.op]
        error = errors[count % len(errors)]
        mode: Mode = "lasting" if count % 3 == 2 else "once"
        if mode == "lasting" and error in (errno.EINTR, errno.EINVAL):
            error = errors[0]  # interruptions do not last, and nor does EINVAL once O_DIRECT is off
        yield Fault(words=f"{os.strerror(error)}, {mode}", at=at, mode=mode, error=error)


def _signals(
    signals: Sequence[signal.Signals], data_set: SmallDataSet, hit: Hit, number: int
) -> Iterator[Fault]:
    """Send a signal at each call, taking turns."""
    calls = _calls(data_set, hit, number)
    for (at, _), stop in zip(calls, itertools.cycle(signals), strict=False):
        yield Fault(words=stop.name, at=at, mode="signal", error=stop)


def _deaths(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    """At each call, kill one helper of a task; or the task, whose helpers then end by themselves."""
    for at, _ in _calls(data_set, hit, number):
        yield Fault(words="a helper is killed", at=at, meanwhile=_kill_a_helper)
        words = "only the task is killed"
        yield Fault(words=words, at=at, mode="signal", error=signal.SIGKILL, meanwhile=_kill_the_task)


def _kill_a_helper(_: SmallDataSet) -> None:
    for task in _children(os.getpid()):
        for helper in _children(task)[:1]:  # it has none before it is loaded, nor at its end
            os.kill(helper, signal.SIGKILL)


def _kill_the_task(_: SmallDataSet) -> None:
    for task in _children(os.getpid()):
        os.kill(task, signal.SIGKILL)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _halves(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    """Shorten all reads and writes at once, then single ones."""
    made = data_set.undisturbed(hit.command, hit.stage).calls
    moving = [at for at, call in enumerate(made) if call.op in ("read", "write")]
    yield Fault(words="half of the bytes, always", at=moving[0], mode="all short", may_refuse=False)
    for place in spread(len(moving), number):
        yield Fault(words="half of the bytes", at=moving[place], mode="short", may_refuse=False)


def _rivals(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    """At each call, run the same command in another process. Both must succeed with equal files."""
    for at, _ in _calls(data_set, hit, number):
        meanwhile = methodcaller("run", hit.command)
        yield Fault(words="another run meanwhile", at=at, meanwhile=meanwhile, may_refuse=False)


Change = Callable[[Path], object]  # of a file


def _changes(
    names: Sequence[str], kinds: Mapping[str, Change], data_set: SmallDataSet, hit: Hit, number: int
) -> Iterator[Fault]:
    """Change a file at each call. Once the change is undone, the command must succeed."""
    changes = itertools.cycle(itertools.product(names, kinds.items()))
    for (at, _), (name, (words, change)) in zip(_calls(data_set, hit, number), changes, strict=False):
        yield Fault(
            words=f"{name} {words}",
            at=at,
            meanwhile=partial(_apply, change, name),
            after=partial(_restore, name, data_set.templates / hit.stage / name),
            # plan may use the changed input. Then a second plan rightly differs.
            may_differ=hit.command == "plan",
        )


def _apply(change: Change, name: str, data_set: SmallDataSet) -> None:
    change(data_set.place / name)


def _restore(name: str, template: Path, place: Path) -> None:
    """Restore a file with its times."""
    path = place / name
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)
    shutil.copy2(template, path)


def _rewrite(path: Path) -> None:
    """Write other bytes of the same size into the same file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 :].replace(b" ", b"_"))


_KINDS: Mapping[str, Change] = {
    "is deleted": lambda path: path.unlink(),
    "is cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "becomes a FIFO": lambda path: (path.unlink(), os.mkfifo(path)),
    "becomes a folder": lambda path: (path.unlink(), path.mkdir()),
}
_KINDS_OF_INPUTS: Mapping[str, Change] = {
    **_KINDS,
    "is rewritten": _rewrite,
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"one line more\n"),
}
_SHARD_FILES = ("shard-00000.tar", "shard-00001.idx", "shard-00000.json", "tokenizer/tokenizer.json")

injected_errors = partial(_tried, "injected_errors", _ERROR_HITS, _errors)
kills = partial(_tried, "kills", _KILL_HITS, partial(_signals, [signal.SIGKILL]))
_STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
stop_signals = partial(_tried, "stop_signals", _KILL_HITS, partial(_signals, _STOPS))
deaths = partial(_tried, "deaths", {WITH_HELPERS: 1}, _deaths)
short_transfers = partial(_tried, "short_transfers", _SHORT_HITS, _halves)


def races(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Run a rival process at each call, then change inputs and shards, then run several writers at once."""
    of_inputs = partial(_changes, ["raw/a.txt"], _KINDS_OF_INPUTS)
    of_shards = partial(_changes, [f"data/{name}" for name in _SHARD_FILES], _KINDS)
    yield from _tried("races", _WRITERS, _rivals, data_sets, num_faults=num_faults)
    yield from _tried("changes", _READING_INPUTS, of_inputs, data_sets, num_faults=num_faults)
    yield from _tried("changes", _READING_SHARDS, of_shards, data_sets, num_faults=num_faults)
    yield from _tried("races", _CROWDS, _crowds, data_sets, num_faults=num_faults)


def _crowds(_: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    """Run writers of the same files at the same time and stop them at random. All must end with 0."""
    for seed in range(number):
        words = f"{_NUM_WRITERS} at a time, stopped at random, seed {seed}"
        yield Fault(words=words, beside=partial(_crowd, hit.command, seed), may_refuse=False)


def _crowd(command: str, seed: int, data_set: SmallDataSet, run: ForkedRun) -> list[Ended]:
    draw = random.Random(seed)
    others = [data_set.start(command) for _ in range(_NUM_WRITERS - 1)]
    time.sleep(draw.random() * _MOST_STOP_S)
    for _ in range(_MOST_STOPS):
        stopped = draw.choice([run, *others])
        os.kill(stopped.pid, signal.SIGSTOP)
        time.sleep(draw.random() * _MOST_STOP_S)
        os.killpg(stopped.pid, signal.SIGCONT)
    return [other.end() for other in others]


def full_disks(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Run each command with less space than it needs, then again with enough."""
    for data_set in data_sets:
        if not os.geteuid() and _mount("-t", "tmpfs", "-o", "size=64m", "faults", data_set.place):
            try:
                yield from _tried("full_disks", _DISK_HITS, _few_pages, [data_set], num_faults=num_faults)
            finally:
                subprocess.run(["umount", "--lazy", data_set.place], check=False)


def _few_pages(data_set: SmallDataSet, hit: Hit, number: int) -> Iterator[Fault]:
    data_set.reset(hit.stage)
    used = _used_pages(data_set.place)
    data_set.run(hit.command)
    needed = 2 * (_used_pages(data_set.place) - used) + 2  # room for temporaries, which are removed by now
    for pages in spread(needed, number):
        before, after = partial(_leave_free, max(1, pages)), partial(_leave_free, _MANY_PAGES)
        yield Fault(words=f"{pages} free pages", before=before, after=after)


def _used_pages(place: Path) -> int:
    now = os.statvfs(place)
    return (now.f_blocks - now.f_bfree) * now.f_frsize // _PAGE_BYTES


def _leave_free(num_pages: int, place: Path) -> None:
    size = (_used_pages(place) + num_pages) * _PAGE_BYTES
    assert _mount("-o", f"remount,size={size}", place), f"{place} cannot be given {size} bytes"


def _mount(*args: object) -> bool:
    return not subprocess.run(["mount", *map(str, args)], check=False, capture_output=True).returncode


def clocks(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Run each command under each clock, and with files of each age. With few faults they take turns."""
    turns = itertools.cycle(_CLOCKS)

    def faults_of(_: SmallDataSet, __: Hit, number: int) -> Iterator[Fault]:
        yield from _CLOCKS if number > len(_CLOCKS) else [next(turns)]

    return _tried("clocks", _CLOCK_HITS, faults_of, data_sets, num_faults=num_faults)


def _shifted(words: str, shifts: Iterator[float]) -> Fault:
    """Return a fault that shifts each reading of the clock by the next of ``shifts``, in seconds."""

    def shift() -> None:
        real = time.time
        time.time = lambda: real() + next(shifts)

    return Fault(words=words, inside=shift, may_refuse=False)


def _aged(words: str, shift_s: float) -> Fault:
    """Return a fault that shifts the times of the data set's files and of a temporary, but not of inputs."""

    def age(place: Path) -> None:
        (place / "data").mkdir(exist_ok=True)
        (place / "data" / _TEMPORARY).write_bytes(b"another attempt's")
        then = time.time() + shift_s
        for path in (place / "data").rglob("*"):
            os.utime(path, (then, then))

    return Fault(words=words, before=age, may_refuse=False)


_CLOCKS = [
    _shifted("ten years ahead", itertools.repeat(10.0 * _YEAR_S)),
    _shifted("ten years behind", itertools.repeat(-10.0 * _YEAR_S)),
    _shifted("back an hour at each look", itertools.count(0.0, -3600.0)),
    _shifted("to and fro by a day", itertools.cycle([0.0, 86_400.0, -86_400.0])),
    _aged("files of next year", _YEAR_S),
    _aged("files of 1971", _YEAR_S - time.time()),
]
