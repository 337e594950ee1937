"""Documents of every encoding, line end, block size and long line are those of an independent reader."""

from __future__ import annotations

import bz2
import gzip
import lzma
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from preprocess.read import compression, long_documents
from preprocess.read.documents import read_documents
from preprocess.read.format import DocumentBatch, Reading
from preprocess.read.inputs import BadDocument
from shardprep.errors import UsageError
from shardprep.format.options import PrepConfig
from shardprep.format.plan import ByteRange
from tests.input_writers import zstd_of_blocks

ENCODINGS = [
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be", "cp949",
    "euc-kr", "johab", "shift_jis", "euc_jp", "gb18030", "gbk", "big5", "latin-1", "cp1252", "koi8-r",
    "cp1251", "iso8859-15", "tis-620", "mac-roman", "ascii",
]  # fmt: skip
REFUSED = [
    "iso2022_kr", "iso2022_jp", "hz", "utf-7", "cp037", "cp500", "punycode", "idna", "unicode_escape",
    "raw_unicode_escape", "rot13", "hex", "base64", "zlib", "bz2", "uu", "quopri", "undefined",
    "no-such-codec", "utf\0008", "utf-8\0", "", "\udcff",
]  # fmt: skip
ENDS = ["\n", "\r\n", "\r", "\n\r", "\r\r", "\r\r\n"]
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": lambda data: gzip.compress(data, 1),
    ".zst": lambda data: zstd_of_blocks(data, [3, 1, 40, 7]),
    ".xz": lambda data: lzma.compress(data, preset=0),
    ".bz2": lambda data: bz2.compress(data, 1),
}
LETTERS = ["a", "bc", " ", "\t", "가", "똠방", "語", "é", "я", "ก", "\x85", "\u2028", "\x1c", "🙂", "x" * 9]
# One byte of each, or of two side by side, reads as a line end in UTF-16 or UTF-32.
HALF_ENDS = ["ക", "ഊ", "\u0a0d", "\u0a00", "\u0d00", "\u010d", "\u010a", "☀", "─", "🌍"]
BROKEN = [b"\xff", b"\x80", b"\xea\xb0", b"\x81", b"\xfe"]


@dataclass(frozen=True, kw_only=True)
class Found:
    """What a reader made of a file."""

    documents: list[tuple[int, int, str]]  # line, byte of its start, text
    bad: list[tuple[int, int, int]]  # line, byte of its start, bytes
    num_lines: int
    num_empty: int


def codec_of(data: bytes, encoding: str) -> tuple[str, int]:
    """The codec behind a byte order mark, and the mark's bytes."""
    marks = {
        "utf-8-sig": [("utf-8", b"\xef\xbb\xbf")],
        "utf-16": [("utf-16-le", b"\xff\xfe"), ("utf-16-be", b"\xfe\xff")],
        "utf-32": [("utf-32-le", b"\xff\xfe\0\0"), ("utf-32-be", b"\0\0\xfe\xff")],
    }.get(encoding, [])
    for codec, mark in marks:
        if data.startswith(mark):
            return codec, len(mark)
    return (marks[0][0] if marks else encoding), 0


def expected_of(data: bytes, encoding: str, most_bytes: int = 1 << 62) -> Found:
    """The whole text as units of its codec, split at line ends, each line decoded for itself."""
    codec, start = codec_of(data, encoding)
    unit = len("a".encode(codec))
    newline, carriage_return = "\n".encode(codec), "\r".encode(codec)
    units = [data[place : place + unit] for place in range(start, len(data), unit)]
    lines, line = [], b""
    for number, item in enumerate(units):
        line += item
        is_half = item == carriage_return and units[number + 1 : number + 2] == [newline]
        if item in (newline, carriage_return) and not is_half:
            lines.append(line)
            line = b""
    lines += [line] if line else []
    found = Found(documents=[], bad=[], num_lines=len(lines), num_empty=0)
    num_empty = 0
    for number, raw in enumerate(lines):
        try:
            text = raw.decode(codec).strip() if len(raw) <= most_bytes else None
        except UnicodeDecodeError:
            text = None
        if text is None:
            found.bad.append((number, start, len(raw)))
        else:
            num_empty += not text
            if text:
                found.documents.append((number, start, text))
        start += len(raw)
    return Found(documents=found.documents, bad=found.bad, num_lines=len(lines), num_empty=num_empty)


def found_by_worker(path: Path, data: bytes, encoding: str, block_bytes: int) -> Found:
    """What the worker's reader and, for long lines, the shard writer's passes make of a file."""
    path.write_bytes(data)
    part = ByteRange(input_number=0, path=path, start=0, end=len(data))
    found = Found(documents=[], bad=[], num_lines=0, num_empty=0)
    num_lines = num_empty = num_bytes = 0
    for item in read_documents([part], Reading(doc="line", encoding=encoding, batch_bytes=block_bytes)):
        num_lines, num_bytes = num_lines + item.num_lines, num_bytes + item.num_bytes
        if isinstance(item, DocumentBatch):
            rows = zip(item.lines.tolist(), item.input_offsets.tolist(), item.texts, strict=True)
            found.documents.extend(rows)
            num_empty += item.num_lines - len(item.texts) - len(item.bad)
            found.bad.extend(map(where_bad, item.bad))
            continue
        try:
            text = "".join(item.text())
        except UnicodeDecodeError as error:
            found.bad.append(where_bad(item.place.undecodable(error)))
        else:
            num_empty += not text
            if text:
                found.documents.append((item.place.line, item.place.start, text))
    assert num_bytes == len(data)
    return Found(documents=found.documents, bad=found.bad, num_lines=num_lines, num_empty=num_empty)


