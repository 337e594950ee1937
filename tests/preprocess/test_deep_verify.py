"""``verify --deep``: shards made again find what agrees with itself, but not with the input."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.chat_sets import TAGGED, chat_model, conversations, write_chats
from tests.world import World, hostile_text

if TYPE_CHECKING:
    from tests.conftest import Prep

FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "digests": True},
    "packed": {"record": "packed", "seq_len": 64},
    "best_fit": {"record": "packed", "seq_len": 64, "pack": "best_fit"},
}


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("name", FORMS)
def test_right_shards_are_equal_and_nothing_is_written(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({"a.txt": hostile_text(90), "b.txt": hostile_text(50, 1)})
    world.make(num_shards=4, **FORMS[name])
    before = contents(world.data_dir)
    told = [world.main("verify", world.data_dir, "--deep", 2).out for _ in range(2)]
    assert told[0] == told[1], "the same shards each time"
    assert re.search(r"\(\d,\d\)|\(\d-\d\)", told[0])
    assert world.main("verify", world.data_dir, "--deep", 0).code == 2
    assert contents(world.data_dir) == before


@pytest.mark.parametrize("change", ["a line lost", "a letter altered", "an id altered"])
def test_what_was_read_wrongly_when_a_shard_was_made_is_found_though_all_hashes_agree(
    tmp_path: Path, change: str
) -> None:
    """A worker notices a change of its input by size, mtime and three samples; this one is behind these."""
    lines = [json.dumps({"id": f"id {n:05d}", "text": f"line {n:05d} of a file"}) + "\n" for n in range(8000)]
    world = World(tmp_path).raw({"a.jsonl": "".join(lines)}).plan(num_shards=1, id_field="id")
    path, wrong = world.raw_dir / "a.jsonl", [*lines]
    times = path.stat()
    wrong[2500] = {
        "a line lost": " " * (len(lines[2500]) - 1) + "\n",
        "a letter altered": lines[2500].replace("of a file", "of a tile"),
        "an id altered": lines[2500].replace("id 02500", "id 0250x"),
    }[change]
    path.write_text("".join(wrong))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    world.run()
    path.write_text("".join(lines))
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    world.verify()  # the hashes agree
    ended = world.main("verify", world.data_dir, "--deep", 1)
    assert ended.code == 65, ended.text
    assert "--shard_id 0" in ended.err
    assert ("ids/shard-00000.jsonl" in ended.err) == (change != "a letter altered")
    assert not [item.name for item in world.data_dir.iterdir() if item.name.startswith(".")]
    assert world.main("verify", world.data_dir).code == 65, "it stands until the shard is made anew"
    world.run()
    world.verify(deep=1)


@pytest.mark.processes
def test_conversations_are_made_again_with_what_was_left_out(prep: Prep, tmp_path: Path) -> None:
    model = chat_model(prep.model_dir, tmp_path / "model", TAGGED)
    world = World(tmp_path, tokenizer=model, raw_dir=write_chats(tmp_path / "raw", conversations(40)))
    with (world.raw_dir / "chats.jsonl").open("a") as file:
        file.write('{"messages": []}\n{"messages": [{"role": "elf", "content": ""}]}\n{"messages": 1}\n\n')
    world.make(record="chat", seq_len=64, id_field="id", max_bad_fraction=0.5).verify(deep=2)


def test_an_input_that_moved_is_named_and_one_that_is_gone_or_changed_refused(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "one\ntwo\n"}).make()
    moved = world.raw_dir.rename(tmp_path / "moved")
    assert world.main("verify", world.data_dir, "--deep").code == 66
    assert world.main("verify", world.data_dir, "--deep", "--input_dir", moved).code == 0
    (moved / "a.txt").write_text("one\ntwo\nmore\n")
    assert world.main("verify", world.data_dir, "--deep", "--input_dir", moved).code == 78
