"""Child processes: what they import, what they may take, and how commands end on signals.

The folder of a data set may contain a json.py. Nothing that a command starts in that folder imports it.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from shardprep.errors import ShardprepError
from shardprep.foreign_tokenizer import has_bounded_cost
from tests.checkout import ROOT
from tests.children import child, end_of, environ_of_children, run_child
from tests.forged import write_head
from tests.held_children import Hold
from tests.world import World, open_loader, save_tokenizer, tokenizer_dir

pytestmark = pytest.mark.long

PLACE = Path(__file__).parents[1] / "held"
OURS = ("shardprep", "preprocess", "loader", "slurm", "lustre")
# Names that a process of ours may import, but for those that Python itself needs to run ``python -m``.
NAMES = {
    *sys.stdlib_module_names,
    "sitecustomize",
    "usercustomize",
    "numpy",
    "orjson",
    "msgspec",
    "tokenizers",
}
NAMES |= {"gigatoken", "transformers", "torch", "tqdm", "huggingface_hub", "packaging", "yaml", "regex"}
OF_PYTHON = {
    "runpy",
    "pkgutil",
    "importlib",
    "types",
    "typing",
    "collections",
    "functools",
    "operator",
    "keyword",
}
OF_PYTHON |= {"reprlib", "heapq", "warnings", "contextlib", "abc", "__future__", "traceback", "linecache"}


def fill(folder: Path, names: set[str]) -> Path:
    """Fill a folder with modules that record that they ran. Returns the record."""
    record = folder / "ran"
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(record)!r}, 'a').write({name!r} + ' ')\n")
    return record


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """The script that pip installs as the command shardprep."""
    path = tmp_path / "bin" / "command"
    path.parent.mkdir()
    path.write_text("import sys\nfrom shardprep import main\nsys.exit(main())\n")
    return path


COMMANDS = {
    "run": ["run", ".", "--num_proc", "2"],
    "verify": ["verify", ".", "--deep", "1"],
    "a plan by transformers": [
        "plan",
        "--input_dir",
        "../raw",
        "--output_dir",
        "../b",
        "--model_id",
        "../other",
    ],
    "status": ["status", "."],
    "peek": ["peek", "."],
}


@pytest.mark.processes
def test_commands_that_are_typed_in_a_data_set_run_no_module_of_it(tmp_path: Path, script: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=2)
    model = save_tokenizer(tmp_path / "other")
    config = json.loads((model / "tokenizer_config.json").read_bytes())
    (model / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    record = fill(world.data_dir, NAMES)
    environ = environ_of_children(PYTHONPATH=str(ROOT))
    for words in COMMANDS.values():
        run_child([sys.executable, script, *words], cwd=world.data_dir, env=environ)
    assert not record.exists(), record.read_text()


@pytest.mark.processes
@pytest.mark.parametrize("places", ["", f"{os.pathsep}{ROOT}", f".{os.pathsep}{ROOT}"])
def test_children_get_no_folder_relative_to_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, places: str
) -> None:
    """An empty entry of PYTHONPATH stands for it, and Python looks there for sitecustomize."""
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 90}).plan(num_shards=2)
    record = fill(world.data_dir, NAMES)
    monkeypatch.chdir(world.data_dir)
    monkeypatch.setenv("PYTHONPATH", places)
    world.main("run", ".", num_proc=2).ends(0)
    assert not record.exists(), record.read_text()


# One process, because each imports torch, which takes 2 s.
TRAIN = """
import multiprocessing, sys
from loader import ensure_prepared, get_llama3_dataloader
if __name__ == "__main__":
    data = ensure_prepared(".", input_dir="../raw", model_id=sys.argv[1], num_proc=1)
    for method in ("spawn", "forkserver"):
        multiprocessing.set_start_method(method, force=True)
        with get_llama3_dataloader(data, 2, num_workers=1) as loader:
            print(method, len(list(loader)))
