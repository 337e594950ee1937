"""Tasks and ``run``: equal bytes whatever made them, nothing unfinished left by whatever stopped them."""

from __future__ import annotations

import ctypes
import json
import os
import re
import shlex
import signal
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.children import child, end_of, environ_of_children, is_living, shardprep
from tests.held_children import Hold
from tests.input_writers import write_every_format
from tests.waiting import wait_until
from tests.world import Ended, World, call_main, hostile_text, save_tokenizer

FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "best_fit of sides": {"record": "packed", "seq_len": 128, "pack": "best_fit", "validation_fraction": 0.3},
    "whole files": {"doc": "file", "keep_text": False},
}


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents in a file of each format, with lines that are no UTF-8."""
    world = World(tmp_path_factory.mktemp("formats")).raw({"a.txt": hostile_text(200, 5).replace("\r", "\n")})
    write_every_format(world.raw_dir)
    # more documents than any of the batches below holds
    world.raw({"a.txt": hostile_text(200, 5).encode() + b"\nbroken \xff line\r\n", "z.txt": "x\n" * 2500})
    return world.raw_dir


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the system would say it: a worker may use eight CPUs."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)


@pytest.mark.slow
@pytest.mark.usefixtures("eight_cpus")
@pytest.mark.parametrize("form", FORMS)
def test_shards_have_equal_bytes_whatever_makes_them(raw_dir: Path, tmp_path: Path, form: str) -> None:
    options = {**FORMS[form], "max_bad_fraction": 1}
    if form == "whole files":
        options |= {"input_dir": World(tmp_path / "text").raw({"a.txt": "x\n" * 9, "b.txt": "가\n"}).raw_dir}
    planned = World(tmp_path / "planned", raw_dir=raw_dir).plan(num_shards=3, **options)
    reference = planned.copy(tmp_path / "reference").run(engine="gigatoken")
    assert len(reference.contents()) >= 9
    for number, (engine, batch, memory_gb) in enumerate(
        (("tokenizers", "", None), ("gigatoken", "1", None), ("auto", "1000", 0.3), ("tokenizers", "7", 0.6))
    ):
        world = planned.copy(tmp_path / str(number))
        sizes = {"DATASET_BATCH_SIZE": batch, "DATASET_WRITER_BATCH_SIZE": "1024"}
        for shard_id in range(3):
            world.try_shard(shard_id, engine=engine, memory_gb=memory_gb, environ=sizes).ends(0)
        assert world.contents() == reference.contents()
        assert engine == "auto" or world.manifests()[0]["run"]["engine"].startswith(engine)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """Five shards are planned."""
    return World(tmp_path).raw({"a.txt": hostile_text(200), "b.txt": hostile_text(100, 1)}).plan(num_shards=5)


def test_colleagues_can_read_what_a_task_wrote(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        other = World(tmp_path).raw({"a.txt": "a\nb\n"}).plan().run()
    finally:
        os.umask(before)
    files = [path for path in other.data_dir.glob("*") if path.is_file()]
    assert len(files) == 7
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    assert (other.data_dir / "tokenizer").stat().st_mode & 0o777 == 0o750


def heed_permissions() -> None:
    """Give up root's right to read and write whatever it likes: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH."""
    head = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None)
    assert libc.capget(head, sets) == 0
    values = list(struct.unpack("<6I", sets.raw))
    values[0] &= ~0b110  # the effective ones
    assert libc.capset(head, ctypes.create_string_buffer(struct.pack("<6I", *values))) == 0


# What is closed to this user, the command and where it plans into, its exit code, and what it names.
CLOSED: list[tuple[str, int, str, str, int, str]] = [
    ("raw/b.txt", 0, "plan", "other", 66, "b.txt"),
    ("raw/b.txt", 0, "shard", "data", 66, "b.txt"),
    ("raw/sub", 0, "plan", "other", 66, "sub"),
    ("data", 0o555, "shard", "data", 73, "data"),
    ("new", 0o555, "plan", "new", 73, "new"),
    (".", 0o555, "plan", "none", 73, "none"),
    ("data/plan.json", 0, "shard", "data", 74, "plan.json"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("place", "mode", "command", "out", "code", "named"), CLOSED)
def test_what_this_user_may_not_read_or_write_is_named(
    world: World, tmp_path: Path, place: str, mode: int, command: str, out: str, code: int, named: str
) -> None:
    (world.raw_dir / "sub").mkdir()
    (tmp_path / "new").mkdir()
    before = world.contents()
    kept, told = (tmp_path / place).stat().st_mode, tmp_path.with_name(f"{tmp_path.name}.json")
    (tmp_path / place).chmod(mode)
    pid = os.fork()
    if pid == 0:
        heed_permissions()
        planning = {"output_dir": tmp_path / out, "recursive": True}
        ended = world.try_plan(**planning) if command == "plan" else world.try_shard(4)
        told.write_text(json.dumps([ended.code, ended.err]))
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / place).chmod(kept)
    found, err = json.loads(told.read_text())
    assert (found, named in err, "Permission denied" in err) == (code, True, True), err
    assert world.contents() == before
    assert not world.temporaries()


