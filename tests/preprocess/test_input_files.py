"""Documents of plain text, JSON lines and compressed files are those of an independent reader."""

from __future__ import annotations

import gzip
import itertools
import json
import lzma
import os
import random
import re
import struct
import sys
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import zstandard

from tests.checkout import ROOT
from tests.input_writers import bgzip, json_lines, seekable_zstd, table_bytes
from tests.plain_reader import plain_records
from tests.random_inputs import FORMATS, PACKERS, compare, file_name
from tests.world import World

TEXTS = [f"문서 {number}: the kettle sings\n\ttwice. " * (number % 7 + 1) for number in range(60)]


def check_with_plain_reader(world: World, num_shards: int, **options: Any) -> int:
    """Make a data set of all files, and compare it with the plain reader; the number of bad records."""
    world.make(num_shards=num_shards, max_bad_fraction=1, **options)
    texts, bad = [], []
    for path in [world.raw_dir / name for name in world.inputs()]:
        for record in plain_records(path, **options):
            if record.reason:
                bad.append((path.name, record.offset, record.reason))
            elif record.text:
                texts.append(record.text)
    told = world.lines("quarantine")
    assert world.texts() == texts
    found = [(each["source"], each["source_offset"], each["reason"]) for each in told]
    if options.get("text_template"):  # of a field that stands twice and one that is missing, either is told
        found, bad = ([(name, place, "") for name, place, _ in each] for each in (found, bad))
    assert found == bad
    for each in told:
        named = re.search(r"\bbyte (\d+) is not", each["detail"])
        if named:
            assert 0 <= int(named[1]) - each["source_offset"] < each["num_bytes"], each
    return len(bad)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_random_files_are_read_as_an_independent_reader_reads_them(form: str, tmp_path: Path) -> None:
    """Some are damaged: then they are refused."""
    num_files = int(os.environ.get("RANDOM_FILES", "40"))
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
SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()]  # as str.strip() knows it
LETTERS = ["a", "bc", " ", "가", "똠방", "語", "é", "я", "ก", "\u200b", "🙂", "x" * 9, "\ufeff", *SPACES]
BROKEN = [b"\xff", b"\x80", b"\xea\xb0", b"\x81", b"\xfe"]


@pytest.mark.parametrize(("encoding", "doc"), [*((each, "line") for each in ENCODINGS), ("cp949", "file")])
def test_lines_or_whole_files_of_each_encoding_are_decoded(tmp_path: Path, encoding: str, doc: str) -> None:
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


def test_an_encoding_whose_line_ends_are_no_single_bytes_is_refused(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    for encoding in NO_ENCODINGS:
        error = world.try_plan(encoding=encoding).ends(2).error
        if encoding.startswith("utf-"):
            assert str(error).endswith(f"iconv -f {encoding} -t utf-8")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["\r\n", "\r"])
def test_a_line_end_on_the_edge_of_a_read_is_not_cut_in_two(tmp_path: Path, end: str) -> None:
    """From where a shard should begin 16 KiB are read, then 64 KiB each time; of a shard 128 or 512 KiB."""
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
def test_a_document_above_64_mib_is_left_out_and_its_neighbours_stay(tmp_path: Path, name: str) -> None:
    texts = ["before", "x y " * (17 << 20), "after"]
    if name == "a.parquet":
        data = table_bytes({"text": texts}, "parquet")
    else:
        data = json_lines(texts) if name == "a.jsonl" else gzip.compress("\n".join(texts).encode(), 1)
    world = World(tmp_path).raw({name: data}).plan(num_shards=1, max_bad_fraction=0.5).run()
    assert world.texts() == ["before", "after"]
    (bad,) = world.lines("quarantine")
    assert (bad["source"], bad["line"], bad["reason"]) == (name, 1, "too_long")


