"""Tasks, ``run`` and ``doctor``: equal bytes whatever made them, within the given CPUs and memory.

Nothing unfinished is left, whatever stops them.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import re
import shlex
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.chat_sets import PLAIN
from tests.checkout import ROOT
from tests.children import child, end_of, environ_of_children, is_living, run_child, shardprep
from tests.held_children import Hold
from tests.input_writers import write_every_format
from tests.waiting import wait_until
from tests.world import Ended, World, call_main, hostile_text, save_tokenizer

pytestmark = pytest.mark.long

FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "npy": {"token_format": "npy", "append_eos": True},
    "best_fit of sides": {"record": "packed", "seq_len": 128, "pack": "best_fit", "validation_fraction": 0.3},
    "whole files": {"doc": "file", "keep_text": False},
}


@pytest.fixture(scope="module")
def raw_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents in a file of each format, with lines that are not UTF-8."""
    world = World(tmp_path_factory.mktemp("formats")).raw({"a.txt": hostile_text(80, 5).replace("\r", "\n")})
    write_every_format(world.raw_dir)
    # More documents than the largest batch below.
    world.raw({"a.txt": hostile_text(80, 5).encode() + b"\nbroken \xff line\r\n", "z.txt": "x\n" * 400})
    return world.raw_dir


@pytest.fixture
def cpus(monkeypatch: pytest.MonkeyPatch) -> Callable[[set[int]], list[set[int]]]:
    """Sets the CPUs that this process may use, and returns the list of those that it takes."""

    def allow(affinity: set[int]) -> list[set[int]]:
        taken: list[set[int]] = []
        monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(affinity))
        monkeypatch.setattr(os, "sched_setaffinity", lambda _, chosen: taken.append(set(chosen)))
        return taken

    return allow


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_shards_are_equal_whatever_makes_them(raw_dir: Path, tmp_path: Path, cpus: Any, form: str) -> None:
    cpus({*range(8)})
    options = {**FORMS[form], "max_bad_fraction": 1}
    if form == "whole files":
        options |= {"input_dir": World(tmp_path / "text").raw({"a.txt": "x\n" * 9, "b.txt": "가\n"}).raw_dir}
    planned = World(tmp_path / "planned", raw_dir=raw_dir).plan(num_shards=3, **options)
    reference = planned.copy(tmp_path / "reference").run(engine="gigatoken")
    assert len(reference.contents()) >= 9
    for number, (engine, batch, memory_gb) in enumerate(
        (("tokenizers", "", None), ("gigatoken", "1", None), ("auto", "300", 0.3), ("tokenizers", "7", 0.6))
    ):
        world = planned.copy(tmp_path / str(number))
        sizes = {"DATASET_BATCH_SIZE": batch, "DATASET_WRITER_BATCH_SIZE": "1024"}
        for shard_id in range(3):
            world.try_shard(shard_id, engine=engine, memory_gb=memory_gb, environ=sizes).ends(0)
        assert world.contents() == reference.contents()
        assert engine == "auto" or world.manifests()[0]["run"]["engine"].startswith(engine)


@pytest.fixture
def world(tmp_path: Path) -> World:
    """A plan of five shards."""
    return World(tmp_path).raw({"a.txt": hostile_text(200), "b.txt": hostile_text(100, 1)}).plan(num_shards=5)


def test_a_finished_shard_prints_one_line(world: World) -> None:
    assert "may be killed" in world.try_shard(0, memory_gb=0.01).ends(0).err
    (line,) = world.try_shard(0, memory_gb=0.01).ends(0).err.splitlines()
    assert line.endswith("shard 00000 is done already")


