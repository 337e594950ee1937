"""slurm/train_ddp.sh with stand-ins for srun, scontrol and squeue: exit codes, signals, what is requeued."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkout import ROOT
from tests.waiting import wait_until

SCRIPT = ROOT / "slurm" / "train_ddp.sh"
# Two ranks; where one ends badly the other is killed, and the higher code is srun's own, as of the real one.
SRUN = r"""#!/bin/bash
while [[ $1 = --* ]]; do shift; done
for rank in 0 1; do
  SLURM_PROCID=$rank SLURM_NTASKS=2 SLURM_LOCALID=$rank SLURMD_NODENAME=n$rank setsid "$@" & pids[rank]=$!
done
highest=0
for _ in 0 1; do
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
signal.signal(signal.SIGTERM, lambda *_: None)
(folder.parent / f"began-{rank}").touch()
if how == "stop":
    while not Path(os.environ["SHARDPREP_STOP_FILE"]).exists():
        time.sleep(0.02)
    (folder / "step-1.pt").touch()
    sys.exit(75)
if rank == 1:
    if how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    sys.exit(int(how))
time.sleep(60)
"""


def start(place: Path, how: str, *, state: str = "RUNNING", **environ: str) -> subprocess.Popen[str]:
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
    _, log = process.communicate(timeout=60)
    assert (process.returncode, words in log) == (code, True), log
    assert list((tmp_path / "checkpoints").iterdir()) == []


@pytest.mark.parametrize(
    ("number", "state", "is_requeued"),
    [
        (signal.SIGUSR1, "RUNNING", True),
        (signal.SIGTERM, "RUNNING", True),
        (signal.SIGTERM, "COMPLETING", False),
    ],
)
def test_a_signal_saves_and_requeues_unless_the_job_is_being_cancelled(
    tmp_path: Path, number: int, state: str, is_requeued: bool
) -> None:
    """TERM is what comes first of a preemption with GraceTime, and of scancel."""
    process = start(tmp_path, "stop", state=state)
    wait_until(lambda: all((tmp_path / f"began-{rank}").exists() for rank in (0, 1)))
    process.send_signal(number)
    _, log = process.communicate(timeout=60)
    assert (tmp_path / "checkpoints" / "step-1.pt").exists(), log
    assert (tmp_path / "requeued").exists() == is_requeued, log
    assert is_requeued or process.returncode == 75, log


def test_a_job_that_slurm_started_again_too_often_ends(tmp_path: Path) -> None:
    """As where one node after the other dies under it."""
    process = start(tmp_path, "3", SLURM_RESTART_COUNT="3", SHARDPREP_MAX_REQUEUES="2")
    _, log = process.communicate(timeout=60)
    assert (process.returncode, "not again" in log) == (75, True), log
    assert not (tmp_path / "began-0").exists()


def test_a_newest_checkpoint_that_was_cut_is_passed_over(tmp_path: Path) -> None:
    import runpy

    run_class: Any = runpy.run_path(str(ROOT / "examples" / "train_llama.py"))["Run"]
    run = object.__new__(run_class)
    run.folder, run.device, run.step = tmp_path, torch.device("cpu"), 0
    loaded: list[object] = []

    class Part:
        def load_state_dict(self, state: object) -> None:
            loaded.append(state)

    run.model = run.optimizer = run.loader = Part()
    for step in (1, 2):
        state = {"step": step, "model": step, "optimizer": step, "loader": step}
        torch.save(state, tmp_path / f"step-{step:08d}.pt")
    newest = tmp_path / "step-00000002.pt"
    newest.write_bytes(newest.read_bytes()[:-200])
    run.load_newest()
    assert (run.step, loaded) == (1, [1, 1, 1])
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(SystemExit, match="no checkpoint"):
        run.load_newest()
