"""Helpers of a task: processes that share the work on its shard. The bytes are those of one process.

HELPERS=all tests all forms on 3 and 5 helpers, as `make torture` does.
"""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from shardprep.errors import ReadWriteError, Stopped
from tests.children import child, end_of, environ_of_children, is_living
from tests.input_writers import write_every_format
from tests.waiting import wait_until
from tests.world import World, hostile_text

pytestmark = pytest.mark.processes

ALL = os.environ.get("HELPERS") == "all"
FUNCTION = """
import shardprep
def transform(record):
    number = record.input_offset
    if number % 7 == 3:
        raise shardprep.LeaveOut(f"reason {number}")
    return None if number % 5 == 1 else record["text"].upper()
"""
FORMS: dict[str, dict[str, Any]] = {
    "documents": {"id_field": "id", "digests": True},
    "packed": {"record": "packed", "seq_len": 64, "hash_inputs": True},
    "best_fit of sides": {"record": "packed", "seq_len": 64, "pack": "best_fit", "validation_fraction": 0.3},
    "npy of sides": {"token_format": "npy", "append_eos": True, "validation_fraction": 0.3},
    "a function": {"transform": FUNCTION},
}


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents in every format, with lines that are not UTF-8 and objects without text."""
    world = World(tmp_path_factory.mktemp("formats"))
    world.raw({"a.txt": hostile_text(120, 5).replace("\r", "\n")})
    write_every_format(world.raw_dir)
    rows: list[Any] = [{"id": str(n), "text": f"line {n} 도서관"} for n in range(300)]
    rows[40] = {"id": "none"}
    broken = hostile_text(200, 6).encode() + b"\nbroken \xff line\r\n"
    world.raw({"a.txt": broken, "b.jsonl": rows, "z.txt": "x\n" * 900})
    return world.raw_dir


def planned(folder: Path, raw_dir: Path, options: dict[str, Any]) -> World:
    world = World(folder, raw_dir=raw_dir)
    if "transform" in options:
        function = folder / "clean.py"
        function.write_text(options["transform"])
        options = {**options, "transform": function}
    return world.plan(num_shards=1, max_bad_fraction=1, **options)


def made_by(world: World, num_cpus: int, monkeypatch: pytest.MonkeyPatch, *words: object) -> dict[str, Any]:
    """Make the shard again on some CPUs, and return its files, with what the manifest says of them."""
    for path in world.data_dir.rglob("shard-*"):
        path.unlink()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cpus)))
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("SHARDPREP_STRETCH_BYTES", "700")
    ended = world.main("--shard_id", 0, "--output_dir", world.data_dir, *words).ends(0)
    assert (" helpers" in ended.err) == (num_cpus > 2), ended.err
    files = {
        str(path.relative_to(world.data_dir)): path.read_bytes()
        for path in world.data_dir.rglob("shard-*")
        if path.suffix != ".json" or path.parent != world.data_dir
    }
    (manifest,) = world.manifests()
    texts = manifest.pop("run").pop("texts")
    return {**files, "manifest": manifest, "texts": texts}


@pytest.mark.parametrize("form", FORMS if ALL else ["documents", "best_fit of sides", "a function"])
def test_helpers_give_the_bytes_and_counts_of_one_process(
    tmp_path: Path, raw_dir: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = planned(tmp_path, raw_dir, FORMS[form])
    words = ["--transform", tmp_path / "clean.py"] if "transform" in FORMS[form] else []
    alone = made_by(world, 1, monkeypatch, *words)
    assert alone["manifest"]["counts"]["quarantined"]
    for number in (2, 3, 5) if ALL else (2, 3):
        assert made_by(world, number, monkeypatch, *words) == alone
    assert not world.temporaries()


def test_two_cores_have_helpers_for_a_large_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its lines are mostly spaces, which is quick to read."""
    raw_dir = tmp_path / "raw"
    raw_dir.mkdir()
    with (raw_dir / "a.txt").open("w") as file:
        for number in range(130):
            file.write(f"document {number}" + " " * 2**20 + "\n")
    world = planned(tmp_path, raw_dir, {"record": "packed", "seq_len": 64})
    shards = []
    for num_cpus, words in ((1, "1 CPU,"), (2, "2 CPUs with 2 helpers,")):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, number=num_cpus: set(range(number)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
        ended = world.main("--shard_id", 0, "--output_dir", world.data_dir, "--again").ends(0)
        assert words in ended.err
        shards.append((world.data_dir / "shard-00000.tar").read_bytes())
    assert shards[0] == shards[1]


def test_blanked_documents_are_the_same_from_helpers(
    tmp_path: Path, raw_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = planned(tmp_path / "a", raw_dir, {"id_field": "id", "digests": True}).run().verify()
    ids = tmp_path / "ids.txt"
    ids.write_text("".join(f"{number}\n" for number in range(50, 120)))
    alone = world.blanked(ids, tmp_path / "alone").contents()
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("SHARDPREP_STRETCH_BYTES", "700")
    shared = world.blanked(ids, tmp_path / "shared").contents()
    for name, data in alone.items():
        if name.endswith((".tar", ".idx")):
            assert shared[name] == data, name


def test_an_error_in_a_helper_is_the_error_of_the_task(
    tmp_path: Path, raw_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    function = "def transform(record):\n    raise MemoryError\n"
    world = planned(tmp_path, raw_dir, {"transform": FUNCTION})
    (tmp_path / "clean.py").write_text(function)
    codes = []
    for num_cpus in (1, 3):
        monkeypatch.setattr(os, "sched_getaffinity", lambda _, number=num_cpus: set(range(number)))
        monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
        monkeypatch.setenv("SHARDPREP_STRETCH_BYTES", "700")
        words = ["--output_dir", world.data_dir, "--transform", tmp_path / "clean.py"]
        ended = world.main("--shard_id", 0, *words)
        codes.append((ended.code, type(ended.error)))
    assert codes[0] == codes[1]
    assert codes[0][0] == 78
    assert not world.temporaries()


@pytest.mark.parametrize("disk", ["has room", "is full"])
def test_a_task_with_helpers_writes_its_tar_while_it_takes_their_batches(
    tmp_path: Path, disk: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An error of the thread that writes is the error of the task, and leaves nothing."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 6000}).plan(num_shards=1)
    expected = world.copy(tmp_path / "expected").run().contents()
    real = os.write
    in_main_thread: list[bool] = []  # for each whole piece of the tar

    def write(fd: int, data: Any) -> int:
        if len(data) == 4 << 20 and ".tar." in str(Path(f"/proc/self/fd/{fd}").readlink()):
            in_main_thread.append(threading.current_thread() is threading.main_thread())
            if disk == "is full" and len(in_main_thread) == 2:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data)

    monkeypatch.setattr(os, "write", write)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1, 2})
    monkeypatch.setattr(os, "sched_setaffinity", lambda *_: None)
    monkeypatch.setenv("SHARDPREP_STRETCH_BYTES", "700")
    ended = world.main("--shard_id", 0, "--output_dir", world.data_dir)
    assert in_main_thread == [False] * 2
    if disk == "is full":
        ended.ends(74, os.strerror(errno.ENOSPC))
        assert not list(world.data_dir.glob("shard-*"))
    else:
        ended.ends(0)
        assert world.contents() == expected
    assert not world.temporaries()


HELD = """
import os, time
def transform(record):
    if os.path.exists({folder!r} + "/armed"):
        open({folder!r} + "/pid." + str(os.getpid()), "w").close()
        while not os.path.exists({folder!r} + "/go"):
            time.sleep(0.01)
    return record["text"]
"""


# Runs a command as if the machine had three CPUs.
ON_THREE_CPUS = """
import os, sys
os.sched_getaffinity = lambda _: {0, 1, 2}
os.sched_setaffinity = lambda *_: None
from shardprep.__main__ import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("case", ["a helper is killed", "the task is killed", "the task is stopped"])
def test_a_death_leaves_no_shard_no_file_and_no_process(tmp_path: Path, case: str) -> None:
    """A later attempt makes the shard."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 2000})
    (tmp_path / "clean.py").write_text(HELD.format(folder=str(tmp_path)))
    world.plan(num_shards=1, transform=tmp_path / "clean.py")
    (tmp_path / "armed").touch()
    words = ["--shard_id", 0, "--output_dir", world.data_dir, "--transform", tmp_path / "clean.py"]
    environ = environ_of_children(SHARDPREP_STRETCH_BYTES="700")
    command = [sys.executable, "-c", ON_THREE_CPUS, *map(str, words)]
    with child(command, env=environ, stderr=subprocess.PIPE) as task:
        wait_until(lambda: len(list(tmp_path.glob("pid.*"))) == 3, every_s=0.01)
        helpers = [int(path.suffix[1:]) for path in tmp_path.glob("pid.*")]
        assert task.pid not in helpers
        if case == "a helper is killed":
            os.kill(helpers[0], signal.SIGKILL)
            assert "signal 9" in end_of(task, code=ReadWriteError.exit_code)
        elif case == "the task is stopped":
            task.terminate()
            end_of(task, code=Stopped.exit_code)
        else:
            task.kill()
            end_of(task, code=-signal.SIGKILL)
        wait_until(lambda: not any(map(is_living, helpers)), every_s=0.01)
    assert not list(world.data_dir.glob("shard-*"))
    if case != "the task is killed":  # it could not clean up
        assert not world.temporaries()
    (tmp_path / "armed").unlink()
    world.run(transform=tmp_path / "clean.py").verify()
    assert len(world.texts()) == 2000
