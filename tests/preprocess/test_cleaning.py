"""``clean``: temporaries of done shards go, and those older than a day; nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest

from tests.world import World


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Five shards are planned, the first is made."""
    return World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=5).run(0)


# Shard 0 is done, shard 2 is broken, the others are not made; with the age in hours.
GONE = [
    (".shard-00000.tar", 0), ("quarantine/.shard-00000.jsonl", 0), (".shard-00001.tar", 25),
    (".index.json", 25), ("jobs/.0000.json", 25),
]  # fmt: skip
KEPT = [
    (".shard-00001.idx", 23), (".shard-00002.tar", 0), (".shard-00010.tar", 0), (".findings.json", 1),
    ("jobs/.0001.json", 0),
]  # fmt: skip
NOT_OURS = [".shard-00000.tar.tmp", ".notes.tmp", "shard-00000.tar.h-1-0a1b2c3d.tmp", ".a.h-1-0A1B2C3D.tmp"]


def left(folder: Path, name: str, hours: float) -> Path:
    """A temporary of so many hours, as an attempt on another node leaves it."""
    path = folder / f"{name}.node-1.site-123-0a1b2c3d.tmp"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half of it")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return path


def test_what_attempts_left_goes_if_its_shard_is_done_or_after_a_day_and_nothing_else_does(
    world: World, tmp_path: Path
) -> None:
    data = world.run(2).data_dir
    (data / "shard-00002.tar").write_bytes(b"cut")
    gone = [left(data, *each) for each in GONE]
    kept = [left(data, *each) for each in KEPT] + [data / name for name in NOT_OURS]
    for path in kept[len(KEPT) :]:
        path.touch()
        os.utime(path, (0, 0))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"precious")
    link = data / ".shard-00001.tar.h-1-0a1b2c3d.tmp"
    link.symlink_to(tmp_path / "precious")
    os.utime(link, (0, 0), follow_symlinks=False)
    for dry_run in (True, None):
        ended = world.main("clean", data, dry_run=dry_run)
        assert (ended.code, "6 files" in ended.out) == (0, True), ended.text
        assert {path.exists() for path in gone} == {dry_run is True}
    assert [path for path in kept if not path.exists()] == []
    assert not link.is_symlink()
    assert (tmp_path / "precious" / "file").read_bytes() == b"precious"


def test_a_folder_of_a_temporary_is_as_young_as_what_lies_in_it(world: World) -> None:
    folder = world.data_dir / ".tokenizer2.node-1.site-123-0a1b2c3d.tmp"
    folder.mkdir()
    (folder / "inside").write_bytes(b"12345")
    for path in (folder / "inside", folder):
        os.utime(path, (0, 0))
    told = world.main("clean", world.data_dir, dry_run=True).out
    assert f"{folder} (5 B)" in told
    os.utime(folder / "inside")
    assert str(folder) not in world.main("clean", world.data_dir, dry_run=True).out, "it is written to"


def test_without_a_plan_only_what_is_old_goes_and_without_a_folder_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    old, young = left(tmp_path, ".plan.json", 25), left(tmp_path, ".shard-00000.tar", 0)
    assert world.main("clean", tmp_path).code == 0
    assert (old.exists(), young.exists()) == (False, True)
    assert world.main("clean", world.raw_dir).code == 66, "it holds no data set"


@pytest.mark.parametrize(
    ("owner", "call", "code"), [(Path, "unlink", 73), (Path, "lstat", 73), (os, "listdir", 74)], ids=str
)
def test_what_cannot_be_removed_or_looked_at_is_named_and_never_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, code: int
) -> None:
    mine = left(world.data_dir, ".shard-00002.tar", 25)
    others = left(world.data_dir, "quarantine/.shard-00000.jsonl", 25)
    hidden = others.parent if call == "listdir" else others
    real = getattr(owner, call)

    def refuse(wanted: os.PathLike[str], *args: Any, **options: Any) -> Any:
        if Path(wanted) == hidden:
            raise PermissionError(13, "Permission denied", str(wanted))
        return real(wanted, *args, **options)

    monkeypatch.setattr(owner, call, refuse)
    ended = world.main("clean", world.data_dir)
    monkeypatch.undo()
    assert (ended.code, str(hidden) in ended.err) == (code, True), ended.text
    assert others.exists()
    assert mine.exists() == (call == "listdir"), "all others go, but where a folder cannot be listed"
