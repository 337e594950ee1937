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
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.look import doctor as machine
from preprocess.look.doctor import (
    Finding,
    as_json,
    as_text,
    cpu_finding,
    engine_finding,
    exit_code,
    export_lines,
    file_system_finding,
    memory_finding,
    output_findings,
    thread_findings,
    torch_findings,
    training_findings,
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
    assert exit_code([fine]) == 0
    assert exit_code([fine, poor]) == 1
    assert exit_code([poor, worst, fine]) == CannotWrite.exit_code
    assert as_text([poor, fine])[1].strip() == "-> do this"
    worsts = [as_json(each)["worst"] for each in ([fine], [fine, poor], [poor, worst])]
    assert worsts == ["good", "warning", "bad"]


def test_a_machine_a_tokenizer_and_folders_that_will_do_are_all_good(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    out = tmp_path / "data"
    code, text = doctor(
        prep, "--json", "--input_dir", sample_dir, "--output_dir", out, "--model_id", prep.model_dir
    )
    answer = json.loads(text)
    lines = {finding["topic"]: finding for finding in answer["findings"]}
    assert {"place", "cpus", "memory", "versions", "input", "tokenizer", "engine", "output", "space"} <= set(
        lines
    )
    assert lines["engine"]["text"].startswith("gigatoken gives the ids of tokenizers")
    assert "6 files, " in lines["input"]["text"]
    assert code == answer["exit_code"] < 2
    assert not out.exists()


def test_a_planned_folder_is_looked_at_without_further_flags(prep: Prep, planned_dir: Path) -> None:
    before = sorted(path.name for path in planned_dir.iterdir())
    code, text = doctor(prep, "--output_dir", planned_dir)
    assert code < 2, text
    assert " of 5 shards, " in text
    assert "gigatoken gives the ids of tokenizers, the reference, on the plan's probe" in text
    assert sorted(path.name for path in planned_dir.iterdir()) == before


@pytest.mark.processes
@pytest.mark.parametrize(
    ("flag", "line"),
    [
        ("--model_id", "bad     tokenizer no usable tokenizer was found"),
        ("--input_dir", "bad     input     NAMED is no folder"),
    ],
)
def test_what_is_not_there_is_bad_with_its_own_exit_code(
    prep: Prep, tmp_path: Path, flag: str, line: str
) -> None:
    code, text = doctor(prep, flag, tmp_path / "none")
    assert code == 66
    assert line.replace("NAMED", str(tmp_path / "none")) in text


def test_the_time_of_a_cgroup_is_compared_with_the_cpus(tmp_path: Path) -> None:
    short = cpu_finding({}, set(range(8)), cgroup(tmp_path / "a", cpu_max="150000 100000"))
    assert short.level == "warning"
    assert "the cgroup gives the time of 1.5" in short.text
    assert "--num_proc 1" in short.todo
    assert cpu_finding({}, set(range(8)), cgroup(tmp_path / "b", cpu_max="max 100000")).level == "good"


def test_fewer_cpus_than_slurm_was_asked_for_are_a_warning(tmp_path: Path) -> None:
    finding = cpu_finding({"SLURM_CPUS_PER_TASK": "4"}, {0}, tmp_path)
    assert finding.level == "warning"
    assert "srun --cpus-per-task=4" in finding.todo
    assert cpu_finding({"SLURM_CPUS_PER_TASK": "1"}, {0}, tmp_path).level == "good"


@pytest.mark.parametrize(("limit", "level"), [(1 << 30, "good"), (256 << 20, "warning")])
def test_the_cgroups_memory_is_compared_with_what_a_worker_needs(
    tmp_path: Path, limit: int, level: str
) -> None:
    finding = memory_finding({}, cgroup(tmp_path, memory_max=f"{limit}\n"))
    assert finding.level == level
    assert ", by the cgroup (the machine " in finding.text
    assert ("a worker needs about 328 MB" in finding.text) == (level == "warning")


def test_an_engine_that_is_not_used_is_told_once_with_its_reason() -> None:
    plan: Any = SimpleNamespace(fast_engine_is_equal=False, shard_bytes=lambda: [10**9])
    said = "gigatoken is not used for this tokenizer (none); tokenizers encodes, several times slower"
    finding = engine_finding(plan, [said], "this text")
    assert finding.level == "warning"
    assert finding.text.count("several times slower") == 1
    assert finding.text.endswith("(none)")


def test_thread_variables_say_what_they_change_and_too_many_threads_are_a_warning() -> None:
    findings = list(thread_findings({"OMP_NUM_THREADS": "64", "RAYON_NUM_THREADS": "1"}, 8))
    (omp,) = found(findings, "warning")
    assert omp.text.startswith("OMP_NUM_THREADS=64: changes nothing in tasks")
    assert omp.todo == "export OMP_NUM_THREADS=8 before training"
    assert any(
        f.text.startswith("RAYON_NUM_THREADS=1: changes nothing in tasks") for f in found(findings, "good")
    )


@pytest.mark.processes
def test_exported_lines_can_be_sourced_and_are_all_that_is_printed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        assert main(["doctor", "--export"]) == 0
    lines = out.getvalue().splitlines()
    assert lines == export_lines(len(os.sched_getaffinity(0)), 1)
    script = f"{out.getvalue()}env"
    shown = run_child(["sh", "-c", script]).stdout
    assert "TOKENIZERS_PARALLELISM=false" in shown.splitlines()
    assert export_lines(16, 4)[0].startswith("export OMP_NUM_THREADS=4 ")


def test_too_little_space_is_bad_and_hardly_enough_a_warning(tmp_path: Path) -> None:
    status = os.statvfs(tmp_path)
    free = status.f_bavail * status.f_frsize
    (less,) = found(output_findings(tmp_path, cost(2 * free), 3), "bad")
    assert less.topic == "space"
    assert less.exit_code == CannotWrite.exit_code
    (tight,) = [f for f in output_findings(tmp_path, cost(int(free * 0.9)), 3) if "hardly enough" in f.text]
    assert tight.level == "warning"
    (inodes,) = found(output_findings(tmp_path, cost(1), 10**12), "bad")
    assert "inodes are free" in inodes.text
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
    assert "free some space" in finding.todo
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_in_memory_is_a_warning() -> None:
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm here")
    finding = file_system_finding("output", Path("/dev/shm/data"), is_written=True)
    assert finding.level == "warning"
    assert "on tmpfs" in finding.text
    assert file_system_finding("input", Path("/dev/shm/raw"), is_written=False).level == "good"


GPU: dict[str, Any] = {
    "torch": "2.13.0",
    "cuda": "13.0",
    "threads": 8,
    "gpus": [["H200", 139 << 30, "9.0"]] * 2,
    "nccl": "2.29.3",
    "bf16": True,
    "sdpa": {"FLASH_ATTENTION": "", "CUDNN_ATTENTION": "no kernel", "MATH": ""},
}


def test_torch_tells_gpus_nccl_bf16_and_the_back_ends_of_attention() -> None:
    findings = list(torch_findings(GPU, has_driver=True))
    assert not [f for f in findings if f.level != "good"]
    text = "\n".join(f.text for f in findings)
    assert "2 GPUs: H200 (139 GiB, 9.0); NCCL 2.29.3" in text
    assert "SDPA: FLASH_ATTENTION, MATH works; not: CUDNN_ATTENTION (no kernel)" in text
    poor = list(torch_findings({**GPU, "bf16": False, "sdpa": {"MATH": ""}}, has_driver=True))
    assert len(found(poor, "warning")) == 2


def test_a_driver_whose_gpus_torch_does_not_see_is_a_warning() -> None:
    without: dict[str, Any] = {"torch": "2.13.0", "cuda": None, "threads": 8, "gpus": []}
    assert [f.level for f in torch_findings(without, has_driver=True)] == ["warning"]
    assert [f.level for f in torch_findings(without, has_driver=False)] == ["good"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "expected"), [("import nothing_of_this_name", "ModuleNotFoundError"), ("", "exit")]
)
def test_a_torch_that_ends_its_process_is_bad_and_does_not_end_the_doctor(
    monkeypatch: pytest.MonkeyPatch, program: str, expected: str
) -> None:
    monkeypatch.setattr(machine, "_QUESTIONS", program)
    monkeypatch.setattr("importlib.util.find_spec", lambda _: sys)
    (finding,) = training_findings()
    assert finding.level == "bad"
    assert expected in finding.text
