"""``plan`` says of each name in the input folder whether it is taken, and why not; no file is taken twice."""

from __future__ import annotations

import gzip
import os
import random
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.input_writers import json_lines, seekable_zstd, table_bytes
from tests.random_inputs import PATTERNS, check_listing, random_folder
from tests.world import World

DOCS = [f"document {n}" for n in range(30)]


def table_of(texts: list[str]) -> bytes:
    return table_bytes({"text": texts}, "parquet")


def left_out(world: World) -> dict[str, list[str]]:
    """Reason -> the names that plan.json says were left out."""
    found: dict[str, list[str]] = {}
    for reason, name in world.plan_json()["left_out"]:
        found.setdefault(reason, []).append(name)
    return found


def planned(world: World, **options: Any) -> str:
    """Plan the folder with its subfolders; returns what was told."""
    ended = world.try_plan(**{"recursive": True, **options}).ends(0)
    world.num_shards = len(world.plan_json()["cuts"]) - 1
    return ended.text


def check_random_folder(world: World, seed: int) -> tuple[int, int]:
    """Compare the listing of a random folder with an independent one; gives the names taken and left out."""
    rng = random.Random(seed)
    random_folder(world.raw_dir, rng)
    options: dict[str, Any] = {"recursive": rng.random() < 0.8, "also": rng.choice([*PATTERNS])}
    options["follow_links"] = options["recursive"] and rng.random() < 0.5
    ended = world.try_plan(**{name: value or None for name, value in options.items()})
    assert ended.code in (0, 66), ended.text
    taken, left = ([], []) if ended.code else (world.inputs(), world.plan_json()["left_out"])
    assert taken == sorted(taken, key=lambda path: path.split("/"))
    check_listing(world.raw_dir, taken, left, **options)
    return len(taken), len(left)


