"""Whatever stands in a file of the contract, or in its place, has an error that names it, or no effect.

tests/faults flips bits of every file and puts wrong values at every place, by every command.
"""

from __future__ import annotations

import errno
import functools
import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import ShardprepError
from tests.forged import rewrite_json, rewrite_plan
from tests.word_tokenizers import save_word_tokenizer
from tests.world import Ended, World, hostile_text


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A verified data set of two small shards. Never written to."""
    world = World(tmp_path_factory.mktemp("whole"))
    return world.raw({"a.txt": hostile_text(40), "b.txt": b"\xff\nsecond file\n"}).make(max_bad_fraction=0.9)


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    """A copy to break."""
    return whole.copy(tmp_path)


def load(world: World) -> tuple[int, str]:
    """The exit code of the error by which a loader refuses the data set, and its words."""
    try:
        with world.loader(batch_size=1) as loader:
            list(loader)
    except ShardprepError as error:
        return error.exit_code, str(error)
    return 0, ""


def verify(world: World, **options: Any) -> tuple[int, str]:
    ended = world.main("verify", world.data_dir, **options)
    return ended.code, ended.err


# File -> the command that reads it, and what it says.
READERS: dict[str, Callable[[World], tuple[int, str]]] = {
    "plan.json": lambda world: verify(world, fast=True),
    "index.json": load,
    "shard-00000.json": lambda world: verify(world, fast=True),
}
JSON_FILES = ("plan.json", "index.json", "shard-00000.json")


CONTENTS: dict[str, bytes] = {
    "empty": b"",
    "not UTF-8": b"\xff\xfe{}",
    "nested deep": b"[" * 200_000,
    "nested deep and closed": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "NaN": b'{"format": NaN}',
    "a number of a million digits": b'{"format": ' + b"9" * 1_000_000 + b"}",
    "version of another type": b'{"format": "shardprep-manifest", "version": [2]}',
    "no object": b"3",
}


@pytest.mark.parametrize("name", JSON_FILES)
def test_what_is_no_json_of_ours_is_refused(world: World, name: str) -> None:
    for content in CONTENTS.values():
        (world.data_dir / name).write_bytes(content)
        code, said = READERS[name](world)
        assert (code in {65, 78}, name in said) == (True, True), said


@pytest.mark.parametrize("name", JSON_FILES)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(world: World, name: str) -> None:
    path = world.data_dir / name
    for make in (os.mkfifo, Path.mkdir, lambda it: it.symlink_to("/dev/zero")):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        code, said = READERS[name](world)
        assert (code, name in said) == (65, True), said


@pytest.mark.parametrize("name", JSON_FILES[1:])  # of plan.json a reader takes the rows that it needs
def test_a_file_too_large_is_refused_before_it_is_read(world: World, name: str) -> None:
    os.truncate(world.data_dir / name, 1 << 40)
    code, said = READERS[name](world)
    assert (code, "1099511627776" in said) == (65, True), said


def test_the_loader_reads_an_index_again_after_an_error_that_goes_away(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, failures = os.open, [errno.EIO, errno.ESTALE]

    def open_(path: Any, *args: Any, **options: Any) -> int:
        if str(path).endswith("index.json") and failures:
            raise OSError(failures.pop(), "for a while")
        return real(path, *args, **options)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(time, "sleep", lambda _: None)
    assert load(world)[0] == 0
    assert not failures


def set_row(data: dict[str, Any], column: int) -> None:
    row = data["shards"][1]
    row[column] = 0 if row[column] != 0 else 7


INDEX_EDITS: dict[str, Callable[[dict[str, Any]], object]] = {
    **{f"column {column}": functools.partial(set_row, column=column) for column in (0, 1, 3, 4)},
    "another column": lambda data: data["columns"].__setitem__(0, "num_widgets"),
    "a shard too few": lambda data: data["spec"].update(num_shards=5),
    "more shards than can be": lambda data: data["spec"].update(num_shards=3_000_000_000),
}  # fmt: skip


@pytest.mark.parametrize("edit", INDEX_EDITS)
def test_an_index_that_does_not_agree_with_itself_is_refused(world: World, edit: str) -> None:
    path = world.data_dir / "index.json"
    data = json.loads(path.read_bytes())
    INDEX_EDITS[edit](data)
    path.write_text(json.dumps(data))
    rewrite_json(path)
    code, said = load(world)
    assert (code, "index.json" in said) == (65, True), said


def test_verify_names_a_manifest_in_whose_run_a_bit_flipped(world: World) -> None:
    """``run`` varies between equal shards, so the hash of the rest leaves it out: it has one of its own."""
    path = world.data_dir / "shard-00001.json"
    good = path.read_bytes()
    for found, flipped in ((b'"engine": "t', b'"engine": "u'), (b'"run_sha256"', b'"rUn_sha256"')):
        assert good.count(found) == 1
        path.write_bytes(good.replace(found, flipped))
        for fast in (True, None):
            code, said = verify(world, fast=fast)
            assert (code, str(path) in said) == (65, True)


@pytest.mark.processes
def test_every_command_names_a_changed_file_of_the_tokenizer_and_planning_again_puts_it_back(
    world: World,
) -> None:
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    good = path.read_bytes()
    path.write_bytes(good + b" ")  # as good a JSON, of equal ids
    (world.data_dir / "shard-00000.json").unlink()
    endings: list[Ended] = [
        world.main("verify", world.data_dir), world.main("verify", world.data_dir, fast=True),
        world.try_shard(0), world.main("run", world.data_dir, num_proc=1),
    ]  # fmt: skip
    for ended in endings:
        assert (ended.code, str(path) in ended.err) == (78, True)
    assert world.try_plan(num_shards=2, max_bad_fraction=0.9).code == 0
    assert path.read_bytes() == good
    assert world.temporaries() == []
    (path.parent / "added_tokens.json").write_text("{}")
    assert verify(world)[0] == 78
    (path.parent / "added_tokens.json").unlink()
    path.unlink()
    assert world.try_shard(0).code == verify(world)[0] == 66


def test_a_tokenizer_without_a_plan_does_not_hold_a_folder(world: World, tmp_path: Path) -> None:
    save_word_tokenizer(tmp_path / "model", 50)
    other = World(tmp_path / "other", tokenizer=tmp_path / "model").raw({"a.txt": "a\n"}).plan()
    (other.data_dir / "plan.json").unlink()  # as a kill between the two leaves it
    other.tokenizer = world.tokenizer
    other.plan().run().verify()
    files = [it.data_dir / "tokenizer" / "tokenizer.json" for it in (other, world)]
    assert files[0].read_bytes() == files[1].read_bytes()


# plan.json. ---------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A plan of 1,500 shards, of two files each: its tables are in several blocks."""
    world = World(tmp_path_factory.mktemp("large"))
    world.raw({f"crawl/part-{number:07d}.txt": f"Line {number}.\nAnother.\n" for number in range(3000)})
    return world.plan(num_shards=1500, recursive=True)


