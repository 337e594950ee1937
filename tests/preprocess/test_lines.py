"""Documents of plain text are the lines that Python's text mode gives, with the byte each begins at."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preprocess.read.documents import BadDocument, read_documents
from shardprep.errors import NotFound, ReadWriteError, UsageError
from shardprep.format.options import PlanOptions
from shardprep.format.plan import ByteRange
from tests.input_writers import zstd_of_blocks
from tests.world import World

ENCODINGS = [
    "utf-8", "utf-8", "utf-8", "utf-8-sig", "cp949", "euc-kr", "johab", "shift_jis", "euc_jp", "gb18030",
    "gbk", "big5", "latin-1", "cp1252", "koi8-r", "tis-620", "mac-roman", "ascii",
]  # fmt: skip
REFUSED = [
    "utf-16", "utf-16-le", "utf-32", "utf-32-be", "iso2022_kr", "hz", "utf-7", "cp037", "punycode", "idna",
    "unicode_escape", "rot13", "hex", "zlib", "undefined", "no-such-codec", "utf\0008", "", "\udcff",
]  # fmt: skip
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: zstd_of_blocks(data, [3, 1, 40, 7]),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, 1),
}
ENDS = ["\n", "\r\n", "\r", "\n\r", "\r\r", "\r\r\n"]
SPACES = [chr(point) for point in range(0x3001) if chr(point).isspace()]  # as str.strip() knows it
LETTERS = ["a", "bc", " ", "가", "똠방", "語", "é", "я", "ก", "\u200b", "🙂", "x" * 9, *SPACES]
BROKEN = [b"\xff", b"\x80", b"\xea\xb0", b"\x81", b"\xfe"]


@dataclass(frozen=True, kw_only=True)
class Read:
    """Everything that came of reading parts of files."""

    documents: list[tuple[int, int, str]]  # line, byte of its start, text
    bad: list[tuple[int, int, int]]  # line, byte of its start, bytes
    num_lines: int
    num_empty: int


def read(parts: list[ByteRange], *, batch_bytes: int = 1 << 17, **options: Any) -> Read:
    batches = list(read_documents(parts, PlanOptions(**options), batch_bytes=batch_bytes))
    assert sum(batch.num_bytes for batch in batches) == sum(part.end - part.start for part in parts)
    return Read(
        documents=[
            (line, offset, text.decode())
            for batch in batches
            for line, offset, text in zip(
                batch.lines.tolist(), batch.offsets.tolist(), batch.texts, strict=True
            )
        ],
        bad=[where_bad(bad) for batch in batches for bad in batch.bad],
        num_lines=sum(batch.num_lines for batch in batches),
        num_empty=sum(batch.num_lines - len(batch.texts) - len(batch.bad) for batch in batches),
    )


def where_bad(bad: BadDocument) -> tuple[int, int, int]:
    """Line, byte and bytes, once the byte that the detail names lies in it."""
    assert bad.reason == "undecodable"
    (named,) = re.findall(r"^byte (\d+) is not [-\w]+: ", bad.detail)
    assert bad.source_offset <= int(named) < bad.source_offset + bad.num_bytes, bad.detail
    return bad.line, bad.source_offset, bad.num_bytes


def expected_of(data: bytes, encoding: str) -> Read:
    """Each line decoded by itself."""
    codec, start = encoding.removesuffix("-sig"), 0
    if encoding == "utf-8-sig" and data.startswith(b"\xef\xbb\xbf"):
        data, start = data[3:], 3
    found = Read(documents=[], bad=[], num_lines=0, num_empty=0)
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", data)
    num_empty = 0
    for number, line in enumerate(lines):
        try:
            text = line.decode(codec).strip()
            num_empty += not text
            if text:
                found.documents.append((number, start, text))
        except UnicodeDecodeError:
            found.bad.append((number, start, len(line)))
        start += len(line)
    return Read(documents=found.documents, bad=found.bad, num_lines=len(lines), num_empty=num_empty)


def whole(path: Path, data: bytes, source: int = 0) -> ByteRange:
    path.write_bytes(data)
    return ByteRange(input_number=source, path=path, start=0, end=len(data))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "a.txt"


def test_documents_offsets_empty_and_bad_lines_are_an_independent_readers(path: Path) -> None:
    @settings(max_examples=500)
    @given(
        encoding=st.sampled_from(ENCODINGS),
        mark=st.sampled_from([b"", b"\xef\xbb\xbf"]),
        pieces=st.lists(st.sampled_from([*ENDS, *ENDS, *ENDS, *LETTERS, *BROKEN]), max_size=40),
        batch_bytes=st.one_of(st.integers(1, 40), st.just(1 << 17)),
        suffix=st.sampled_from([*PACKERS]),
    )
    @example(encoding="utf-8", mark=b"", pieces=["가a\r\n"] * 9, batch_bytes=5, suffix="")
    @example(encoding="utf-8", mark=b"", pieces=["a\r", "b" * 30, "\n", "c"], batch_bytes=2, suffix="")
    def check(encoding: str, mark: bytes, pieces: list[str | bytes], batch_bytes: int, suffix: str) -> None:
        known = PlanOptions(encoding=encoding).encoding
        codec = known.removesuffix("-sig")
        data = mark + b"".join(
            piece if isinstance(piece, bytes) else piece.encode(codec, "ignore") for piece in pieces
        )
        part = whole(path.with_name(f"a.txt{suffix}"), PACKERS[suffix](data))
        assert read([part], encoding=known, batch_bytes=batch_bytes) == expected_of(data, known)

    check()


@pytest.mark.parametrize("encoding", REFUSED, ids=ascii)
def test_an_encoding_whose_line_ends_are_no_single_bytes_is_refused(encoding: str) -> None:
    with pytest.raises(UsageError) as refused:
        PlanOptions(encoding=encoding)
    if encoding.startswith("utf-"):
        assert f"iconv -f {encoding}" in str(refused.value.remedy)


def test_a_lone_carriage_return_at_a_blocks_end_ends_its_line_before_a_long_one(path: Path) -> None:
    data = b"ab cd " * 87381 + b"x\r" + b"word and " * 500_000 + b"\nlast line\n"
    assert read([whole(path, data)], batch_bytes=512 << 10) == expected_of(data, "utf-8")


def test_a_range_that_begins_inside_a_file_drops_no_mark(path: Path) -> None:
    data = b"one\n\xef\xbb\xbftwo\n"
    path.write_bytes(data)
    part = ByteRange(input_number=0, path=path, start=4, end=len(data))
    assert read([part], encoding="utf-8-sig").documents == [(0, 4, "\ufefftwo")]


def test_lines_are_counted_on_over_the_ranges_of_a_shard(tmp_path: Path) -> None:
    first = whole(tmp_path / "a.txt", b"skipped\na\n\nb", source=3)
    first = ByteRange(input_number=3, path=first.path, start=8, end=first.end)
    second = whole(tmp_path / "b.txt", b"\xff\nc\n", source=4)
    found = read([first, second])
    assert found.documents == [(0, 8, "a"), (2, 11, "b"), (4, 2, "c")]
    assert found.bad == [(3, 0, 2)]


def test_a_whole_file_is_one_document_with_its_line_ends_made_one_kind(tmp_path: Path) -> None:
    parts = [
        whole(tmp_path / "a.txt", b"\n one\r\n\r\ntwo\rthree \n", source=0),
        whole(tmp_path / "b.txt", b" \r\n", source=1),
        whole(tmp_path / "c.txt", b"", source=2),
        whole(tmp_path / "d.txt", b"ok\n\xff\n", source=3),
        whole(tmp_path / "e.txt", "끝".encode(), source=4),
    ]
    found = read(parts, doc="file", batch_bytes=2)
    assert found.documents == [(0, 0, "one\n\ntwo\nthree"), (4, 0, "끝")]
    assert (found.num_lines, found.num_empty) == (5, 2)
    assert found.bad == [(3, 0, 5)]


def test_an_input_that_is_gone_or_cut_short_since_it_was_planned_is_named(tmp_path: Path) -> None:
    gone = tmp_path / "gone.txt"
    with pytest.raises(NotFound) as not_found:
        read([ByteRange(input_number=0, path=gone, start=0, end=1)])
    assert not_found.value.path == str(gone)
    part = whole(tmp_path / "cut.txt", b"abc\n")
    with pytest.raises(ReadWriteError, match=r"cut\.txt"):
        read([ByteRange(input_number=0, path=part.path, start=0, end=9)])


def test_short_lines_come_in_batches_bounded_by_their_number(path: Path) -> None:
    """Each of them is two headers and two blocks of a tar, however short it is."""
    part = whole(path, b"a\n" * 300_000)
    batches = list(read_documents([part], PlanOptions(), batch_bytes=512 << 10))
    assert [text for batch in batches for text in batch.texts] == [b"a"] * 300_000
    assert max(len(batch.texts) for batch in batches) <= 16_384
    assert [int(byte) for batch in batches for byte in batch.offsets] == list(range(0, 600_000, 2))


TOO_LONG = "x y " * (17 << 20)  # 68 MiB; 64 are the limit


def json_line(text: str) -> bytes:
    return json.dumps({"text": text}).encode() + b"\n"


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.parquet"])
def test_a_document_of_more_than_64_mib_is_left_out_by_name_and_its_neighbours_stay(
    tmp_path: Path, name: str
) -> None:
    texts = ["before", TOO_LONG, "after"]
    world = World(tmp_path)
    if name == "a.parquet":
        world.raw_dir.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), world.raw_dir / name)
    elif name == "a.jsonl":
        world.raw({name: b"".join(map(json_line, texts))})
    else:
        data = "\n".join(texts).encode()
        world.raw({name: gzip.compress(data, 1) if name.endswith(".gz") else data})
    world.plan(num_shards=1, max_bad_fraction=0.5).run()
    counts = json.loads((world.data_dir / "shard-00000.json").read_bytes())["counts"]
    assert (counts["num_documents"], counts["num_lines"]) == (2, 3)
    assert counts["quarantined"] == {"too_long": 1}
    (bad,) = map(json.loads, (world.data_dir / "quarantine/shard-00000.jsonl").read_bytes().splitlines())
    assert (bad["source"], bad["line"], bad["reason"]) == (name, 1, "too_long")
