"""Run a command with a fault and judge it: refused with a message, equal to an undisturbed run, or failed."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Literal, get_args

from shardprep.errors import EXIT_CODES, Stopped, UsageError
from tests.faults.forked_case import Ended, ForkedRun
from tests.faults.os_calls import Call, Mode
from tests.faults.small_data_sets import LITTER, Hit, SmallDataSet, Undisturbed, nothing

Kind = Literal["refused", "equal", "wrong", "traceback", "hang", "memory"]
KINDS: tuple[Kind, ...] = get_args(Kind)
Verdict = tuple[Kind, str]  # and the message, the last line of a traceback, or what differs
EQUAL: Verdict = ("equal", "")
# Exit codes that a command may have after a fault.
_REFUSING = EXIT_CODES.keys() - {0, UsageError.exit_code}
# A message about an unexpected error of the system ends with the line of code that raised it.
_UNFORESEEN = re.compile(r" at \w+\.py:\d+")
# Commands that write no files, or refuse to write them a second time.
_READERS = {"load", "load tars", "load staged", "load resumed", "status", "peek", "doctor", "train_tokenizer"}


@dataclass(frozen=True)
class Outcome:
    """One disturbed run."""

    campaign: str
    form: str  # of the data set
    command: str
    fault: str  # what was disturbed and how, with all details needed to reproduce it
    kind: Kind
    what: str


class Failure(Exception):
    """A run was neither refused nor equal. The arguments are a kind and a description."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A disturbance of one run: at its ``at``-th call to the operating system, before, or meanwhile."""

    words: str
    mode: Mode = "count"
    at: int = 0
    error: int = 0  # errno or signal
    prepare: Callable[[SmallDataSet], object] = nothing  # called before the undisturbed run, too
    before: Callable[[Path], object] = nothing  # called with the workplace
    inside: Callable[[], object] = nothing  # called in the command's process, just before the command
    # Called while the command is stopped at the call. A run that it returns must succeed.
    meanwhile: Callable[[SmallDataSet], object] | None = None
    beside: Callable[[SmallDataSet, ForkedRun], list[Ended]] | None = None  # called while the command runs
    after: Callable[[Path], object] = nothing  # called with the workplace, before it is judged
    damaged: str | None = None  # the file that ``before`` damages; "" if it must be intact afterwards
    may_refuse: bool = True
    may_differ: bool = False  # if the command ends with 0


def struck(campaign: str, data_set: SmallDataSet, hit: Hit, fault: Fault) -> Outcome:
    """Run a command with a fault and judge it."""
    expected, calls = data_set.undisturbed(hit.command, hit.stage, fault.prepare), data_set.calls
    data_set.reset(hit.stage)
    fault.prepare(data_set)
    fault.before(data_set.place)
    others: list[object] = []  # results of ``meanwhile`` and ``beside``

    def inside() -> None:
        fault.inside()
        calls.arm()

    def meanwhile() -> None:
        others.append(fault.meanwhile and fault.meanwhile(data_set))

    mode, error = ("signal", signal.SIGSTOP) if fault.meanwhile else (fault.mode, fault.error)
    with calls.ordered(mode, at=fault.at, error=error):
        run = data_set.start(hit.command, inside)
        if fault.beside:
            others += fault.beside(data_set, run)
        ended = run.end(meanwhile if fault.meanwhile else None)
    made = calls.calls()
    fault.after(data_set.place)

    def judge() -> Verdict:
        if fault.damaged is not None:
            return _verdict_on_damage(data_set, hit.command, ended, expected, fault.damaged)
        if fault.may_differ and ended.is_well:
            return EQUAL
        stop = fault.error if fault.mode == "signal" else 0
        verdict = _verdict_at_call(data_set, hit, ended, expected, stop=stop)
        if fault.meanwhile and not others:
            raise Failure("wrong", f"it did not stop: {ended}")
        if not fault.may_refuse:
            _must_succeed("it", ended)
        for other in others:
            if isinstance(other, Ended):
                _must_succeed("another process", other)
        return verdict

    words = fault.words
    if mode != "count":
        call = made[fault.at] if fault.at < len(made) else Call("none", "(fewer calls this time)")
        words = f"{words}, at call {fault.at}: {call.op} {call.path}"
    return outcome_of(campaign, data_set, hit, words, judge)


