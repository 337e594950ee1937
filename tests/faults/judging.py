"""A fault meets a command, which is refused in words, ends equal to the undisturbed run, or fails."""

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
Verdict = tuple[Kind, str]  # and the message, the exception with its last line, or what is not equal
EQUAL: Verdict = ("equal", "")
# The exit codes that a fault may end a command with.
_REFUSING = EXIT_CODES.keys() - {0, UsageError.exit_code}
# An error of the system that no stage has words for is told with the line of code at which it came.
_UNFORESEEN = re.compile(r" at \w+\.py:\d+")
# Commands that leave no files, or none a second time.
_READERS = {"load", "load tars", "load staged", "load resumed", "status", "peek", "doctor", "train_tokenizer"}


@dataclass(frozen=True)
class Outcome:
    """One disturbed run."""

    campaign: str
    form: str  # of the data set
    command: str
    fault: str  # what was disturbed and how, so exactly that it can be done again
    kind: Kind
    what: str


class Failure(Exception):
    """Raised with a kind and what was seen, where a run is neither refused nor equal."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """What happens to one run: at its ``at``-th call to the operating system, or around it."""

    words: str
    mode: Mode = "count"
    at: int = 0
    error: int = 0  # or the signal
    prepare: Callable[[SmallDataSet], object] = nothing  # also before the undisturbed run
    before: Callable[[Path], object] = nothing  # to the workplace
    inside: Callable[[], object] = nothing  # in the command's process, just before it
    # While it stands at the call, stopped. Runs of other processes have to end well.
    meanwhile: Callable[[SmallDataSet], object] | None = None
    beside: Callable[[SmallDataSet, ForkedRun], list[Ended]] | None = None  # while it runs
    behind: Callable[[Path], object] = nothing  # to the workplace, before it is judged
    damaged: str | None = None  # the file that ``before`` damages; "" where it has to be right afterwards
    may_refuse: bool = True
    may_differ: bool = False  # where the command ends with 0


def struck(campaign: str, data_set: SmallDataSet, hit: Hit, fault: Fault) -> Outcome:
    """Run a command with a fault, and judge it."""
    expected, calls = data_set.undisturbed(hit.command, hit.stage, fault.prepare), data_set.calls
    data_set.reset(hit.stage)
    fault.prepare(data_set)
    fault.before(data_set.place)
    others: list[object] = []  # of which runs have to end well

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
    fault.behind(data_set.place)

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
            _must_be_well("it", ended)
        for other in others:
            if isinstance(other, Ended):
                _must_be_well("another process", other)
        return verdict

    words = fault.words
    if mode != "count":
        call = made[fault.at] if fault.at < len(made) else Call("none", "(fewer calls this time)")
        words = f"{words}, at call {fault.at}: {call.op} {call.path}"
    return outcome_of(campaign, data_set, hit, words, judge)


def outcome_of(
    campaign: str, data_set: SmallDataSet, hit: Hit, words: str, judge: Callable[[], Verdict]
) -> Outcome:
    """Return the outcome that ``judge`` returns or raises."""
    try:
        kind, what = judge()
    except Failure as failure:
        kind, what = failure.args
    return Outcome(campaign, data_set.form, hit.name, words, kind, what)


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those that are neither refused nor equal."""
    return [outcome for outcome in outcomes if outcome.kind not in ("refused", "equal")]


def spread(size: int, number: int) -> list[int]:
    """Return up to ``number`` of ``range(size)``, evenly."""
    number = min(size, number)
    return [place * size // number for place in range(number)]


def verdict_of_end(ended: Ended, expected: Undisturbed | None = None) -> Verdict:
    """Judge how a run ended and what it delivered, not the files that it left; Failure where it is wrong."""
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


def _must_be_well(which: str, ended: Ended) -> None:
    """Failure for a run that may not be refused."""
    if not ended.is_well:
        raise Failure("wrong", f"{which} {ended.how} with {ended.code}: {_shape(ended.text)}")


def _verdict_on_damage(
    data_set: SmallDataSet, command: str, ended: Ended, expected: Undisturbed, damaged: str
) -> Verdict:
    """Judge a run on a damaged file, which need not be equal afterwards."""
    verdict = verdict_of_end(ended, expected)
    if verdict != EQUAL:
        return verdict
    other = _different(data_set.published(), expected.files, damaged)
    # An edit of the index may leave its values as they are: a key that stands twice.
    if other and not (command == "stage" and damaged == "data/index.json" and other == ["staged/index.json"]):
        raise Failure("wrong", f"ended with 0, but other bytes: {', '.join(other)}")
    if command == "stage" or command.startswith("verify"):
        # What it called good must load, and be equal.
        reader = "load staged" if command == "stage" else "load"
        loaded = data_set.run(reader)
        _must_be_well(f"{command} ended with 0, then {reader}", loaded)
        if loaded.value != data_set.undisturbed("load", "verified").value:
            raise Failure("wrong", f"{command} ended with 0, then {reader} has other batches")
    return EQUAL


def _verdict_at_call(
    data_set: SmallDataSet, hit: Hit, ended: Ended, expected: Undisturbed, *, stop: int = 0
) -> Verdict:
    """Judge how a run ended, what it left, and what comes of it when it is run again, undisturbed.

    ``stop``: the signal that should have ended it, if any.
    """
    if stop == signal.SIGKILL:
        # The kill itself must have happened, or the case shows nothing.
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
    """Failure where something is wrong with what a run left, or with a second run.

    ``has_ended``: with 0, so that all must be there.
    """
    left = data_set.published()
    other = [name for name in _different(left, expected.files) if not name.startswith("litter/")]
    # What a reader would trust and is not what it should be. Unfinished shards are nothing yet.
    unfinished = [name for name in left if f"{name.rpartition('.')[0]}.json" not in left]
    trusted = [name for name in other if name in left]
    trusted = [name for name in trusted if name not in unfinished or not name.startswith("data/shard-")]
    if trusted:
        raise Failure("wrong", f"what counts is not right: {', '.join(trusted)}")
    if has_ended and other:
        raise Failure("wrong", f"ended with 0, but other bytes: {', '.join(other)}")
    if hit.command not in _READERS:
        _must_be_well("run again, it", data_set.run(hit.command))
        if other := _different(data_set.published(), expected.files):
            raise Failure("wrong", f"run again: other bytes: {', '.join(other)}")


def _different(found: Mapping[str, str], expected: Mapping[str, str], but: str = "") -> list[str]:
    """The files that are missing, too many or not equal."""
    names = sorted({*found, *expected} - {but})
    return [name for name in names if found.get(name) != expected.get(name)]


def _shape(text: str) -> str:
    """The last line of a message without its values, so that equal causes group."""
    last = text.strip().splitlines()[-1] if text.strip() else "no word"
    last = re.sub(r"/\S*/", "", last)
    last = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", last)
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", last).partition(" (")[0].partition("; ")[0][:140]
