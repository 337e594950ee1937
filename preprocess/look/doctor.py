"""``doctor``: look at machine, tokenizer and folders before the work; say what to do.

What the doctor found: a line per check, good, warning or bad, each with what to do.

What the machine gives this process: CPUs, memory, thread variables, versions, and torch with its GPUs.

A process of its own asks torch: a broken installation ends that one, and not the doctor.

The folders: on what they lie, whether they can be read and written, and whether the shards will fit.

The tokenizer, the engine and the estimate, found as ``plan --dry_run`` finds them; nothing is written.

``shardprep doctor``: runs the checks that the flags allow, and says the worst by its exit code.
"""

from __future__ import annotations

import argparse
import dataclasses
import errno
import importlib.metadata
import importlib.util
import json
import mmap
import os
import platform
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lustre import Need, file_system_of, space_lines
from preprocess.make.engines import FEW_BYTES, PROBE
from preprocess.make.worker import load_worker
from preprocess.options import GROUPS, PrepConfig, WorkerSettings
from preprocess.plan.cost_estimate import CostEstimate, measure, scratch_folder
from preprocess.plan.plan_file import Plan, read_plan
from preprocess.plan.planning import Sharding, make_plan
from preprocess.resources import LEAST_WORKER_BYTES, allowed_cpus, cgroup_files, memory_limits
from shardprep import __version__
from shardprep.command_line import add_flags_of, given_of
from shardprep.console import print_lines, short_bytes, short_number
from shardprep.errors import CannotWrite, NotFound, ShardprepError, UsageError
from shardprep.files import is_folder, size_of_file

Level = Literal["good", "warning", "bad"]
WARNING_EXIT_CODE = 1


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check."""

    topic: str  # one word: cpus, memory, tokenizer, engine, input, output, threads, versions, torch
    level: Level
    text: str  # what was found, where, and what was expected
    todo: str = ""  # what to do; empty where nothing is
    exit_code: int = 0  # of what is bad, as shardprep.errors has them


def good(topic: str, text: str) -> Finding:
    return Finding(topic=topic, level="good", text=text)


def warning(topic: str, text: str, todo: str) -> Finding:
    return Finding(topic=topic, level="warning", text=text, todo=todo)


def bad(topic: str, text: str, todo: str, error: type[ShardprepError]) -> Finding:
    """Something that the work would fail by, with the exit code of ``error``."""
    return Finding(topic=topic, level="bad", text=text, todo=todo, exit_code=error.exit_code)


def of_error(topic: str, error: ShardprepError) -> Finding:
    """An error as a finding; its message says what to do behind the last semicolon."""
    text, semicolon, todo = str(error).rpartition("; ")
    if not semicolon:
        text, todo = todo, "see the message"
    return Finding(topic=topic, level="bad", text=text, todo=todo, exit_code=error.exit_code)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is good, 1 for warnings, else the code of the first that is bad."""
    for finding in findings:
        if finding.level == "bad":
            return finding.exit_code
    return WARNING_EXIT_CODE if any(finding.level == "warning" for finding in findings) else 0


