"""Wherever a signal or a death comes, nothing is left behind: no temporary, no process, no traceback."""

from __future__ import annotations

import random
import re
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from tests.children import child, end_of, environ_of_children, is_living, run_child, shardprep
from tests.held_children import Hold
from tests.waiting import wait_until
from tests.world import World

STOPPED = 75
OURS = re.compile("/(preprocess|shardprep)/")


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).raw({"a.txt": "a line of text\n" * 300}).plan(num_shards=2)


def lines_run(world: World, number: int) -> tuple[int, int]:
    """Make shard 0, and send SIGTERM before the n-th line of our code that runs while a temporary is there.

    Returns the exit code, and how many such lines there were.
    """
    for path in world.data_dir.glob("*shard-00000*"):
        path.unlink()
    num_lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal num_lines
        if not OURS.search(frame.f_code.co_filename):
            return None
        is_main = threading.current_thread() is threading.main_thread()
        # Once the command has ended, nobody answers the signal.
        if event == "line" and is_main and callable(signal.getsignal(signal.SIGTERM)):
            if num_lines or any(world.data_dir.glob(".shard-*")):
                num_lines += 1
            if num_lines == number:
                signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    handler = signal.signal(signal.SIGTERM, signal.SIG_DFL)  # so it is again when the command has ended
    sys.settrace(trace)
    try:
        ended = world.try_shard(0)
    finally:
        sys.settrace(before)
        # A signal that came in a finalizer comes again by an alarm, if the command has not ended before.
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGTERM, handler)
    return ended.code, num_lines


@pytest.mark.slow
def test_a_signal_at_any_line_of_making_a_shard_leaves_no_temporary(world: World) -> None:
    """tests/faults stops the commands at each call of the system; here it is between them."""
    code, num_lines = lines_run(world, 10**9)
    assert (code, num_lines > 200) == (0, True)
    chance = random.Random(0)
    # The first lines are those in which files have just been made, the last ones publish them.
    lines = [*range(1, 12), *chance.sample(range(12, num_lines), 12), *range(num_lines - 12, num_lines)]
    codes = set()
    for line in lines:
        code, _ = lines_run(world, line)
        codes.add(code)
        # The mark that an attempt has begun may stay: it is empty, and has the next attempt look for litter.
        left = {path.name for path in world.data_dir.rglob(".*")} - {".shard-00000.begun.tmp"}
        assert not left, line
        assert code == STOPPED or (world.data_dir / "shard-00000.json").exists(), line
    assert codes <= {0, STOPPED}
    assert STOPPED in codes


FINALIZER = """
import os, signal, time
from shardprep.command_line import raise_on_stop_signals
from shardprep.errors import Stopped

class Thing:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)
        for _ in range(1000):
            pass

raise_on_stop_signals()
thing = Thing()
try:
    del thing
    while True:
        time.sleep(0.01)
except Stopped as error:
    print(f"caught {error}")
"""


@pytest.mark.processes
def test_a_signal_where_python_drops_exceptions_stops_the_command_all_the_same() -> None:
    done = run_child([sys.executable, "-c", FINALIZER])
    assert (done.stdout[:6], done.stderr) == ("caught", "")


@pytest.mark.processes
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_the_workers_of_run_do_not_outlive_it(world: World, tmp_path: Path, how: signal.Signals) -> None:
    """Killed it cannot tell them; they stand in the middle of a shard."""
    hold = Hold(tmp_path, "fsync", r"\.shard-\d+\.tar")
    words = shardprep("run", world.data_dir, "--num_proc", 2)
    with child(words, env={**environ_of_children(), **hold.environ()}, stderr=-2) as run:
        workers = hold.wait(2, run)
        assert run.pid not in workers
        run.send_signal(how)
        hold.release()
        end_of(run, code=-9 if how == signal.SIGKILL else STOPPED)
        wait_until(lambda: not any(is_living(pid) for pid in workers), every_s=0.01)
    if how != signal.SIGKILL:
        assert not list(world.data_dir.glob(".shard-*"))


# Sends SIGINT to this process as it imports a module, and runs a command.
INTERRUPTED = """
import os, signal, sys
class Interrupt:
    def find_spec(self, name, *_):
        if name == MODULE:
            os.kill(os.getpid(), signal.SIGINT)
sys.meta_path.insert(0, Interrupt())
"""
COMMANDS = {
    "shardprep": "from shardprep import main; sys.argv[0] = 'shardprep'; sys.exit(main())",
    **{
        f"python -m {package}": f"import runpy; runpy.run_module('{package}', run_name='__main__')"
        for package in ("shardprep", "preprocess")
    },
}


@pytest.mark.processes
@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("module", ["argparse", "msgspec", "shardprep.console", "shardprep.removed"])
def test_ctrl_c_while_a_command_imports_is_one_line(command: str, module: str, tmp_path: Path) -> None:
    program = INTERRUPTED.replace("MODULE", repr(module)) + COMMANDS[command]
    # Nothing is there: without the signal it would end with 66.
    ended = run_child([sys.executable, "-c", program, "clean", tmp_path / "none"], code=STOPPED)
    assert len(ended.stderr.splitlines()) == 1, ended.stderr
