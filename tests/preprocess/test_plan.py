"""A plan uses each input once, assigns every byte to one shard, and is frozen: other inputs are refused."""

from __future__ import annotations

import gzip
import itertools
import json
import os
import random
import re
import shutil
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from tests.input_writers import json_lines, seekable_zstd, table_bytes
from tests.random_inputs import PATTERNS, check_listing, random_folder
from tests.world import Ended, World, hostile_text

pytestmark = pytest.mark.long

LINES = ["a\n", "bc\r\n", "\n", "\r", "d\r", "가나다라마\n", "x" * 30 + "\n", "tail"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Six files of 60 lines each."""
    return World(tmp_path).raw({f"{number}.txt": hostile_text(60, seed=number) for number in range(6)})


def cuts_of(world: World) -> list[list[int]]:
    """Return (input, byte) of the begin of each shard, and of the end."""
    return [cut[:2] for cut in world.plan_json()["cuts"]]


def forked(works: Sequence[Callable[[], Ended]]) -> list[int]:
    """Run commands at the same time in forks, and return their exit codes."""
    pids = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            os._exit(work().code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.slow
def test_a_shard_begins_with_the_first_line_at_or_after_its_even_share(tmp_path: Path) -> None:
    for seed in range(15):
        rng = random.Random(seed)
        contents = ["".join(rng.choices(LINES, k=rng.randrange(12))) for _ in range(rng.randint(1, 6))]
        world = World(tmp_path / str(seed)).raw({f"{n}.txt": text for n, text in enumerate(contents)})
        num_shards = rng.randint(1, 30)
        world.plan(num_shards=num_shards)
        sizes = [len(text.encode()) for text in contents]
        begins = [0, *itertools.accumulate(sizes)]
        starts = {begins[-1]}
        for begin, text in zip(begins, contents, strict=False):
            data = text.encode()
            ends = (match.end() for match in re.finditer(rb"\r\n|\n|\r", data))
            starts |= {begin + place for place in (0, *ends) if place < len(data)}
        shares = [begins[-1] * number // num_shards for number in range(num_shards + 1)]
        expected = [min(start for start in starts if start >= share) for share in shares]
        assert [begins[number] + byte for number, byte in cuts_of(world)] == expected, seed
        # verify checks that the shards have read each byte once.
        assert world.run().main("verify", world.data_dir).code == 0


def test_with_doc_file_no_file_is_cut_and_by_default_each_file_is_a_shard(tmp_path: Path) -> None:
    world = World(tmp_path).raw({f"{number}.txt": "가나 다라\n" * 200 for number in range(7)})
    world.plan(num_shards=3, doc="file")
    assert cuts_of(world) == [[0, 0], [2, 0], [5, 0], [7, 0]]
    plain = World(tmp_path / "plain", raw_dir=world.raw_dir).plan(num_shards=3)
    assert any(byte for _, byte in cuts_of(plain)), "without doc=file, files are cut"
    each = World(tmp_path / "each", raw_dir=world.raw_dir).plan(num_shards=None)
    assert cuts_of(each) == [[number, 0] for number in range(8)]


def test_shard_bytes_decides_the_number_of_shards_and_a_refusal_names_a_valid_size(world: World) -> None:
    total = sum(path.stat().st_size for path in world.raw_dir.iterdir())
    assert world.plan(num_shards=None, shard_bytes=total // 4 + 1).num_shards == 4
    many = World(world.raw_dir.parent / "many").raw({"a.txt": "a line of a text that is long\n" * 4000})
    refused = many.try_plan(shard_bytes=1)
    assert (refused.code, "99999" in refused.err) == (2, True)
    assert not many.data_dir.exists()
    size = re.search(r"--shard_bytes (\w+)", refused.err)
    assert size
    many.plan(num_shards=None, shard_bytes=size[1])


# An option with others that it needs. The refusal of another plan names the first one.
OPTIONS: list[dict[str, Any]] = [
    {"encoding": "cp949"}, {"keep_text": False}, {"record": "packed", "seq_len": 64},
    {"pack": "best_fit", "record": "packed", "seq_len": 64}, {"allow_special_tokens": True},
    {"add_special_tokens": False}, {"append_eos": True}, {"token_format": "npy"}, {"digests": True},
    {"validation_fraction": 0.25}, {"limit": 9}, {"doc": "file"}, {"hash_inputs": True}, {"recursive": True},
    {"zstd_long": 31},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_frozen_and_another_plan_names_its_option(world: World, options: dict[str, Any]) -> None:
    all_options = {"num_shards": 3, "max_bad_fraction": 1, **options}
    before = (world.plan(**all_options).data_dir / "plan.json").read_bytes()
    world.plan(**all_options)
    assert (world.data_dir / "plan.json").read_bytes() == before, "an equal plan changes nothing"
    assert sorted(path.name for path in world.data_dir.iterdir()) == ["plan.json", "tokenizer"]
    given = {key: value for key, value in options.items() if key not in ("hash_inputs", "limit")}
    assert world.try_shard(0, **given).code == 0, "a task may repeat them"
    for dry_run in (None, True):
        ended = world.try_plan(num_shards=3, max_bad_fraction=1, dry_run=dry_run)
        assert ended.code == (0 if "zstd_long" in options else 78), ended.text
        assert ended.code == 0 or f"--{next(iter(options))}" in ended.err
    assert (world.data_dir / "plan.json").read_bytes() == before


def test_added_removed_or_changed_inputs_are_refused_by_name(world: World) -> None:
    raw = world.raw_dir
    world.plan(num_shards=5)
    changes: list[tuple[str, Callable[[], object]]] = [
        ("zz.txt", lambda: (raw / "zz.txt").write_text("more\n")),
        ("1.txt", lambda: [(raw / name).unlink() for name in ("zz.txt", "1.txt")]),
        ("1.txt", lambda: shutil.copyfile(raw / "0.txt", raw / "1.txt")),
    ]
    for named, change in changes:
        change()
        world.try_plan(num_shards=5).ends(78, named)


def test_a_plan_does_not_depend_on_the_times_or_the_folder_of_inputs(world: World, tmp_path: Path) -> None:
    world.plan(num_shards=5).run(0)
    moved = World(tmp_path / "elsewhere")
    for path in world.raw_dir.iterdir():
        shutil.copyfile(path, moved.raw_dir / path.name)
        os.utime(moved.raw_dir / path.name, (1, 1))
    moved.plan(num_shards=5).run(0)
    assert moved.plan_json()["plan_id"] == world.plan_json()["plan_id"]
    assert moved.contents() == world.contents()
    assert world.try_plan(num_shards=5, input_dir=moved.raw_dir).code == 0
    shutil.rmtree(world.raw_dir)
    assert world.try_shard(3).code == 66
    copy = shutil.copytree(world.tokenizer, tmp_path / "model")
    given = {"encoding": "UTF8", "record": "documents", "keep_text": True, "model_id": copy}
    assert world.try_shard(3, input_dir=moved.raw_dir, **given).code == 0, "a task may repeat options"


@pytest.mark.processes
def test_of_plans_at_the_same_time_one_wins_and_different_ones_are_refused(world: World) -> None:
    codes = forked([partial(world.try_plan, num_shards=number) for number in (4, 4, 3)])
    assert codes == ([0, 0, 78] if len(cuts_of(world)) == 5 else [78, 78, 0])
    assert sorted(path.name for path in world.data_dir.iterdir()) == ["plan.json", "tokenizer"]


@pytest.mark.parametrize(
    "options", [{}, {"record": "packed", "seq_len": 64}, {"record": "packed", "seq_len": 64, "digests": True}]
)
def test_estimates_of_tokens_and_disk_are_within_10_percent(tmp_path: Path, options: dict[str, Any]) -> None:
    world = World(tmp_path).raw({f"{n}.txt": hostile_text(400, seed=n, most_words=40) for n in range(3)})
    out = world.try_plan(num_shards=3, dry_run=True, **options).out
    assert not world.data_dir.exists(), "a dry run writes nothing"
    world.plan(num_shards=3, **options).run()
    found = re.search(r"about (\S+) ([kM]) tokens, (\S+) ([kM])B on disk", out)
    assert found, out
    prefixes = {"k": 1e3, "M": 1e6}
    num_tokens = sum(manifest["counts"]["num_tokens"] for manifest in world.manifests())
    assert float(found[1]) * prefixes[found[2]] == pytest.approx(num_tokens, rel=0.1)
    paths = [*world.data_dir.glob("shard-*.[ti]*"), *world.data_dir.glob("digests/*")]
    num_bytes = sum(path.stat().st_size for path in paths)
    assert float(found[3]) * prefixes[found[4]] == pytest.approx(num_bytes, rel=0.1)


NUM_LINES = 12_000


def write_lines(world: World) -> World:
    """Write one file of 290 KB, which is larger than the three samples, with lines of equal length."""
    return world.raw({"a.txt": "".join(f"line {number:08d} of a text\n" for number in range(NUM_LINES))})


def change_unseen(path: Path) -> None:
    """Change a letter outside the three samples."""
    with path.open("r+b") as file:
        file.seek(100_005)
        file.write(b"Z")


@pytest.mark.slow
def test_a_change_in_each_of_the_three_sampled_parts_changes_the_plan(tmp_path: Path) -> None:
    path = write_lines(World(tmp_path)).plan(num_shards=1).raw_dir / "a.txt"
    text, size = path.read_bytes(), path.stat().st_size
    for place in (0, 65535, size // 2, size - 65536, size - 1, 100_000):
        path.write_bytes(text[:place] + b"c" + text[place + 1 :])
        World(tmp_path).try_plan(num_shards=1).ends(0 if place == 100_000 else 78)


@pytest.mark.slow
@pytest.mark.parametrize(("num_shards", "options"), [(1, {"doc": "file"}), (3, {"encoding": "utf-8-sig"})])
def test_hash_inputs_refuses_any_change(tmp_path: Path, options: dict[str, Any], num_shards: int) -> None:
    world = write_lines(World(tmp_path)).plan(num_shards=num_shards, hash_inputs=True, **options)
    path = world.raw_dir / "a.txt"
    stamp = path.stat()
    change_unseen(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    endings = [world.try_shard(number) for number in range(num_shards)]
    ((number, refused),) = ((number, ended) for number, ended in enumerate(endings) if ended.code)
    refused.ends(78, "a.txt", f"shard {number:05d}")
    write_lines(world)
    os.utime(path, ns=(1, 1))  # its times do not matter
    world.run().verify()
    change_unseen(path)
    (tmp_path / "names.txt").write_text("at:a.txt:100005\n")
    world.main("blank", world.data_dir, ids=tmp_path / "names.txt", output=tmp_path / "new").ends(78, "a.txt")


def test_an_input_changed_during_a_task_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of a text that is long\n" * 60_000}).plan(num_shards=1)
    path, pread, reads = world.raw_dir / "a.txt", os.pread, list[int]()

    def read(handle: int, num_bytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{handle}") == str(path):  # noqa: PTH115
            reads.append(offset)
            if len(reads) == 3:
                change_unseen(path)
        return pread(handle, num_bytes, offset)

    monkeypatch.setattr(os, "pread", read)
    world.try_shard(0).ends(78, "a.txt", "1800000 bytes, mtime 20")
    assert not world.contents()
    assert not world.temporaries()
    world.run()


CLAIM = ".plan.json.claimed.tmp"


def plain_form(world: World, shard_id: int = 0) -> Ended:
    return world.try_shard(shard_id, input_dir=world.raw_dir, model_id=world.tokenizer)


@pytest.mark.processes
def test_tasks_that_start_together_without_a_plan_make_one_plan(world: World) -> None:
    assert forked([partial(plain_form, world, number) for number in range(6)]) == [0] * 6
    assert not (world.data_dir / CLAIM).exists()
    plan_ids = {manifest["spec"]["plan_id"] for manifest in world.manifests()}
    assert plan_ids == {world.plan_json()["plan_id"]}
    world.verify()


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_waits_for_anothers_plan(world: World, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Not longer than planning itself would take, and not after the other task failed."""
    world.data_dir.mkdir()
    claim = world.data_dir / CLAIM
    claim.write_text("")  # of a task that was killed, or will fail
    slept, monotonic = [0.0], time.monotonic

    def sleep(seconds: float) -> None:
        slept[0] += seconds
        if fails:
            claim.unlink(missing_ok=True)

    monkeypatch.setattr(time, "sleep", sleep)
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + slept[0])
    assert plain_form(world).code == 0
    assert 0 < slept[0] < 1 if fails else 2.0 < slept[0] < 3.5


