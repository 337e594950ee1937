"""One bit flipped in a byte of a file: refused, or without effect."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.disturbed_files import FILES, HEADER_BYTES, DisturbedFile, Fault, disturb, spread
from tests.faults.json_spans import spans
from tests.faults.outcomes import Outcome
from tests.faults.small_data_sets import SmallDataSet

FORMS = ("json", "npy", "concat", "best_fit")
QUICK_FORMS = ("best_fit",)
_TYPE_OFFSET = 156  # in a header


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Flip bits spread over each file, another bit of the byte each time."""
    for data_set in data_sets:
        for file in FILES:
            faults = partial(_flips, file, num_faults)
            yield from disturb("bit_flips", data_set, file, faults)


def _flips(file: DisturbedFile, number: int, data: bytes) -> Iterator[Fault]:
    if file.headers_only:
        types, others = _header_offsets(data)
        offsets = [types[place] for place in spread(len(types), -(-number // 4))]
        offsets += [others[place] for place in spread(len(others), number)]
    else:
        free = _free_bytes(file, data)
        offsets = [offset for offset in spread(len(data), number) if offset not in free]
    for place, offset in enumerate(offsets):
        bit = (offset * 5 + place) % 8
        yield f"bit {bit} of byte {offset}", partial(_flip, offset, bit)


def _flip(offset: int, bit: int, path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1 << bit
    path.write_bytes(data)


def _free_bytes(file: DisturbedFile, data: bytes) -> range:
    """The bytes of a name that nothing can tell from another."""
    if not file.free_text:
        return range(0)
    text = data.decode()
    found = {path: (start, end) for path, start, end in spans(text)}
    start, end = found[file.free_text]
    first = len(text[:start].encode())
    return range(first, first + len(text[start:end].encode()))


def _header_offsets(tar: bytes) -> tuple[list[int], list[int]]:
    """Of all headers of a tar: the bytes of the type, which decide if there is a member; the others."""
    types: list[int] = []
    others: list[int] = []
    at = 0
    while tar[at : at + HEADER_BYTES].strip(b"\0"):
        types.append(at + _TYPE_OFFSET)
        others += [offset for offset in range(at, at + HEADER_BYTES) if tar[offset]]
        size = int(tar[at + 124 : at + 135], 8)
        at += HEADER_BYTES + -(-size // HEADER_BYTES) * HEADER_BYTES
    return types, others
