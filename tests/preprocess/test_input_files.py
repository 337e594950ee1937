"""Documents from text, JSON lines, compressed files and tables equal those of an independent reader."""

from __future__ import annotations

import contextlib
import datetime
import decimal
import gzip
import importlib
import io
import itertools
import json
import lzma
import os
import random
import re
import struct
import sys
import uuid
import zlib
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import zstandard

from tests.checkout import ROOT
from tests.children import run_child, shardprep
from tests.input_writers import bgzip, json_lines, seekable_zstd, table_bytes
from tests.plain_reader import plain_records
from tests.random_inputs import FORMATS, PACKERS, compare, file_name
from tests.world import World

pytestmark = pytest.mark.long

TEXTS = [f"문서 {number}: the kettle sings\n\ttwice. " * (number % 7 + 1) for number in range(60)]


def check_with_plain_reader(world: World, num_shards: int, **options: Any) -> int:
    """Make a data set, compare it with the plain reader, and return the number of bad records."""
    world.make(num_shards=num_shards, max_bad_fraction=1, **options)
    texts, bad = [], []
    for path in [world.raw_dir / name for name in world.inputs()]:
        for record in plain_records(path, **options):
            if record.reason:
                bad.append((path.name, record.offset, record.reason))
            elif record.text:
                texts.append(record.text)
    left_out = world.lines("quarantine")
    assert world.texts() == texts
    found = [(each["input"], each["input_offset"], each["reason"]) for each in left_out]
    if options.get("text_template"):  # if one field is repeated and another missing, either may be reported
        found, bad = ([(name, place, "") for name, place, _ in each] for each in (found, bad))
    assert found == bad
    for each in left_out:
        named = re.search(r"\bbyte (\d+) is not", each["detail"])
        if named:
            assert 0 <= int(named[1]) - each["input_offset"] < each["num_bytes"], each
    return len(bad)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_random_files_are_read_as_an_independent_reader_reads_them(form: str, tmp_path: Path) -> None:
    """Damaged files are refused, or read like the independent reader does."""
    num_files = int(os.environ.get("RANDOM_FILES", "6"))
    size = min(num_files // 2, 200)
    seeds = [range(first, first + size) for first in range(0, num_files, size)]
    counts = Counter(result for some in seeds for result in compare(form, some, tmp_path))
    print(f"{form}: {dict(counts)}")
    assert not [result for result in counts if result.startswith("WRONG")]
    assert counts["equal"] >= num_files // 2


ENCODINGS = [
    "utf-8", "utf-8-sig", "cp949", "euc-kr", "johab", "shift_jis", "euc_jp", "gb18030", "gbk", "big5",
    "latin-1", "cp1252", "koi8-r", "tis-620", "mac-roman", "ascii",
]  # fmt: skip
NO_ENCODINGS = [
    "utf-16", "utf-16-le", "utf-32", "utf-32-be", "iso2022_kr", "hz", "punycode", "idna", "hex", "zlib",
    "undefined", "no-such-codec", "utf\0008", "", "\udcff",
]  # fmt: skip
ENDS = ["\n", "\r\n", "\r", "\n\r", "\r\r", "\r\r\n"]
SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()]  # str.strip() removes these
LETTERS = ["a", "bc", " ", "가", "똠방", "語", "é", "я", "ก", "\u200b", "🙂", "x" * 9, "\ufeff", *SPACES]
BROKEN = [b"\xff", b"\x80", b"\xea\xb0", b"\x81", b"\xfe"]


@pytest.mark.parametrize(("encoding", "doc"), [*((each, "line") for each in ENCODINGS), ("cp949", "file")])
def test_each_encoding_is_decoded_by_lines_or_whole_files(tmp_path: Path, encoding: str, doc: str) -> None:
    rng, codec = random.Random(encoding), encoding.removesuffix("-sig")
    files = {}
    for number, (packed, pack) in enumerate(PACKERS.items()):
        pieces: list[Any] = rng.choices([*ENDS, *ENDS, *ENDS, *LETTERS, *BROKEN], k=600)
        data = b"".join(each if isinstance(each, bytes) else each.encode(codec, "ignore") for each in pieces)
        mark = b"\xef\xbb\xbf" if number % 2 else b""
        files[file_name(f"txt{packed}", number)] = pack(mark + data, rng)
    files |= {"8.txt": "\n one\r\n\r\ntwo\rthree \n".encode(codec), "9.txt": b""}
    num_bad = check_with_plain_reader(World(tmp_path).raw(files), num_shards=5, encoding=encoding, doc=doc)
    assert num_bad > 8 or doc == "file" or encoding in ("latin-1", "koi8-r", "mac-roman")


