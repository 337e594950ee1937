"""Run loaders in turns on one core, so that noise affects all of them, and return the seconds of each round.

Each loader is one process for the whole table, which waits between its turns. This saves five seconds of
imports per loader and round, and takes the memory of all of them at once: 5 GB for thirteen.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

from benchmark_text import ROOT
from loader_contenders import Loader
from loader_data_sets import DataSets
from peer_environments import peer_python

SCRIPTS = Path(__file__).resolve().parent / "loader_peers"
TURN_LIMIT_S = 300  # per turn, including the data in the first one; a peer that hangs is left out
_ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "RAYON_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}

Turn = dict[str, float]  # see loader_peers/measure.py


class LoaderFailed(Exception):
    """A loader ended or took too long. The message is its last output."""


class RunningLoader:
    """A loader's process on one core, after its first batch. It makes its data if they are missing."""

    def __init__(self, loader: Loader, data: DataSets, core: int) -> None:
        python = sys.executable if loader.peer is None else str(peer_python(loader.peer))
        own = {"PYTHONPATH": str(ROOT)} if loader.peer is None else {}
        self._log = data.scratch / f"{loader.script}.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("taskset", "-c", str(core), python, str(SCRIPTS / f"{loader.script}.py")),
                    *(str(data.scratch / loader.folder), str(data.rows)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **_ENVIRON, **own, **loader.environ},
                text=True,
            )
        try:
            self.turn(0)  # imports, data, first batch
        except LoaderFailed:
            self.close()
            raise

    def turn(self, seconds: float) -> Turn:
        """Let it count tokens for some seconds. Raises LoaderFailed."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        timer = threading.Timer(TURN_LIMIT_S, self._process.kill)
        timer.start()
        try:
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()
            for line in self._process.stdout:
                if line.startswith('{"tokens"'):
                    found: dict[str, float] = json.loads(line)
                    return found
        except BrokenPipeError:
            pass
        finally:
            timer.cancel()
        words = " ".join(self._log.read_text(errors="replace").split())[-300:]
        raise LoaderFailed(words or f"it said nothing, and ended or took more than {TURN_LIMIT_S} s")

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


def take_turns(
    loaders: list[Loader], data: DataSets, *, seconds: float, num_rounds: int, core: int
) -> tuple[dict[str, list[Turn]], dict[str, str]]:
    """Return ``num_rounds`` turns of each loader by label, and why others failed."""
    running: dict[str, RunningLoader] = {}
    turns: dict[str, list[Turn]] = {}
    failed: dict[str, str] = {}
    try:
        for number in range(num_rounds + 1):  # the first round starts them
            for loader in loaders:
                if loader.label in failed:
                    continue
                try:
                    if number == 0:
                        running[loader.label] = RunningLoader(loader, data, core)
                    else:
                        turn = running[loader.label].turn(seconds)
                        turns.setdefault(loader.label, []).append(turn)
                except LoaderFailed as error:
                    failed[loader.label] = str(error)
                    turns.pop(loader.label, None)
            print(f"round {number} of {num_rounds}", file=sys.stderr, flush=True)
    finally:
        for each in running.values():
            each.close()
    return turns, failed
