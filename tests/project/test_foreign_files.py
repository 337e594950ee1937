"""Files that somebody else wrote: no command replaces, removes or copies them, or believes them unread."""

from __future__ import annotations

import hashlib
import json
import os
import struct
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import BrokenShard
from shardprep.format.data_folder import DataFolder
from tests.forged import rewrite_json
from tests.world import World, call_main, open_loader, refuses

MINE = "mine, and nobody else's\n"
ID = "d7"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def put(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(MINE)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Three shards with kept ids and digests, and a document that is left out."""
    records = [
        json.dumps({"text": f"a kettle of {number} words", "id": f"d{number}"}) for number in range(60)
    ]
    world = World(tmp_path_factory.mktemp("whole")).raw({"a.jsonl": "\n".join([*records, "no json"])})
    return world.make(num_shards=3, id_field="id", digests=True, max_bad_fraction=0.5)


@pytest.fixture
def world(whole: World, tmp_path: Path) -> World:
    return whole.copy(tmp_path)


@pytest.fixture
def listed(tmp_path: Path) -> Path:
    path = tmp_path / "ids.txt"
    path.write_text(f"{ID}\n")
    return path


# Output folders. -----------------------------------------------------------------------------------------

# A file in a folder without a plan, which no plan of ours can have written.
FOREIGN = ("tokenizer/README.md", "tokenizer/tokenizer.json", "shard-00000.tar", "index.json", "ids/mine.txt")


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("command", ["plan", "stage", "blank"])
def test_a_foreign_file_in_an_output_folder_is_named_and_stays(
    world: World, tmp_path: Path, listed: Path, command: str, name: str
) -> None:
    new = tmp_path / "new"
    foreign = put(new / name)
    before = contents(new)
    words: dict[str, list[Any]] = {
        "plan": ["plan", *World(tmp_path, raw_dir=world.raw_dir, data_dir=new).words_of_plan(num_shards=3)],
        "stage": ["stage", world.data_dir, "--to", new],
        "blank": ["blank", world.data_dir, "--ids", listed, "--output", new],
    }
    named = foreign.parent if foreign.parent != new and "tokenizer" not in name else foreign
    call_main(*words[command]).ends(78, named)
    assert contents(new) == before


@pytest.fixture(scope="module")
def with_function(tmp_path_factory: pytest.TempPathFactory) -> tuple[World, list[Any]]:
    """Two shards of a plan with a function and a list of excluded documents, and the flags of its plan."""
    folder = tmp_path_factory.mktemp("with_function")
    code, listed = folder / "keep.py", folder / "excluded.txt"
    code.write_text('def transform(record):\n    return record["text"]\n')
    listed.write_text("d1\n")
    world = World(folder).raw(
        {"a.jsonl": "".join(f'{{"text": "word {n}", "id": "d{n}"}}\n' for n in range(9))}
    )
    more = ["--transform", code, "--exclude", listed]
    call_main("plan", *world.words_of_plan(num_shards=2, id_field="id"), *more).ends(0)
    for number in range(2):
        world.main("shard", "--shard_id", number, "--output_dir", world.data_dir, "--transform", code).ends(0)
    world.main("verify", world.data_dir).ends(0)
    return world, more


@pytest.mark.processes
@pytest.mark.parametrize("name", ["transform/keep.py", "excluded.txt", "excluded.keys"])
@pytest.mark.parametrize("command", ["plan", "stage", "blank"])
def test_a_file_that_a_command_writes_beside_the_plan_replaces_none_of_another_program(
    with_function: tuple[World, list[Any]], tmp_path: Path, listed: Path, command: str, name: str
) -> None:
    world, more = with_function
    new = tmp_path / "new"
    foreign = put(new / name)
    before = contents(new)
    again = World(tmp_path, raw_dir=world.raw_dir, data_dir=new).words_of_plan(num_shards=2, id_field="id")
    words: dict[str, list[Any]] = {
        "plan": ["plan", *again, *more],
        "stage": ["stage", world.data_dir, "--to", new],
        "blank": ["blank", world.data_dir, "--ids", listed, "--output", new, *more[:2]],
    }
    if (command, name) == ("stage", "transform/keep.py"):  # a copy has no function
        call_main(*words[command]).ends(0)
        assert foreign.read_text() == MINE
        return
    call_main(*words[command]).ends(78, foreign)
    assert contents(new) == before


def test_files_without_a_name_of_the_format_stay_beside_a_copy_and_are_not_copied(
    world: World, tmp_path: Path
) -> None:
    """Neither a link to a private file, nor a huge sparse one, nor a file that DIR has, too."""
    secret, new = put(tmp_path / "home" / "id_rsa"), tmp_path / "new"
    secret.chmod(0o600)
    put(world.data_dir / "Makefile").write_text("all: of somebody else\n")
    (world.data_dir / "README.md").symlink_to(secret)
    (world.data_dir / "tokenizer" / ".hidden").symlink_to(secret)
    with (world.data_dir / "huge.bin").open("wb") as file:
        file.truncate(3 << 30)
    put(new / "Makefile")
    world.main("stage", world.data_dir, to=new).ends(0)
    assert (new / "Makefile").read_text() == MINE
    copied = {path.relative_to(new).as_posix() for path in new.rglob("*") if path.is_file()}
    made = {
        path.relative_to(world.data_dir).as_posix() for path in world.data_dir.rglob("*") if path.is_file()
    }
    assert made - copied == {"README.md", "huge.bin", "tokenizer/.hidden"}
    world.main("verify", new).ends(0)


def test_a_linked_file_of_the_format_is_not_copied(world: World, tmp_path: Path) -> None:
    tar = world.data_dir / "shard-00001.tar"
    moved = tar.rename(tmp_path / "moved.tar")
    tar.symlink_to(moved)
    world.main("stage", world.data_dir, to=tmp_path / "new").ends(65, tar, "a link to")
    assert not (tmp_path / "new" / "shard-00001.json").exists()


def test_overlap_and_duplicates_replace_only_their_own_lists(world: World, tmp_path: Path) -> None:
    out, twice = tmp_path / "out", [world.data_dir, "--against", world.raw_dir, "--ngram", 2]
    foreign = put(out / "names.txt")
    world.main("overlap", *twice, output=out).ends(78, foreign)
    assert contents(out) == {"names.txt": MINE.encode()}
    foreign.unlink()
    for _ in range(2):
        world.main("overlap", *twice, output=out).ends(0)
    mine = put(tmp_path / "list.txt")
    world.main("duplicates", world.data_dir, output=mine).ends(78, mine)
    assert mine.read_text() == MINE
    mine.write_text("at:a.jsonl:0\n")  # as the command writes it
    world.main("duplicates", world.data_dir, output=mine).ends(0)


def test_of_two_plans_with_different_tokenizers_the_refused_one_changes_nothing(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other one plans between the refused one's look at the folder and its first write."""
    from tests.word_tokenizers import save_word_tokenizer

    save_word_tokenizer(tmp_path / "model", 50)
    first = World(tmp_path / "first", raw_dir=world.raw_dir)
    second = World(tmp_path / "first", raw_dir=world.raw_dir, tokenizer=tmp_path / "model")
    rename, planned = os.rename, list[int]()
    options = {"num_shards": 2, "max_bad_fraction": 0.5}

    def plan_before(*names: Any, **folders: Any) -> None:
        if "tokenizer" in str(names[0]) and not planned:
            planned.append(0)  # before the call, which comes here, too
            planned.append(first.try_plan(**options).code)
        rename(*names, **folders)

    monkeypatch.setattr(os, "rename", plan_before)
    second.try_plan(**options).ends(78, "tokenizer")
    monkeypatch.undo()
    assert planned == [0, 0]
    first.num_shards = 2
    first.run()


# What files of a data set say. ---------------------------------------------------------------------------


def altered_place(path: Path) -> None:
    """Change the last digit of the place of a document."""
    lines = path.read_text().split("\n")
    number = next(number for number, line in enumerate(lines) if f'"{ID}"' in line)
    before, place, name = lines[number].split(",")
    lines[number] = f"{before},{place[:-1]}{(int(place[-1]) + 1) % 10},{name}"
    path.write_text("\n".join(lines))


def altered_id(path: Path) -> None:
    path.write_text(path.read_text().replace('"d3"', f'"{ID}"', 1))


@pytest.mark.parametrize("change", [altered_place, altered_id])
def test_kept_ids_are_compared_with_their_hash_before_they_are_used(
    world: World, tmp_path: Path, listed: Path, change: Callable[[Path], None]
) -> None:
    path = world.data_dir / "ids" / "shard-00000.jsonl"
    before = path.read_bytes()
    change(path)
    assert path.read_bytes() != before
    world.main("blank", world.data_dir, "--ids", listed, output=tmp_path / "new").ends(65, path)
    assert not (tmp_path / "new").exists()
    world.main("peek", world.data_dir, f"id:{ID}").ends(65, path)


def test_a_damaged_quarantine_file_is_not_believed(world: World) -> None:
    (path,) = (world.data_dir / "quarantine").iterdir()
    entry = json.loads(path.read_text())
    address = f"{entry['input']}:{entry['input_offset']}"
    assert "was left out" in world.main("peek", world.data_dir, address).ends(0).out
    path.write_text(path.read_text().replace("a.jsonl", "b.jsonl"))
    world.main("peek", world.data_dir, address).ends(65, path)


def test_blank_finds_the_damage_of_a_shard_that_it_does_not_make(
    world: World, tmp_path: Path, listed: Path
) -> None:
    tar = world.data_dir / "shard-00002.tar"
    data = bytearray(tar.read_bytes())
    data[600] ^= 1
    tar.write_bytes(data)
    ended = world.main("blank", world.data_dir, "--ids", listed, output=tmp_path / "new").ends(65, tar)
    assert "verified" not in ended.text
    assert not (tmp_path / "new" / "shard-00002.json").exists()


# Whole files of another data set. --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Other documents with the same options, and findings about a shard."""
    records = [json.dumps({"text": f"another {number}", "id": f"{ID}{number}"}) for number in range(60)]
    world = World(tmp_path_factory.mktemp("other")).raw({"a.jsonl": "\n".join([*records, "no json"])})
    world.plan(num_shards=3, id_field="id", digests=True, max_bad_fraction=0.5).run()
    flip(world.data_dir / "shard-00001.tar")
    world.main("verify", world.data_dir).ends(65)
    return world


def flip(path: Path) -> None:
    """Make another valid token id of one in a tar."""
    data = bytearray(path.read_bytes())
    data[data.index(b"[", 512) + 1] ^= 1
    path.write_bytes(data)


def test_findings_of_another_data_set_are_damage_that_only_a_verify_of_all_clears(
    world: World, other: World
) -> None:
    path = world.data_dir / "findings.json"
    path.write_bytes((other.data_dir / "findings.json").read_bytes())
    for command in ("status", "verify", "export"):
        more = {"to": "nanogpt", "output_dir": world.data_dir.with_name("out")} if command == "export" else {}
        world.main(command, world.data_dir, **more).ends(65, path)
    world.main("verify", world.data_dir, fast=True).ends(65, path)
    with refuses(BrokenShard, path=path):
        open_loader(world.data_dir)
    assert path.read_bytes() == (other.data_dir / "findings.json").read_bytes()
    world.main("verify", world.data_dir, deep="all").ends(0)
    assert not path.exists()


# Sizes. --------------------------------------------------------------------------------------------------


HOLES = {
    "shard-00000.idx": "peek",
    "shard-00000.tar": "peek",
    "index.json": "stage",
    "plan.json": "verify",
    "ids/shard-00000.jsonl": "peek",
    "findings.json": "verify",
}


@pytest.mark.parametrize("name", HOLES)
def test_a_file_that_is_mostly_a_hole_is_refused_before_it_is_read(
    world: World, tmp_path: Path, name: str
) -> None:
    """A hole costs its writer nothing, and a reader memory and time."""
    with (world.data_dir / name).open("ab") as file:
        file.truncate(3 << 30)
    more: dict[str, list[Any]] = {"stage": ["--to", tmp_path / "new"], "peek": [f"id:{ID}"], "verify": []}
    words = more[HOLES[name]]
    ended = world.main(HOLES[name], world.data_dir, *words).ends(65, world.data_dir / name)
    assert "are on disk: the rest is a hole" in ended.err


def test_a_file_of_data_that_a_file_system_compressed_well_is_no_hole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ZFS keeps 1 MiB of equal records in 4 KiB, and blocks of zeros as holes."""
    path = tmp_path / "index.json"
    with path.open("wb") as file:
        file.write(bytes(4096))
        file.truncate(1 << 20)
        file.seek(1 << 20)
        file.write(b"x" * (17 << 20))
    real = os.fstat

    def compressed(handle: int) -> os.stat_result:
        values = [*real(handle).__reduce__()[1]]
        return os.stat_result(values[0], {**values[1], "st_blocks": 8})

    assert DataFolder(tmp_path).size_of(path.name) == 18 << 20
    monkeypatch.setattr(os, "fstat", compressed)
    with DataFolder(tmp_path).open(path.name) as opened:
        assert opened.num_bytes == 18 << 20


def test_a_document_whose_ids_take_more_bytes_than_ids_can_is_refused(world: World) -> None:
    """An id of at most ten digits takes at most twelve bytes in a list."""
    path = world.data_dir / "shard-00000.idx"
    data = bytearray(path.read_bytes())
    size = 28  # of a record of a document; one crc32 covers all of them
    num_samples = (len(data) - 68) // size
    struct.pack_into("<I", data, 64 + 8, struct.unpack_from("<I", data, 64 + 12)[0] * 12 + 3)
    data[-4:] = struct.pack("<I", zlib.crc32(data[64 : 64 + size * num_samples]))
    path.write_bytes(data)
    stamp = {"num_bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    rewrite_json(world.data_dir / "shard-00000.json", idx=stamp)
    world.main("peek", world.data_dir).ends(65, "shard-00000.tar")
    (world.data_dir / "index.json").unlink()
    world.main("verify", world.data_dir).ends(65, "shard 00000")


def test_a_json_file_of_millions_of_values_is_refused_before_it_is_decoded(world: World) -> None:
    head = json.dumps({"format": "shardprep-findings", "version": 4, "plan_id": "0" * 64})[:-1]
    path = world.data_dir / "findings.json"
    path.write_text(f'{head}, "findings": [{",".join(["[]"] * 4_000_000)}]}}')
    for command in ("status", "verify"):
        world.main(command, world.data_dir).ends(65, path)
    with refuses(BrokenShard, path=path):
        open_loader(world.data_dir)


# What killed attempts left. ------------------------------------------------------------------------------


@pytest.mark.parametrize("folder", ["", "tokenizer", "blanked", "overlap", "jobs/attempts", "transform"])
def test_clean_removes_old_temporaries_of_each_folder(world: World, folder: str) -> None:
    path = put(world.data_dir / folder / ".some.file.host-7-0123abcd.tmp")
    young = put(world.data_dir / folder / ".some.file.host-8-0123abcd.tmp")
    os.utime(path, (time.time() - 48 * 3600,) * 2)
    world.main("clean", world.data_dir).ends(0)
    assert not path.exists()
    assert young.exists()


def test_report_and_train_tokenizer_remove_what_killed_runs_left_beside_their_output(world: World) -> None:
    place = world.data_dir.parent
    page, folder = place / ".page.html.host-1-0123abcd.tmp", place / ".trained.host-1-0123abcd.tmp"
    page.touch()
    folder.mkdir()
    (folder / "tokenizer.json").touch()
    young = place / ".page.html.host-2-0123abcd.tmp"
    young.touch()
    for path in (page, folder):
        os.utime(path, (1, 1))
    world.main("report", world.data_dir, output=place / "page.html").ends(0)
    words = {"input_dir": world.raw_dir, "output_dir": place / "trained", "vocab_size": 300}
    world.main("train_tokenizer", **words).ends(0)
    assert [path.exists() for path in (page, folder, young)] == [False, False, True], "it may still run"


def test_the_mark_of_a_planner_that_was_killed_here_makes_no_task_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"})
    world.data_dir.mkdir()
    mark = world.data_dir / ".plan.json.claimed.tmp"
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waited"))
    for dead in (f"{os.uname().nodename} {2**22 - 1} 5", f"{os.uname().nodename} {os.getpid()} 1"):
        mark.write_text(dead)
        world.try_shard(0, input_dir=world.raw_dir, model_id=world.tokenizer).ends(0)
        assert not mark.exists()
        (world.data_dir / "plan.json").unlink()
        for path in world.data_dir.glob("shard-*"):
            path.unlink()