def test_the_umask_decides_who_can_read_the_files_of_a_task(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        other = World(tmp_path).raw({"a.txt": "a\nb\n"}).plan().run()
    finally:
        os.umask(before)
    files = [path for path in other.data_dir.glob("*") if path.is_file()]
    assert len(files) == 7
    assert {path.stat().st_mode & 0o777 for path in files} == {0o640}
    assert (other.data_dir / "tokenizer").stat().st_mode & 0o777 == 0o750


def heed_permissions() -> None:
    """Give up root's right to ignore permissions: CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH."""
    head = ctypes.create_string_buffer(struct.pack("<Ii", 0x20080522, 0))
    sets = ctypes.create_string_buffer(24)
    libc = ctypes.CDLL(None)
    assert libc.capget(head, sets) == 0
    values = list(struct.unpack("<6I", sets.raw))
    values[0] &= ~0b110  # of the effective set
    assert libc.capset(head, ctypes.create_string_buffer(struct.pack("<6I", *values))) == 0


# A path and its mode, the command and its output folder, the exit code, and what the error names.
CLOSED: list[tuple[str, int, str, str, int, str]] = [
    ("raw/b.txt", 0, "plan", "other", 66, "b.txt"),
    ("raw/b.txt", 0, "shard", "data", 66, "b.txt"),
    ("raw/sub", 0, "plan", "other", 66, "sub"),
    ("data", 0o555, "shard", "data", 73, "data"),
    ("new", 0o555, "plan", "new", 73, "new"),
    (".", 0o555, "plan", "none", 73, "none"),
    ("data/plan.json", 0, "shard", "data", 74, "plan.json"),
]


@pytest.mark.processes
@pytest.mark.parametrize(("place", "mode", "command", "out", "code", "named"), CLOSED)
def test_a_path_without_permission_is_named(
    world: World, tmp_path: Path, place: str, mode: int, command: str, out: str, code: int, named: str
) -> None:
    (world.raw_dir / "sub").mkdir()
    (tmp_path / "new").mkdir()
    before = world.contents()
    kept, result = (tmp_path / place).stat().st_mode, tmp_path.with_name(f"{tmp_path.name}.json")
    (tmp_path / place).chmod(mode)
    pid = os.fork()
    if pid == 0:
        heed_permissions()
        planning = {"output_dir": tmp_path / out, "recursive": True}
        ended = world.try_plan(**planning) if command == "plan" else world.try_shard(4)
        result.write_text(json.dumps([ended.code, ended.err]))
        os._exit(0)
    os.waitpid(pid, 0)
    (tmp_path / place).chmod(kept)
    found, err = json.loads(result.read_text())
    assert (found, named in err, "Permission denied" in err) == (code, True, True), err
    assert world.contents() == before
    assert not world.temporaries()


@pytest.mark.processes
@pytest.mark.parametrize("target", ["task alone", "whole group"])
def test_a_signal_while_a_task_plans_ends_it_with_75_and_leaves_no_plan(tmp_path: Path, target: str) -> None:
    """The signal comes while transformers is running, which must not catch it as an error."""
    world = World(tmp_path, tokenizer=save_tokenizer(tmp_path / "model")).raw({"a.txt": "a\n"})
    config = world.tokenizer / "tokenizer_config.json"
    config.write_text(json.dumps({**json.loads(config.read_bytes()), "mask_token": "<|mask|>"}))
    hold = Hold(tmp_path, "open", "/transformers/models/auto/tokenization_auto.*\\.py")
    command = shardprep("--shard_id", 0, *world.words_of_plan())
    environ = environ_of_children(**hold.environ(), XDG_CACHE_HOME=str(tmp_path / "cache"))
    with child(command, env=environ, stderr=-2) as task:
        (planner,) = hold.wait(1, task)
        assert planner != task.pid
        (os.kill if target == "task alone" else os.killpg)(task.pid, signal.SIGTERM)
        assert "Traceback" not in end_of(task, code=75)
        wait_until(lambda: not is_living(planner), every_s=0.02)
    assert not world.data_dir.exists()


def done(world: World) -> list[int]:
    return [int(path.stem[6:]) for path in sorted(world.data_dir.glob("shard-*.json"))]


@pytest.mark.processes
def test_run_makes_missing_shards_with_num_proc_processes(world: World, tmp_path: Path) -> None:
    expected = world.copy(tmp_path / "expected").run().contents()
    made = world.run(1, 3).data_dir / "shard-00001.tar"
    (world.data_dir / "shard-00003.idx").unlink()
    before = made.stat().st_ino
    for flags, of_environment, num_proc in (("--num_proc 6", "", 4), ("--num-proc 2", "4", 2), ("", "1", 1)):
        environ = {"DATASET_NUM_PROC": of_environment}
        ended = world.main("run", world.data_dir, *flags.split(), environ=environ).ends(0)
        assert re.search(rf"\b{num_proc} process", ended.text)
        assert (world.contents(), world.temporaries()) == (expected, [])
        for shard_id in (0, 2, 4):
            (world.data_dir / f"shard-0000{shard_id}.json").unlink()
    assert made.stat().st_ino == before
    world.run()
    times = {path: path.stat().st_mtime_ns for path in world.data_dir.glob("shard-*")}
    told = json.loads(world.main("run", world.data_dir, "--json").ends(0).out)
    assert (told["num_done_before"], told["num_made"], told["num_tokens"]) == (5, 0, 0)
    assert {path: path.stat().st_mtime_ns for path in times} == times


@pytest.mark.processes
def test_a_shard_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    world = World(tmp_path).raw({f"{number}.txt": "good\n" * 50 for number in range(6)})
    world.raw({"1.txt": b"good\n" + b"\xff\n" * 20}).plan(num_shards=None)
    (world.raw_dir / "2.txt").unlink()
    ended = world.main("run", world.data_dir, num_proc=2, json=True).ends(65)
    told = json.loads(ended.out)
    assert (told["made"], told["num_failed"], told["num_documents"]) == ("0,3-5", 2, 200)
    assert {name: each["exit_code"] for name, each in told["problems"].items()} == {"1": 65, "2": 66}
    assert (done(world), world.temporaries()) == ([0, 3, 4, 5], [])
    world.raw({"1.txt": b"good\n" + b"\xff\n" * 20, "2.txt": "good\n" * 50})
    run_again(ended, "--max_bad_fraction", "1").ends(0)
    assert done(world) == [0, 1, 2, 3, 4, 5]


def run_again(ended: Ended, *flags: str) -> Ended:
    """Run the command that ``run`` prints for the missing shards."""
    found = re.findall(r"shardprep (run .*)", ended.err)
    assert found, ended.err
    return call_main(*shlex.split(found[-1]), *flags)


@pytest.mark.processes
def test_a_killed_process_fails_one_shard_and_a_remedy_is_printed(world: World, tmp_path: Path) -> None:
    hold = Hold(tmp_path / "held", "open", r"(^|/)\.shard-\d+\.idx\.")
    command = shardprep("run", world.data_dir, "--num_proc", 2)
    with child(command, env=environ_of_children(**hold.environ()), stderr=-2) as run:
        os.kill(hold.wait(2, run)[0], signal.SIGKILL)
        hold.release()
        text = end_of(run, code=74)
    assert len(done(world)) == 4
    run_again(Ended(code=74, out="", err=text)).ends(0)
    assert (done(world), world.temporaries()) == ([0, 1, 2, 3, 4], [])


# CPUs and memory, and doctor's findings about them.


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``kernel({"proc/self/cgroup": "0::/job\\n", ...})`` replaces the kernel's files of cgroups."""
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


@pytest.mark.parametrize(
    ("given", "affinity", "shard_id", "expected"),
    [
        (None, {3, 1, 2}, 0, {1, 2, 3}), ("2", {4, 5}, 7, {4, 5}), ("8", {4, 5}, 0, {4, 5}),
        ("2", {*range(8)}, 0, {0, 1}), ("2", {*range(8)}, 3, {6, 7}), ("2", {*range(8)}, 4, {0, 1}),
        ("3", {*range(8)}, 2, {0, 6, 7}), ("0", {1, 2}, 0, {1, 2}), ("2(x3)", {1, 2}, 0, {1, 2}),
    ],
)  # fmt: skip
def test_a_task_uses_slurms_number_of_cpus_of_its_mask_and_shares_none(
    tmp_path: Path, cpus: Any, given: str | None, affinity: set[int], shard_id: int, expected: set[int]
) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 90}).plan(num_shards=8)
    environ = {} if given is None else {"SLURM_CPUS_PER_TASK": given}
    taken = cpus(affinity)
    assert world.try_shard(shard_id, environ=environ).code == 0
    assert taken[0] == expected


