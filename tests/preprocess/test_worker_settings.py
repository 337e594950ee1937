"""What memory and batch sizes a worker takes, from flags, environment and cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from preprocess.make.resources import WorkerSettings, environment_number, memory_limit_gb
from preprocess.read import BATCH_BYTES
from shardprep.errors import UsageError


def test_batches_shrink_where_memory_is_short() -> None:
    assert WorkerSettings().batch_bytes == BATCH_BYTES
    assert WorkerSettings(memory_gb=64).batch_bytes == BATCH_BYTES
    short, shorter, least = (WorkerSettings(memory_gb=gb).batch_bytes for gb in (0.38, 0.33, 0.01))
    assert BATCH_BYTES > short > shorter > 0
    assert least >= 64 << 10


def test_nothing_is_no_memory() -> None:
    with pytest.raises(UsageError) as caught:
        WorkerSettings(memory_gb=0)
    assert caught.value.found == "--memory_gb 0"


def test_environment_numbers_are_positive_or_refused() -> None:
    assert environment_number({}, "DATASET_BATCH_SIZE") is None
    assert environment_number({"DATASET_BATCH_SIZE": ""}, "DATASET_BATCH_SIZE") is None
    assert environment_number({"DATASET_BATCH_SIZE": "1000"}, "DATASET_BATCH_SIZE") == 1000
    for text in ("0", "-3", "1e3", "many"):
        with pytest.raises(UsageError, match=r"DATASET_BATCH_SIZE is .* expected a whole number"):
            environment_number({"DATASET_BATCH_SIZE": text}, "DATASET_BATCH_SIZE")


def write(root: Path, path: str, text: str) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_text(text)


def test_the_least_limit_of_all_cgroups_above_counts(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "0::/slurm/job_7/task_0\n")
    write(tmp_path, "sys/fs/cgroup/slurm/job_7/task_0/memory.max", "max\n")
    write(tmp_path, "sys/fs/cgroup/slurm/job_7/memory.max", f"{512 << 20}\n")
    write(tmp_path, "sys/fs/cgroup/slurm/memory.max", f"{900 << 20}\n")
    assert memory_limit_gb({}, tmp_path) == 0.5


def test_the_first_version_of_cgroups_and_slurm_itself_count_too(tmp_path: Path) -> None:
    write(tmp_path, "proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/slurm/uid_0\n0::/\n")
    write(tmp_path, "sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes", f"{768 << 20}\n")
    assert memory_limit_gb({}, tmp_path) == 0.75
    assert memory_limit_gb({"SLURM_MEM_PER_NODE": "256"}, tmp_path) == 0.25
    per_cpu = {"SLURM_MEM_PER_CPU": "64", "SLURM_CPUS_PER_TASK": "2"}
    assert memory_limit_gb(per_cpu, tmp_path) == 0.125, "as DefMemPerCPU is told, without cgroups"
    assert memory_limit_gb({**per_cpu, "SLURM_CPUS_ON_NODE": "4"}, tmp_path) == 0.25
    assert memory_limit_gb({"SLURM_MEM_PER_NODE": "0"}, tmp_path) == 0.75, "0 is all of the node"


def test_without_any_limit_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert memory_limit_gb({}, tmp_path) > 0.5
