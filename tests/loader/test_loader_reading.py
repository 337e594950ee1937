"""Reading from file systems that fail, hang or lack a file, and shards left out by name."""

from __future__ import annotations

import errno
import gc
import os
import shutil
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import webdataset

from loader import TokenLoader, get_llama3_dataloader
from loader import reading as open_shard
from loader.find_shards import find_shards
from loader.reading import ShardReader
from shardprep.errors import BrokenShard, MissingShard, NotFound, ReadWriteError, UnknownMember
from shardprep.format.idx import CHUNK_RECORDS

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "concat": {"record": "packed", "seq_len": 32},
    "best_fit": {"record": "packed", "seq_len": 32, "pack": "best_fit"},
}


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("made"), FORMS, num_shards=4)


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made / "json", tmp_path / "copy"))


def load(shards: Any, batch_size: int = 8, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, **{"num_workers": 0, **options})


def epoch(loader: TokenLoader) -> list[Any]:
    with loader:
        return [
            {name: value.tolist() if hasattr(value, "tolist") else value for name, value in batch.items()}
            for batch in loader
        ]


def test_a_shard_without_its_idx_is_missing(copied: Path) -> None:
    (copied / "shard-00001.idx").unlink()
    with pytest.raises(MissingShard) as caught:
        epoch(load(copied))
    assert caught.value.path == str(copied / "shard-00001.idx")


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_our_tars_alone_load_like_anyones(made: Path, prep: Prep, tmp_path: Path, form: str) -> None:
    for path in (made / form).glob("*.tar"):
        shutil.copy(path, tmp_path)
    options = {"boundaries": "segment_ids", "shuffle": False}
    whole = epoch(load(made / form, 1, **options))
    assert epoch(load(tmp_path, 1, model_id=prep.model_dir, **options)) == whole


def num_handles() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


