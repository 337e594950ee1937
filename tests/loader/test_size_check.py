"""Rank 0 looks at the size of every tar when a loader is made; the other ranks do not."""

from __future__ import annotations

import os
import re
import shutil
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import TokenLoader, get_llama3_dataloader
from loader import find_shards as size_check
from loader.find_shards import Misfit
from shardprep.errors import BrokenShard, MissingShard
from tests.waiting import HANG_S

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    prep.plan(sample_dir, folder, num_shards=8)
    prep.make(folder)
    assert prep.command("verify", folder).code == 0
    return folder


@pytest.fixture
def copied(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "my data"))


def load(shards: Any, rank: int = 0, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, 4, num_workers=0, rank=rank, world_size=2, **options)


def wait_for_the_check() -> None:
    """Until the thread has ended that looks at the sizes: a loader waits WAIT_S for it, and goes on."""
    for thread in threading.enumerate():
        if thread.name == "size check":
            thread.join()


def test_rank_0_alone_looks_and_refuses_what_is_missing(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[str] = []
    real_stat = os.stat

    def stat(path: Any, **options: Any) -> os.stat_result:
        if str(path).endswith(".tar"):
            looked_at.append(Path(path).name)
        return real_stat(path, **options)

    monkeypatch.setattr(os, "stat", stat)
    load(copied).close()
    assert sorted(looked_at) == [f"shard-0000{number}.tar" for number in range(8)]
    looked_at.clear()
    (copied / "shard-00003.tar").unlink()
    load(copied, rank=1).close()
    assert looked_at == []
    with pytest.raises(MissingShard, match=r"of 8 tars 1 are missing and 0 .*shard-00003\.tar is missing; "):
        load(copied)


@pytest.mark.processes
def test_the_first_few_are_named_with_their_sizes_their_number_and_a_command_that_mends_them(
    prep: Prep, copied: Path
) -> None:
    for number in (1, 2, 3, 6):
        os.truncate(copied / f"shard-0000{number}.tar", 512 * number)
    with pytest.raises(BrokenShard) as caught:
        load(copied)
    text = str(caught.value)
    size = f"0 are missing and 4 have not their manifest's size: {copied}/shard-00001.tar has 512 of "
    assert size in text
    assert text.count(" bytes") == 3
    assert "00006.tar" not in text
    command = re.search(r"shardprep (run) '(.*)' (--shards) (\S+)$", text)
    assert command, text
    assert command[4] == "1-3,6"
    assert prep.command(*command.groups()).code == 0
    load(copied).close()


def test_a_missing_tar_is_named_before_those_of_a_wrong_size(copied: Path) -> None:
    os.truncate(copied / "shard-00000.tar", 512)
    (copied / "shard-00007.tar").unlink()
    with pytest.raises(
        MissingShard, match=r"1 are missing and 1 have .*shard-00007\.tar is missing; \.\.\.;"
    ):
        load(copied)


def test_a_link_to_nothing_is_missing(copied: Path) -> None:
    (copied / "shard-00002.tar").unlink()
    (copied / "shard-00002.tar").symlink_to(copied / "nothing")
    with pytest.raises(MissingShard, match=r"shard-00002\.tar is missing"):
        load(copied)


def test_of_shards_named_or_left_out_one_by_one_only_those_that_are_read_are_looked_at(copied: Path) -> None:
    (copied / "shard-00003.tar").unlink()
    load(f"{copied}/shard-{{00000..00002}}.tar").close()
    os.truncate(copied / "shard-00005.tar", 512)
    with pytest.raises(BrokenShard, match=r"of 2 tars 0 are missing and 1 .*--shards 5$"):
        load(f"{copied}/shard-{{00005..00006}}.tar")


def test_what_a_long_look_finds_is_raised_at_the_next_run(
    copied: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with 10^5 shards on Lustre: making the loader does not wait for it."""
    go_on = threading.Event()

    def slow(_: Any) -> Any:
        assert go_on.wait(HANG_S)
        path = copied / "shard-00004.tar"  # whole, so that reading finds nothing
        return [Misfit(path.name, 4, 512, 1024)]

    monkeypatch.setattr(size_check, "find_misfits", slow)
    monkeypatch.setattr(size_check, "WAIT_S", 0.01)
    with load(copied) as loader:
        go_on.set()
        wait_for_the_check()
        with pytest.raises(BrokenShard, match=r"shard-00004\.tar has 512 of"):
            next(iter(loader))


def test_a_folder_that_cannot_be_listed_is_a_warning_as_reading_will_tell(
    copied: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(_: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(size_check, "find_misfits", failing)
    with load(copied) as loader:
        assert next(iter(loader))
        wait_for_the_check()
    assert "cannot be looked at: [Errno 5] Input/output error" in caplog.text