def test_a_task_that_cannot_plan_leaves_no_folder_and_no_claim(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert (plain_form(world).code, world.data_dir.exists()) == (66, False)
    world.data_dir.mkdir()
    assert (plain_form(world).code, [*world.data_dir.iterdir()]) == (66, [])


# Selection of input files.

DOCS = [f"document {n}" for n in range(30)]


def table_of(texts: list[str]) -> bytes:
    return table_bytes({"text": texts}, "parquet")


def left_out(world: World) -> dict[str, list[str]]:
    """Return reason -> names of what was left out, from plan.json."""
    found: dict[str, list[str]] = {}
    for reason, name in world.plan_json()["left_out"]:
        found.setdefault(reason, []).append(name)
    return found


def planned(world: World, **options: Any) -> str:
    """Plan the folder with its subfolders, and return the output."""
    ended = world.try_plan(**{"recursive": True, **options}).ends(0)
    world.num_shards = len(world.plan_json()["cuts"]) - 1
    return ended.text


def check_random_folder(world: World, seed: int) -> tuple[int, int]:
    """Compare the listing of a random folder with an independent one. Returns (num_taken, num_left_out)."""
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
def test_each_file_is_an_input_or_left_out_with_the_right_reason(tmp_path: Path) -> None:
    counts = [check_random_folder(World(tmp_path / str(seed)), seed) for seed in range(120)]
    assert sum(num_taken for num_taken, _ in counts) > 200
    assert sum(num_left_out for _, num_left_out in counts) > 200


@pytest.fixture
def odd_world(tmp_path: Path) -> World:
    """A folder with a file for every reason to leave it out; only a.txt and b/c.txt are plain inputs."""
    names = ("a.txt", "b/c.txt", "README.txt", "notes.md", "more.md", "x.psv", ".m.jsonl", "._p.jsonl")
    world = World(tmp_path).raw({name: f"This is {name}.\n" for name in names})
    world.raw({".git/d.txt": "no text\n", "dataset_info.json": "{}"})
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "e.txt").write_text("far away\n")
    (world.raw_dir / "linked").symlink_to(tmp_path / "elsewhere")
    os.mkfifo(world.raw_dir / "f.txt")
    (world.raw_dir / "z.txt").symlink_to("/dev/zero")
    (world.raw_dir / "b a second name.txt").hardlink_to(world.raw_dir / "a.txt")
    return world


