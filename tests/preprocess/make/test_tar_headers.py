"""preprocess/make/tar_headers.py: headers for many documents equal those that tarfile writes."""

from __future__ import annotations

import io
import tarfile

import numpy as np
import pytest

from preprocess.make.tar_headers import document_headers, ustar_header


@pytest.mark.parametrize("lines", [[0, 9, 10, 99_999_999], [5, 100_000_000]])
def test_headers_of_many_documents_are_those_of_tarfile(lines: list[int]) -> None:
    sizes = np.array([0, 1, 511, 8**10][: len(lines)], np.int64)
    headers = document_headers(3, np.array(lines, np.int64), "json", sizes)
    assert headers.shape == (len(lines), 512)
    for header, line, size in zip(headers, lines, sizes.tolist(), strict=True):
        member = tarfile.TarInfo.frombuf(header.tobytes(), "utf-8", "strict")
        assert (member.size, member.mode, member.mtime) == (size, 0o644, 0)
        assert member.name.endswith(f"{line:08d}.json")
        assert header.tobytes() == ustar_header(member.name, size)


def test_tarfile_reads_a_member_behind_its_header() -> None:
    tar = ustar_header("a.txt", 3) + b"abc".ljust(512, b"\0") + bytes(1024)
    with tarfile.open(fileobj=io.BytesIO(tar)) as opened:
        assert opened.extractfile("a.txt").read() == b"abc"  # type: ignore[union-attr]