KEYS = [
    '"text"', '"te\\u0078t"', '"\\u0074\\u0065\\u0078\\u0074"', '"text"\t', '"text" ', '"meta"',
    '"me\\u0074a"', '"본문"', '"\\ubcf8\\uBB38"', '"other"', '"id"',
]  # fmt: skip
NUMBERS = ["18446744073709551616", "-9223372036854775809", "9007199254740993", "1.0", "-0", "-0.0", "1e5"]
NUMBERS += ["1e999", "-1E+400", "9" * 400, "1e-999", "1.5e300"]
VALUES = ['"a"', '"가 \\"text\\": b"', '"x\\\\"', '"\\"text"', '"\\\\u0074ext\\":"', "7", "null", *NUMBERS]
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
def test_what_is_taken_of_a_line_of_json_depends_on_no_other_line(tmp_path: Path, choice: str) -> None:
    rng, options = random.Random(choice), FIELDS[choice]
    right = '{"text": "b", "본문": "다", "meta": {"text": "m"}, "id": 7}'
    odd = ["", '{"text": "a"} {"text": "b"}', '{"n": [{}', '{}], "text": "c"}']
    odd.append('{"text": "a", "n": "\udcff"}')  # a byte that is no UTF-8
    each = [random_object(rng) for _ in range(1_000)]
    lines = [*each, *rng.choices([right, *odd], k=1_000)]
    rng.shuffle(lines)
    world = World(tmp_path).raw({"a.jsonl": "\n".join(lines).encode(errors="surrogateescape")})
    assert check_with_plain_reader(world, num_shards=3, **options) > 150
    if "id_field" in options:
        records = [record for record in plain_records(world.raw_dir / "a.jsonl", **options) if record.text]
        assert world.lines("ids") == [[0, record.offset, record.id] for record in records]


