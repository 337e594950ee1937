"""``shardprep doctor``: each line good, warning or bad, with what to do; the exit code says the worst."""

from __future__ import annotations

import contextlib
import errno
import io
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from preprocess.look import doctor as machine
from preprocess.look.doctor import (
    Finding,
    cpu_finding,
    exit_code,
    export_lines,
    memory_finding,
    output_findings,
    thread_finding,
    torch_finding,
)
from preprocess.plan.cost_estimate import CostEstimate
from shardprep.__main__ import main
from shardprep.errors import CannotWrite
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep


def doctor(prep: Prep, *args: object) -> tuple[int, str]:
    ended = prep.command("doctor", "--no-torch", *args)
    return ended.code, ended.text


def found(findings: Iterable[Finding], level: str) -> list[Finding]:
    return [finding for finding in findings if finding.level == level]


def cost(output_bytes: int) -> CostEstimate:
    return CostEstimate(
        num_tokens=1, output_bytes=output_bytes, core_hours=1, longest_shard_s=1, num_useful_cores=1
    )


def cgroup(root: Path, **files: str) -> Path:
    """A root whose only cgroup has some files; ``memory_max`` is memory.max."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup/job" / name.replace("_", ".")).write_text(text)
    return root


def test_the_worst_finding_is_the_exit_code() -> None:
    fine, poor = Finding("a", "x"), Finding("a", "x", "do this")
    worst = Finding("a", "x", "do that", CannotWrite.exit_code)
    assert [exit_code(each) for each in ([fine], [fine, poor], [poor, worst, fine])] == [0, 1, 73]


def test_a_machine_a_tokenizer_and_folders_that_will_do_are_all_good(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    code, text = doctor(
        prep, "--json", "--input_dir", sample_dir, "--output_dir", out, "--model_id", prep.model_dir
    )
    answer = json.loads(text)
    topics = {finding["topic"] for finding in answer["findings"]}
    assert topics == {"cpus", "memory", "threads", "versions", "plan", "tokenizer", "output", "space"}
    assert code == answer["exit_code"] < 2
    assert not out.exists()


def test_a_tokenizer_alone_is_looked_at(prep: Prep) -> None:
    code, text = doctor(prep, "--model_id", prep.model_dir)
    assert code < 2, text
    assert f"{prep.model_dir}: " in text
    assert "documents begin with" in text


def test_a_planned_folder_is_looked_at_without_further_flags(prep: Prep, planned_dir: Path) -> None:
    before = sorted(path.name for path in planned_dir.iterdir())
    code, text = doctor(prep, "--output_dir", planned_dir)
    assert code < 2, text
    assert "5 shards, " in text
    assert "encoded by gigatoken" in text
    assert sorted(path.name for path in planned_dir.iterdir()) == before


@pytest.mark.processes
@pytest.mark.parametrize("flag", ["--model_id", "--input_dir"])
def test_what_is_not_there_is_bad_with_its_own_exit_code(prep: Prep, tmp_path: Path, flag: str) -> None:
    code, text = doctor(prep, flag, tmp_path / "none")
    assert code == 66
    (line,) = [line for line in text.splitlines() if line.startswith("bad")]
    assert str(tmp_path / "none") in line


def test_the_time_of_a_cgroup_is_compared_with_the_cpus(tmp_path: Path) -> None:
    short = cpu_finding({}, set(range(8)), cgroup(tmp_path / "a", cpu_max="150000 100000"))
    assert (short.level, "--num_proc 1" in short.todo) == ("warning", True)
    assert cpu_finding({}, set(range(8)), cgroup(tmp_path / "b", cpu_max="max 100000")).level == "good"


def test_fewer_cpus_than_slurm_was_asked_for_are_a_warning(tmp_path: Path) -> None:
    finding = cpu_finding({"SLURM_CPUS_PER_TASK": "4"}, {0}, tmp_path)
    assert (finding.level, "srun --cpus-per-task=4" in finding.todo) == ("warning", True)
    assert cpu_finding({"SLURM_CPUS_PER_TASK": "1"}, {0}, tmp_path).level == "good"


@pytest.mark.parametrize(("limit", "level"), [(1 << 30, "good"), (256 << 20, "warning")])
def test_the_cgroups_memory_is_compared_with_what_a_worker_needs(
    tmp_path: Path, limit: int, level: str
) -> None:
    finding = memory_finding({}, cgroup(tmp_path, memory_max=f"{limit}\n"))
    assert (finding.level, "by the cgroup" in finding.text) == (level, True)


def test_more_threads_than_cpus_are_a_warning() -> None:
    many = thread_finding({"OMP_NUM_THREADS": "64", "RAYON_NUM_THREADS": "1"}, 8)
    assert (many.level, many.todo) == ("warning", "export OMP_NUM_THREADS=8 before training")
    assert thread_finding({"OMP_NUM_THREADS": "8"}, 8).level == "good"


@pytest.mark.processes
def test_exported_lines_can_be_sourced_and_are_all_that_is_printed() -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["doctor", "--export"]) == 0
    assert out.getvalue().splitlines() == export_lines(len(os.sched_getaffinity(0)), 1)
    shown = run_child(["sh", "-c", f"{out.getvalue()}env"]).stdout
    assert "TOKENIZERS_PARALLELISM=false" in shown.splitlines()
    assert export_lines(16, 4)[0].startswith("export OMP_NUM_THREADS=4 ")


def test_too_little_space_is_bad_and_hardly_enough_a_warning(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    (less,) = found(output_findings(tmp_path, cost(2 * free), 3), "bad")
    assert (less.topic, less.exit_code) == ("space", CannotWrite.exit_code)
    tight = [f for f in output_findings(tmp_path, cost(int(free * 0.9)), 3) if f.topic == "space"]
    assert tight[0].level == "warning"
    assert found(output_findings(tmp_path, cost(1), 10**12), "bad"), "inodes"
    assert not found(output_findings(tmp_path, cost(1), 3), "bad")


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_a_folder_that_cannot_be_written_is_bad(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    def fails(descriptor: int) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(os, "fsync", fails)
    finding = list(output_findings(tmp_path, None, 0))[-1]
    assert (finding.level, finding.exit_code) == ("bad", CannotWrite.exit_code)
    assert os.strerror(error) in finding.text
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_in_memory_is_a_warning() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    finding = next(output_findings(Path("/dev/shm/data"), None, 0))
    assert (finding.level, "on tmpfs" in finding.text) == ("warning", True)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "expected"), [("import nothing_of_this_name", "ModuleNotFoundError"), ("", "exit")]
)
def test_a_torch_that_ends_its_process_is_bad_and_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch, program: str, expected: str
) -> None:
    monkeypatch.setattr(machine, "_ASK_TORCH", program)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    finding = torch_finding()
    assert (finding.level, expected in finding.text) == ("bad", True)
