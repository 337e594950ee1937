"""Reading from file systems that fail, hang or lack a file, and shards left out by name."""

from __future__ import annotations

import errno
import logging
import os
import shutil
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import webdataset

from loader import TokenLoader, get_llama3_dataloader, shard_reader
from loader.find_shards import find_shards
from loader.shard_reader import ShardReader
from preprocess.shard_format import BrokenShard, MissingShard, NotFound, ReadWriteError, UsageError

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
    root = tmp_path_factory.mktemp("made")
    for name, options in FORMS.items():
        prep.plan(sample_dir, root / name, num_shards=4, **options)
        prep.make(root / name)
    return root


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


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("seq_len", [None, 32])
def test_a_shard_without_its_idx_loses_nothing(
    made: Path, tmp_path: Path, form: str, seq_len: int | None, caplog: pytest.LogCaptureFixture
) -> None:
    options = {"seq_len": seq_len, "boundaries": "position_ids"}
    whole = epoch(load(made / form, **options))
    folder = shutil.copytree(made / form, tmp_path / "copy")
    (folder / "shard-00001.idx").unlink()
    (folder / "shard-00003.idx").unlink()
    assert epoch(load(folder, **options)) == whole
    assert "shard-00003.idx is missing; its tar is scanned instead" in caplog.text


@pytest.mark.parametrize("form", FORMS)
def test_our_tars_alone_load_like_anyones(made: Path, prep: Prep, tmp_path: Path, form: str) -> None:
    for path in (made / form).glob("*.tar"):
        shutil.copy(path, tmp_path)
    options = {"boundaries": "segment_ids", "shuffle": False}
    whole = epoch(load(made / form, 1, **options))
    assert epoch(load(tmp_path, 1, model_id=prep.model_dir, **options)) == whole


def test_an_unknown_member_beside_packed_rows_is_refused(made: Path, prep: Prep, tmp_path: Path) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for sample in webdataset.WebDataset(str(made / "concat" / "shard-00000.tar"), shardshuffle=False):
            fields = {name: value for name, value in sample.items() if name.endswith("npy")}
            writer.write({"__key__": sample["__key__"], **fields, "loss_mask.npy": fields["token_ids.npy"]})
    with pytest.raises(BrokenShard, match=r"has the fields doc_starts\.npy, loss_mask\.npy, .*could change"):
        load(tmp_path / "a.tar", model_id=prep.model_dir)


