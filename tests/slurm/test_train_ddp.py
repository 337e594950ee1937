"""slurm/train_ddp.sh with stand-ins for srun, scontrol and squeue: exit codes, signals, what is requeued."""

from __future__ import annotations

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkout import ROOT
from tests.children import end_of, free_port
from tests.waiting import wait_until

pytestmark = pytest.mark.processes

SCRIPT = ROOT / "slurm" / "train_ddp.sh"
# As many tasks as asked for; where one ends badly the others are killed, and the highest code is srun's own,
# as of the real one.
SRUN = r"""#!/bin/bash
[[ -z ${SRUN_ARGUMENTS:-} ]] || printf '%s\n' "$@" >"$SRUN_ARGUMENTS"
while [[ $1 = --* ]]; do [[ $1 != --ntasks=* ]] || num=${1#*=}; shift; done
for ((rank = 0; rank < num; rank++)); do
  export SLURM_PROCID=$rank SLURM_NODEID=$rank SLURM_NTASKS=$num SLURM_LOCALID=$rank SLURMD_NODENAME=n$rank
  setsid "$@" & pids[rank]=$!
done
highest=0
for _ in "${pids[@]}"; do
  rc=0; wait -n "${pids[@]}" || rc=$?
  ((rc <= highest)) || highest=$rc
  ((rc == 0)) || for pid in "${pids[@]}"; do kill -KILL -- "-$pid" 2>/dev/null && highest=137; done
done
exit "$highest"
"""
PROGRAM = """
import os, signal, sys, time
from pathlib import Path
rank, how, folder = int(os.environ["RANK"]), sys.argv[3], Path(sys.argv[2])
start = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
asked = []
if how != "unheeding":
    signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
(folder.parent / f"pid-{rank}-{start}").write_text(str(os.getpid()))
(folder.parent / f"pid-{rank}-{start}").rename(folder.parent / f"began-{rank}-{start}")
while how == "once" and len(list(folder.parent.glob(f"began-*-{start}"))) < 2:
    time.sleep(0.02)  # else one that ends at once could have the other killed before it began
if how == "unheeding":
    (folder / "step-1.pt").touch()
if how in ("stop", "unheeding", "save nothing") or (how == "once" and start == "1"):
    while not asked and not Path(os.environ["SHARDPREP_STOP_FILE"]).exists():
        time.sleep(0.02)
    if how != "save nothing":
        (folder / "step-1.pt").touch()
    sys.exit(75)
if how == "once":
    while rank == 0 and not asked:
        time.sleep(0.02)
    sys.exit(3)
if rank == 1:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
time.sleep(600)
"""


def start(place: Path, how: str, *, state: str = "RUNNING 0", **environ: str) -> subprocess.Popen[str]:
    commands = place / "bin"
    commands.mkdir()
    scontrol = f'case $1 in show) echo n0;; requeue) touch "{place}/requeued"; kill "$PPID";; esac'
    bodies = {"srun": SRUN, "scontrol": f"#!/bin/bash\n{scontrol}\n", "squeue": f"#!/bin/sh\necho {state}\n"}
    for name, body in bodies.items():
        (commands / name).write_text(body)
        (commands / name).chmod(0o755)
    (place / "program.py").write_text(PROGRAM)
    settings = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_NTASKS": "2",
        "SLURM_JOB_NODELIST": "n0",
    }
    settings |= {"SHARDPREP_PYTHON": sys.executable, "PATH": f"{commands}:{os.environ['PATH']}", **environ}
    return subprocess.Popen(
        ["bash", SCRIPT, place / "program.py", "DATA", place / "checkpoints", how],
        env={**os.environ, **settings}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("how", "code", "words"),
    [
        ("3", 3, "the first to fail was rank 1 on n1, with exit code 3"),
        ("7", 7, "without being asked to stop: not requeued"),
        ("kill", 75, "rank 1 on n1 was killed by signal 9"),
    ],
)
def test_the_job_ends_with_the_code_of_the_rank_that_failed_first(
    tmp_path: Path, how: str, code: int, words: str
) -> None:
    process = start(tmp_path, how)
    assert words in end_of(process, code=code)
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("launcher", "of_job", "passed_on"),
    [
        ("srun", {}, []),
        ("srun", {"SLURM_CPUS_PER_TASK": "3"}, ["--cpus-per-task=3"]),
        ("torchrun", {}, []),
        ("torchrun", {"SLURM_CPUS_PER_TASK": "3", "SLURM_NTASKS_PER_NODE": "2"}, ["--cpus-per-task=6"]),
    ],
)
def test_the_step_gets_what_the_job_set_and_else_all_that_the_job_has(
    tmp_path: Path, launcher: str, of_job: dict[str, str], passed_on: list[str]
) -> None:
    """srun with --cpus-per-task=1 gives the ranks of an exclusive node one CPU each."""
    said = tmp_path / "arguments"
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 3\n")
    python.chmod(0o755)
    of_job = {**of_job, "SHARDPREP_LAUNCHER": launcher, "SLURM_JOB_NUM_NODES": "1"}
    environ = {**of_job, "SHARDPREP_PYTHON": str(python), "SRUN_ARGUMENTS": str(said)}
    end_of(start(tmp_path, "3", **environ), code=3)
    sizes = ("--cpus", "--mem", "--gpus", "--gres", "--tres", "--exclusive", "--exact")
    assert [line for line in said.read_text().splitlines() if line.startswith(sizes)] == passed_on


