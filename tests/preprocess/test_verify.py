"""``verify`` writes index.json for a whole data set, and names each broken shard with what mends it."""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from shardprep.format.idx import read_idx
from shardprep.format.plan import need_plan
from tests.children import run_child
from tests.conftest import forge_shard, seal
from tests.world import World, hostile_text

NUM_SHARDS = 5


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A data set of which every shard has all kinds of files, and one shard has left a line out."""
    folder = tmp_path_factory.mktemp("made")
    records = [{"id": str(number), "text": f"the kettle {number}"} for number in range(100)]
    lines = "".join(f"line {number} of a file\n" for number in range(150))
    world = World(folder).raw({"a.jsonl": records, "b.txt": lines.encode() + b"\xff\n"})
    return world.plan(num_shards=NUM_SHARDS, id_field="id", digests=True, max_bad_fraction=0.5).run()


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy to break, in a folder whose name needs quotes in a shell."""
    shutil.copytree(made.data_dir, tmp_path / "my data")
    return World(tmp_path, raw_dir=made.raw_dir, data_dir=tmp_path / "my data")


def contents(folder: Path) -> dict[str, Any]:
    """Return all files of a data set; of manifests what does not vary between equal shards."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and "jobs" not in path.parts and path.name != "index.json":
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
            if re.fullmatch(r"shard-\d+\.json", path.name):
                manifest = json.loads(path.read_bytes())
                del manifest["run"]
                found[path.name] = manifest
    return found


def flip_a_bit(path: Path, place: int | None = None) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2 if place is None else place] ^= 4
    path.write_bytes(data)


def edit(path: Path, old: str, new: str) -> None:
    text = path.read_text(encoding="utf-8")
    assert re.search(old, text)
    path.write_text(re.sub(old, new, text, count=1), encoding="utf-8")
    seal(path)


def test_a_whole_data_set_gets_an_index_of_its_shards_equal_for_equal_data(world: World, made: World) -> None:
    world.verify()
    manifests = [json.loads(path.read_bytes()) for path in sorted(world.data_dir.glob("shard-*.json"))]
    index = json.loads((world.data_dir / "index.json").read_bytes())
    assert index["spec"] == manifests[0]["spec"]
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["shards"]]
    assert len(rows) == NUM_SHARDS
    for row, manifest in zip(rows, manifests, strict=True):
        assert row["tar_sha256"] == manifest["tar"]["sha256"][:16]
        assert row["tar_bytes"] == manifest["tar"]["num_bytes"]
        assert row["num_documents"] == manifest["counts"]["num_documents"]
        assert row["num_tokens"] == manifest["counts"]["num_tokens"]
    other = World(world.raw_dir.parent, raw_dir=made.raw_dir, data_dir=world.data_dir.parent / "other")
    options: dict[str, Any] = {"id_field": "id", "digests": True, "max_bad_fraction": 0.5}
    other.plan(num_shards=NUM_SHARDS, **options).run(4, 2, 0, 1, 3, engine="tokenizers").verify()
    assert (other.data_dir / "index.json").read_bytes() == (world.data_dir / "index.json").read_bytes()


Break = Callable[[Path], object]
# By the file that is named: what is done to it, and the exit code.
BROKEN: dict[str, tuple[str, Break, int]] = {
    "tar gone": ("shard-00003.tar", Path.unlink, 66),
    "idx gone": ("shard-00003.idx", Path.unlink, 66),
    "manifest gone": ("shard-00003.json", Path.unlink, 66),
    "ids gone": ("ids/shard-00003.jsonl", Path.unlink, 66),
    "digests gone": ("digests/shard-00003.digests", Path.unlink, 66),
    "quarantine gone": ("quarantine/shard-00004.jsonl", Path.unlink, 66),
    "tar cut short": ("shard-00003.tar", lambda path: os.truncate(path, 5120), 65),
    "idx cut short": ("shard-00003.idx", lambda path: os.truncate(path, 64), 65),
    "manifest cut short": ("shard-00003.json", lambda path: os.truncate(path, 99), 65),
    "bit of the tar": ("shard-00003.tar", flip_a_bit, 65),
    "bit of the idx": ("shard-00003.idx", lambda path: flip_a_bit(path, 70), 65),
    "bit of the ids": ("ids/shard-00003.jsonl", flip_a_bit, 65),
    "bit of the digests": ("digests/shard-00003.digests", flip_a_bit, 65),
    "bit of the quarantine": ("quarantine/shard-00004.jsonl", flip_a_bit, 65),
    "manifest of another shard": (
        "shard-00003.json", lambda path: shutil.copyfile(path.with_name("shard-00001.json"), path), 78
    ),
    "manifest of another plan": (
        "shard-00003.json", lambda path: edit(path, '"plan_id": "....', '"plan_id": "abcd'), 78
    ),
    "manifest of another spec": (
        "shard 00003", lambda path: edit(path, '"append_eos": false', '"append_eos": true'), 78
    ),
    "other input bytes": (
        "shard 00003", lambda path: edit(path, r'"input_bytes": \d+', '"input_bytes": 7'), 65
    ),
    "other counts": ("shard 00003", lambda path: edit(path, r'"num_tokens": \d+', '"num_tokens": 7'), 65),
}  # fmt: skip


@pytest.mark.processes
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_shard_is_named_with_a_command_that_mends_it(world: World, name: str) -> None:
    before = contents(world.data_dir)
    named, damage, code = BROKEN[name]
    damage(world.data_dir / (named if "." in named else "shard-00003.json"))
    ended = world.main("verify", world.data_dir)
    assert ended.code == code, ended.text
    assert named in ended.err
    assert not (world.data_dir / "index.json").exists()
    command = re.search(r"run: (.*shardprep .*)", ended.err)
    assert command, ended.err
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run_child(["sh", "-c", command[1]], env={**os.environ, "PATH": path})
    world.verify()
    assert contents(world.data_dir) == before


def test_every_broken_shard_is_named(world: World) -> None:
    (world.data_dir / "shard-00000.tar").unlink()
    flip_a_bit(world.data_dir / "shard-00002.tar")
    os.truncate(world.data_dir / "shard-00003.idx", 64)
    ended = world.main("verify", world.data_dir)
    assert ended.code == 66
    named = set(re.findall(r"shard (\d{5})", ended.err))
    assert named == {"00000", "00002", "00003"}


def test_the_fast_tier_sees_sizes_but_no_bits(world: World) -> None:
    flip_a_bit(world.data_dir / "shard-00003.tar")
    assert world.main("verify", world.data_dir, "--fast").code == 0
    assert world.main("verify", world.data_dir).code == 65
    os.truncate(world.data_dir / "shard-00003.tar", 1024)
    assert world.main("verify", world.data_dir, "--fast").code == 65


@pytest.mark.parametrize("damage", ["past the end", "out of order"])
def test_an_idx_that_names_other_documents_than_its_shards_is_seen_though_hashes_are_right(
    world: World, damage: str
) -> None:
    records = read_idx(world.data_dir, need_plan(world.data_dir).spec, 3)
    if damage == "past the end":
        records["source_offset"][0] = 10**9
    else:
        records["source_offset"][:2] = records["source_offset"][1::-1]
    forge_shard(world.data_dir, 3, records=records)
    ended = world.main("verify", world.data_dir)
    assert (ended.code, "shard 00003" in ended.err) == (65, True)


def num_read_bytes() -> int:
    """Return the bytes that the system calls of this process have read so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize(
    "form", [{}, {"token_format": "npy"}, {"record": "packed", "seq_len": 1024}], ids=str
)
def test_each_tar_is_read_once_by_verify(tmp_path: Path, form: dict[str, Any]) -> None:
    world = World(tmp_path).raw({"a.txt": 40 * hostile_text(150)})
    world.plan(num_shards=2, **form).run()
    num_bytes = sum(path.stat().st_size for path in world.data_dir.glob("*.tar"))
    begin = num_read_bytes()
    world.verify()
    assert num_bytes <= num_read_bytes() - begin < 1.5 * num_bytes
