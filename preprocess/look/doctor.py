"""``shardprep doctor``: look at machine, tokenizer and folders before the work; say what to do.

A line per check: good, warning or bad. With folders and a tokenizer it plans without writing anything; a
folder that is planned already is looked at as its tasks will use it. Writes one block, which it removes.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from lustre import Need, file_system_of, space_lines
from preprocess.make.engines import PROBE
from preprocess.make.resources import (
    LEAST_WORKER_BYTES,
    WorkerSettings,
    allowed_cpus,
    cgroup_files,
    check_address_space,
    memory_limits,
)
from preprocess.make.worker import load_worker
from preprocess.plan.cost_estimate import CostEstimate, measure, scratch_folder
from preprocess.plan.document_ends import document_ends_lines
from preprocess.plan.planning import Sharding, make_plan
from shardprep import __version__
from shardprep.command_line import given_of
from shardprep.console import counted, print_lines, short_bytes, short_number
from shardprep.errors import CannotWrite, NotFound, ShardprepError, UsageError
from shardprep.files import PublishedFile, is_folder, size_of_file
from shardprep.format.names import TOKENIZER_DIR
from shardprep.format.options import PrepConfig
from shardprep.format.plan import read_plan
from shardprep.own_packages import REMEDY, mixed_packages


@dataclass(frozen=True)
class Finding:
    """One check."""

    topic: str  # cpus, memory, threads, versions, torch, input, plan, output, space
    text: str  # what was found, where, and what was expected
    todo: str = ""  # what to do; empty where all is good
    exit_code: int = 0  # of what the work would fail by, as shardprep.errors has them

    @property
    def level(self) -> str:
        return "bad" if self.exit_code else "warning" if self.todo else "good"


def _of_error(topic: str, error: ShardprepError) -> Finding:
    """Make a finding of an error; its message says what to do behind the last semicolon."""
    text, _, todo = str(error).rpartition("; ")
    return Finding(topic, text or todo, todo if text else "see the message", error.exit_code)


# --- the machine


def cpu_finding(environ: Mapping[str, str], affinity: set[int], root: Path = Path("/")) -> Finding:
    """Compare the CPUs of this process with what Slurm was asked for and the time of its cgroup."""
    num_cpus = len(allowed_cpus(environ, affinity, offset=0))
    asked = environ.get("SLURM_CPUS_PER_TASK", "")
    facts = f"{num_cpus} of the machine's {os.cpu_count()} CPUs may be used (affinity {len(affinity)}"
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
    """Return the CPUs' worth of time that the cgroups allow, the least of all above; None without a limit."""
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
    """Compare the least limit of memory with what a worker needs."""
    try:
        check_address_space()
    except UsageError as error:
        return _of_error("memory", error)
    limits = memory_limits(environ, root)
    least = min(limits, key=lambda name: limits[name])
    text = f"{short_bytes(limits[least])}, by {least}"
    if limits[least] >= LEAST_WORKER_BYTES:
        return Finding("memory", text)
    text += f"; a worker needs about {short_bytes(LEAST_WORKER_BYTES)} with a vocabulary like Llama 3's"
    return Finding("memory", f"{text}, and may be killed", "ask for more memory: --mem of sbatch or srun")


def thread_finding(environ: Mapping[str, str], num_cpus: int) -> Finding:
    """Look at the variables that set threads of training; tasks set their own."""
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    found = ", ".join(f"{name}={environ[name]}" for name in names if name in environ)
    text = f"{found or 'no variable is set'}; tasks set their own, for training see --export"
    for name in names[:2]:
        if environ.get(name, "").isdigit() and int(environ[name]) > num_cpus:
            more = f"{text}; {name} asks for more threads than the {num_cpus} CPUs"
            return Finding("threads", more, f"export {name}={num_cpus} before training")
    return Finding("threads", text)