@pytest.mark.processes
@pytest.mark.parametrize("target", ["task alone", "whole group"])
def test_a_signal_while_a_task_plans_ends_it_with_75_and_leaves_no_plan(tmp_path: Path, target: str) -> None:
    """When the signal comes transformers is at work, which must not take it for an error of its own."""
    world = World(tmp_path, tokenizer=save_tokenizer(tmp_path / "model")).raw({"a.txt": "a\n"})
    config = world.tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "mask_token": "<|mask|>"}))
    hold = Hold(tmp_path, "open", "/transformers/models/auto/tokenization_auto.*\\.py")
    command = shardprep("--shard_id", 0, *world.words_of_plan())
    environ = environ_of_children(**hold.environ(), XDG_CACHE_HOME=str(tmp_path / "cache"))
    with child(command, env=environ, stderr=-2) as task:
        (planner,) = hold.wait(1, task)
        assert planner != task.pid
        (os.kill if target == "task alone" else os.killpg)(task.pid, signal.SIGTERM)
        assert "Traceback" not in end_of(task, code=75)
        wait_until(lambda: not is_living(planner), every_s=0.02)
    assert not world.data_dir.exists()


def done(world: World) -> list[int]:
    return [int(path.stem[6:]) for path in sorted(world.data_dir.glob("shard-*.json"))]


@pytest.mark.processes
def test_run_makes_the_missing_shards_by_as_many_processes_as_asked_for(world: World, tmp_path: Path) -> None:
    expected = world.copy(tmp_path / "expected").run().contents()
    made = world.run(1, 3).data_dir / "shard-00001.tar"
    (world.data_dir / "shard-00003.idx").unlink()
    before = made.stat().st_ino
    for flags, of_environment, num_proc in (("--num_proc 6", "", 4), ("--num-proc 2", "4", 2), ("", "1", 1)):
        environ = {"DATASET_NUM_PROC": of_environment}
        ended = world.main("run", world.data_dir, *flags.split(), environ=environ).ends(0)
        assert re.search(rf"\b{num_proc} process", ended.text)
        assert (world.contents(), world.temporaries()) == (expected, [])
        for shard_id in (0, 2, 4):
            (world.data_dir / f"shard-0000{shard_id}.json").unlink()
    assert made.stat().st_ino == before
    world.run()
    times = {path: path.stat().st_mtime_ns for path in world.data_dir.glob("shard-*")}
    world.main("run", world.data_dir).ends(0)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.processes
def test_a_shard_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path).raw({f"{number}.txt": "good\n" * 50 for number in range(6)})
    world.raw({"1.txt": b"good\n" + b"\xff\n" * 20}).plan(num_shards=None)
    (world.raw_dir / "2.txt").unlink()
    ended = world.main("run", world.data_dir, num_proc=2).ends(65)
    assert (done(world), world.temporaries()) == ([0, 3, 4, 5], [])
    world.raw({"1.txt": b"good\n" + b"\xff\n" * 20, "2.txt": "good\n" * 50})
    run_again(ended, "--max_bad_fraction", "1").ends(0)
    assert done(world) == [0, 1, 2, 3, 4, 5]


def run_again(ended: Ended, *flags: str) -> Ended:
    """Run the command that ``run`` tells to make what is missing."""
    found = re.findall(r"shardprep (run .*)", ended.err)
    assert found, ended.err
    return call_main(*shlex.split(found[-1]), *flags)


@pytest.mark.processes
def test_a_killed_process_fails_one_shard_and_what_is_told_makes_it(world: World, tmp_path: Path) -> None:
    hold = Hold(tmp_path / "held", "open", r"/\.shard-\d+\.idx\.")
    command = shardprep("run", world.data_dir, "--num_proc", 2)
    with child(command, env=environ_of_children(**hold.environ()), stderr=-2) as run:
        os.kill(hold.wait(2, run)[0], signal.SIGKILL)
        hold.release()
        text = end_of(run, code=74)
    assert len(done(world)) == 4
    run_again(Ended(code=74, out="", err=text)).ends(0)
    assert (done(world), world.temporaries()) == ([0, 1, 2, 3, 4], [])