class FailingReads:
    """``os.preadv`` that fails some times, and remembers which handles it was given."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, codes: list[int]) -> None:
        self.codes, self.handles, self.real = codes, [], os.preadv
        monkeypatch.setattr(os, "preadv", self)
        self.slept: list[float] = []
        monkeypatch.setattr(time, "sleep", self.slept.append)

    def __call__(self, handle: int, buffers: Any, offset: int) -> int:
        self.handles.append(handle)
        if self.codes:
            code = self.codes.pop(0)
            raise OSError(code, os.strerror(code))
        return self.real(handle, buffers, offset)


def test_a_failed_read_is_tried_again_with_the_file_opened_anew(
    made: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    whole = epoch(load(made / "json"))
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *args: opened.append(str(path)) or real_open(path, *args))
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


def test_opening_is_tried_again_too(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = epoch(load(made / "json"))
    real_open, codes, slept = os.open, [errno.EIO, errno.ETIMEDOUT], []

    def failing(path: Any, *args: Any) -> int:
        if str(path).endswith("shard-00002.tar") and codes:
            raise OSError(codes.pop(0), "gone")
        return real_open(path, *args)

    monkeypatch.setattr(os, "open", failing)
    monkeypatch.setattr(time, "sleep", slept.append)
    assert epoch(load(made / "json")) == whole
    assert slept == [0.5, 1]


def test_a_read_that_hangs_is_named_in_the_log_while_it_hangs(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate())
    said = threading.Event()
    lines: list[Any] = []
    logger = logging.getLogger("loader.stall_watch")
    monkeypatch.setattr(logger, "warning", lambda *args: (lines.append(args), said.set()))
    real = os.preadv

    def hanging(*args: Any) -> int:
        assert said.wait(20), "nothing was said while the read hung"
        return real(*args)

    monkeypatch.setattr(os, "preadv", hanging)
    assert epoch(load(made / "json", stall_warning_s=0.05))
    template, path, *_ = lines[0]
    assert "goes on; is the file system of this shard up?" in template
    assert path.name.endswith(".tar")
    assert not set(threading.enumerate()) - before


@pytest.mark.parametrize("form", ["json", "concat"])
def test_few_handles_are_enough_for_many_shards(
    made: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = epoch(load(made / form, boundaries="position_ids"))
    monkeypatch.setattr(shard_reader, "MAX_OPEN_SHARDS", 1)
    before = len(list(Path("/proc/self/fd").iterdir()))
    with load(made / form, boundaries="position_ids") as loader:
        for number, batch in enumerate(loader):
            assert batch["input_ids"].tolist() == whole[number]["input_ids"]
            assert len(list(Path("/proc/self/fd").iterdir())) <= before + 3


def test_the_limit_of_handles_bounds_the_shards_kept_open(
    made: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_reader.resource, "getrlimit", lambda _: (24, 24))
    assert ShardReader(find_shards(made / "json"))._max_open == 3


@pytest.mark.parametrize("named", [1, "shard-00001.tar", "path"])
@pytest.mark.parametrize("how", ["folder", "pattern"])
def test_an_excluded_shard_is_left_out_before_the_order(copied: Path, named: Any, how: str) -> None:
    shards = copied if how == "folder" else f"{copied}/shard-*.tar"
    excluded = copied / "shard-00001.tar" if named == "path" else named
    kept = [copied / f"shard-0000{number}.tar" for number in (0, 2, 3)]
    expected = epoch(load(kept))
    assert epoch(load(shards, exclude_shards=[excluded])) == expected
    for suffix in ("tar", "idx", "json"):  # bad in whatever way
        (copied / f"shard-00001.{suffix}").write_bytes(b"broken")
    assert epoch(load(shards, exclude_shards=[excluded])) == expected
    (copied / "shard-00001.json").unlink()
    with pytest.raises(MissingShard):
        load(copied)
    assert epoch(load(copied, exclude_shards=[excluded])) == expected


def test_broken_tars_of_others_can_be_excluded_and_unknown_or_doubtful_names_are_refused(
    prep: Prep, tmp_path: Path
) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        for name in ("one", "two"):
            with webdataset.TarWriter(str(tmp_path / folder / f"{name}.tar")) as writer:
                writer.write({"__key__": "d", "token_ids.json": [1]})
    (tmp_path / "a" / "one.tar").write_bytes(b"broken")
    both = [tmp_path / "a", tmp_path / "b"]
    options: dict[str, Any] = {"model_id": prep.model_dir, "batch_size": 1}
    assert len(load(both, exclude_shards=[tmp_path / "a" / "one.tar"], **options)) == 3
    assert len(load(tmp_path / "a", exclude_shards=["one.tar"], **options)) == 1
    with pytest.raises(UsageError, match=r"names 'three\.tar', which is none of the shards"):
        load(tmp_path / "b", exclude_shards=["three.tar"], **options)
    with pytest.raises(UsageError, match=r"fits .*a/one\.tar and .*b/one\.tar; name the path"):
        load(both, exclude_shards=["one.tar"], **options)
    with pytest.raises(UsageError, match="holds no sample that is not excluded"):
        load(tmp_path / "b", exclude_shards=["one.tar", "two.tar"], **options)


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


def test_urls_that_cannot_be_read_or_are_no_whole_tar_leave_nothing_behind(
    made: Path, prep: Prep, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model_id": prep.model_dir, "cache_dir": tmp_path}
    with pytest.raises(BrokenShard, match=r"no whole tar: .*cut short"):
        load(f"pipe:head -c 5000 {made}/json/shard-00000.tar", **options)
    with pytest.raises(NotFound, match="cannot be read by webdataset"):
        load(f"pipe:cat {tmp_path}/nothing.tar", **options)
    assert list(tmp_path.iterdir()) == []
