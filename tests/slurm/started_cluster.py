"""A real Slurm cluster on this machine, started by tests/slurm_cluster.sh."""

from __future__ import annotations

import contextlib
import getpass
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import SLURM_STARTER
from tests.children import run_child
from tests.waiting import HANG_S, wait_until

CANNOT_INSTALL = 69
# In all other states a job runs or will run, also in SIGNALING, while a signal is being delivered.
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}
_ASK_SLURM_EVERY_S = 0.5  # Slurm's clients take CPU time that the jobs need
# A wrapper around the worker's Python. A fault happens if its marker file exists. With the memory fault each
# attempt takes memory, and the first one keeps it until Slurm, which polls, kills it.
FAULTY_PYTHON = """#!/bin/bash
real={real} place={place}
shard=none
for ((i = 1; i < $#; i++)); do [[ ${{!i}} != --shard_id ]] || {{ next=$((i + 1)); shard=${{!next}}; }}; done
armed() {{ rm "$place/$1-$shard" 2>/dev/null; }}
if [[ -e $place/memory-$shard ]]; then
  armed first && hold_s=600 || hold_s=3
  "$real" -c "import time; held = bytearray(250 << 20); time.sleep($hold_s)" || exit
fi
if armed sleep; then sleep 600; exit 9; fi
if armed kill; then kill -9 $$; fi
if armed survive; then
  touch "$place/surviving"; until [[ -e $place/release ]]; do sleep 0.2; done
fi
exec "$real" "$@"
"""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A running cluster, and the folder and environment for commands."""

    environ: dict[str, str]
    folder: Path

    def run(self, *command: object) -> str:
        """Run a command and return its standard output."""
        words = [str(word) for word in command]
        return run_child(words, cwd=self.folder, env=self.environ).stdout.strip()

    def slurm(self, *words: object, code: int = 0) -> str:
        """Run ``python -m slurm`` and return its output of both streams."""
        command = [sys.executable, "-m", "slurm", *map(str, words)]
        return run_child(command, env=self.environ, stderr=subprocess.STDOUT, code=code).stdout

    def status(self, data: Path) -> dict[str, Any]:
        """Return the output of ``status --json``."""
        state: dict[str, Any] = json.loads(self.slurm("status", data, "--json").splitlines()[-1])
        return state

    def tasks(self, job: str) -> dict[int, dict[str, str]]:
        """Return Slurm's fields of an array's tasks by index, or of another job as task 0."""
        lines = self.run("scontrol", "--oneliner", "show", "job", job).splitlines()
        shown = [dict(re.findall(r"(\w+)=(\S+)", line)) for line in lines]
        return {int(re.findall(r"\d+", each.get("ArrayTaskId", "0"))[0]): each for each in shown}

    def ended(self, job: str) -> dict[int, dict[str, str]]:
        """Wait until no task is pending or running, and return Slurm's fields of all tasks."""
        wait_until(
            lambda: {each["JobState"] for each in self.tasks(job).values()} <= ENDED,
            every_s=_ASK_SLURM_EVERY_S,
        )
        return self.tasks(job)

    def wait_until_idle(self) -> None:
        """Wait until no job is pending or running."""
        wait_until(lambda: not self.run("squeue", "--noheader"), every_s=_ASK_SLURM_EVERY_S)


def start_missing(environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
    """Start the parts of a cluster that are not running. They outlive the starter, unlike with run_child."""
    command = [str(SLURM_STARTER), "up"]
    return subprocess.run(command, env=environ, capture_output=True, text=True, check=False, timeout=HANG_S)


@contextmanager
def started_cluster(untested: str, **settings: str) -> Iterator[dict[str, str]]:
    """Start a cluster, yield the environment for its commands, and stop it.

    ``settings`` are variables of the starter and others. If Slurm cannot be installed, the tests are skipped
    with the starter's message and ``untested``.
    """
    folder = tempfile.mkdtemp(prefix="shardprep-slurm-")  # a short path, because it contains sockets
    others = re.compile("SLURM|SBATCH|SHARDPREP|MASTER|DATASET_")
    environ = {name: os.environ[name] for name in os.environ if not others.match(name)}
    environ |= {"NODE_PREFIX": f"p{os.getpid()}n", "NUM_NODES": "3", "HF_HUB_OFFLINE": "1", **settings}
    environ |= {"CLUSTER_DIR": folder, "SLURM_CONF": f"{folder}/slurm.conf"}
    try:
        up = start_missing(environ)
        if up.returncode == CANNOT_INSTALL:
            pytest.skip(f"{untested}: {up.stderr.strip()}")
        assert up.returncode == 0, up.stderr
        yield environ
    finally:
        subprocess.run([SLURM_STARTER, "down"], env=environ, check=False, timeout=HANG_S)
        shutil.rmtree(folder, ignore_errors=True)


def reset_cluster(environ: Mapping[str, str]) -> None:
    """Cancel all jobs and resume all nodes, and wait until nothing is queued and all nodes are idle."""

    def output_of(*command: str) -> str:
        done = subprocess.run(
            command, env=environ, capture_output=True, text=True, check=False, timeout=HANG_S
        )
        return done.stdout.strip()

    def is_empty() -> bool:
        output_of("scancel", f"--user={getpass.getuser()}")  # repeated, because a job may just be requeued
        return not output_of("squeue", "--noheader")

    for node in output_of("sinfo", "-h", "-N", "-t", "down,drain,fail", "-o", "%N").split():
        output_of("scontrol", "update", f"nodename={node}", "state=resume")
    up = start_missing(environ)
    assert up.returncode == 0, up.stderr
    wait_until(is_empty)
    wait_until(lambda: set(output_of("sinfo", "-h", "-N", "-o", "%T").split()) == {"idle"})


def processes() -> Iterator[tuple[Path, str]]:
    """Yield the folder in /proc and the command line of each process."""
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            yield path, (path / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")


def kill_node(environ: Mapping[str, str], node: str) -> None:
    """Kill only a node's slurmd and the daemons of its steps; its other processes stay alive.

    The node is set down at once, so that tests need not wait for SlurmdTimeout.
    """
    folder = environ["CLUSTER_DIR"]
    for path, command in processes():
        is_step = command.startswith("slurmstepd") and _is_on(path, node, folder)
        if is_step or f"slurmd -f {folder}/slurm.conf -N {node}" in command:
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(path.name), signal.SIGKILL)
    # A late answer of the dead slurmd would resume a node that is down, but not one that is drained.
    for state in ("drain", "down"):
        run_child(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=killed"], env=environ)


def _is_on(process: Path, node: str, folder: str) -> bool:
    try:
        opened = [str(link.readlink()) for link in (process / "fd").iterdir()]
        opened.append((process / "environ").read_bytes().decode("utf-8", "replace"))
    except OSError:
        return False
    return any(f"{folder}/spool-{node}" in item or f"{folder}/log/{node}" in item for item in opened)
