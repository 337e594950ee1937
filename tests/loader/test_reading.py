"""Reading: failing calls and missing files, bytes read, open files, and tars behind URLs."""

from __future__ import annotations

import errno
import fcntl
import functools
import gc
import http.server
import multiprocessing
import os
import resource
import shutil
import stat
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest

from loader import BrokenShard, MissingShard, NotFound, ReadWriteError
from shardprep.errors import CannotWrite, ShardprepError, UnknownMember
from tests.external_tars import write_numbered_tars, write_tar
from tests.oracle.forms import SEQ_LEN, DataSets
from tests.world import World, epoch_of, open_loader, refuses, samples_of


def num_handles() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("name", ["documents", "documents_npy", "concat", "best_fit", "chat"])
def test_tars_without_manifests_are_read_as_external_tars(sets: DataSets, tmp_path: Path, name: str) -> None:
    folder, idx = Path(shutil.copytree(sets[name], tmp_path / "copy")), "shard-00001.idx"
    (folder / idx).unlink()
    with refuses(MissingShard, path=folder / idx):
        epoch_of(folder)
    for path in [*folder.glob("shard-*.[ij]*"), folder / "index.json", folder / "plan.json"]:
        path.unlink()
    options = {"model_id": sets[name] / "tokenizer", "boundaries": "segment_ids", "shuffle": False}
    ours, part = (epoch_of(data, 1, **options) for data in (sets[name], folder / "shard-00002.tar"))
    assert epoch_of(folder, 1, **options) == ours
    assert epoch_of([sets[name], folder / "shard-00002.tar"], 1, **options) == [*ours, *part]


# Calls that fail


def opened(calls: mock.Mock, suffix: str = ".tar") -> list[str]:
    """Return the paths with this suffix in calls of ``os.open``."""
    return [path for path in (str(call.args[0]) for call in calls.call_args_list) if path.endswith(suffix)]


# The header of an idx is read first.
@pytest.mark.parametrize(("suffix", "before"), [(".tar", []), (".idx", [0])])
def test_a_failed_read_is_retried_with_a_reopened_file_before_it_is_an_error(
    sets: DataSets, monkeypatch: pytest.MonkeyPatch, suffix: str, before: list[int]
) -> None:
    data = sets["concat"]
    whole, handles = epoch_of(data), num_handles()
    codes = [*before, errno.EIO, *before, errno.ESTALE, *before, errno.ESHUTDOWN]  # 0: success
    slept: list[float] = []
    real = os.preadv

    def failing(handle: int, buffers: Any, offset: int) -> int:
        has_suffix = Path(f"/proc/self/fd/{handle}").readlink().suffix == suffix
        if codes and has_suffix and (code := codes.pop(0)):
            raise OSError(code, os.strerror(code))
        return real(handle, buffers, offset)

    monkeypatch.setattr(os, "preadv", failing)
    monkeypatch.setattr(time, "sleep", slept.append)
    with mock.patch("os.open", wraps=os.open) as calls:
        assert epoch_of(data) == whole
    assert slept == [0.5, 1, 2]
    paths = opened(calls, suffix)
    assert paths.count(paths[0]) >= 4
    for faults, num_waits in (([*before, errno.EIO] * 100, 6), ([*before, errno.EACCES], 0)):
        codes[:], slept[:] = faults, []
        with pytest.raises(ReadWriteError) as raised:
            epoch_of(data)
        assert str(data / "shard-0000") in str(raised.value)
        assert len(slept) == num_waits, "permanent errors are not retried"
    assert num_handles() <= handles