def test_plan_prints_what_it_leaves_out_and_plan_json_lists_all_of_it(odd_world: World) -> None:
    lines = planned(odd_world, recursive=None).splitlines()
    assert odd_world.inputs() == ["a.txt"]
    left = left_out(odd_world)
    assert sorted(sum(left.values(), ["a.txt"])) == sorted(path.name for path in odd_world.raw_dir.iterdir())
    assert len(left) == 9, "each reason"
    for reason, names in left.items():
        shown = (reason, f" {len(names)},", *names)
        assert any(all(each in line for each in shown) for line in lines), reason
    for flag in ("--recursive", "--follow_links", "--also '*.md'", "--also 'README.txt'"):
        assert any(flag in line for line in lines), "flags that would include them"


def test_flags_that_add_no_files_are_not_in_the_plan(odd_world: World, tmp_path: Path) -> None:
    flags = {"follow_links": True, "also": "*.md, readme*, _u*"}
    planned(odd_world.raw({"_u.txt": "as Spark names what is no data\n"}), **flags)
    inputs = ["README.txt", "_u.txt", "a.txt", "b/c.txt", "linked/e.txt", "more.md", "notes.md"]
    assert odd_world.inputs() == inputs
    assert "This is more.md." in odd_world.run().texts()
    planned(odd_world, **flags)  # and again
    few = World(tmp_path / "few").raw({"a.txt": "a\n"})
    planned(few, **flags)
    options = few.plan_json()["options"]
    assert (options["also"], options["follow_links"]) == ("", False)