def test_an_encoding_whose_line_ends_are_not_single_bytes_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    for encoding in NO_ENCODINGS:
        error = world.try_plan(encoding=encoding).ends(2).error
        if encoding.startswith("utf-"):
            assert str(error).endswith(f"iconv -f {encoding} -t utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_a_line_end_across_two_reads_is_one_line_end(tmp_path: Path, end: str) -> None:
    """plan reads 16 KiB at the even share of a shard, then 64 KiB at a time; a task reads 128 or 512 KiB."""
    half, short = 96 << 10, "b c d\n" * 5
    for kib, shift in itertools.product([16, 80], range(-len(end), 1)):
        place = half + (kib << 10) + shift
        text = ("the " * half)[:place] + end + short
        text += ("the " * half)[: 2 * half - len(text)]
        world = World(tmp_path / f"{kib} {shift}").raw({"a.txt": text})
        assert world.plan(num_shards=2).plan_json()["cuts"][1][:2] == [0, place + len(end)]
    for kib in (128, 512):
        line = ("the " * (kib << 8))[:-1]
        world = World(tmp_path / f"{kib}").raw({"a.txt": line + end + short})
        assert world.make(num_shards=1).texts() == [line.strip(), *short.splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl", "a.parquet"])
def test_a_document_above_64_mib_is_left_out_and_others_stay(tmp_path: Path, name: str) -> None:
    texts = ["before", "x y " * (17 << 20), "after"]
    if name == "a.parquet":
        data = table_bytes({"text": texts}, "parquet")
    else:
        data = json_lines(texts) if name == "a.jsonl" else gzip.compress("\n".join(texts).encode(), 1)
    world = World(tmp_path).raw({name: data}).plan(num_shards=1, max_bad_fraction=0.5).run()
    assert world.texts() == ["before", "after"]
    (bad,) = world.lines("quarantine")
    assert (bad["input"], bad["line"], bad["reason"]) == (name, 1, "too_long")


KEYS = [
    '"text"', '"te\\u0078t"', '"\\u0074\\u0065\\u0078\\u0074"', '"text"\t', '"text" ', '"meta"',
    '"me\\u0074a"', '"본문"', '"\\ubcf8\\uBB38"', '"other"', '"id"',
]  # fmt: skip
NUMBERS = ["18446744073709551616", "-9223372036854775809", "9007199254740993", "1.0", "-0", "-0.0", "1e5"]
NUMBERS += ["1e999", "-1E+400", "9" * 400, "1e-999", "1.5e300"]
VALUES = ['"a"', '"가 \\"text\\": b"', '"x\\\\"', '"\\"text"', '"\\\\u0074ext\\":"', "7", "null", *NUMBERS]
VALUES.append('":1e999,"')  # the bytes of another value, between two keys
FIELDS: dict[str, dict[str, str]] = {
    "a field": {"text_field": "text", "id_field": "id"},
    "a nested field": {"text_field": "meta.text"},
    "letters beyond ASCII": {"text_field": "본문", "id_field": "id"},
    "a template": {"text_template": "{text}|{meta.text}"},
}


def random_object(rng: random.Random, depth: int = 0) -> str:
    pairs = []
    for _ in range(rng.randrange(5)):
        value = rng.choice(VALUES)
        if depth < 2 and rng.random() < 0.4:
            value = random_object(rng, depth + 1)
            value = f"[{value}]" if rng.random() < 0.2 else value
        pairs.append(f"{rng.choice(KEYS)}:{value}")
    return "{" + ",".join(pairs) + "}"


@pytest.mark.slow
@pytest.mark.parametrize("choice", FIELDS)
def test_reading_a_json_line_does_not_depend_on_other_lines(tmp_path: Path, choice: str) -> None:
    rng, options = random.Random(choice), FIELDS[choice]
    right = '{"text": "b", "본문": "다", "meta": {"text": "m"}, "id": 7}'
    odd = ["", '{"text": "a"} {"text": "b"}', '{"n": [{}', '{}], "text": "c"}']
    odd.append('{"text": "a", "n": "\udcff"}')  # a byte that is not UTF-8
    each = [random_object(rng) for _ in range(1_000)]
    lines = [*each, *rng.choices([right, *odd], k=1_000)]
    rng.shuffle(lines)
    world = World(tmp_path).raw({"a.jsonl": "\n".join(lines).encode(errors="surrogateescape")})
    assert check_with_plain_reader(world, num_shards=3, **options) > 150
    if "id_field" in options:
        records = [record for record in plain_records(world.raw_dir / "a.jsonl", **options) if record.text]
        assert world.lines("ids") == [[0, record.offset, record.id] for record in records]


def test_source_field_names_the_source_and_long_integers_stay_exact(tmp_path: Path) -> None:
    long = [18446744073709551616, -9223372036854775809, 10**30, 2**64 - 1, 7, 1.5, [2**70], {"a": 2**64}]
    world = World(tmp_path).raw({"a.jsonl": [{"text": "a", "id": each, "from": each} for each in long]})
    rows = [{"text": "a", "from": "web"}, {"text": "c"}, {"text": 5, "from": "web"}, {"from": "images"}]
    world.raw({"b.jsonl": rows}).make(num_shards=1, id_field="id", source_field="from", max_bad_fraction=1)
    assert [line[2] for line in world.lines("ids")] == [*map(json.dumps, long), "", ""]
    sources = world.manifests()[0]["counts"]["sources"]
    found = {name: (source["num_documents"], source["num_quarantined"]) for name, source in sources.items()}
    named = {".": (1, 0), "images": (0, 1), "web": (1, 1)}
    assert found == dict.fromkeys(map(json.dumps, long), (1, 0)) | named
    world.raw({"c.jsonl": [{"text": "a", "from": n} for n in range(1001)]})
    world.try_plan(source_field="from", output_dir=tmp_path / "many").ends(65, "--source_field")


@pytest.mark.parametrize("stack", [1000, 5000])  # recursion limit, which differs between versions of Python
@pytest.mark.parametrize("kind", ["list", "object"])
def test_records_of_up_to_512_levels_are_read_on_any_stack(tmp_path: Path, kind: str, stack: int) -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth

    forms = [
        '{"text": "good", "id": 1, "other": %s}',
        '{"text": "good", "id": %s}',
        '{"text": "good", "id": 1, "x": 1, "x": %s}',
        '{"text": "good", "id": "%s", "other": %%s}' % ("\\\\[{" * 400),  # brackets inside a string
        '{"text": %s, "id": 1}',
    ]
    lines = [form % nested(depth) for form in forms for depth in (511, 512, 984)]
    world = World(tmp_path).raw({"a.jsonl": "\n".join(lines) + "\n"})
    before = sys.getrecursionlimit()
    sys.setrecursionlimit(stack)
    try:
        world.plan(num_shards=1, id_field="id", max_bad_fraction=1).run()
    finally:
        sys.setrecursionlimit(before)
    expected = {line: "bad_json" for line in range(len(lines)) if line % 3} | {12: "wrong_type"}
    assert {entry["line"]: entry["reason"] for entry in world.lines("quarantine")} == expected


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_plan_warns_of_fields_that_no_record_has(tmp_path: Path, suffix: str) -> None:
    records = [{"text": f"w{number}", "id": f"i{number}"} for number in range(9)]
    lines = [*records, *({"body": "a"} for _ in range(30))]
    content: Any = lines if suffix == "jsonl" else table_bytes(records, "parquet")
    world = World(tmp_path).raw({f"a.{suffix}": content})
    text = world.try_plan(id_field="idd", source_field="src", dry_run=True).ends(0, "idd", "src").text
    assert (" 77% " in text) == (suffix == "jsonl"), "the share of records without the text field"
    assert "--id_field" not in world.try_plan(id_field="id", dry_run=True).text


def test_files_of_datatrove_and_dolma_are_read_unchanged(tmp_path: Path) -> None:
    """The files were written by datatrove 0.10.1 and the mixer of dolma 1.2.1."""
    paths = sorted((ROOT / "tests" / "data" / "written_by_others").iterdir())
    assert len(paths) >= 3
    # With distinct names: plan leaves out a compressed form of another file.
    world = World(tmp_path).raw({f"{n}-{path.name}": path.read_bytes() for n, path in enumerate(paths)})
    world.make(num_shards=None, id_field="id")
    texts = ["The kettle sings.\nTwice.", "바닷가 마을의 겨울은 길다.", "tab\there"]
    assert world.texts() == texts * len(paths)
    assert [line[2] for line in world.lines("ids")][2::3] == ["d2"] * len(paths)


def test_seekable_files_are_cut_and_other_compressed_files_are_dealt_evenly(tmp_path: Path) -> None:
    lines = json_lines(TEXTS)
    files = {"a.jsonl.zst": seekable_zstd(lines, [300]), "b.jsonl.gz": bgzip(lines, [300])}
    parts = [TEXTS[:share] for share in (40, 5, 30, 10, 20, 15)]
    for number, texts in enumerate(parts):
        files[f"c{number}.jsonl.gz"] = gzip.compress(json_lines(texts), 1)
    world = World(tmp_path).raw(files)
    world.make(num_shards=8)
    cuts, inputs = world.plan_json()["cuts"], world.inputs()
    assert {inputs[number] for number, place, *_ in cuts if place} == {"a.jsonl.zst", "b.jsonl.gz"}
    first_whole = [number for number, place, *_ in cuts if number >= 2 and not place]
    assert len(first_whole) > 2, "the whole files fill several shards"
    assert sorted(world.texts()) == sorted(TEXTS * 2 + list(itertools.chain(*parts)))


HCRC, EXTRA, NAME, COMMENT = 2, 4, 8, 16  # flags of RFC 1952


def gzip_member(text: str, flags: int = 0, comment: bytes = b"a comment") -> bytes:
    """Return a gzip member with optional header fields."""
    data = json.dumps({"text": text}).encode() + b"\n"
    head = b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\0\xff"
    head += struct.pack("<H", 8) + b"SZ\4\0abcd" if flags & EXTRA else b""
    head += b"part-00017.jsonl\0" if flags & NAME else b""
    head += comment + b"\0" if flags & COMMENT else b""
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF) if flags & HCRC else b""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return head + deflate.compress(data) + deflate.flush() + struct.pack("<II", zlib.crc32(data), len(data))


@pytest.mark.parametrize("has_isal", [True, False])
@pytest.mark.parametrize("flags", [0, EXTRA | NAME | COMMENT | HCRC])
def test_a_member_of_gzip_may_begin_at_any_byte_of_a_block(
    tmp_path: Path, flags: int, has_isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_isal:
        pytest.importorskip("isal", reason="it is not installed")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    world, texts = World(tmp_path), []
    for before in range(len(gzip_member("x", flags)) + 2):
        first, second = f"first {before}", f"second {before}"
        filling = (128 << 10) - before - len(gzip_member(first, COMMENT, b""))  # up to the end of a read
        filled = gzip_member(first, COMMENT, b"x" * filling)
        world.raw(
            {f"{before:03d}.jsonl.GZIP": filled + gzip_member(second, flags) + gzip_member("last", flags)}
        )
        texts += [first, second, "last"]
    assert world.make(num_shards=1).texts() == texts


def long_zstd(data: bytes, long: int) -> bytes:
    """Compress data as ``zstd --long=N`` does from a pipe, with a window of 2^N bytes."""
    params = zstandard.ZstdCompressionParameters(window_log=long)
    packer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(("name", "long"), [("x.jsonl.zst", 28), ("x.txt.Zstd", 31)])
def test_a_long_zstd_window_is_refused_by_plan_unless_allowed(tmp_path: Path, name: str, long: int) -> None:
    texts = [f"text {number}" for number in range(9)]
    data = json_lines(texts) if "json" in name else "\n".join(texts).encode()
    skipped = struct.pack("<II", 0x184D2A50, 3) + b"abc"
    world = World(tmp_path).raw({name: skipped + long_zstd(data, long)})
    world.try_plan().ends(65, world.raw_dir / name, "--zstd_long 31", "zstd -d --long=31")
    world.try_plan(zstd_long=long - 1).ends(65)
    assert world.make(zstd_long=long).texts() == texts


@pytest.mark.slow
def test_a_later_frame_with_a_long_window_ends_the_task_with_65_and_what_to_type(tmp_path: Path) -> None:
    data = zstandard.compress((b"the " * 4000 + b"\n") * 300) + long_zstd(b"two\n", 30)
    world = World(tmp_path).raw({"x.txt.zst": data}).plan(num_shards=1)
    world.try_shard(0).ends(65, "--zstd_long 31")
    assert not world.contents()


def test_empty_files_of_every_format_have_no_documents(tmp_path: Path) -> None:
    suffixes = ("txt", "jsonl", "json", "txt.gz", "jsonl.zst", "txt.xz", "txt.bz2", "parquet", "arrow")
    world = World(tmp_path).raw({f"a{n}.{suffix}": b"" for n, suffix in enumerate(suffixes)})
    assert world.raw({"j.txt": "one\n"}).make().texts() == ["one"]
    assert len(world.inputs()) == len(suffixes) + 1


# Tables.

SUFFIXES = ["parquet", "stream.arrow", "file.arrow"]
END_MARK = b"\xff\xff\xff\xff\0\0\0\0"


def ids_of(world: World) -> dict[str, list[Any]]:
    """Return the ids of documents by file name."""
    names = world.inputs()
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number, _, text in world.lines("ids"):
        found[names[number]].append(text)
    return found


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_column_with_a_dot_in_its_name_precedes_a_nested_field(tmp_path: Path, suffix: str) -> None:
    nested = pa.array([{"b": f"nested {n}", "c.d": f"deep {n}"} for n in range(7)])
    named = pa.table({"a": nested, "a.b": [f"named {n}" for n in range(7)], "n": range(7)})
    files = {f"x.{suffix}": named, f"y.{suffix}": named.drop_columns(["a.b"])}
    world = World(tmp_path).raw({name: table_bytes(it, suffix) for name, it in files.items()})
    world.make(text_template="{a.b} {a.c.d}", id_field="a.c.d")
    assert world.texts() == [f"{kind} {n} deep {n}" for kind in ("named", "nested") for n in range(7)]
    assert ids_of(world) == {name: [f"deep {n}" for n in range(7)] for name in files}


NOT_NESTED: dict[str, tuple[pa.Array, str]] = {  # a column, and the id that its value gives
    "a list of structs": (pa.array([[{"b": "x"}]]), ""),
    "a map": (pa.array([[("b", "x")]], pa.map_(pa.string(), pa.string())), ""),
    "a string": (pa.array(["x"]), ""),
    "another struct": (pa.array([{"c": "x"}]), ""),
    "a struct of numbers": (pa.array([{"b": 7}]), "7"),
}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_a_nested_text_field_must_be_in_a_struct_of_strings(tmp_path: Path, suffix: str) -> None:
    """If used as the id field, such a column gives a number or no id."""
    every = World(tmp_path)
    for kind, (column, _) in NOT_NESTED.items():
        file = {f"{kind}.{suffix}": table_bytes({"a": column, "text": ["t"]}, suffix)}
        every.raw(file)
        World(tmp_path / kind).raw(file).try_plan(text_field="a.b").ends(65, *file, "--text_field", " a")
    every.raw({f"nulls.{suffix}": table_bytes({"a": pa.nulls(1), "text": ["t"]}, suffix)})
    expected = {f"{kind}.{suffix}": [text] for kind, (_, text) in NOT_NESTED.items()}
    assert ids_of(every.make(id_field="a.b", source_field="a.b")) == {**expected, f"nulls.{suffix}": [""]}


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_an_ambiguous_column_name_is_refused_if_it_is_used(tmp_path: Path, suffix: str) -> None:
    values: list[Any] = [["one"], ["two"], [1], [2], ["other"], [{"b.c": "one"}], [{"c": "two"}]]
    table = pa.Table.from_arrays(list(map(pa.array, values)), ["text", "text", "n", "n", "body", "a", "a.b"])
    world = World(tmp_path).raw({f"x.{suffix}": table_bytes(table, suffix)})
    world.try_plan().ends(65, f"x.{suffix}")
    nested = {"text_field": "a.b.c"}
    for options in ({"text_field": "body", "id_field": "n"}, {"text_template": "{body}{text}"}, nested):
        world.try_plan(**options).ends(65, f"x.{suffix}")
    assert world.make(text_field="body").texts() == ["other"]


@pytest.mark.processes
def test_a_new_process_plans_a_folder_of_parquet_and_arrow_files(tmp_path: Path) -> None:
    """If threads import two parts of pyarrow at once, one of them may find a half-imported module."""
    world = World(tmp_path)
    for name, suffix in (("a", "parquet"), ("b", "stream.arrow"), ("c", "parquet"), ("d", "file.arrow")):
        world.raw({f"{name}.{suffix}": table_bytes({"text": ["a text"] * 9}, suffix)})
    run_child(shardprep("plan", *world.words_of_plan()))


BAD_TEXT = pa.array([b"a", b"\xff", b"c"]).view(pa.string())
DAY_NS, D, UTC = 86400 * 10**9, decimal.Decimal, datetime.timezone.utc
LAST_TIME = datetime.datetime(9999, 12, 31, 23, 59, 59, 999999, UTC)
SECONDS = pa.array([0, 1, None, 1]).view(pa.timestamp("s"))
TOLD = ["1970-01-01T00:00:00", "1970-01-01T00:00:01", "", "1970-01-01T00:00:01"]


def lists_of(items: pa.Array) -> pa.Array:
    return pa.ListArray.from_arrays(pa.array([*range(len(items) + 1)], pa.int32()), items)


def stored(kind: pa.DataType, texts: dict[int, str]) -> tuple[Callable[[], pa.Array], list[str]]:
    """Return a column of integers viewed as ``kind``, some out of range, and the text of each as an id."""
    width = pa.int32() if kind.bit_width == 32 else pa.int64()
    return (lambda: pa.array([*texts, None], width).view(kind)), [*texts.values(), ""]


# A column, whose type some versions of pyarrow lack, and its ids.
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


@pytest.mark.parametrize("has_pandas", [True, False])  # pyarrow converts some values to objects of pandas
def test_values_of_each_type_give_ids_as_text_or_none(
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


CELLS = [f"문서 {n} " + "long enough to stand apart " * (n % 3) for n in range(40)]


def text_column(kind: str) -> pa.Array:
    """Return CELLS as a column of this type, with a null and a cell that is not UTF-8."""
    data: list[bytes | None] = [text.encode() for text in CELLS]
    data[5], data[9] = b"\xff\xfe, which is not UTF-8, at all", None
    if kind == "dictionary":
        return pa.DictionaryArray.from_arrays(pa.array([*range(40)]), pa.array(data).view(pa.string()))
    return pa.array(data, getattr(pa, kind.replace("string", "binary"))()).view(getattr(pa, kind)())


@pytest.mark.parametrize("is_large", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.parametrize("suffix", ["stream.arrow", "file.arrow"])
def test_texts_of_each_column_type_are_read(tmp_path: Path, suffix: str, is_large: bool) -> None:
    """``is_large``: another column makes a record batch larger than 16 MiB, so that it is read in parts."""
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
    assert world.texts() == [CELLS[n] for n in kept] * len(names)
    notes = ["" if n % 11 == 0 else f"n{n}" for n in kept]
    assert ids_of(world) == dict.fromkeys(names, notes)
    left_out = [(line["input"], line["input_offset"], line["reason"]) for line in world.lines("quarantine")]
    assert left_out == [(name, *bad) for name in names for bad in ((5, "undecodable"), (9, "null_field"))]


FIRST = [f"first {n}" for n in range(20)]
SECOND = [f"둘째 {n}" for n in range(13)]


def of_dictionary(texts: list[str]) -> pa.Table:
    """Return a table with another schema, where each batch has a text dictionary of its own."""
    chunks = [pa.array(texts[n : n + 6]).dictionary_encode() for n in range(0, len(texts), 6)]
    return pa.table({"n": range(len(texts)), "text": pa.chunked_array(chunks)})


def of_one_dictionary(texts: list[str]) -> pa.Table:
    return pa.table({"n": range(len(texts)), "text": pa.array(texts).dictionary_encode()})


LZ4 = pa.ipc.IpcWriteOptions(compression="lz4")


def stream(texts: list[str], *, is_old: bool = False, has_dictionary: bool = False) -> bytes:
    table = of_dictionary(texts) if has_dictionary else pa.table({"text": pa.array(texts, "string")})
    options = pa.ipc.IpcWriteOptions(use_legacy_format=is_old, emit_dictionary_deltas=True)
    return table_bytes(table, "stream", rows=6, options=options)


def by_polars(file: bytes) -> bytes:
    """Return an Arrow file as polars 2 writes it: without the 8 bytes before the schema."""
    size = int.from_bytes(file[12:16], "little")
    return file[:8] + file[16 : 16 + size] + bytes(8) + file[16 + size :]


def moved(file: bytes, num_bytes: int) -> bytes:
    """Return an Arrow file whose footer has the first record batch elsewhere."""
    footer = len(file) - 10 - int.from_bytes(file[-10:-6], "little")
    at = 16 + int.from_bytes(STREAM[4:8], "little")  # of the first record batch, behind the schema
    place = file.index(struct.pack("<q", at), footer)
    return file[:place] + struct.pack("<q", at + num_bytes) + file[place + 8 :]


STREAM, FILE = stream(FIRST), table_bytes({"text": FIRST}, "file", rows=6)
CUT = STREAM.removesuffix(END_MARK)
READ: dict[str, tuple[bytes, list[str]]] = {
    "two streams": (STREAM + stream(SECOND), FIRST + SECOND),
    "the second with another schema": (STREAM + stream(SECOND, has_dictionary=True), FIRST + SECOND),
    "the first with dictionaries": (stream(FIRST, has_dictionary=True) + stream(SECOND), FIRST + SECOND),
    "one without rows between": (STREAM + stream([]) + stream(SECOND), FIRST + SECOND),
    "no end mark": (CUT, FIRST),
    "no end mark behind the second": (STREAM + stream(SECOND).removesuffix(END_MARK), FIRST + SECOND),
    "before 0.15": (stream(FIRST, is_old=True, has_dictionary=True), FIRST),
    "before 0.15 and behind it": (stream(FIRST, is_old=True) + stream(SECOND), FIRST + SECOND),
    "polars 2": (by_polars(FILE), FIRST),
    "polars 2, dictionaries": (by_polars(table_bytes(of_one_dictionary(FIRST), "file", rows=6)), FIRST),
    "polars 2, lz4": (by_polars(table_bytes({"text": FIRST}, "file", rows=6, options=LZ4)), FIRST),
    "polars 2, no rows": (by_polars(table_bytes({"text": pa.array([], "string")}, "file")), []),
    "a file whose schema is in the footer alone": (FILE[:8] + bytes(4) + FILE[12:], FIRST),
}


@pytest.mark.parametrize("num_shards", [1, 40])
def test_all_arrow_streams_of_a_file_are_read_wherever_shards_begin(tmp_path: Path, num_shards: int) -> None:
    files = {f"{kind}.arrow": data for kind, (data, _) in READ.items()}
    texts = {f"{kind}.arrow": texts for kind, (_, texts) in READ.items()}
    world = World(tmp_path).raw(files).make(num_shards=num_shards)
    assert world.texts() == [text for name in sorted(files) for text in texts[name]]


LONG = "boilerplate " * 7500
MANY = 600  # rows: 54 MB of text, if they were decoded at once


def repeated(form: str) -> bytes:
    """Return a small file in which most rows share one text of 90 kB, after rows that do not show it."""
    first = [None] * 100 if form in ("struct.parquet", "lists.parquet") else [None]
    texts: list[str | None] = [*first, "a", *[LONG] * MANY, *(f"b {n}" for n in range(50))]
    column = pa.array(texts)
    encoded = column.dictionary_encode()
    options: dict[str, Any] = {"row_group_size": 1 << 20}
    if form == "prefixes.parquet":
        options |= {"use_dictionary": False, "column_encoding": {"text": "DELTA_BYTE_ARRAY"}}
    if form == "lists.parquet":
        said = pa.array([None if text is None else [{"text": text}] for text in texts])
        table = pa.table({"text": pa.array(["short"] * len(texts)), "said": said})
    elif form == "struct.parquet":
        table = pa.table({"text": pa.StructArray.from_arrays([column], names=["in"])})
    elif form == "views.arrow":
        one = pa.array([None, "a", LONG], pa.string_view())
        views = one.buffers()[1].to_pybytes()
        rest = pa.array([f"b {n}" for n in range(50)], pa.string_view())
        views = views[:32] + views[32:48] * MANY + rest.buffers()[1].to_pybytes()[: 16 * 50]
        valid = pa.py_buffer(b"\xfe" + b"\xff" * (len(texts) // 8))
        buffers = [valid, pa.py_buffer(views), *one.buffers()[2:]]
        table = pa.table({"text": pa.Array.from_buffers(pa.string_view(), len(texts), buffers)})
    else:  # "dictionary.arrow", "type.parquet" and "text.parquet"
        table = pa.table({"text": column if form == "text.parquet" or "prefix" in form else encoded})
    sink = io.BytesIO()
    if form.endswith(".parquet"):
        pa.parquet.write_table(table, sink, **options)
    else:
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_table(table)
    return sink.getvalue()


SHARED = (
    *("text.parquet", "type.parquet", "prefixes.parquet", "struct.parquet"),
    pytest.param("lists.parquet", marks=pytest.mark.processes),  # plan tries a function in a process
    *("dictionary.arrow", "views.arrow"),
)


@pytest.mark.slow
@pytest.mark.parametrize("form", SHARED)
def test_rows_that_share_a_text_are_decoded_few_at_a_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    """A file of some kB may have gigabytes of text, so its encoded size says little."""
    decoded: list[int] = []  # bytes of each batch of rows, as pyarrow decoded it
    read = pa.parquet.ParquetFile.iter_batches

    def iter_batches(*given: Any, **options: Any) -> Any:
        for batch in read(*given, **options):
            decoded.append(batch.nbytes)
            yield batch

    texts_at_once: list[int] = []  # bytes of the texts that are made at once

    def texts_of(values: Iterable[Any]) -> list[Any]:
        found: list[Any] = read_texts(values)
        texts_at_once.append(sum(len(text) for text in found if isinstance(text, bytes)))
        return found

    joined: list[int] = []  # bytes of the records that are held at once for a function

    def read_joined(*given: Any) -> Any:
        for records in read_records(*given):
            joined.append(sum(len(str(each)) for each in records.columns.get("record", ())))
            yield records

    tables = importlib.import_module("preprocess.read.parquet").Parquet
    read_records = tables.read
    monkeypatch.setattr(tables, "read", read_joined)
    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", iter_batches)
    read_texts = importlib.import_module("preprocess.read.formats").texts_of
    monkeypatch.setattr("preprocess.read.formats.texts_of", texts_of)
    monkeypatch.setattr("preprocess.plan.cost._SAMPLE_BYTES", 1 << 18)  # enough to decode a batch
    options: dict[str, Any] = {"text_field": "text.in" if form == "struct.parquet" else None}
    if form == "lists.parquet":
        function = tmp_path / "beginning.py"
        function.write_text("def transform(record):\n    return str(record['said'])[:500]\n")
        options = {"transform": function}
    world = World(tmp_path).raw({f"a.{form}": repeated(form)})
    world.try_plan(dry_run=True, max_bad_fraction=1, **options).ends(0)
    assert 0 < max(texts_at_once) < 2 << 20
    if form.endswith(".parquet"):
        assert 0 < max(decoded) < 20 << 20
        assert max(joined) < 20 << 20
    assert (max(joined, default=0) > 0) == (form == "lists.parquet")


@pytest.mark.processes  # plan tries a function in a process
def test_a_wide_table_is_decoded_in_few_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch costs time for each column, however few rows it has."""
    num_rows: list[int] = []
    read = pa.parquet.ParquetFile.iter_batches

    def iter_batches(*given: Any, **options: Any) -> Any:
        for batch in read(*given, **options):
            num_rows.append(batch.num_rows)
            yield batch

    monkeypatch.setattr(pa.parquet.ParquetFile, "iter_batches", iter_batches)
    function = tmp_path / "beginning.py"
    function.write_text("def transform(record):\n    return record['text'] + str(record['c299'])\n")
    table = {"text": [f"text {row}" for row in range(400)]}
    columns = {f"c{number}": [float(row) for row in range(400)] for number in range(300)}
    sink = io.BytesIO()
    pa.parquet.write_table(pa.table({**table, **columns}), sink)
    world = World(tmp_path).raw({"a.parquet": sink.getvalue()}).plan(num_shards=1, transform=function)
    num_rows.clear()
    world.run(transform=function)
    assert world.texts() == [f"text {row}{float(row)}" for row in range(400)]
    assert len(num_rows) <= 4, num_rows


PARQUET, GZIP, LINES = table_bytes({"text": FIRST}, "parquet"), gzip_member("first"), json_lines(TEXTS)
MEMBER, FOOTER_BYTES = gzip_member("text", NAME | HCRC), int.from_bytes(PARQUET[-8:-4], "little")
# The random files above have more cuts and flipped bits.
REFUSED: dict[str, bytes] = {
    "cut where plan does not look.jsonl.gz": gzip.compress(LINES * 200)[:-30],
    "garbage behind it.jsonl.gz": gzip.compress(LINES) + b"garbage behind it",
    "a reserved flag.jsonl.gz": GZIP + MEMBER[:3] + bytes([MEMBER[3] | 0x40]) + MEMBER[4:],
    "another checksum of the header.jsonl.gz": GZIP + MEMBER[:27] + b"?" + MEMBER[28:],
    "a cut header.jsonl.gz": GZIP + MEMBER[:20],
    "plain text.jsonl.gz": LINES,
    "cut.txt.zst": zstandard.ZstdCompressor().compress(LINES)[:-9],
    "cut seekable.jsonl.zst": seekable_zstd(LINES, [500])[:-400],
    "cut.txt.xz": lzma.compress(LINES)[:-9],
    "plain text.arrow": LINES,
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
    # The header states two nulls of five texts, but there is no validity bitmap.
    "nulls that no bit says.arrow": table_bytes({"text": ["한글"] * 5}, "stream", rows=5).replace(
        struct.pack("<qq", 5, 0), struct.pack("<qq", 5, 2)
    ),
    "two files of polars.arrow": by_polars(FILE) * 2,
    "polars, a message moved.arrow": moved(by_polars(FILE), 64),
    "polars, a message beyond the end.arrow": moved(by_polars(FILE), 1 << 40),
    "polars, a message before the first.arrow": moved(by_polars(FILE), -128),
    "polars, cut in the middle.arrow": by_polars(FILE)[:300] + by_polars(FILE)[500:],
    "broken name of a column.parquet": b"\xe5ext".join(PARQUET.rsplit(b"text", 1)),
    "column of another type.parquet": table_bytes({"text": [1, 2]}, "parquet"),
    # With encrypted columns, pyarrow writes a nonce and a tag after the footer.
    "encrypted columns.parquet": (PARQUET[:-8] + bytes(28) + struct.pack("<I4s", FOOTER_BYTES + 28, b"PAR1")),
    "encrypted footer.parquet": PARQUET[:-4] + b"PARE",
    "no such column.parquet": table_bytes({"body": ["a"], "title": ["b"]}, "parquet"),
}


@pytest.mark.parametrize(
    ("name", "has_isal"), [(name, has) for name in REFUSED for has in {True, not name.endswith(".gz")}]
)
def test_a_file_that_cannot_be_read_to_its_end_is_refused_by_name(
    tmp_path: Path, name: str, has_isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if pyarrow would ignore the rest of the file, or not notice the fault."""
    if not has_isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    world = World(tmp_path).raw({name: REFUSED[name]})
    ended = world.try_plan(num_shards=2)  # reads the places where shards may begin
    if ended.code == 0 and ("plan does not look" in name or "nulls" in name):
        ended = max(world.try_shard(0), world.try_shard(1), key=lambda each: each.code)
    ended.ends(65, world.raw_dir / name)
    assert len(world.manifests()) < 2, "its shard is not made"
    assert not name.startswith("no such column") or ended.ends(65, "body", "title", "--text_field")
