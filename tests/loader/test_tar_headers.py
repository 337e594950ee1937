"""Headers of tars that others wrote: what Python's tarfile finds is found, and anything else is refused."""

from __future__ import annotations

import io
import os
import random
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loader.external_tars import TarBytes, scan_tar, tar_members
from shardprep.errors import BrokenShard, ShardprepError

Members = list[tuple[str, bytes]]

FORMATS = (tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT)
NAME, MODE, SIZE, MTIME, KIND, MAGIC, PREFIX = 0, 100, 124, 136, 156, 257, 345  # bytes of a header
BAD_SIZES = {
    "negative": b"-0000000001\0",
    "negative in base 256": b"\xff" * 12,
    "huge in base 256": b"\x80" + b"\xff" * 11,
    "text": b"one hundred\0",
    "hexadecimal": b"0x000000010\0",
    "a byte that is no mark": b"\xa0" + bytes(11),
}


def tar_of(members: Members, form: int = tarfile.USTAR_FORMAT) -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as tar:
        for name, data in members:
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return file.getvalue()


def with_field(raw: bytes, offset: int, field: bytes, *, header: int = 0) -> bytes:
    """A field of a header exchanged, and the header's checksum made right again."""
    block = bytearray(raw[header : header + 512])
    block[offset : offset + len(field)] = field
    block[148:156] = b" " * 8
    block[148:156] = b"%06o\0 " % sum(block)
    return raw[:header] + bytes(block) + raw[header + 512 :]


def found_in(path: Path, raw: bytes) -> Members:
    path.write_bytes(raw)
    with TarBytes(path) as tar:
        return [(name, raw[first:end]) for name, first, end in tar_members(tar)]


def found_by_tarfile(raw: bytes) -> Members:
    with tarfile.open(fileobj=io.BytesIO(raw), mode="r:", errors="surrogateescape") as tar:
        return [
            (item.name, tar.extractfile(item).read())  # type: ignore[union-attr]
            for item in tar
            if item.isreg()
        ]


TWO = [("a.token_ids.json", b"[1]"), ("b.token_ids.json", b"[2]")]


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMATS)
def test_a_bit_flipped_anywhere_in_a_header_is_refused_and_drops_no_sample(tmp_path: Path, form: int) -> None:
    raw = tar_of([*TWO, ("long/" * 30 + "c.token_ids.json", b"[3]")], form)
    whole = found_in(tmp_path / "a.tar", raw)
    assert len(whole) == 3
    headers = [at for at in range(0, len(raw), 512) if b"ustar" in raw[at : at + 512]]
    assert len(headers) == (3 if form == tarfile.USTAR_FORMAT else 4)
    for header in headers:
        for at in range(header, header + 512):
            flipped = bytearray(raw)
            flipped[at] ^= 1 << at % 8
            try:
                found = found_in(tmp_path / "a.tar", bytes(flipped))
            except BrokenShard:
                continue
            # A zero of the checksum itself may become a blank, and the blank at its end anything.
            assert 148 <= at - header < 156, at - header
            assert found == whole


@pytest.mark.parametrize("header", [0, 1024])
@pytest.mark.parametrize("size", BAD_SIZES)
def test_a_size_that_is_none_is_refused_with_its_place_and_ends(
    tmp_path: Path, size: str, header: int
) -> None:
    raw = with_field(tar_of(TWO), SIZE, BAD_SIZES[size], header=header)
    with pytest.raises(BrokenShard, match=rf"a\.tar .*at byte {header}\b"):
        found_in(tmp_path / "a.tar", raw)


@pytest.mark.parametrize("value", [b"-512", b"1e3", b"", b"9" * 30, b" 3", b"3_0"])
def test_a_pax_size_that_is_none_is_refused_or_read_as_tarfile_reads_it(tmp_path: Path, value: bytes) -> None:
    info = tarfile.TarInfo("a.token_ids.json")
    info.size, info.pax_headers = 3, {"size": value.decode()}
    raw = info.tobuf(tarfile.PAX_FORMAT) + b"[1]".ljust(512, b"\0") + bytes(1024)
    try:
        found = found_in(tmp_path / "a.tar", raw)
    except BrokenShard:
        return
    assert found == found_by_tarfile(raw)


@pytest.mark.parametrize("kind", [b"S", b"M", b"D", b"V", b"X", b"Z", b"8"])
def test_a_member_of_a_kind_that_could_hold_a_sample_is_refused(tmp_path: Path, kind: bytes) -> None:
    raw = with_field(tar_of(TWO), KIND, kind, header=1024)
    with pytest.raises(BrokenShard, match="at byte 1024"):
        found_in(tmp_path / "a.tar", raw)


def test_sizes_in_base_256_and_tars_from_before_ustar_are_read(tmp_path: Path) -> None:
    raw = tar_of(TWO)
    big = with_field(raw, SIZE, b"\x80" + (3).to_bytes(11, "big"))
    assert found_in(tmp_path / "a.tar", big) == TWO
    old = raw
    for header in (0, 1024):
        old = with_field(old, MAGIC, bytes(255), header=header)
        old = with_field(old, KIND, b"\0", header=header)
    assert found_in(tmp_path / "a.tar", old) == TWO == found_by_tarfile(old)


