"""Workers under real limits, with Llama 3's tokenizer: they do their work, or say before it why not."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make.resources import LEAST_WORKER_BYTES, memory_limits
from tests.checkout import ROOT
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = [pytest.mark.slow, pytest.mark.processes]
CGROUPS = Path("/sys/fs/cgroup")
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "concat": {"record": "packed", "seq_len": 2048},
    "best_fit": {"record": "packed", "seq_len": 2048, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 2048},
}
ENGINES = ("gigatoken", "tokenizers")
CASES = [case for case in itertools.product(FORMS, ENGINES) if case != ("chat", "gigatoken")]
TEMPLATE = (
    "{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'"
    " + message['content'] + '<|eot_id|>' }}{% endfor %}{% if add_generation_prompt %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)


@pytest.fixture(scope="module")
def data(
    prep: Prep, shared_dir: Path, corpora_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("limited")
    (root / "raw").mkdir()
    text = b"".join(path.read_bytes()[:400_000] for path in sorted(corpora_dir.glob("*.txt")))
    lines = [line for line in text.decode("utf-8", "ignore").split("\n") if line.strip()]
    records = [
        {
            "text": text,
            "messages": [{"role": "user", "content": text}, {"role": "assistant", "content": text[::-1]}],
        }
        for text in lines
    ]
    (root / "raw" / "a.jsonl").write_text("".join(json.dumps(each) + "\n" for each in records))
    (root / "template.jinja").write_text(TEMPLATE)
    for name, options in FORMS.items():
        more: dict[str, Any] = {"chat_template_file": root / "template.jinja"} if name == "chat" else {}
        model_id = str(shared_dir / "tokenizers" / "llama3")
        prep.plan(root / "raw", root / name, num_shards=1, model_id=model_id, **options, **more)
    return {name: root / name for name in FORMS}


@contextlib.contextmanager
def cgroup(num_bytes: int) -> Iterator[Path]:
    """A cgroup with a limit, whose processes are named in the file that is given; skips where none can be."""
    is_old = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_old else CGROUPS) / f"shardprep-test-{os.getpid()}"
    try:
        folder.mkdir()
        limit = folder / ("memory.limit_in_bytes" if is_old else "memory.max")
        limit.write_text(str(num_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup of one's own can be made: {error}")
    try:
        yield folder / "cgroup.procs"
    finally:
        folder.rmdir()


def made(data: Path, engine: str, before: str) -> tuple[int, str]:
    """How a task ends that a shell starts behind some words, and what it says."""
    task = f"{sys.executable} -m preprocess --shard_id 0 --output_dir {data} --engine {engine}"
    for path in data.glob("shard-*"):
        path.unlink()
    two = {**os.environ, "SLURM_CPUS_PER_TASK": "2"}  # each thread takes some
    ended = run_child(["sh", "-c", f"{before}; exec {task}"], code=None, cwd=ROOT, env=two)
    return ended.returncode, ended.stderr


@pytest.mark.parametrize(("form", "engine"), CASES)
def test_a_cgroup_of_300_mb_is_enough_for_each_form_and_engine(
    data: dict[str, Path], form: str, engine: str
) -> None:
    with cgroup(300 << 20) as processes:
        code, said = made(data[form], engine, f"echo $$ > {processes}")
    assert code == 0, said
    assert "shard 00000 is done" in said


def test_a_line_of_100_mb_is_left_out_in_a_cgroup_of_300_mb_and_a_document_of_4_mb_is_made(
    prep: Prep, shared_dir: Path, corpora_dir: Path, tmp_path: Path
) -> None:
    text = b" ".join((corpora_dir / "en_paragraphs.txt").read_bytes()[:4_000_000].split(b"\n"))
    (tmp_path / "raw").mkdir()
    with (tmp_path / "raw" / "a.txt").open("wb") as file:
        file.write(text + b"\n")
        for _ in range(25):
            file.write(text)
    prep.plan(
        tmp_path / "raw",
        tmp_path / "data",
        num_shards=1,
        max_bad_fraction=0.5,
        model_id=str(shared_dir / "tokenizers" / "llama3"),
    )
    with cgroup(300 << 20) as processes:
        code, said = made(tmp_path / "data", "gigatoken", f"echo $$ > {processes}")
    assert code == 0, said
    assert "1 documents were left out" in said


@pytest.mark.parametrize(("form", "engine"), CASES)
@pytest.mark.parametrize("limit_mb", [300, 512, 1012, 1013])
def test_under_ulimit_a_task_makes_its_shard_or_refuses_before_it_loads_anything(
    data: dict[str, Path], form: str, engine: str, limit_mb: int
) -> None:
    code, said = made(data[form], engine, f"ulimit -v {limit_mb << 10}")
    if limit_mb < 1013:
        assert code == 2, said
        assert re.fullmatch(r"error: ulimit -v allows \d+ KiB of address space, .*\n", said)
    else:
        assert code == 0, said


def test_the_limit_of_ulimit_is_one_of_the_memory_limits() -> None:
    words = (
        "import json; from preprocess.make import resources; print(json.dumps(resources.memory_limits({})))"
    )
    limited = run_child(["sh", "-c", f"ulimit -v 2097152; exec {sys.executable} -c '{words}'"], cwd=ROOT)
    assert json.loads(limited.stdout)["ulimit -v"] == (2048 - 700) << 20
    assert "ulimit -v" not in memory_limits({})
    assert LEAST_WORKER_BYTES < 320 << 20


def test_doctor_tells_under_400_mb_and_under_ulimit(data: dict[str, Path]) -> None:
    doctor = f"exec {sys.executable} -m preprocess doctor --output_dir {data['documents']}"
    with cgroup(400 << 20) as processes:
        ended = run_child(["sh", "-c", f"echo $$ > {processes}; {doctor}"], code=None, cwd=ROOT)
    assert ended.returncode in (0, 1), ended.stderr
    assert "by the cgroup" in ended.stdout
    ended = run_child(["sh", "-c", f"ulimit -v 409600; {doctor}"], code=2, cwd=ROOT)
    assert re.search(r"^bad +memory +ulimit -v allows 409600 KiB", ended.stdout, re.MULTILINE)