@pytest.mark.processes
def test_neither_making_nor_loading_locks_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a parallel file system flock may hang, fail, or lock on one node only."""

    def refuse(*args: Any) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    for module, name in ((fcntl, "flock"), (fcntl, "lockf"), (os, "lockf")):
        monkeypatch.setattr(module, name, refuse)
    world = World(tmp_path).raw({"a.txt": "the kettle\n" * 60}).make()
    assert len(epoch_of(world.data_dir, num_workers=2)) == 60 // 4


# Bytes read, and open files


@pytest.mark.parametrize("options", [{}, {"seq_len": SEQ_LEN}])
def test_a_shard_is_opened_once_and_ranks_begin_with_others(sets: DataSets, options: dict[str, Any]) -> None:
    """Also after jumps. Files are closed with the loader, or when it is garbage-collected."""
    data, orders = sets["documents"], []  # made before the count begins
    gc.collect()
    before = num_handles()
    for rank in range(3):
        given = {"rank": rank, "world_size": 3, **options}
        with mock.patch("os.open", wraps=os.open) as calls, open_loader(data, 8, **given) as loader:
            next(iter(loader))
            orders.append([int(Path(path).stem[-5:]) for path in opened(calls)])
            for step in (3, 1, 0):
                loader.load_state_dict(loader.state_at(step))
                next(iter(loader))
            assert len(list(loader)) == len(loader) - 1  # the rest of the epoch
            assert {*Counter(opened(calls)).values()} == {1}
            assert num_handles() > before
        assert num_handles() <= before
        next(iter(open_loader(data)))
        assert num_handles() <= before
    assert sorted(order[0] for order in orders) == [0, 1, 2]
    assert all(sorted(set(order)) == [0, 1, 2] for order in orders)


def test_many_shards_need_few_open_files(numbered: Path, tmp_path: Path) -> None:
    write_numbered_tars(tmp_path, 107, 60)
    whole = epoch_of(tmp_path, 8, model_id=numbered)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    before = num_handles()
    most = max(int(path.name) for path in Path("/proc/self/fd").iterdir()) + 40
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with open_loader(tmp_path, 8, model_id=numbered) as loader:
            for number, batch in enumerate(loader):
                assert samples_of(batch) == whole[number]
                assert num_handles() <= before + most // 2
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_a_rank_reads_little_more_than_it_delivers(
    numbered: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, workers: int
) -> None:
    """A worker has slots of its own. If each took every n-th batch instead, all would read everything."""
    ids = np.random.default_rng(0).integers(0, 190, 32768, np.int32)
    write_tar(tmp_path / "a.tar", 64 * [{"token_ids.npy": ids}])
    real, num_bytes = os.preadv, multiprocessing.Value("q", 0)

    def counting(*args: Any) -> int:
        count = real(*args)
        with num_bytes.get_lock():
            num_bytes.value += count
        return count

    monkeypatch.setattr(os, "preadv", counting)
    for rank in range(4):
        options = {"rank": rank, "world_size": 4, "num_workers": workers, "persistent_workers": False}
        with open_loader(tmp_path, 4, model_id=numbered, **options) as loader:
            num_bytes.value = 0  # do not count the scan of the headers
            delivered = sum(4 * batch["input_ids"].numel() for batch in loader)
        assert delivered == 4 * 64 * 32768 // 4
        assert delivered <= num_bytes.value <= 1.1 * delivered


# Tars behind URLs


class Urls:
    """A folder served by HTTP, with a data set in ``data`` and only its tars, renamed, in ``others``."""

    def __init__(self, root: Path, port: int) -> None:
        self.root, self.url = root, f"http://127.0.0.1:{port}"
        self.model = root / "data" / "tokenizer"
        self.tar = root / "others" / "part-0.tar"

    def copy(self, url: str, cache: Path) -> list[Path]:
        """Load a URL with a cache and return the copies in the cache."""
        open_loader(url, model_id=self.model, cache_dir=cache).close()
        return sorted(cache.rglob("*.tar"))


@pytest.fixture(scope="module")
def urls(sets: DataSets, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Urls]:
    root = tmp_path_factory.mktemp("behind")
    shutil.copytree(sets["documents"], root / "data")
    (root / "others").mkdir()
    for number in range(3):
        shutil.copy(root / "data" / f"shard-{number:05d}.tar", root / "others" / f"part-{number}.tar")
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield Urls(root, serving.server_port)
        serving.shutdown()
        thread.join()


@pytest.mark.processes
@pytest.mark.parametrize("tars", ["data/shard-{00000..00002}.tar", "others/part-{0..2}.tar"])
def test_a_run_resumes_from_files_to_a_url_and_back(urls: Urls, tmp_path: Path, tars: str) -> None:
    options: dict[str, Any] = {"model_id": urls.model, "cache_dir": tmp_path / "cache"}
    here, there = str(urls.root / tars), f"{urls.url}/{tars}"
    pairs: list[tuple[Any, Any]] = [(here, there), (there, here)]
    if tars.startswith("data"):  # all tars of a data set equal the data set
        pairs.append((urls.root / "data", there))
    for first, then in pairs:
        with open_loader(first, 8, **options) as loader:
            batches = [samples_of(batch) for batch in loader]
            state = loader.state_at(5)
        with open_loader(then, 8, **options) as loader:
            loader.load_state_dict(state)
            assert [samples_of(batch) for batch in loader] == batches[5:]


@pytest.mark.processes
def test_a_url_is_copied_once_and_only_if_it_is_a_complete_tar(urls: Urls, tmp_path: Path) -> None:
    url, cache = f"pipe:cat {urls.root}/others/part-{{0..2}}.tar", tmp_path / "cache"
    copies = urls.copy(url, cache)
    assert sorted(path.name[17:] for path in copies) == [f"part-{number}.tar" for number in range(3)]
    stamps = [path.stat().st_mtime_ns for path in copies]
    assert urls.copy(url, cache) == copies
    assert [path.stat().st_mtime_ns for path in copies] == stamps

    masked = write_tar(tmp_path / "masked", [{"token_ids.json": [1], "loss_mask.npy": b""}])
    wrong: list[tuple[str, type[ShardprepError], dict[str, Any]]] = [
        (f"pipe:head -c 5000 {urls.tar}", BrokenShard, {}),
        (f"pipe:cat {tmp_path}/nothing.tar", NotFound, {}),
        (f"pipe:cat {masked}", UnknownMember, {}),
        (f"pipe:cat {urls.tar}; exit 3", NotFound, {}),  # complete, but its command fails
    ]
    for suffix in ("tar", "idx"):
        path = urls.root / f"altered-{suffix}" / f"shard-00001.{suffix}"
        shutil.copytree(urls.root / "data", path.parent)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        there = f"{urls.url}/{path.parent.name}"
        wrong.append((f"{there}/shard-00001.tar", BrokenShard, {"path": f"{there}/{path.name}"}))
    for number, (url, kind, fields) in enumerate(wrong):
        with refuses(kind, **fields):
            urls.copy(url, tmp_path / f"cache {number}")
        left = [*tmp_path.rglob(f"cache {number}/**/*.tar"), *tmp_path.rglob(f"cache {number}/**/.*")]
        assert not left, url


@pytest.mark.processes
def test_no_link_that_others_put_into_the_cache_is_followed(urls: Urls, tmp_path: Path) -> None:
    """At guessable names: those of the temporary file and of the copy."""
    url, victim, cache = f"pipe:cat {urls.tar}", tmp_path / "victim", tmp_path / "cache"
    victim.write_bytes(b"precious")
    (copy,) = urls.copy(url, cache)
    copy.unlink()
    guessed = copy.with_name(f".{copy.name}.{os.uname().nodename}.{os.getpid()}")
    guessed.symlink_to(victim)
    assert urls.copy(url, cache) == [copy]
    assert copy.read_bytes() == urls.tar.read_bytes()
    copy.unlink()
    copy.symlink_to(victim)
    with refuses(BrokenShard, path=copy):
        urls.copy(url, cache)
    assert victim.read_bytes() == b"precious"


@pytest.mark.processes
def test_copies_in_a_shared_folder_are_in_a_folder_of_the_user(urls: Urls, tmp_path: Path) -> None:
    url, shared, elsewhere = f"pipe:cat {urls.tar}", tmp_path / "shared", tmp_path / "elsewhere"
    shared.mkdir()
    shared.chmod(0o1777)
    own = shared / f"shardprep-{os.getuid()}"
    (copy,) = urls.copy(url, shared)
    assert (copy.parent, stat.S_IMODE(own.stat().st_mode)) == (own, 0o700)
    shutil.rmtree(own)
    elsewhere.mkdir()
    own.symlink_to(elsewhere)
    with refuses(CannotWrite, path=own, found="lrwxrwxrwx"):
        urls.copy(url, shared)
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    with refuses(CannotWrite, path=own, found="drwxrwxrwx"):
        urls.copy(url, shared)
    assert not list(elsewhere.iterdir())


@pytest.mark.processes
@pytest.mark.parametrize("call", ["open", "fsync", "mkdir", "rename", "stat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES])
def test_an_error_of_the_cache_names_it_and_leaves_no_file(
    urls: Urls, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    cache, real = tmp_path / "cache", getattr(os, call)

    def failing(path: Any, *args: Any, **named: Any) -> Any:
        if call == "fsync" or str(cache) in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **named)

    monkeypatch.setattr(os, call, failing)
    with pytest.raises((CannotWrite, ReadWriteError)) as raised:
        urls.copy(f"pipe:cat {urls.tar}", cache)
    monkeypatch.undo()
    assert str(cache) in str(raised.value)
    assert not [path for path in cache.rglob("*") if path.is_file()]