@pytest.mark.slow
def test_a_task_opens_a_plan_once_and_reads_its_own_rows_alone(
    large: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = large.copy(tmp_path)
    opened, reads = list[int](), list[int]()
    real_open, real_preadv = os.open, os.preadv

    def open_(path: Any, *args: Any, **options: Any) -> int:
        handle = real_open(path, *args, **options)
        if str(path).endswith("plan.json"):
            opened.append(handle)
        return handle

    def preadv(handle: int, *args: Any) -> int:
        count = real_preadv(handle, *args)
        reads.append(count if Path(f"/proc/self/fd/{handle}").readlink().name == "plan.json" else 0)
        return count

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    size = (world.data_dir / "plan.json").stat().st_size
    assert size > 350_000
    assert world.try_shard(700, planned=True).code == 0
    assert len(opened) == 1
    assert 10_000 < sum(reads) < size / 2


@pytest.mark.slow
def test_damage_of_rows_is_refused_by_who_reads_them_and_no_other(large: World, tmp_path: Path) -> None:
    world = large.copy(tmp_path)
    path = world.data_dir / "plan.json"
    path.write_bytes(path.read_bytes().replace(b"part-0002999", b"part-0002990", 1))
    assert world.try_shard(0).code == 0
    for ended in (world.try_shard(1499), *(world.main(name, world.data_dir) for name in ("verify", "run"))):
        assert (ended.code, str(path) in ended.err) == (65, True)


# What stands in the head, and what takes its place: as a script that edits plans and their hash might do.
EDITS: dict[str, tuple[str, str, int]] = {
    "an option": ('"encoding":"utf-8"', '"encoding":"cp949"', 78),
    "an option that is no choice": ('"doc":"line"', '"doc":"page"', 65),
    "an option of another type": ('"recursive":false', '"recursive":[]', 65),
    "options that do not go together": ('"seq_len":0', '"seq_len":7', 65),
    "the tokenizer": ('"vocab_size":', '"vocab_size":1', 78),
    "a tokenizer's file outside": ('"tokenizer_files":{"', '"tokenizer_files":{"../', 65),
    "more rows than blocks": ('"num_rows":2', '"num_rows":2000', 65),
    "an unknown option that is used": ('"options":{', '"options":{"lowercase":true,', 78),
    "an unknown option that is not": ('"options":{', '"options":{"lowercase":false,', 0),
    "a cut behind the inputs": (',[2,0,0,""]]', ',[4,0,0,""]]', 65),
    "a cut before the last one": (',[2,0,0,""]]', ',[0,0,0,""]]', 65),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_plan_that_does_not_agree_with_itself_is_refused_though_its_hash_is_right(
    world: World, edit: str
) -> None:
    old, new, code = EDITS[edit]
    rewrite_plan(world.data_dir / "plan.json", old, new)
    found, said = verify(world)
    # Shards of the plan that stood there before are of another one: 78.
    assert (found, code == 0 or "plan.json" in said or "of plan " in said) == (code, True), said


@pytest.mark.slow
def test_a_plan_is_json_whose_first_line_is_the_head(large: World) -> None:
    raw = (large.data_dir / "plan.json").read_bytes()
    data, head = json.loads(raw), json.loads(raw.split(b"\n")[0] + b"}")
    assert (data["version"], data["plan_id"]) == (3, head["plan_id"])
    assert len(data["inputs"]) == 3000
    assert len(data["cuts"]) == 1501
    # As prep_array.sh reads it.
    assert raw[:400].startswith(b'{"format":"shardprep-plan","version":3,"plan_id":"')


# Which tokenizer is the plan's. -------------------------------------------------------------------------

SAME: dict[str, Callable[[Any], object]] = {
    "merges as strings": lambda it: it["model"].update(merges=[" ".join(m) for m in it["model"]["merges"]]),
    "no decoder": lambda it: it.update(decoder=None),
}
OTHER: dict[str, Callable[[Any], object]] = {
    "other merges": lambda it: it["model"]["merges"].reverse(),
    "ignore_merges": lambda it: it["model"].update(ignore_merges=True),
    "a token less": lambda it: it["added_tokens"].pop(),
    "no BOS": lambda it: it.update(post_processor=None),
}


@pytest.mark.parametrize("change", [*SAME, *OTHER])
def test_the_tokenizer_of_a_plan_is_known_by_what_decides_ids_and_nothing_else(
    world: World, tmp_path: Path, change: str
) -> None:
    model = Path(shutil.copytree(world.tokenizer, tmp_path / "model"))
    data = json.loads((model / "tokenizer.json").read_bytes())
    {**SAME, **OTHER}[change](data)
    (model / "tokenizer.json").write_text(json.dumps(data))
    assert world.try_shard(0, model_id=model).code == (0 if change in SAME else 78)