@pytest.mark.slow
def test_taken_and_left_out_are_all_names_and_each_reason_is_true(tmp_path: Path) -> None:
    counts = [check_random_folder(World(tmp_path / str(seed)), seed) for seed in range(120)]
    assert sum(num_taken for num_taken, _ in counts) > 200
    assert sum(num_left_out for _, num_left_out in counts) > 200


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A folder in which every reason is met; a.txt and b/c.txt are what anybody would take."""
    names = ("a.txt", "b/c.txt", "README.txt", "notes.md", "more.md", "x.csv", ".m.jsonl", "._p.jsonl")
    world = World(tmp_path).raw({name: f"This is {name}.\n" for name in names})
    world.raw({".git/d.txt": "no text\n", "dataset_info.json": "{}"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.txt").write_text("far away\n")
    (world.raw_dir / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(world.raw_dir / "f.txt")
    (world.raw_dir / "z.txt").symlink_to("/dev/zero")
    (world.raw_dir / "b a second name.txt").hardlink_to(world.raw_dir / "a.txt")
    return world


def test_plan_names_and_counts_what_it_leaves_out_and_plan_json_has_all_of_it(world: World) -> None:
    told = planned(world, recursive=None).splitlines()
    assert world.inputs() == ["a.txt"]
    left = left_out(world)
    assert sorted(sum(left.values(), ["a.txt"])) == sorted(path.name for path in world.raw_dir.iterdir())
    assert len(left) == 9, "each reason"
    for reason, names in left.items():
        shown = (reason, f" {len(names)},", *names)
        assert any(all(each in line for each in shown) for line in told), reason
    for flag in ("--recursive", "--follow_links", "--also '*.md'", "--also 'README.txt'"):
        assert any(flag in line for line in told), "what takes them"


def test_flags_take_what_is_left_out_and_idle_ones_are_not_planned(world: World, tmp_path: Path) -> None:
    flags = {"follow_links": True, "also": "*.md, readme*, _u*"}
    planned(world.raw({"_u.txt": "as Spark names what is no data\n"}), **flags)
    inputs = ["README.txt", "_u.txt", "a.txt", "b/c.txt", "linked/e.txt", "more.md", "notes.md"]
    assert world.inputs() == inputs
    assert "This is more.md." in world.run().texts()
    planned(world, **flags)  # and again
    few = World(tmp_path / "few").raw({"a.txt": "a\n"})
    planned(few, **flags)
    options = few.plan_json()["options"]
    assert (options["also"], options["follow_links"]) == ("", False)


def test_sockets_and_unprintable_names_are_named(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(world.raw_dir)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        Path("\x1b[2J.md").touch()
        Path(os.fsdecode(b"\xff.md")).touch()
        told = planned(world)
    assert "s.txt" in left_out(world)["FIFO, socket or device"]
    assert {"\x1b[2J.md", "\\xff.md"} <= set(left_out(world)["unknown suffix"])
    assert "\x1b" not in told
    Path(os.fsdecode(b"\xff.txt")).touch()
    assert world.try_plan().code == 2, "an input has a name that plan.json can hold"


OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTERS = {
    "git lfs pull": f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 12345\n",
    "git annex get": f"/annex/objects/SHA256E-s12345--{OID}.txt\n",
}


@pytest.mark.parametrize("command", POINTERS)
def test_a_pointer_to_an_input_is_refused_with_what_fetches_it(tmp_path: Path, command: str) -> None:
    for name in ("b.txt", "b.jsonl", "b.parquet", "b.arrow", "b.txt.zst"):
        world = World(tmp_path / name).raw({"a.txt": "a document\n", name: POINTERS[command]})
        world.try_plan().ends(65, world.raw_dir / name, command)
        assert not world.data_dir.exists()
    texts = {"a.txt": "A pointer begins with:\n" + POINTERS[command], "b.txt": POINTERS[command] * 20}
    assert World(tmp_path).raw(texts).plan().inputs() == ["a.txt", "b.txt"], "a text about pointers is one"


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: seekable_zstd(data, [500]),
}


@pytest.mark.parametrize(("ending", "num"), [("gz", 30), ("gz", 5000), ("zst", 5000)])
def test_a_compressed_form_is_taken_once_and_an_equal_file_told(
    tmp_path: Path, ending: str, num: int
) -> None:
    data = json_lines([f"document {n}" for n in range(num)])
    packed, none = PACKED[ending](data), {"d.jsonl": b"", "e.jsonl": b""}
    world = World(tmp_path).raw({"a.jsonl": data, f"a.jsonl.{ending}": packed, f"b.jsonl.{ending}": packed})
    world.raw({f"c.txt.{each}": pack(b"a\nb\n") for each, pack in PACKED.items()})
    told = planned(world.raw({"b.jsonl": json_lines(["other text"]), "a (1).jsonl": data, **none}))
    taken = ["a (1).jsonl", "a.jsonl", "b.jsonl", f"b.jsonl.{ending}", "c.txt.gz", *none]
    assert sorted(world.inputs()) == taken
    forms = [f"a.jsonl.{ending}", "c.txt.zst"]
    assert left_out(world) == {"compressed form of a file that is taken": forms}
    (warning,) = (line for line in told.splitlines() if "a (1).jsonl" in line)
    assert warning.startswith("warning")
    assert "a.jsonl" in warning


LAYOUTS = {  # two files of the split train, and one of test
    "hub": ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),
    "folders": ("ko/train/0000", "ko/train/0001", "ko/test/0000"),
    "save_to_disk": ("train/data-00000-of-00002", "train/data-00001-of-00002", "test/data-00000-of-00001"),
    "behind a name": ("c4-train.00000-of-00002", "c4-train.00001-of-00002", "c4-eval.00000-of-00001"),
    "before a name": ("train_sft-0", "train_sft-1", "test_sft-0"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_splits_are_told_with_what_was_taken_and_a_flag_chooses(tmp_path: Path, layout: str) -> None:
    *train, test = (f"{name}.jsonl" for name in LAYOUTS[layout])
    world = World(tmp_path).raw({name: json_lines([name]) for name in (*train, test)})
    (told,) = (line for line in planned(world).splitlines() if "--split" in line)
    for part in ("warning", "train 2 ", "test 1 ", "--split train"):
        assert part in told
    assert sorted(world.inputs()) == sorted([*train, test])
    (world.data_dir / "plan.json").unlink()
    planned(world, split="train")
    assert world.inputs() == train
    assert left_out(world) == {"other split": [test]}
    # The plain form of a task lists the folder again.
    assert world.try_shard(0, input_dir=world.raw_dir).code == 0
    assert world.try_plan(split="validation", recursive=True).code == 66
    assert world.try_plan(split="trian", recursive=True).code == 2


FIRST: list[Any] = [{"add": {"path": "part-0.parquet"}}, {"add": {"path": "day=a%20b/part-1.parquet"}}]
SECOND: list[Any] = [{"remove": {"path": "part-0.parquet"}}, {"add": {"path": "part-2.parquet"}}]
CHECKPOINT = table_bytes({"add": [{"path": "part-0.parquet"}, None], "metaData": [None, "x"]}, "parquet")
# The log of a Delta table, by version, and the inputs that are left; none where it is refused.
DELTA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two versions": ({"0.json": FIRST, "1.json": SECOND}, ["day=a b/part-1.parquet", "part-2.parquet"]),
    "a checkpoint": ({"0.checkpoint.parquet": CHECKPOINT, "1.json": SECOND}, ["part-2.parquet"]),
    "a gap": ({"1.json": SECOND}, []),
    "no log": ({"0.crc": b""}, []),
    "no JSON": ({"0.json": b"{", "1.json": SECOND}, []),
    "a deletion vector": ({"0.json": [{"add": {"path": "part-0.parquet", "deletionVector": {"a": 1}}}]}, []),
}


@pytest.mark.parametrize("kind", DELTA)
def test_old_versions_in_a_delta_table_are_left_out_or_it_is_refused(tmp_path: Path, kind: str) -> None:
    log, inputs = DELTA[kind]
    parts = ("part-0.parquet", "day=a b/part-1.parquet", "part-2.parquet")
    world = World(tmp_path).raw({name: table_of([name]) for name in parts})
    world.raw({f"_delta_log/{'0' * 19}{name}": content for name, content in log.items()})
    if inputs:
        assert "part-0.parquet" in planned(world)
        assert world.inputs() == inputs
        assert "part-0.parquet" in left_out(world)["old version in a Delta table"]
    else:
        ended = world.try_plan(recursive=True)
        assert (ended.code, ended.error and ended.error.path) == (65, str(world.raw_dir)), ended.text


def by_pyarrow(raw: Path) -> None:
    table = pyarrow.table({"text": DOCS, "year": [2023, 2024, 2025] * 10})
    from pyarrow import dataset

    dataset.write_dataset(table, raw, format="parquet", partitioning=["year"], partitioning_flavor="hive")
    pyarrow.parquet.write_metadata(table.schema, raw / "_common_metadata")


def by_datasets(raw: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    datasets.Dataset.from_dict({"text": DOCS}).save_to_disk(raw)
    loaded = datasets.load_from_disk(raw)
    loaded.map(lambda row: {"text": row["text"].upper()})
    own = str(raw / "cache-own.arrow")
    loaded.map(lambda row: {"length": len(row["text"])}, num_proc=1, cache_file_name=own)


def by_its_cache(raw: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    source = raw.parent / "source.jsonl"
    source.write_bytes(json_lines(DOCS))
    loaded = datasets.load_dataset("json", data_files=str(source), cache_dir=str(raw), split="train")
    loaded.map(lambda row: {"text": row["text"] + "!"})


@pytest.mark.processes  # datasets may start one
@pytest.mark.parametrize(
    "write",
    [by_pyarrow, *(pytest.param(by, marks=pytest.mark.frameworks) for by in (by_datasets, by_its_cache))],
    ids=lambda write: write.__name__,
)
def test_the_folder_of_each_writer_gives_its_rows_once(tmp_path: Path, write: Callable[[Path], None]) -> None:
    world = World(tmp_path)
    write(world.raw_dir)
    planned(world, num_shards=1)
    assert sorted(world.run().texts()) == sorted(DOCS)