"""


@pytest.mark.processes
def test_a_training_that_starts_in_its_data_set_runs_no_module_of_it(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 8})
    world.data_dir.mkdir()
    record = fill(world.data_dir, NAMES)
    (tmp_path / "bin").mkdir()
    train = tmp_path / "bin" / "train.py"
    train.write_text(TRAIN)
    command = [sys.executable, str(train), str(world.tokenizer)]
    done = run_child(command, cwd=world.data_dir, env=environ_of_children(PYTHONPATH=str(ROOT)))
    assert (done.stdout, record.exists()) == ("spawn 4\nforkserver 4\n", False)


@pytest.mark.processes
@pytest.mark.parametrize("package", OURS)
def test_python_m_takes_nothing_from_the_current_folder_but_what_finds_the_package(
    tmp_path: Path, package: str
) -> None:
    record = fill(tmp_path, NAMES - OF_PYTHON)
    run_child(
        [sys.executable, "-m", package, "--help"], cwd=tmp_path, env=environ_of_children(PYTHONPATH=str(ROOT))
    )
    assert not record.exists(), record.read_text()


# Who starts Python.

DOORS = {"shardprep/processes.py", "shardprep/child_process.py"}
STARTERS = {"fork", "forkpty", "execv", "execve", "execvp", "posix_spawn", "posix_spawnp", "spawnv", "system"}
OF_MULTIPROCESSING = {"Process", "Pool", "get_context", "set_start_method", "Manager", "ProcessPoolExecutor"}


def starts_of(path: Path) -> Iterator[str]:
    """Yield the names in a file by which it could start Python."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        name = getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "name", "")
        if name in STARTERS | OF_MULTIPROCESSING:
            yield str(name)
        if isinstance(node, ast.Attribute) and node.attr == "executable":
            yield "sys.executable"


def test_only_one_module_starts_python() -> None:
    # The restart in UTF-8 mode replaces the process; two messages and a job's script name the interpreter.
    # Helpers of a task are forks of the task, which has imported everything.
    allowed = {
        "preprocess/make/helpers.py": {"fork"},
        "preprocess/read/messages.py": {"system"},  # a field of a conversation
        "shardprep/command_line.py": {"execve"},
        "shardprep/__init__.py": {"sys.executable"},
        "slurm/scripts.py": {"sys.executable"},
    }
    for package in OURS:
        for path in (ROOT / package).rglob("*.py"):
            name = path.relative_to(ROOT).as_posix()
            if name not in DOORS:
                assert set(starts_of(path)) <= allowed.get(name, set()), name
    assert "sys.executable" in set(starts_of(ROOT / "shardprep/processes.py")), "the test finds them"


# Tokenizers of somebody else.


def replacing(text: str, by: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": {"String": text}, "content": by}


BACKTRACKING = {"Regex": r"(\w+\s?)+$x"}
PIECES = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
COSTLY: dict[str, dict[str, Any]] = {
    "a normalizer that doubles a letter 40 times": {
        "normalizer": {"type": "Sequence", "normalizers": [replacing("e", "ee")] * 40}
    },
    "bytes as letters, 40 times": {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [PIECES] * 40}},
    "a splitter that goes back for ever": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": BACKTRACKING, "behavior": "Isolated", "invert": False},
                PIECES,
            ],
        }
    },
    "a decoder that goes back for ever": {
        "decoder": {
            "type": "Sequence",
            "decoders": [
                PIECES,
                {"type": "Fuse"},
                {"type": "Replace", "pattern": BACKTRACKING, "content": ""},
            ],
        }
    },
    "a decoder that doubles a letter 40 times": {
        "decoder": {"type": "Sequence", "decoders": [PIECES, {"type": "Fuse"}, *[replacing("e", "ee")] * 40]}
    },
    "a normalizer behind the model": {},
}
EVERY_LETTER = "the quick brown fox jumps over a lazy dog while seven wise owls watch from tall old trees\n"