def test_sockets_and_unprintable_names_are_named(odd_world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(odd_world.raw_dir)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind("s.txt")
        Path("\x1b[2J.md").touch()
        Path(os.fsdecode(b"\xff.md")).touch()
        text = planned(odd_world)
    assert "s.txt" in left_out(odd_world)["FIFO, socket or device"]
    assert {"\x1b[2J.md", "\\xff.md"} <= set(left_out(odd_world)["unknown suffix"])
    assert "\x1b" not in text
    Path(os.fsdecode(b"\xff.txt")).touch()
    assert odd_world.try_plan().code == 2, "the name of an input must be valid UTF-8"


OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
_LFS = f"oid sha256:{OID}\nsize 12345\n"
POINTERS = {  # by how it came to be: the command, and the file
    "git-lfs": ("git lfs pull", f"version https://git-lfs.github.com/spec/v1\n{_LFS}"),
    "git-lfs, CRLF": ("git lfs pull", f"version https://git-lfs.github.com/spec/v1\r\n{_LFS}"),
    "git-lfs of an editor": ("git lfs pull", f"\ufeffversion https://git-lfs.github.com/spec/v1\r\n{_LFS}"),
    "git-lfs before 1.0": ("git lfs pull", f"version https://hawser.github.com/spec/v1\n{_LFS}"),
    "git-annex": ("git annex get", f"/annex/objects/SHA256E-s12345--{OID}.txt\n"),
    "git-annex without links": ("git annex get", f"../../.git/annex/objects/k/z/SHA256E-s9--{OID}/{OID}"),
    "git-xet": ("git xet materialize", f"# xet version 0\nfilesize = 12345\nhash = '{OID}'\n"),
}


@pytest.mark.parametrize("kind", POINTERS)
def test_a_pointer_file_is_refused_with_the_command_that_fetches_it(tmp_path: Path, kind: str) -> None:
    command, pointer = POINTERS[kind]
    for name in ("b.txt", "b.jsonl", "b.parquet", "b.arrow", "b.txt.zst"):
        world = World(tmp_path / name).raw({"a.txt": "a document\n", name: pointer})
        world.try_plan().ends(65, world.raw_dir / name, command)
        assert not world.data_dir.exists()
    texts = {"a.txt": "A pointer begins with:\n" + pointer, "b.txt": pointer * 20}
    assert World(tmp_path).raw(texts).plan().inputs() == ["a.txt", "b.txt"], "texts about pointers are inputs"


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "zst": lambda data: seekable_zstd(data, [500]),
}


