"""Whatever stands in a file of the contract, or in its place, has an error that names it, or no effect.

tests/faults flips bits of every file and puts wrong values at every place, by every command.
"""

from __future__ import annotations

import functools
import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import ShardprepError, UnknownVersion
from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import rewrite_json, rewrite_plan
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, hostile_text, refuses


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


# File -> what reads it: its exit code, and what it says.
READERS: dict[str, Callable[[World], tuple[int, str]]] = {
    "plan.json": lambda world: verify(world, fast=True),
    "index.json": load,
    "shard-00000.json": lambda world: verify(world, fast=True),
}
NO_JSON_OF_OURS = (
    *(b"", b"\xff\xfe{}", b"3", b"[" * 200_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    *(b'{"format": NaN}', b'{"format": ' + b"9" * 1_000_000 + b"}"),
    b'{"format": "shardprep-manifest", "version": [2]}',
)
# What stands in the place of a file. The last is too large; of plan.json a reader takes the rows it needs.
OTHERS: list[Callable[[Path], object]] = [
    *(functools.partial(Path.write_bytes, data=content) for content in NO_JSON_OF_OURS),
    *(os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")),
    lambda path: (path.touch(), os.truncate(path, 1 << 40)),
]


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_of_ours_is_refused_and_not_waited_for(world: World, name: str) -> None:
    path = world.data_dir / name
    for put in OTHERS[: None if name != "plan.json" else -1]:
        path.rmdir() if path.is_dir() else path.unlink()
        put(path)
        code, said = READERS[name](world)
        assert (code in {65, 78}, name in said) == (True, True), said
    assert name == "plan.json" or "1099511627776" in said


# Place in index.json -> a value that the rest of it does not agree with.
INDEX_EDITS: dict[str, object] = {
    **{f"shards.1.{column}": 7 for column in (0, 1, 3, 4)},
    "columns.0": "num_widgets",
    "spec.num_shards": 5,  # a shard too few
    "spec.num_shards ": 3_000_000_000,  # more than can be
}


@pytest.mark.parametrize("place", INDEX_EDITS)
def test_an_index_that_does_not_agree_with_itself_is_refused(world: World, place: str) -> None:
    rewrite_json(world.data_dir / "index.json", **{place.strip(): INDEX_EDITS[place]})
    code, said = load(world)
    assert (code, "index.json" in said) == (65, True), said


def test_a_changed_tokenizer_is_named_and_put_back_by_planning_again(world: World) -> None:
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    good = path.read_bytes()
    path.write_bytes(good + b" ")  # as good a JSON, of equal ids
    (world.data_dir / "shard-00000.json").unlink()
    shard = world.try_shard(0)
    for code, said in (verify(world), verify(world, fast=True), (shard.code, shard.err)):
        assert (code, str(path) in said) == (78, True)
    world.plan(num_shards=2, max_bad_fraction=0.9)
    assert (path.read_bytes(), world.temporaries()) == (good, [])
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
    other.make()
    files = [it.data_dir / "tokenizer" / "tokenizer.json" for it in (other, world)]
    assert files[0].read_bytes() == files[1].read_bytes()


# plan.json. ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_task_reads_its_own_rows_of_a_plan_alone_and_damage_of_others_is_found_by_who_reads_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its tables, of 1,500 shards of two files each, are in several blocks."""
    world = World(tmp_path)
    world.raw({f"crawl/part-{number:07d}.txt": f"Line {number}.\nAnother.\n" for number in range(3000)})
    path = world.plan(num_shards=1500, recursive=True).data_dir / "plan.json"
    good = path.read_bytes()
    data, head = json.loads(good), json.loads(good.split(b"\n")[0] + b"}")
    assert (data["version"], data["plan_id"]) == (3, head["plan_id"]), "its first line is the head"
    assert (len(data["inputs"]), len(data["cuts"])) == (3000, 1501)
    opened, num_bytes = list[str](), list[int]()
    open_, preadv = os.open, os.preadv

    def noted_preadv(handle: int, *args: Any) -> int:
        count = preadv(handle, *args)
        num_bytes.append(count if os.path.samestat(os.fstat(handle), path.stat()) else 0)
        return count

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", lambda name, *rest: opened.append(str(name)) or open_(name, *rest))
        patch.setattr(os, "preadv", noted_preadv)
        assert world.try_shard(700, planned=True).code == 0
    assert opened.count(str(path)) == 1
    assert 10_000 < sum(num_bytes) < len(good) / 2

    path.write_bytes(good.replace(b"part-0002999", b"part-0002990", 1))
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
def test_a_plan_that_does_not_agree_with_itself_is_refused(world: World, edit: str) -> None:
    old, new, code = EDITS[edit]
    rewrite_plan(world.data_dir / "plan.json", old, new)
    found, said = verify(world)
    # Shards of the plan that stood there before are of another one: 78.
    assert (found, code == 0 or "plan.json" in said or "of plan " in said) == (code, True), said


# Which tokenizer is the plan's. -------------------------------------------------------------------------

# A change of tokenizer.json -> how a task ends: with 0 where ids stay what they are.
TOKENIZERS: list[tuple[Callable[[Any], object], int]] = [
    (lambda it: it["model"].update(merges=[*map(" ".join, it["model"]["merges"])]), 0),  # as strings
    (lambda it: it.update(decoder=None), 0),
    (lambda it: it["model"]["merges"].reverse(), 78),
    (lambda it: it["model"].update(ignore_merges=True), 78),
    (lambda it: it["added_tokens"].pop(), 78),
    (lambda it: it.update(post_processor=None), 78),  # no BOS
]


def test_a_tokenizer_is_known_by_what_decides_ids_alone(world: World, tmp_path: Path) -> None:
    for number, (edit, code) in enumerate(TOKENIZERS):
        model = Path(shutil.copytree(world.tokenizer, tmp_path / f"model-{number}"))
        data = json.loads((model / "tokenizer.json").read_bytes())
        edit(data)
        (model / "tokenizer.json").write_text(json.dumps(data))
        assert world.try_shard(0, model_id=model).code == code, number


# A data set of an older version, and several threads. ---------------------------------------------------

OLD = ROOT / "tests" / "data" / "version_1" / "documents_json"
REMEDY = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"


def test_commands_and_the_loader_refuse_version_1_with_what_to_type(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    old = Path(shutil.copytree(OLD, world.data_dir))
    shutil.copytree(ROOT / "tests" / "data" / "golden" / "tokenizer", old / "tokenizer")
    before = world.contents()
    commands = ("verify", "run", "peek", "clean", "status", "submit", "report")
    endings = [world.try_plan(), world.try_shard(0), *(world.main(name, old) for name in commands)]
    endings.append(world.main("export", old, to="hf", output_dir=tmp_path / "exported"))
    endings.append(world.main("stage", old, to=tmp_path / "staged"))
    for ended in endings:
        assert (ended.code, ended.error and ended.error.remedy) == (78, REMEDY), ended.text
    assert world.contents() == before
    for name in ("index.json", "plan.json", ""):
        with refuses(UnknownVersion, remedy=REMEDY):
            world.loader()
        if name:
            (old / name).unlink()


# In processes that have met none of the types of these facts.
SCRIPT = """
import os, sys
from shardprep.__main__ import main
main(["verify", "/nowhere"])  # it imports all
sys.setswitchinterval(1e-6)
for _ in range(12):
    child = os.fork()
    if child == 0:
        os._exit(main(["verify", sys.argv[1], "--fast"]))
    status = os.waitpid(child, 0)[1]
    assert status == 0, f"verify ended with the status {status}"
"""


@pytest.mark.slow
@pytest.mark.processes
def test_threads_that_read_the_first_manifests_at_the_same_time_do_not_end_verify(tmp_path: Path) -> None:
    """msgspec 0.20 looks at a type when it first meets it, and ended the process where two threads did so."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 400}).make(num_shards=40)
    run_child([sys.executable, "-c", SCRIPT, str(world.data_dir)], cwd=ROOT)
