"""What the machine gives this process: CPUs, memory, thread variables, versions of the libraries."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Mapping
from pathlib import Path

from preprocess.doctor.findings import Finding, bad, good, warning
from preprocess.resources import allowed_cpus, cgroup_files, memory_limits, memory_note
from shardprep import __version__
from shardprep.console import short_bytes
from shardprep.errors import UsageError

_NEEDED = ("numpy", "orjson", "tokenizers", "fastokens", "tqdm", "transformers")
_OF_TRAINING = ("torch", "webdataset")


def place_finding(environ: Mapping[str, str]) -> Finding:
    """Which machine this is, and of which job it is a part."""
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    job = environ.get("SLURM_JOB_ID")
    where = f"inside of Slurm's job {job}" if job else "outside of a Slurm job: a task may be given less"
    return good("place", f"{node}, Linux {platform.release()}, {where}")


def cpu_finding(environ: Mapping[str, str], affinity: set[int], root: Path = Path("/")) -> Finding:
    """The CPUs that this process really has: of the mask, of Slurm, of the cgroups' time."""
    num_cpus, num_seen = len(allowed_cpus(environ, affinity, offset=0)), os.cpu_count() or 1
    facts = f"{num_cpus} of the machine's {num_seen} CPUs may be used (affinity {len(affinity)}"
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    facts += f", SLURM_CPUS_PER_TASK {asked})" if asked else ")"
    quota = cpu_quota(root)
    if quota is not None and quota < num_cpus:
        text = f"{facts}, but the cgroup gives the time of {quota:.3g}: more processes only wait"
        return warning("cpus", text, f"run --num_proc {max(1, int(quota))}, or ask for more CPU time")
    if asked.isdigit() and int(asked) > num_cpus:
        text = f"{facts}: fewer than Slurm was asked for"
        return warning("cpus", text, f"srun --cpus-per-task={asked}: srun does not take it over from sbatch")
    return good("cpus", facts)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups allow, the least of all above; None where they do not limit it."""
    quotas = []
    for path in cgroup_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        try:
            words = path.read_text(encoding="ascii").split()
            if path.name == "cpu.cfs_quota_us":
                words.append((path.parent / "cpu.cfs_period_us").read_text(encoding="ascii").strip())
            quota, period = int(words[0]), int(words[1])
        except (OSError, ValueError, IndexError):  # "max" is no limit
            continue
        if quota > 0 and period > 0:
            quotas.append(quota / period)
    return min(quotas, default=None)


def memory_finding(environ: Mapping[str, str], root: Path = Path("/")) -> Finding:
    """The memory that this process may use, and which limit is the least."""
    limits = memory_limits(environ, root)
    least = min(limits, key=lambda name: limits[name])
    machine = limits["the machine"]  # a cgroup without a limit has one beyond it
    others = ", ".join(
        f"{name} {short_bytes(size)}" for name, size in limits.items() if name != least and size <= machine
    )
    text = f"{short_bytes(limits[least])}, by {least}" + (f" ({others})" if others else "")
    if note := memory_note(limits[least] / 2**30):
        reason, _, todo = note.rpartition(": ")
        return warning("memory", f"{text}; {reason}", todo)
    return good("memory", text)


def thread_findings(environ: Mapping[str, str], num_cpus: int) -> list[Finding]:
    """Of each variable that sets numbers of threads: its value, and what it changes here."""
    findings = []
    for name, (here, training) in _VARIABLES.items():
        value = environ.get(name)
        if value is None:
            continue
        text = f"{name}={value}: {here}; {training}"
        if name in _OF_TORCH and value.isdigit() and int(value) > num_cpus:
            todo = f"export {name}={num_cpus} before training"
            findings.append(warning("threads", f"{text}; more threads than the {num_cpus} CPUs", todo))
        else:
            findings.append(good("threads", text))
    unset = [name for name in _VARIABLES if name not in environ]
    if unset:
        text = "tasks set their own; for training see --export"
        findings.append(good("threads", f"not set: {', '.join(unset)}; {text}"))
    return findings


_OF_TORCH = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
_NOTHING = "changes nothing in tasks, which use numpy without threads"
_SET_BY_TASKS = "changes nothing in tasks, which set it to their own CPUs"
# Variable -> what it does in a task, and what in training.
_VARIABLES = {
    "OMP_NUM_THREADS": (_NOTHING, "in training it is torch's threads of a process"),
    "MKL_NUM_THREADS": (_NOTHING, "in training it goes before OMP_NUM_THREADS"),
    "RAYON_NUM_THREADS": (_SET_BY_TASKS, "in training it is the tokenizer's threads"),
    "RAYON_RS_NUM_CPUS": (_SET_BY_TASKS, "in training likewise"),
    "TOKENIZERS_PARALLELISM": (
        "changes nothing in tasks, which switch it on",
        "false in training: no warning where workers fork",
    ),
}


def export_lines(num_cpus: int, num_ranks: int) -> list[str]:
    """Lines for ``source``: what a training script or a ``run`` on this machine may take over."""
    threads = max(1, num_cpus // max(1, num_ranks))
    return [
        f"export OMP_NUM_THREADS={threads}  # torch: {num_cpus} CPUs for {num_ranks} process(es) here",
        f"export MKL_NUM_THREADS={threads}",
        "export TOKENIZERS_PARALLELISM=false  # the loader's workers fork; tasks switch it on themselves",
        f"export DATASET_NUM_PROC={num_cpus}  # processes of `shardprep run`",
    ]


def version_findings() -> list[Finding]:
    """Which versions are installed; what a task needs must be there."""
    found = {name: _version(name) for name in (*_NEEDED, *_OF_TRAINING)}
    findings = []
    if missing := [name for name in _NEEDED if found[name] is None]:
        text = f"{', '.join(missing)} cannot be found by {platform.python_implementation()}"
        todo = "install shardprep for this Python: pip install ."
        findings.append(bad("versions", text, todo, UsageError))
    there = ", ".join(f"{name} {number}" for name, number in found.items() if number is not None)
    findings.append(good("versions", f"shardprep {__version__}, Python {platform.python_version()}, {there}"))
    if absent := [name for name in _OF_TRAINING if found[name] is None]:
        text = f"no {', '.join(absent)} here: tasks need none; training nodes want shardprep[loader]"
        findings.append(good("versions", text))
    return findings


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
