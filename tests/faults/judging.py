"""Was a disturbed run refused, equal to the undisturbed one, or wrong?"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tests.faults.commands import REFUSING
from tests.faults.forked_case import Ended
from tests.faults.outcomes import Kind
from tests.faults.small_data_sets import SmallDataSet, Stage

Verdict = tuple[Kind, str]
# An error of the system that no stage has words for is told with the line of code at which it came.
_UNFORESEEN = re.compile(r" at \w+\.py:\d+")
# Commands that leave no files, or none a second time.
READERS = frozenset(
    {"load", "load tars", "load staged", "load resumed", "status", "peek", "doctor", "train_tokenizer"}
)


@dataclass(frozen=True)
class Undisturbed:
    """What a command leaves and delivers where nothing is disturbed."""

    value: Any
    files: Mapping[str, str]


def undisturbed(data_set: SmallDataSet, stage: Stage, name: str, prepare: Callable[[], None]) -> Undisturbed:
    """Run a command on a fresh workplace after ``prepare``, without a fault."""
    data_set.reset(stage)
    prepare()
    ended = data_set.run(name)
    if ended.how != "ended" or ended.code:
        message = f"{data_set.form}: {name} failed undisturbed: {ended}"
        raise RuntimeError(message)
    return Undisturbed(ended.value, data_set.published())


def verdict(
    data_set: SmallDataSet, name: str, ended: Ended, expected: Undisturbed, disturbed: str | None
) -> Verdict:
    """Of a run on disturbed files; ``disturbed``: the file that need not be equal afterwards."""
    if how := not_ended(ended):
        return how
    if ended.code:
        return refusal(ended)
    if ended.value != expected.value:
        return "wrong", "other batches"
    if other := different(data_set.published(), expected.files, disturbed):
        return "wrong", f"ended with 0, but other bytes: {', '.join(other)}"
    if name.startswith("verify"):
        return _verdict_of_reading(data_set, name)
    if name == "stage":
        return _verdict_of_reading(data_set, name, "load staged")
    return "equal", ""


def not_ended(ended: Ended) -> Verdict | None:
    if ended.how == "ended":
        return None
    return ("traceback" if ended.how == "killed" else ended.how), ended.text


def refusal(ended: Ended) -> Verdict:
    """An error that no stage has words for counts as the traceback that it was."""
    if _UNFORESEEN.search(ended.text):
        return "traceback", shape(ended.text)
    if ended.code in REFUSING:
        return "refused", ended.text
    return "wrong", f"exit code {ended.code}: {shape(ended.text)}"


def different(found: Mapping[str, str], expected: Mapping[str, str], but: str | None) -> list[str]:
    """The files that are missing, too many or not equal."""
    names = sorted({*found, *expected} - {but})
    return [name for name in names if found.get(name) != expected.get(name)]


def wrong_that_counts(found: Mapping[str, str], expected: Mapping[str, str]) -> list[str]:
    """Files that a reader would trust and that are not what they should be; unfinished shards are none."""
    wrong = []
    for name, digest in found.items():
        folder, _, file = name.rpartition("/")
        if folder == "litter":
            continue
        in_data = file.startswith("shard-") and folder == "data"
        if in_data and f"{name.rpartition('.')[0]}.json" not in found:
            continue
        if digest != expected.get(name):
            wrong.append(name)
    return wrong


def _verdict_of_reading(data_set: SmallDataSet, name: str, reader: str = "load") -> Verdict:
    """What ``verify`` or ``stage`` called good must load, and be equal."""
    ended = data_set.run(reader)
    if how := not_ended(ended):
        return how[0], f"{name} ended with 0, then {reader}: {how[1]}"
    if ended.code:
        return "wrong", f"{name} ended with 0, then {reader} refuses: {shape(ended.text)}"
    if ended.value != data_set.batches:
        return "wrong", f"{name} ended with 0, then {reader} has other batches"
    return "equal", ""


def shape(text: str) -> str:
    """The last line of a message without its values, so that equal causes group."""
    last = text.strip().splitlines()[-1] if text.strip() else "no word"
    last = re.sub(r"/\S*/", "", last)
    last = re.sub(r"'[^']*'|\"[^\"]*\"", "'..'", last)
    return re.sub(r"[0-9a-f]{8,}|\d+", "N", last).partition(" (")[0].partition("; ")[0][:140]
