"""Signals that reach all processes of a training job: workers outlive them, and end with the main process."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import get_llama3_dataloader
from tests.checkout import ROOT
from tests.external_tars import write_numbered_data
from tests.waiting import HANG_S, wait_until

pytestmark = pytest.mark.processes

NUM_SAMPLES = 192
SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)

CHILD = """
import multiprocessing, json, os, pathlib, signal, sys, time
from loader import get_llama3_dataloader

from loader.samples import Samples

calls, read = [], Samples.read

def hanging(*given):  # the first window comes, with all batches of an epoch
    if calls:
        pathlib.Path(os.environ["HANGS"]).touch()
        time.sleep(10**6)
    calls.append(None)
    return read(*given)

if sys.argv[3] != "outlive":
    Samples.read = hanging

def outlive(loader):
    received = set()
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda number, _: received.add(number))
    print("ready", flush=True)
    seen = [number for batch in loader for number in batch["input_ids"][:, 0].tolist()]
    batches = iter(loader)
    next(batches)
    while len(received) < 5:
        time.sleep(0.01)
    print(json.dumps(seen), flush=True)
    time.sleep(10**6)

def end(loader, how):
    batches = iter(loader)
    next(batches), next(batches)
    while not os.path.exists(os.environ["HANGS"]):
        time.sleep(0.01)
    if how == "close":
        loader.close()
    elif how == "del":
        del batches, loader
    elif how == "raise":
        raise RuntimeError("of the loop")
    print("ends", flush=True)

if __name__ == "__main__":
    data, method, how = sys.argv[1:]
    multiprocessing.set_start_method(method)
    loader = get_llama3_dataloader(data, 8, data, num_workers=2, shuffle=False)
    outlive(loader) if how == "outlive" else end(loader, how)
"""

RANK = """
import json, os, signal, sys, time
import torch
import torch.distributed as dist
from loader import get_llama3_dataloader

asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(True))
data, out = sys.argv[1:]
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Embedding(200, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = get_llama3_dataloader(data, 4, data, num_workers=2, global_batch_size=8)
log = open(f"{out}/{rank}", "w")
while True:
    for batch in loader:
        model(batch["input_ids"]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        print(json.dumps(batch["input_ids"][:, 0].tolist()), file=log, flush=True)
        if asked:
            time.sleep(1)  # a step takes its time, and who is going to die of the signal has died
        stop = torch.tensor(len(asked))
        dist.all_reduce(stop)
        if stop:
            if rank == 0:
                torch.save({"model": model.state_dict(), "loader": loader.state_dict()}, f"{out}/saved")
            dist.barrier()
            os._exit(75)
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("data"), NUM_SAMPLES, 3)


@pytest.fixture
def start(data: Path, tmp_path: Path) -> Iterator[Any]:
    """Starts a training process in a session of its own; what is left of it is killed."""
    children: list[subprocess.Popen[str]] = []
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HANGS": str(tmp_path / "hangs")}
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}

    def started(script: str, *words: object, launcher: Sequence[str] = ()) -> subprocess.Popen[str]:
        (tmp_path / "train.py").write_text(script)
        child = subprocess.Popen(
            [sys.executable, *launcher, tmp_path / "train.py", data, *map(str, words)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "errors").open("w"),
            text=True,
            start_new_session=True,
        )
        children.append(child)
        return child

    yield started
    for child in children:
        for pid in session(child.pid):
            os.kill(pid, signal.SIGKILL)
        child.communicate()
    print((tmp_path / "errors").read_text())  # shown where a test fails


def session(number: int) -> dict[int, str]:
    """The processes of a session that have not ended, with their command lines."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            if int(of_session) == number and state not in "ZX":
                found[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue  # it ended
    return found


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_outlive_every_stop_signal_and_are_gone_when_the_main_process_is_killed(
    start: Any, method: str
) -> None:
    """From their first moment on, while they import, too."""
    child = start(CHILD, method, "outlive")
    assert child.stdout.readline() == "ready\n"
    while not select.select([child.stdout], [], [], 0.01)[0]:
        for number in SIGNALS:
            os.killpg(child.pid, number)
    assert json.loads(child.stdout.readline() or "null") == list(range(NUM_SAMPLES))
    assert len(session(child.pid)) > 2, "the workers are kept for the next epoch"
    child.kill()
    wait_until(lambda: not session(child.pid))


@pytest.mark.parametrize(("method", "how"), [("fork", "close"), ("forkserver", "raise"), ("fork", "end")])
def test_a_worker_that_hangs_is_ended_with_the_loader(start: Any, method: str, how: str) -> None:
    child = start(CHILD, method, how)
    out, _ = child.communicate(timeout=HANG_S)
    assert out == ("" if how == "raise" else "ends\n")
    assert child.returncode == (1 if how == "raise" else 0)
    wait_until(lambda: not session(child.pid))


def test_ranks_of_torchrun_that_are_told_to_stop_with_all_their_workers_save_a_checkpoint(
    start: Any, data: Path, tmp_path: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={port}"]
    agent = start(RANK, tmp_path, launcher=launcher)
    logs = [tmp_path / "0", tmp_path / "1"]
    wait_until(lambda: agent.poll() is not None or all(len(batches_in(log)) > 3 for log in logs))
    ranks = [pid for pid, parent in parents().items() if parent == agent.pid]
    assert len(ranks) == 2, "both run, each in a session of its own"
    for pid in (agent.pid, *ranks):
        os.killpg(pid, signal.SIGTERM)
    agent.communicate(timeout=HANG_S)
    assert (tmp_path / "saved").exists(), "each rank had its workers to the end"
    trained = [[*first, *second] for first, second in zip(*map(batches_in, logs), strict=True)]
    options: dict[str, Any] = {"num_workers": 0, "persistent_workers": False}
    with get_llama3_dataloader(data, 8, data, **options) as loader:
        unbroken = [
            batch["input_ids"][:, 0].tolist()
            for _ in range(2 + len(trained) // len(loader))
            for batch in loader
        ]
        loader.load_state_dict(torch.load(tmp_path / "saved")["loader"])
        resumed = next(iter(loader))["input_ids"][:, 0].tolist()
    assert [*trained, resumed] == unbroken[: len(trained) + 1]
    wait_until(lambda: not any(map(session, ranks)))


def batches_in(log: Path) -> list[list[int]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def parents() -> dict[int, int]:
    """The parent of each process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            found[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue  # it ended
    return found
