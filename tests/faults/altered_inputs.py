"""One bit flipped in an input before it is planned, and inputs that declare far more than they hold.

Nobody can say that such an input is not what was meant. So planning and making its shards must end well, or
refuse in words; never with a traceback, a hang, or more than 3 GiB.
"""

from __future__ import annotations

import lzma
import struct
import zlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

from tests.faults.judging import not_ended, refusal
from tests.faults.outcomes import Outcome, spread
from tests.faults.small_data_sets import SmallDataSet

_COMMAND = "plan, shard"
_XZ_HEADER = 12  # where a block's begins
_QUICK_FAULTS = 8  # so few, and none of DECLARED


def outcomes(data_sets: Sequence[SmallDataSet], *, num_faults: int) -> Iterator[Outcome]:
    """Bits spread over an input of each format; then what declares too much."""
    for data_set in data_sets:
        data_set.reset("raw")
        inputs = {path.name: path.read_bytes() for path in sorted((data_set.place / "raw").iterdir())}
        for name, data in inputs.items():
            offsets = spread(len(data), num_faults if num_faults > _QUICK_FAULTS else 1)
            for place, offset in enumerate(offsets):
                bit = (offset * 5 + place) % 8
                flipped = data[:offset] + bytes([data[offset] ^ 1 << bit]) + data[offset + 1 :]
                write = partial(_write, flipped)
                yield _outcome(data_set, name, f"bit {bit} of byte {offset}", write)
        if num_faults > _QUICK_FAULTS:
            for name, (words, declare) in DECLARED.items():
                yield _outcome(data_set, name, words, declare)


def _write(data: bytes, path: Path) -> None:
    path.write_bytes(data)


def _outcome(data_set: SmallDataSet, name: str, words: str, write: Callable[[Path], None]) -> Outcome:
    data_set.reset("raw")
    raw = data_set.place / "raw"
    for path in raw.iterdir():
        path.unlink()
    write(raw / name)
    ended = data_set.run(_COMMAND)
    kind, what = not_ended(ended) or (refusal(ended) if ended.code else ("equal", ""))
    return Outcome("altered_inputs", data_set.form, name, _COMMAND, words, kind, what)


def _zstd_of_a_large_window(path: Path) -> None:
    """A frame that asks for a window of 2**41 bytes and declares 2**60 bytes of content."""
    header = struct.pack("<IBBQ", 0xFD2FB528, 0b1100_0000, 31 << 3, 1 << 60)
    path.write_bytes(header + b"\x01\x00\x00")


def _xz_of_a_large_dictionary(path: Path) -> None:
    data = bytearray(lzma.compress(b"a line\n" * 10, preset=0))
    end = _XZ_HEADER + 4 * (data[_XZ_HEADER] + 1) - 4
    data[_XZ_HEADER + 4] = 40  # 4 GiB
    data[end : end + 4] = struct.pack("<I", zlib.crc32(data[_XZ_HEADER:end]))
    path.write_bytes(data)


def _gzip_of_a_long_name(path: Path) -> None:
    path.write_bytes(b"\x1f\x8b\x08\x08" + bytes(6) + b"n" * (8 << 20))


def _parquet_of_a_large_footer(path: Path) -> None:
    path.write_bytes(b"PAR1" + bytes(1000) + struct.pack("<I", (1 << 31) - 1) + b"PAR1")


def _arrow_of_a_large_schema(path: Path) -> None:
    path.write_bytes(struct.pack("<II", 0xFFFFFFFF, (1 << 31) - 8) + bytes(1000))


DECLARED: dict[str, tuple[str, Callable[[Path], None]]] = {
    "window.txt.zst": ("a window of 2 TiB is declared", _zstd_of_a_large_window),
    "dictionary.txt.xz": ("a dictionary of 4 GiB is declared", _xz_of_a_large_dictionary),
    "name.txt.gz": ("a name of 8 MiB that never ends", _gzip_of_a_long_name),
    "footer.parquet": ("a footer of 2 GiB is declared", _parquet_of_a_large_footer),
    "schema.arrow": ("a schema of 2 GiB is declared", _arrow_of_a_large_schema),
}
