"""Documents are the lines that Python's text mode gives, with the byte each begins at."""

from __future__ import annotations

import io
import re
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preprocess.formats.documents import read_documents
from preprocess.formats.format import DocumentBatch, Reading
from preprocess.formats.inputs import BadDocument, ByteRange, OpenInput
from shardprep.errors import NotFound, ReadWriteError

# encoding -> (codec of the bytes after the mark, the marks it may begin with)
ENCODINGS = {
    "utf-8": ("utf-8", [b""]),
    "utf-8-sig": ("utf-8", [b"", b"\xef\xbb\xbf"]),
    "cp949": ("cp949", [b""]),
    "utf-16": ("utf-16-le", [b"", b"\xff\xfe"]),
    "utf-16-be": ("utf-16-be", [b""]),
    "utf-32": ("utf-32-le", [b"", b"\xff\xfe\0\0"]),
}
# line ends, blanks that str.strip takes, separators that end no line, wide characters, a mark in the text
PIECES = [
    "\n",
    "\r",
    "\r\n",
    "\n\n",
    " ",
    "\t",
    "a",
    "bc",
    "가",
    "각하",
    "\u2028",
    "\x85",
    "\x0b",
    "\x1c",
    "é",
    "🙂",
]
KOREAN = ["\n", "\r", "\r\n", " ", "a", "bc", "가", "뷁", "똠방각하"]
TEXTS = st.lists(st.sampled_from([*PIECES, "\ufeff"]), max_size=40).map("".join)
KOREAN_TEXTS = st.lists(st.sampled_from(KOREAN), max_size=40).map("".join)
RAW = [b"\n", b"\r", b"\r\n", b" ", b"a", "가".encode(), b"\xff", b"\xea\xb0", b"\x80", b"\xef\xbb\xbf"]


@dataclass(frozen=True, kw_only=True)
class Read:
    """Everything that came of reading ranges."""

    documents: list[tuple[int, int, str]]  # line, byte of its start, text
    num_lines: int
    num_empty: int
    num_bytes: int
    bad: list[BadDocument]


def read(ranges: list[ByteRange], encoding: str, *, block_bytes: int = 1 << 17, doc: str = "line") -> Read:
    items = list(read_documents(ranges, Reading(doc=doc, encoding=encoding, batch_bytes=block_bytes)))  # type: ignore[arg-type]
    batches = [item for item in items if isinstance(item, DocumentBatch)]
    assert len(batches) == len(items)
    found: list[Any] = []
    for batch in batches:
        rows = zip(batch.lines.tolist(), batch.input_offsets.tolist(), batch.texts, strict=True)
        found += rows
    return Read(
        documents=found,
        num_lines=sum(batch.num_lines for batch in batches),
        num_empty=sum(batch.num_lines - len(batch.texts) - len(batch.bad) for batch in batches),
        num_bytes=sum(batch.num_bytes for batch in batches),
        bad=[item for batch in batches for item in batch.bad],
    )


def whole(path: Path, data: bytes, source: int = 0) -> ByteRange:
    path.write_bytes(data)
    return ByteRange(input_number=source, path=path, start=0, end=len(data))


def text_mode(data: bytes, encoding: str) -> list[tuple[int, str]]:
    """Line numbers and texts as the baseline reads them."""
    lines = enumerate(io.TextIOWrapper(io.BytesIO(data), encoding=encoding))
    return [(number, line.strip()) for number, line in lines if line.strip()]


def line_starts(text: str, codec: str, num_mark_bytes: int) -> list[int]:
    """Byte of each line's start, by way of the text."""
    lines = re.findall(r"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", text)
    return list(accumulate((len(line.encode(codec)) for line in lines), initial=num_mark_bytes))[: len(lines)]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents") / "a.txt"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_lines_and_their_bytes_are_those_of_text_mode_wherever_blocks_end(path: Path, encoding: str) -> None:
    codec, marks = ENCODINGS[encoding]

    @settings(max_examples=150, deadline=None)
    @given(
        text=KOREAN_TEXTS if encoding == "cp949" else TEXTS,
        mark=st.sampled_from(marks),
        unit_blocks=st.integers(1, 9),
    )
    @example(text="\r\r\n\n가\r\n", mark=marks[-1], unit_blocks=1)
    @example(text="a\r\n\r\r\nb", mark=marks[-1], unit_blocks=2)
    def check(text: str, mark: bytes, unit_blocks: int) -> None:
        if mark == b"" and len(marks) > 1 and text.startswith("\ufeff"):
            text = text.lstrip("\ufeff")  # else its first character would be the mark
        data = mark + text.encode(codec)
        block_bytes = unit_blocks * (4 if codec.startswith(("utf-16", "utf-32")) else 1)
        found = read([whole(path, data)], encoding, block_bytes=block_bytes)
        starts = line_starts(text, codec, len(mark))
        # Python itself reads UTF-16 and UTF-32 without a mark only by the name of their byte order.
        lines = text_mode(data, encoding if mark or len(marks) == 1 else codec)
        expected = [(number, starts[number], line) for number, line in lines]
        assert found.documents == expected
        assert found.num_lines == len(starts)
        assert found.num_empty == len(starts) - len(expected)
        assert not found.bad
        if starts:
            assert found.num_bytes == len(data)

    check()


def test_a_big_endian_mark_decides_for_utf_16_and_utf_32(path: Path) -> None:
    for encoding, codec in (("utf-16", "utf-16-be"), ("utf-32", "utf-32-be")):
        data = "\ufeff가\r\nb\n".encode(codec)
        found = read([whole(path, data)], encoding, block_bytes=4)
        assert [text for _, _, text in found.documents] == ["가", "b"]
        assert data[found.documents[1][1] :] == "b\n".encode(codec)


