"""Documents are the lines that Python's text mode gives, with the byte each begins at."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from preprocess.read.documents import read_documents
from preprocess.read.format import DocumentBatch, Reading
from preprocess.read.inputs import BadDocument, OpenInput
from shardprep.errors import NotFound, ReadWriteError
from shardprep.format.plan import ByteRange


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


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("documents") / "a.txt"


def test_a_leading_mark_stays_in_the_text_unless_the_encoding_says_sig(path: Path) -> None:
    part = whole(path, b"\xef\xbb\xbfone\n\xef\xbb\xbftwo\n")
    assert [text for _, _, text in read([part], "utf-8").documents] == ["\ufeffone", "\ufefftwo"]
    assert [text for _, _, text in read([part], "utf-8-sig").documents] == ["one", "\ufefftwo"]


def test_a_range_that_begins_inside_a_file_drops_no_mark(path: Path) -> None:
    data = b"one\n\xef\xbb\xbftwo\n"
    path.write_bytes(data)
    part = ByteRange(input_number=0, path=path, start=4, end=len(data))
    assert read([part], "utf-8-sig").documents == [(0, 4, "\ufefftwo")]


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
