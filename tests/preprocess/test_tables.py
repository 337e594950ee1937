"""Parquet and Arrow: columns as tables name them, values as ids, footers, streams, and what is damaged."""

from __future__ import annotations

import base64
import contextlib
import datetime
import decimal
import io
import struct
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from tests.children import run_child, shardprep
from tests.world import World

SUFFIXES = ["parquet", "stream.arrow", "file.arrow"]
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


def table_bytes(table: pyarrow.Table | dict[str, Any], suffix: str, rows: int = 3, **options: Any) -> bytes:
    """A table as a file: parquet, stream.arrow or file.arrow."""
    table = pyarrow.table(table) if isinstance(table, dict) else table
    sink = io.BytesIO()
    if suffix == "parquet":
        pyarrow.parquet.write_table(table, sink, row_group_size=rows)
        return sink.getvalue()
    opened = pyarrow.ipc.new_file if suffix.startswith("file") else pyarrow.ipc.new_stream
    with opened(sink, table.schema, **options) as writer:
        for start in range(0, max(1, len(table)), rows):
            # Each with a dictionary of its own: a stream replaces it, or adds to it.
            chunk = table.slice(start, rows)
            writer.write_table(chunk if suffix.startswith("file") else chunk.unify_dictionaries())
    return sink.getvalue()


def ids_of(world: World) -> dict[str, list[Any]]:
    """The ids of documents, by the name of their file."""
    names = world.inputs()
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number, _, text in world.lines("ids"):
        found[names[number]].append(text)
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_whose_name_has_a_dot_goes_before_a_nested_field(tmp_path: Path, suffix: str) -> None:
    nested = pyarrow.array([{"b": f"nested {n}", "c.d": f"deep {n}"} for n in range(7)])
    named = pyarrow.table({"a": nested, "a.b": [f"named {n}" for n in range(7)], "n": range(7)})
    files = {f"x.{suffix}": named, f"y.{suffix}": named.drop_columns(["a.b"])}
    world = World(tmp_path).raw({name: table_bytes(it, suffix) for name, it in files.items()})
    world.make(text_template="{a.b} {a.c.d}", id_field="a.c.d")
    assert world.texts() == [f"{kind} {n} deep {n}" for kind in ("named", "nested") for n in range(7)]
    assert ids_of(world) == {name: [f"deep {n}" for n in range(7)] for name in files}


