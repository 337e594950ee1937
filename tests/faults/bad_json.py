"""Values that no JSON of ours holds, at each place of each: refused in words, or without effect."""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from shardprep.format.json_files import content_sha256
from tests.faults.commands import delivered, open_loader
from tests.faults.disturbed_files import FILES, DisturbedFile, Fault, disturb, spread
from tests.faults.forked_case import Ended, run_forked
from tests.faults.json_spans import spans
from tests.faults.judging import Verdict, not_ended, refusal
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("concat", "json")
QUICK_FORMS = ("best_fit",)
_USAGE = 2  # exit code

_DEEP = "[" * 100_000 + "]" * 100_000
_VALUES = (
    "1180591620717411303424",  # 2**70
    "3000000000",
    "-1",
    "0",
    "1.5",
    "1e999",
    "NaN",
    "-Infinity",
    "true",
    "null",
    '""',
    '"text"',
    '"a\\u0000b"',
    '"\\ud800"',
    "[]",
    "[[]]",
    "{}",
    '{"a": 1}',
    "9" * 5000,
    _DEEP,
)


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Every place of every JSON file takes each bad value; then the state of a loader likewise."""
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
        yield (
            (f"{words}, and the hash is right", partial(_write, forged))
            if forged
            else (
                words,
                partial(_write, changed),
            )
        )
    for words, apply in _WHOLE_FILES:
        if number > 2 * len(_WHOLE_FILES) or words in _QUICK_WHOLE_FILES:
            yield words, partial(apply, data)


def _replaced(text: str, start: int, end: int, value: str | None) -> bytes:
    """The text with another value, or with null under another key where it is left out."""
    if value is not None:
        return (text[:start] + value + text[end:]).encode()
    key_end = text.rfind('"', 0, start)
    return (text[:key_end] + "_" + text[key_end:]).encode() if text[start - 1] in ": " else text.encode()


def with_its_hash(data: bytes) -> bytes | None:
    """The file with the content_sha256 that its values give; None where it has none or none can be given."""
    try:
        values = json.loads(data)
        digest = content_sha256(values)
    except (ValueError, AttributeError, RecursionError):
        return None
    forged = re.sub(rb'("content_sha256": ?)"\w+"', rb'\1"' + digest.encode() + b'"', data)
    return forged if forged != data else None


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _instead(make: Callable[[Path], object]) -> Callable[[bytes, Path], None]:
    def apply(data: bytes, path: Path) -> None:
        path.unlink()
        make(path)

    return apply


def _bytes(change: Callable[[bytes], bytes]) -> Callable[[bytes, Path], None]:
    return lambda data, path: _write(change(data), path)


_WHOLE_FILES: tuple[tuple[str, Callable[[bytes, Path], None]], ...] = (
    ("empty", _bytes(lambda _: b"")),
    ("a half", _bytes(lambda data: data[: len(data) // 2])),
    ("null", _bytes(lambda _: b"null")),
    ("[]", _bytes(lambda _: b"[]")),
    ("{}", _bytes(lambda _: b"{}")),
    ("deep nesting", _bytes(lambda _: _DEEP.encode())),
    ("deep objects", _bytes(lambda _: b'{"a":' * 100_000)),
    ("NUL bytes", _bytes(lambda data: bytes(len(data)))),
    ("no UTF-8", _bytes(lambda data: data.replace(b"e", b"\xff", 1))),
    ("UTF-16", _bytes(lambda data: data.decode().encode("utf-16"))),
    ("a BOM", _bytes(lambda data: b"\xef\xbb\xbf" + data)),
    ("another version", _bytes(lambda data: data.replace(b'"version":', b'"version":9', 1))),
    ("a folder", _instead(lambda path: path.mkdir())),
    ("a FIFO", _instead(lambda path: os.mkfifo(path))),
    ("a dangling link", _instead(lambda path: path.symlink_to("nowhere"))),
    ("a link to itself", _instead(lambda path: path.symlink_to(path))),
    ("/dev/zero", _instead(lambda path: path.symlink_to("/dev/zero"))),
)
_QUICK_WHOLE_FILES = frozenset({"a half", "deep nesting", "a folder", "a link to itself"})


def _states(data_set: SmallDataSet, num_faults: int) -> Iterator[Outcome]:
    """``load_state_dict`` of a state with a bad value: refused, or the same batches follow."""
    data_set.reset("verified")
    data = data_set.place / "data"
    state, rest = _state_and_rest(data)
    places = [(keys, value) for keys in _paths(state) for value in _state_values()]
    for chosen in spread(len(places), 2 * num_faults):
        keys, value = places[chosen]
        ended = run_forked(lambda: (0, _rest_after(data, _with(state, keys, value))))  # noqa: B023 - runs at once
        kind, what = not_ended(ended) or _verdict_of_state(ended)
        if kind == "equal" and ended.value != rest:
            kind, what = "wrong", "taken, then other batches"
        yield Outcome(
            campaign="bad_json",
            form=data_set.form,
            file="state_dict",
            command="load_state_dict",
            fault=f"{'.'.join(keys)} is {str(value)[:24]}",
            kind=kind,
            what=what,
        )


def _verdict_of_state(ended: Ended) -> Verdict:
    """A state comes from the caller, so that a UsageError is an answer, too."""
    if ended.code == _USAGE:
        return "refused", ended.text
    return refusal(ended) if ended.code else ("equal", "")


def _state_values() -> list[Any]:
    """What a state can hold that came from JSON, but the counts that are another state's own."""
    counts = ("0", "3000000000")
    return [json.loads(text) for text in _VALUES if len(text) < 1000 and text not in counts]


def _state_and_rest(data: Path) -> tuple[Any, str]:
    def work() -> tuple[int, Any]:
        with open_loader(data) as loader:
            state = loader.state_at(2)
        return 0, [state, _rest_after(data, state)]

    ended = run_forked(work)
    if ended.how != "ended" or ended.code:
        message = f"no state: {ended}"
        raise RuntimeError(message)
    state, rest = ended.value
    return state, rest


def _rest_after(data: Path, state: Any) -> str:
    with open_loader(data) as loader:
        loader.load_state_dict(state)
        return delivered(loader)


def _paths(value: Any, keys: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    found = [keys] if keys else []
    if isinstance(value, dict):
        for name, item in value.items():
            found += _paths(item, (*keys, name))
    return found


def _with(state: Any, keys: tuple[str, ...], value: Any) -> Any:
    changed = copy.deepcopy(state)
    inner = changed
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] = value
    return changed
