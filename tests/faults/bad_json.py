"""Values that no JSON of ours holds, at each place of each: refused in words, or without effect."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.commands import resumed
from tests.faults.disturbed_files import FILES, DisturbedFile, Fault, disturb, instead
from tests.faults.forked_case import run_forked
from tests.faults.json_spans import spans
from tests.faults.judging import not_ended, refusal
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet
from tests.forged import with_its_hash

_USAGE = 2  # exit code

_DEEP = "[" * 100_000 + "]" * 100_000
_VALUES = (
    "1180591620717411303424",  # 2**70
    "3000000000", "-1", "0", "1.5", "1e999", "NaN", "-Infinity", "true", "null", '""', '"text"',
    '"a\\u0000b"', '"\\ud800"', "[]", "[[]]", "{}", '{"a": 1}', "9" * 5000, _DEEP,
)  # fmt: skip


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Give every place of every JSON file each bad value; then the state of a loader likewise."""
    for data_set in data_sets:
        for file in FILES:
            if file.is_json:
                yield from disturb("bad_json", data_set, file, partial(_faults, file, 2 * num_faults))
        yield from _states(data_set, num_faults)


def _faults(file: DisturbedFile, number: int, data: bytes) -> Iterator[Fault]:
    """So many of the bad values, spread over the file, and what can stand in place of the whole file.

    A file that names its own hash gets the new one, as who forges it would write it: the check of the value
    itself is met. Every third keeps the old hash, as after a flipped bit.
    """
    text = data.decode()
    places = [
        (place, value)
        for place in spans(text)
        for value in (*_VALUES, None)
        if not (place[0] == file.free_text and value and value.startswith('"'))
    ]
    for place_number, chosen in enumerate(spread(len(places), number)):
        (path, start, end), value = places[chosen]
        words = f"{path} is {'left out' if value is None else value[:24]}"
        changed = _replaced(text, start, end, value)
        forged = None if place_number % 3 == 2 else with_its_hash(changed)
        if forged:
            yield f"{words}, and the hash is right", _writing(forged)
        else:
            yield words, _writing(changed)
    for words, other in _other_contents(data).items():
        if number > 2 * len(_OTHER_FILES) or words in _QUICK_WHOLE_FILES:
            yield words, _writing(other)
    for words, make in _OTHER_FILES.items():
        if number > 2 * len(_OTHER_FILES) or words in _QUICK_WHOLE_FILES:
            yield words, instead(make)


def _writing(data: bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(data)


def _replaced(text: str, start: int, end: int, value: str | None) -> bytes:
    """Return the text with another value, or with it under another key where it is left out."""
    if value is not None:
        return (text[:start] + value + text[end:]).encode()
    key_end = text.rfind('"', 0, start)
    return (text[:key_end] + "_" + text[key_end:]).encode() if text[start - 1] in ": " else text.encode()


def _other_contents(data: bytes) -> dict[str, bytes]:
    return {
        "empty": b"",
        "a half": data[: len(data) // 2],
        "null": b"null",
        "[]": b"[]",
        "{}": b"{}",
        "deep nesting": _DEEP.encode(),
        "deep objects": b'{"a":' * 100_000,
        "NUL bytes": bytes(len(data)),
        "no UTF-8": data.replace(b"e", b"\xff", 1),
        "UTF-16": data.decode().encode("utf-16"),
        "a BOM": b"\xef\xbb\xbf" + data,
        "another version": data.replace(b'"version":', b'"version":9', 1),
    }


_OTHER_FILES: dict[str, Callable[[Path], object]] = {
    "a folder": lambda path: path.mkdir(),
    "a FIFO": lambda path: os.mkfifo(path),
    "a dangling link": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path),
    "/dev/zero": lambda path: path.symlink_to("/dev/zero"),
}
_QUICK_WHOLE_FILES = frozenset({"a half", "deep nesting", "a folder", "a link to itself"})


def _states(data_set: SmallDataSet, num_faults: int) -> Iterator[Outcome]:
    """Load a state with a bad value: refused, or the same batches follow."""
    data_set.reset("verified")
    data, text = data_set.place / "data", data_set.state
    # Counts that another state may have are no bad values.
    values = [value for value in _VALUES if len(value) < 1000 and value not in ("0", "3000000000")]
    places = [(place, value) for place in spans(text) for value in values]
    for chosen in spread(len(places), 2 * num_faults):
        (path, start, end), value = places[chosen]
        state = json.loads(text[:start] + value + text[end:])
        ended = run_forked(lambda: (0, resumed(data, state)))  # noqa: B023 - it runs at once
        if how := not_ended(ended):
            kind, what = how
        elif ended.code == _USAGE:  # a state comes from the caller
            kind, what = "refused", ended.text
        elif ended.code:
            kind, what = refusal(ended)
        else:
            kind, what = (
                ("equal", "") if ended.value == data_set.rest else ("wrong", "taken, then other batches")
            )
        fault = f"{path} is {value[:24]}"
        yield Outcome("bad_json", data_set.form, "state_dict", "load_state_dict", fault, kind, what)
