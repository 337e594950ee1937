"""``shardprep doctor``: check machine, environment and tokenizer before the work, and say what to do.

Each check prints good, warning or bad. The tokenizer of a planned folder is loaded as its tasks load it.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import platform
import subprocess
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from preprocess.make import resources
from preprocess.make.probe import PROBE
from preprocess.make.settings import WorkerSettings
from preprocess.make.worker import Worker
from preprocess.plan.planning import make_plan
from preprocess.plan.scratch import scratch_folder
from preprocess.plan.tokenizer import document_ends_line
from shardprep import HOME, PACKAGES, __version__
from shardprep.console import counted, print_exactly, print_lines, short_bytes
from shardprep.errors import ShardprepError, UsageError
from shardprep.format.data_folder import DataFolder
from shardprep.format.names import TOKENIZER_FILE
from shardprep.format.plan import need_plan
from shardprep.format.plan_options import PrepConfig
from shardprep.format.planned_tokenizer import check_tokenizer_files
from shardprep.processes import start_python

_NEEDED = ("numpy", "orjson", "tokenizers", "gigatoken", "tqdm", "transformers")  # by a task or by planning
_TORCH_LIMIT_S = 180.0


class Finding(NamedTuple):
    topic: str
    text: str
    todo: str = ""  # empty if all is good
    exit_code: int = 0  # not 0 if it is bad

    @property
    def level(self) -> str:
        return "bad" if self.exit_code else "warning" if self.todo else "good"


def _check_machine(num_cpus: int) -> Iterator[Finding]:
    """Compare what this process may use with what Slurm was asked for and what a worker needs."""
    quotas = []  # of the cgroups, in CPUs
    for path in resources.cgroup_files("cpu", "cpu.max", "cpu.cfs_quota_us"):
        with suppress(OSError, ValueError, IndexError):  # "max" means no limit
            words = path.read_text(encoding="ascii").split()
            if path.name == "cpu.cfs_quota_us":
                words.append((path.parent / "cpu.cfs_period_us").read_text(encoding="ascii").strip())
            if int(words[0]) > 0 and int(words[1]) > 0:
                quotas.append(int(words[0]) / int(words[1]))
    quota = min(quotas, default=num_cpus)
    asked = os.environ.get("SLURM_CPUS_PER_TASK", "")
    text = f"{num_cpus} of the machine's {os.cpu_count()} CPUs may be used"
    todo = ""
    if quota < num_cpus:
        text += f", but the cgroup allows the time of {quota:.3g}: more processes would only wait"
        todo = f"run --num_proc {max(1, int(quota))}, or ask for more CPU time"
    elif asked.isdigit() and int(asked) > num_cpus:
        text += f": fewer than Slurm was asked for ({asked})"
        todo = f"srun --cpus-per-task={asked}: srun does not inherit it from sbatch"
    yield Finding("cpus", text, todo)
    num_bytes, whose = min((number, name) for name, number in resources.memory_limits().items())
    text = f"{short_bytes(num_bytes)}, by {whose}"
    todo = ""
    if num_bytes < resources.LEAST_WORKER_BYTES:
        text += f"; a worker needs about {short_bytes(resources.LEAST_WORKER_BYTES)} and may be killed"
        todo = "ask for more memory: --mem of sbatch or srun"
    yield Finding("memory", text, todo)
    names = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "RAYON_NUM_THREADS", "TOKENIZERS_PARALLELISM")
    set_names = {name: os.environ[name] for name in names if name in os.environ}
    many = [
        name for name in names[:2] if set_names.get(name, "").isdigit() and int(set_names[name]) > num_cpus
    ]
    text = ", ".join(f"{name}={value}" for name, value in set_names.items()) or "none is set"
    todo = f"export {many[0]}={num_cpus} before training: there are {num_cpus} CPUs" if many else ""
    yield Finding("threads", f"{text}; tasks set their own, for training see --export", todo)


def _check_versions() -> Iterator[Finding]:
    """Report the installed versions, and if there is a GPU, whether torch can use it."""
    installed: dict[str, str] = {}
    for name in (*_NEEDED, "torch", "webdataset"):
        with suppress(importlib.metadata.PackageNotFoundError):
            installed[name] = importlib.metadata.version(name)
    missing = ", ".join(name for name in _NEEDED if name not in installed)
    if missing:
        todo = "install shardprep for this Python: pip install ."
        yield Finding("versions", f"{missing} not found", todo, UsageError.exit_code)
    there = ", ".join(f"{name} {number}" for name, number in installed.items())
    yield Finding("versions", f"shardprep {__version__}, Python {platform.python_version()}, {there}")
    if "torch" in installed and Path("/dev/nvidiactl").exists():
        # In a child process, which a broken installation may crash.
        pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        with start_python("preprocess.doctor:print_torch", **pipes) as child:
            try:
                out, err = child.communicate(timeout=_TORCH_LIMIT_S)
            except subprocess.TimeoutExpired:
                child.kill()
                why = f"no answer within {_TORCH_LIMIT_S:.0f} s"
                todo = "look at nvidia-smi"
            else:
                if not child.returncode:
                    yield Finding("torch", out.strip().rpartition("\n")[2])
                    return
                why = err.strip().rpartition("\n")[2] or f"exit code {child.returncode}"
                todo = "install torch again, for this machine"
        yield Finding("torch", f"torch cannot be used: {why}", todo, UsageError.exit_code)


def _check_names() -> Iterator[Finding]:
    """Warn of modules in the current folder that hide our packages from scripts, and under ``python -m``.

    There Python itself runs the user's module, without a word, before any of our code.
    """
    for package in PACKAGES:
        for path in (Path(f"{package}.py"), Path(package, "__init__.py")):
            if path.exists() and not path.resolve().is_relative_to(HOME.resolve() / package):
                what = path if path.parent == Path() else path.parent
                text = (
                    f"{what.absolute()} hides shardprep's package from scripts beside it, "
                    f"and python -m {package} runs it; the command shardprep is not affected"
                )
                yield Finding("modules", text, "rename it")


def print_torch() -> None:
    """Print the version of torch, and whether it can use the GPUs."""
    warnings.simplefilter("ignore")
    import torch

    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    bf16 = ", bf16 works" if gpus and torch.cuda.is_bf16_supported() else ""
    print_lines(f"torch {torch.__version__}: {', '.join(gpus) or 'no GPU'}{bf16}")


def _check_tokenizer(model_id: str | None, path: Path | None, num_cpus: int) -> Iterator[Finding]:
    """Load a tokenizer as planning does, or that of a planned folder as tasks do. Raises ShardprepError."""
    said: list[str] = []
    if path is not None:
        folder = DataFolder(path)
        plan = need_plan(folder)
        settings = WorkerSettings()
        engine = Worker(plan, folder, settings, num_cpus=num_cpus, warn=lambda _: None).engine
        yield Finding("plan", f"{counted(plan.num_shards, 'shard')} in {folder}")
        content = check_tokenizer_files(folder, plan.tokenizer_files, TOKENIZER_FILE)
        name = engine.name
        ends = document_ends_line(plan, engine, content)
    elif model_id is not None:
        with scratch_folder() as scratch:  # plan the texts of the probe
            text = "\n".join(" ".join(text.splitlines()) for text in PROBE)
            (scratch / "probe.txt").write_text(text, encoding="utf-8")
            config = PrepConfig(input_dir=scratch, model_id=model_id)
            plan, _ = make_plan(config, dry_run=True, say=said.append)
        name = "gigatoken" if plan.fast_engine_is_equal else "tokenizers"
        ends = next((line for line in said if line.startswith("documents begin ")), "")
    else:
        return
    spec = plan.tokenizer
    text = f"{spec.model_id}: {spec.vocab_size} ids, BOS {spec.bos_token_id}, EOS {spec.eos_token_id}, "
    text += f"PAD {spec.pad_token_id}; encoded by {name}; {ends}"
    is_shared = spec.pad_token_id is not None and spec.pad_token_id == spec.eos_token_id
    todo = "give it a pad token of its own: collators other than this project's mask the labels of EOS"
    yield Finding("tokenizer", text.removesuffix("; "), todo if is_shared else "")
    for line in said:
        if line.startswith("warning: "):
            text, _, todo = line.removeprefix("warning: ").partition(". ")
            yield Finding("tokenizer", text, todo)


def doctor_flags(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check this machine, its environment and a tokenizer before the work. In a job: srun shardprep "
        "doctor. Exit code: 0 if all is good, 1 after warnings, else that of the first error."
    )
    text = "folder of a planned data set, whose tokenizer is checked (default: none)"
    parser.add_argument("--output_dir", type=Path, help=text)
    parser.add_argument("--model_id", help="folder of a tokenizer, or its name on the hub (default: none)")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--json", action="store_true", help="print the findings as JSON")
    how.add_argument("--export", action="store_true", help="print only variables, as lines for source")


def doctor(args: argparse.Namespace) -> int:
    """Print the findings. Return 0 if all is good, 1 after warnings, else the code of the first bad one."""
    num_cpus = len(resources.allowed_cpus(offset=0))
    if args.export:
        ranks = os.environ.get("SLURM_NTASKS_PER_NODE") or os.environ.get("LOCAL_WORLD_SIZE") or "1"
        num_ranks = max(1, int(ranks)) if ranks.isdigit() else 1
        threads = max(1, num_cpus // num_ranks)
        print_exactly(
            f"export OMP_NUM_THREADS={threads}  # torch: {num_cpus} CPUs for {num_ranks} process(es) here",
            f"export MKL_NUM_THREADS={threads}",
            "export TOKENIZERS_PARALLELISM=false  # the loader's workers fork; tasks switch it on themselves",
            f"export DATASET_NUM_PROC={num_cpus}  # processes of `shardprep run`",
        )
        return 0
    # Versions first, so that torch is tried before anything large is loaded here.
    findings = [*_check_versions(), *_check_names(), *_check_machine(num_cpus)]
    topic = "memory"
    try:
        resources.check_address_space()
        topic = "tokenizer"
        findings += _check_tokenizer(args.model_id, args.output_dir, num_cpus)
    except ShardprepError as error:
        findings.append(Finding(topic, str(error), exit_code=error.exit_code))
    levels = Counter(finding.level for finding in findings)
    code = next((each.exit_code for each in findings if each.exit_code), int(levels["warning"] > 0))
    if args.json:
        listed = [{**each._asdict(), "level": each.level} for each in findings]
        print_exactly(*json.dumps({"exit_code": code, "findings": listed}, indent=1).split("\n"))
        return code
    for finding in findings:
        print_lines(f"{finding.level:<8}{finding.topic:<10}{finding.text}")
        if finding.todo:
            print_lines(f"{'':18}-> {finding.todo}")
    print_lines(f"{levels['bad']} bad, {counted(levels['warning'], 'warning')}, {levels['good']} good")
    return code
