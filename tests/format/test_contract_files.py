"""Any content of a file on disk, and anything in its place, causes an error that names it, or has no effect.

tests/faults flips bits of files and puts wrong values into them.
"""

from __future__ import annotations

import functools
import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import UnknownVersion
from tests.checkout import ROOT
from tests.children import run_child
from tests.forged import rewrite_json, rewrite_plan
from tests.word_tokenizers import save_word_tokenizer
from tests.world import Ended, World, hostile_text, refuses


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """A verified data set of two small shards. Never written to."""
    world = World(tmp_path_factory.mktemp("whole"))
    return world.raw({"a.txt": hostile_text(40), "b.txt": b"\xff\nsecond file\n"}).make(max_bad_fraction=0.9)


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    """A copy to damage."""
    return whole.copy(tmp_path)


def read(world: World, name: str) -> Ended:
    """Run a command that reads this file."""
    if name == "index.json":
        return world.main("stage", world.data_dir, to=world.data_dir.with_name("staged"))
    return world.main("verify", world.data_dir, fast=True)


NO_JSON_OF_OURS = (
    b"", b"\xff\xfe{}", b"3", b"[" * 200_000, b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"format": NaN}', b'{"format": ' + b"9" * 1_000_000 + b"}",
    b'{"format": "shardprep-manifest", "version": [2]}',
)  # fmt: skip
# Replacements of a file. The last is too large, except for plan.json, of which only some rows are read.
OTHERS: list[Callable[[Path], object]] = [
    *(functools.partial(Path.write_bytes, data=content) for content in NO_JSON_OF_OURS),
    *(os.mkfifo, Path.mkdir, lambda path: path.symlink_to("/dev/zero")),
    lambda path: (path.touch(), os.truncate(path, 1 << 40)),
]


@pytest.mark.parametrize("name", ["plan.json", "index.json", "shard-00000.json"])
def test_a_foreign_file_is_refused_without_waiting(world: World, name: str) -> None:
    path = world.data_dir / name
    for put in OTHERS[: None if name != "plan.json" else -1]:
        path.rmdir() if path.is_dir() else path.unlink()
        put(path)
        ended = read(world, name)
        assert (ended.code in {65, 78}, name in ended.err) == (True, True), ended.text
    assert name == "plan.json" or "1099511627776" in ended.err


Edit = tuple[str, Callable[[Path], object], int]


def in_plan(old: str, new: str, code: int = 65) -> Edit:
    return "plan.json", functools.partial(rewrite_plan, old=old, new=new), code


def in_index(place: str, value: object) -> Edit:
    return "index.json", functools.partial(rewrite_json, **{place: value}), 65


# An edit of a file, with updated hashes, and the exit code of a command that reads it.
EDITS: dict[str, Edit] = {
    # The existing shards then belong to another plan.
    "an option": in_plan('"encoding":"utf-8"', '"encoding":"cp949"', 78),
    "the tokenizer": in_plan('"vocab_size":', '"vocab_size":1', 78),
    "an unknown option that is used": in_plan('"options":{', '"options":{"lowercase":true,', 78),
    "an unknown option that is not": in_plan('"options":{', '"options":{"lowercase":false,', 0),
    "an option that is no choice": in_plan('"doc":"line"', '"doc":"page"'),
    "an option of another type": in_plan('"recursive":false', '"recursive":[]'),
    "options that do not go together": in_plan('"seq_len":0', '"seq_len":7'),
    "blanked shards that are no ids": in_plan('"blanked":""', '"blanked":"x"'),
    "more blanked shards than can be": in_plan('"blanked":""', '"blanked":"0-99999"'),
    "a tokenizer's file outside": in_plan('"tokenizer_files":{"', '"tokenizer_files":{"../'),
    "more rows than blocks": in_plan('"num_rows":2', '"num_rows":2000'),
    "a cut behind the inputs": in_plan(',[2,0,0,""]]', ',[4,0,0,""]]'),
    "a cut before the last one": in_plan(',[2,0,0,""]]', ',[0,0,0,""]]'),
    **{f"column {number} of a shard": in_index(f"shards.1.{number}", 7) for number in (0, 1, 3, 4)},
    "an unknown column": in_index("columns.0", "num_widgets"),
    "a shard too few": in_index("spec.num_shards", 5),
    "more shards than can be": in_index("spec.num_shards", 3_000_000_000),
}


@pytest.mark.parametrize("edit", EDITS)
def test_an_inconsistent_file_is_refused(world: World, edit: str) -> None:
    name, change, code = EDITS[edit]
    change(world.data_dir / name)
    read(world, name).ends(code, *[name] * (code == 65))