def test_sums_of_signed_bytes_count_too_as_old_tars_have_them(tmp_path: Path) -> None:
    raw = bytearray(tar_of([("한국어.token_ids.json", b"[1]")], tarfile.GNU_FORMAT))
    raw[148:156] = b" " * 8
    raw[148:156] = b"%06o\0 " % sum(byte - 256 * (byte > 127) for byte in raw[:512])
    assert found_in(tmp_path / "a.tar", bytes(raw)) == found_by_tarfile(bytes(raw))


def test_a_long_name_as_large_as_the_tar_is_not_read_into_memory(tmp_path: Path) -> None:
    raw = tar_of([("x", bytes(3 << 20)), *TWO])
    with pytest.raises(BrokenShard, match=r"long name at byte 0 has 3,145,728 bytes, expected at most"):
        found_in(tmp_path / "a.tar", with_field(raw, KIND, b"x"))


@pytest.mark.parametrize("kind", ["FIFO", "device", "folder"])
def test_what_is_no_regular_file_is_refused_at_once(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.tar"
    if kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()
    with pytest.raises(BrokenShard, match=rf"a\.tar: .*{kind}, expected a regular file"):
        scan_tar(path)


def some_tar(chance: random.Random) -> bytes:
    """A tar of any format with all that a header can say."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=chance.choice(FORMATS)) as tar:
        for number in range(chance.randrange(1, 5)):
            info = tarfile.TarInfo(
                chance.choice(["a", "한", "d/" * 60, "d/" * 130 + "e/"]) + f"{number}.json"
            )
            data = chance.randbytes(chance.choice([0, 3, 511, 512, 513, 1500]))
            info.type = chance.choice(
                [tarfile.REGTYPE] * 4 + [tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE]
            )
            info.linkname = "" if info.isreg() else chance.choice(["x", "y" * 90])
            info.size = len(data) if info.isreg() else 0
            info.mtime = chance.choice([0, 1, 1700000000])
            if tar.format == tarfile.PAX_FORMAT and chance.random() < 0.3:
                info.pax_headers = chance.choice(
                    [{"comment": "é"}, {"size": str(info.size)}, {"path": "p.json"}, {"mtime": "1.5"}]
                )
            try:
                tar.addfile(info, io.BytesIO(data))
            except ValueError:  # a name too long for ustar
                continue
    return file.getvalue()


def altered(raw: bytes, chance: random.Random) -> bytes:
    """Something changed: a byte, a field with its checksum made right, a block left out, put in or moved."""
    blocks = [raw[at : at + 512] for at in range(0, len(raw), 512)]
    headers = [number for number, block in enumerate(blocks) if block[257:262] == b"ustar"]
    at = chance.choice(headers or [0])
    fields: list[tuple[int, Callable[[], bytes]]] = [
        (SIZE, lambda: b"%011o\0" % chance.choice([0, 1, 512, 513, 1024, 1 << 30])),
        (SIZE, lambda: chance.choice(list(BAD_SIZES.values()))),
        (
            KIND,
            lambda: chance.choice([b"0", b"\0", b"1", b"5", b"7", b"L", b"K", b"x", b"g", b"S", b"X", b"q"]),
        ),
        (MAGIC, lambda: chance.choice([b"ustar  \0", bytes(8), b"ustar\x0000", b"xstar\x0000"])),
        (PREFIX, lambda: chance.choice([b"p/q", b"0123", b"\xff\xfe"])),
        (NAME, lambda: chance.choice([b"n.json\0", b"folder/\0", bytes(100), b"\xff.json\0"])),
        (MODE, lambda: chance.choice([b"abc", b"-000001\0", b"   644 \0", b"\0", b"\xff" * 8])),
        (MTIME, lambda: chance.choice([b"-1", b"\x80" + bytes(11), b"1_1\0"])),
        (chance.randrange(148), lambda: chance.randbytes(1)),
        (chance.randrange(156, 512), lambda: chance.randbytes(1)),
    ]
    how = chance.randrange(8)
    if how < 5:
        offset, field = chance.choice(fields)
        return with_field(raw, offset, field(), header=512 * at)
    if how == 5:
        place = chance.randrange(len(raw))
        return raw[:place] + chance.randbytes(1) + raw[place + 1 :]
    place = chance.randrange(len(blocks))
    if how == 6:
        return b"".join(blocks[:place] + blocks[place + 1 :])
    return b"".join([*blocks[:place], chance.choice(blocks), *blocks[place:]])


@pytest.mark.slow
@settings(max_examples=300)
@given(st.integers(0, 2**63))
def test_what_is_accepted_is_what_tarfile_finds_and_all_else_is_refused(seed: int) -> None:
    chance = random.Random(seed)
    raw = some_tar(chance)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.tar")
        assert found_in(path, raw) == found_by_tarfile(raw)
        for _ in range(chance.randrange(1, 4)):
            raw = altered(raw, chance)
        try:
            found = found_in(path, raw)
        except ShardprepError:
            return
    assert found == found_by_tarfile(raw)
