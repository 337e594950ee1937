"""A task uses the CPUs and memory that Slurm gave it and the kernel lets it have; doctor and logs say so."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_sets import PLAIN
from tests.checkout import ROOT
from tests.children import environ_of_children, run_child, shardprep
from tests.world import Ended, World, call_main


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``kernel({"proc/self/cgroup": "0::/job\\n", ...})``: what the kernel's files of cgroups say."""
    root, read_text = tmp_path / "kernel", Path.read_text

    def read(path: Path, *args: Any, **options: Any) -> str:
        is_of_kernel = str(path) == "/proc/self/cgroup" or str(path).startswith("/sys/fs/cgroup")
        return read_text(root / str(path)[1:] if is_of_kernel else path, *args, **options)

    def say(files: dict[str, str]) -> None:
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text)
        monkeypatch.setattr(Path, "read_text", read)

    return say


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], list[set[int]]]:
    """Says which CPUs this process may use; gets those that it takes."""

    def allow(affinity: set[int]) -> list[set[int]]:
        taken: list[set[int]] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: taken.append(set(chosen)))
        return taken

    return allow


@pytest.mark.parametrize(
    ("given", "affinity", "shard_id", "expected"),
    [
        (None, {3, 1, 2}, 0, {1, 2, 3}), ("2", {4, 5}, 7, {4, 5}), ("8", {4, 5}, 0, {4, 5}),
        ("2", {*range(8)}, 0, {0, 1}), ("2", {*range(8)}, 3, {6, 7}), ("2", {*range(8)}, 4, {0, 1}),
        ("3", {*range(8)}, 2, {0, 6, 7}), ("0", {1, 2}, 0, {1, 2}), ("2(x3)", {1, 2}, 0, {1, 2}),
    ],
)  # fmt: skip
def test_slurms_number_then_the_mask_decides_and_tasks_share_no_cpu(
    tmp_path: Path, cpus: Any, given: str | None, affinity: set[int], shard_id: int, expected: set[int]
) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 90}).plan(num_shards=8)
    environ = {} if given is None else {"SLURM_CPUS_PER_TASK": given}
    taken = cpus(affinity)
    assert world.try_shard(shard_id, environ=environ).code == 0
    assert taken[0] == expected


# Read by each Python that starts: at its end it says how many threads it has.
COUNTING = """
import atexit, os
atexit.register(lambda: open(os.environ["REPORT"], "a").write(f"{len(os.listdir('/proc/self/task'))} "))
"""


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_a_shells_settings_for_other_programs_change_no_engines_threads(tmp_path: Path, engine: str) -> None:
    """Rayon's variables, and tokenizers' own, act on the tokenizers engine if nobody sets them."""
    world = World(tmp_path).raw({"a.txt": "a text\n" * 20_000}).plan(num_shards=1)
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text(COUNTING)
    report = tmp_path / "report"
    words = shardprep("--shard_id", 0, "--engine", engine, "--output_dir", world.data_dir)
    numbers = {"RAYON_NUM_THREADS": "7", "RAYON_RS_NUM_CPUS": "7", "TOKENIZERS_PARALLELISM": "false"}
    for given in ({}, numbers):
        environ = {**environ_of_children(), **given, "REPORT": str(report)}
        for name in numbers.keys() - given.keys():
            environ.pop(name, None)
        environ["PYTHONPATH"] = f"{tmp_path / 'site'}:{ROOT}"
        run_child(words, env=environ)
        (world.data_dir / "shard-00000.json").unlink()
    assert len(set(report.read_text().split())) == 1, report.read_text()


def findings(*words: object, **environ: str) -> dict[str, dict[str, str]]:
    """What doctor finds, by topic; of several the last."""
    ended = call_main("doctor", "--json", *words, environ=environ)
    answer = json.loads(ended.out)
    assert ended.code == answer["exit_code"]
    return {finding["topic"]: finding for finding in answer["findings"]}


