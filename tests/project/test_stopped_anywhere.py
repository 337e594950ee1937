"""Wherever a signal or a death comes, nothing is left behind: no temporary, no process, no traceback."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make.local_run import _Process
from preprocess.make.resources import WorkerSettings
from preprocess.make.shard_writer import ShardWriter
from preprocess.make.worker import members_of
from shardprep.errors import Stopped
from shardprep.files import publish_bytes
from shardprep.format.plan import need_plan
from shardprep.signals import STOP_SIGNALS, stop_signals_wait
from tests.checkout import ROOT
from tests.children import child, is_living, run_child
from tests.waiting import HANG_S, wait_until

if TYPE_CHECKING:
    from tests.conftest import Prep

OURS = re.compile("/(preprocess|shardprep)/")
WATCHED = {"__init__", "_open_new", "__enter__", "__exit__", "publish_bytes", "make", "discard"}


def stop_at(number: int, call: Any) -> bool:
    """Call with Stopped raised before the ``number``-th bytecode of WATCHED; whether it came so far."""
    left = [number]

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if not OURS.search(frame.f_code.co_filename) and frame.f_code.co_name != "make":
            return None
        if frame.f_code.co_name not in WATCHED or (frame.f_back and frame.f_back.f_code.co_name == "__del__"):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                sys.settrace(None)
                raise Stopped("here")
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        with contextlib.suppress(Stopped):
            call()
    finally:
        sys.settrace(before)
    return left[0] <= 0


def test_a_signal_just_behind_the_making_of_a_shards_files_leaves_no_temporary(
    prep: Prep, data_dir: Path
) -> None:
    plan = need_plan(data_dir)

    def make() -> None:
        members = members_of(plan.spec, 0, plan.options)
        with ShardWriter(data_dir, plan.spec, 0, members, input_paths={}):
            pass

    number = 1
    while stop_at(number, make):
        assert prep.temporaries(data_dir) == [], number
        number += 1
    assert number > 200, "all places were tried"


def test_a_signal_anywhere_in_publishing_a_small_file_leaves_no_temporary(prep: Prep, tmp_path: Path) -> None:
    def make() -> None:
        publish_bytes(tmp_path / "small", b"content")

    number = 1
    while stop_at(number, make):
        assert prep.temporaries(tmp_path) == [], number
        number += 1
    assert number > 50


FINALIZER = """
import os, signal, sys, time, weakref
from shardprep.signals import raise_on_stop_signals
from shardprep.errors import Stopped

class Thing:
    def __del__(self):
        at_work()

def at_work(*_):
    if sys.argv[1] == "another error":
        raise ValueError("of a finalizer")
    os.kill(os.getpid(), signal.SIGTERM)
    for _ in range(1000):
        pass

raise_on_stop_signals()
thing = Thing()
if sys.argv[1] == "weak reference":
    Thing.__del__ = lambda self: None
    held = weakref.ref(thing, at_work)
try:
    del thing
    while sys.argv[1] != "another error":
        time.sleep(0.01)
except Stopped as error:
    print(f"caught {error}")
"""


@pytest.mark.processes
@pytest.mark.parametrize("place", ["finalizer", "weak reference"])
def test_a_signal_where_python_drops_exceptions_stops_the_command_all_the_same(place: str) -> None:
    done = run_child([sys.executable, "-c", FINALIZER, place])
    assert done.stdout.startswith("caught stopped by SIGTERM")
    assert done.stderr == ""


@pytest.mark.processes
def test_another_error_in_a_finalizer_is_printed_as_python_does() -> None:
    done = run_child([sys.executable, "-c", FINALIZER, "another error"])
    assert "ValueError: of a finalizer" in done.stderr


PARENT = """
import sys, time
from pathlib import Path
from preprocess.make.local_run import _Process
from preprocess.make.resources import WorkerSettings