def test_a_leading_mark_stays_in_the_text_unless_the_encoding_says_sig(path: Path) -> None:
    part = whole(path, b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert [text for _, _, text in read([part], "utf-8").documents] == ["\ufeffone", "\ufefftwo"]
    assert [text for _, _, text in read([part], "utf-8-sig").documents] == ["one", "\ufefftwo"]


def test_a_range_that_begins_inside_a_file_drops_no_mark(path: Path) -> None:
    data = b"one\n\xef\xbb\xbftwo\n"
    path.write_bytes(data)
    part = ByteRange(input_number=0, path=path, start=4, end=len(data))
    assert read([part], "utf-8-sig").documents == [(0, 4, "\ufefftwo")]


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(pieces=st.lists(st.sampled_from(RAW), max_size=40), block_bytes=st.integers(1, 9))
def test_undecodable_lines_are_left_out_counted_and_located(
    path: Path, pieces: list[bytes], block_bytes: int
) -> None:
    data = b"".join(pieces)
    found = read([whole(path, data)], "utf-8", block_bytes=block_bytes)
    good, bad, start = [], [], 0
    lines = re.findall(rb"[^\r\n]*(?:\r\n|\n|\r)|[^\r\n]+", data)
    for number, raw in enumerate(lines):
        try:
            if text := raw.decode().strip():
                good.append((number, start, text))
        except UnicodeDecodeError as error:
            bad.append((number, start, len(raw), start + error.start))
        start += len(raw)
    assert found.documents == good
    assert [(item.line, item.source_offset, item.num_bytes) for item in found.bad] == [row[:3] for row in bad]
    for item, (*_, byte) in zip(found.bad, bad, strict=True):
        assert item.reason == "undecodable"
        assert item.detail.startswith(f"byte {byte} is not utf-8: ")
    assert found.num_lines == len(lines)
    assert found.num_empty == len(lines) - len(good) - len(bad)
    assert found.num_bytes == len(data)


def test_half_a_utf_16_unit_at_the_end_costs_its_own_line_and_no_other(path: Path) -> None:
    data = "가\n나\n".encode("utf-16-le") + b"x"
    found = read([whole(path, data)], "utf-16-le")
    assert [text for _, _, text in found.documents] == ["가", "나"]
    assert [(item.line, item.source_offset, item.num_bytes) for item in found.bad] == [(2, 8, 1)]


def test_lines_are_counted_on_over_the_ranges_of_a_shard(tmp_path: Path) -> None:
    first = whole(tmp_path / "a.txt", b"skipped\na\n\nb", source=3)
    first = ByteRange(input_number=3, path=first.path, start=8, end=first.end)
    second = whole(tmp_path / "b.txt", b"\xff\nc\n", source=4)
    found = read([first, second], "utf-8")
    assert found.documents == [(0, 8, "a"), (2, 11, "b"), (4, 2, "c")]
    assert [(item.source, item.line, item.source_offset) for item in found.bad] == [(4, 3, 0)]


def test_a_whole_file_is_one_document_with_its_line_ends_made_one_kind(tmp_path: Path) -> None:
    parts = [
        whole(tmp_path / "a.txt", b"\n one\r\n\r\ntwo\rthree \n", source=0),
        whole(tmp_path / "b.txt", b" \r\n", source=1),
        whole(tmp_path / "c.txt", b"", source=2),
        whole(tmp_path / "d.txt", b"ok\n\xff\n", source=3),
        whole(tmp_path / "e.txt", "끝".encode(), source=4),
    ]
    found = read(parts, "utf-8", block_bytes=2, doc="file")
    assert found.documents == [(0, 0, "one\n\ntwo\nthree"), (4, 0, "끝")]
    assert (found.num_lines, found.num_empty) == (5, 2)
    assert [(item.source, item.line, item.num_bytes) for item in found.bad] == [(3, 3, 5)]


@pytest.mark.parametrize("doc", ["line", "file"])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_the_bytes_of_a_mark_count_as_read(path: Path, encoding: str, doc: str) -> None:
    data = "one\ntwo\n".encode(encoding)
    found = read([whole(path, data)], encoding, doc=doc)
    assert found.num_bytes == len(data)
    assert found.documents[0][1] == len("".encode(encoding))


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_the_bytes_of_a_mark_that_nothing_follows_count_as_read(path: Path, encoding: str) -> None:
    found = read([whole(path, "".encode(encoding))], encoding)
    assert found.num_bytes == len("".encode(encoding))
    assert not found.documents


def test_an_input_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"gone\.txt cannot be opened: No such file"):
        read([ByteRange(input_number=0, path=tmp_path / "gone.txt", start=0, end=1)], "utf-8")


def test_an_input_cut_short_since_it_was_planned_is_named_with_both_sizes(path: Path) -> None:
    path.write_bytes(b"abc\n")
    with pytest.raises(ReadWriteError, match="ended at byte 4, the plan says 9"):
        read([ByteRange(input_number=0, path=path, start=0, end=9)], "utf-8")


@pytest.mark.parametrize("doc", ["line", "file"])
def test_a_small_file_is_read_by_one_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, doc: str) -> None:
    """Each call is a round trip on a file system far away; there may be a hundred thousand such files."""
    calls: list[tuple[int, int]] = []
    read_all = OpenInput.read_all

    def counted(self: OpenInput, start: int, end: int) -> bytes:
        calls.append((start, end))
        return read_all(self, start, end)

    monkeypatch.setattr(OpenInput, "read_all", counted)
    found = read([whole(tmp_path / "a.txt", b"one\ntwo\n")], "utf-8", doc=doc)
    assert found.num_lines == (2 if doc == "line" else 1)
    assert calls == [(0, 8)]
