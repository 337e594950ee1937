"""Whatever stands in a file of the contract, or in its place, has an error that names it, or no effect.

tests/faults flips bits of every file and puts wrong values at every place, by every command.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import ShardprepError, UnknownVersion, get_llama3_dataloader
from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import rewrite_json, rewrite_plan
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, hostile_text


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
CONTENTS = (
    *(b"", b"\xff\xfe{}", b"3", b"[" * 200_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    *(b'{"format": NaN}', b'{"format": ' + b"9" * 1_000_000 + b"}"),
    b'{"format": "shardprep-manifest", "version": [2]}',
)


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_json_of_ours_is_refused(world: World, name: str) -> None:
    for content in CONTENTS:
        (world.data_dir / name).write_bytes(content)
        code, said = READERS[name](world)
        assert (code in {65, 78}, name in said) == (True, True), said


@pytest.mark.parametrize("name", READERS)
def test_what_is_no_regular_file_is_refused_and_never_waited_for(world: World, name: str) -> None:
    path = world.data_dir / name
    for make in (os.mkfifo, Path.mkdir, lambda it: it.symlink_to("/dev/zero")):
        path.rmdir() if path.is_dir() else path.unlink()
        make(path)
        code, said = READERS[name](world)
        assert (code, name in said) == (65, True), said


@pytest.mark.parametrize(
    "name", ["index.json", "shard-00000.json"]
)  # of plan.json a reader takes the rows that it needs
def test_a_file_too_large_is_refused_before_it_is_read(world: World, name: str) -> None:
    os.truncate(world.data_dir / name, 1 << 40)
    code, said = READERS[name](world)
    assert (code, "1099511627776" in said) == (65, True), said


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


def test_every_command_names_a_changed_file_of_the_tokenizer_and_planning_again_puts_it_back(
    world: World,
) -> None:
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    good = path.read_bytes()
    path.write_bytes(good + b" ")  # as good a JSON, of equal ids
    (world.data_dir / "shard-00000.json").unlink()
    for options in ({}, {"fast": True}):
        code, said = verify(world, **options)
        assert (code, str(path) in said) == (78, True)
    ended = world.try_shard(0)
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
    handles, num_bytes = list[int](), list[int]()
    open_, preadv = os.open, os.preadv

    def noted_open(path: Any, *args: Any, **options: Any) -> int:
        handle = open_(path, *args, **options)
        if str(path).endswith("plan.json"):
            handles.append(handle)
        return handle

    def noted_preadv(handle: int, *args: Any) -> int:
        count = preadv(handle, *args)
        if Path(f"/proc/self/fd/{handle}").readlink().name == "plan.json":
            num_bytes.append(count)
        return count

    monkeypatch.setattr(os, "open", noted_open)
    monkeypatch.setattr(os, "preadv", noted_preadv)
    size = (world.data_dir / "plan.json").stat().st_size
    assert size > 350_000
    assert world.try_shard(700, planned=True).code == 0
    assert len(handles) == 1
    assert 10_000 < sum(num_bytes) < size / 2
    raw = (world.data_dir / "plan.json").read_bytes()
    data, head = json.loads(raw), json.loads(raw.split(b"\n")[0] + b"}")
    assert (data["version"], data["plan_id"]) == (3, head["plan_id"]), "its first line is the head"
    assert (len(data["inputs"]), len(data["cuts"])) == (3000, 1501)


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


# Which tokenizer is the plan's. -------------------------------------------------------------------------

# A change of tokenizer.json, and whether ids stay what they are.
TOKENIZERS: dict[str, tuple[Callable[[Any], object], bool]] = {
    "merges as strings": (
        lambda it: it["model"].update(merges=[*map(" ".join, it["model"]["merges"])]),
        True,
    ),
    "no decoder": (lambda it: it.update(decoder=None), True),
    "other merges": (lambda it: it["model"]["merges"].reverse(), False),
    "ignore_merges": (lambda it: it["model"].update(ignore_merges=True), False),
    "a token less": (lambda it: it["added_tokens"].pop(), False),
    "no BOS": (lambda it: it.update(post_processor=None), False),
}


@pytest.mark.parametrize("change", TOKENIZERS)
def test_the_tokenizer_of_a_plan_is_known_by_what_decides_ids_and_nothing_else(
    world: World, tmp_path: Path, change: str
) -> None:
    model = Path(shutil.copytree(world.tokenizer, tmp_path / "model"))
    data = json.loads((model / "tokenizer.json").read_bytes())
    edit, is_same = TOKENIZERS[change]
    edit(data)
    (model / "tokenizer.json").write_text(json.dumps(data))
    assert world.try_shard(0, model_id=model).code == (0 if is_same else 78)


# A data set of an older version, and several threads. ---------------------------------------------------

OLD = ROOT / "tests" / "data" / "version_1" / "documents_json"
REMEDY = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"


def test_every_command_and_the_loader_refuse_a_data_set_of_version_1_with_what_to_type(
    tmp_path: Path,
) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    old = Path(shutil.copytree(OLD, world.data_dir))
    shutil.copytree(ROOT / "tests" / "data" / "golden" / "tokenizer", old / "tokenizer")
    before = world.contents()
    commands = ("verify", "run", "peek", "clean", "status", "submit", "report")
    endings = [world.try_plan(), world.try_shard(0), *(world.main(name, old) for name in commands)]
    endings.append(world.main("export", old, to="hf", output_dir=tmp_path / "exported"))
    endings.append(world.main("stage", old, to=tmp_path / "staged"))
    for ended in endings:
        assert ended.error is not None
        assert (ended.code, ended.error.remedy) == (78, REMEDY), ended.text
    assert world.contents() == before
    for name in ("index.json", "plan.json", ""):
        with pytest.raises(UnknownVersion) as refused:
            get_llama3_dataloader(old, 2, num_workers=0)
        assert refused.value.remedy == REMEDY
        if name:
            (old / name).unlink()


# In processes that have met none of the types of these facts.
SCRIPT = """
import importlib, os, pkgutil, sys
from shardprep.__main__ import main
for name in ("preprocess", "shardprep.format"):
    package = importlib.import_module(name)
    for each in pkgutil.iter_modules(package.__path__):
        importlib.import_module(f"{name}.{each.name}")

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
