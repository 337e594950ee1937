"""Values of tables as ids: one text for each type, whatever is installed, and none for what has none."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_ROWS = 6
BAD_TEXT = pyarrow.Array.from_buffers(
    pyarrow.string(), NUM_ROWS, pyarrow.array([b"a", b"\xff", b"c", b"d", b"e", b"f"]).buffers()
)


def stored(values: list[int | None], kind: Any) -> pyarrow.Array:
    """Numbers as some writer left them, taken for what they may not be."""
    width = pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
    return pyarrow.array(values, width).view(kind)


def lists_of(items: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays(pyarrow.array([*range(NUM_ROWS + 1)], pyarrow.int32()), items)


DAY_NS = 86400 * 10**9
SECONDS = [0, 1, -1, 1_700_000_000, None, 253402300800]
COLUMNS: dict[str, tuple[pyarrow.Array, list[str]]] = {
    "timestamps in s": (
        stored(SECONDS, pyarrow.timestamp("s")),
        ["1970-01-01T00:00:00", "1970-01-01T00:00:01", "1969-12-31T23:59:59", "2023-11-14T22:13:20", "", ""],
    ),
    "timestamps in ns of a zone": (
        stored([1, 10**9, -1000, 5 * 10**8, None, 2**62], pyarrow.timestamp("ns", "Asia/Seoul")),
        [
            "1970-01-01T00:00:00.000000001+00:00",
            "1970-01-01T00:00:01+00:00",
            "1969-12-31T23:59:59.999999+00:00",
            "1970-01-01T00:00:00.500000+00:00",
            "",
            "2116-02-20T23:53:38.427387904+00:00",
        ],
    ),
    "dates": (
        stored([0, 19_000, -719162, 2932896, None, 10**8], pyarrow.date32()),
        ["1970-01-01", "2022-01-08", "0001-01-01", "9999-12-31", "", ""],
    ),
    "dates in ms": (
        stored([0, 86_400_000, -86_400_000, 10**15, None, 2**62], pyarrow.date64()),
        ["1970-01-01", "1970-01-02", "1969-12-31", "", "", ""],
    ),
    "times": (
        stored([0, 1, DAY_NS - 1, DAY_NS // 2, None, -1], pyarrow.time64("ns")),
        ["00:00:00", "00:00:00.000000001", "23:59:59.999999999", "12:00:00", "", ""],
    ),
    "durations": (
        stored([0, 10**17 + 1000, -1, 10**9, None, -1_500_000_000], pyarrow.duration("ns")),
        ["PT0S", "PT100000000.000001S", "-PT0.000000001S", "PT1S", "", "-PT1.500000S"],
    ),
    "decimals": (
        pyarrow.array(
            [*map(decimal.Decimal, ("0.00", "1.50", "-0.05", "12345678.90", "0.10")), None],
            pyarrow.decimal128(20, 2),
        ),
        ["0.00", "1.50", "-0.05", "12345678.90", "0.10", ""],
    ),
    "large decimals": (
        pyarrow.array([decimal.Decimal(10**60 + n) for n in range(NUM_ROWS)], pyarrow.decimal256(70, 0)),
        [str(10**60 + n) for n in range(NUM_ROWS)],
    ),
    "halves": (
        pyarrow.array(np.array([0, 1, -2, 0.5, 65504, 2**-14], np.float16)),
        ["0.0", "1.0", "-2.0", "0.5", "65504.0", "6.103515625e-05"],
    ),
    "bytes": (
        pyarrow.array([b"a", "한글".encode(), b"\xff", b"", None, b"e"]),
        ["a", "한글", "", "", "", "e"],
    ),
    "nested strings": (lists_of(BAD_TEXT), ['["a"]', "", '["c"]', '["d"]', '["e"]', '["f"]']),
    "a dictionary of times": (
        stored([0, 1, 2, 3, None, 0], pyarrow.timestamp("s")).dictionary_encode(),
        [*(f"1970-01-01T00:00:0{n}" for n in range(4)), "", "1970-01-01T00:00:00"],
    ),
    "lists of structs of times": (
        lists_of(pyarrow.StructArray.from_arrays([stored([*range(6)], pyarrow.duration("s"))], ["took"])),
        [f'[{{"took": "PT{n}S"}}]' for n in range(NUM_ROWS)],
    ),
    "maps": (
        pyarrow.array(
            [[("k", 1)], [], None, [("a", 1), ("b", None)], [("k", 5)], [("k", 6)]],
            pyarrow.map_(pyarrow.string(), pyarrow.duration("s")),
        ),
        ['[["k", "PT1S"]]', "[]", "", '[["a", "PT1S"], ["b", null]]', '[["k", "PT5S"]]', '[["k", "PT6S"]]'],
    ),
    "lists of a fixed size": (
        pyarrow.array([[n, n] for n in range(5)] + [None], pyarrow.list_(pyarrow.date32(), 2)),
        [*(f'["1970-01-0{n + 1}", "1970-01-0{n + 1}"]' for n in range(5)), ""],
    ),
    "structs with two fields of one name": (
        pyarrow.StructArray.from_arrays([pyarrow.array(range(6)), pyarrow.array(range(6))], ["a", "a"]),
        [""] * NUM_ROWS,
    ),
    "months, days and nanoseconds": (
        pyarrow.array([(n, 2, 3) for n in range(5)] + [None], pyarrow.month_day_nano_interval()),
        [*(f"[{n}, 2, 3]" for n in range(5)), ""],
    ),
    "numbers": (pyarrow.array([0, 1, 2**63 - 1, -5, None, 7]), ["0", "1", str(2**63 - 1), "-5", "", "7"]),
}
EXTENSIONS = {
    "JSON": lambda: (
        pyarrow.ExtensionArray.from_storage(
            pyarrow.json_(pyarrow.string()),
            pyarrow.array(['"a"', '{"b": [1, null]}', "12345678901234567890123", "[", None, '{"a":1,"a":2}']),
        ),
        ["a", '{"b": [1, null]}', "12345678901234567890123", "", "", ""],
    ),
    "UUIDs": lambda: (
        pyarrow.array([uuid.UUID(int=n) for n in range(5)] + [None], pyarrow.uuid()),
        [*(str(uuid.UUID(int=n)) for n in range(5)), ""],
    ),
    "Booleans of a byte": lambda: (
        pyarrow.ExtensionArray.from_storage(
            pyarrow.bool8(), pyarrow.array([0, 1, 2, None, 0, 1], pyarrow.int8())
        ),
        ["false", "true", "true", "", "false", "true"],
    ),
    "views of lists": lambda: (
        pyarrow.ListViewArray.from_arrays(
            pyarrow.array([5, 0, 0, 2, 2, 3], pyarrow.int32()),
            pyarrow.array([1, 1, 0, 2, 1, 3], pyarrow.int32()),
            pyarrow.array([f"{n}" for n in range(6)]),
        ),
        ['["5"]', '["0"]', "[]", '["2", "3"]', '["2"]', '["3", "4", "5"]'],
    ),
}


def column_of(kind: str) -> tuple[pyarrow.Array, list[str]]:
    if kind in COLUMNS:
        return COLUMNS[kind]
    try:
        return EXTENSIONS[kind]()
    except AttributeError:
        pytest.skip("this pyarrow has no such type")


def write(path: Path, table: pyarrow.Table) -> None:
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return
    with pyarrow.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)


# pyarrow gives objects of pandas for some of them.
WITH_PANDAS = ("timestamps in ns of a zone", "times", "durations", "lists of structs of times")


@pytest.mark.parametrize(
    ("kind", "has_pandas"),
    [*((kind, False) for kind in (*COLUMNS, *EXTENSIONS)), *((kind, True) for kind in WITH_PANDAS)],
)
def test_a_value_of_each_type_has_its_text_and_one_without_is_no_id(
    prep: Prep, raw: Path, tmp_path: Path, kind: str, has_pandas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    column, ids = column_of(kind)
    if has_pandas:
        pytest.importorskip("pandas", reason="it is not installed")
    else:
        monkeypatch.setitem(sys.modules, "pandas", None)
    write(raw / "a.arrow", pyarrow.table({"text": [f"text {n}" for n in range(NUM_ROWS)], "id": column}))
    prep.plan(raw, tmp_path / "data", id_field="id", num_shards=1)
    prep.make(tmp_path / "data")
    lines = (tmp_path / "data/ids/shard-00000.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)[2] for line in lines] == ids


@pytest.mark.parametrize("suffix", ["parquet", "arrow"])
def test_times_of_python_are_ids_as_python_writes_them(
    prep: Prep, raw: Path, tmp_path: Path, suffix: str
) -> None:
    zone = datetime.timezone.utc
    times = [
        datetime.datetime(2026, 1, 1, 3, 2, tzinfo=zone),
        datetime.datetime(1, 1, 1, tzinfo=zone),
        datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, zone),
    ]
    write(raw / f"a.{suffix}", pyarrow.table({"text": ["a", "b", "c"], "made": times}))
    prep.plan(raw, tmp_path / "data", id_field="made")
    prep.make(tmp_path / "data")
    lines = (tmp_path / "data/ids/shard-00000.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)[2] for line in lines] == [time.isoformat() for time in times]