class FailingReads:
    """``os.preadv`` that fails with these codes (0: reads), for files of one suffix."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: list[int], suffix: str = ".tar") -> None:
        self.codes, self.suffix, self.real = codes, suffix, os.preadv
        self.num_bytes = Counter[str]()  # read, by suffix
        monkeypatch.setattr(os, "preadv", self)
        self.slept: list[float] = []
        monkeypatch.setattr(time, "sleep", self.slept.append)

    def __call__(self, handle: int, buffers: Any, offset: int) -> int:
        path = Path(f"/proc/self/fd/{handle}").readlink()
        if self.codes and path.suffix == self.suffix and (code := self.codes.pop(0)):
            raise OSError(code, os.strerror(code))
        count = self.real(handle, buffers, offset)
        self.num_bytes[path.suffix] += count
        return count


@pytest.mark.slow
def test_a_failed_read_is_tried_again_with_the_file_opened_anew(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = epoch(load(made / "json"))
    opened = opened_files(monkeypatch)
    reads = FailingReads(monkeypatch, [errno.EIO, errno.ESTALE, errno.ESHUTDOWN])
    assert epoch(load(made / "json")) == whole
    assert reads.slept == [0.5, 1, 2]
    first = next(path for path in opened if path.endswith(".tar"))
    assert opened.count(first) >= 4
    assert "Stale file handle" in caplog.text
    assert first in caplog.text


def test_a_read_that_goes_on_failing_ends_with_an_error_that_names_the_shard(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = FailingReads(monkeypatch, [errno.EIO] * 100)
    message = r"shard-0000\d\.tar cannot be read at byte \d+ in 7 attempts: .*Input/output error"
    with pytest.raises(ReadWriteError, match=message):
        epoch(load(made / "json"))
    assert len(reads.slept) == 6
    reads.codes[:] = [errno.EACCES]
    with pytest.raises(ReadWriteError, match=r"shard-0000\d\.tar cannot be read at byte \d+: .*denied"):
        epoch(load(made / "json"))
    assert len(reads.slept) == 6, "what waiting cannot mend is not waited for"


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seq_len", [None, 32])
def test_an_idx_read_in_parts_gives_the_same_batches_as_one_that_is_held(
    made: Path, form: str, seq_len: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: dict[str, Any] = {"seq_len": seq_len, "boundaries": "position_ids"}
    whole = epoch(load(made / form, **options))
    monkeypatch.setattr(open_shard, "HELD_IDX_BYTES", 0)
    assert epoch(load(made / form, **options)) == whole


def test_of_a_large_idx_a_chunk_is_read_once_and_then_only_the_records_asked_for(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = find_shards(made / "json")
    num_samples = int(shards.first_sample[1])
    assert 8 < num_samples <= CHUNK_RECORDS, "all records of the shard are one chunk, of one crc32"
    for held, again in ((0, 5 * 28), (1 << 20, 0)):
        monkeypatch.setattr(open_shard, "HELD_IDX_BYTES", held)
        reads = FailingReads(monkeypatch, [])
        reader = ShardReader(shards)
        reader.read(np.arange(3, 8))
        first = 64 + 4 + num_samples * 28
        assert reads.num_bytes[".idx"] == first
        reader.read(np.arange(3, 8))
        reader.close()
        assert reads.num_bytes[".idx"] == first + again


@pytest.mark.slow
def test_without_workers_each_shard_is_opened_once_wherever_the_loader_is_sent(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = num_handles()
    opened = opened_files(monkeypatch)
    with load(made / "json") as loader:
        for step in (3, 1, 7, 0):
            loader.load_state_dict(loader.state_at(step))
            next(iter(loader))
        assert len(list(loader)) == len(loader) - 1  # the rest of the epoch
        tars = Counter(path for path in opened if path.endswith(".tar"))
        assert set(tars.values()) == {1}
        assert num_handles() > before
    assert num_handles() <= before
    with load(made / "json") as loader:
        next(iter(loader))
        next(iter(loader))
    assert set(Counter(path for path in opened if path.endswith(".tar")).values()) == {2}


@pytest.mark.parametrize("held", [0, 1 << 20], ids=["in parts", "held"])
def test_a_failed_read_of_an_idx_is_tried_again_and_then_named(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, held: int
) -> None:
    monkeypatch.setattr(open_shard, "HELD_IDX_BYTES", held)
    whole = epoch(load(made / "concat"))
    before = num_handles()
    opened = opened_files(monkeypatch)
    reads = FailingReads(monkeypatch, [0, errno.EIO, 0, errno.ESTALE], ".idx")  # headers are read
    assert epoch(load(made / "concat")) == whole
    assert reads.slept == [0.5, 1]
    assert "Stale file handle" in caplog.text
    first = next(path for path in opened if path.endswith(".idx"))
    assert opened.count(first) >= 3
    reads.codes[:] = [0, errno.EIO] * 100
    message = r"shard-0000\d\.(tar cannot be opened|idx cannot be read at byte 64) in 7 attempts: .*error"
    with pytest.raises(ReadWriteError, match=message):
        epoch(load(made / "concat"))
    assert num_handles() <= before


def opened_files(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Paths of the files that are opened from now on."""
    paths: list[str] = []
    real = os.open

    def opening(path: Any, *args: Any, **options: Any) -> int:
        paths.append(str(path))
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", opening)
    return paths