@pytest.mark.parametrize(("ending", "num"), [("gz", 30), ("gz", 5000), ("zst", 5000)])
def test_compressed_copies_are_left_out_and_equal_files_named(tmp_path: Path, ending: str, num: int) -> None:
    data = json_lines([f"document {n}" for n in range(num)])
    packed, none = PACKED[ending](data), {"d.jsonl": b"", "e.jsonl": b""}
    world = World(tmp_path).raw({"a.jsonl": data, f"a.jsonl.{ending}": packed, f"b.jsonl.{ending}": packed})
    world.raw({f"c.txt.{each}": pack(b"a\nb\n") for each, pack in PACKED.items()})
    text = planned(world.raw({"b.jsonl": json_lines(["other text"]), "a (1).jsonl": data, **none}))
    taken = ["a (1).jsonl", "a.jsonl", "b.jsonl", f"b.jsonl.{ending}", "c.txt.gz", *none]
    assert sorted(world.inputs()) == taken
    assert "d.jsonl" in text, "it is empty"
    forms = [f"a.jsonl.{ending}", "c.txt.zst"]
    assert left_out(world) == {"compressed form of a file that is taken": forms}
    (warning,) = (line for line in text.splitlines() if "a (1).jsonl" in line)
    assert warning.startswith("warning")
    assert "a.jsonl" in warning


