"""Where values come from, whole nodes, and what the verify job says at its end."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from shardprep.errors import UsageError
from slurm.request import JobRequest
from slurm.retry import retry_request
from slurm.script import array_script, verify_script
from slurm.submissions import read_submissions
from tests.children import run_child
from tests.slurm.fake_slurm import FakeSlurm, slurm

pytestmark = pytest.mark.processes


def test_flags_win_and_dry_run_says_where_each_value_came_from(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "env")
    monkeypatch.setenv("SBATCH_MEM_PER_NODE", "1G")
    shown = slurm("submit", data_dir, "--mem_gb", 2, "--dry_run")
    for line in ("account is 'env' (SBATCH_ACCOUNT)", "mem_gb is 2.0 (flag)"):
        assert line in shown
    slurm("submit", data_dir, "--mem_gb", 2)
    assert {"#SBATCH --account=env", "#SBATCH --mem=2048M"} <= set(fake.sent()[0].splitlines())


def test_a_task_of_a_whole_node_asks_for_no_number_and_uses_what_it_gets(
    fake: FakeSlurm, data_dir: Path
) -> None:
    fake.answers("sinfo", "cpu*|idle|4000|3|infinite\n")
    script = slurm("submit", data_dir, "--cpus_per_task", "node", "--dry_run")
    lines = script.splitlines()
    assert {"#SBATCH --exclusive", "#SBATCH --mem=0"} <= set(lines)
    assert not any("--cpus-per-task=" in line for line in lines[: lines.index("set -euo pipefail")])
    assert "export SLURM_CPUS_PER_TASK=$SLURM_CPUS_ON_NODE" in lines
    assert "shards_of=(0-1 2-4)" in lines, "as many shards as the node has CPUs: a process each"
    assert "expected a number, or: node" in slurm("submit", data_dir, "--cpus_per_task", "all", code=2)


def run_script(script: str, place: Path, code: int) -> str:
    """The job's script in bash, with an srun that ends with ``code`` and shows its variables."""
    (place / "srun").write_text(f"#!/bin/sh\nenv | grep ^SLURM | sort\nexit {code}\n")
    (place / "srun").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SLURM")}
    inherited = {
        "SLURM_MEM_PER_CPU": "1",
        "SLURM_MEM_PER_NODE": "2",
        "SLURM_CPU_BIND": "x",
        "SLURM_STEP_ID": "3",
    }
    inherited |= {"SLURM_JOB_ID": "7", "SLURM_CPUS_ON_NODE": "64", "PATH": f"{place}:{os.environ['PATH']}"}
    done = run_child(["bash", "-c", script], cwd=place, env={**kept, **inherited}, code=code)
    return done.stdout + done.stderr


@pytest.mark.parametrize(("code", "result"), [(0, "verified"), (65, "not verified")])
def test_the_verify_job_ends_with_a_line_to_grep_and_tells_whom_it_should(
    tmp_path: Path, code: int, result: str
) -> None:
    notify = f'echo "told: $SHARDPREP_RESULT, $SHARDPREP_EXIT_CODE" >{tmp_path}/told; exit 3'
    request = JobRequest(notify=notify, sbatch_args="--mail-type=END")
    script = verify_script(Path("/my data"), "shardprep-0", 1000, request)
    said = run_script(script, tmp_path, code)
    colon = ":" if code else ""
    assert f"shardprep: {result}{colon} 1000 shards of /my data" in said.splitlines()
    assert (tmp_path / "told").read_text() == f"told: {result}, {code}\n"
    assert "--notify ended with exit code 3" in said
    assert "#SBATCH --mail-type=END" in script


def test_a_step_gets_no_variables_of_the_allocation_that_sbatch_was_typed_in(tmp_path: Path) -> None:
    request = JobRequest(cpus_per_task="node")
    script = array_script(Path("/d"), "shardprep-0", ["0-3"], request)
    said = run_script(script, tmp_path, 0)
    assert "SLURM_CPUS_PER_TASK=64" in said
    assert "SLURM_JOB_ID=7" in said
    for name in ("SLURM_MEM_PER", "SLURM_CPU_BIND", "SLURM_STEP_ID"):
        assert name not in said


def test_memory_per_cpu_is_asked_for_so_and_doubled_so(fake: FakeSlurm, data_dir: Path) -> None:
    request = JobRequest(mem_per_cpu_gb=0.5, cpus_per_task=4)
    assert "--mem-per-cpu=512M" in request.sbatch_options()
    assert not any(option.startswith("--mem=") for option in request.sbatch_options())
    from tests.slurm.test_slurm_text import _failed

    failed = _failed("OUT_OF_MEMORY", request={"mem_per_cpu_gb": 0.5, "cpus_per_task": 4}, mem_mb=2048)
    assert retry_request(failed, request, None).mem_per_cpu_gb == 1
    with pytest.raises(UsageError, match="exclude each other"):
        JobRequest(mem_per_cpu_gb=1, mem_gb=1)


def test_a_retry_keeps_what_the_submission_asked_for(
    fake: FakeSlurm, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SBATCH_ACCOUNT", "one")
    slurm("submit", data_dir)
    monkeypatch.delenv("SBATCH_ACCOUNT")
    slurm("retry", data_dir, "--mem_gb", 3)
    assert "#SBATCH --account=one" in fake.sent()[2]
    assert read_submissions(data_dir)[1].arrays[0].request.mem_gb == 3