VERSION_1 = {
    "proc/self/cgroup": "4:cpu,cpuacct:/x\n3:memory:/slurm/uid_0\n0::/\n",
    "sys/fs/cgroup/memory/slurm/uid_0/memory.limit_in_bytes": "750000000\n",
}
VERSION_2 = {"task_0/memory.max": "max\n", "memory.max": "500000000\n", "../memory.max": "900000000\n"}
VERSION_2 = {f"sys/fs/cgroup/slurm/job_7/{name}": text for name, text in VERSION_2.items()}
VERSION_2["proc/self/cgroup"] = "0::/slurm/job_7/task_0\n"
PER_CPU = {"SLURM_MEM_PER_CPU": "300", "SLURM_CPUS_PER_TASK": "1"}


def job(**files: str) -> dict[str, str]:
    names = {name: f"sys/fs/cgroup/job/{name.replace('_', '.')}" for name in files}
    return {"proc/self/cgroup": "0::/job\n", **{names[name]: text for name, text in files.items()}}


@pytest.mark.parametrize(
    ("topic", "files", "environ", "told", "todo"),
    [
        ("memory", VERSION_2, {}, "500 MB", ""),  # the least of all above
        ("memory", VERSION_1, {}, "750 MB", ""),
        ("memory", VERSION_1, {"SLURM_MEM_PER_NODE": "600"}, "629 MB", ""),
        ("memory", VERSION_1, PER_CPU, "315 MB", "--mem"),  # as DefMemPerCPU is told, without cgroups
        ("memory", VERSION_1, {**PER_CPU, "SLURM_CPUS_ON_NODE": "2"}, "629 MB", ""),
        ("memory", VERSION_1, {"SLURM_MEM_PER_NODE": "0"}, "750 MB", ""),  # 0 is all of the node
        ("memory", {"proc/self/cgroup": "0::/none\n"}, {}, "machine", ""),
        ("memory", job(memory_max=f"{256 << 20}\n"), {}, "268 MB", "--mem"),
        ("cpus", job(cpu_max="150000 100000"), {}, "", "--num_proc 1"),
        ("cpus", job(), {"SLURM_CPUS_PER_TASK": "16"}, "16", "srun --cpus-per-task=16"),
        ("cpus", job(cpu_max="max 100000"), {"SLURM_CPUS_PER_TASK": "4"}, "4", ""),
        (
            "threads",
            job(),
            {"OMP_NUM_THREADS": "64", "RAYON_NUM_THREADS": "1"},
            "",
            "export OMP_NUM_THREADS=8",
        ),
        ("threads", job(), {"OMP_NUM_THREADS": "8"}, "", ""),
    ],
    ids=str,
)
def test_the_least_limit_counts_and_what_lacks_is_a_warning_with_what_to_do(
    kernel: Any, cpus: Any, topic: str, files: dict[str, str], environ: dict[str, str], told: str, todo: str
) -> None:
    cpus({*range(8)})
    kernel(files)
    finding = findings(**environ)[topic]
    assert told in finding["text"]
    assert (finding["level"], todo in finding["todo"]) == ("warning" if todo else "good", True)


@pytest.mark.parametrize("name", ["DATASET_BATCH_SIZE", "DATASET_WRITER_BATCH_SIZE"])
def test_numbers_of_the_environment_are_positive_or_refused(tmp_path: Path, name: str) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"}).plan(num_shards=1)
    for number, code in (("0", 2), ("1e3", 2), ("", 0)):
        ended = world.try_shard(0, environ={name: number})
        assert (ended.code, name in ended.err) == (code, code == 2)


def test_doctor_looks_at_a_tokenizer_and_at_a_planned_folder_and_writes_nothing(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n" * 9}).plan(num_shards=5)
    found = findings("--model_id", world.tokenizer)
    assert {"cpus", "memory", "threads", "versions", "tokenizer"} <= set(found)
    before = sorted(path.name for path in world.data_dir.iterdir())
    ended = world.main("doctor", output_dir=world.data_dir)
    assert ended.code in (0, 1)
    assert all(words in ended.out for words in ("5 shards", str(world.data_dir)))
    assert sorted(path.name for path in world.data_dir.iterdir()) == before
    ended = world.main("doctor", model_id=tmp_path / "none")
    (line,) = [line for line in ended.out.splitlines() if line.startswith("bad")]
    assert (ended.code, str(tmp_path / "none") in line) == (66, True)


CGROUPS = Path("/sys/fs/cgroup")
FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "best_fit": {"record": "packed", "seq_len": 2048, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 2048},
    "a line of 100 MB": {"max_bad_fraction": 0.5},
}