def export_lines(num_cpus: int, num_ranks: int) -> list[str]:
    """Return lines for ``source``: what a training script or a ``run`` on this machine may take over."""
    threads = max(1, num_cpus // max(1, num_ranks))
    return [
        f"export OMP_NUM_THREADS={threads}  # torch: {num_cpus} CPUs for {num_ranks} process(es) here",
        f"export MKL_NUM_THREADS={threads}",
        "export TOKENIZERS_PARALLELISM=false  # the loader's workers fork; tasks switch it on themselves",
        f"export DATASET_NUM_PROC={num_cpus}  # processes of `shardprep run`",
    ]


def version_findings() -> Iterator[Finding]:
    """Tell the versions that are installed; what a task needs must be there."""
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


_TORCH_LIMIT_S = 180.0
_ASK_TORCH = """
import torch
gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
bf16 = ", bf16 works" if gpus and torch.cuda.is_bf16_supported() else ""
print(f"shardprep torch {torch.__version__}: {', '.join(gpus) or 'no GPU'}{bf16}")
"""


def torch_finding() -> Finding:
    """Ask torch in a process of its own, which a broken installation may end."""
    if importlib.util.find_spec("torch") is None:
        return Finding("torch", "not installed: tasks need none; training wants shardprep[loader]")
    command = [sys.executable, "-W", "ignore", "-c", _ASK_TORCH]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TORCH_LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        text = f"torch was not loaded, or a GPU did not answer, within {_TORCH_LIMIT_S:.0f} s"
        return Finding("torch", text, "look at nvidia-smi", UsageError.exit_code)
    answers = [line for line in done.stdout.splitlines() if line.startswith("shardprep ")]
    if done.returncode or not answers:
        why = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        todo = "install torch anew for this machine"
        return Finding("torch", f"torch cannot be used: {why}", todo, UsageError.exit_code)
    return Finding("torch", answers[0].removeprefix("shardprep "))


# --- the folders


_POOR = {  # what a data set should not lie on
    "tmpfs": ("it lies in this machine's memory, and is gone with it", "choose a folder on a disk"),
    "overlay": ("it lies in a container's own layer, and is gone with it", "bind a folder of the host"),
    "nfs": ("many tasks at once are slow on NFS", "choose the cluster's parallel file system"),
}
_POOR |= {"ramfs": _POOR["tmpfs"], "nfs4": _POOR["nfs"]}


def plan_findings(args: argparse.Namespace, num_cpus: int) -> tuple[list[Finding], CostEstimate | None, int]:
    """Plan without writing, or look at what is planned: findings, the estimate, the number of shards."""
    given = given_of(args, PrepConfig)
    folder = given.get("output_dir")
    said: list[str] = []
    try:
        if "input_dir" in given and not is_folder(given["input_dir"]):
            raise NotFound(f"{given['input_dir']} is no folder; name the folder of the raw files")
        plan = read_plan(folder) if folder is not None and is_folder(folder) else None
        if plan is not None and folder is not None:
            worker = load_worker(plan, folder, WorkerSettings(), num_cpus=num_cpus, warn=said.append)
            said += document_ends_lines(plan, folder / TOKENIZER_DIR)
            cost = measure(plan, worker.engine)
            is_fast = worker.engine.name == "gigatoken"
        elif "input_dir" in given or "model_id" in given:
            with scratch_folder() as scratch:  # texts that tell engines apart
                text = "\n".join(" ".join(text.splitlines()) for text in PROBE)
                (scratch / "probe.txt").write_text(text, encoding="utf-8")
                config = PrepConfig(**{"input_dir": scratch, **given})
                sharding = Sharding(num_shards=args.num_shards)
                plan, cost = make_plan(config, sharding, dry_run=True, say=said.append)
            is_fast = plan.fast_engine_is_equal
        else:
            return [], None, 0
    except ShardprepError as error:
        return [_of_error("plan", error)], None, 0
    text = (
        f"{counted(plan.num_shards, 'shard')}, {short_bytes(sum(plan.shard_bytes()))} of input; about "
        f"{short_number(cost.num_tokens)} tokens, {cost.core_hours:.2g} core hours, the longest shard "
        f"{cost.longest_shard_s:.0f} s on one core; encoded by {'gigatoken' if is_fast else 'tokenizers'}"
    )
    spec = plan.tokenizer
    tokens = f"{spec.model_id}: {spec.vocab_size} ids, BOS {spec.bos_token_id}, EOS {spec.eos_token_id}, PAD"
    todo = ""
    if spec.pad_token_id is not None and spec.pad_token_id == spec.eos_token_id:
        todo = "give it a pad token of its own: other collators than this project's lose the labels of EOS"
    return (
        [
            Finding("plan", text),
            Finding("tokenizer", f"{tokens} {spec.pad_token_id}", todo),
            *(Finding("tokenizer", line) for line in said if line.startswith("documents begin ")),
        ],
        cost,
        plan.num_shards,
    )


def output_findings(folder: Path, cost: CostEstimate | None, num_shards: int) -> Iterator[Finding]:
    """Say whether a data set can be written there, and whether it will fit."""
    places = (folder.absolute(), *folder.absolute().parents)
    there = next(place for place in places if size_of_file(place) is not None)
    code = CannotWrite.exit_code
    if not is_folder(there):
        yield Finding("output", f"{there} is no folder", "choose another --output_dir", code)
        return
    mount = file_system_of(folder)
    what, todo = _POOR.get(mount.fs_type, ("", "")) if mount else ("", "")
    yield Finding("output", f"{folder} is on {mount.fs_type if mount else '?'}{what and ': ' + what}", todo)
    try:
        with PublishedFile(there / "doctor") as file:  # written as a shard is, and removed
            file.write(bytes(4 << 20))
            file.sync()
    except ShardprepError as error:
        todo = "free some space, mount it for writing, chmod, or choose another --output_dir"
        yield Finding("output", f"{folder} cannot be written: {error}", todo, code)
        return
    status = os.statvfs(there)
    free = status.f_bavail * status.f_frsize
    if cost is None:
        yield Finding("space", f"{short_bytes(free)} are free")
        return
    text = f"{short_bytes(free)} are free, the shards will take about {short_bytes(cost.output_bytes)}"
    todo = "free some space, choose another --output_dir, or --no-keep_text, --token_format npy or packed"
    is_tight = free < cost.output_bytes * 1.2  # an estimate is one
    yield Finding("space", text, todo if is_tight else "", code if free < cost.output_bytes else 0)
    if status.f_files and status.f_favail < 4 * num_shards:  # 0: the file system makes them as needed
        text = f"{short_number(status.f_favail)} inodes are free, {num_shards} shards take up to four each"
        yield Finding("space", text, "plan fewer shards: --num_shards", code)
    for line in space_lines(folder, Need(num_bytes=cost.output_bytes, num_shards=num_shards)):
        is_good = line.startswith("it needs")
        yield Finding("space", line, "" if is_good else "free some space, or ask for more quota")


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags; without one only the machine is looked at."""
    parser.description = (
        "Look at this machine, a tokenizer and the folders before the work begins. In a job: srun shardprep "
        "doctor. Exit code: 0 all good, 1 warnings, else that of the first error."
    )
    named = {
        "input_dir": (Path, "folder of the raw files (default: not checked)"),
        "output_dir": (Path, "folder of the data set, planned or not (default: not checked)"),
        "model_id": (str, "folder of a tokenizer, or its name on the hub (default: as for plan)"),
    }
    for name, (kind, text) in named.items():
        parser.add_argument(f"--{name}", type=kind, default=argparse.SUPPRESS, help=text)
    text = "as for plan: N even shards (default: one per input file)"
    parser.add_argument("--num_shards", metavar="N", type=int, help=text)
    switch = argparse.BooleanOptionalAction
    parser.add_argument("--torch", action=switch, default=True, help="ask torch, too (default: on)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the findings for programs")
    how.add_argument("--export", action="store_true", help="print only variables, as lines to source")


def doctor(args: argparse.Namespace) -> int:
    """Print the findings; the exit code is the worst of them."""
    affinity = os.sched_getaffinity(0)
    num_cpus = len(allowed_cpus(os.environ, affinity, offset=0))
    if args.export:
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        print_lines(*export_lines(num_cpus, int(ranks) if ranks.isdigit() else 1))
        return 0
    memory = memory_finding(os.environ)
    findings = [
        *([torch_finding()] if args.torch else []),  # first, while nothing of its size is loaded
        cpu_finding(os.environ, affinity),
        memory,
        thread_finding(os.environ, num_cpus),
        *version_findings(),
    ]
    if not memory.exit_code:
        planned, cost, num_shards = plan_findings(args, num_cpus)
        findings += planned
        if output_dir := getattr(args, "output_dir", None):
            findings += output_findings(output_dir, cost, num_shards)
    print_lines(*(_json_lines(findings) if args.json else _text_lines(findings)))
    return exit_code(findings)


def exit_code(findings: Sequence[Finding]) -> int:
    """Return 0 where all is good, 1 for warnings, else the code of the first that is bad."""
    for finding in findings:
        if finding.exit_code:
            return finding.exit_code
    return int(any(finding.todo for finding in findings))


def _text_lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for finding in findings:
        lines.append(f"{finding.level:<8}{finding.topic:<10}{finding.text}")
        if finding.todo:
            lines.append(f"{'':18}-> {finding.todo}")
    count = Counter(finding.level for finding in findings)
    return [*lines, f"{count['bad']} bad, {counted(count['warning'], 'warning')}, {count['good']} good"]


def _json_lines(findings: Sequence[Finding]) -> list[str]:
    listed = [{"topic": f.topic, "level": f.level, "text": f.text, "todo": f.todo} for f in findings]
    return json.dumps({"exit_code": exit_code(findings), "findings": listed}, indent=1).split("\n")
