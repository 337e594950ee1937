"""A shard that verify found wrong is done for nobody.

tests/oracle/test_done.py says what verify finds; here every reader is asked what it makes of a finding.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from loader import ShardprepError, get_llama3_dataloader
from tests.forged import rewrite_json
from tests.world import World

WRONG = 1  # the shard that is found wrong, of three


def flip_id(world: World) -> None:
    """Flip a bit of a token id: of the same size, and it still is a list of ids."""
    path = world.data_dir / f"shard-{WRONG:05d}.tar"
    tar = bytearray(path.read_bytes())
    tar[tar.index(b"[", 512) + 1] ^= 1
    path.write_bytes(tar)


@pytest.fixture
def wrong(world: World) -> World:
    """Three shards, of which verify has found one with a flipped id."""
    flip_id(world)
    assert code_of(world, "verify") == 65
    return world


def code_of(world: World, command: str, **options: Any) -> int:
    return world.main(command, world.data_dir, **options).code


def load(world: World, shards: str = "") -> int:
    """0 where an epoch has batches, or the exit code of the error that refuses the data set."""
    try:
        with get_llama3_dataloader(str(world.data_dir / shards), batch_size=4, num_workers=0) as loader:
            return 0 if list(loader) else 1
    except ShardprepError as error:
        return error.exit_code


def export(to: str, world: World) -> int:
    out = world.data_dir.with_name(f"exported_{to}")
    code = code_of(world, "export", to=to, output_dir=out)
    assert code == 0 or not [*out.glob("*.bin"), *out.glob("*.arrow")]
    return code


def stage(world: World) -> int:
    to = world.data_dir.with_name("staged")
    code = code_of(world, "stage", to=to)
    assert code == 0 or not list(to.rglob(f"shard-{WRONG:05d}.tar"))
    return code


def told(world: World) -> tuple[str, str]:
    """The shards that status calls done, and wrong."""
    ended = world.main("status", world.data_dir, json=True)
    assert ended.code == 0, ended.text
    state = json.loads(ended.out)
    return state["done"], state["wrong"]


READERS: dict[str, Callable[[World], int]] = {
    "load": load,
    "load by a pattern": functools.partial(load, shards="shard-*.tar"),
    **{to: functools.partial(export, to) for to in ("nanogpt", "megatron", "hf")},
    "stage": stage,
    "verify --fast": functools.partial(code_of, command="verify", fast=True),
}


@pytest.mark.parametrize("has_index", [False, True])
def test_every_reader_refuses_a_shard_that_verify_found_wrong(
    wrong: World, whole: World, has_index: bool
) -> None:
    """Beside an index, too: verify was killed, or the index came back with a backup."""
    assert not (wrong.data_dir / "index.json").exists()
    if has_index:
        (wrong.data_dir / "index.json").write_bytes((whole.data_dir / "index.json").read_bytes())
    assert {name: read(wrong) for name, read in READERS.items()} == dict.fromkeys(READERS, 65)
    assert told(wrong) == ("0,2", "1")
    assert load(wrong, "shard-0000{0,2}.tar") == 0, "where the others alone are named"
    wrong.run(WRONG)
    assert load(wrong) == export("nanogpt", wrong) == stage(wrong) == 0, "once it is made anew"
    wrong.verify()


def test_no_flipped_bit_of_the_findings_makes_a_wrong_shard_count_as_done(wrong: World) -> None:
    path = wrong.data_dir / "findings.json"
    manifest = (wrong.data_dir / f"shard-{WRONG:05d}.json").read_bytes()
    before, chance = path.read_bytes(), random.Random(1)
    for _ in range(24):
        place, bit = chance.randrange(len(before)), chance.randrange(8)
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        assert code_of(wrong, "status") == 65 or told(wrong)[0] == "0,2", (place, bit)
        assert load(wrong) == 65, (place, bit)
        # What cannot be read is no reason to make a shard again, either.
        assert wrong.try_shard(WRONG).code == 65, (place, bit)
        assert (wrong.data_dir / f"shard-{WRONG:05d}.json").read_bytes() == manifest


def test_findings_that_cannot_be_read_are_refused_and_verify_writes_them_anew(wrong: World) -> None:
    for content in ("", '{"findings": 3}', "\0" * 99):
        (wrong.data_dir / "findings.json").write_text(content)
        assert load(wrong) == code_of(wrong, "status") == 65
        assert code_of(wrong, "verify", fast=True) == 65, "it cannot know what is wrong"
        assert code_of(wrong, "verify") == 65
        assert told(wrong)[1] == "1"


WRONG_TYPES: dict[str, tuple[object, ...]] = {
    "shard": ("1", -1, 2**70, None, True, 1.0),
    "exit_code": ("65", None),
    "message": (3, ["x"], None),
    "manifest_sha256": (7, "x"),
    "check": ("never",),
}


def test_findings_of_wrong_types_are_refused_in_words_though_the_hash_is_right(wrong: World) -> None:
    path = wrong.data_dir / "findings.json"
    before = path.read_bytes()
    for key, value in ((key, value) for key, values in WRONG_TYPES.items() for value in values):
        path.write_bytes(before)
        rewrite_json(path, **{f"findings.0.{key}": value})
        ends = [wrong.main(command, wrong.data_dir) for command in ("status", "report", "retry")]
        for ended in (*ends, wrong.try_shard(WRONG)):
            assert (ended.code, "findings.json" in ended.err) == (65, True), (key, value, ended.text)
        assert export("nanogpt", wrong) == load(wrong) == 65, (key, value)
