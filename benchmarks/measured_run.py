"""Run a command on one or more cores, and measure its CPU seconds, with all children, and peak memory."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

_LOG_TAIL = 2000
_NOT_PASSED_ON = ("SLURM", "DATASET_")
_ENVIRON = {"HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True, kw_only=True)
class Usage:
    """The cost of a run."""

    cpu_s: float  # user and system, of the process and its children
    own_cpu_s: float  # of the process alone
    wall_s: float
    max_rss_bytes: int  # of the largest process
    start_cpu_s: float | None = None  # until the first file of a Watch
    work_cpu_s: float | None = None  # from there to the last file


@dataclass(frozen=True, kw_only=True)
class Watch:
    """Measure a run's work as the CPU time between the appearance of two files.

    This is for runs with much more start-up than work, where the difference of two runs would be noise. The
    folder is checked every half millisecond from another core.
    """

    folder: Path
    first: str  # prefix of a name
    last: str

    def cpu_s(self, pid: int) -> tuple[float, float] | None:
        """Return CPU seconds of start and work once ``last`` exists, or None if the process ends before."""
        clock = (~pid << 3) | 2  # id of the clock of all threads of a process, see clock_getcpuclockid
        began: float | None = None
        while os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            names = os.listdir(self.folder)  # noqa: PTH208 - iterdir would double the time between looks
            if began is None and any(name.startswith(self.first) for name in names):
                began = time.clock_gettime(clock)
            if began is not None and any(name.startswith(self.last) for name in names):
                return began, time.clock_gettime(clock) - began
            time.sleep(0.0005)
        return None


class RunFailed(Exception):
    """The command exited with a code other than 0."""


class NotSeen(Exception):
    """A Watch missed a file, because it got no core for longer than the work took."""


def run_pinned(
    command: Sequence[str | Path], *, cwd: Path, log: Path, watch: Watch | None = None, num_cores: int = 1
) -> Usage:
    """Run a command on the last ``num_cores`` cores, offline, without Slurm's variables.

    Raises RunFailed with its last output, or NotSeen if ``watch`` missed a file. The caller must stay small,
    because a child's peak memory is at least its parent's at the fork.
    """
    environ = {name: value for name, value in os.environ.items() if not name.startswith(_NOT_PASSED_ON)}
    environ |= _ENVIRON | {"RAYON_NUM_THREADS": f"{num_cores}", "OMP_NUM_THREADS": f"{num_cores}"}
    cores = sorted(os.sched_getaffinity(0))[-num_cores:]
    began = time.monotonic()
    with log.open("wb") as out:
        process = subprocess.Popen(
            [str(part) for part in command],
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )
        seen = watch.cpu_s(process.pid) if watch else None
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        own_cpu_s = _own_cpu_s(process.pid)
        _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        said = log.read_text(errors="replace")[-_LOG_TAIL:]
        raise RunFailed(f"{command[0]} ended with {process.returncode}: {said}")
    if watch and seen is None:
        raise NotSeen(f"{watch.first}* and {watch.last}* were not seen in {watch.folder}")
    return Usage(
        cpu_s=usage.ru_utime + usage.ru_stime,
        own_cpu_s=own_cpu_s,
        wall_s=time.monotonic() - began,
        max_rss_bytes=usage.ru_maxrss * 1024,
        start_cpu_s=seen[0] if seen else None,
        work_cpu_s=seen[1] if seen else None,
    )


def _own_cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process without its children, in ticks of 10 ms."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    user, system = fields[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def machine_line() -> str:
    """Return CPU model, cores and Python, for the line below a table."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown CPU"
    )
    return f"{model}, {len(os.sched_getaffinity(0))} cores, Linux, Python {platform.python_version()}"
