"""Something happens at the k-th call to the operating system, for each k: five campaigns.

- injected_errors: the call fails, once or from there on. Refused in words, and mended by running it again.
- kills: SIGKILL just before it. Either it is done or nothing of it counts; run again it gives equal bytes.
- stop_signals: SIGTERM, SIGINT or SIGUSR1. It ends with 75, or 0 as it is done, and leaves no temporary.
- short_transfers: a read or a write moves half of its bytes. It goes on.
- races: it stops there, and meanwhile another writer works, or an input or a shard changes. And four writers
  run beside each other, stopped at random.

surroundings.py does something else to a run, which is judged as these are.
"""

from __future__ import annotations

import errno
import itertools
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from tests.faults.commands import EXPORTS
from tests.faults.forked_case import Ended
from tests.faults.judging import EQUAL, Outcome, Verdict, shape, spread, verdict_at_call, verdict_of_end
from tests.faults.os_calls import ERRORS, Call, Mode
from tests.faults.small_data_sets import Hit, SmallDataSet, hits, nothing

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_OF_EXPORTS = dict.fromkeys(EXPORTS, 0.12)
_ERROR_HITS = {
    "plan": 3, "shard": 5, "shard, done": 3, "run": 1, "verify": 3, "verify --fast": 1.5, "load": 4,
    "load, no index": 1.5, "stage": 3, "status": 1.5, "submit": 1.5, "peek": 0.5, "doctor": 0.5,
    "train_tokenizer": 0.5, "report": 0.5, "blank": 0.12, "clean": 0.5, **_OF_EXPORTS,
}  # fmt: skip
_KILL_HITS = {
    "plan": 1, "shard": 2, "shard, done": 0.5, "run": 0.5, "verify": 1, "stage": 1, "submit": 0.5,
    "report": 0.5, "blank": 0.12, "clean": 0.5, **_OF_EXPORTS,
}  # fmt: skip
_SHORT_HITS = {
    "plan": 1.5, "shard": 1.5, "verify": 1.5, "load": 1.5, "load tars": 1, "stage": 1.5, "status": 0.5,
}  # fmt: skip
# Of all formats: what differs there is how a worker reads.
_HITS_OF_FORMATS = {"formats that are cut": 0.5, "formats read whole": 0.5}
_WRITERS = {
    "plan": 0.25, "shard": 1, "run": 0.2, "verify": 0.5, "export nanogpt": 0.25, "export megatron": 0.25
}  # fmt: skip
_CROWDS = {"shard": 0.3, "stage": 0.3}  # these take four runs each; stage waits for the other
_READING_INPUTS = {"plan": 0.25, "shard": 1}
_READING_SHARDS = {"verify": 0.5, "load": 0.5, "stage": 0.5}
_NUM_WRITERS = 4
_MOST_STOPS = 40
_MOST_STOP_S = 0.02


Change = Callable[[Path], object]  # of a file


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one run: at its ``at``-th call to the operating system, or around it."""

    words: str
    file: str = ""  # in the table, where it is no call
    mode: Mode = "count"
    at: int = 0
    error: int = 0  # or the signal
    before: Callable[[Path], object] = nothing  # to the workplace
    inside: Callable[[], object] = nothing  # in the command's process, just before it
    meanwhile: Callable[[], object] | None = None  # while the command stands at the call
    behind: Callable[[], object] = nothing  # before it is judged
    may_refuse: bool = True
    may_differ: bool = False  # where the command ends with 0


def struck(campaign: str, data_set: SmallDataSet, hit: Hit, fault: Fault) -> Outcome:
    """Run a command with a fault, and again without."""
    expected, calls = data_set.undisturbed(hit.command, hit.stage), data_set.calls
    data_set.reset(hit.stage)
    fault.before(data_set.place)

    def inside() -> None:
        fault.inside()
        calls.arm()

    with calls.ordered(fault.mode, at=fault.at, error=fault.error):
        ended = data_set.run(hit.command, inside, meanwhile=fault.meanwhile)
    made = calls.calls()
    fault.behind()
    stop = fault.error if fault.mode == "signal" and fault.error != signal.SIGSTOP else 0
    if fault.may_differ and ended.how == "ended" and not ended.code:
        kind, what = EQUAL
    else:
        kind, what = verdict_at_call(data_set, hit, ended, expected, stop=stop)
    if kind == "refused" and not fault.may_refuse:
        kind, what = "wrong", f"refused: {shape(what)}"
    file, words = fault.file, fault.words
    if not file:
        call = made[fault.at] if fault.at < len(made) else Call("none", "(fewer calls this time)")
        # Without what differs between runs: the random part of a temporary's name.
        path = re.sub(r"/\.[^/]+", "/(temporary)", call.path)
        file = f"{call.op} {re.sub(r'[-_.][a-z0-9_]{8}(?=/|$)', '-(random)', path)}"
        words = f"{words}, at call {fault.at}: {call.op} {call.path}"
    return Outcome(campaign, data_set.form, file, hit.name, words, kind, what)


def _tried(
    campaign: str,
    data_sets: Sequence[SmallDataSet],
    shares: Mapping[str, float],
    num_faults: int,
    faults_of: Callable[[list[Call], int], Iterator[Fault]],
) -> Iterator[Outcome]:
    """Put the faults that follow from the calls of each command to it."""
    for data_set in data_sets:
        for hit, number in hits(_HITS_OF_FORMATS if data_set.form == "formats" else shares, num_faults):
            for fault in faults_of(data_set.undisturbed(hit.command, hit.stage).calls, number):
                yield struck(campaign, data_set, hit, fault)


def injected_errors(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Fail each call of each command once; in turn with its errors, every third one lasting from there on."""

    def faults(made: list[Call], number: int) -> Iterator[Fault]:
        for count, at in enumerate(spread(len(made), number)):
            errors = ERRORS[made[at].op]
            error = errors[count % len(errors)]
            mode: Mode = "lasting" if count % 3 == 2 else "once"
            if mode == "lasting":
                # An interrupted call cannot last, nor can O_DIRECT be refused to who left it.
                error = errors[0] if error in (errno.EINTR, errno.EINVAL) else error
            yield Fault(words=f"{os.strerror(error)}, {mode}", at=at, mode=mode, error=error)

    return _tried("injected_errors", data_sets, _ERROR_HITS, num_faults, faults)


def kills(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Kill the commands that write, at each call."""
    return _tried("kills", data_sets, _KILL_HITS, num_faults, _signals(signal.SIGKILL))


def stop_signals(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Stop the commands that write, at each call, with the signals in turn."""
    return _tried("stop_signals", data_sets, _KILL_HITS, num_faults, _signals(*_STOP_SIGNALS))


def _signals(*signals: signal.Signals) -> Callable[[list[Call], int], Iterator[Fault]]:
    def faults(made: list[Call], number: int) -> Iterator[Fault]:
        for at, stop in zip(spread(len(made), number), itertools.cycle(signals), strict=False):
            yield Fault(words=stop.name, at=at, mode="signal", error=stop)

    return faults


def short_transfers(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Shorten all reads and writes of each command at once, then one by one."""

    def faults(made: list[Call], number: int) -> Iterator[Fault]:
        moving = [at for at, call in enumerate(made) if call.op in ("read", "write")]
        yield Fault(words="half of the bytes, always", at=moving[0], mode="all short", may_refuse=False)
        for place in spread(len(moving), number):
            yield Fault(words="half of the bytes", at=moving[place], mode="short", may_refuse=False)

    return _tried("short_transfers", data_sets, _SHORT_HITS, num_faults, faults)


def races(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
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