def outcome_of(
    campaign: str, data_set: SmallDataSet, hit: Hit, words: str, judge: Callable[[], Verdict]
) -> Outcome:
    """Return the outcome for the verdict that ``judge`` returns or raises as Failure."""
    try:
        kind, what = judge()
    except Failure as failure:
        kind, what = failure.args
    return Outcome(campaign, data_set.form, hit.name, words, kind, what)


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return the outcomes that are neither refused nor equal."""
    return [outcome for outcome in outcomes if outcome.kind not in ("refused", "equal")]


def spread(size: int, number: int) -> list[int]:
    """Return up to ``number`` evenly spread numbers below ``size``."""
    number = min(size, number)
    return [place * size // number for place in range(number)]


def verdict_of_end(ended: Ended, expected: Undisturbed | None = None) -> Verdict:
    """Judge how a run ended and what it delivered, but not the files that it left. May raise Failure."""
    if ended.how != "ended":
        raise Failure("traceback" if ended.how == "killed" else ended.how, ended.text)
    if ended.code and _UNFORESEEN.search(ended.text):
        raise Failure("traceback", _shape(ended.text))
    if ended.code in _REFUSING:
        return "refused", ended.text
    if ended.code:
        raise Failure("wrong", f"exit code {ended.code}: {_shape(ended.text)}")
    if expected and ended.value != expected.value:
        raise Failure("wrong", "other batches")
    return EQUAL


def _must_succeed(which: str, ended: Ended) -> None:
    """Raise Failure unless a run ended with 0."""
    if not ended.is_well:
        raise Failure("wrong", f"{which} {ended.how} with {ended.code}: {_shape(ended.text)}")


def _verdict_on_damage(
    data_set: SmallDataSet, command: str, ended: Ended, expected: Undisturbed, damaged: str
) -> Verdict:
    """Judge a run on a damaged file, which may differ afterwards."""
    verdict = verdict_of_end(ended, expected)
    if verdict != EQUAL:
        return verdict
    other = different(data_set.published(), expected.files, damaged)
    # An edit of the index may not change its values, for example by repeating a key.
    if other and not (command == "stage" and damaged == "data/index.json" and other == ["staged/index.json"]):
        raise Failure("wrong", f"ended with 0, but other bytes: {', '.join(other)}")
    if command == "stage" or command.startswith("verify"):
        # A data set that it accepted must load, with the same batches.
        reader = "load staged" if command == "stage" else "load"
        loaded = data_set.run(reader)
        _must_succeed(f"{command} ended with 0, then {reader}", loaded)
        if loaded.value != data_set.undisturbed("load", "verified").value:
            raise Failure("wrong", f"{command} ended with 0, then {reader} has other batches")
    return EQUAL


def _verdict_at_call(
    data_set: SmallDataSet, hit: Hit, ended: Ended, expected: Undisturbed, *, stop: int = 0
) -> Verdict:
    """Judge how a run ended, what it left, and the result of a second, undisturbed run.

    ``stop``: the signal that should have ended it, if any.
    """
    if stop == signal.SIGKILL:
        # If the kill did not happen, the case tests nothing.
        if ended.how != "killed":
            raise Failure("wrong", f"it was not killed: {ended}")
        verdict = EQUAL
    else:
        verdict = verdict_of_end(ended, expected)
    if stop and ended.how == "ended":
        litter = LITTER.format("*", "?")
        left = [path.name for path in data_set.place.rglob(".*.tmp") if not fnmatch(path.name, litter)]
        if ended.code not in (0, Stopped.exit_code):
            raise Failure("wrong", f"a stop signal ends with {ended.code}: {_shape(ended.text)}")
        if left:
            raise Failure("wrong", f"a stop signal leaves {', '.join(left)}")
    check_state(data_set, hit, expected, has_ended=ended.is_well)
    return verdict


def check_state(data_set: SmallDataSet, hit: Hit, expected: Undisturbed, *, has_ended: bool) -> None:
    """Raise Failure if the files that a run left are wrong, or if a second run fails or differs.

    ``has_ended``: whether the run ended with 0, so that all files must be complete.
    """
    left = data_set.published()
    other = [name for name in different(left, expected.files) if not name.startswith("litter/")]
    # Wrong files that a reader would trust. Files of unfinished shards do not count.
    unfinished = [name for name in left if f"{name.rpartition('.')[0]}.json" not in left]
    trusted = [name for name in other if name in left]
    trusted = [name for name in trusted if name not in unfinished or not name.startswith("data/shard-")]
    if trusted:
        raise Failure("wrong", f"wrong files that count: {', '.join(trusted)}")
    if has_ended and other:
        raise Failure("wrong", f"ended with 0, but other bytes: {', '.join(other)}")
    if hit.command not in _READERS:
        _must_succeed("run again, it", data_set.run(hit.command))
        if other := different(data_set.published(), expected.files):
            raise Failure("wrong", f"run again: other bytes: {', '.join(other)}")


def different(found: Mapping[str, str], expected: Mapping[str, str], but: str = "") -> list[str]:
    """Return the names of files that are missing, superfluous or not equal."""
    names = sorted({*found, *expected} - {but})
    return [name for name in names if found.get(name) != expected.get(name)]


def _shape(text: str) -> str:
    """Return the last line of a message without its values, to group equal causes."""
    last = text.strip().splitlines()[-1] if text.strip() else "no output"
    last = re.sub(r"/\S*/", "", last)
    last = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", last)
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", last).partition(" (")[0].partition("; ")[0][:140]
