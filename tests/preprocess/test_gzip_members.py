"""gzip members wherever their headers lie: read alike with and without isal."""

from __future__ import annotations

import gzip
import json
import struct
import sys
import zlib
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Prep

BLOCK_BYTES = 128 << 10  # that are read at once
HCRC, EXTRA, NAME, COMMENT = 2, 4, 8, 16


def member(text: str, flags: int = 0, comment: bytes = b"a comment") -> bytes:
    """One member of gzip, with the optional fields of RFC 1952."""
    data = json.dumps({"text": text}).encode() + b"\n"
    head = b"\x1f\x8b\x08" + bytes([flags]) + bytes(4) + b"\0\xff"
    head += struct.pack("<H", 8) + b"SZ\4\0abcd" if flags & EXTRA else b""
    head += b"part-00017.jsonl\0" if flags & NAME else b""
    head += comment + b"\0" if flags & COMMENT else b""
    head += struct.pack("<H", zlib.crc32(head) & 0xFFFF) if flags & HCRC else b""
    deflate = zlib.compressobj(6, zlib.DEFLATED, -15)
    return head + deflate.compress(data) + deflate.flush() + struct.pack("<II", zlib.crc32(data), len(data))


def filled(text: str, num_bytes: int) -> bytes:
    """A member of so many bytes, nearly all of them its comment."""
    rest = len(member(text, COMMENT, b""))
    return member(text, COMMENT, b"x" * (num_bytes - rest))


@pytest.mark.parametrize("flags", [0, NAME, EXTRA | NAME, EXTRA | NAME | COMMENT | HCRC])
def test_a_member_may_begin_at_any_byte_of_a_block(
    prep: Prep, raw: Path, tmp_path: Path, flags: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("isal", reason="without isal there is one way to read them")
    texts = []
    for before in range(len(member("x", flags)) + 2):
        first, second = f"first {before}", f"second {before}"
        data = filled(first, BLOCK_BYTES - before) + member(second, flags) + member("last", flags)
        assert gzip.decompress(data).count(b"\n") == 3
        (raw / f"{before:03d}.jsonl.gz").write_bytes(data)
        texts += [first, second, "last"]
    shards = []
    for has_isal in (True, False):
        if not has_isal:
            monkeypatch.setitem(sys.modules, "isal", None)
        data_dir = tmp_path / f"isal {has_isal}"
        prep.plan(raw, data_dir, num_shards=1)
        prep.make(data_dir)
        shards.append(prep.members(data_dir / "shard-00000.tar"))
    assert [text.decode() for name, text in shards[0] if name.endswith(".text.txt")] == texts
    assert shards[0] == shards[1]


@pytest.mark.parametrize("has_isal", [True, False])
@pytest.mark.parametrize("damage", ["a reserved flag", "another checksum of the header", "a cut header"])
def test_a_header_that_zlib_refuses_is_refused_with_isal_too(
    prep: Prep, raw: Path, tmp_path: Path, damage: str, has_isal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if has_isal:
        pytest.importorskip("isal", reason="it is not installed")
    else:
        monkeypatch.setitem(sys.modules, "isal", None)
    data = bytearray(member("text", NAME | HCRC))
    if damage == "a reserved flag":
        data[3] |= 0x40
    elif damage == "another checksum of the header":
        data[data.index(b"\0", 10) + 1] ^= 1
    else:
        del data[20:]
    (raw / "a.jsonl.gz").write_bytes(member("first") + bytes(data))
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir)
    ended = prep.command("plan", *flags)
    assert ended.code == 65, ended.text
    assert "a.jsonl.gz" in ended.text
