"""``shardprep doctor``: each line good, warning or bad, with what to do; the exit code says the worst."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from preprocess.look.doctor import Finding, machine_findings, torch_finding

if TYPE_CHECKING:
    from tests.conftest import Prep


def cgroup(root: Path, **files: str) -> Path:
    """A root whose only cgroup has some files; ``memory_max`` is memory.max."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text("0::/job\n")
    (root / "sys/fs/cgroup/job").mkdir(parents=True)
    for name, text in files.items():
        (root / "sys/fs/cgroup/job" / name.replace("_", ".")).write_text(text)
    return root


def found(topic: str, environ: dict[str, str], root: Path, num_cpus: int = 8) -> Finding:
    (finding,) = [each for each in machine_findings(environ, {*range(num_cpus)}, root) if each.topic == topic]
    return finding


def test_a_tokenizer_alone_is_looked_at(prep: Prep) -> None:
    ended = prep.command("doctor", "--json", "--model_id", prep.model_dir)
    answer = json.loads(ended.text)
    assert ended.code == answer["exit_code"] < 2
    topics = {finding["topic"] for finding in answer["findings"]}
    assert {"cpus", "memory", "threads", "versions", "tokenizer"} <= topics <= {"torch"} | topics
    texts = [finding["text"] for finding in answer["findings"] if finding["topic"] == "tokenizer"]
    assert str(prep.model_dir) in texts[0]
    assert "documents begin with" in texts[1]


def test_the_tokenizer_of_a_planned_folder_is_looked_at_and_nothing_is_written(
    prep: Prep, planned_dir: Path
) -> None:
    before = sorted(path.name for path in planned_dir.iterdir())
    ended = prep.command("doctor", "--output_dir", planned_dir)
    assert ended.code < 2, ended.text
    assert "5 shards" in ended.text
    assert "encoded by gigatoken" in ended.text
    assert sorted(path.name for path in planned_dir.iterdir()) == before


def test_a_tokenizer_that_is_not_there_is_bad_with_its_own_exit_code(prep: Prep, tmp_path: Path) -> None:
    ended = prep.command("doctor", "--model_id", tmp_path / "none")
    (line,) = [line for line in ended.text.splitlines() if line.startswith("bad")]
    assert (ended.code, str(tmp_path / "none") in line) == (66, True)


@pytest.mark.parametrize(
    ("topic", "environ", "files", "todo"),
    [
        ("cpus", {}, {"cpu_max": "150000 100000"}, "--num_proc 1"),
        ("cpus", {}, {"cpu_max": "max 100000"}, ""),
        ("cpus", {"SLURM_CPUS_PER_TASK": "16"}, {}, "srun --cpus-per-task=16"),
        ("cpus", {"SLURM_CPUS_PER_TASK": "4"}, {}, ""),
        ("memory", {}, {"memory_max": f"{256 << 20}\n"}, "--mem"),
        ("memory", {}, {"memory_max": f"{1 << 30}\n"}, ""),
        ("threads", {"OMP_NUM_THREADS": "64", "RAYON_NUM_THREADS": "1"}, {}, "export OMP_NUM_THREADS=8"),
        ("threads", {"OMP_NUM_THREADS": "8"}, {}, ""),
    ],
)
def test_what_a_machine_lacks_is_a_warning_with_what_to_do(
    tmp_path: Path, topic: str, environ: dict[str, str], files: dict[str, str], todo: str
) -> None:
    finding = found(topic, environ, cgroup(tmp_path, **files))
    assert finding.level == ("warning" if todo else "good")
    assert todo in finding.todo


@pytest.mark.processes
@pytest.mark.parametrize("program", ["import nothing_of_this_name", "import os; os.abort()"])
def test_a_torch_that_ends_its_process_is_bad_and_does_not_end_the_doctor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, program: str
) -> None:
    (tmp_path / "torch.py").write_text(program)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert torch_finding().level == "bad"