def test_a_field_may_name_the_source_and_long_integers_stay_exact(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("stack", [1000, 5000])  # of the interpreter; another one in each version of Python
@pytest.mark.parametrize("kind", ["list", "object"])
def test_records_of_up_to_512_levels_are_read_on_any_stack(tmp_path: Path, kind: str, stack: int) -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth if kind == "list" else '{"a":' * depth + "1" + "}" * depth

    forms = [
        '{"text": "good", "id": 1, "other": %s}',
        '{"text": "good", "id": %s}',
        '{"text": "good", "id": 1, "x": 1, "x": %s}',
        '{"text": "good", "id": "%s", "other": %%s}' % ("\\\\[{" * 400),  # brackets in a text
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
def test_plan_tells_which_named_field_no_record_has(tmp_path: Path, suffix: str) -> None:
    records = [{"text": f"w{number}", "id": f"i{number}"} for number in range(9)]
    lines = [*records, *({"body": "a"} for _ in range(30))]
    content: Any = lines if suffix == "jsonl" else table_bytes(records, "parquet")
    world = World(tmp_path).raw({f"a.{suffix}": content})
    told = world.try_plan(id_field="idd", source_field="src", dry_run=True).ends(0, "idd", "src").text
    assert (" 77% " in told) == (suffix == "jsonl"), "so many lack the text, too"
    assert "--id_field" not in world.try_plan(id_field="id", dry_run=True).text


def test_what_datatrove_and_dolma_wrote_goes_in_as_it_is(tmp_path: Path) -> None:
    """Small files that their own writers wrote: datatrove 0.10.1, dolma 1.2.1's mixer."""
    paths = sorted((ROOT / "tests" / "data" / "written_by_others").iterdir())
    assert len(paths) >= 3
    # Under names of their own: one that is another in a compressed form would be left out.
    world = World(tmp_path).raw({f"{n}-{path.name}": path.read_bytes() for n, path in enumerate(paths)})
    world.make(num_shards=None, id_field="id")
    texts = ["The kettle sings.\nTwice.", "바닷가 마을의 겨울은 길다.", "tab\there"]
    assert world.texts() == texts * len(paths)
    assert [line[2] for line in world.lines("ids")][2::3] == ["d2"] * len(paths)


def test_files_that_tell_where_they_may_be_entered_are_cut_and_others_dealt_evenly(tmp_path: Path) -> None:
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
    assert len(first_whole) > 2, "the files that stay whole fill several shards"
    assert sorted(world.texts()) == sorted(TEXTS * 2 + list(itertools.chain(*parts)))


HCRC, EXTRA, NAME, COMMENT = 2, 4, 8, 16  # flags of RFC 1952


def gzip_member(text: str, flags: int = 0, comment: bytes = b"a comment") -> bytes:
    """One member of gzip, with optional fields."""
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
        filling = (128 << 10) - before - len(gzip_member(first, COMMENT, b""))  # bytes that are read at once
        filled = gzip_member(first, COMMENT, b"x" * filling)
        world.raw(
            {f"{before:03d}.jsonl.gz": filled + gzip_member(second, flags) + gzip_member("last", flags)}
        )
        texts += [first, second, "last"]
    assert world.make(num_shards=1).texts() == texts


def long_zstd(data: bytes, long: int) -> bytes:
    """As ``zstd --long=N`` writes what it reads from a pipe: with a window of 2^N bytes."""
    params = zstandard.ZstdCompressionParameters(window_log=long)
    packer = zstandard.ZstdCompressor(compression_params=params).compressobj()
    return packer.compress(data) + packer.flush()


@pytest.mark.parametrize(("name", "long"), [("x.jsonl.zst", 28), ("x.txt.zst", 31)])
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


LINES, GZIP, MEMBER = json_lines(TEXTS), gzip_member("first"), gzip_member("text", NAME | HCRC)
# Name and content. Random files are cut and have bits flipped, too.
BROKEN_FILES: dict[str, tuple[str, bytes]] = {
    "gzip cut where plan does not look": ("a.jsonl.gz", gzip.compress(LINES * 200)[:-30]),
    "gzip with garbage behind": ("a.jsonl.gz", gzip.compress(LINES) + b"garbage behind it"),
    "a reserved flag of gzip": ("a.jsonl.gz", GZIP + MEMBER[:3] + bytes([MEMBER[3] | 0x40]) + MEMBER[4:]),
    "another checksum of gzip's header": ("a.jsonl.gz", GZIP + MEMBER[:27] + b"?" + MEMBER[28:]),
    "a cut header of gzip": ("a.jsonl.gz", GZIP + MEMBER[:20]),
    "plain text named gz": ("a.jsonl.gz", LINES),
    "cut zstd": ("a.txt.zst", zstandard.ZstdCompressor().compress(LINES)[:-9]),
    "cut seekable zstd": ("a.jsonl.zst", seekable_zstd(LINES, [500])[:-400]),
    "cut xz": ("a.txt.xz", lzma.compress(LINES)[:-9]),
    "text named arrow": ("a.arrow", LINES),
}  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "has_isal"),
    [(kind, has) for kind, (name, _) in BROKEN_FILES.items() for has in {True, not name.endswith(".gz")}],
)
def test_a_file_that_cannot_be_read_further_ends_in_65_by_its_name_and_counts_nothing(
    tmp_path: Path, kind: str, has_isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, content = BROKEN_FILES[kind]
    if not has_isal:
        monkeypatch.setitem(sys.modules, "isal", None)
    world = World(tmp_path).raw({name: content})
    ended = world.try_plan(num_shards=1)
    if "does not look" in kind and ended.code == 0:
        ended = world.try_shard(0)
    ended.ends(65, world.raw_dir / name)
    assert not list(world.data_dir.glob("shard-*"))


def test_empty_files_of_every_format_hold_no_documents(tmp_path: Path) -> None:
    suffixes = ("txt", "jsonl", "json", "txt.gz", "jsonl.zst", "txt.xz", "txt.bz2", "parquet", "arrow")
    world = World(tmp_path).raw({f"a{n}.{suffix}": b"" for n, suffix in enumerate(suffixes)})
    assert world.raw({"j.txt": "one\n"}).make().texts() == ["one"]
    assert len(world.inputs()) == len(suffixes) + 1
