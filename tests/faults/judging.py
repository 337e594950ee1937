"""How a disturbed run ended: refused in words, equal to the undisturbed one, or a failure."""

from __future__ import annotations

import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Literal, get_args

from shardprep.errors import EXIT_CODES, Stopped, UsageError
from tests.faults.commands import LITTER
from tests.faults.forked_case import Ended
from tests.faults.small_data_sets import Hit, SmallDataSet, Undisturbed

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
    file: str  # what was disturbed
    command: str
    fault: str  # how, so exactly that it can be done again
    kind: Kind
    what: str


def failures(outcomes: Iterable[Outcome]) -> list[Outcome]:
    """Return those that are neither refused nor equal."""
    return [outcome for outcome in outcomes if outcome.kind not in ("refused", "equal")]


def spread(size: int, number: int) -> list[int]:
    """Return up to ``number`` of ``range(size)``, evenly."""
    number = min(size, number)
    return [place * size // number for place in range(number)]


def verdict_of_end(ended: Ended, expected: Undisturbed | None = None) -> Verdict:
    """Judge how a run ended and what it delivered, not the files that it left."""
    if ended.how != "ended":
        return ("traceback" if ended.how == "killed" else ended.how), ended.text
    if ended.code and _UNFORESEEN.search(ended.text):
        return "traceback", shape(ended.text)
    if ended.code in _REFUSING:
        return "refused", ended.text
    if ended.code:
        return "wrong", f"exit code {ended.code}: {shape(ended.text)}"
    if expected and ended.value != expected.value:
        return "wrong", "other batches"
    return EQUAL


def verdict_on_damage(
    data_set: SmallDataSet, command: str, ended: Ended, expected: Undisturbed, disturbed: str | None
) -> Verdict:
    """Judge a run on disturbed files; ``disturbed``: the file that need not be equal afterwards."""
    verdict = verdict_of_end(ended, expected)
    if verdict != EQUAL:
        return verdict
    other = _different(data_set.published(), expected.files, disturbed)
    if command == "stage" and disturbed == "data/index.json" and other == ["staged/index.json"]:
        other = []  # an edit may leave its values as they are: a key that stands twice
    if other:
        return "wrong", f"ended with 0, but other bytes: {', '.join(other)}"
    if command != "stage" and not command.startswith("verify"):
        return EQUAL
    # What it called good must load, and be equal.
    reader = "load staged" if command == "stage" else "load"
    ended = data_set.run(reader)
    if ended.how == "ended" and not ended.code and ended.value != data_set.batches:
        return "wrong", f"{command} ended with 0, then {reader} has other batches"
    return verdict_of_second(f"{command} ended with 0, then {reader}", ended)


def verdict_of_second(when: str, ended: Ended) -> Verdict:
    """Judge a run that may not be refused."""
    kind, what = verdict_of_end(ended)
    return EQUAL if kind == "equal" else ("wrong" if kind == "refused" else kind, f"{when}: {what}")


def verdict_at_call(
    data_set: SmallDataSet, hit: Hit, ended: Ended, expected: Undisturbed, *, stop: int = 0
) -> Verdict:
    """Judge how a run ended, what it left, and what comes of it when it is run again, undisturbed.

    ``stop``: the signal that should have ended it, if any.
    """
    verdict = verdict_of_end(ended, expected)
    if stop == signal.SIGKILL:
        # The kill itself must have happened, or the case shows nothing.
        verdict = EQUAL if ended.how == "killed" else ("wrong", f"it was not killed: {ended}")
    elif stop and ended.how == "ended":
        litter = LITTER.format("*", "?")
        left = [path.name for path in data_set.place.rglob(".*.tmp") if not fnmatch(path.name, litter)]
        if ended.code not in (0, Stopped.exit_code):
            verdict = "wrong", f"a stop signal ends with {ended.code}: {shape(ended.text)}"
        elif left:
            verdict = "wrong", f"a stop signal leaves {', '.join(left)}"
    if verdict[0] not in ("equal", "refused"):
        return verdict
    has_ended = ended.how == "ended" and not ended.code
    return wrong_state(data_set, hit, expected, has_ended=has_ended) or verdict


def wrong_state(
    data_set: SmallDataSet, hit: Hit, expected: Undisturbed, *, has_ended: bool
) -> Verdict | None:
    """Say what is wrong with what a run left, or with a second run; None if nothing is.

    ``has_ended``: with 0, so that all must be there.
    """
    left = data_set.published()
    other = [name for name in _different(left, expected.files) if not name.startswith("litter/")]
    # What a reader would trust and is not what it should be. Unfinished shards are nothing yet.
    unfinished = [name for name in left if f"{name.rpartition('.')[0]}.json" not in left]
    trusted = [name for name in other if name in left]
    trusted = [name for name in trusted if name not in unfinished or not name.startswith("data/shard-")]
    if trusted:
        return "wrong", f"what counts is not right: {', '.join(trusted)}"
    if has_ended and other:
        return "wrong", f"ended with 0, but other bytes: {', '.join(other)}"
    if hit.command in _READERS:
        return None
    verdict = verdict_of_second("run again", data_set.run(hit.command))
    if verdict == EQUAL and (other := _different(data_set.published(), expected.files)):
        verdict = "wrong", f"run again: other bytes: {', '.join(other)}"
    return None if verdict == EQUAL else verdict


def _different(found: Mapping[str, str], expected: Mapping[str, str], but: str | None = None) -> list[str]:
    """The files that are missing, too many or not equal."""
    names = sorted({*found, *expected} - {but})
    return [name for name in names if found.get(name) != expected.get(name)]


def shape(text: str) -> str:
    """The last line of a message without its values, so that equal causes group."""
    last = text.strip().splitlines()[-1] if text.strip() else "no word"
    last = re.sub(r"/\S*/", "", last)
    last = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", last)
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", last).partition(" (")[0].partition("; ")[0][:140]