@pytest.mark.slow
def test_opening_is_tried_again_too(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = epoch(load(made / "json"))
    real_open, codes = os.open, [errno.EIO, errno.ETIMEDOUT]
    slept: list[float] = []

    def failing(path: Any, *args: Any) -> int:
        if str(path).endswith("shard-00002.tar") and codes:
            raise OSError(codes.pop(0), "gone")
        return real_open(path, *args)

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr(time, "sleep", slept.append)
    assert epoch(load(made / "json")) == whole
    assert slept == [0.5, 1]


def first_orders(folder: Path, **options: Any) -> list[list[int]]:
    """In which order each of four ranks opens the shards of its first window."""
    orders = []
    for rank in range(4):
        with pytest.MonkeyPatch.context() as patch:
            opened = opened_files(patch)
            with load(folder, 4, rank=rank, world_size=4, **options) as loader:
                next(iter(loader))
        orders.append([int(Path(path).stem[-5:]) for path in opened if path.endswith(".tar")])
    return orders


@pytest.mark.parametrize("options", [{}, {"seq_len": 32}])
def test_the_ranks_begin_with_different_shards(made: Path, options: dict[str, Any]) -> None:
    orders = first_orders(made / "json", **options)
    assert [order[0] for order in orders] == [0, 1, 2, 3]
    assert all(sorted(set(order)) == [0, 1, 2, 3] for order in orders)


IDX_FAULTS: list[tuple[str, str, int]] = [
    ("json", "offset", 2**64 - 512),
    ("json", "offset", 2**40),
    ("json", "num_bytes", 2**32 - 1),
    ("json", "num_tokens", 2**32 - 1),
    ("concat", "offset", 2**40),
    ("concat", "num_bytes", 2**31),
    ("concat", "num_tokens", 33),
    ("concat", "starts_offset", 2**64 - 4),
    ("concat", "num_starts", 33),
]


@pytest.mark.parametrize(("form", "column", "value"), IDX_FAULTS)
def test_records_that_place_samples_where_they_cannot_be_are_refused_before_anything_is_read(
    made: Path, monkeypatch: pytest.MonkeyPatch, form: str, column: str, value: int
) -> None:
    """Whatever vouches for the idx: a record of it is exchanged in memory, behind the checks at opening."""
    opening = open_shard.open_shard

    def exchanging(source: Any, row: int, **named: Any) -> Any:
        shard = opening(source, row, **named)
        shard.records[column][2] = value
        return shard

    monkeypatch.setattr("loader.reading.open_shard", exchanging)
    boundaries: dict[str, Any] = {"boundaries": ("position_ids",)} if form == "concat" else {}
    with (
        load(made / form, **boundaries) as loader,
        pytest.raises(BrokenShard, match=r"shard-0000\d\.tar"),
    ):
        list(loader)


@pytest.mark.slow
@pytest.mark.parametrize("form", ["json", "concat"])
def test_few_handles_are_enough_for_many_shards(
    made: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = epoch(load(made / form, boundaries="position_ids"))
    monkeypatch.setattr(open_shard, "MAX_OPEN_SHARDS", 1)
    before = num_handles()
    with load(made / form, boundaries="position_ids") as loader:
        for number, batch in enumerate(loader):
            assert batch["input_ids"].tolist() == whole[number]["input_ids"]
            assert num_handles() <= before + 3


@pytest.mark.processes
def test_what_is_no_local_file_is_copied_by_webdataset_once(made: Path, prep: Prep, tmp_path: Path) -> None:
    options: dict[str, Any] = {"model_id": prep.model_dir, "cache_dir": tmp_path / "cache"}
    url = f"pipe:cat {made}/json/shard-{{00000..00003}}.tar"
    expected = epoch(load([made / "json"]))
    tars = tmp_path / "tars"
    tars.mkdir()
    for path in (made / "json").glob("*.tar"):
        shutil.copy(path, tars)
    assert epoch(load(url, **options)) == epoch(load(tars, model_id=prep.model_dir))
    copies = sorted((tmp_path / "cache").iterdir())
    assert [path.name[17:] for path in sorted(copies, key=lambda path: path.name[17:])] == [
        f"shard-0000{number}.tar" for number in range(4)
    ]
    stamps = [path.stat().st_mtime_ns for path in copies]
    assert len(epoch(load(url, **options))) == len(expected)
    assert [path.stat().st_mtime_ns for path in copies] == stamps


@pytest.mark.processes
def test_urls_that_cannot_be_read_or_are_no_whole_tar_leave_nothing_behind(
    made: Path, prep: Prep, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model_id": prep.model_dir, "cache_dir": tmp_path}
    with pytest.raises(BrokenShard, match="no whole tar"):
        load(f"pipe:head -c 5000 {made}/json/shard-00000.tar", **options)
    with pytest.raises(NotFound, match="cannot be read by webdataset"):
        load(f"pipe:cat {tmp_path}/nothing.tar", **options)
    masked = tmp_path / "masked"
    with webdataset.TarWriter(str(masked)) as writer:
        writer.write({"__key__": "d", "token_ids.json": [1], "loss_mask.npy": b""})
    with pytest.raises(UnknownMember, match="loss_mask"):
        load(f"pipe:cat {masked}", **options)
    with pytest.raises(NotFound, match="exit 3"):  # a copy is whole only where its command says so, too
        load(f"pipe:cat {made}/json/shard-00000.tar; exit 3", **options)
    assert list(tmp_path.iterdir()) == [masked]