# A sitecustomize: each Python reports its number of threads when it exits.
COUNTING = """
import atexit, os
atexit.register(lambda: open(os.environ["REPORT"], "a").write(f"{len(os.listdir('/proc/self/task'))} "))
"""


@pytest.mark.processes
@pytest.mark.parametrize("engine", ["tokenizers", "gigatoken"])
def test_variables_of_rayon_and_tokenizers_do_not_change_the_threads_of_an_engine(
    tmp_path: Path, engine: str
) -> None:
    """They would affect the tokenizers engine if the worker did not set them itself."""
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


def findings(*words: object, **environ: str) -> dict[str, dict[str, Any]]:
    """Return doctor's findings by topic; of several, the last."""
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
        ("memory", VERSION_2, {}, "500 MB", ""),  # the smallest limit of all parents
        ("memory", VERSION_1, {}, "750 MB", ""),
        ("memory", VERSION_1, {"SLURM_MEM_PER_NODE": "600"}, "629 MB", ""),
        ("memory", VERSION_1, PER_CPU, "315 MB", "--mem"),  # from DefMemPerCPU, without cgroups
        ("memory", VERSION_1, {**PER_CPU, "SLURM_CPUS_ON_NODE": "2"}, "629 MB", ""),
        ("memory", VERSION_1, {"SLURM_MEM_PER_NODE": "0"}, "750 MB", ""),  # 0 means the whole node
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
def test_doctor_uses_the_smallest_limit_and_warns_with_a_remedy(
    kernel: Any, cpus: Any, topic: str, files: dict[str, str], environ: dict[str, str], told: str, todo: str
) -> None:
    cpus({*range(8)})
    kernel(files)
    finding = findings(**environ)[topic]
    assert told in finding["text"]
    assert (finding["level"], todo in finding["todo"]) == ("warning" if todo else "good", True)