@pytest.fixture(scope="module")
def data(shared_dir: Path, corpora_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Plans of Llama 3's tokenizer; the long line stands behind one of 4 MB."""
    root = tmp_path_factory.mktemp("limited")
    text = b"".join(path.read_bytes()[:400_000] for path in sorted(corpora_dir.glob("*.txt")))
    records = []
    for line in filter(str.strip, text.decode("utf-8", "ignore").split("\n")):
        turns = [{"role": "user", "content": line}, {"role": "assistant", "content": line[::-1]}]
        records.append({"text": line, "messages": turns})
    long_line = b" ".join((corpora_dir / "en_paragraphs.txt").read_bytes()[:4_000_000].split(b"\n"))
    long = World(root / "long").raw({"a.txt": long_line + b"\n" + long_line * 25})
    (root / "template.jinja").write_text(PLAIN)
    worlds = {}
    for name, options in FORMS.items():
        place = {"data_dir": root / name, "raw_dir": long.raw_dir if "line" in name else root / "raw"}
        worlds[name] = World(root, tokenizer=shared_dir / "tokenizers" / "llama3", **place)
        if name != "a line of 100 MB":
            worlds[name].raw({"a.jsonl": records})
        template = root / "template.jinja" if name == "chat" else None
        worlds[name].plan(num_shards=1, chat_template_file=template, **options)
    return worlds


@contextlib.contextmanager
def cgroup(num_bytes: int) -> Iterator[str]:
    """Words of a shell that join a cgroup with a limit; skips where none can be made."""
    is_old = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_old else CGROUPS) / f"shardprep-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(num_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"no cgroup of one's own can be made: {error}")
    try:
        yield f"echo $$ > {folder}/cgroup.procs"
    finally:
        folder.rmdir()


def made(world: World, engine: str, before: str) -> Ended:
    """How a task ends that a shell starts behind some words."""
    for path in world.data_dir.glob("shard-*"):
        path.unlink()
    task = f"{sys.executable} -m shardprep --shard_id 0 --output_dir '{world.data_dir}' --engine {engine}"
    environ = environ_of_children(SLURM_CPUS_PER_TASK="2")  # each thread takes some
    done = run_child(["sh", "-c", f"{before}; exec {task}"], code=None, cwd=ROOT, env=environ)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("form", FORMS)
def test_a_cgroup_of_300_mb_is_enough(data: dict[str, World], form: str) -> None:
    with cgroup(300 << 20) as joining:
        made(data[form], "tokenizers" if form in ("documents", "chat") else "gigatoken", joining).ends(0)
    assert data[form].left_out() == ({"too_long": 1} if form == "a line of 100 MB" else {})


@pytest.mark.slow
@pytest.mark.processes
def test_under_ulimit_a_task_makes_its_shard_or_refuses_at_once(data: dict[str, World]) -> None:
    for limit_mb in (300, 1012):
        made(data["documents"], "gigatoken", f"ulimit -v {limit_mb << 10}").ends(2, "ulimit -v")
    for form, engine in (("documents", "gigatoken"), ("chat", "tokenizers")):
        made(data[form], engine, f"ulimit -v {1013 << 10}").ends(0)


@pytest.mark.processes
def test_exported_lines_can_be_sourced_and_are_all_that_is_printed(tmp_path: Path) -> None:
    ended = World(tmp_path).main("doctor", "--export", environ={"SLURM_NTASKS_PER_NODE": "1"}).ends(0)
    assert all(line.startswith("export ") for line in ended.out.splitlines())
    shown = run_child(["sh", "-c", f"{ended.out}env"]).stdout.splitlines()
    assert {"TOKENIZERS_PARALLELISM=false", f"OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"} <= set(shown)