NOT_NESTED: dict[str, tuple[pyarrow.Array, str]] = {  # and what the value is as an id
    "a list of structs": (pyarrow.array([[{"b": "x"}]]), ""),
    "a map": (pyarrow.array([[("b", "x")]], pyarrow.map_(pyarrow.string(), pyarrow.string())), ""),
    "a string": (pyarrow.array(["x"]), ""),
    "another struct": (pyarrow.array([{"c": "x"}]), ""),
    "a struct of numbers": (pyarrow.array([{"b": 7}]), "7"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_nested_field_of_no_struct_of_strings_is_refused_and_no_id(tmp_path: Path, suffix: str) -> None:
    every = World(tmp_path)
    for kind, (column, _) in NOT_NESTED.items():
        file = {f"{kind}.{suffix}": table_bytes({"a": column, "text": ["t"]}, suffix)}
        every.raw(file)
        ended = World(tmp_path / kind).raw(file).try_plan(text_field="a.b").ends(65)
        for words in (f"{kind}.{suffix}", "--text_field", " a"):
            assert words in ended.err
    found = ids_of(every.make(id_field="a.b", source_field="a.b"))
    assert found == {f"{kind}.{suffix}": [text] for kind, (_, text) in NOT_NESTED.items()}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_two_columns_of_one_name_are_refused_where_they_are_meant(tmp_path: Path, suffix: str) -> None:
    columns = [pyarrow.array(values) for values in (["one"], ["two"], [1], [2], ["other"])]
    table = pyarrow.Table.from_arrays(columns, names=["text", "text", "n", "n", "body"])
    world = World(tmp_path).raw({f"x.{suffix}": table_bytes(table, suffix)})
    for options in ({}, {"text_field": "body", "id_field": "n"}, {"text_template": "{body}{text}"}):
        world.try_plan(**options).ends(65, f"x.{suffix}")
    assert world.make(text_field="body").texts() == ["other"]


def test_a_field_that_two_nested_columns_may_mean_is_refused_and_one_of_nulls_is_null(tmp_path: Path) -> None:
    table = {"a": [{"b.c": "one"}], "a.b": [{"c": "two"}], "text": ["t"]}
    world = World(tmp_path).raw({"x.parquet": table_bytes(table, "parquet")})
    assert world.try_plan(text_field="a.b.c").code == 65
    nulls = {"a": pyarrow.nulls(4), "text": ["t"] * 4}
    of_nulls = World(tmp_path / "nulls").raw({f"x.{each}": table_bytes(nulls, each) for each in SUFFIXES})
    assert [*ids_of(of_nulls.make(id_field="a.b")).values()] == [[""] * 4] * 3


@pytest.mark.processes
def test_a_new_process_plans_parquet_and_arrow_files_that_lie_side_by_side(tmp_path: Path) -> None:
    """Threads that import two parts of pyarrow at once find half of it, which reads as a missing library."""
    world = World(tmp_path)
    for name, suffix in (("a", "parquet"), ("b", "stream.arrow"), ("c", "parquet"), ("d", "file.arrow")):
        world.raw({f"{name}.{suffix}": table_bytes({"text": ["a text"] * 9}, suffix)})
    run_child(shardprep("plan", *world.words_of_plan()))


BAD_TEXT = pyarrow.Array.from_buffers(pyarrow.string(), 3, pyarrow.array([b"a", b"\xff", b"c"]).buffers())
DAY_NS, DECIMAL, UTC = 86400 * 10**9, decimal.Decimal, datetime.timezone.utc
LAST_TIME = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)


def lists_of(items: pyarrow.Array) -> pyarrow.Array:
    return pyarrow.ListArray.from_arrays(pyarrow.array([*range(len(items) + 1)], pyarrow.int32()), items)


# Numbers as some writer left them, taken for what they may not be, and the text of each as an id.
STORED: list[tuple[pyarrow.DataType, dict[int, str]]] = [
    (pyarrow.timestamp("s"), {
        0: "1970-01-01T00:00:00", 1: "1970-01-01T00:00:01", -1: "1969-12-31T23:59:59",
        1_700_000_000: "2023-11-14T22:13:20", 253402300800: "",
    }),
    (pyarrow.timestamp("ns", "Asia/Seoul"), {
        1: "1970-01-01T00:00:00.000000001+00:00", 10**9: "1970-01-01T00:00:01+00:00",
        -1000: "1969-12-31T23:59:59.999999+00:00", 5 * 10**8: "1970-01-01T00:00:00.500000+00:00",
        2**62: "2116-02-20T23:53:38.427387904+00:00",
    }),
    (pyarrow.date32(), {
        0: "1970-01-01", 19_000: "2022-01-08", -719162: "0001-01-01", 2932896: "9999-12-31", 10**8: "",
    }),
    (pyarrow.date64(), {
        0: "1970-01-01", 86_400_000: "1970-01-02", -86_400_000: "1969-12-31", 10**15: "", 2**62: "",
    }),
    (pyarrow.time64("ns"), {
        0: "00:00:00", 1: "00:00:00.000000001", DAY_NS - 1: "23:59:59.999999999", DAY_NS // 2: "12:00:00",
        -1: "",
    }),
    (pyarrow.duration("ns"), {
        0: "PT0S", 10**17 + 1000: "PT100000000.000001S", -1: "-PT0.000000001S", 10**9: "PT1S",
        -1_500_000_000: "-PT1.500000S",
    }),
]  # fmt: skip
SECONDS = pyarrow.array([0, 1, None, 1]).view(pyarrow.timestamp("s"))
TOLD = ["1970-01-01T00:00:00", "1970-01-01T00:00:01", "", "1970-01-01T00:00:01"]
# An array, which some versions of pyarrow have no type for, and its ids.
COLUMNS: dict[str, tuple[Callable[[], pyarrow.Array], list[str]]] = {
    "times of Python": (lambda: pyarrow.array([LAST_TIME]), [LAST_TIME.isoformat()]),
    "decimals": (
        lambda: pyarrow.array([DECIMAL("0.00"), DECIMAL("-0.05"), None], pyarrow.decimal128(20, 2)),
        ["0.00", "-0.05", ""],
    ),
    "large decimals": (lambda: pyarrow.array([DECIMAL(10**60)], pyarrow.decimal256(70, 0)), [str(10**60)]),
    "halves": (
        lambda: pyarrow.array(np.array([0, -2, 65504, 2**-14], np.float16)),
        ["0.0", "-2.0", "65504.0", "6.103515625e-05"],
    ),
    "bytes": (lambda: pyarrow.array([b"a", "한글".encode(), b"\xff", b"", None]), ["a", "한글", "", "", ""]),
    "nested strings": (lambda: lists_of(BAD_TEXT), ['["a"]', "", '["c"]']),
    "a dictionary of times": (SECONDS.dictionary_encode, TOLD),
    "run-end encoded times": (
        lambda: pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([2, 3, 5, 6], pyarrow.int32()), SECONDS),
        [TOLD[0], *TOLD[:3], TOLD[2], TOLD[3]],
    ),
    "lists of structs of times": (
        lambda: lists_of(pyarrow.StructArray.from_arrays([SECONDS], ["at"])),
        [f'[{{"at": "{text}"}}]' if text else '[{"at": null}]' for text in TOLD],
    ),
    "maps": (
        lambda: pyarrow.array(
            [[("k", 1)], [], None, [("a", 1), ("b", None)]],
            pyarrow.map_(pyarrow.string(), pyarrow.duration("s")),
        ),
        ['[["k", "PT1S"]]', "[]", "", '[["a", "PT1S"], ["b", null]]'],
    ),
    "lists of a fixed size": (
        lambda: pyarrow.array([[0, 1], None], pyarrow.list_(pyarrow.date32(), 2)),
        ['["1970-01-01", "1970-01-02"]', ""],
    ),
    "structs with two fields of one name": (
        lambda: pyarrow.StructArray.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"]), [""]
    ),
    "months, days and nanoseconds": (
        lambda: pyarrow.array([(1, 2, 3), None], pyarrow.month_day_nano_interval()), ["[1, 2, 3]", ""]
    ),
    "numbers": (lambda: pyarrow.array([0, 2**63 - 1, -5, None]), ["0", str(2**63 - 1), "-5", ""]),
    "JSON": (
        lambda: pyarrow.ExtensionArray.from_storage(
            pyarrow.json_(pyarrow.string()),
            pyarrow.array(['"a"', '{"b": [1, null]}', "12345678901234567890123", "[", None, '{"a":1,"a":2}']),
        ),
        ["a", '{"b": [1, null]}', "12345678901234567890123", "", "", ""],
    ),
    "UUIDs": (
        lambda: pyarrow.array([uuid.UUID(int=1), None], pyarrow.uuid()), [str(uuid.UUID(int=1)), ""]
    ),
    "Booleans of a byte": (
        lambda: pyarrow.ExtensionArray.from_storage(
            pyarrow.bool8(), pyarrow.array([0, 1, 2, None], pyarrow.int8())
        ),
        ["false", "true", "true", ""],
    ),
    "views of lists": (
        lambda: pyarrow.ListViewArray.from_arrays(
            pyarrow.array([2, 0, 0], pyarrow.int32()), pyarrow.array([1, 0, 3], pyarrow.int32()),
            pyarrow.array(["0", "1", "2"]),
        ),
        ['["2"]', "[]", '["0", "1", "2"]'],
    ),
}  # fmt: skip