def where_bad(bad: BadDocument) -> tuple[int, int, int]:
    """Line, byte and bytes, once the byte that it names lies in it."""
    if bad.reason == "too_long":
        return bad.line, bad.source_offset, bad.num_bytes
    said = re.match(r"byte (\d+) is not [-\w]+: ", bad.detail)
    assert bad.reason == "undecodable"
    assert said is not None, bad.detail
    assert bad.source_offset <= int(said[1]) < bad.source_offset + bad.num_bytes, bad.detail
    return bad.line, bad.source_offset, bad.num_bytes


def encodable(encoding: str) -> list[str]:
    """Of the letters, those that the encoding has."""
    kept = []
    for text in [*LETTERS, *HALF_ENDS]:
        try:
            if text.encode(encoding).decode(encoding) == text:
                kept.append(text)
        except UnicodeError:
            continue
    return kept


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("line-ends") / "a.txt"


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_documents_offsets_empty_and_bad_lines_are_an_independent_readers(
    path: Path, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    known = PrepConfig(encoding=encoding).encoding
    codec = codec_of(b"", known)[0]
    letters = [text.encode(codec) for text in [*ENDS, *encodable(codec)]]
    marks = [b"", "\ufeff".encode(codec)] if known in ("utf-8-sig", "utf-16", "utf-32") else [b""]
    if known in ("utf-16", "utf-32"):
        marks.append("\ufeff".encode(f"{known}-be"))

    @settings(max_examples=150)
    @given(
        mark=st.sampled_from(marks),
        pieces=st.lists(st.sampled_from([*letters, *letters, *BROKEN]), max_size=40),
        block_bytes=st.integers(1, 40),
        scan_bytes=st.integers(1, 20),
        long_bytes=st.integers(1, 60),
        suffix=st.sampled_from([*PACKERS]),
        most_bytes=st.sampled_from([30, 64 << 20, 64 << 20]),
    )
    @example(
        mark=b"",
        pieces=["가a\r\n".encode(codec, "replace")] * 9,
        block_bytes=5,
        scan_bytes=3,
        long_bytes=99,
        suffix="",
        most_bytes=99,
    )
    @example(
        mark=b"",
        pieces=["a\r".encode(codec), "b".encode(codec) * 30, "\n".encode(codec), "c".encode(codec)],
        block_bytes=len("a\r".encode(codec)),
        scan_bytes=4,
        long_bytes=len("aaaa".encode(codec)),
        suffix="",
        most_bytes=99,
    )
    def check(
        mark: bytes,
        pieces: list[bytes],
        block_bytes: int,
        scan_bytes: int,
        long_bytes: int,
        suffix: str,
        most_bytes: int,
    ) -> None:
        data = mark + b"".join(pieces)
        with monkeypatch.context() as patch:
            patch.setattr(long_documents, "LONG_BYTES", long_bytes)
            patch.setattr(long_documents, "_READ_BYTES", scan_bytes)
            patch.setattr(long_documents, "MOST_HELD_BYTES", most_bytes)
            patch.setattr(compression, "_READ_BYTES", max(6, scan_bytes))
            file = path.with_name(f"{path.name}{suffix}")
            found = found_by_worker(file, PACKERS[suffix](data), known, block_bytes)
        # A long line of a plain file is read in pieces again.
        assert found == expected_of(data, known, most_bytes if suffix else 1 << 62)

    check()


@pytest.mark.parametrize("encoding", REFUSED, ids=ascii)
def test_an_encoding_whose_line_ends_cannot_be_found_is_refused_by_name(encoding: str) -> None:
    with pytest.raises(UsageError) as refused:
        PrepConfig(encoding=encoding)
    assert re.search(
        r"--encoding .*(is no text encoding|is neither a superset of ASCII|holds a NUL|not UTF-8)",
        str(refused.value),
    )


def test_a_lone_carriage_return_at_a_blocks_end_ends_its_line_before_a_long_one(path: Path) -> None:
    data = b"ab cd " * 87381 + b"x\r" + b"word and " * 500_000 + b"\nlast line\n"
    assert found_by_worker(path, data, "utf-8", 512 << 10) == expected_of_ascii(data)


def expected_of_ascii(data: bytes) -> Found:
    """As expected_of, for plain lines and fast."""
    starts = [0, *(match.end() for match in re.finditer(rb"\r\n|\n|\r", data))]
    lines = [
        (n, start, text.decode().strip())
        for n, (start, text) in enumerate(zip(starts, re.split(rb"\r\n|\n|\r", data), strict=True))
    ]
    lines = lines[:-1] if data.endswith((b"\n", b"\r")) else lines
    return Found(documents=[line for line in lines if line[2]], bad=[], num_lines=len(lines), num_empty=0)
