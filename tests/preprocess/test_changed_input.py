"""Input that is not what was planned, or is written to while it is read, is refused."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make.resources import WorkerSettings
from preprocess.make.worker import Work, Worker, load_worker
from shardprep.errors import NotFound, Refused
from shardprep.format.plan import Plan, need_plan

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.slow

LINES = 20_000


@pytest.fixture
def raw_dir(tmp_path: Path) -> Path:
    """One file of 480 KB, larger than the three samples; all lines of one length."""
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "a.txt").write_text("".join(f"line {number:08d} of a text\n" for number in range(LINES)))
    return raw


def change_unseen(path: Path) -> None:
    """Another letter outside of the three samples; the size stays."""
    with path.open("r+b") as file:
        file.seek(100_005)
        byte = file.read(1)
        file.seek(100_005)
        file.write(b"Z" if byte != b"Z" else b"Y")


def worker_of(folder: Path, **settings: Any) -> Worker:
    plan = need_plan(folder)
    return load_worker(plan, folder, WorkerSettings(**settings), num_cpus=1, warn=pytest.fail)


def nothing_is_made(folder: Path) -> bool:
    return not [path for path in folder.iterdir() if "shard-" in path.name]


def make_all(folder: Path) -> Plan:
    worker = worker_of(folder)
    for shard_id in range(worker.plan.num_shards):
        worker.run_shard(worker.plan.shard(shard_id), lambda _: None)
    return worker.plan


@pytest.mark.parametrize("options", [{}, {"doc": "file"}, {"encoding": "utf-8-sig"}], ids=str)
@pytest.mark.parametrize("num_shards", [1, 3])
def test_any_change_of_the_input_is_refused_where_the_plan_hashed_it_whole(
    prep: Prep, raw_dir: Path, tmp_path: Path, options: dict[str, Any], num_shards: int
) -> None:
    folder = tmp_path / "data"
    prep.plan(raw_dir, folder, num_shards=num_shards, hash_inputs=True, **options)
    stamp = (raw_dir / "a.txt").stat()
    change_unseen(raw_dir / "a.txt")
    os.utime(raw_dir / "a.txt", ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    with pytest.raises(
        Refused, match=r"the input of shard 0000\d \(a\.txt\) changed since it was planned: sha256"
    ):
        make_all(folder)
    assert len(list(folder.glob("shard-*.json"))) < num_shards
    change = raw_dir / "a.txt"
    change.write_text("".join(f"line {number:08d} of a text\n" for number in range(LINES)))
    make_all(folder)


def test_the_hashes_are_part_of_the_plan_id_and_change_no_shard(
    prep: Prep, raw_dir: Path, tmp_path: Path
) -> None:
    plain = prep.plan(raw_dir, tmp_path / "plain", num_shards=2)
    hashed = prep.plan(raw_dir, tmp_path / "hashed", num_shards=2, hash_inputs=True)
    assert hashed.plan_id != plain.plan_id
    assert (hashed.has_input_hashes, plain.has_input_hashes) == (True, False)
    with pytest.raises(Refused, match="--hash_inputs was True"):
        prep.plan(raw_dir, tmp_path / "hashed", num_shards=2)
    for folder in (tmp_path / "plain", tmp_path / "hashed"):
        make_all(folder)
    tars = [
        [path.read_bytes() for path in sorted((tmp_path / name).glob("*.tar"))]
        for name in ("plain", "hashed")
    ]
    assert tars[0] == tars[1]


def test_a_touch_changes_nothing(prep: Prep, raw_dir: Path, tmp_path: Path) -> None:
    prep.plan(raw_dir, tmp_path / "data", hash_inputs=True)
    os.utime(raw_dir / "a.txt", ns=(1, 1))
    make_all(tmp_path / "data")


def writes_in_the_middle(path: Path) -> Callable[[Work], None]:
    calls: list[Work] = []

    def progress(work: Work) -> None:
        if not calls:
            change_unseen(path)
        calls.append(work)

    return progress


def test_a_file_written_to_while_the_worker_reads_it_is_refused_and_made_again_later(
    prep: Prep, raw_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "data"
    prep.plan(raw_dir, folder)
    monkeypatch.setattr(WorkerSettings, "batch_bytes", 10_000)
    worker = worker_of(folder)
    with pytest.raises(Refused, match=r"a\.txt changed while it was read .*run this again"):
        worker.run_shard(worker.plan.shard(0), writes_in_the_middle(raw_dir / "a.txt"))
    assert nothing_is_made(folder)
    make_all(folder)


def test_a_file_put_in_the_place_of_the_one_being_read_is_never_mixed_with_it(
    prep: Prep, raw_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prep.plan(raw_dir, tmp_path / "data", hash_inputs=True)
    shutil.copytree(tmp_path / "data", tmp_path / "other")
    make_all(tmp_path / "other")
    (raw_dir / "new").write_text("another text\n" * 40_000)
    monkeypatch.setattr(WorkerSettings, "batch_bytes", 10_000)

    def progress(_: Work) -> None:
        if (raw_dir / "new").exists():
            (raw_dir / "new").replace(raw_dir / "a.txt")

    worker = worker_of(tmp_path / "data")

    worker.run_shard(worker.plan.shard(0), progress)
    assert not (raw_dir / "new").exists()
    assert prep.contents(tmp_path / "data") == prep.contents(tmp_path / "other")


KINDS: dict[str, tuple[Callable[[Path], object], str]] = {
    "fifo": (os.mkfifo, "a FIFO"),
    "zero": (lambda path: path.symlink_to("/dev/zero"), "a character device"),
    "folder": (lambda path: path.symlink_to("/"), "a folder"),
    "dangling": (lambda path: path.symlink_to("nowhere"), "a link to nothing"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_an_input_that_becomes_no_regular_file_is_named_by_the_worker(
    prep: Prep, raw_dir: Path, tmp_path: Path, kind: str
) -> None:
    prep.plan(raw_dir, tmp_path / "data")
    make, said = KINDS[kind]
    (raw_dir / "a.txt").unlink()
    make(raw_dir / "a.txt")
    with pytest.raises(NotFound) as caught:
        make_all(tmp_path / "data")
    assert str(raw_dir / "a.txt") in str(caught.value)
    assert said in str(caught.value)
    assert nothing_is_made(tmp_path / "data")