def as_text(findings: Sequence[Finding]) -> list[str]:
    """A line per finding, and one for what to do; the sum at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8}{finding.topic:<10}{finding.text}")
        if finding.todo:
            lines.append(f"{'':18}-> {finding.todo}")
    counts = {
        level: sum(finding.level == level for finding in findings) for level in ("bad", "warning", "good")
    }
    return [*lines, f"{counts['bad']} bad, {counts['warning']} warnings, {counts['good']} good"]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    return {
        "worst": next((f.level for f in findings if f.level == "bad"), None)
        or next((f.level for f in findings if f.level == "warning"), "good"),
        "exit_code": exit_code(findings),
        "findings": [{"topic": f.topic, "level": f.level, "text": f.text, "todo": f.todo} for f in findings],
    }


_NEEDED = ("numpy", "orjson", "tokenizers", "gigatoken", "tqdm", "transformers")
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


_BLOCK_BYTES = 1 << 20
_FILES_PER_SHARD = 4  # tar, idx, manifest, and perhaps quarantine
_ROOM = 1.2  # of what is estimated: an estimate is one
_POOR = {
    "tmpfs": ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk"),
    "ramfs": ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk"),
    "overlay": ("it lies in a container's own layer, and is gone with it", "bind a folder of the host"),
    "nfs": ("many tasks at once are slow on NFS", "choose the cluster's parallel file system"),
    "nfs4": ("many tasks at once are slow on NFS", "choose the cluster's parallel file system"),
}


def file_system_finding(topic: str, path: Path, *, is_written: bool) -> Finding:
    """On which file system a folder lies, or would lie."""
    mount = file_system_of(path)
    if mount is None:
        return warning(
            topic, f"{path}: its file system is not in the table of mounts", "look at it by hand: df"
        )
    text = f"{path} is on {mount.fs_type}, mounted at {mount.mount_point}"
    if is_written and mount.fs_type in _POOR:
        what, todo = _POOR[mount.fs_type]
        return warning(topic, f"{text}: {what}", todo)
    return good(topic, text)


def output_findings(folder: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """Whether a data set can be written there, past the page cache or not, and whether it will fit."""
    places = (folder.absolute(), *folder.absolute().parents)
    there = next(place for place in places if size_of_file(place) is not None)
    if not is_folder(there):
        text = f"{there} is no folder"
        return [bad("output", text, "choose another --output_dir, or move it away", CannotWrite)]
    findings = [file_system_finding("output", folder, is_written=True), _written(there, folder)]
    if findings[-1].level == "bad":
        return findings
    return [*findings, *_room(there, cost, num_shards), *_room_on_lustre(folder, cost, num_shards)]


_MENDED_BY = {
    errno.ENOSPC: "free some space, or choose another --output_dir",
    errno.EDQUOT: "free some space, or choose another --output_dir",
    errno.EROFS: "mount it for writing, or choose another --output_dir",
}


def _written(there: Path, folder: Path) -> Finding:
    """Write a block into an unnamed file of the folder, past the page cache where that is possible."""
    made = "" if there == folder.absolute() else f" (it will be made in {there})"
    try:
        is_direct = _write_block(there)
    except OSError as error:
        text = f"{folder}{made} cannot be written: {error.strerror}"
        todo = _MENDED_BY.get(error.errno or 0, "chmod, or another --output_dir")
        return bad("output", text, todo, CannotWrite)
    how = (
        "past the page cache (O_DIRECT)"
        if is_direct
        else "through the page cache: no O_DIRECT here, a little slower"
    )
    return good("output", f"{folder}{made} can be written, {how}")


def _write_block(folder: Path) -> bool:
    """Write and sync a block, and remove it; whether O_DIRECT took it. Raises OSError."""
    handle, name = tempfile.mkstemp(prefix=".shardprep-doctor-", dir=folder)
    os.close(handle)
    try:
        try:
            _write(name, os.O_DIRECT)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        else:
            return True
        _write(name, 0)
        return False
    finally:
        with suppress(OSError):
            Path(name).unlink()


def _write(name: str, flags: int) -> None:
    handle = os.open(name, os.O_WRONLY | flags)
    try:
        os.write(handle, mmap.mmap(-1, _BLOCK_BYTES))  # aligned, as O_DIRECT wants
        os.fsync(handle)
    finally:
        os.close(handle)


def _room(there: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """Free bytes and inodes against the estimate."""
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    text = f"{short_bytes(free)} are free"
    if cost is None:
        return [good("space", f"{text}; with --input_dir and --model_id they are compared with the estimate")]
    needed = f"{text}, the shards will take about {short_bytes(cost.output_bytes)}"
    todo = "free some space, choose another --output_dir, or --no-keep_text, --token_format npy or packed"
    if free < cost.output_bytes:
        findings = [bad("space", needed, todo, CannotWrite)]
    elif free < cost.output_bytes * _ROOM:
        findings = [warning("space", f"{needed}: hardly enough", todo)]
    else:
        findings = [good("space", needed)]
    if status.f_files:  # 0: the file system makes them as they are needed
        files = f"{short_number(status.f_favail)} inodes are free, {num_shards} shards take up to "
        files += short_number(_FILES_PER_SHARD * num_shards)
        if status.f_favail < _FILES_PER_SHARD * num_shards:
            findings.append(bad("space", files, "plan fewer shards: --num_shards", CannotWrite))
        else:
            findings.append(good("space", files))
    return findings


def _room_on_lustre(folder: Path, cost: CostEstimate | None, num_shards: int) -> list[Finding]:
    """What quotas, pools and each OST and MDT leave, which statvfs does not tell; nothing off Lustre."""
    if cost is None:
        return []
    lines = space_lines(folder, Need(num_bytes=cost.output_bytes, num_files=3 * num_shards))
    todo = "free some space, ask for more quota, or choose another --output_dir"
    return [
        good("space", line)
        if line.startswith("it needs")
        else warning("space", line.partition(": ")[2], todo)
        for line in lines
    ]


def input_finding(folder: Path) -> Finding:
    """On what the input lies; that it can be listed is the plan's to say."""
    if not is_folder(folder):
        return bad("input", f"{folder} is no folder", "name the folder of the raw files", NotFound)
    return file_system_finding("input", folder, is_written=False)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """What a plan would be, or is; ``plan`` and ``cost`` are None where there is none."""

    findings: list[Finding]
    plan: Plan | None = None
    cost: CostEstimate | None = None