def wait_until_begun(place: Path, start: int = 0) -> list[int]:
    """The ranks' process ids, once both of this start of torchrun heed their signals."""
    found = [place / f"began-{rank}-{start}" for rank in (0, 1)]
    wait_until(lambda: all(path.exists() for path in found))
    return [int(path.read_text()) for path in found]


# How the ranks behave, who is told to stop by which signal, what the job has set -> whether it is requeued.
STOPS: dict[str, tuple[str, str, int, dict[str, str], bool]] = {
    "before the time limit": ("stop", "job", signal.SIGUSR1, {}, True),
    "a preemption": ("stop", "job", signal.SIGTERM, {}, True),
    # With GraceTime the script itself hears nothing. A program that does not heed TERM dies of it.
    "a preemption with GraceTime": ("stop", "ranks", signal.SIGTERM, {}, True),
    "one that no rank heeds, after a checkpoint": ("unheeding", "ranks", signal.SIGTERM, {}, True),
    "scancel": ("stop", "job", signal.SIGTERM, {"state": "COMPLETING 0"}, False),
    "it runs elsewhere by now": ("stop", "job", signal.SIGUSR1, {"state": "RUNNING 1"}, False),
    "no newer checkpoint": ("save nothing", "job", signal.SIGUSR1, {}, False),
    "past the most requeues": ("stop", "job", signal.SIGUSR1, {"SHARDPREP_MAX_REQUEUES": "0"}, False),
}


@pytest.mark.parametrize("name", STOPS)
def test_a_stop_saves_and_requeues_where_there_is_a_newer_checkpoint_and_the_job_may_go_on(
    tmp_path: Path, name: str
) -> None:
    how, told, number, of_job, is_requeued = STOPS[name]
    process = start(tmp_path, how, **of_job)
    ranks = wait_until_begun(tmp_path)
    for pid in ranks if told == "ranks" else [process.pid]:
        with contextlib.suppress(ProcessLookupError):  # one that dies of it takes the others with it
            os.kill(pid, number)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists() == is_requeued, log
    assert is_requeued or process.returncode == 75, log
    saved = [] if how == "save nothing" else ["step-1.pt"]
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == saved, log


def test_a_job_that_slurm_started_again_too_often_ends(tmp_path: Path) -> None:
    """As where one node after the other dies under it."""
    process = start(tmp_path, "3", SLURM_RESTART_COUNT="3", SHARDPREP_MAX_REQUEUES="2")
    assert "not again" in end_of(process, code=75)
    assert not (tmp_path / "began-0-0").exists()


def test_where_a_node_was_lost_the_run_before_is_asked_to_stop(tmp_path: Path) -> None:
    """Its processes may live on there, with the stop file of their own run."""
    process = start(tmp_path, "stop", SLURM_RESTART_COUNT="2", state="RUNNING 2")
    wait_until_begun(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == [".stop-7-1"]
    process.send_signal(signal.SIGUSR1)
    log = end_of(process, code=None)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-1.pt"], log


def test_ranks_that_stop_when_asked_are_no_failure_that_torchrun_starts_again(tmp_path: Path) -> None:
    """After one restart that it did make."""
    of_job = {"SHARDPREP_LAUNCHER": "torchrun", "SHARDPREP_PROCS": "2", "SLURM_JOB_NUM_NODES": "1"}
    of_job |= {"PET_MAX_RESTARTS": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    process = start(tmp_path, "once", **of_job)
    wait_until_begun(tmp_path, start=1)
    process.send_signal(signal.SIGUSR1)
    log = end_of(process, code=None)
    assert (tmp_path / "requeued").exists(), log
    assert len(list(tmp_path.glob("began-*"))) == 4, "it was not started a third time"


class Part:
    """A model, an optimizer, or a loader's state."""

    def __init__(self, loaded: list[object]) -> None:
        self.loaded = loaded

    def load_state_dict(self, state: object) -> None:
        self.loaded.append(state)


@pytest.mark.parametrize("who", ["rank 0, where the newest was cut", "a rank that rank 0 told so"])
def test_all_ranks_go_on_from_the_newest_checkpoint_that_rank_0_could_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str
) -> None:
    run_class: Any = runpy.run_path(str(ROOT / "examples" / "train_llama.py"))["Run"]
    run, loaded = object.__new__(run_class), list[object]()
    run.folder, run.device, run.step = tmp_path, torch.device("cpu"), 0
    run.model = run.optimizer = run.loader = Part(loaded)
    paths = [tmp_path / f"step-0000000{step}.pt" for step in (1, 2)]
    for step, path in enumerate(paths, start=1):
        torch.save({"step": step, "model": step, "optimizer": step, "loader": step}, path)
    if who.startswith("rank 0"):
        paths[1].write_bytes(paths[1].read_bytes()[:-200])
        run.load_newest(0)
    else:
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(torch.distributed, "broadcast_object_list", lambda told: told.__setitem__(0, 1))
        run.load_newest(1)
    assert (run.step, loaded) == (1, [1, 1, 1])
    if who.startswith("rank 0"):
        paths[0].write_bytes(b"")
        with pytest.raises(SystemExit):
            run.load_newest(0)