def test_a_changed_tokenizer_is_named_and_restored_by_planning_again(world: World) -> None:
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    good = path.read_bytes()
    path.write_bytes(good + b" ")  # valid JSON that gives equal ids
    (world.data_dir / "shard-00000.json").unlink()
    endings = [world.main("verify", world.data_dir, fast=fast) for fast in (None, True)]
    for ended in (*endings, world.try_shard()):
        ended.ends(78, path)
    world.plan(num_shards=2, max_bad_fraction=0.9)
    assert (path.read_bytes(), world.temporaries()) == (good, [])
    (path.parent / "added_tokens.json").write_text("{}")
    world.main("verify", world.data_dir).ends(78)


def test_a_folder_with_a_tokenizer_but_no_plan_can_be_planned_again_with_the_same_one(
    world: World, tmp_path: Path
) -> None:
    """Another one may be of a plan that is being made, or of somebody else: it stays, and is named."""
    save_word_tokenizer(tmp_path / "model", 50)
    other = World(tmp_path / "other", tokenizer=tmp_path / "model").raw({"a.txt": "a\n"}).plan()
    (other.data_dir / "plan.json").unlink()  # as if plan was killed before it wrote plan.json
    before = other.contents()
    other.tokenizer = world.tokenizer
    other.try_plan().ends(78, "tokenizer/tokenizer.json")
    assert other.contents() == before
    other.tokenizer = tmp_path / "model"
    other.make()


def num_bytes_read() -> int:
    """Return the number of bytes that this process has read so far, by any call."""
    return int(re.findall(r"rchar: (\d+)", Path("/proc/self/io").read_text())[0])


@pytest.mark.slow
def test_a_task_reads_only_its_own_rows_of_a_plan(tmp_path: Path) -> None:
    """With 1,500 shards of two files each, the tables have several blocks."""
    world = World(tmp_path)
    world.raw({f"crawl/part-{number:07d}.txt": f"Line {number}.\nAnother.\n" for number in range(3000)})
    path = world.plan(num_shards=1500, recursive=True).data_dir / "plan.json"
    good = path.read_bytes()
    assert json.loads(good)["plan_id"] == json.loads(good.split(b"\n")[0] + b"}")["plan_id"], "the head"
    world.run(600)  # so that all imports are done
    before = num_bytes_read()
    world.run(700)
    assert num_bytes_read() - before < len(good) * 2 / 3

    path.write_bytes(good.replace(b"part-0002999", b"part-0002990", 1))
    world.try_shard(0).ends(0)
    for ended in (world.try_shard(1499), *(world.main(name, world.data_dir) for name in ("verify", "run"))):
        ended.ends(65, path)


# A change of tokenizer.json, and the exit code of a task: 0 if the ids stay the same.
TOKENIZERS: list[tuple[Callable[[Any], object], int]] = [
    (lambda it: it["model"].update(merges=[*map(" ".join, it["model"]["merges"])]), 0),  # as strings
    (lambda it: it.update(decoder=None), 0),
    (lambda it: it["model"]["merges"].reverse(), 78),
    (lambda it: it["model"].update(ignore_merges=True), 78),
    (lambda it: it["added_tokens"].pop(), 78),
    (lambda it: it.update(post_processor=None), 78),  # no BOS
]


def test_only_changes_of_a_tokenizer_that_may_change_ids_are_refused(world: World, tmp_path: Path) -> None:
    for number, (edit, code) in enumerate(TOKENIZERS):
        model = Path(shutil.copytree(world.tokenizer, tmp_path / f"model-{number}"))
        data = json.loads((model / "tokenizer.json").read_bytes())
        edit(data)
        (model / "tokenizer.json").write_text(json.dumps(data))
        world.try_shard(0, model_id=model).ends(code)


REMEDY = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"


def test_commands_and_the_loader_refuse_version_1_with_what_to_type(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    data = ROOT / "tests" / "data"
    old = Path(shutil.copytree(data / "version_1" / "documents_json", world.data_dir))
    shutil.copytree(data / "golden" / "tokenizer", old / "tokenizer")
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


# Each fork of a process that has not yet decoded a manifest.
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
def test_verify_survives_threads_that_read_the_first_manifests_at_the_same_time(tmp_path: Path) -> None:
    """msgspec 0.20 inspects a type on first use, and crashed the process if two threads did so."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 400}).make(num_shards=40)
    run_child([sys.executable, "-c", SCRIPT, str(world.data_dir)], cwd=ROOT)
