"""Something else happens at the k-th call to the operating system: another writer, or a change of the input.

The command stops there, the other thing happens whole, and the command goes on. And four writers run beside
each other, stopped at random.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.at_calls import Hit, OsFault, counted, hits, judged, outcome_at
from tests.faults.forked_case import Ended
from tests.faults.judging import Undisturbed, Verdict, not_ended, shape
from tests.faults.os_calls import OsCalls
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet

WRITERS = hits(
    {"plan": 0.25, "shard": 1, "run": 0.2, "verify": 0.5, "export nanogpt": 0.25, "export megatron": 0.25}
)
CROWDS = hits({"shard": 3, "stage": 3})  # stage waits for the other
READING_INPUTS = hits({"plan": 0.25, "shard": 1})
READING_SHARDS = hits({"verify": 0.5, "load": 0.5, "stage": 0.5})
_NUM_WRITERS = 4
_FAULTS_PER_CROWD = 4  # so many fewer of these, which take four runs each
_MOST_STOPS = 40
_MOST_STOP_S = 0.02


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """The same command of another process at each call; then changes of inputs and shards; then crowds."""
    for data_set in data_sets:
        calls = OsCalls(data_set.place)
        for hit in WRITERS:
            expected, made = counted(data_set, calls, hit)
            for at in spread(len(made), hit.number(num_faults)):
                yield _with_another(data_set, calls, hit, expected, at)
        for readers, change_of in ((READING_INPUTS, _INPUT_CHANGES), (READING_SHARDS, _SHARD_CHANGES)):
            changes = list(change_of.items())
            for hit in readers:
                expected, made = counted(data_set, calls, hit)
                for number, at in enumerate(spread(len(made), hit.number(num_faults))):
                    words, change = changes[number % len(changes)]
                    yield _with_change(data_set, calls, hit, expected, at, words, change)
        yield from _crowds(data_set, -(-num_faults // _FAULTS_PER_CROWD))


def _paused(
    data_set: SmallDataSet, calls: OsCalls, hit: Hit, fault: OsFault, meanwhile: Callable[[], None]
) -> Ended:
    data_set.reset(hit.stage)
    with calls.ordered(fault.mode, at=fault.at, error=fault.error):
        return data_set.run(hit.command, calls.arm, meanwhile=meanwhile)


def _pause(at: int) -> OsFault:
    return OsFault(at=at, mode="signal", error=signal.SIGSTOP)


def _with_another(
    data_set: SmallDataSet, calls: OsCalls, hit: Hit, expected: Undisturbed, at: int
) -> Outcome:
    """Both must end well, and what they leave be equal."""
    others: list[Ended] = []
    fault = _pause(at)
    ended = _paused(data_set, calls, hit, fault, lambda: others.append(data_set.run(hit.command)))
    kind, what = judged(data_set, hit, expected, ended)
    for other in others:
        if kind == "equal":
            kind, what = _ended_well(other)
    if kind == "refused":
        kind, what = "wrong", f"two at a time are refused: {shape(what)}"
    return outcome_at("races", data_set, calls, hit, fault, (kind, what), "another one meanwhile")


def _ended_well(ended: Ended) -> Verdict:
    if how := not_ended(ended):
        return how
    return ("equal", "") if not ended.code else ("wrong", f"one ends with {ended.code}: {shape(ended.text)}")


def _with_change(
    data_set: SmallDataSet,
    calls: OsCalls,
    hit: Hit,
    expected: Undisturbed,
    at: int,
    words: str,
    change: Callable[[Path], Callable[[], None]],
) -> Outcome:
    """Refused, or equal to what it is without the change; once that is undone, the command ends well."""
    undo: list[Callable[[], None]] = []
    fault = _pause(at)
    ended = _paused(data_set, calls, hit, fault, lambda: undo.append(change(data_set.place)))
    for each in undo:
        each()
    verdict = _changed(ended, hit) or judged(data_set, hit, expected, ended)
    return outcome_at("changes", data_set, calls, hit, fault, verdict, words)


def _changed(ended: Ended, hit: Hit) -> Verdict | None:
    """Planning may take the input as it is afterwards; a second plan then differs, and that is right."""
    is_plan_of_other_input = hit.command == "plan" and ended.how == "ended" and not ended.code
    return ("equal", "") if is_plan_of_other_input else None


def _crowds(data_set: SmallDataSet, number: int) -> Iterator[Outcome]:
    """Writers of the same files, beside each other and stopped at random: all end with 0."""
    for hit in CROWDS:
        data_set.reset(hit.stage)
        ended = data_set.run(hit.command)
        expected = Undisturbed(ended.value, data_set.published())
        for seed in range(number):
            data_set.reset(hit.stage)
            endings = _crowd(data_set, hit, seed)
            kind, what = next((bad for bad in map(_ended_well, endings) if bad[0] != "equal"), ("equal", ""))
            if kind == "equal":
                kind, what = judged(data_set, hit, expected, endings[0])
            words = f"{_NUM_WRITERS} at a time, stopped at random, seed {seed}"
            yield Outcome("races", data_set.form, "all", hit.name, words, kind, what)


def _crowd(data_set: SmallDataSet, hit: Hit, seed: int) -> list[Ended]:
    draw = random.Random(seed)
    runs = [data_set.start(hit.command) for _ in range(_NUM_WRITERS)]
    time.sleep(draw.random() * _MOST_STOP_S)
    for _ in range(_MOST_STOPS):
        run = draw.choice(runs)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(draw.random() * _MOST_STOP_S)
        run.go_on()
    return [run.end() for run in runs]


def _changing(path: Path, change: Callable[[Path], object]) -> Callable[[], None]:
    """Change a file, and return what brings it back, with its times."""
    stat, aside = path.stat(), path.with_name(f".was_{path.name}")
    data = path.read_bytes()

    def undo() -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        elif path.is_symlink() or path.exists():
            path.unlink()
        aside.unlink(missing_ok=True)
        path.write_bytes(data)
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))

    change(path)
    return undo


def _replace(make: Callable[[Path], object], path: Path) -> None:
    path.rename(path.with_name(f".was_{path.name}"))
    make(path)


def _rewrite(path: Path) -> None:
    """Other bytes of the same size, in the same file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 :].replace(b" ", b"_"))


def _append(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"one line more\n")


def _of(name: str, change: Callable[[Path], object]) -> Callable[[Path], Callable[[], None]]:
    return lambda place: _changing(place / name, change)


_KINDS: dict[str, Callable[[Path], object]] = {
    "is deleted": lambda path: path.unlink(),
    "is cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "becomes a FIFO": partial(_replace, lambda path: os.mkfifo(path)),
    "becomes a folder": partial(_replace, lambda path: path.mkdir()),
}
_INPUT_CHANGES = {
    f"the input {words}": _of("raw/a.txt", change)
    for words, change in {**_KINDS, "is rewritten": _rewrite, "grows": _append}.items()
}
_SHARD_CHANGES = {
    f"{name} {words}": _of(f"data/{name}", change)
    for name in ("shard-00000.tar", "shard-00001.idx", "shard-00000.json", "tokenizer/tokenizer.json")
    for words, change in _KINDS.items()
}
