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
import pyarrow as pa
import pytest

from tests.children import run_child, shardprep
from tests.input_writers import table_bytes
from tests.world import World

SUFFIXES = ["parquet", "stream.arrow", "file.arrow"]
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


def ids_of(world: World) -> dict[str, list[Any]]:
    """The ids of documents, by the name of their file."""
    names = world.inputs()
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number, _, text in world.lines("ids"):
        found[names[number]].append(text)
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_whose_name_has_a_dot_goes_before_a_nested_field(tmp_path: Path, suffix: str) -> None:
    nested = pa.array([{"b": f"nested {n}", "c.d": f"deep {n}"} for n in range(7)])
    named = pa.table({"a": nested, "a.b": [f"named {n}" for n in range(7)], "n": range(7)})
    files = {f"x.{suffix}": named, f"y.{suffix}": named.drop_columns(["a.b"])}
    world = World(tmp_path).raw({name: table_bytes(it, suffix) for name, it in files.items()})
    world.make(text_template="{a.b} {a.c.d}", id_field="a.c.d")
    assert world.texts() == [f"{kind} {n} deep {n}" for kind in ("named", "nested") for n in range(7)]
    assert ids_of(world) == {name: [f"deep {n}" for n in range(7)] for name in files}


NOT_NESTED: dict[str, tuple[pa.Array, str]] = {  # and what the value is as an id
    "a list of structs": (pa.array([[{"b": "x"}]]), ""),
    "a map": (pa.array([[("b", "x")]], pa.map_(pa.string(), pa.string())), ""),
    "a string": (pa.array(["x"]), ""),
    "another struct": (pa.array([{"c": "x"}]), ""),
    "a struct of numbers": (pa.array([{"b": 7}]), "7"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_nested_field_of_no_struct_of_strings_is_refused_and_no_id(tmp_path: Path, suffix: str) -> None:
    every = World(tmp_path)
    for kind, (column, _) in NOT_NESTED.items():
        file = {f"{kind}.{suffix}": table_bytes({"a": column, "text": ["t"]}, suffix)}
        every.raw(file)
        World(tmp_path / kind).raw(file).try_plan(text_field="a.b").ends(65, *file, "--text_field", " a")
    every.raw({f"nulls.{suffix}": table_bytes({"a": pa.nulls(1), "text": ["t"]}, suffix)})
    expected = {f"{kind}.{suffix}": [text] for kind, (_, text) in NOT_NESTED.items()}
    assert ids_of(every.make(id_field="a.b", source_field="a.b")) == {**expected, f"nulls.{suffix}": [""]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_name_that_two_columns_may_have_is_refused_where_it_is_meant(tmp_path: Path, suffix: str) -> None:
    values: list[Any] = [["one"], ["two"], [1], [2], ["other"], [{"b.c": "one"}], [{"c": "two"}]]
    table = pa.Table.from_arrays(list(map(pa.array, values)), ["text", "text", "n", "n", "body", "a", "a.b"])
    world = World(tmp_path).raw({f"x.{suffix}": table_bytes(table, suffix)})
    world.try_plan().ends(65, f"x.{suffix}")
    nested = {"text_field": "a.b.c"}
    for options in ({"text_field": "body", "id_field": "n"}, {"text_template": "{body}{text}"}, nested):
        world.try_plan(**options).ends(65, f"x.{suffix}")
    assert world.make(text_field="body").texts() == ["other"]


@pytest.mark.processes
def test_a_new_process_plans_parquet_and_arrow_files_that_lie_side_by_side(tmp_path: Path) -> None:
    """Threads that import two parts of pyarrow at once find half of it, which reads as a missing library."""
    world = World(tmp_path)
    for name, suffix in (("a", "parquet"), ("b", "stream.arrow"), ("c", "parquet"), ("d", "file.arrow")):
        world.raw({f"{name}.{suffix}": table_bytes({"text": ["a text"] * 9}, suffix)})
    run_child(shardprep("plan", *world.words_of_plan()))


BAD_TEXT = pa.Array.from_buffers(pa.string(), 3, pa.array([b"a", b"\xff", b"c"]).buffers())
DAY_NS, D, UTC = 86400 * 10**9, decimal.Decimal, datetime.timezone.utc
LAST_TIME = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
SECONDS = pa.array([0, 1, None, 1]).view(pa.timestamp("s"))
TOLD = ["1970-01-01T00:00:00", "1970-01-01T00:00:01", "", "1970-01-01T00:00:01"]


def lists_of(items: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([*range(len(items) + 1)], pa.int32()), items)


def stored(kind: pa.DataType, texts: dict[int, str]) -> tuple[Callable[[], pa.Array], list[str]]:
    """Numbers as some writer left them, taken for what they may not be, and the text of each as an id."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return (lambda: pa.array([*texts, None], width).view(kind)), [*texts.values(), ""]


# An array, which some versions of pyarrow have no type for, and its ids.
COLUMNS: dict[str, tuple[Callable[[], pa.Array], list[str]]] = {
    "seconds": stored(pa.timestamp("s"), {
        0: "1970-01-01T00:00:00", 1: "1970-01-01T00:00:01", -1: "1969-12-31T23:59:59", 253402300800: ""}),
    "nanoseconds in Seoul": stored(pa.timestamp("ns", "Asia/Seoul"), {
        1: "1970-01-01T00:00:00.000000001+00:00", 10**9: "1970-01-01T00:00:01+00:00",
        -1000: "1969-12-31T23:59:59.999999+00:00", 2**62: "2116-02-20T23:53:38.427387904+00:00"}),
    "days": stored(pa.date32(), {
        0: "1970-01-01", 19_000: "2022-01-08", -719162: "0001-01-01", 2932896: "9999-12-31", 10**8: ""}),
    "days in milliseconds": stored(pa.date64(), {
        0: "1970-01-01", 86_400_000: "1970-01-02", -86_400_000: "1969-12-31", 10**15: "", 2**62: ""}),
    "times of a day": stored(pa.time64("ns"), {
        0: "00:00:00", 1: "00:00:00.000000001", DAY_NS - 1: "23:59:59.999999999", -1: ""}),
    "durations": stored(pa.duration("ns"), {
        0: "PT0S", 10**17 + 1000: "PT100000000.000001S", -1: "-PT0.000000001S", -(10**9): "-PT1S"}),
    "times of Python": (lambda: pa.array([LAST_TIME]), [LAST_TIME.isoformat()]),
    "decimals": (lambda: pa.array([D("0.00"), D("-0.05")], pa.decimal128(20, 2)), ["0.00", "-0.05"]),
    "large decimals": (lambda: pa.array([D(10**60)], pa.decimal256(70, 0)), [str(10**60)]),
    "halves": (lambda: pa.array(np.array([0, -2, 2**-14], np.float16)), ["0.0", "-2.0", "6.103515625e-05"]),
    "bytes": (lambda: pa.array([b"a", "한글".encode(), b"\xff", b"", None]), ["a", "한글", "", "", ""]),
    "nested strings": (lambda: lists_of(BAD_TEXT), ['["a"]', "", '["c"]']),
    "a dictionary of times": (SECONDS.dictionary_encode, TOLD),
    "run-end encoded times": (
        lambda: pa.RunEndEncodedArray.from_arrays(pa.array([2, 3, 5, 6], pa.int32()), SECONDS),
        [TOLD[number] for number in (0, 0, 1, 2, 2, 3)]),
    "lists of structs of times": (
        lambda: lists_of(pa.StructArray.from_arrays([SECONDS], ["at"])),
        [f'[{{"at": "{text}"}}]' if text else '[{"at": null}]' for text in TOLD]),
    "maps": (
        lambda: pa.array([[("k", 1)], [], None, [("b", None)]], pa.map_(pa.string(), pa.duration("s"))),
        ['[["k", "PT1S"]]', "[]", "", '[["b", null]]']),
    "lists of a fixed size": (
        lambda: pa.array([[0, 1], None], pa.list_(pa.date32(), 2)), ['["1970-01-01", "1970-01-02"]', ""]),
    "structs with two fields of one name": (
        lambda: pa.StructArray.from_arrays([pa.array([1]), pa.array([2])], ["a", "a"]), [""]),
    "months, days and nanoseconds": (
        lambda: pa.array([(1, 2, 3), None], pa.month_day_nano_interval()), ["[1, 2, 3]", ""]),
    "numbers": (lambda: pa.array([0, 2**63 - 1, -5, None]), ["0", str(2**63 - 1), "-5", ""]),
    "JSON": (
        lambda: pa.ExtensionArray.from_storage(
            pa.json_(pa.string()), pa.array(['"a"', '{"b": [1, null]}', "9" * 23, "[", '{"a":1,"a":2}'])),
        ["a", '{"b": [1, null]}', "9" * 23, "", ""]),
    "UUIDs": (lambda: pa.array([uuid.UUID(int=1), None], pa.uuid()), [str(uuid.UUID(int=1)), ""]),
    "Booleans of a byte": (
        lambda: pa.ExtensionArray.from_storage(pa.bool8(), pa.array([0, 1, 2, None], pa.int8())),
        ["false", "true", "true", ""]),
    "views of lists": (
        lambda: pa.ListViewArray.from_arrays(
            pa.array([2, 0, 0], pa.int32()), pa.array([1, 0, 3], pa.int32()), pa.array(["0", "1", "2"])),
        ['["2"]', "[]", '["0", "1", "2"]']),
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


def text_column(kind: str) -> pa.Array:
    """TEXTS as a type, of which one is null and one no UTF-8."""
    data: list[bytes | None] = [text.encode() for text in TEXTS]
    data[5], data[9] = b"\xff\xfe, which is no UTF-8, at all", None
    binary = {"string": pa.binary, "large_string": pa.large_binary, "dictionary": pa.binary}
    column = pa.array(data, binary[kind]() if kind in binary else pa.binary_view())
    if kind != "binary_view":
        text_type = getattr(pa, "string" if kind == "dictionary" else kind)()
        column = pa.Array.from_buffers(text_type, len(data), column.buffers())
    if kind == "dictionary":
        column = pa.DictionaryArray.from_arrays(pa.array([*range(40)]), column)
    return column


@pytest.mark.parametrize("is_large", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("suffix", ["stream.arrow", "file.arrow"])
def test_texts_of_each_type_are_read_and_bad_ones_told(tmp_path: Path, suffix: str, is_large: bool) -> None:
    """A record batch of more than 16 MiB is not held whole: here a column beside the text makes it so."""
    kinds = ["dictionary", "large_string", "string"]
    kinds += ["binary_view", "string_view"] * hasattr(pa, "string_view")
    names = sorted(f"{kind}.{suffix}" for kind in kinds)
    meta = [None if n % 11 == 0 else {"in": {"note": f"n{n}"}, "is": n % 2 == 0} for n in range(40)]
    world = World(tmp_path)
    for name in names:
        columns = {"meta": meta, "n": range(40), "text": text_column(name.partition(".")[0])}
        if is_large:
            columns["beside"] = pa.array([bytes(1 << 20)] * 40)
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


def of_dictionary(texts: list[str]) -> pa.Table:
    """Another schema, whose texts are numbers of a dictionary that differs from batch to batch."""
    chunks = [pa.array(texts[n : n + 6]).dictionary_encode() for n in range(0, len(texts), 6)]
    return pa.table({"n": range(len(texts)), "text": pa.chunked_array(chunks)})


def stream(texts: list[str], *, is_old: bool = False, has_dictionary: bool = False) -> bytes:
    table = of_dictionary(texts) if has_dictionary else pa.table({"text": pa.array(texts, "string")})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=is_old, emit_dictionary_deltas=True)
    return table_bytes(table, "stream", rows=6, options=options)


STREAM, FILE = stream(FIRST), table_bytes({"text": FIRST}, "file", rows=6)
CUT = STREAM.removesuffix(END_MARK)
OLD_FILE = table_bytes(
    {"text": FIRST}, "file", rows=6, options=pa.ipc.IpcWriteOptions(use_legacy_format=True)
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
        options = pa.ipc.IpcReadOptions(included_fields=[0])
        pa.ipc.open_file(OLD_FILE, options=options).get_batch(0)
    except OSError:  # this pyarrow cannot read some columns of it
        del files["a file of before 0.15.arrow"]
    world = World(tmp_path).raw(files).make(num_shards=num_shards)
    assert world.texts() == [text for name in sorted(files) for text in texts[name]]


encryption: Any = pytest.importorskip("pyarrow.parquet.encryption", reason="this pyarrow has no encryption")


class KeyService(encryption.KmsClient):
    """Keeps keys as they are."""

    def wrap_key(self, key: bytes, name: str) -> bytes:
        return base64.b64encode(key)

    def unwrap_key(self, wrapped: bytes, name: str) -> bytes:
        return base64.b64decode(wrapped)


def encrypted(**settings: Any) -> bytes:
    """A file with an encrypted column, where pyarrow would end the process."""
    columns = {name: [f"{name} {n}" for n in range(40)] for name in ("secret", "text")}
    table, sink = pa.table({**columns, "meta": [{"a": n, "b": "x"} for n in range(40)]}), io.BytesIO()
    properties = encryption.CryptoFactory(lambda _: KeyService()).file_encryption_properties(
        encryption.KmsConnectionConfig(),
        encryption.EncryptionConfiguration(footer_key="footer", data_key_length_bits=128, **settings),
    )
    with pa.parquet.ParquetWriter(sink, table.schema, encryption_properties=properties) as writer:
        writer.write_table(table, row_group_size=10)
    return sink.getvalue()


PARQUET, KEYS = table_bytes({"text": FIRST}, "parquet"), {"k": ["meta.b"], "l": ["secret"]}
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
    "encrypted column.parquet": encrypted(plaintext_footer=True, column_keys={"k": ["secret"]}),
    "nested encrypted column.parquet": encrypted(plaintext_footer=True, column_keys=KEYS),
    "encrypted column and footer.parquet": encrypted(column_keys={"k": ["secret"]}),
    "no such column.parquet": table_bytes({"body": ["a"], "title": ["b"]}, "parquet"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_pyarrow_would_leave_out_or_not_see_is_refused_by_name(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({name: REFUSED[name]})
    ended = world.try_plan(num_shards=2)  # which looks for places between shards
    if ended.code == 0 and "nulls" in name:
        ended = max(world.try_shard(0), world.try_shard(1), key=lambda each: each.code)
    ended.ends(65, world.raw_dir / name)
    if name.startswith("no such column"):
        ended.ends(65, "body", "title", "--text_field")
