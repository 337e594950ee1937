"""What the machine gives this process: CPUs, memory, thread variables, versions, and torch with its GPUs.

A process of its own asks torch: a broken installation ends that one, and not the doctor.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from preprocess.doctor.findings import Finding, bad, good, warning
from preprocess.resources import LEAST_WORKER_BYTES, allowed_cpus, cgroup_files, memory_limits
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
    if limits[least] < LEAST_WORKER_BYTES:
        needed = f"a worker needs about {short_bytes(LEAST_WORKER_BYTES)} with a vocabulary like Llama 3's"
        todo = "ask for more memory: --mem of sbatch or srun"
        return warning("memory", f"{text}; {needed}, and may be killed", todo)
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


_TORCH_LIMIT_S = 180.0
_QUESTIONS = """
import json, sys
import torch
cuda, gpus = torch.cuda, []
found = {"torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}
found["threads"] = torch.get_num_threads()
if cuda.is_available():
    found["nccl"] = ".".join(map(str, cuda.nccl.version()))
    found["bf16"] = cuda.is_bf16_supported()
    for number in range(cuda.device_count()):
        gpu = cuda.get_device_properties(number)
        gpus.append([gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}"])
    from torch.nn.attention import SDPBackend, sdpa_kernel
    dtype = torch.bfloat16 if found["bf16"] else torch.float16
    query = torch.randn(1, 2, 64, 64, device="cuda", dtype=dtype)
    found["sdpa"] = {}
    for name in ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
        try:
            with sdpa_kernel(getattr(SDPBackend, name)):
                torch.nn.functional.scaled_dot_product_attention(query, query, query, is_causal=True)
            cuda.synchronize()
            found["sdpa"][name] = ""
        except Exception as error:
            found["sdpa"][name] = (str(error).splitlines() or [type(error).__name__])[0]
print("shardprep " + json.dumps(found))
"""


def training_findings() -> list[Finding]:
    """Nothing where torch is not installed: tasks need none."""
    if importlib.util.find_spec("torch") is None:
        return []
    try:
        done = subprocess.run(
            [sys.executable, "-W", "ignore", "-c", _QUESTIONS],
            capture_output=True,
            text=True,
            timeout=_TORCH_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        text = f"torch was not loaded, or a GPU did not answer, within {_TORCH_LIMIT_S:.0f} s"
        return [
            bad("torch", text, "look at nvidia-smi, and at the file system of the environment", UsageError)
        ]
    answer = next((line for line in done.stdout.splitlines() if line.startswith("shardprep ")), None)
    if done.returncode or answer is None:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [
            bad("torch", f"torch cannot be used: {why}", "install torch anew for this machine", UsageError)
        ]
    return torch_findings(
        json.loads(answer.removeprefix("shardprep ")), has_driver=bool(shutil.which("nvidia-smi"))
    )


def torch_findings(found: dict[str, Any], *, has_driver: bool) -> list[Finding]:
    """What torch's answers mean for training."""
    built = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    text = f"torch {found['torch']} {built}, {found['threads']} threads"
    if not found["gpus"]:
        if has_driver:
            todo = "is a GPU given to this job (--gpus)? Else install a torch of the driver's CUDA"
            return [warning("torch", f"{text}; nvidia-smi is here, but torch sees no GPU", todo)]
        return [good("torch", f"{text}; no GPU here: fine for tasks")]
    kinds = {f"{name} ({memory / 2**30:.0f} GiB, {level})" for name, memory, level in found["gpus"]}
    findings = [
        good("torch", f"{text}; {len(found['gpus'])} GPUs: {', '.join(sorted(kinds))}; NCCL {found['nccl']}")
    ]
    if found["bf16"]:
        findings.append(good("torch", "bf16 works"))
    else:
        findings.append(
            warning("torch", "no bf16 on this GPU", "train in fp16 with a GradScaler, or in fp32")
        )
    works = [name for name, error in found["sdpa"].items() if not error]
    fails = [f"{name} ({error})" for name, error in found["sdpa"].items() if error]
    text = f"SDPA: {', '.join(works) or 'nothing'} works" + (f"; not: {', '.join(fails)}" if fails else "")
    if set(works) <= {"MATH"}:
        todo = "attention will take memory of the square of the length: another torch, or another GPU"
        findings.append(warning("torch", text, todo))
    else:
        findings.append(good("torch", text))
    return findings
