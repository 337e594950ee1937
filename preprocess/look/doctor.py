"""``shardprep doctor``: look at machine, tokenizer and folders before the work; say what to do.

A line per check: good, warning or bad. Tokenizer, engine and estimate are found as ``plan --dry_run`` finds
them; torch is asked in a process of its own, which a broken installation may end. Nothing is written but one
block, which is removed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from lustre import Need, file_system_of, space_lines
from preprocess.make.engines import FEW_BYTES, PROBE
from preprocess.make.worker import load_worker
from preprocess.options import GROUPS, PrepConfig, WorkerSettings
from preprocess.plan.cost_estimate import CostEstimate, measure, scratch_folder
from preprocess.plan.document_ends import document_ends_lines
from preprocess.plan.plan_file import Plan, read_plan
from preprocess.plan.planning import Sharding, make_plan
from preprocess.resources import (
    LEAST_WORKER_BYTES,
    allowed_cpus,
    cgroup_files,
    check_address_space,
    memory_limits,
)
from shardprep import __version__
from shardprep.command_line import add_flags_of, given_of
from shardprep.console import counted, print_lines, short_bytes, short_number
from shardprep.errors import CannotWrite, NotFound, ShardprepError, UsageError
from shardprep.files import PublishedFile, is_folder, size_of_file
from shardprep.format.names import TOKENIZER_DIR
from shardprep.own_packages import REMEDY, mixed_packages


@dataclass(frozen=True)
class Finding:
    """One check."""

    topic: str  # one word: cpus, memory, tokenizer, engine, input, output, threads, versions, torch
    text: str  # what was found, where, and what was expected
    todo: str = ""  # what to do; empty where all is good
    exit_code: int = 0  # of what the work would fail by, as shardprep.errors has them

    @property
    def level(self) -> str:
        return "bad" if self.exit_code else "warning" if self.todo else "good"


def finding_of_error(topic: str, error: ShardprepError) -> Finding:
    """An error as a finding; its message says what to do behind the last semicolon."""
    text, _, todo = str(error).rpartition("; ")
    return Finding(topic, text or todo, todo if text else "see the message", error.exit_code)


def exit_code(findings: Sequence[Finding]) -> int:
    """0 where all is good, 1 for warnings, else the code of the first that is bad."""
    codes = (finding.exit_code for finding in findings if finding.exit_code)
    return next(codes, int(any(finding.todo for finding in findings)))


def as_text(findings: Sequence[Finding]) -> list[str]:
    """A line per finding, and one for what to do; the sum at the end."""
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8}{finding.topic:<10}{finding.text}")
        if finding.todo:
            lines.append(f"{'':18}-> {finding.todo}")
    count = Counter(finding.level for finding in findings)
    return [*lines, f"{count['bad']} bad, {counted(count['warning'], 'warning')}, {count['good']} good"]


def as_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """The same for programs."""
    listed = [{"topic": f.topic, "level": f.level, "text": f.text, "todo": f.todo} for f in findings]
    code = exit_code(findings)
    return {"worst": ("good", "warning", "bad")[min(code, 2)], "exit_code": code, "findings": listed}


def place_finding(environ: Mapping[str, str]) -> Finding:
    """Which machine this is, and of which job it is a part."""
    node = environ.get("SLURMD_NODENAME") or socket.gethostname()
    job = environ.get("SLURM_JOB_ID")
    where = f"inside of Slurm's job {job}" if job else "outside of a Slurm job: a task may be given less"
    return Finding("place", f"{node}, Linux {platform.release()}, {where}")


def cpu_finding(environ: Mapping[str, str], affinity: set[int], root: Path = Path("/")) -> Finding:
    """The CPUs that this process really has: of the mask, of Slurm, of the cgroups' time."""
    num_cpus, num_seen = len(allowed_cpus(environ, affinity, offset=0)), os.cpu_count() or 1
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    facts = f"{num_cpus} of the machine's {num_seen} CPUs may be used (affinity {len(affinity)}"
    facts += f", SLURM_CPUS_PER_TASK {asked})" if asked else ")"
    quota = cpu_quota(root)
    if quota is not None and quota < num_cpus:
        text = f"{facts}, but the cgroup gives the time of {quota:.3g}: more processes only wait"
        return Finding("cpus", text, f"run --num_proc {max(1, int(quota))}, or ask for more CPU time")
    if asked.isdigit() and int(asked) > num_cpus:
        todo = f"srun --cpus-per-task={asked}: srun does not take it over from sbatch"
        return Finding("cpus", f"{facts}: fewer than Slurm was asked for", todo)
    return Finding("cpus", facts)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """CPUs' worth of time that the cgroups allow, the least of all above; None where they do not limit it."""
    quotas = []
    for path in cgroup_files(root, "cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError, IndexError):  # "max" is no limit
            words = path.read_text(encoding="ascii").split()
            if path.name == "cpu.cfs_quota_us":
                words.append((path.parent / "cpu.cfs_period_us").read_text(encoding="ascii").strip())
            quota, period = int(words[0]), int(words[1])
            if quota > 0 and period > 0:
                quotas.append(quota / period)
    return min(quotas, default=None)


def memory_finding(environ: Mapping[str, str], root: Path = Path("/")) -> Finding:
    """The memory that this process may use, and which limit is the least."""
    try:
        check_address_space()
    except UsageError as error:
        return finding_of_error("memory", error)
    limits = memory_limits(environ, root)
    least = min(limits, key=lambda name: limits[name])
    real = {name: size for name, size in limits.items() if size <= limits["the machine"]}
    others = ", ".join(f"{name} {short_bytes(size)}" for name, size in real.items() if name != least)
    text = f"{short_bytes(limits[least])}, by {least}" + (f" ({others})" if others else "")
    if limits[least] >= LEAST_WORKER_BYTES:
        return Finding("memory", text)
    text += f"; a worker needs about {short_bytes(LEAST_WORKER_BYTES)} with a vocabulary like Llama 3's"
    return Finding("memory", f"{text}, and may be killed", "ask for more memory: --mem of sbatch or srun")


# Variable of threads -> what it is in training. Tasks set their own threads.
_VARIABLES = {
    "OMP_NUM_THREADS": "torch's threads of a process",
    "MKL_NUM_THREADS": "the same, and goes before OMP_NUM_THREADS",
    "RAYON_NUM_THREADS": "the tokenizer's threads",
    "RAYON_RS_NUM_CPUS": "the same",
    "TOKENIZERS_PARALLELISM": "best false: no warning where workers fork",
}


def thread_findings(environ: Mapping[str, str], num_cpus: int) -> Iterator[Finding]:
    """Of each variable that sets numbers of threads: its value, and what it changes here."""
    for name in [name for name in _VARIABLES if name in environ]:
        value, todo = environ[name], ""
        text = f"{name}={value}: changes nothing in tasks; in training it is {_VARIABLES[name]}"
        if name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS") and value.isdigit() and int(value) > num_cpus:
            text += f"; more threads than the {num_cpus} CPUs"
            todo = f"export {name}={num_cpus} before training"
        yield Finding("threads", text, todo)
    if unset := ", ".join(name for name in _VARIABLES if name not in environ):
        yield Finding("threads", f"not set: {unset}; tasks set their own; for training see --export")


def export_lines(num_cpus: int, num_ranks: int) -> list[str]:
    """Lines for ``source``: what a training script or a ``run`` on this machine may take over."""
    threads = max(1, num_cpus // max(1, num_ranks))
    return [
        f"export OMP_NUM_THREADS={threads}  # torch: {num_cpus} CPUs for {num_ranks} process(es) here",
        f"export MKL_NUM_THREADS={threads}",
        "export TOKENIZERS_PARALLELISM=false  # the loader's workers fork; tasks switch it on themselves",
        f"export DATASET_NUM_PROC={num_cpus}  # processes of `shardprep run`",
    ]


def version_findings() -> Iterator[Finding]:
    """Which versions are installed; what a task needs must be there."""
    found: dict[str, str] = {}
    needed = ("numpy", "orjson", "tokenizers", "gigatoken", "tqdm", "transformers")
    for name in (*needed, "torch", "webdataset"):
        with suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    if missing := ", ".join(name for name in needed if name not in found):
        todo = "install shardprep for this Python: pip install ."
        yield Finding("versions", f"{missing} cannot be found", todo, UsageError.exit_code)
    there = ", ".join(f"{name} {number}" for name, number in found.items())
    yield Finding("versions", f"shardprep {__version__}, Python {platform.python_version()}, {there}")
    if mixed := mixed_packages():
        yield Finding("packages", "; ".join(mixed), REMEDY, UsageError.exit_code)
    if absent := ", ".join(name for name in ("torch", "webdataset") if name not in found):
        text = f"no {absent} here: tasks need none; training nodes want shardprep[loader]"
        yield Finding("versions", text)


_TORCH_LIMIT_S = 180.0
_QUESTIONS = """
import json, torch
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
    command, code = [sys.executable, "-W", "ignore", "-c", _QUESTIONS], UsageError.exit_code
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        text = f"torch was not loaded, or a GPU did not answer, within {_TORCH_LIMIT_S:.0f} s"
        return [Finding("torch", text, "look at nvidia-smi, and at the environment's file system", code)]
    answers = [line for line in done.stdout.splitlines() if line.startswith("shardprep ")]
    if done.returncode or not answers:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return [Finding("torch", f"torch cannot be used: {why}", "install torch anew for this machine", code)]
    found = json.loads(answers[0].removeprefix("shardprep "))
    return list(torch_findings(found, has_driver=bool(shutil.which("nvidia-smi"))))


def torch_findings(found: dict[str, Any], *, has_driver: bool) -> Iterator[Finding]:
    """What torch's answers mean for training."""
    built = f"for CUDA {found['cuda']}" if found["cuda"] else "for CPUs"
    text = f"torch {found['torch']} {built}, {found['threads']} threads"
    if not found["gpus"]:
        todo = "is a GPU given to this job (--gpus)? Else install a torch of the driver's CUDA"
        unseen = ("nvidia-smi is here, but torch sees no GPU", todo)
        what, todo = unseen if has_driver else ("no GPU here: fine for tasks", "")
        yield Finding("torch", f"{text}; {what}", todo)
        return
    kinds = {f"{name} ({memory / 2**30:.0f} GiB, {level})" for name, memory, level in found["gpus"]}
    gpus = f"{len(found['gpus'])} GPUs: {', '.join(sorted(kinds))}; NCCL {found['nccl']}"
    yield Finding("torch", f"{text}; {gpus}")
    without_bf16 = ("no bf16 on this GPU", "train in fp16 with a GradScaler, or in fp32")
    yield Finding("torch", *(("bf16 works",) if found["bf16"] else without_bf16))
    works = [name for name, error in found["sdpa"].items() if not error]
    fails = [f"{name} ({error})" for name, error in found["sdpa"].items() if error]
    text = f"SDPA: {', '.join(works) or 'nothing'} works" + (f"; not: {', '.join(fails)}" if fails else "")
    todo = "attention will take memory of the square of the length: another torch, or another GPU"
    yield Finding("torch", text, todo if set(works) <= {"MATH"} else "")


_BLOCK_BYTES = 4 << 20
_FILES_PER_SHARD = 4  # tar, idx, manifest, and perhaps quarantine
_ROOM = 1.2  # of what is estimated: an estimate is one
_IN_MEMORY = ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk")
_ON_NFS = ("many tasks at once are slow on NFS", "choose the cluster's parallel file system")
_POOR = {
    "tmpfs": _IN_MEMORY,
    "ramfs": _IN_MEMORY,
    "overlay": ("it lies in a container's own layer, and is gone with it", "bind a folder of the host"),
    "nfs": _ON_NFS,
    "nfs4": _ON_NFS,
}


def file_system_finding(topic: str, path: Path, *, is_written: bool) -> Finding:
    """On which file system a folder lies, or would lie."""
    mount = file_system_of(path)
    if mount is None:
        return Finding(topic, f"{path}: its file system is not in the table of mounts", "look by hand: df")
    text = f"{path} is on {mount.fs_type}, mounted at {mount.mount_point}"
    what, todo = _POOR.get(mount.fs_type, ("", "")) if is_written else ("", "")
    return Finding(topic, f"{text}: {what}" if what else text, todo)


def output_findings(folder: Path, cost: CostEstimate | None, num_shards: int) -> Iterator[Finding]:
    """Whether a data set can be written there, and whether it will fit."""
    places = (folder.absolute(), *folder.absolute().parents)
    there = next(place for place in places if size_of_file(place) is not None)
    code = CannotWrite.exit_code
    if not is_folder(there):
        yield Finding("output", f"{there} is no folder", "choose another --output_dir, or move it away", code)
        return
    yield file_system_finding("output", folder, is_written=True)
    made = "" if there == folder.absolute() else f" (it will be made in {there})"
    try:
        with PublishedFile(there / "doctor") as file:  # written as a shard is, and removed
            file.write(bytes(_BLOCK_BYTES))
            file.sync()
    except ShardprepError as error:
        todo = "free some space, mount it for writing, chmod, or choose another --output_dir"
        yield Finding("output", f"{folder}{made} cannot be written: {error}", todo, code)
        return
    yield Finding("output", f"{folder}{made} can be written")
    yield from _space_findings(there, folder, cost, num_shards)


def _space_findings(
    there: Path, folder: Path, cost: CostEstimate | None, num_shards: int
) -> Iterator[Finding]:
    """Free bytes and inodes against the estimate; on Lustre also quotas, pools and each OST and MDT."""
    status, code = os.statvfs(there), CannotWrite.exit_code
    free = status.f_bavail * status.f_frsize
    text = f"{short_bytes(free)} are free"
    if cost is None:
        yield Finding("space", f"{text}; with --input_dir and --model_id they are compared with the estimate")
        return
    text += f", the shards will take about {short_bytes(cost.output_bytes)}"
    todo = "free some space, choose another --output_dir, or --no-keep_text, --token_format npy or packed"
    is_full, is_tight = free < cost.output_bytes, free < cost.output_bytes * _ROOM
    text += ": hardly enough" if is_tight and not is_full else ""
    yield Finding("space", text, todo if is_tight else "", code if is_full else 0)
    num_files = _FILES_PER_SHARD * num_shards
    if status.f_files:  # 0: the file system makes them as they are needed
        text = f"{short_number(status.f_favail)} inodes are free, {num_shards} shards take up to "
        too_few = ("plan fewer shards: --num_shards", code) if status.f_favail < num_files else ()
        yield Finding("space", text + short_number(num_files), *too_few)
    todo = "free some space, ask for more quota, or choose another --output_dir"
    for line in space_lines(folder, Need(num_bytes=cost.output_bytes, num_shards=num_shards)):
        is_good = line.startswith("it needs")
        yield Finding("space", line) if is_good else Finding("space", line.partition(": ")[2], todo)


def input_finding(folder: Path) -> Finding:
    """On what the input lies; that it can be listed is the plan's to say."""
    if not is_folder(folder):
        code = NotFound.exit_code
        return Finding("input", f"{folder} is no folder", "name the folder of the raw files", code)
    return file_system_finding("input", folder, is_written=False)


class Planned(NamedTuple):
    """What a plan would be, or is; ``plan`` and ``cost`` are None where there is none."""

    findings: list[Finding]
    plan: Plan | None = None
    cost: CostEstimate | None = None


def check_model(model_id: str) -> list[Finding]:
    """The tokenizer and its engine, on texts that tell engines apart."""
    with scratch_folder() as folder:
        raw = folder / "raw"
        raw.mkdir()
        (raw / "a.txt").write_text("\n".join(" ".join(text.splitlines()) for text in PROBE), encoding="utf-8")
        config = PrepConfig(input_dir=raw, output_dir=folder / "data", model_id=model_id, engine="gigatoken")
        planned = check_plan(config, Sharding(), "the probe")
        return planned.findings[1:] if planned.plan else planned.findings


def check_plan(config: PrepConfig, sharding: Sharding, what: str = "this text") -> Planned:
    """Plan without writing anything: the inputs, the tokenizer, the engine on this text, the estimate."""
    said: list[str] = []
    try:
        plan, cost = make_plan(config, sharding, dry_run=True, say=said.append)
    except ShardprepError as error:
        topic = "tokenizer" if "tokenizer" in str(error).split(";")[0] else "plan"
        return Planned([finding_of_error(topic, error)])
    text = (
        f"{counted(len(plan.inputs), 'file')}, {short_bytes(sum(plan.shard_bytes()))}; about "
        f"{short_number(cost.num_tokens)} tokens, {cost.core_hours:.2g} core hours, "
        f"{counted(plan.num_shards, 'shard')} of up to {cost.longest_shard_s:.0f} s on one core"
    )
    findings = [Finding("input", text), _tokenizer_finding(plan, said), engine_finding(plan, said, what)]
    return Planned(findings, plan, cost)


def check_folder(folder: Path, num_cpus: int) -> Planned:
    """A folder that is planned already: its tokenizer's files, its engine, its input, the estimate."""
    said: list[str] = []
    try:
        plan = read_plan(folder)
        if plan is None:
            return Planned([])
        worker = load_worker(plan, folder, WorkerSettings(), num_cpus=num_cpus, warn=said.append)
        said += document_ends_lines(plan, folder / TOKENIZER_DIR)
        cost = measure(plan, worker.engine)
    except ShardprepError as error:
        return Planned([finding_of_error("plan", error)])
    size = short_bytes(sum(plan.shard_bytes()))
    text = f"plan {plan.plan_id[:12]} of {counted(plan.num_shards, 'shard')}, {size} of input"
    engine = engine_finding(plan, said, "the plan's probe", worker.engine.name)
    return Planned([Finding("plan", text), _tokenizer_finding(plan, said), engine], plan, cost)


def _tokenizer_finding(plan: Plan, said: list[str]) -> Finding:
    """Which tokens it has for what; ``said`` by planning, what documents begin and end with."""
    spec = plan.tokenizer
    ids = f"BOS {spec.bos_token_id}, EOS {spec.eos_token_id}, PAD {spec.pad_token_id}"
    text = f"{spec.model_id} is a fast one, {spec.vocab_size} ids; {ids}"
    text += "".join(f"; {line}" for line in said if line.startswith("documents begin "))
    if spec.pad_token_id is not None and spec.pad_token_id == spec.eos_token_id:
        todo = "give it a pad token of its own; this project's loader masks by length, others lose EOS labels"
        return Finding("tokenizer", f"{text}: PAD is EOS", todo)
    if not plan.can_be_cut:
        text += "; documents of megabytes are encoded whole, in memory"
    return Finding("tokenizer", text)


def engine_finding(plan: Plan, said: list[str], what: str, name: str | None = None) -> Finding:
    """Which engine encodes, and why; ``said`` is what planning or the worker said."""
    if (name or ("gigatoken" if plan.fast_engine_is_equal else "tokenizers")) == "gigatoken":
        return Finding("engine", f"gigatoken gives the ids of tokenizers, the reference, on {what}")
    reason = next((line for line in said if "gigatoken" in line), None)
    if reason is None and (num_bytes := sum(plan.shard_bytes())) < FEW_BYTES:
        few = short_bytes(num_bytes)
        return Finding("engine", f"tokenizers, which for {few} is sooner done than gigatoken")
    todo = "nothing is wrong with the ids; plan more or longer tasks, or take a tokenizer of a known kind"
    why = (reason or "gigatoken is not used").partition("; tokenizers encodes")[0]
    return Finding("engine", f"tokenizers encodes, several times slower: {why}", todo)


def add_flags(parser: argparse.ArgumentParser) -> None:
    """What to look at; without a flag only the machine is."""
    parser.description = (
        "Look at this machine, a tokenizer and the folders before the work begins. Writes nothing but one "
        "block, which it removes. In a job: srun shardprep doctor. Exit code: 0 all good, 1 warnings, else "
        "that of the first error."
    )
    text = "as for plan: N even shards (default: one per input file)"
    parser.add_argument("--num_shards", metavar="N", type=int, help=text)
    text, switch = "ask torch, too: takes seconds (default: on)", argparse.BooleanOptionalAction
    parser.add_argument("--torch", action=switch, default=True, help=text)
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the findings for programs")
    text = "print only variables, as lines for a shell to source"
    how.add_argument("--export", action="store_true", help=text)
    places = parser.add_argument_group("what to check (default: this machine alone)")
    named = {
        "input_dir": (Path, "folder of the raw files (default: not checked)"),
        "output_dir": (Path, "folder of the data set, planned or not (default: not checked)"),
        "model_id": (str, "folder of a tokenizer, or its name on the hub (default: not checked)"),
    }
    for name, (kind, text) in named.items():
        places.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    add_flags_of(parser, PrepConfig, but=named, groups=GROUPS)


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is the worst of them."""
    affinity = os.sched_getaffinity(0)
    num_cpus = len(allowed_cpus(os.environ, affinity, offset=0))
    if args.export:
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        print_lines(*export_lines(num_cpus, int(ranks) if ranks.isdigit() else 1))
        return 0
    memory = memory_finding(os.environ)
    training = training_findings() if args.torch else []  # first, while nothing of its size is loaded
    findings = [
        place_finding(os.environ),
        cpu_finding(os.environ, affinity),
        memory,
        *thread_findings(os.environ, num_cpus),
        *version_findings(),
        *([] if memory.exit_code else _data_findings(args, num_cpus)),
        *training,
    ]
    print_lines(*(json.dumps(as_json(findings), indent=1).split("\n") if args.json else as_text(findings)))
    return exit_code(findings)


def _data_findings(args: argparse.Namespace, num_cpus: int) -> list[Finding]:
    """Of the tokenizer and the folders that were named."""
    given = given_of(args, PrepConfig)
    output_dir, input_dir = given.get("output_dir"), given.get("input_dir")
    planned = Planned([])
    if output_dir is not None and is_folder(output_dir):
        planned = check_folder(output_dir, num_cpus)
    findings = [] if input_dir is None else [input_finding(input_dir)]
    if not planned.findings and "model_id" in given:
        if findings and findings[0].level == "good":
            planned = check_plan(PrepConfig(**given), Sharding(num_shards=args.num_shards))
        else:
            findings += check_model(given["model_id"])
    findings += planned.findings
    if output_dir is not None:
        num_shards = planned.plan.num_shards if planned.plan else 0
        findings += output_findings(output_dir, planned.cost, num_shards)
    return findings
