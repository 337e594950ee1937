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


def left(folder: Path, name: str, *, hours: float = 0, host: str = "node-1.site") -> Path:
    """A temporary as an attempt on another node leaves it."""
    path = folder / f".{name}.{host}-123-0a1b2c3d.tmp"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half of it")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return path


def test_temporaries_of_done_shards_go_and_those_of_others_stay_for_a_day(world: World) -> None:
    data, before = world.data_dir, world.contents()
    gone = [
        left(data, "shard-00000.tar"),
        left(data / "quarantine", "shard-00000.jsonl"),
        left(data, "shard-00001.tar", hours=25),
        left(data, "index.json", hours=25),
        left(data / "jobs", "0000.json", hours=25),
    ]
    kept = [
        left(data, "shard-00001.idx", hours=23),
        left(data, "shard-00010.tar"),
        left(data, "index.json", hours=1, host="other"),
        left(data / "jobs", "0001.json"),
    ]
    for dry_run in (True, None):
        ended = world.main("clean", data, dry_run=dry_run)
        assert (ended.code, "5 files, 50 B" in ended.out) == (0, True), ended.text
        assert {path.exists() for path in gone} == {dry_run is True}
    assert all(path.exists() for path in kept)
    assert world.contents() == before


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


def test_what_no_attempt_made_is_never_removed(world: World, tmp_path: Path) -> None:
    names = [
        ".shard-00000.tar.tmp", ".notes.tmp", "shard-00000.tar.h-1-0a1b2c3d.tmp", ".a.h-1-0A1B2C3D.tmp",
        ".x.swp",
    ]  # fmt: skip
    others = [world.data_dir / name for name in names]
    for path in others:
        path.touch()
        os.utime(path, (0, 0))
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"precious")
    link = world.data_dir / ".shard-00001.tar.h-1-0a1b2c3d.tmp"
    link.symlink_to(tmp_path / "precious")
    os.utime(link, (0, 0), follow_symlinks=False)
    assert world.main("clean", world.data_dir).code == 0
    assert all(path.exists() for path in others)
    assert not link.is_symlink()
    assert (tmp_path / "precious" / "file").read_bytes() == b"precious"


def test_a_broken_shard_is_not_done(world: World) -> None:
    (world.data_dir / "shard-00000.tar").write_bytes(b"cut")
    path = left(world.data_dir, "shard-00000.tar")
    assert world.main("clean", world.data_dir).code == 0
    assert path.exists(), "it may be what will mend the shard"


def test_without_a_plan_only_what_is_old_goes_and_without_a_folder_nothing(tmp_path: Path) -> None:
    world = World(tmp_path)
    old, young = left(tmp_path, "plan.json", hours=25), left(tmp_path, "shard-00000.tar")
    assert world.main("clean", tmp_path).code == 0
    assert (old.exists(), young.exists()) == (False, True)
    assert world.main("clean", world.raw_dir).code == 66, "it holds no data set"


@pytest.mark.parametrize(
    ("owner", "call", "code"), [(Path, "unlink", 73), (Path, "lstat", 73), (os, "listdir", 74)], ids=str
)
def test_what_cannot_be_removed_or_looked_at_is_named_and_never_passed_over(
    world: World, monkeypatch: pytest.MonkeyPatch, owner: Any, call: str, code: int
) -> None:
    mine = left(world.data_dir, "shard-00002.tar", hours=25)
    others = left(world.data_dir / "quarantine", "shard-00000.jsonl", hours=25)
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