def check_model(config: PrepConfig) -> list[Finding]:
    """The tokenizer and its engine, on texts that tell engines apart."""
    with scratch_folder() as folder:
        raw = folder / "raw"
        raw.mkdir()
        (raw / "a.txt").write_text(
            "\n".join(text.replace("\n", " ").replace("\r", " ") for text in PROBE), encoding="utf-8"
        )
        plain = PrepConfig(
            input_dir=raw, output_dir=folder / "data", model_id=config.model_id, engine="gigatoken"
        )
        return check_plan(plain, Sharding(), of_probe=True).findings


def check_plan(config: PrepConfig, sharding: Sharding, *, of_probe: bool = False) -> Planned:
    """Plan without writing anything: the inputs, the tokenizer, the engine on this text, the estimate."""
    said: list[str] = []
    try:
        plan, cost = make_plan(config, sharding, dry_run=True, say=said.append)
    except ShardprepError as error:
        topic = "tokenizer" if "tokenizer" in str(error).split(";")[0] else "plan"
        return Planned(findings=[of_error(topic, error)])
    findings = [_tokenizer(plan), _engine(plan, said, "the probe" if of_probe else "this text")]
    if of_probe:
        return Planned(findings=findings)
    sizes = plan.shard_bytes()
    shards = f"{plan.num_shards} shards of up to {cost.longest_shard_s:.0f} s on one core"
    about = f"about {short_number(cost.num_tokens)} tokens, {cost.core_hours:.2g} core hours"
    text = f"{len(plan.inputs)} files, {short_bytes(sum(sizes))}; {about}, {shards}"
    return Planned(findings=[good("input", text), *findings], plan=plan, cost=cost)


def check_folder(folder: Path, num_cpus: int) -> Planned:
    """A folder that is planned already: its tokenizer's files, its engine, its input, the estimate."""
    said: list[str] = []
    try:
        plan = read_plan(folder)
        if plan is None:
            return Planned(findings=[])
        worker = load_worker(plan, folder, WorkerSettings(), num_cpus=num_cpus, warn=said.append)
        cost = measure(plan, worker.engine)
    except ShardprepError as error:
        return Planned(findings=[of_error("plan", error)])
    size = short_bytes(sum(plan.shard_bytes()))
    findings = [
        good("plan", f"plan {plan.plan_id[:12]} of {plan.num_shards} shards, {size} of input"),
        _tokenizer(plan),
        _engine(plan, said, "the plan's probe", worker.engine.name),
    ]
    return Planned(findings=findings, plan=plan, cost=cost)