def with_tokenizer(world: World, kind: str) -> Path:
    """Replace the tokenizer of a data set, and its hash in the plan. Returns its tokenizer.json."""
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    text = json.dumps({**json.loads(path.read_bytes()), **COSTLY[kind]})
    if kind == "a normalizer behind the model":
        doubling = COSTLY["a normalizer that doubles a letter 40 times"]["normalizer"]
        text = f'{text[:-1]}, "normalizer": {json.dumps(doubling)}}}'
    path.write_text(text)
    plan = world.data_dir / "plan.json"
    line, _, rows = plan.read_text().partition("\n")
    head = json.loads(line + "}")
    head["tokenizer_files"] = {
        each.name: {"num_bytes": each.stat().st_size, "sha256": hashlib.sha256(each.read_bytes()).hexdigest()}
        for each in path.parent.iterdir()
    }
    write_head(plan, head, rows.encode())
    return path


@pytest.fixture
def quick_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reduces the limit of CPU time to 0.2 s, by the sitecustomize of tests/held."""
    monkeypatch.setenv("PYTHONPATH", str(PLACE))
    monkeypatch.setenv("MOST_CPU_S", "0.2")


@pytest.mark.processes
@pytest.mark.usefixtures("quick_limit")
@pytest.mark.parametrize("kind", COSTLY)
def test_a_costly_tokenizer_of_a_data_set_ends_in_an_error_that_names_it(tmp_path: Path, kind: str) -> None:
    world = World(tmp_path).raw({"a.txt": EVERY_LETTER * 9}).make(num_shards=1)
    path = with_tokenizer(world, kind)
    words = ["peek", world.data_dir] if "decoder" in kind else ["verify", world.data_dir, "--deep", "1"]
    ended = world.main(*words)
    assert ended.code in (65, 78), ended.text
    assert str(path) in ended.err


# Parts of a model that take more time or memory than a text of the same length in another tokenizer.
UNIGRAM = {"type": "Unigram", "unk_id": 0, "vocab": [["a" * size, -1.0] for size in range(1, 600)]}
COSTLY_MODELS: dict[str, Callable[[dict[str, Any]], str]] = {
    "pieces of each length": lambda model: json.dumps(UNIGRAM),
    "pieces of each length, and no type": lambda model: json.dumps({**UNIGRAM, "type": None}),
    "a type in escapes": lambda model: json.dumps(UNIGRAM).replace("Unigram", r"\u0055nigram"),
    "two types": lambda model: json.dumps(model)[:-1] + ", " + json.dumps(UNIGRAM)[1:],
    "a token of 5 MB": lambda model: json.dumps({**model, "vocab": {**model["vocab"], "z" * 5_000_000: 999}}),
    "a token of 5 MB with quotes": lambda model: json.dumps(
        {**model, "vocab": {**model["vocab"], 'z"' * 2_500_000: 999}}
    ),
    "a suffix of 1 MB": lambda model: json.dumps({**model, "end_of_word_suffix": "z" * 1_000_000}),
}


@pytest.mark.parametrize("kind", COSTLY_MODELS)
def test_a_model_whose_cost_is_not_known_is_used_within_limits(kind: str) -> None:
    text = (tokenizer_dir() / "tokenizer.json").read_text()
    data = json.loads(text)
    model = data.pop("model")
    assert has_bounded_cost(json.dumps({**data, "model": model}).encode())
    assert not has_bounded_cost(f'{json.dumps(data)[:-1]}, "model": {COSTLY_MODELS[kind](model)}}}'.encode())


@pytest.mark.processes
@pytest.mark.usefixtures("quick_limit")
def test_a_plan_refuses_a_costly_tokenizer_and_names_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the kernel's limit."""
    monkeypatch.setenv("MOST_CPU_S", "1")
    model = save_tokenizer(tmp_path / "model")
    data = json.loads((model / "tokenizer.json").read_bytes())
    doubling = COSTLY["a normalizer that doubles a letter 40 times"]
    (model / "tokenizer.json").write_text(json.dumps({**data, **doubling}))
    world = World(tmp_path, tokenizer=model).raw({"a.txt": EVERY_LETTER})
    world.try_plan(num_shards=1).ends(65, model, "took more than")