def test_batch_sizes_from_the_environment_must_be_positive_integers(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"}).plan(num_shards=1)
    for name in ("DATASET_BATCH_SIZE", "DATASET_WRITER_BATCH_SIZE"):
        for number in ("0", "1e3"):
            world.try_shard(0, environ={name: number}).ends(2, name)


def test_doctor_checks_a_tokenizer_or_a_planned_folder_and_writes_nothing(tmp_path: Path) -> None:
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


@pytest.mark.processes
@pytest.mark.parametrize(
    ("torch", "code", "told"),
    [
        (
            "print('a banner'); __version__ = '9'\nclass cuda:\n device_count = lambda: 0",
            0,
            "torch 9: no GPU",
        ),
        ("raise ImportError('no libcudart')", 2, "no libcudart"),
        ("import os; os.abort()", 2, "exit code -6"),
        ("import time; time.sleep(1000)", 2, "within 1 s"),
    ],
)
def test_beside_a_gpu_doctor_says_what_torch_finds_or_why_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torch: str, code: int, told: str
) -> None:
    pytest.importorskip("torch")
    (tmp_path / "torch.py").write_text(torch)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda path: str(path) == "/dev/nvidiactl" or exists(path))
    if "sleep" in torch:
        monkeypatch.setattr("preprocess.doctor._TORCH_LIMIT_S", 1.0)
    finding = findings(PYTHONPATH=str(tmp_path))["torch"]
    assert (int(finding["exit_code"]), told in finding["text"]) == (code, True), finding


CGROUPS = Path("/sys/fs/cgroup")
# Of each corpus: together more than a batch of 512 KiB. ``LIMITED_TEXT=all`` (``make torture``) takes more.
_TAKES_ALL_TEXT = os.environ.get("LIMITED_TEXT") == "all"
_TEXT_BYTES = 400_000 if _TAKES_ALL_TEXT else 270_000
LIMITED: dict[str, dict[str, Any]] = {
    "documents": {},
    "best_fit": {"record": "packed", "seq_len": 2048, "pack": "best_fit"},
    "chat": {"record": "chat", "seq_len": 2048},
    "a line of 100 MB": {"max_bad_fraction": 0.5},
}


