"""A task uses the CPUs that Slurm gave it and the kernel lets it have, never those of others."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from preprocess.make.resources import allowed_cpus, bind_to_task_cpus
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.mark.parametrize(
    ("environ", "affinity", "offset", "expected"),
    [
        ({}, {3, 1, 2}, 0, [1, 2, 3]),
        ({"SLURM_CPUS_PER_TASK": "2"}, {4, 5}, 7, [4, 5]),
        ({"SLURM_CPUS_PER_TASK": "8"}, {4, 5}, 0, [4, 5]),
        ({"SLURM_CPUS_PER_TASK": "2"}, set(range(8)), 0, [0, 1]),
        ({"SLURM_CPUS_PER_TASK": "2"}, set(range(8)), 3, [6, 7]),
        ({"SLURM_CPUS_PER_TASK": "2"}, set(range(8)), 4, [0, 1]),
        ({"SLURM_CPUS_PER_TASK": "3"}, set(range(8)), 2, [0, 6, 7]),
        ({"SLURM_CPUS_PER_TASK": "1"}, {2, 9}, 1, [9]),
        ({"SLURM_CPUS_PER_TASK": "0"}, {1, 2}, 0, [1, 2]),
        ({"SLURM_CPUS_PER_TASK": "2(x3)"}, {1, 2}, 0, [1, 2]),
    ],
    ids=str,
)
def test_slurms_number_then_the_affinity_mask_decides(
    environ: dict[str, str], affinity: set[int], offset: int, expected: list[int]
) -> None:
    assert allowed_cpus(environ, affinity, offset=offset) == expected


def test_tasks_side_by_side_share_no_cpu_while_there_are_enough() -> None:
    environ = {"SLURM_CPUS_PER_TASK": "3"}
    taken = [allowed_cpus(environ, set(range(12)), offset=task) for task in range(4)]
    assert sorted(cpu for cpus in taken for cpu in cpus) == list(range(12))


def test_binding_narrows_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("there is one CPU here, nothing to narrow")
    monkeypatch.setenv("SLURM_CPUS_PER_TASK", "1")
    monkeypatch.setenv("RAYON_NUM_THREADS", "1")  # both are set, and put back
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    try:
        assert bind_to_task_cpus(offset=1) == 1
        assert os.sched_getaffinity(0) == {sorted(before)[1]}
    finally:
        os.sched_setaffinity(0, before)


THREADS = """
import os, sys
from pathlib import Path
from preprocess.make import engines
from preprocess.make.resources import bind_to
bind_to(sorted(os.sched_getaffinity(0)))
make = getattr(engines, sys.argv[1] + "_engine")
engine = make(Path(sys.argv[2]), allow_special_tokens=False)
engine.encode([b"a text"] * 20_000)
print(len(os.listdir("/proc/self/task")), end="")
"""


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_a_shells_settings_for_other_programs_change_no_engines_threads(prep: Prep, engine: str) -> None:
    """Rayon's variables, and tokenizers' own, act on the tokenizers engine if nobody sets them."""
    counts = set()
    for given in (
        {},
        {"RAYON_NUM_THREADS": "7"},
        {"RAYON_RS_NUM_CPUS": "7"},
        {"TOKENIZERS_PARALLELISM": "false"},
    ):
        names = ("RAYON_NUM_THREADS", "RAYON_RS_NUM_CPUS", "TOKENIZERS_PARALLELISM")
        environ = {name: value for name, value in prep.environ().items() if name not in names} | given
        command = [sys.executable, "-c", THREADS, engine, str(prep.model_dir / "tokenizer.json")]
        counts.add(run_child(command, env=environ).stdout)
    assert len(counts) == 1, counts


HEAPS = """
import ctypes, sys, threading
from preprocess.make.resources import share_heaps

libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fopen.restype = ctypes.c_void_p
if sys.argv[1] == "shared":
    share_heaps()
meeting = threading.Barrier(8)

def take():
    meeting.wait()  # all are alive at once, or one could take another's heap
    libc.malloc(ctypes.c_size_t(5000))
    meeting.wait()

threads = [threading.Thread(target=take) for _ in range(8)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
file = ctypes.c_void_p(libc.fopen(sys.argv[2].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.processes
@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="glibc alone has such heaps")
def test_the_threads_of_a_worker_share_two_heaps(tmp_path: Path) -> None:
    num_heaps = {}
    for how in ("own", "shared"):
        told = tmp_path / how
        run_child([sys.executable, "-c", HEAPS, how, told])
        num_heaps[how] = told.read_text().count("<heap nr=")
    assert num_heaps["own"] > num_heaps["shared"]
    assert num_heaps["shared"] <= 2
