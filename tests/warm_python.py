"""Python processes with large libraries already imported: forks of a server that imported them once.

    with WarmPython(tmp_path, ["torch", "loader"], environ) as warm:
        warm.install(folder)             # folder/python and folder/shardprep, for scripts that call them
        run_child([warm.python, "-m", "shardprep", "verify", data])

``import torch`` takes 3 s of CPU time; a fork takes about 0.03 s. The command gets its caller's arguments,
folder, environment and streams. TERM and USR1 reach it and the processes that it started. PYTHONPATH, other
signals and the startup of Python are the server's, so do not use it for tests of these.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

# The script that replaces python. Without site-packages (-S -E) it starts in 0.02 s.
_CLIENT = """#!{python} -SE
import json, os, signal, socket, sys
def pass_on(number, _):
    try:
        os.killpg(group, number)
    except ProcessLookupError:
        pass
with socket.socket(socket.AF_UNIX) as server:
    server.connect({address!r})
    words = {words!r} + sys.argv[1:]
    asked = json.dumps([words, os.getcwd(), dict(os.environ)]).encode("utf-8", "surrogateescape")
    socket.send_fds(server, [len(asked).to_bytes(8, "big")], [0, 1, 2])
    server.sendall(asked)
    group = int.from_bytes(server.recv(8), "big")
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, pass_on)
    code = server.recv(1)
sys.exit(code[0] if code else 137)  # no exit code: it was killed
"""


class WarmPython(contextlib.AbstractContextManager["WarmPython"]):
    """A server with these modules imported and this environment. Its socket is in ``folder``."""

    def __init__(self, folder: Path, modules: Sequence[str], environ: Mapping[str, str]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._address = str(folder / "socket")
        self.python = folder / "python"
        self.install(folder)
        self._server = subprocess.Popen(
            [sys.executable, __file__, self._address, *modules],
            cwd=folder,  # so that no package in the current folder shadows one of PYTHONPATH
            env={**environ, "PYTHONUNBUFFERED": ""},
            stdin=subprocess.PIPE,  # the server exits when this closes, however this process ends
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout is not None
        assert self._server.stdout.readline() == b"ready\n", "the server could not import its modules"

    def install(self, folder: Path) -> None:
        """Write ``python`` and ``shardprep``, which run in forks of the server, into a folder."""
        for name, words in (("python", []), ("shardprep", ["-m", "shardprep"])):
            client = _CLIENT.format(python=sys.executable, address=self._address, words=words)
            (folder / name).write_text(client)
            (folder / name).chmod(0o755)

    def __exit__(self, *_: object) -> None:
        self._server.communicate()


def serve(address: str, modules: Sequence[str]) -> None:
    """Import the modules, then fork for each command until standard input closes."""
    gc.disable()  # of the time of imports it takes a seventh
    for name in modules:
        importlib.import_module(name)
    gc.freeze()  # garbage collection in a fork would copy all pages
    gc.enable()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # forks are not waited for
    print("ready", flush=True)
    while sys.stdin not in select.select([listener, sys.stdin], [], [])[0]:
        connection, _ = listener.accept()
        if os.fork() == 0:
            listener.close()
            _answer(connection)
        connection.close()
    os._exit(0)  # to take all modules apart takes longer than a fork


def _answer(connection: socket.socket) -> None:
    """Run one command in this fork, and send its exit code."""
    head, fds, _, _ = socket.recv_fds(connection, 8, 3)
    with connection.makefile("rb") as stream:
        asked = stream.read(int.from_bytes(head, "big")).decode("utf-8", "surrogateescape")
    words, folder, environ = json.loads(asked)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # The program gets a process of its own, because it may end by os._exit or a signal. This one leads its
    # group.
    os.setpgid(0, 0)
    pid = os.fork()
    if pid:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGUSR1, signal.SIG_IGN)
        for fd in fds:
            os.close(fd)
        with contextlib.suppress(OSError):  # the caller is gone
            connection.sendall(os.getpid().to_bytes(8, "big"))
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        with contextlib.suppress(OSError):
            connection.sendall(bytes([code if code >= 0 else 128 - code]))
        os._exit(0)
    connection.close()
    for number, fd in enumerate(fds):
        os.dup2(fd, number)
        os.close(fd)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environ)
    os._exit(_run(words) % 256)


def _run(words: list[str]) -> int:
    """Do what ``python WORDS`` does, including its threads and exit functions, and return the exit code."""
    code: object = 0
    sys.path[0] = ""  # the current folder, as with -c and -m
    if words[0] == "-u":
        words = words[1:]
    try:
        if words[0] == "-m":
            sys.argv = words[1:]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.path[0] = str(Path(words[0]).absolute().parent)
            sys.argv = words
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as ending:
        code = ending.code or 0
    except BaseException:
        traceback.print_exc()
        code = 1
    if not isinstance(code, int):
        print(code, file=sys.stderr)
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    except OSError:
        code = code or 120
    return code


if __name__ == "__main__":
    sys.path[0] = ""  # instead of this folder
    serve(sys.argv[1], sys.argv[2:])
