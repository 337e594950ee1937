"""Something else happens at the k-th call to the operating system: another writer, or a change of the input.

The command stops there, the other thing happens whole, and the command goes on. And four writers run beside
each other, stopped at random.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from tests.faults.at_calls import Fault, struck
from tests.faults.forked_case import Ended
from tests.faults.judging import EQUAL, Outcome, Verdict, shape, spread, verdict_at_call, verdict_of_end
from tests.faults.small_data_sets import Hit, SmallDataSet, hits

_WRITERS = {
    "plan": 0.25, "shard": 1, "run": 0.2, "verify": 0.5, "export nanogpt": 0.25, "export megatron": 0.25
}  # fmt: skip
_CROWDS = {"shard": 0.3, "stage": 0.3}  # these take four runs each; stage waits for the other
_READING_INPUTS = {"plan": 0.25, "shard": 1}
_READING_SHARDS = {"verify": 0.5, "load": 0.5, "stage": 0.5}
_NUM_WRITERS = 4
_MOST_STOPS = 40
_MOST_STOP_S = 0.02


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """The same command of another process at each call; then changes of inputs and shards; then crowds."""
    for data_set in data_sets:
        for hit, number in hits(_WRITERS, num_faults):
            for at in _places(data_set, hit, number):
                yield _with_another(data_set, hit, at)
        for readers, changes in ((_READING_INPUTS, _INPUT_CHANGES), (_READING_SHARDS, _SHARD_CHANGES)):
            for hit, number in hits(readers, num_faults):
                for count, at in enumerate(_places(data_set, hit, number)):
                    yield _with_change(data_set, hit, at, *changes[count % len(changes)])
        for hit, number in hits(_CROWDS, num_faults):
            for seed in range(number):
                yield _crowd(data_set, hit, seed)


def _places(data_set: SmallDataSet, hit: Hit, number: int) -> list[int]:
    return spread(len(data_set.undisturbed(hit.command, hit.stage).calls), number)


def _pause(words: str, at: int, meanwhile: Callable[[], object]) -> Fault:
    return Fault(words=words, at=at, mode="signal", error=signal.SIGSTOP, meanwhile=meanwhile)


def _with_another(data_set: SmallDataSet, hit: Hit, at: int) -> Outcome:
    """Both must end well, and what they leave be equal."""
    others: list[Ended] = []
    fault = _pause("another one meanwhile", at, lambda: others.append(data_set.run(hit.command)))
    outcome = struck("races", data_set, hit, replace(fault, may_refuse=False))
    if outcome.kind == "equal":
        kind, what = _all_well(others)
        outcome = replace(outcome, kind=kind, what=what)
    return outcome


def _all_well(endings: Sequence[Ended]) -> Verdict:
    for ended in endings:
        kind, what = verdict_of_end(ended)
        if kind != "equal":
            return ("wrong" if kind == "refused" else kind), f"one of them: {shape(what)}"
    return EQUAL


def _with_change(data_set: SmallDataSet, hit: Hit, at: int, name: str, words: str, change: Change) -> Outcome:
    """Refused, or equal to what it is without the change; once that is undone, the command ends well."""
    undo: list[Callable[[], None]] = []
    fault = _pause(f"{name} {words}", at, lambda: undo.append(_changing(data_set.place / name, change)))
    # Planning may take the input as it is afterwards; a second plan then differs, and that is right.
    fault = replace(fault, behind=lambda: [each() for each in undo], may_differ=hit.command == "plan")
    return struck("changes", data_set, hit, fault)


def _crowd(data_set: SmallDataSet, hit: Hit, seed: int) -> Outcome:
    """Writers of the same files, beside each other and stopped at random: all end with 0."""
    expected = data_set.undisturbed(hit.command, hit.stage)
    data_set.reset(hit.stage)
    draw = random.Random(seed)
    runs = [data_set.start(hit.command) for _ in range(_NUM_WRITERS)]
    time.sleep(draw.random() * _MOST_STOP_S)
    for _ in range(_MOST_STOPS):
        run = draw.choice(runs)
        os.kill(run.pid, signal.SIGSTOP)
        time.sleep(draw.random() * _MOST_STOP_S)
        run.go_on()
    endings = [run.end() for run in runs]
    verdict = _all_well(endings)
    if verdict == EQUAL:
        verdict = verdict_at_call(data_set, hit, endings[0], expected)
    words = f"{_NUM_WRITERS} at a time, stopped at random, seed {seed}"
    return Outcome("races", data_set.form, "all", hit.name, words, *verdict)


Change = Callable[[Path], object]


def _changing(path: Path, change: Change) -> Callable[[], None]:
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


def _replace(make: Change, path: Path) -> None:
    path.rename(path.with_name(f".was_{path.name}"))
    make(path)


def _rewrite(path: Path) -> None:
    """Other bytes of the same size, in the same file."""
    data = path.read_bytes()
    path.write_bytes(data[: len(data) // 2] + data[len(data) // 2 :].replace(b" ", b"_"))


_KINDS: Mapping[str, Change] = {
    "is deleted": lambda path: path.unlink(),
    "is cut in half": lambda path: os.truncate(path, path.stat().st_size // 2),
    "becomes a FIFO": partial(_replace, lambda path: os.mkfifo(path)),
    "becomes a folder": partial(_replace, lambda path: path.mkdir()),
}
_OF_INPUTS: Mapping[str, Change] = {
    **_KINDS,
    "is rewritten": _rewrite,
    "grows": lambda path: path.write_bytes(path.read_bytes() + b"one line more\n"),
}
_SHARD_FILES = ("shard-00000.tar", "shard-00001.idx", "shard-00000.json", "tokenizer/tokenizer.json")
_INPUT_CHANGES = [("raw/a.txt", words, change) for words, change in _OF_INPUTS.items()]
_SHARD_CHANGES = [
    (f"data/{name}", words, change) for name in _SHARD_FILES for words, change in _KINDS.items()
]
