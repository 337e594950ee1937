"""A bit flipped in bytes of small tars: refused, without effect, or other ids where the ids lie.

Of zeros in a row each sixth byte is taken: most of a tar is that.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import webdataset

from loader.external_tars import TarBytes, tar_members
from loader.find_shards import find_shards
from loader.samples import WholeSamples
from loader.shards import ShardSet
from shardprep.errors import ShardprepError
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.manifest import read_manifest

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False},
    "packed": {"record": "packed", "seq_len": 8, "pack": "best_fit"},
}
TEXT = "one line\nand another one of some more words\n"
VOCAB_SIZE = 700  # and more than the ids have
MAX_BYTES = 1 << 26  # no sample of these tars can need as much


@pytest.fixture(scope="module")
def made(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    (root / "raw").mkdir()
    (root / "raw" / "a.txt").write_text(TEXT, encoding="utf-8")
    for name, options in FORMS.items():
        prep.plan(root / "raw", root / name, num_shards=1, **options)
        prep.make(root / name)
        assert prep.command("verify", root / name).code == 0
    return root


def bits_of(shards: ShardSet, starts: bool) -> list[bytes]:
    """Lengths, ids and where documents begin, of every sample, through the reader and its window."""
    samples = WholeSamples(shards=shards, starts=starts, vocab_size=VOCAB_SIZE)
    reader = samples.open()
    try:
        chunk = samples.read(reader, np.arange(shards.num_samples)[:, None], 0)(0, 1)
        ids, starts_read = chunk.ids.joined().flats[0], chunk.starts
        return [
            chunk.lengths.tobytes(),
            ids.tobytes(),
            b"" if starts_read is None else starts_read.flats[0].tobytes(),
        ]
    finally:
        reader.close()


class Memory:
    """Fails where numpy is asked for much at once."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("empty", "zeros", "full", "arange"):
            monkeypatch.setattr(np, name, self._guarded(getattr(np, name)))

    def _guarded(self, real: Any) -> Any:
        def guarded(shape: Any, *args: Any, **named: Any) -> Any:
            assert np.prod(shape, dtype=np.float64) < MAX_BYTES, f"{real.__name__}({shape})"
            return real(shape, *args, **named)

        return guarded


def spans_of_ids(folder: Path) -> list[tuple[int, int]]:
    """First and last byte + 1 of all that a record of the idx names."""
    spec = read_manifest(folder, 0).spec
    rows = read_idx(folder, spec, 0)
    spans = [(int(row["offset"]), int(row["offset"]) + int(row["num_bytes"])) for row in rows]
    if "num_starts" in (rows.dtype.names or ()):
        spans += [
            (int(row["starts_offset"]), int(row["starts_offset"]) + 4 * int(row["num_starts"]))
            for row in rows
        ]
    return spans


def spans_of_members(path: Path) -> list[tuple[int, int]]:
    with TarBytes(path) as tar:
        return [(first, first + size) for _, first, size in tar_members(tar)]


class Flips:
    """Flips a bit of a byte of a file, one byte after the other, and puts it back."""

    def __init__(self, path: Path, spans: list[tuple[int, int]]) -> None:
        self.path, self.raw, self.spans = path, path.read_bytes(), spans
        self.num_refused = self.num_equal = self.num_other = 0
        self.unnamed: list[str] = []

    def try_each(self, read: Any, expected: list[bytes]) -> None:
        chance = Random(len(self.raw))
        handle = os.open(self.path, os.O_WRONLY)
        for at, byte in enumerate(self.raw):
            if at % 6 and not any(self.raw[max(0, at - 1) : at + 2]):
                continue
            os.pwrite(handle, bytes([byte ^ 1 << chance.randrange(8)]), at)
            self._note(at, read, expected)
            os.pwrite(handle, bytes([byte]), at)
        os.close(handle)
        assert not self.unnamed

    def _note(self, at: int, read: Any, expected: list[bytes]) -> None:
        try:
            found = read()
        except ShardprepError as error:
            self.num_refused += 1
            if self.path.name not in str(error):
                self.unnamed.append(str(error))
            return
        self.num_equal += found == expected
        self.num_other += found != expected
        assert found == expected or any(first <= at < end for first, end in self.spans), at


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_bit_of_a_tar_of_ours_changes_nothing_outside_of_the_ids(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    folder = Path(shutil.copytree(made / form, tmp_path / form))
    assert read_index(folder).spec.num_shards == 1
    shards = find_shards(folder)
    whole = bits_of(shards, form == "packed")
    Memory(monkeypatch)
    flips = Flips(folder / "shard-00000.tar", spans_of_ids(folder))
    flips.try_each(lambda: bits_of(shards, form == "packed"), whole)
    assert flips.num_other
    assert flips.num_equal > 256


@pytest.mark.slow
@pytest.mark.parametrize("form", [*FORMS, "TarWriter"])
def test_a_bit_of_a_tar_of_others_is_refused_or_changes_nothing_outside_of_the_ids(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    path = tmp_path / "others.tar"
    if form == "TarWriter":
        with webdataset.TarWriter(str(path)) as writer:
            writer.write({"__key__": "a", "token_ids.json": [1, 599, 30], "text.txt": "x"})
            writer.write({"__key__": "b", "token_ids.npy": np.array([7, 8]), "text.txt": "y"})
    else:
        shutil.copy(made / form / "shard-00000.tar", path)
    whole = bits_of(find_shards(path), form == "packed")
    Memory(monkeypatch)
    flips = Flips(path, spans_of_members(path))
    flips.try_each(lambda: bits_of(find_shards(path, count_tokens=True), form == "packed"), whole)
    assert flips.num_refused > 256, "headers have checksums"
    assert flips.num_equal
    assert flips.num_other