@pytest.mark.processes
@pytest.mark.slow
def test_a_tokenizer_with_an_unknown_pattern_makes_the_same_bytes_in_its_process(tmp_path: Path) -> None:
    """The pattern is as cheap as the known one, to which it adds a group."""
    shards = []
    for number, pattern in enumerate((r"\s+", r"(?:\s+)")):
        model = save_tokenizer(tmp_path / f"model{number}")
        data = json.loads((model / "tokenizer.json").read_bytes())
        splits = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [splits, PIECES]}
        (model / "tokenizer.json").write_text(json.dumps(data))
        world = World(tmp_path / str(number), tokenizer=model).raw({"a.txt": EVERY_LETTER * 4000})
        shards.append([ids for _, _, ids in world.plan(num_shards=1).run(0).documents()])
    assert shards[0] == shards[1]


@pytest.mark.processes
@pytest.mark.usefixtures("quick_limit")
def test_the_loader_refuses_a_costly_tokenizer(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": EVERY_LETTER * 9}).make(num_shards=1)
    path = world.data_dir / "tokenizer" / "tokenizer.json"
    data = json.loads(path.read_bytes())
    token = {**data["added_tokens"][0], "id": 999, "content": "e", "normalized": True, "special": False}
    doubling = COSTLY["a normalizer that doubles a letter 40 times"]
    path.write_text(json.dumps({**data, **doubling, "added_tokens": [*data["added_tokens"], token]}))
    with (
        pytest.raises(ShardprepError) as raised,
        open_loader(world.data_dir, 2) as loader,
    ):
        _ = loader.tokenizer
    assert "tokenizer.json" in str(raised.value)
    assert raised.value.exit_code in (65, 78)


# Errors and signals.


def test_errors_that_a_program_gets_have_no_control_characters(tmp_path: Path) -> None:
    error = ShardprepError(path="a\x1b[2J", found="b\x07\nerror: forged", expected="c\u202e", remedy="d\x9b")
    assert str(error).isprintable()
    assert (error.found, error.remedy) == ("b\x07\nerror: forged", "d\x9b"), "the fields are as found"
    assert str(ShardprepError("e\x1b\ud800")).isprintable()


@pytest.mark.processes
@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_while_a_command_still_imports_stops_it_cleanly(
    tmp_path: Path, script: Path, stop: signal.Signals
) -> None:
    hold = Hold(tmp_path, "open", r"shardprep/.*errors.*\.py")
    environ = environ_of_children(**{**hold.environ(), "PYTHONPATH": f"{PLACE}{os.pathsep}{ROOT}"})
    with child([sys.executable, script, "status", tmp_path], env=environ) as process:
        (pid,) = hold.wait(1, process)
        os.kill(pid, stop)
        hold.release()
        end_of(process, code=75)


# A thread that is just ending gets a signal that the main thread blocks.
STOPPED_AT_EXIT = """
import atexit, os, signal, threading, time
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
"""


@pytest.mark.processes
def test_a_signal_after_the_work_does_not_change_the_exit_code(tmp_path: Path, script: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"}).plan(num_shards=1).run()
    (script.parent / "sitecustomize.py").write_text(STOPPED_AT_EXIT)
    environ = environ_of_children(PYTHONPATH=f"{script.parent}{os.pathsep}{ROOT}")
    done = run_child([sys.executable, script, "status", world.data_dir], env=environ)
    assert not done.stderr


def test_a_command_leaves_the_signal_handlers_as_they_were(tmp_path: Path) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n"})
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)]
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    hook = sys.unraisablehook
    world.plan(num_shards=1).run(0)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)] == before
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == mask
    assert sys.unraisablehook is hook
