"""``verify`` writes index.json for a whole data set, and names each broken shard with what mends it.

tests/oracle/test_done.py damages and forges the files of shards; here stand the side files, the index, and
``--deep``, which makes shards again and finds what agrees with itself, but not with the input.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.chat_sets import TAGGED, conversations, write_chats
from tests.world import World, call_main, hostile_text, save_tokenizer

OPTIONS: dict[str, Any] = {"id_field": "id", "digests": True, "max_bad_fraction": 0.5, "num_shards": 5}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A data set of which every shard has all kinds of files, and one shard has left a line out."""
    records = [{"id": str(number), "text": f"the kettle {number}"} for number in range(100)]
    lines = "".join(f"line {number} of a file\n" for number in range(150)).encode()
    world = World(tmp_path_factory.mktemp("made")).raw({"a.jsonl": records, "b.txt": lines + b"\xff\n"})
    return world.plan(**OPTIONS).run()


@pytest.fixture
def world(made: World, tmp_path: Path) -> World:
    """A copy to break, in a folder whose name needs quotes in a shell."""
    return made.copy(tmp_path / "my folder")


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.write_bytes(data)


def test_a_whole_data_set_gets_an_index_of_its_shards_equal_for_equal_data(
    world: World, tmp_path: Path
) -> None:
    world.verify()
    index = json.loads((world.data_dir / "index.json").read_bytes())
    assert index["spec"] == world.manifests()[0]["spec"]
    rows = [dict(zip(index["columns"], row, strict=True)) for row in index["shards"]]
    for row, manifest in zip(rows, world.manifests(), strict=True):
        assert row["tar_sha256"] == manifest["tar"]["sha256"][:16]
        assert row["tar_bytes"] == manifest["tar"]["num_bytes"]
        assert row["num_documents"] == manifest["counts"]["num_documents"]
        assert row["num_tokens"] == manifest["counts"]["num_tokens"]
    other = World(tmp_path / "other", raw_dir=world.raw_dir).plan(**OPTIONS)
    other.run(4, 2, 0, 1, 3, engine="tokenizers").verify()
    assert (other.data_dir / "index.json").read_bytes() == (world.data_dir / "index.json").read_bytes()


SIDE_FILES = ("ids/shard-00003.jsonl", "digests/shard-00003.digests", "quarantine/shard-00004.jsonl")
BROKEN = [(name, *how) for name in SIDE_FILES for how in ((Path.unlink, 66), (flip_a_bit, 65))]


@pytest.mark.parametrize(("named", "damage", "code"), BROKEN)
def test_a_shard_of_a_broken_side_file_is_named_with_a_command_that_mends_it(
    world: World, named: str, damage: Callable[[Path], object], code: int
) -> None:
    before = world.contents()
    damage(world.data_dir / named)
    ended = world.main("verify", world.data_dir)
    assert (ended.code, Path(named).stem.removeprefix("shard-") in ended.err) == (code, True), ended.text
    assert not (world.data_dir / "index.json").exists()
    for command in re.search(r"run: (.*shardprep .*)", ended.err)[1].split(" && "):  # type: ignore[index]
        program, *words = shlex.split(command)
        if program == "rm":
            Path(*words).unlink()
        else:
            assert call_main(*words).code == 0
    world.verify()
    assert world.contents() == before


def test_every_broken_shard_is_named_and_the_fast_tier_sees_sizes_but_no_bits(
    world: World, tmp_path: Path
) -> None:
    flip_a_bit(world.data_dir / "shard-00002.tar")
    assert world.main("verify", world.data_dir, "--fast").code == 0
    (world.data_dir / "shard-00000.tar").unlink()
    os.truncate(world.data_dir / "shard-00003.idx", 64)
    assert world.main("verify", world.data_dir, "--fast").code == 66
    ended = world.main("verify", world.data_dir)
    assert ended.code == 66
    assert set(re.findall(r"shard (\d{5})", ended.err)) == {"00000", "00002", "00003"}
    many = World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=12)
    ended = many.main("verify", many.data_dir)
    assert (ended.code, "5-11" in ended.err) == (66, True), "of many a range"