LAYOUTS = {  # two files of the training split, and one of the test split
    "hub": ("data/train-00000-of-00002", "data/train-00001-of-00002", "data/test-00000-of-00001"),
    "folders": ("ko/train/0000", "ko/train/0001", "ko/test/0000"),
    "save_to_disk": ("train/data-00000-of-00002", "train/data-00001-of-00002", "test/data-00000-of-00001"),
    "after a name": ("c4-train.00000-of-00002", "c4-train.00001-of-00002", "c4-eval.00000-of-00001"),
    "before a name": ("train_sft-0", "train_sft-1", "test_sft-0"),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_several_splits_are_warned_of_and_split_selects_one(tmp_path: Path, layout: str) -> None:
    *train, test = (f"{name}.jsonl" for name in LAYOUTS[layout])
    world = World(tmp_path).raw({name: json_lines([name]) for name in (*train, test)})
    (warning,) = (line for line in planned(world).splitlines() if "--split" in line)
    for part in ("warning", "train 2 files", "test 1 file;", "--split train"):
        assert part in warning
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
# The log of a Delta table by version, and its current files, or none if it is refused.
DELTA: dict[str, tuple[dict[str, Any], list[str]]] = {
    "two versions": ({"0.json": FIRST, "1.json": SECOND}, ["day=a b/part-1.parquet", "part-2.parquet"]),
    "a checkpoint": ({"0.checkpoint.parquet": CHECKPOINT, "1.json": SECOND}, ["part-2.parquet"]),
    "a gap": ({"1.json": SECOND}, []),
    "no log": ({"0.crc": b""}, []),
    "no JSON": ({"0.json": FIRST, "1.json": b"{"}, []),
    "a deletion vector": ({"0.json": [{"add": {"path": "part-0.parquet", "deletionVector": {"a": 1}}}]}, []),
}


@pytest.mark.parametrize("kind", DELTA)
def test_a_delta_table_gives_only_current_files_or_is_refused(tmp_path: Path, kind: str) -> None:
    log, inputs = DELTA[kind]
    parts = ("part-0.parquet", "day=a b/part-1.parquet", "part-2.parquet")
    world = World(tmp_path).raw({name: table_of([name]) for name in parts})
    world.raw({f"_delta_log/{'0' * 19}{name}": content for name, content in log.items()})
    if inputs:
        assert "part-0.parquet" in planned(world)
        assert world.inputs() == inputs
        assert "part-0.parquet" in left_out(world)["old version in a Delta table"]
    else:
        ended = world.try_plan(recursive=True).ends(65, "01.json: " if kind == "no JSON" else "")
        assert getattr(ended.error, "path", None) == str(world.raw_dir), ended.text


# Names in the log of a Delta table for the files part-0.parquet and "day=a b%20c/part-1.parquet" of RAW.
NAMES_OF_DELTA = {
    "relative": ("part-0.parquet", "day=a%20b%2520c/part-1.parquet"),
    "not encoded": ("part-0.parquet", "day=a b%20c/part-1.parquet"),
    "dots": ("./part-0.parquet", "x/../day=a%20b%2520c/part-1.parquet"),
    "absolute": ("RAW/part-0.parquet", "RAW/day=a%20b%2520c/part-1.parquet"),
    "file URI": ("file:RAW/part-0.parquet", "file://RAW/day=a%20b%2520c/part-1.parquet"),
    "host": ("file:///RAW/part-0.parquet", "file://localhost/RAW/day=a%20b%2520c/part-1.parquet"),
    "elsewhere": ("part-0.parquet", "s3://bucket/table/day=a%20b%2520c/part-1.parquet"),
    "moved": ("part-0.parquet", "file:///old/table/day=a%20b%2520c/part-1.parquet"),
    "missing": ("part-0.parquet", "part-7.parquet"),
}


@pytest.mark.parametrize("how", NAMES_OF_DELTA)
@pytest.mark.parametrize("is_linked", [False, True])
def test_files_of_a_delta_table_are_found_by_any_name_or_it_is_refused(
    tmp_path: Path, how: str, is_linked: bool
) -> None:
    raw = tmp_path / "raw"
    names = [name.replace("RAW", str(raw)) for name in NAMES_OF_DELTA[how]]
    log = json_lines_of([{"add": {"path": name}} for name in names])
    parts = ["part-0.parquet", "day=a b%20c/part-1.parquet"]
    World(tmp_path).raw({name: table_of([name]) for name in [*parts, "part-old.parquet"]})
    (tmp_path / "link").symlink_to("raw")
    world = World(tmp_path, raw_dir=tmp_path / "link" if is_linked else raw)
    world.raw({f"_delta_log/{'0' * 20}.json": log})
    if how in ("elsewhere", "moved", "missing"):
        world.try_plan(recursive=True).ends(65, names[1])
        return
    planned(world, num_shards=1)
    assert sorted(world.run().texts()) == sorted(parts)
    assert left_out(world)["old version in a Delta table"] == ["part-old.parquet"]


def json_lines_of(records: Sequence[Any]) -> bytes:
    return b"".join(f"{json.dumps(record)}\n".encode() for record in records)


def write_arrow(path: Path, texts: list[str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(table_bytes({"text": texts}, "arrow"))


FORMER = [text.upper() for text in DOCS[:10]]


def unfinished(raw: Path) -> Path:
    write_arrow(raw / "default/0.0.0/abc/set-train.arrow", DOCS)
    for ending in (".incomplete", ".tmp", ".INPROGRESS"):
        write_arrow(raw / f"default/0.0.0/abc{ending}/set-train-00000-00000-of-NNNNN.arrow", FORMER)
    return raw


def saved_twice(raw: Path) -> Path:
    for number in range(3):
        write_arrow(raw / f"train/data-0000{number}-of-00003.arrow", DOCS[number * 10 : number * 10 + 10])
    write_arrow(raw / "train/data-00000-of-00001.arrow", FORMER)
    names = [{"filename": f"data-0000{number}-of-00003.arrow"} for number in range(3)]
    (raw / "train/state.json").write_text(json.dumps({"_data_files": names, "_split": None}))
    (raw / "state.json").write_text("[" * 9)  # another tool's
    return raw


def hub_cache(raw: Path, *, given: str = "") -> Path:
    """Two revisions, with one file in common."""
    repo = raw / "datasets--owner--name"
    files = {"new": {"a": DOCS[:10], "b": DOCS[10:]}, "old": {"a": DOCS[:10], "b": FORMER}}
    for revision, texts in files.items():
        for name, of_file in texts.items():
            blob = repo / "blobs" / f"{name}{of_file[0][:1]}"
            write_arrow(blob, of_file)
            link = repo / "snapshots" / revision / "data" / f"{name}.arrow"
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path("../../../blobs") / blob.name)
    (repo / "refs").mkdir()
    (repo / "refs/main").write_text("new")
    return repo / given if given else raw


def hudi(raw: Path, *, given: str = "", timeline: str = "") -> Path:
    notes = raw / ".hoodie" / timeline
    notes.mkdir(parents=True)
    (raw / ".hoodie/hoodie.properties").write_text("hoodie.table.name=t\n")
    first, second, third = "20240101000000000", "20240102000000000", "20240103000000000"
    done = f"_{third}" if timeline else ""
    for name in (f"{second}{done}.commit", f"{second}.commit.requested", f"{second}.inflight"):
        (notes / name).touch()
    (notes / f"{third}.commit.requested").touch()
    (raw / "eu/1").mkdir(parents=True)
    for group, instant, texts in (
        ("f1-0", first, FORMER), ("f1-0", second, DOCS[:10]), ("f1-0", third, FORMER),
        ("f2-0", first, DOCS[10:]), ("f3-0", third, FORMER),
    ):  # fmt: skip
        (raw / f"eu/1/{group}_0-21-{instant[7]}_{instant}.parquet").write_bytes(table_of(texts))
    return raw / given if given else raw


CURRENT: dict[str, Callable[[Path], Path]] = {
    "a build of datasets that was interrupted": unfinished,
    "save_to_disk with fewer files": saved_twice,
    "two revisions in a cache": hub_cache,
    "the snapshots of a cache": partial(hub_cache, given="snapshots"),
    "one revision": partial(hub_cache, given="snapshots/new"),
    "Hudi": hudi,
    "Hudi 1.0": partial(hudi, timeline="timeline"),
    "a partition of Hudi": partial(hudi, given="eu"),
}


@pytest.mark.parametrize("kind", CURRENT)
def test_only_current_rows_of_what_others_keep_are_taken(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path, raw_dir=CURRENT[kind](tmp_path / "table"))
    planned(world, num_shards=1)
    assert sorted(world.run().texts()) == sorted(DOCS)


def iceberg(raw: Path, num_current: int, *, num_deletes: int = 0, given: str = "") -> Path:
    for number in range(3):
        path = raw / f"data/day={number}/0000{number}-0-a.parquet"
        path.parent.mkdir(parents=True)
        path.write_bytes(table_of(DOCS[number * 10 : number * 10 + 10]))
    (raw / "metadata").mkdir()
    summary = {"total-data-files": str(num_current), "total-delete-files": str(num_deletes)}
    snapshots = [
        {"snapshot-id": 6, "summary": {"total-data-files": "9"}},
        {"snapshot-id": 7, "summary": summary},
    ]
    note = {"current-snapshot-id": 7, "snapshots": snapshots}
    (raw / "metadata/00009-0a-b.metadata.json").write_text("{}")
    (raw / "metadata/00010-0a-b.metadata.json").write_text(json.dumps(note))
    return raw / given if given else raw


@pytest.mark.parametrize("given", ["", "data"])
def test_an_iceberg_table_is_taken_if_its_snapshot_has_all_files(tmp_path: Path, given: str) -> None:
    world = World(tmp_path, raw_dir=iceberg(tmp_path / "table", 3, given=given))
    planned(world, num_shards=1)
    assert sorted(world.run().texts()) == sorted(DOCS)


def ambiguous_refs(raw: Path) -> Path:
    hub_cache(raw)
    (raw / "datasets--owner--name/refs/pr").write_text("old\n")
    return raw


def two_builds(raw: Path) -> Path:
    for build in ("0a" * 32, "1b" * 32):
        write_arrow(raw / f"default/0.0.0/{build}/set-train.arrow", DOCS)
        (raw / f"default/0.0.0/{build}/dataset_info.json").write_text("{}")
    return raw


def clustered(raw: Path) -> Path:
    hudi(raw)
    (raw / ".hoodie/20240104000000000.replacecommit").touch()
    return raw


UNDECIDED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "Iceberg with former files": (partial(iceberg, num_current=2), "2 of the 3 data files"),
    "Iceberg with deletes": (partial(iceberg, num_current=3, num_deletes=1), "1 file of deletes"),
    "a partition of Iceberg": (partial(iceberg, num_current=3, given="data/day=1"), "3 of the 1"),
    "refs to two revisions": (ambiguous_refs, "snapshots/REVISION"),
    "two builds in the cache of datasets": (two_builds, "one of these folders"),
    "Hudi with replaced files": (clustered, "replacecommit"),
}


@pytest.mark.parametrize("kind", UNDECIDED)
def test_a_table_whose_current_files_are_unknown_is_refused(tmp_path: Path, kind: str) -> None:
    write, named = UNDECIDED[kind]
    world = World(tmp_path, raw_dir=write(tmp_path / "table"))
    world.try_plan(recursive=True).ends(65, named)
    assert not world.data_dir.exists()


def test_a_partition_of_a_delta_table_has_only_current_files(tmp_path: Path) -> None:
    world = World(tmp_path).raw(
        {f"day=1/part-{number}.parquet": table_of([str(number)]) for number in (0, 1)}
    )
    log = [{"add": {"path": f"day=1/part-{number}.parquet"}} for number in (0, 1)]
    log.append({"remove": {"path": "day=1/part-0.parquet"}})
    world.raw({f"_delta_log/{'0' * 20}.json": json_lines_of(log)})
    part = World(tmp_path, raw_dir=world.raw_dir / "day=1")
    planned(part)
    assert part.inputs() == ["part-1.parquet"]


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
def test_folders_of_other_writers_give_each_row_once(tmp_path: Path, write: Callable[[Path], None]) -> None:
    world = World(tmp_path)
    write(world.raw_dir)
    planned(world, num_shards=1)
    assert sorted(world.run().texts()) == sorted(DOCS)