@pytest.mark.parametrize("has_pandas", [True, False])  # pyarrow gives objects of pandas for some of them
def test_a_value_of_each_type_has_its_text_and_one_without_is_no_id(
    tmp_path: Path, has_pandas: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_pandas:
        pytest.importorskip("pandas", reason="it is not installed")
    else:
        monkeypatch.setitem(sys.modules, "pandas", None)
    columns = {}
    for number, (kind, texts) in enumerate(STORED):
        width = pyarrow.int32() if kind.bit_width == 32 else pyarrow.int64()
        columns[f"stored {number}"] = pyarrow.array([*texts, None], width).view(kind), [*texts.values(), ""]
    for name, (column_of, ids) in COLUMNS.items():
        with contextlib.suppress(AttributeError):  # this pyarrow has no such type
            columns[name] = column_of(), ids
    world = World(tmp_path)
    for name, (column, _) in columns.items():
        table = {"text": [f"text {n}" for n in range(len(column))], "id": column}
        suffix = "parquet" if name == "times of Python" else "file.arrow"
        world.raw({f"{name}.{suffix}": table_bytes(table, suffix, rows=6)})
    found = ids_of(world.make(num_shards=1, id_field="id"))
    assert {name.partition(".")[0]: ids for name, ids in found.items()} == {
        name: ids for name, (_, ids) in columns.items()
    }


TEXTS = [f"문서 {n} " + "long enough to stand apart " * (n % 3) for n in range(40)]


def text_column(kind: str) -> pyarrow.Array:
    """TEXTS as a type, of which one is null and one no UTF-8."""
    data: list[bytes | None] = [text.encode() for text in TEXTS]
    data[5], data[9] = b"\xff\xfe, which is no UTF-8, at all", None
    binary = {"string": pyarrow.binary, "large_string": pyarrow.large_binary, "dictionary": pyarrow.binary}
    column = pyarrow.array(data, binary[kind]() if kind in binary else pyarrow.binary_view())
    if kind != "binary_view":
        text_type = getattr(pyarrow, "string" if kind == "dictionary" else kind)()
        column = pyarrow.Array.from_buffers(text_type, len(data), column.buffers())
    if kind == "dictionary":
        column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([*range(40)]), column)
    return column


