"""A shard that verify found wrong is done for nobody, and an error of reading says nothing of a shard.

tests/oracle/test_done.py says what verify finds; here every reader is asked what it makes of a finding.
"""

from __future__ import annotations

import errno
import functools
import hashlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import BrokenShard, ShardprepError, get_llama3_dataloader
from tests.forged import rewrite_json
from tests.project.conftest import Fail
from tests.world import World

WRONG = 1  # the shard that is found wrong, of three


@functools.cache
def made(root: Path) -> World:
    return World(root).raw({"a.txt": "a line of text\n" * 90}).make(num_shards=3)


@pytest.fixture
def whole(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A copy of a verified data set."""
    original = made(tmp_path_factory.getbasetemp() / "done everywhere")
    shutil.copytree(original.data_dir, tmp_path / "data")
    return World(tmp_path, raw_dir=original.raw_dir)


def flip_id(world: World) -> None:
    """Flip a bit of a token id: of the same size, and it still is a list of ids."""
    path = world.data_dir / f"shard-{WRONG:05d}.tar"
    tar = bytearray(path.read_bytes())
    tar[tar.index(b"[", 512) + 1] ^= 1
    path.write_bytes(tar)


@pytest.fixture
def wrong(whole: World) -> World:
    """The same, with a flipped id that verify has found."""
    flip_id(whole)
    assert whole.main("verify", whole.data_dir).code == 65
    return whole


def load(world: World, shards: str = "") -> int:
    """Batches of an epoch, or the exit code of the error that refuses the data set."""
    try:
        with get_llama3_dataloader(str(world.data_dir / shards), batch_size=4, num_workers=0) as loader:
            return -sum(1 for _ in loader)
    except ShardprepError as error:
        return error.exit_code


def export(to: str, world: World) -> int:
    out = world.data_dir.with_name(f"exported_{to}")
    code = world.main("export", world.data_dir, to=to, output_dir=out).code
    assert code == 0 or not [*out.glob("*.bin"), *out.glob("*.arrow")]
    return code


def stage(world: World) -> int:
    to = world.data_dir.with_name("staged")
    code = world.main("stage", world.data_dir, to=to).code
    assert code == 0 or not list(to.rglob(f"shard-{WRONG:05d}.tar"))
    return code


def status(world: World) -> dict[str, Any]:
    ended = world.main("status", world.data_dir, json=True)
    assert ended.code == 0, ended.text
    told: dict[str, Any] = json.loads(ended.out)
    return told


READERS: dict[str, Callable[[World], int]] = {
    "load": load,
    "load by a pattern": functools.partial(load, shards="shard-*.tar"),
    "nanogpt": functools.partial(export, "nanogpt"),
    "megatron": functools.partial(export, "megatron"),
    "hf": functools.partial(export, "hf"),
    "stage": stage,
    "verify --fast": lambda world: world.main("verify", world.data_dir, fast=True).code,
}


@pytest.mark.parametrize("has_index", [False, True])
@pytest.mark.parametrize("reader", READERS)
def test_every_reader_refuses_a_shard_that_verify_found_wrong(
    whole: World, reader: str, has_index: bool
) -> None:
    """Beside an index, too: verify was killed, or the index came back with a backup."""
    index = (whole.data_dir / "index.json").read_bytes()
    flip_id(whole)
    assert whole.main("verify", whole.data_dir).code == 65
    assert not (whole.data_dir / "index.json").exists()
    if has_index:
        (whole.data_dir / "index.json").write_bytes(index)
    assert READERS[reader](whole) == 65
    told = status(whole)
    assert (told["done"], told["wrong"]) == ("0,2", "1")


def test_the_loader_takes_the_other_shards_where_these_alone_are_named(wrong: World) -> None:
    assert load(wrong, "shard-0000{0,2}.tar") < 0


def test_once_it_is_made_anew_everybody_takes_it(wrong: World) -> None:
    wrong.run(WRONG)
    assert READERS["nanogpt"](wrong) == READERS["stage"](wrong) == 0
    assert load(wrong) < 0
    wrong.verify()


def test_no_flipped_bit_of_the_findings_makes_a_wrong_shard_count_as_done(wrong: World) -> None:
    path = wrong.data_dir / "findings.json"
    manifest = (wrong.data_dir / f"shard-{WRONG:05d}.json").read_bytes()
    before, chance = path.read_bytes(), random.Random(1)
    for _ in range(24):
        place, bit = chance.randrange(len(before)), chance.randrange(8)
        path.write_bytes(before[:place] + bytes([before[place] ^ 1 << bit]) + before[place + 1 :])
        ended = wrong.main("status", wrong.data_dir, json=True)
        assert ended.code == 65 or json.loads(ended.out)["done"] == "0,2", (place, bit)
        assert load(wrong) > 0, (place, bit)
        # What cannot be read is no reason to make a shard again, either.
        assert wrong.main("shard", shard_id=WRONG, output_dir=wrong.data_dir).code == 65, (place, bit)
        assert (wrong.data_dir / f"shard-{WRONG:05d}.json").read_bytes() == manifest


@pytest.mark.parametrize("content", ["", "{", "[]", '{"findings": 3}', "\0" * 99])
def test_findings_that_cannot_be_read_are_refused_and_verify_writes_them_anew(
    wrong: World, content: str
) -> None:
    (wrong.data_dir / "findings.json").write_text(content)
    with pytest.raises(BrokenShard) as found:
        get_llama3_dataloader(wrong.data_dir, batch_size=4, num_workers=0)
    assert "findings.json" in str(found.value)
    assert wrong.main("status", wrong.data_dir).code == 65
    assert READERS["verify --fast"](wrong) == 65, "it cannot know what is wrong"
    assert wrong.main("verify", wrong.data_dir).code == 65
    assert status(wrong)["wrong"] == "1"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("shard", "1"), ("shard", -1), ("shard", 2**70), ("shard", None), ("shard", True), ("shard", 1.0),
        ("exit_code", "65"), ("exit_code", None), ("message", 3), ("message", ["x"]), ("message", None),
        ("manifest_sha256", 7), ("manifest_sha256", "x"), ("check", "never"),
    ],
)  # fmt: skip
def test_findings_of_wrong_types_are_refused_in_words_though_the_hash_is_right(
    wrong: World, key: str, value: object
) -> None:
    rewrite_json(wrong.data_dir / "findings.json", **{f"findings.0.{key}": value})
    asking = [("status", wrong.data_dir), ("report", wrong.data_dir), ("retry", wrong.data_dir)]
    asking += [("shard", "--shard_id", 1, "--output_dir", wrong.data_dir)]  # type: ignore[list-item]
    for words in asking:
        ended = wrong.main(*words)
        assert (ended.code, "findings.json" in ended.err) == (65, True), (words, ended.text)
    assert READERS["nanogpt"](wrong) == load(wrong) == 65


def test_a_finding_of_a_deep_look_stands_until_it_looks_again_or_the_shard_is_made_anew(whole: World) -> None:
    """Another id, with right hashes: only the input tells that it is wrong."""
    tar, manifest = (whole.data_dir / f"shard-{WRONG:05d}.{suffix}" for suffix in ("tar", "json"))
    good = tar.read_bytes(), manifest.read_bytes()
    flip_id(whole)
    rewrite_json(manifest, **{"tar.sha256": hashlib.sha256(tar.read_bytes()).hexdigest()})
    whole.verify()
    assert whole.main("verify", whole.data_dir, deep=3).code == 65
    for words in ({}, {"fast": True}, {"deep": 1}):
        assert whole.main("verify", whole.data_dir, **words).code == 65
        assert status(whole)["wrong"] == "1"
    for path, content in zip((tar, manifest), good, strict=True):
        path.write_bytes(content)
    whole.verify()  # it has another manifest


# Errors of reading. ---------------------------------------------------------------------------------------


ERRORS = ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EACCES", "ETIMEDOUT", "ENODEV")


@pytest.mark.parametrize(
    ("error", "suffix"),
    [
        *((error, "tar") for error in ERRORS),
        *((error, end) for error in ERRORS[:2] for end in ("idx", "json")),
    ],
)
def test_an_error_of_reading_says_nothing_of_the_shard(
    whole: World, fail: Fail, error: str, suffix: str
) -> None:
    before = (whole.data_dir / "index.json").read_bytes()
    fail("open", f"shard-00001.{suffix}", getattr(errno, error))
    ended = whole.main("verify", whole.data_dir)
    assert (ended.code, f"shard-00001.{suffix}" in ended.err) == (74, True)
    assert not (whole.data_dir / "findings.json").exists()
    assert (whole.data_dir / "index.json").read_bytes() == before


def test_what_is_wrong_is_written_though_another_shard_cannot_be_read(whole: World, fail: Fail) -> None:
    flip_id(whole)
    fail("open", "shard-00002.tar", errno.EIO)
    assert whole.main("verify", whole.data_dir).code == 65
    found = json.loads((whole.data_dir / "findings.json").read_bytes())["findings"]
    assert [each["shard"] for each in found] == [WRONG]


def test_a_finding_of_a_shard_that_cannot_be_read_now_stands(
    wrong: World, fail: Fail, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail("open", "shard-00001.tar", errno.EIO)
    assert wrong.main("verify", wrong.data_dir).code == 74
    monkeypatch.undo()
    assert status(wrong)["wrong"] == "1"


def test_a_manifest_that_cannot_be_read_is_no_missing_shard(whole: World, fail: Fail) -> None:
    (whole.data_dir / "index.json").unlink()
    tar = whole.data_dir / f"shard-{WRONG:05d}.tar"
    before = tar.stat().st_mtime_ns
    fail("open", "shard-00001.json", errno.EACCES)
    ended = whole.main("status", whole.data_dir)
    assert (ended.code, "shard-00001.json" in ended.err) == (74, True)
    assert whole.main("run", whole.data_dir).code == load(whole) == 74
    assert tar.stat().st_mtime_ns == before, "it is not made again"