def num_read_bytes() -> int:
    """Return the bytes that the system calls of this process have read so far."""
    return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]


@pytest.mark.parametrize("form", [{}, {"record": "packed", "seq_len": 1024}], ids=str)
def test_each_tar_is_read_once_by_verify(tmp_path: Path, form: dict[str, Any]) -> None:
    world = World(tmp_path).raw({"a.txt": 40 * hostile_text(150)}).plan(**form).run()
    num_bytes = sum(path.stat().st_size for path in world.data_dir.glob("*.tar"))
    begin = num_read_bytes()
    world.verify()
    assert num_bytes <= num_read_bytes() - begin < 1.5 * num_bytes


# --deep -------------------------------------------------------------------------------------------------

DEEP_FORMS: list[dict[str, Any]] = [
    {"token_format": "npy", "keep_text": False, "digests": True},
    {"record": "packed", "seq_len": 64},
    {"record": "packed", "seq_len": 64, "pack": "best_fit"},
]


@pytest.mark.parametrize("form", DEEP_FORMS, ids=str)
def test_right_shards_are_equal_and_nothing_is_written(tmp_path: Path, form: dict[str, Any]) -> None:
    world = World(tmp_path).raw({"a.txt": hostile_text(90), "b.txt": hostile_text(50, 1)})
    world.make(num_shards=4, **form)
    before = {path: path.read_bytes() for path in world.data_dir.rglob("*") if path.is_file()}
    told = [world.main("verify", world.data_dir, "--deep", 2).out for _ in range(2)]
    assert told[0] == told[1], "the same shards each time"
    assert {path: path.read_bytes() for path in world.data_dir.rglob("*") if path.is_file()} == before


@pytest.mark.slow
@pytest.mark.parametrize("change", ["a line lost", "a letter altered", "an id altered"])
def test_what_was_read_wrongly_when_a_shard_was_made_is_found_though_all_hashes_agree(
    tmp_path: Path, change: str
) -> None:
    """A worker notices a change of its input by size, mtime and three samples; this one is behind these."""
    texts = [f"line {n:05d} of a file, with words behind it" + " x y" * 100 for n in range(800)]
    lines = [json.dumps({"id": f"id {n:05d}", "text": text}) + "\n" for n, text in enumerate(texts)]
    world = World(tmp_path).raw({"a.jsonl": "".join(lines)})
    world.plan(num_shards=1, id_field="id", digests=True)
    path, wrong = world.raw_dir / "a.jsonl", [*lines]
    times = path.stat()
    wrong[250] = {
        "a line lost": " " * (len(lines[250]) - 1) + "\n",
        "a letter altered": lines[250].replace("of a file", "of a tile"),
        "an id altered": lines[250].replace("id 00250", "id 0025x"),
    }[change]
    for content in (wrong, lines):
        path.write_text("".join(content))
        os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        if content is wrong:
            world.run()
    world.verify()  # the hashes agree
    ended = world.main("verify", world.data_dir, "--deep", 1)
    assert (ended.code, "--shard_id 0" in ended.err) == (65, True), ended.text
    assert ("ids/shard-00000.jsonl" in ended.err) == (change != "a letter altered")
    assert ("shard-00000.digests" in ended.err) == (change != "an id altered")
    assert not world.temporaries()
    assert world.main("verify", world.data_dir).code == 65, "it stands until the shard is made anew"
    world.run().verify(deep=1)


@pytest.mark.processes
def test_conversations_are_made_again_with_what_was_left_out(tmp_path: Path) -> None:
    world = World(tmp_path, tokenizer=save_tokenizer(tmp_path / "model", TAGGED))
    with (write_chats(world.raw_dir, conversations(40)) / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": [{"role": "elf", "content": ""}]}\n{"messages": 1}\n\n')
    world.make(record="chat", seq_len=64, id_field="id", max_bad_fraction=0.5).verify(deep=2)