if __name__ == "__main__":
    import os
    process = _Process(Path(sys.argv[1]), WorkerSettings(), sorted(os.sched_getaffinity(0)))
    held = os.dup(process.pipe.fileno())
    os.set_inheritable(held, True)
    import subprocess
    subprocess.Popen(["sleep", "300"], close_fds=False)  # its pipe does not end with its parent
    process.pipe.send(99999)
    process.pipe.recv()  # it stands ready
    print(process._process.pid, flush=True)
    time.sleep(300)
"""


@pytest.mark.processes
def test_a_worker_process_does_not_outlive_its_killed_parent(data_dir: Path, tmp_path: Path) -> None:
    """Even where the end of its pipe does not tell it: somebody else holds that, or it is in a long read."""
    (tmp_path / "parent.py").write_text(PARENT)
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    with child([sys.executable, tmp_path / "parent.py", data_dir], env=environ) as parent:
        assert parent.stdout
        pid = int(parent.stdout.readline())
        assert is_living(pid)
        parent.kill()
        wait_until(lambda: not is_living(pid), every_s=0.01)


@pytest.mark.processes
def test_a_worker_process_begins_with_the_stop_signals_waiting(
    data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = []
    process_class = type(_Process(data_dir, WorkerSettings(), [0])._process)
    original = process_class.start

    def start(process: Any) -> None:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        original(process)

    monkeypatch.setattr(process_class, "start", start)
    process = _Process(data_dir, WorkerSettings(), sorted(os.sched_getaffinity(0)))
    os.kill(process._process.pid or 0, signal.SIGINT)  # long before its imports have ended
    process._process.join(HANG_S)
    assert masks[0] >= set(STOP_SIGNALS)
    assert process._process.exitcode == Stopped.exit_code
    assert not signal.pthread_sigmask(signal.SIG_BLOCK, []) & set(STOP_SIGNALS)


SPAWNED = """
import multiprocessing.util, signal
from shardprep.signals import STOP_SIGNALS, start_child

spawn, masks = multiprocessing.util.spawnv_passfds, []

def noted(*args):
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    return spawn(*args)

multiprocessing.util.spawnv_passfds = noted
start_child(print).join()
print(len(masks), masks[-1] >= set(STOP_SIGNALS))
"""


@pytest.mark.processes
def test_the_first_child_begins_with_the_stop_signals_waiting_too() -> None:
    """With it multiprocessing starts its resource tracker, and unblocks signals then."""
    assert run_child([sys.executable, "-c", SPAWNED]).stdout.split() == ["2", "True"]


def test_signals_wait_and_come_afterwards() -> None:
    came: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: came.append(number))
    try:
        with stop_signals_wait():
            signal.pthread_kill(threading.get_ident(), signal.SIGUSR1)
            assert not came
        assert came == [signal.SIGUSR1]
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_the_loser_of_two_writers_ends_well_where_the_other_made_the_shard(
    prep: Prep, data_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever is done first removes the other's temporaries."""
    other = Path(shutil.copytree(data_dir, tmp_path / "other"))
    prep.make(other, 0)
    original = ShardWriter.commit

    def commit(writer: ShardWriter, run: dict[str, Any]) -> Any:
        for path in data_dir.glob(".shard-00000.*"):
            path.unlink()
        for path in sorted(other.glob("shard-00000.*"), key=lambda path: path.suffix == ".json"):
            shutil.copy(path, data_dir)
        return original(writer, run)

    monkeypatch.setattr(ShardWriter, "commit", commit)
    ended = prep.command("--shard_id", 0, "--output_dir", data_dir)
    assert ended.code == 0, ended.text
    assert "shard 00000 is done" in ended.text
    assert prep.contents(data_dir) == prep.contents(other)
    assert prep.temporaries(data_dir) == []


def test_a_writer_whose_temporaries_vanish_is_74_where_nobody_made_the_shard(
    prep: Prep, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = ShardWriter.commit

    def commit(writer: ShardWriter, run: dict[str, Any]) -> Any:
        for path in data_dir.glob(".shard-00000.*"):
            path.unlink()
        return original(writer, run)

    monkeypatch.setattr(ShardWriter, "commit", commit)
    assert prep.command("--shard_id", 0, "--output_dir", data_dir).code == 74