def _tokenizer(plan: Plan) -> Finding:
    spec = plan.tokenizer
    text = (
        f"{spec.model_id} is a fast one, {spec.vocab_size} ids; BOS {spec.bos_token_id}, "
        f"EOS {spec.eos_token_id}, PAD {spec.pad_token_id}"
    )
    if spec.pad_token_id is not None and spec.pad_token_id == spec.eos_token_id:
        todo = "give it a pad token of its own; this project's loader masks by length, others lose EOS labels"
        return warning("tokenizer", f"{text}: PAD is EOS", todo)
    if not plan.can_be_cut:
        text += "; documents of megabytes are encoded whole, in memory"
    return good("tokenizer", text)


def _engine(plan: Plan, said: list[str], what: str, name: str | None = None) -> Finding:
    if (name or ("gigatoken" if plan.fast_engine_is_equal else "tokenizers")) == "gigatoken":
        return good("engine", f"gigatoken gives the ids of tokenizers, the reference, on {what}")
    reason = next((line for line in said if "gigatoken" in line), None)
    if reason is None and (num_bytes := sum(plan.shard_bytes())) < FEW_BYTES:
        return good("engine", f"tokenizers, which for {short_bytes(num_bytes)} is sooner done than gigatoken")
    todo = "nothing is wrong with the ids; plan more or longer tasks, or take a tokenizer of a known kind"
    why = (reason or "gigatoken is not used").partition("; tokenizers encodes")[0]
    return warning("engine", f"tokenizers encodes, several times slower: {why}", todo)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to look at; without a flag only the machine is."""
    parser.description = (
        "Look at this machine, a tokenizer and the folders before the work begins. Writes nothing but one "
        "block, which it removes. In a job: srun shardprep doctor. Exit code: 0 all good, 1 warnings, else "
        "that of the first error."
    )
    parser.add_argument("--num_shards", type=int, help="as for plan: even shards")
    parser.add_argument(
        "--torch", action=argparse.BooleanOptionalAction, default=True, help="ask torch, too: takes seconds"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="the findings for programs")
    how.add_argument("--export", action="store_true", help="only lines of variables, to be sourced")
    add_flags_of(parser, PrepConfig, groups=GROUPS, show_defaults=False)


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is the worst of them."""
    cpus = allowed_cpus(os.environ, os.sched_getaffinity(0), offset=0)
    if args.export:
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        print_lines(*export_lines(len(cpus), int(ranks) if ranks.isdigit() else 1))
        return 0
    findings = [
        place_finding(os.environ),
        cpu_finding(os.environ, os.sched_getaffinity(0)),
        memory_finding(os.environ),
        *thread_findings(os.environ, len(cpus)),
        *version_findings(),
        *_data_findings(args, len(cpus)),
        *(training_findings() if args.torch else []),
    ]
    print_lines(*(json.dumps(as_json(findings), indent=1).split("\n") if args.json else as_text(findings)))
    return exit_code(findings)


def _data_findings(args: argparse.Namespace, num_cpus: int) -> list[Finding]:
    """Of the tokenizer and the folders that were named."""
    from preprocess.plan.planning import Sharding

    given = given_of(args, PrepConfig)
    output_dir, input_dir = given.get("output_dir"), given.get("input_dir")
    planned = Planned(findings=[])
    if output_dir is not None and is_folder(output_dir):
        planned = check_folder(output_dir, num_cpus)
    findings = [] if input_dir is None else [input_finding(input_dir)]
    if not planned.findings and "model_id" in given:
        if findings and findings[0].level == "good":
            planned = check_plan(PrepConfig(**given), Sharding(num_shards=args.num_shards))
        else:
            findings += check_model(PrepConfig(model_id=given["model_id"]))
    findings += planned.findings
    if output_dir is not None:
        num_shards = planned.plan.num_shards if planned.plan else 0
        findings += output_findings(output_dir, planned.cost, num_shards)
    return findings