@pytest.mark.parametrize("is_large", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("suffix", ["stream.arrow", "file.arrow"])
def test_texts_of_each_type_are_read_whole_or_some_rows_at_a_time_and_a_bad_one_is_a_bad_row(
    tmp_path: Path, suffix: str, is_large: bool
) -> None:
    """A record batch of more than 16 MiB is not held whole: here a column beside the text makes it so."""
    kinds = ["dictionary", "large_string", "string"]
    kinds += ["binary_view", "string_view"] * hasattr(pyarrow, "string_view")
    names = sorted(f"{kind}.{suffix}" for kind in kinds)
    meta = [None if n % 11 == 0 else {"in": {"note": f"n{n}"}, "is": n % 2 == 0} for n in range(40)]
    world = World(tmp_path)
    for name in names:
        columns = {"meta": meta, "n": range(40), "text": text_column(name.partition(".")[0])}
        if is_large:
            columns["beside"] = pyarrow.array([bytes(1 << 20)] * 40)
        world.raw({name: table_bytes(columns, suffix, rows=20)})
    world.make(num_shards=1, id_field="meta.in.note", max_bad_fraction=1)
    kept = [n for n in range(40) if n not in (5, 9)]
    assert world.texts() == [TEXTS[n] for n in kept] * len(names)
    notes = ["" if n % 11 == 0 else f"n{n}" for n in kept]
    assert ids_of(world) == dict.fromkeys(names, notes)
    told = [(line["source"], line["source_offset"], line["reason"]) for line in world.lines("quarantine")]
    assert told == [(name, *bad) for name in names for bad in ((5, "undecodable"), (9, "null_field"))]


FIRST = [f"first {n}" for n in range(20)]
SECOND = [f"둘째 {n}" for n in range(13)]


def of_dictionary(texts: list[str]) -> pyarrow.Table:
    """Another schema, whose texts are numbers of a dictionary that differs from batch to batch."""
    chunks = [pyarrow.array(texts[n : n + 6]).dictionary_encode() for n in range(0, len(texts), 6)]
    return pyarrow.table({"n": range(len(texts)), "text": pyarrow.chunked_array(chunks)})


def stream(texts: list[str], *, is_old: bool = False, has_dictionary: bool = False) -> bytes:
    table = (
        of_dictionary(texts) if has_dictionary else pyarrow.table({"text": pyarrow.array(texts, "string")})
    )
    options = pyarrow.ipc.IpcWriteOptions(use_legacy_format=is_old, emit_dictionary_deltas=True)
    return table_bytes(table, "stream", rows=6, options=options)


STREAM, FILE = stream(FIRST), table_bytes({"text": FIRST}, "file", rows=6)
CUT = STREAM.removesuffix(END_MARK)
OLD_FILE = table_bytes(
    {"text": FIRST}, "file", rows=6, options=pyarrow.ipc.IpcWriteOptions(use_legacy_format=True)
)
READ: dict[str, tuple[bytes, list[str]]] = {
    "two streams": (STREAM + stream(SECOND), FIRST + SECOND),
    "the second with another schema": (STREAM + stream(SECOND, has_dictionary=True), FIRST + SECOND),
    "the first with dictionaries": (stream(FIRST, has_dictionary=True) + stream(SECOND), FIRST + SECOND),
    "one without rows between": (STREAM + stream([]) + stream(SECOND), FIRST + SECOND),
    "no end mark": (CUT, FIRST),
    "no end mark behind the second": (STREAM + stream(SECOND).removesuffix(END_MARK), FIRST + SECOND),
    "before 0.15": (stream(FIRST, is_old=True, has_dictionary=True), FIRST),
    "before 0.15 and behind it": (stream(FIRST, is_old=True) + stream(SECOND), FIRST + SECOND),
    "a file of before 0.15": (OLD_FILE, FIRST),
}


@pytest.mark.parametrize("num_shards", [1, 40])
def test_all_streams_of_a_file_are_read_wherever_shards_begin(tmp_path: Path, num_shards: int) -> None:
    files = {f"{kind}.arrow": data for kind, (data, _) in READ.items()}
    texts = {f"{kind}.arrow": texts for kind, (_, texts) in READ.items()}
    try:
        options = pyarrow.ipc.IpcReadOptions(included_fields=[0])
        pyarrow.ipc.open_file(OLD_FILE, options=options).get_batch(0)
    except OSError:  # this pyarrow cannot read some columns of it
        del files["a file of before 0.15.arrow"]
    world = World(tmp_path).raw(files).make(num_shards=num_shards)
    assert world.texts() == [text for name in sorted(files) for text in texts[name]]


PARQUET = table_bytes({"text": FIRST}, "parquet")
# Random files are cut anywhere and have bits flipped, too.
REFUSED: dict[str, bytes] = {
    "zeros behind the end mark.arrow": STREAM + bytes(8),
    "text behind the end mark.arrow": STREAM + b'{"text": "lost"}\n',
    "an end mark alone behind it.arrow": STREAM + END_MARK,
    "a cut stream behind it.arrow": STREAM + stream(SECOND)[:-70],
    "a stream behind one without end mark.arrow": CUT + STREAM,
    "a batch without a schema behind it.arrow": STREAM + STREAM[STREAM.index(b"\xff\xff\xff\xff", 8) :],
    "a file behind a stream.arrow": STREAM + FILE,
    "a stream behind a file.arrow": FILE + STREAM,
    "two files.arrow": FILE + FILE,
    "no schema.arrow": END_MARK,
    "zeros.arrow": bytes(4),
    "eight bytes.arrow": b"ARROW1\0\0",
    "Feather of before Arrow.arrow": b"FEA1" + bytes(60) + b"FEA1",
    # Two of five texts are null, and no bit says which: the column's node in the record batch's header.
    "nulls that no bit says.arrow": table_bytes({"text": ["한글"] * 5}, "stream", rows=5).replace(
        struct.pack("<qq", 5, 0), struct.pack("<qq", 5, 2)
    ),
    # The footer alone has a right one.
    "a file without a schema behind its mark.arrow": FILE[:8] + bytes(4) + FILE[12:],
    "broken name of a column.parquet": b"\xe5ext".join(PARQUET.rsplit(b"text", 1)),
    "column of another type.parquet": table_bytes({"text": [1, 2]}, "parquet"),
    "no such column.parquet": table_bytes({"body": ["a"], "title": ["b"]}, "parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pyarrow_would_leave_out_or_not_see_is_refused_by_name(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({name: REFUSED[name]})
    ended = world.try_plan(num_shards=2)  # which looks for places between shards
    if ended.code == 0 and "nulls" in name:
        ended = max(world.try_shard(0), world.try_shard(1), key=lambda each: each.code)
    assert ended.code == 65, ended.text
    assert str(world.raw_dir / name) in ended.err
    if name.startswith("no such column"):
        assert all(word in ended.err for word in ("body", "title", "--text_field"))


encryption: Any = pytest.importorskip("pyarrow.parquet.encryption", reason="this pyarrow has no encryption")


class KeyService(encryption.KmsClient):
    """Keeps keys as they are."""

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


ENCRYPTED: dict[str, dict[str, Any]] = {
    "another column": {"plaintext_footer": True, "column_keys": {"k": ["secret"]}},
    "nested": {"plaintext_footer": True, "column_keys": {"k": ["meta.b"], "l": ["secret"]}},
    "the footer too": {"column_keys": {"k": ["secret"]}},
}


@pytest.mark.parametrize("kind", ENCRYPTED)
def test_a_file_with_an_encrypted_column_is_refused_by_its_name(tmp_path: Path, kind: str) -> None:
    columns = {name: [f"{name} {n}" for n in range(40)] for name in ("secret", "text")}
    table = pyarrow.table({**columns, "meta": [{"a": n, "b": "x"} for n in range(40)]})
    world = World(tmp_path)
    properties = encryption.CryptoFactory(lambda _: KeyService()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="footer", data_key_length_bits=128, **ENCRYPTED[kind]),
    )
    path = world.raw_dir / "a.parquet"
    with pyarrow.parquet.ParquetWriter(path, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=10)
    ended = world.try_plan().ends(65)
    assert str(path) in ended.err
