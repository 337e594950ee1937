"""All readers refuse a shard that verify found wrong, and an error of the system says nothing about a shard.

Such an error names its file and ends the command with its exit code; the shard is neither wrong nor missing.
tests/oracle/test_done.py tests what verify finds, and tests/faults fails every call of every command. This
module has regressions found by these, retries, and the number of calls to the system.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from loader import ShardprepError, get_llama3_dataloader
from tests.forged import rewrite_json
from tests.world import World, tokenizer_dir

WRONG = 1  # the wrong shard, of three
Watch = Callable[..., list[str]]


@pytest.fixture
def wrong(world: World) -> World:
    """Three shards. In one of them verify has found a flipped bit, which makes another valid token id."""
    path = world.data_dir / f"shard-{WRONG:05d}.tar"
    tar = bytearray(path.read_bytes())
    tar[tar.index(b"[", 512) + 1] ^= 1
    path.write_bytes(tar)
    world.main("verify", world.data_dir).ends(65)
    return world


def load(world: World, shards: str = "") -> int:
    """Load an epoch. Returns 0, or the exit code of the error that refuses the data set."""
    try:
        with get_llama3_dataloader(str(world.data_dir / shards), batch_size=4, num_workers=0) as loader:
            return 0 if list(loader) else 1
    except ShardprepError as error:
        return error.exit_code


def export(world: World, to: str = "nanogpt") -> int:
    out = world.data_dir.with_name(f"exported_{to}")
    code = world.main("export", world.data_dir, to=to, output_dir=out).code
    assert code == 0 or not [*out.glob("*.bin"), *out.glob("*.arrow")]
    return code


def stage(world: World) -> int:
    to = world.data_dir.with_name("staged")
    code = world.main("stage", world.data_dir, to=to).code
    assert code == 0 or not list(to.rglob(f"shard-{WRONG:05d}.tar"))
    return code


def done_and_wrong(world: World) -> tuple[str, str]:
    """Return the shards that are done and those that are wrong, by status."""
    state = json.loads(world.main("status", world.data_dir, json=True).ends(0).out)
    return state["done"], state["wrong"]


@pytest.mark.parametrize("has_index", [False, True])
def test_every_reader_refuses_a_shard_that_verify_found_wrong(
    wrong: World, whole: World, has_index: bool
) -> None:
    """Also beside an index, if verify was killed or the index was restored from a backup."""
    assert not (wrong.data_dir / "index.json").exists()
    if has_index:
        (wrong.data_dir / "index.json").write_bytes((whole.data_dir / "index.json").read_bytes())
    assert load(wrong) == load(wrong, "shard-*.tar") == stage(wrong) == 65
    assert [export(wrong, to) for to in ("nanogpt", "megatron", "hf")] == [65, 65, 65]
    wrong.main("verify", wrong.data_dir, fast=True).ends(65)
    assert done_and_wrong(wrong) == ("0,2", "1")
    assert load(wrong, "shard-0000{0,2}.tar") == 0, "the other shards can be loaded"
    wrong.run(WRONG)
    assert load(wrong) == export(wrong) == stage(wrong) == 0, "the shard is made again"
    wrong.verify()


WRONG_VALUES: dict[str, tuple[object, ...]] = {
    "shard": ("1", -1, 2**70, None, True, 1.0),
    "message": (3, ["x"], None),
    "manifest_sha256": (7, "x"),
    "check": ("never",),
}


def test_no_damage_of_the_findings_makes_a_wrong_shard_count_as_done(wrong: World) -> None:
    """Flipped bits, files that are not lists of findings, and wrong values with a correct hash."""
    path, manifest = wrong.data_dir / "findings.json", wrong.data_dir / f"shard-{WRONG:05d}.json"
    before, chance = path.read_bytes(), random.Random(1)
    damaged = [b"", b'{"findings": 3}', bytes(99)]
    for place in chance.sample(range(len(before)), 12):
        flipped = bytes([before[place] ^ 1 << chance.randrange(8)])
        damaged.append(before[:place] + flipped + before[place + 1 :])
    for key, values in WRONG_VALUES.items():
        for value in values:
            path.write_bytes(before)
            rewrite_json(path, **{f"findings.0.{key}": value})
            damaged.append(path.read_bytes())
    of_manifest = manifest.read_bytes()
    for content in damaged:
        path.write_bytes(content)
        ends = [wrong.main(command, wrong.data_dir) for command in ("status", "report", "retry")]
        # Unreadable findings do not make a task replace a shard, either.
        for ended in (*ends, wrong.try_shard(WRONG)):
            ended.ends(65, "findings.json")
        assert load(wrong) == export(wrong) == 65, content
        assert manifest.read_bytes() == of_manifest, content
    # Nobody knows which check found what is wrong, so only one of all shards may clear it.
    for flags in ({"fast": True}, {}, {"deep": 1}):
        wrong.main("verify", wrong.data_dir, **flags).ends(65, "findings.json")
        assert path.read_bytes() == damaged[-1]
    wrong.main("verify", wrong.data_dir, deep="all").ends(65)  # writes new findings
    assert done_and_wrong(wrong)[1] == str(WRONG)


def test_a_manifest_is_read_once_however_often_the_findings_name_it(wrong: World, watch: Watch) -> None:
    path = wrong.data_dir / "findings.json"
    (finding,) = json.loads(path.read_bytes())["findings"]
    others = [{**finding, "manifest_sha256": "0" * 64}] * 500
    rewrite_json(path, findings=[finding, *others])
    opened = watch("open")
    assert done_and_wrong(wrong) == ("0,2", "1")
    assert 1 <= opened.count(f"shard-{WRONG:05d}.json") <= 2


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    """``watch("open")`` records the names of files for which this function of ``os`` is called.

    ``watch("open", "a.txt", errno.EIO, times=2)`` records only files of this name and makes the calls fail,
    with a path or an open descriptor.
    """
    monkeypatch.setattr(time, "sleep", lambda _: None)

    def apply(call: str, name: str = "", error: int = 0, *, times: int = 10**9) -> list[str]:
        noted: list[str] = []
        real = getattr(os, call)

        def watching(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            is_open = isinstance(path, int)
            if name or not is_open:
                shown = Path(f"/proc/self/fd/{path}").readlink() if is_open else Path(os.fspath(path))
                if shown.name == (name or shown.name) and len(noted) < times:
                    noted.append(shown.name)
                    if error:
                        raise OSError(error, os.strerror(error), None if is_open else path)
            return real(path, *args, **kwargs)

        monkeypatch.setattr(os, call, watching)
        return noted

    return apply


@pytest.fixture
def half(world: World) -> World:
    """A data set of three shards, without the second."""
    for path in [world.data_dir / "index.json", *world.data_dir.glob("shard-00001.*")]:
        path.unlink()
    return world


@pytest.mark.parametrize("error", ["EMFILE", "ENFILE", "ESTALE", "EDQUOT", "EROFS", "EIO", "ENOMEM"])
@pytest.mark.parametrize("command", ["plan", "shard"])
def test_only_transient_errors_are_retried(half: World, watch: Watch, command: str, error: str) -> None:
    failed = watch("open", "a.txt", getattr(errno, error))
    ended = half.try_shard(1) if command == "shard" else half.try_plan(output_dir=half.data_dir / "new")
    ended.ends(74, "a.txt")
    assert (len(failed) > 1) == (error in ("EMFILE", "ENFILE", "ESTALE", "EIO"))


@pytest.mark.parametrize("call", ["open", "pread"])
def test_reading_an_input_is_retried_until_it_succeeds(half: World, watch: Watch, call: str) -> None:
    failed = watch(call, "a.txt", errno.ESTALE, times=2)
    half.run(1)
    assert len(failed) == 2


@pytest.mark.parametrize("name", ["tokenizer.json", "added_tokens.json", "chat_template.jinja"])
def test_a_fifo_or_a_device_in_a_models_folder_is_named_and_not_read(tmp_path: Path, name: str) -> None:
    path = Path(shutil.copytree(tokenizer_dir(), tmp_path / "model"), name)
    world = World(tmp_path, tokenizer=path.parent).raw({"a.txt": "a\n"})
    for make in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        path.unlink(missing_ok=True)
        make(path)
        world.try_plan().ends(65, name)


def test_without_a_temporary_folder_plan_ends_with_73_and_names_tmpdir(
    half: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", None)
    monkeypatch.setattr("tempfile._candidate_tempdir_list", lambda: ["/proc/nowhere"])
    half.try_plan(output_dir=half.data_dir / "new").ends(73, "TMPDIR")


@pytest.mark.slow
def test_a_shard_for_each_of_many_small_files_is_warned_of(tmp_path: Path) -> None:
    world = World(tmp_path).raw({f"{number}.txt": "a text\n" for number in range(1000)})
    for name, number, is_warned in (("data", None, True), ("even", 4, False)):
        ended = world.try_plan(output_dir=tmp_path / name, num_shards=number).ends(0)
        assert ("--num_shards 1" in ended.text) == is_warned


def test_a_task_lists_no_folder_and_checks_a_done_shard_with_one_open_and_two_stats(
    half: World, watch: Watch
) -> None:
    """On a parallel file system each call is a round trip to a server."""
    listed = watch("listdir"), watch("scandir")
    half.run(1)
    asked = {call: watch(call) for call in ("open", "stat")}
    half.run(1)
    of_shard = {call: [name for name in names if name.startswith("shard-")] for call, names in asked.items()}
    sizes = ["shard-00001.idx", "shard-00001.tar"]
    assert (of_shard["open"], sorted(of_shard["stat"])) == (["shard-00001.json"], sizes)
    assert not any("data" in names for names in listed)


@pytest.mark.processes
def test_run_finds_missing_shards_by_listing_the_folder_once(half: World, watch: Watch) -> None:
    for number in (0, 1):
        (half.data_dir / f".shard-0000{number}.tar.host-1-00000000.tmp").touch()
    listed = watch("listdir", "data"), watch("scandir", "data")
    half.main("run", half.data_dir).ends(0)
    assert sum(names.count("data") for names in listed) == 1
    assert (half.data_dir / "shard-00001.json").exists()
    assert not list(half.data_dir.glob(".shard-00000*")), "temporaries of done shards are removed"


UNREADABLE = [
    *(
        ("verify", "open", "shard-00001.tar", error)
        for error in ("EIO", "ESTALE", "EMFILE", "ENFILE", "ENOMEM", "EACCES", "ENODEV")
    ),
    ("verify", "open", "shard-00001.idx", "ETIMEDOUT"),
    *((command, "open", "shard-00001.json", "EACCES") for command in ("verify", "status", "run", "load")),
    ("stage", "open", "shard-00001.tar", "ESTALE"),
    ("stage", "open", "tokenizer", "EIO"),
]


@pytest.mark.parametrize(("command", "call", "name", "error"), UNREADABLE)
def test_a_read_error_ends_a_command_with_74_and_marks_no_shard_as_wrong(
    world: World, watch: Watch, command: str, call: str, name: str, error: str
) -> None:
    """No shard is made again, either."""
    if name.endswith(".json"):
        (world.data_dir / "index.json").unlink()  # it would be read instead of the manifests
    before = {path: path.stat().st_mtime_ns for path in world.data_dir.rglob("*") if path.is_file()}
    failed = watch(call, name, getattr(errno, error))
    if command == "load":
        assert load(world) == 74
    else:
        words = ["--to", world.data_dir.with_name("copy")] if command == "stage" else []
        world.main(command, world.data_dir, *words).ends(74, name)
    assert failed
    assert not (world.data_dir / "findings.json").exists()
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_read_errors_of_any_shard_do_not_lose_a_finding(
    world: World, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    tar = world.data_dir / "shard-00001.tar"
    tar.write_bytes(tar.read_bytes().replace(b"[", b"{", 1))
    watch("open", "shard-00000.tar", errno.EIO)
    world.main("verify", world.data_dir).ends(65)
    watch("open", "shard-00001.tar", errno.EIO)
    world.main("verify", world.data_dir).ends(74)
    monkeypatch.undo()
    assert done_and_wrong(world)[1] == "1"
