"""Wherever a signal or a death comes, nothing is left behind: no process, no traceback.

tests/faults stops the commands at each call of the system, and looks for temporaries.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from tests.children import child, end_of, environ_of_children, is_living, run_child, shardprep
from tests.held_children import Hold
from tests.waiting import wait_until
from tests.world import World

STOPPED = 75


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path).raw({"a.txt": "a line of text\n" * 300}).plan(num_shards=2)


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