@pytest.fixture(scope="module")
def data(shared_dir: Path, corpora_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """Plans with Llama 3's tokenizer. The long line comes after one of 4 MB."""
    root = tmp_path_factory.mktemp("limited")
    text = b"".join(path.read_bytes()[:_TEXT_BYTES] for path in sorted(corpora_dir.glob("*.txt")))
    records = []
    for line in filter(str.strip, text.decode("utf-8", "ignore").split("\n")):
        turns = [{"role": "user", "content": line}, {"role": "assistant", "content": line[::-1]}]
        records.append({"text": line, "messages": turns})
    long_line = b" ".join((corpora_dir / "en_paragraphs.txt").read_bytes()[:4_000_000].split(b"\n"))
    long = {"a.txt": long_line + b"\n" + long_line * 25}
    (root / "template.jinja").write_text(PLAIN)
    worlds = {}
    for name, options in LIMITED.items():
        world = World(root / name, tokenizer=shared_dir / "tokenizers" / "llama3")
        # Planning renders and encodes conversations in other processes, which takes 5 s for all of them.
        is_short = name == "chat" and not _TAKES_ALL_TEXT
        world.raw(long if "line" in name else {"a.jsonl": records[::6] if is_short else records})
        template = root / "template.jinja" if name == "chat" else None
        worlds[name] = world.plan(num_shards=1, chat_template_file=template, **options)
    return worlds


@contextlib.contextmanager
def cgroup(num_bytes: int) -> Iterator[str]:
    """Create a cgroup with a limit and yield the shell command that joins it, or skip the test."""
    is_old = (CGROUPS / "memory").is_dir()
    folder = (CGROUPS / "memory" if is_old else CGROUPS) / f"shardprep-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / ("memory.limit_in_bytes" if is_old else "memory.max")).write_text(str(num_bytes))
    except OSError as error:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip(f"cannot create a cgroup: {error}")
    try:
        yield f"echo $$ > {folder}/cgroup.procs"
    finally:
        folder.rmdir()


def made(world: World, engine: str, before: str) -> Ended:
    """Run a task in a shell after the command ``before``."""
    for path in world.data_dir.glob("shard-*"):
        path.unlink()
    task = f"{sys.executable} -m shardprep --shard_id 0 --output_dir '{world.data_dir}' --engine {engine}"
    environ = environ_of_children(SLURM_CPUS_PER_TASK="2")  # each thread takes memory
    done = run_child(["sh", "-c", f"{before}; exec {task}"], code=None, cwd=ROOT, env=environ)
    return Ended(done.returncode, done.stdout, done.stderr)


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("form", LIMITED)
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


def test_doctor_names_what_hides_our_packages_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``python -m loader`` beside a loader.py runs that file, without a word from us."""
    for name in ("loader", "slurm"):  # folders of logs or scripts hide nothing
        (tmp_path / name).mkdir()
    for folder in (tmp_path, ROOT):
        monkeypatch.chdir(folder)
        assert "modules" not in findings()
    monkeypatch.chdir(tmp_path)
    for path in (tmp_path / "preprocess.py", tmp_path / "loader" / "__init__.py"):
        path.write_text("")
        told = findings()["modules"]
        hiding = path if path.parent == tmp_path else path.parent
        assert (told["level"], str(hiding) in told["text"]) == ("warning", True)
        path.unlink()


@pytest.mark.processes
def test_doctor_export_prints_only_lines_for_a_shell(tmp_path: Path) -> None:
    ended = World(tmp_path).main("doctor", "--export", environ={"SLURM_NTASKS_PER_NODE": "1"}).ends(0)
    assert all(line.startswith("export ") for line in ended.out.splitlines())
    shown = run_child(["sh", "-c", f"{ended.out}env"]).stdout.splitlines()
    assert {"TOKENIZERS_PARALLELISM=false", f"OMP_NUM_THREADS={len(os.sched_getaffinity(0))}"} <= set(shown)
