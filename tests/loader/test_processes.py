"""Real ranks and workers: process groups, signals, kills, limits and imports."""

from __future__ import annotations

import gc
import multiprocessing
import os
import select
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

from loader import BrokenShard, SourceLosses
from tests.checkout import ROOT
from tests.children import child, run_child
from tests.external_tars import write_numbered_tars
from tests.oracle.forms import DataSets
from tests.ranks import GLOBAL_BATCHES, STOP, Seen
from tests.waiting import wait_until, wait_until_gone
from tests.warm_python import WarmPython
from tests.world import ids_of, open_loader, refuses

pytestmark = pytest.mark.processes
Command = Callable[..., list[Any]]


@pytest.fixture
def short_folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A TMPDIR with a path short enough for the socket of a forkserver."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def numbers(batches: Any) -> list[int]:
    return [ids[0] for batch in batches for ids in ids_of(batch)]


# Ranks


@pytest.fixture(scope="module")
def seen(warm: WarmPython, numbered: Path, rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Seen:
    out = tmp_path_factory.mktemp("ranks")
    run_child([warm.python, "-m", "tests.ranks", numbered, rows, out])
    return Seen(out)


def test_ranks_together_get_the_global_batches_of_one_process(seen: Seen, numbered: Path) -> None:
    with open_loader(numbered, 8, model_id=numbered, seed=5) as loader:
        unbroken = [numbers([batch]) for batch in chain(loader, loader)]
        end = loader.state_dict()
    for run in GLOBAL_BATCHES:
        ranks = seen[run["name"]]
        steps = [[*chain(*step)] for step in zip(*(rank["parts"] for rank in ranks), strict=True)]
        first = STOP if "after" in run else 0
        assert steps == unbroken[first : run["last"]], run["name"]
        states = [rank["state"] for rank in ranks]
        assert states == [states[0]] * run["world"], "any rank may save the state"
    of_one = {"layout": None, "checksum": None}
    assert {**states[0], **of_one} == {**end, **of_one}


def test_a_loader_made_before_the_process_group_refuses_to_run(seen: Seen) -> None:
    """Otherwise all ranks would get the same batches. test_settings.py has ranks from variables."""
    first, second = seen["made before the group"]
    assert first["refused"] == second["refused"] == [True, True]
    assert not set(first["late"]) & set(second["late"])


def test_losses_by_source_are_means_over_the_labels_of_all_ranks(seen: Seen) -> None:
    """The means equal those in one process, which tests/loader/test_origins.py checks."""
    ranks = seen["losses by source"]
    losses = SourceLosses(("web", "code"))
    for kept in chain(*(rank["kept"] for rank in ranks)):
        losses.add_losses(*kept)
    assert ranks[0]["means"] == ranks[1]["means"] == pytest.approx(losses.means())


def test_the_examples_of_the_docs_join_parts_and_deal_rows_evenly_on_ranks(seen: Seen) -> None:
    assert seen["context parallelism"] == ["joined"] * 4
    for world in (2, 4):
        assert seen[f"even work of {world}"] == [f"even on {24 // world} batches"] * world


# Lifetime of workers


def alive() -> set[Any]:
    return set(multiprocessing.active_children())


def test_workers_end_when_the_loader_is_closed_or_deleted(numbered: Path) -> None:
    """Even if an iterator is in a reference cycle. Without a cycle, ``del`` is enough."""
    gc.collect()
    before = alive()
    gc.disable()
    try:
        loader = open_loader(numbered, 8, model_id=numbered, num_workers=2)
        cycle: list[Any] = [iter(loader), loader]
        cycle.append(cycle)
        next(cycle[0])
        assert len(alive() - before) == 2
        loader.close()
        wait_until_gone(before)
        dropped = open_loader(numbered, 8, model_id=numbered, num_workers=2)
        next(iter(dropped))
        assert len(alive() - before) == 2
        del dropped
        wait_until_gone(before)
    finally:
        gc.enable()
        gc.collect()


def test_workers_end_after_an_error_and_the_loader_works_again(numbered: Path, tmp_path: Path) -> None:
    paths = write_numbered_tars(tmp_path, 64, 3)
    before = alive()
    with open_loader(tmp_path, 8, model_id=numbered, num_workers=2) as loader:
        whole = paths[1].read_bytes()
        paths[1].write_bytes(whole[:-512])
        with refuses(BrokenShard, path=paths[1]):
            list(loader)
        wait_until_gone(before)
        paths[1].write_bytes(whole)
        assert sorted(numbers(loader)) == list(range(64))
    wait_until_gone(before)


SCRIPT = """
import multiprocessing, os, pathlib, resource, signal, sys, threading, time
from multiprocessing.connection import Connection
if __name__ == "__main__":
    os.setsid()
from loader import ReadWriteError, get_llama3_dataloader

TRAINING, METHOD, HOW, MODEL, TARS = os.getpid(), *sys.argv[1:]
EVERY, HANGS = [*range(400)], pathlib.Path(TARS, f"{HOW}-hangs")
STOPS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
read, send, latest = os.preadv, Connection._send, {}

def numbers(batch):
    return [ids[0] + 200 * ids[1] for ids in batch["input_ids"].tolist()]

def loader_of(num_workers=2, **options):
    return get_llama3_dataloader(TARS, 8, MODEL, num_workers=num_workers, shuffle=False, **options)

def outlive():
    received, loader = set(), loader_of()
    for number in STOPS:
        signal.signal(number, lambda number, _: received.add(number))
    print(f"ready {os.getpid()}", flush=True)
    assert [number for batch in loader for number in numbers(batch)] == EVERY
    batches = iter(loader)
    next(batches)
    while len(received) < len(STOPS):
        time.sleep(0.01)
    print("outlived", flush=True)
    time.sleep(10**6)

def hanging(handle, buffers, offset):  # hangs when a worker goes back in a tar, in its next epoch
    path = os.readlink(f"/proc/self/fd/{handle}")
    if path.endswith(".tar") and multiprocessing.parent_process() is not None:
        if offset < latest.get(path, 0):
            HANGS.touch()
            time.sleep(10**6)
        latest[path] = offset
    return read(handle, buffers, offset)

ENDS = ("close", "raise", "end")
if HOW in ENDS:
    os.preadv = hanging

def end():
    loader = loader_of()
    batches = iter(loader)
    next(batches), next(batches)
    while not HANGS.exists():
        time.sleep(0.01)
    if HOW == "close":
        loader.close()
    elif HOW == "raise":
        raise RuntimeError("of the loop")
    print("ends", flush=True)

def interrupt():
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    armed, interrupted = [], []

    def press_ctrl_c():  # like a terminal
        armed.clear()
        os.killpg(0, signal.SIGINT)
        time.sleep(60)

    def collate(samples):  # called inside the loader
        if armed:
            press_ctrl_c()
        return [sample["input_ids"][0] + 200 * sample["input_ids"][1] for sample in samples]

    loader, seen = loader_of(collate_fn=collate), []
    for where in ("loop", "loader", "idle"):
        try:
            for number, batch in enumerate(loader):
                seen += batch
                if where == "loader" and number == 2:
                    armed.append(True)
                if where == "loop" and number == 2:
                    press_ctrl_c()
        except KeyboardInterrupt:
            interrupted.append(where)
        if where == "idle":
            for worker in multiprocessing.active_children():
                try:
                    worker.kill()
                    worker.join()
                except RuntimeError:  # by torch's handler, if it notices the death before join does
                    worker.join()
            seen += [number for batch in loader for number in batch]
        time.sleep(1)  # let workers end if they do
    assert interrupted == ["loop", "loader"]
    assert sorted(seen) == sorted([*EVERY, *EVERY]), len(seen)

def cut_short(connection, message):
    if os.getpid() != TRAINING and len(message) > 100_000:
        os.write(connection.fileno(), bytes(message[:5000]))
        os.kill(os.getpid(), signal.SIGKILL)
    send(connection, message)

def killed():  # with the loop in this thread, then in another one
    Connection._send, found = cut_short, []

    def loop():
        try:
            for _ in loader_of():
                pass
        except ReadWriteError as error:
            found.append(error.found)

    loop()
    thread = threading.Thread(target=loop)
    thread.start()
    thread.join()
    assert found == ["SIGKILL", "SIGKILL"]

def lower(limit, most, pid=0):
    resource.prlimit(pid, limit, (most, resource.getrlimit(limit)[1]))

def limited():  # batches of 1 MiB, larger than what is read ahead
    files, seen = resource.getrlimit(resource.RLIMIT_NOFILE), []
    with loader_of(num_workers=1) as loader:
        lower(resource.RLIMIT_NOFILE, len(os.listdir("/proc/self/fd")))
        try:
            next(iter(loader))
            raise AssertionError("a worker started")
        except ReadWriteError as error:
            assert "num_workers=0" in str(error)
        resource.setrlimit(resource.RLIMIT_NOFILE, files)
        for batch in loader:
            seen += numbers(batch)
            if len(seen) == 8:
                (worker,) = multiprocessing.active_children()
                lower(resource.RLIMIT_NOFILE, 4, worker.pid)
                for pid in (os.getpid(), worker.pid):
                    lower(resource.RLIMIT_FSIZE, 0, pid)  # as if /dev/shm were full
    assert seen == EVERY

if __name__ == "__main__":
    multiprocessing.set_start_method(METHOD)
    end() if HOW in ENDS else globals()[HOW]()
"""


@pytest.fixture(scope="module")
def training(warm: WarmPython, numbered: Path, tmp_path_factory: pytest.TempPathFactory) -> Command:
    """Returns the command of a training process, which starts a session of its own."""
    folder = tmp_path_factory.mktemp("training")
    write_numbered_tars(folder, 400, 3, ids_of=lambda number: [number % 200, number // 200] * 1000)
    (folder / "train.py").write_text(SCRIPT)
    return lambda method, how: [warm.python, folder / "train.py", method, how, numbered, folder]


def session(number: int) -> list[int]:
    """Return the ids of running processes in a session."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, of_session = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # it ended
        if int(of_session) == number and state not in "ZX":
            found.append(int(folder.name))
    return found


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_workers_end_only_with_their_training(training: Command, short_folder: Path, method: str) -> None:
    """From their first moment on, also while they import."""
    with child(training(method, "outlive")) as process:
        out: Any = process.stdout
        ready, pid = out.readline().split()
        assert ready == "ready"
        leader = int(pid)
        while not select.select([out], [], [], 0.01)[0]:
            for number in (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
                os.killpg(leader, number)
        assert out.readline() == "outlived\n"
        processes = session(leader)
        assert len(processes) > 2, "the workers are kept for the next epoch"
        os.kill(leader, signal.SIGKILL)
        wait_until(lambda: not session(leader))
        if method == "fork":  # Python leaves the socket of a forkserver
            wait_until(lambda: not list(short_folder.iterdir()))


@pytest.mark.parametrize(("method", "how"), [("fork", "close"), ("forkserver", "raise"), ("fork", "end")])
def test_a_hanging_worker_is_killed_with_the_loader_and_leaves_no_file(
    training: Command, short_folder: Path, method: str, how: str
) -> None:
    done = run_child(training(method, how), code=int(how == "raise"))
    assert (done.stdout == "ends\n") != ("of the loop" in done.stderr)
    wait_until(lambda: not list(short_folder.iterdir()))


@pytest.mark.parametrize("how", ["interrupt", "killed", "limited"])
def test_a_loop_survives_ctrl_c_killed_workers_and_missing_resources(training: Command, how: str) -> None:
    """Ctrl-C may come inside the loader. A killed worker, or one that cannot start, is an error."""
    run_child(training("fork", how))


# Missing libraries, and modules that spawn imports again

HIDE_TORCH = """
from importlib.machinery import PathFinder
found = PathFinder.find_spec
PathFinder.find_spec = lambda name, *rest: None if name.partition(".")[0] == "torch" else found(name, *rest)
"""


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["-c", "from loader import get_llama3_dataloader"], 1),
        (["-m", "loader", "where", "DATA", "--state", "checkpoint.pt"], 2),
        (["-m", "loader", "stage", "DATA", "--to", "staged"], 0),  # needs no torch
    ],
)
def test_without_torch_the_last_line_of_an_error_names_the_extra_to_install(
    sets: DataSets, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], code: int
) -> None:
    (tmp_path / "sitecustomize.py").write_text(HIDE_TORCH)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{ROOT}")
    command = [sys.executable, *(str(sets["documents"]) if word == "DATA" else word for word in words)]
    done = run_child(command, code=code, cwd=tmp_path)
    if code:
        assert "pip install 'shardprep[loader]'" in done.stderr.splitlines()[-1]
        assert done.stderr.count("\n") == 1 or code == 1
        assert "During handling" not in done.stderr
    else:
        assert len(list((tmp_path / "staged").rglob("*.tar"))) == 3


UNGUARDED = """
import multiprocessing, sys
from loader import get_llama3_dataloader
multiprocessing.set_start_method("spawn")
for batch in get_llama3_dataloader(sys.argv[1], 8, model_id=sys.argv[1], num_workers=2):
    pass
"""


def test_an_unguarded_loop_with_spawn_is_refused(warm: WarmPython, numbered: Path, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(UNGUARDED)
    done = run_child([warm.python, tmp_path / "train.py", numbered], code=1)
    assert 'if __name__ == "__main__":' in done.stderr.splitlines()[-1]
    assert done.stderr.count("Traceback") == 1
