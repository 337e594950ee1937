"""Tars behind URLs: the same data as on disk, and a cache that others cannot put anything into."""

from __future__ import annotations

import errno
import functools
import http.server
import os
import shutil
import stat
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader.find_shards import find_shards
from loader.url_copies import copy_url
from shardprep.errors import BrokenShard, CannotWrite, ReadWriteError, UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes

NUM_SHARDS = 3


class Quiet(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of ours, and its tars alone in ``others``, with names of their own."""
    root = tmp_path_factory.mktemp("made")
    prep.plan(sample_dir, root / "data", num_shards=NUM_SHARDS)
    prep.make(root / "data")
    (root / "others").mkdir()
    for number in range(NUM_SHARDS):
        shutil.copy(root / "data" / f"shard-{number:05d}.tar", root / "others" / f"part-{number}.tar")
    return root


@pytest.fixture
def server(made: Path) -> Iterator[str]:
    """The root of ``made`` on a port of this machine."""
    handler = functools.partial(Quiet, directory=str(made))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{serving.server_port}"
        serving.shutdown()
        thread.join()


def load(shards: Any, model: Path, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, 8, model, num_workers=0, **options)


@pytest.mark.parametrize("tars", ["data/shard-{00000..00002}.tar", "others/part-{0..2}.tar"])
def test_a_run_goes_on_with_the_same_tars_from_a_url_and_back(
    made: Path, server: str, prep: Prep, tmp_path: Path, tars: str
) -> None:
    here: list[Any] = [str(made / tars), {}]
    there: list[Any] = [f"{server}/{tars}", {"cache_dir": tmp_path / "cache"}]
    for (first, first_options), (then, then_options) in ((here, there), (there, here)):
        with load(first, prep.model_dir, **first_options) as loader:
            batches = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
            state = loader.state_at(5)
        with load(then, prep.model_dir, **then_options) as loader:
            loader.load_state_dict(state)
            rest = [{name: value.tolist() for name, value in batch.items()} for batch in loader]
        assert len(batches) > 10
        assert rest == batches[5:]


def test_a_data_set_by_its_folder_and_its_tars_by_url_have_one_fingerprint(
    made: Path, server: str, tmp_path: Path
) -> None:
    folder = find_shards(made / "data")
    urls = find_shards(f"{server}/data/shard-{{00000..00002}}.tar", cache_dir=tmp_path)
    assert folder.fingerprint == urls.fingerprint
    moved = find_shards(f"{server}/others/../data/shard-{{00000..00002}}.tar", cache_dir=tmp_path)
    assert moved.fingerprint == folder.fingerprint


@pytest.mark.parametrize("suffix", ["tar", "idx"])
def test_a_shard_by_url_that_is_not_what_its_manifest_says_is_refused(
    made: Path, server: str, tmp_path: Path, suffix: str
) -> None:
    shutil.copytree(made / "data", made / f"altered-{suffix}")
    path = made / f"altered-{suffix}" / f"shard-00001.{suffix}"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with pytest.raises(BrokenShard, match=rf"altered-{suffix}/shard-00001\.{suffix}"):
        copy_url(f"{server}/altered-{suffix}/shard-00001.tar", tmp_path)
    assert not list(tmp_path.rglob("*.tar"))
    assert not list(tmp_path.rglob(".*"))


def test_no_link_that_others_put_into_the_cache_is_followed(made: Path, tmp_path: Path) -> None:
    """At the names that were guessable: of the temporary file and of the copy."""
    url, cache, victim = f"pipe:cat {made}/others/part-0.tar", tmp_path / "cache", tmp_path / "victim"
    victim.write_bytes(b"precious")
    name = Path(copy_url(url, cache)).name
    shutil.rmtree(cache)
    cache.mkdir()
    (cache / f".{name}.{os.uname().nodename}.{os.getpid()}").symlink_to(victim)
    assert Path(copy_url(url, cache)).read_bytes() == (made / "others" / "part-0.tar").read_bytes()
    assert victim.read_bytes() == b"precious"
    (cache / name).unlink()
    (cache / name).symlink_to(victim)
    with pytest.raises(BrokenShard, match="no regular file"):
        copy_url(url, cache)
    assert victim.read_bytes() == b"precious"


def test_in_a_folder_that_others_can_write_to_copies_lie_in_one_of_the_users_own(
    made: Path, tmp_path: Path
) -> None:
    url, shared = f"pipe:cat {made}/others/part-0.tar", tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    own = shared / f"shardprep-{os.getuid()}"
    assert Path(copy_url(url, shared)).parent == own
    assert stat.S_IMODE(own.stat().st_mode) == 0o700
    shutil.rmtree(own)
    (tmp_path / "elsewhere").mkdir()
    own.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(CannotWrite, match="mode lrwxrwxrwx"):
        copy_url(url, shared)
    own.unlink()
    own.mkdir()
    own.chmod(0o777)
    with pytest.raises(CannotWrite, match=r"mode drwxrwxrwx"):
        copy_url(url, shared)
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("call", ["open", "fsync", "mkdir", "rename", "stat"])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EACCES, errno.ESTALE, errno.EMFILE])
def test_an_error_of_the_cache_is_one_that_names_it_and_leaves_nothing(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    cache = tmp_path / "cache"
    real = getattr(os, call)

    def failing(path: Any, *args: Any, **named: Any) -> Any:
        if call == "fsync" or str(cache) in str(path):
            raise OSError(code, os.strerror(code), str(path))
        return real(path, *args, **named)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(ReadWriteError, match=rf"cannot be copied to {cache}: .*{os.strerror(code)}"):
            copy_url(f"pipe:cat {made}/others/part-0.tar", cache)
    assert not [path for path in cache.rglob("*") if path.is_file()]


def test_a_url_without_a_cache_is_refused() -> None:
    with pytest.raises(UsageError, match="pass cache_dir="):
        copy_url("https://host/a.tar", None)
