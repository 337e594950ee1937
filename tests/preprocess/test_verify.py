"""``verify`` writes the index of a complete data set or names a remedy; ``clean`` removes temporaries.

tests/oracle/test_done.py damages and forges the files of shards. This module tests side files, the index, and
``--deep``, which makes shards again and finds those that are consistent but differ from the input.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.forged import rewrite_json
from tests.oracle.test_done import BROKEN, check_found_and_made_again
from tests.world import World

SUMS = ("num_documents", "num_tokens")
OPTIONS: dict[str, Any] = {"id_field": "id", "digests": True, "max_bad_fraction": 0.5, "num_shards": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A data set whose shards have all kinds of files; shard 1 has left a record out."""
    records: list[Any] = [{"id": str(number), "text": f"the kettle {number}"} for number in range(100)]
    records.insert(40, "no record")
    lines = "".join(f"line {number} of a file\n" for number in range(150))
    world = World(tmp_path_factory.mktemp("made")).raw({"a.jsonl": records, "b.txt": lines})
    return world.plan(**OPTIONS).run()


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy to damage, in a folder whose name needs quotes in a shell."""
    return made.copy(tmp_path / "my folder")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_verify_writes_an_index_that_depends_only_on_the_data(world: World, tmp_path: Path) -> None:
    world.verify()
    index = json.loads((world.data_dir / "index.json").read_bytes())
    assert index["spec"] == world.manifests()[0]["spec"]
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["shards"]]
    for row, manifest in zip(rows, world.manifests(), strict=True):
        tar, counts = manifest["tar"], manifest["counts"]
        assert (row["tar_sha256"], row["tar_bytes"]) == (tar["sha256"][:16], tar["num_bytes"])
        assert [row[name] for name in SUMS] == [counts[name] for name in SUMS]
    other = World(tmp_path / "other", raw_dir=world.raw_dir).plan(**OPTIONS)
    other.run(4, 2, 0, 1, 3, engine="tokenizers").verify()
    assert (other.data_dir / "index.json").read_bytes() == (world.data_dir / "index.json").read_bytes()


@pytest.mark.parametrize("damage", [Path.unlink, flip_a_bit])
@pytest.mark.parametrize("name", ["ids", "digests", "quarantine"])
def test_a_broken_side_file_is_found_and_its_shard_is_made_again(
    world: World, made: World, name: str, damage: Callable[[Path], object]
) -> None:
    (path,) = (world.data_dir / name).glob(f"shard-{BROKEN:05d}.*")
    damage(path)
    check_found_and_made_again(world, made)


def test_verify_json_says_what_is_right_or_wrong(world: World) -> None:
    right = json.loads(world.main("verify", world.data_dir, "--json", "--deep=1").ends(0).out)
    index = json.loads((world.data_dir / "index.json").read_bytes())
    assert (right["is_right"], right["check"], right["num_shards"]) == (True, "deep", len(index["shards"]))
    assert right["sources"] == index["sources"]
    assert right["num_tokens"] == sum(source["num_tokens"] for source in index["sources"].values())
    path = world.data_dir / "shard-00001.tar"
    path.write_bytes(path.read_bytes()[:-1])
    ended = world.main("verify", world.data_dir, "--json")
    wrong = json.loads(ended.out)
    assert (wrong["is_right"], list(wrong["problems"])) == (False, ["1"])
    assert (wrong["problems"]["1"]["exit_code"], ended.code) == (65, 65)
    assert str(path) in wrong["problems"]["1"]["message"]


def test_every_broken_shard_is_named_and_fast_checks_only_sizes(world: World, tmp_path: Path) -> None:
    flip_a_bit(world.data_dir / "shard-00002.tar")
    world.main("verify", world.data_dir, "--fast").ends(0)
    (world.data_dir / "shard-00000.tar").unlink()
    os.truncate(world.data_dir / "shard-00003.idx", 64)
    world.main("verify", world.data_dir, "--fast").ends(66)
    ended = world.main("verify", world.data_dir).ends(66)
    assert set(re.findall(r"shard (\d{5})", ended.err)) == {"00000", "00002", "00003"}
    assert f"--output_dir '{world.data_dir}'" in ended.err, "quoted for a shell"
    many = World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=12).run(0)
    many.main("verify", many.data_dir).ends(66, "6-11")  # many shards are named as a range


@pytest.mark.slow
@pytest.mark.parametrize("named", ["ids/shard-00003.jsonl", "digests/shard-00003.digests", "num_lines"])
def test_verify_deep_finds_a_consistent_shard_that_differs_from_the_input(world: World, named: str) -> None:
    """tests/oracle/test_done.py does this with a tar."""
    changes: dict[str, Any] = {"counts.num_lines": 9999}
    if "/" in named:
        flip_a_bit(world.data_dir / named)
        sha256 = hashlib.sha256((world.data_dir / named).read_bytes()).hexdigest()
        changes = {f"{named.partition('/')[0]}.sha256": sha256}
    rewrite_json(world.data_dir / "shard-00003.json", **changes)
    world.verify()  # the data set is consistent
    world.main("verify", world.data_dir, "--deep", 5).ends(65, named, "--shard_id 3")
    assert not world.temporaries()
    world.main("verify", world.data_dir).ends(65)  # the finding remains until the shard is made again
    world.run().verify(deep=5)


@pytest.fixture
def one_done(made: World, tmp_path: Path) -> World:
    """Two of five planned shards are made."""
    return made.copy(tmp_path / "of two", but=[f"shard-0000{number}.*" for number in (1, 3, 4)])


# (temporary, age in hours). Shard 0 is done, shard 2 is broken, and the others are not made.
GONE = [
    (".shard-00000.tar", 0), ("quarantine/.shard-00000.jsonl", 0), ("ids/.shard-00000.jsonl", 0),
    (".shard-00001.tar", 25), (".index.json", 25), ("jobs/.0000.json", 25),
]  # fmt: skip
KEPT = [
    (".shard-00001.idx", 23), (".shard-00002.tar", 0), (".shard-00010.tar", 0), (".findings.json", 1),
    ("jobs/.0001.json", 0),
]  # fmt: skip
NOT_OURS = [".shard-00000.tar.tmp", ".notes.tmp", "shard-00000.tar.h-1-0a1b2c3d.tmp", ".a.h-1-0A1B2C3D.tmp"]


def left(folder: Path, name: str, hours: float) -> Path:
    """Create a temporary of this age, as an attempt on another node leaves it."""
    path = folder / f"{name}.node-1.site-123-0a1b2c3d.tmp"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half of it")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return path


def test_clean_removes_temporaries_of_done_shards_and_old_ones(one_done: World, tmp_path: Path) -> None:
    data = one_done.data_dir
    (data / "shard-00002.tar").write_bytes(b"cut")
    gone = [left(data, *each) for each in GONE]
    kept = [left(data, *each) for each in KEPT] + [data / name for name in NOT_OURS]
    for path in kept[len(KEPT) :]:
        path.touch()
        os.utime(path, (0, 0))
    folders = [data / f".tokenizer{number}.node-1.site-123-0a1b2c3d.tmp" for number in range(2)]
    for folder in folders:
        folder.mkdir()
        (folder / "inside").write_bytes(b"12345")
        os.utime(folder / "inside", (0, 0))
        os.utime(folder, (0, 0))
    os.utime(folders[1] / "inside")  # still being written
    gone, kept = [*gone, folders[0]], [*kept, folders[1]]
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "file").write_bytes(b"precious")
    link = data / ".shard-00001.tar.h-1-0a1b2c3d.tmp"
    link.symlink_to(tmp_path / "precious")
    os.utime(link, (0, 0), follow_symlinks=False)
    for dry_run in (True, None):
        one_done.main("clean", data, dry_run=dry_run).ends(0, "8 files", f"{folders[0]} (5 B)")
        assert {path.exists() for path in gone} == {dry_run is True}
    assert [path for path in kept if not path.exists()] == []
    assert not link.is_symlink()
    assert (tmp_path / "precious" / "file").read_bytes() == b"precious"


def test_clean_leaves_a_temporary_folder_that_is_nested_deeper_than_ours(one_done: World) -> None:
    """However deep it is: no recursion fails on it, and all others are removed."""
    data = one_done.data_dir
    folder = data / ".index.json.node-1-0a1b2c3d.tmp"
    nested = [folder]
    for _ in range(1200):
        nested.append(nested[-1] / "a")
    for path in nested:
        path.mkdir()
    os.utime(folder, (0, 0))
    other = left(data, ".plan.json", 25)
    try:
        ended = one_done.main("clean", data).ends(73, folder)
        assert "Traceback" not in ended.text
        assert (folder / "a" / "a").exists()
        assert not other.exists()
    finally:
        for path in reversed(nested):  # pytest's own removal is recursive
            path.rmdir()


def test_clean_removes_only_old_temporaries_if_there_is_no_plan(tmp_path: Path) -> None:
    empty = World(tmp_path)
    old, young = left(tmp_path, ".plan.json", 25), left(tmp_path, ".shard-00000.tar", 0)
    assert empty.main("clean", tmp_path).code == 0
    assert (old.exists(), young.exists()) == (False, True)
    assert empty.main("clean", empty.raw_dir).code == 66, "not a data set"


@pytest.mark.parametrize(("call", "code"), [("unlink", 73), ("stat", 73), ("listdir", 74)])
def test_clean_names_a_temporary_that_it_cannot_remove_or_list(
    one_done: World, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    mine = left(one_done.data_dir, ".shard-00002.tar", 25)
    others = left(one_done.data_dir, "quarantine/.shard-00000.jsonl", 25)
    hidden = others.parent if call == "listdir" else others
    real = getattr(os, call)

    def refuse(wanted: Any, *args: Any, **options: Any) -> Any:
        folder = options.get("dir_fd", wanted if isinstance(wanted, int) else None)
        path = Path() if folder is None else Path(f"/proc/self/fd/{folder}").readlink()
        if path / ("" if isinstance(wanted, int) else wanted) == hidden:
            raise PermissionError(13, "Permission denied", str(wanted))
        return real(wanted, *args, **options)

    monkeypatch.setattr(os, call, refuse)
    one_done.main("clean", one_done.data_dir).ends(code, hidden)
    monkeypatch.undo()
    assert others.exists()
    assert mine.exists() == (call == "listdir"), "an unreadable folder stops it before it removes anything"
