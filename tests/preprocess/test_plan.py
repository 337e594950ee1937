"""A plan puts every byte into one shard, is frozen, and input that is not what was planned is refused."""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.world import Ended, World, hostile_text

LINES = ["a\n", "bc\r\n", "\n", "\r", "d\r", "가나다라마\n", "x" * 30 + "\n", "tail"]


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Six files of some lines each."""
    return World(tmp_path).raw({f"{number}.txt": hostile_text(60, seed=number) for number in range(6)})


def cuts_of(world: World) -> list[list[int]]:
    """Input and byte at which each shard begins, and the end."""
    return [cut[:2] for cut in world.plan_json()["cuts"]]


def forked(works: Sequence[Callable[[], Ended]]) -> list[int]:
    """Run commands beside each other; returns their exit codes."""
    pids = []
    for work in works:
        pid = os.fork()
        if pid == 0:
            os._exit(work().code)
        pids.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


@pytest.mark.slow
def test_a_shard_begins_with_the_first_line_at_or_behind_its_even_share(tmp_path: Path) -> None:
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
        # Each byte is read once: verify adds up what the shards have read.
        assert world.run().main("verify", world.data_dir).code == 0


def test_whole_files_are_never_cut_and_without_a_number_one_file_is_one_shard(tmp_path: Path) -> None:
    world = World(tmp_path).raw({f"{number}.txt": "가나 다라\n" * 200 for number in range(7)})
    world.plan(num_shards=3, doc="file")
    assert cuts_of(world) == [[0, 0], [2, 0], [5, 0], [7, 0]]
    plain = World(tmp_path / "plain", raw_dir=world.raw_dir).plan(num_shards=3)
    assert any(byte for _, byte in cuts_of(plain)), "and others are"
    each = World(tmp_path / "each", raw_dir=world.raw_dir).plan(num_shards=None)
    assert cuts_of(each) == [[number, 0] for number in range(8)]


def test_a_size_of_shards_decides_their_number_and_the_one_of_a_refusal_is_taken(world: World) -> None:
    total = sum(path.stat().st_size for path in world.raw_dir.iterdir())
    assert world.plan(num_shards=None, shard_bytes=total // 4 + 1).num_shards == 4
    many = World(world.raw_dir.parent / "many").raw({"a.txt": "a line of a text that is long\n" * 4000})
    refused = many.try_plan(shard_bytes=1)
    assert (refused.code, "99999" in refused.err) == (2, True)
    assert not many.data_dir.exists()
    size = re.search(r"--shard_bytes (\w+)", refused.err)
    assert size
    many.plan(num_shards=None, shard_bytes=size[1])


# Each with what goes with it; the first one is named where it differs.
OPTIONS: list[dict[str, Any]] = [
    {"encoding": "cp949"}, {"keep_text": False}, {"record": "packed", "seq_len": 64},
    {"pack": "best_fit", "record": "packed", "seq_len": 64}, {"allow_special_tokens": True},
    {"add_special_tokens": False}, {"append_eos": True}, {"token_format": "npy"}, {"digests": True},
    {"validation_fraction": 0.25}, {"limit": 9}, {"doc": "file"}, {"hash_inputs": True}, {"recursive": True},
    {"zstd_long": 31},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_are_kept_and_another_plan_is_refused_by_name(world: World, options: dict[str, Any]) -> None:
    all_options = {"num_shards": 3, "max_bad_fraction": 1, **options}
    before = (world.plan(**all_options).data_dir / "plan.json").read_bytes()
    world.plan(**all_options)
    assert (world.data_dir / "plan.json").read_bytes() == before, "an equal second plan changes no byte"
    assert sorted(path.name for path in world.data_dir.iterdir()) == ["plan.json", "tokenizer"]
    given = {key: value for key, value in options.items() if key not in ("hash_inputs", "limit")}
    assert world.try_shard(0, **given).code == 0, "they may be given again"
    for dry_run in (None, True):
        ended = world.try_plan(num_shards=3, max_bad_fraction=1, dry_run=dry_run)
        assert ended.code == (0 if "zstd_long" in options else 78), ended.text
        assert ended.code == 0 or f"--{next(iter(options))}" in ended.err
    assert (world.data_dir / "plan.json").read_bytes() == before


def test_other_inputs_are_refused_by_name(world: World) -> None:
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


def test_a_touch_a_copy_and_a_moved_folder_change_nothing(world: World, tmp_path: Path) -> None:
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
    assert world.try_shard(3, input_dir=moved.raw_dir, **given).code == 0, "they may be given again"


@pytest.mark.processes
def test_planners_that_race_end_with_one_plan(world: World) -> None:
    codes = forked([partial(world.try_plan, num_shards=number) for number in (4, 4, 3)])
    assert codes == ([0, 0, 78] if len(cuts_of(world)) == 5 else [78, 78, 0])
    assert sorted(path.name for path in world.data_dir.iterdir()) == ["plan.json", "tokenizer"]


@pytest.mark.parametrize(
    "options", [{}, {"record": "packed", "seq_len": 64}, {"record": "packed", "seq_len": 64, "digests": True}]
)
def test_the_estimate_of_tokens_and_disk_is_near_what_comes(tmp_path: Path, options: dict[str, Any]) -> None:
    world = World(tmp_path).raw({f"{n}.txt": hostile_text(400, seed=n, most_words=40) for n in range(3)})
    told = world.try_plan(num_shards=3, dry_run=True, **options).out
    assert not world.data_dir.exists(), "a dry run writes nothing"
    world.plan(num_shards=3, **options).run()
    found = re.search(r"about (\S+) tokens, (\S+) ([kM])B on disk", told)
    assert found, told
    num_tokens = sum(manifest["counts"]["num_tokens"] for manifest in world.manifests())
    assert float(found[1]) == pytest.approx(num_tokens, rel=0.1)
    paths = [*world.data_dir.glob("shard-*.[ti]*"), *world.data_dir.glob("digests/*")]
    num_bytes = sum(path.stat().st_size for path in paths)
    assert float(found[2]) * {"k": 1e3, "M": 1e6}[found[3]] == pytest.approx(num_bytes, rel=0.1)


NUM_LINES = 12_000


def write_lines(world: World) -> World:
    """One file of 290 KB, larger than the three samples; all lines of one length."""
    return world.raw({"a.txt": "".join(f"line {number:08d} of a text\n" for number in range(NUM_LINES))})


def change_unseen(path: Path) -> None:
    """Another letter outside of the three samples; the size stays."""
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
def test_hash_inputs_has_any_change_refused(tmp_path: Path, options: dict[str, Any], num_shards: int) -> None:
    world = write_lines(World(tmp_path)).plan(num_shards=num_shards, hash_inputs=True, **options)
    path = world.raw_dir / "a.txt"
    stamp = path.stat()
    change_unseen(path)
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    endings = [world.try_shard(number) for number in range(num_shards)]
    (refused,) = (ended for ended in endings if ended.code)
    assert (refused.code, "a.txt" in refused.err) == (78, True)
    write_lines(world)
    os.utime(path, ns=(1, 1))  # a touch changes nothing
    world.run().verify()
    change_unseen(path)
    (tmp_path / "names.txt").write_text("at:a.txt:100005\n")
    world.main("blank", world.data_dir, ids=tmp_path / "names.txt", output=tmp_path / "new").ends(78, "a.txt")


def test_an_input_written_to_meanwhile_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of a text that is long\n" * 60_000}).plan(num_shards=1)
    path, pread, reads = world.raw_dir / "a.txt", os.pread, list[int]()

    def read(handle: int, num_bytes: int, offset: int) -> bytes:
        if os.readlink(f"/proc/self/fd/{handle}") == str(path):  # noqa: PTH115
            reads.append(offset)
            if len(reads) == 3:
                change_unseen(path)
        return pread(handle, num_bytes, offset)

    monkeypatch.setattr(os, "pread", read)
    world.try_shard(0).ends(78, "a.txt")
    assert not world.contents()
    assert not world.temporaries()
    world.run()


CLAIM = ".plan.json.claimed.tmp"


def plain_form(world: World, shard_id: int = 0) -> Ended:
    return world.try_shard(shard_id, input_dir=world.raw_dir, model_id=world.tokenizer)


@pytest.mark.processes
def test_tasks_without_a_plan_that_start_together_make_one(world: World) -> None:
    assert forked([partial(plain_form, world, number) for number in range(6)]) == [0] * 6
    assert not (world.data_dir / CLAIM).exists()
    plan_ids = {manifest["spec"]["plan_id"] for manifest in world.manifests()}
    assert plan_ids == {world.plan_json()["plan_id"]}
    world.verify()


@pytest.mark.parametrize("fails", [False, True])
def test_a_task_waits_for_anothers_plan(world: World, monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """No longer than its own would take, and not for one that failed."""
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
