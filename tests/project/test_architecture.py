"""docs/architecture.md: allowed imports, heavy libraries of no worker; CONTRIBUTING.md: recipes."""

from __future__ import annotations

import ast
import csv
import functools
import io
import json
import re
import shutil
import sys
from collections import Counter
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.checkout import PACKAGES, ROOT
from tests.children import environ_of_children, run_child, shardprep
from tests.world import World, call_main

HEAVY = {"torch", "transformers", "webdataset"}
# Folder -> packages, or folders of packages, that its modules may import.
ARROWS = {
    "shardprep": {"shardprep"},
    "shardprep/format": {"shardprep", "shardprep.format"},
    "lustre": {"lustre", "shardprep"},
    "loader": {"loader", "shardprep"},
    "loader/order": {"loader.order", "shardprep"},
    "loader/read": {"loader.order", "loader.read", "shardprep"},
    "loader/batch": {"loader.order", "loader.read", "loader.batch", "shardprep"},
    "slurm": {"slurm", "shardprep", "lustre"},
    "preprocess": {"preprocess", "shardprep", "lustre"},
    "preprocess/read": {"preprocess.read", "shardprep"},
    "preprocess/plan": {"preprocess.read", "preprocess.make", "preprocess.plan", "shardprep", "lustre"},
    "preprocess/make": {"preprocess.read", "preprocess.make", "shardprep", "lustre"},
}
# The only module of shardprep that imports another package, to re-export a name.
LENT = {"shardprep/__init__.py": {"loader"}}


@functools.cache
def imports_of(path: Path) -> set[str]:
    """Return all modules that a file imports, also inside functions and under TYPE_CHECKING."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: imports are absolute"
            found |= {str(node.module), *(f"{node.module}.{name.name}" for name in node.names)}
    return found


FILES = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
MODULES = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in FILES}


def modules(folder: str) -> dict[str, set[str]]:
    """Return file -> imported modules of this project, for a package or only one folder of it."""
    paths = (ROOT / folder).rglob("*.py") if folder in PACKAGES else (ROOT / folder).glob("*.py")
    found = {path.relative_to(ROOT).as_posix(): imports_of(path) & MODULES for path in paths}
    assert found
    return found


@pytest.mark.parametrize("folder", ARROWS)
def test_a_folder_imports_only_what_it_may(folder: str) -> None:
    allowed = ARROWS[folder]
    for path, names in modules(folder).items():
        for name in names - LENT.get(path, set()):
            package = name.partition(".")[0]
            is_own = name == path.partition("/")[0]  # ``from preprocess import read`` imports both
            assert is_own or {package, ".".join(name.split(".")[:2])} & allowed, f"{path} imports {name}"
            if folder == "shardprep" and "/format/" not in path:
                assert not name.startswith("shardprep.format"), f"{path} imports {name}"


# Modules of loader/ that lend names of loader/train/ to users.
FACES = {
    f"loader/{name}.py" for name in ("__init__", "__main__", "boundaries", "lightning", "trainer", "training")
}


def test_the_loader_needs_no_help_for_training_loops() -> None:
    """An arrow from ``loader/`` to ``loader/train/`` stands only where users import names."""
    for path in (ROOT / "loader").glob("*.py"):
        name = path.relative_to(ROOT).as_posix()
        of_train = {each for each in imports_of(path) if each.startswith("loader.train.")}
        assert name in FACES or not of_train, f"{name} imports {of_train}"


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_inside_a_package_have_no_cycle(package: str) -> None:
    """If there is one, the error names it."""
    imported = {name.removesuffix(".py").replace("/", "."): names for name, names in modules(package).items()}
    TopologicalSorter({name: names - {name} for name, names in imported.items()}).prepare()


@pytest.mark.processes
def test_reading_a_plan_loads_no_command_line() -> None:
    """A plan's options are declared by ``option``, which needs neither argparse nor the console."""
    code = "import sys, shardprep.format.plan; print(*sorted(sys.modules))"
    loaded = set(run_child([sys.executable, "-c", code]).stdout.split())
    assert "shardprep.format.plan" in loaded
    assert not loaded & {"argparse", "ctypes", "shardprep.command_line", "shardprep.console"}


# The rooms of slurm/. Each imports only those before it.
SLURM = (
    *("commands", "request", "limits", "partitions", "accounts", "refusals", "site", "reasons"),
    *("job_names", "squeue", "queue", "log_ends", "causes", "attempts", "state", "own", "retry_rules"),
    *("fit", "nodes", "scripts", "sbatch", "checks", "waits", "speed"),
    *("status_data", "status_text", "status", "report_data", "report_page", "report", "logs"),
    *("controller", "submission", "announce", "send", "submit", "submitit", "retry", "cancel"),
)


def test_no_function_below_a_main_of_slurm_or_lustre_takes_parsed_flags() -> None:
    for path in [*(ROOT / "slurm").glob("*.py"), *(ROOT / "lustre").glob("*.py")]:
        assert path.name == "__main__.py" or "argparse" not in imports_of(path), path


def test_only_the_function_of_a_command_takes_parsed_flags_in_preprocess() -> None:
    """It has the name of its module. All others take typed arguments, so that commands can call them."""
    for path in (ROOT / "preprocess").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef) and path.name != "__main__.py":
                takes = [ast.unparse(each.annotation) for each in node.args.args if each.annotation]
                assert "argparse.Namespace" not in takes or node.name == path.stem, f"{path}: {node.name}"


def test_arrows_between_the_rooms_of_slurm_go_one_way() -> None:
    names = {path.stem for path in (ROOT / "slurm").glob("*.py")}
    assert names - {"__init__", "__main__"} == set(SLURM)
    for number, name in enumerate(SLURM):
        imported = imports_of(ROOT / "slurm" / f"{name}.py") & MODULES
        later = {f"slurm.{each}" for each in SLURM[number:]}
        assert not imported & later, f"slurm/{name}.py"


# Modules that show records of other users, too, or tell own records from them.
SHOWN = {
    f"slurm/{name}.py"
    for name in (
        "queue",
        "attempts",
        "state",
        "status",
        "status_data",
        "waits",
        "speed",
        "logs",
        "report",
        "report_data",
        "own",
    )
}
RECORDS = {"submissions", "records", "attempts", "controllers", "unrecorded", "is_own"}
READERS = {"read_submissions", "read_attempts", "read_own_controllers", "read_events"}


def test_commands_of_slurm_get_records_from_the_door_for_own_records_alone() -> None:
    """Otherwise a record that another user wrote could name a job to cancel, or a command to run."""
    checked = []
    for path in (ROOT / "slurm").glob("*.py"):
        if path.relative_to(ROOT).as_posix() in SHOWN:
            continue
        own: set[str] = set()  # names that hold the result of own_records
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and ast.unparse(node.value).startswith("own_records("):
                own.add(ast.unparse(node.targets[0]))
        own |= {arg.arg for arg in ast.walk(tree) if isinstance(arg, ast.arg) and arg.arg == "own"}
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in RECORDS | READERS | {"jobs"}:
                value = ast.unparse(node.value)
                is_of_queue = node.attr == "jobs" and not value.endswith("queue")
                assert is_of_queue or value in own or value.startswith("own_records("), (
                    f"{path.name}:{node.lineno}: {ast.unparse(node)}; take it from slurm.own"
                )
                checked.append(node.attr)
    assert checked


def test_the_format_imports_only_the_standard_library_numpy_orjson_and_msgspec() -> None:
    allowed = {*sys.stdlib_module_names, "numpy", "orjson", "msgspec", "shardprep", "typing_extensions"}
    for path in (ROOT / "shardprep" / "format").glob("*.py"):
        assert {name.partition(".")[0] for name in imports_of(path)} <= allowed, path.name


# Variables by which launchers number processes, nodes and tasks.
OF_LAUNCHERS = re.compile(
    "(LOCAL_|GROUP_)?RANK|(OMPI_COMM|PMI|PMIX|MPI)_[A-Z_]+|"
    "SLURM_(PROCID|LOCALID|NODEID|N?NODES|NTASKS|STEP_NUM_[A-Z]+|ARRAY_TASK_(COUNT|MIN|STEP))"
)


def test_which_process_of_a_launch_this_is_is_asked_in_one_module() -> None:
    found = {
        path.relative_to(ROOT).as_posix()
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and OF_LAUNCHERS.fullmatch(str(node.value))
    }
    assert found == {"shardprep/launch.py"}


# Functions that touch a file or a folder by its path, besides those of files, publishing and folders.
_OF_OS = {
    "open", "unlink", "remove", "rename", "replace", "link", "symlink", "scandir", "listdir", "walk", "mkdir",
    "makedirs", "rmdir", "truncate", "chmod",
}  # fmt: skip
_OF_PATHS = {
    "open", "read_text", "read_bytes", "write_text", "write_bytes", "unlink", "rename", "touch", "iterdir",
    "glob", "rglob", "rmdir", "mkdir", "symlink_to", "hardlink_to", "chmod",
}  # fmt: skip
_OF_SHUTIL = {"rmtree", "copy", "copyfile", "copytree", "move"}
_OF_FILES = {
    "open_regular", "read_regular", "read_with_status", "read_beginning", "read_lines", "stamp_file",
    "names_in", "make_folder", "publish_bytes", "HashedFile", "PublishedFile",
    "PublishedFolder", "remove_tree", "refuse_fifos", "sync_folder",
}  # fmt: skip
_OF_OWNERS = {"os": _OF_OS, "shutil": _OF_SHUTIL, "files": _OF_FILES, "publishing": _OF_FILES}
# What is touched so, by module: none of it lies in a data set.
AROUND_FOLDERS = {
    "loader/read/urls.py": "the cache of tars behind URLs, in a folder of this user",
    "loader/read/external_tars.py": "tars of other tools",
    "loader/preparing.py": "a note beside the data set, for other ranks",
    "loader/read/finding.py": "patterns and tars of other tools",
    "loader/batch/stream.py": "the user's script",
    "loader/read/tokenizer.py": "a model's folder",
    "loader/train/forecast.py": "a forecast that the user names, and a picture",
    "loader/train/where.py": "a state that the user names",
    "lustre/__main__.py": "names for a table",
    "lustre/layout.py": "a new file that keeps a layout, created exclusively",
    "lustre/lfs.py": "/proc",
    "preprocess/doctor.py": "/sys and a scratch folder",
    "preprocess/duplicates.py": "lists of duplicates, at names that the user gives",
    "preprocess/make/engine.py": "the folder of libraries",
    "preprocess/make/fast.py": "/proc",
    "preprocess/make/reference.py": "a tokenizer's file",
    "preprocess/make/resources.py": "/proc and /sys",
    "preprocess/plan/inputs.py": "the raw input",
    "preprocess/plan/mending.py": "names in the raw input",
    "preprocess/plan/scratch.py": "scratch folders",
    "preprocess/plan/table_versions.py": "the raw input",
    "preprocess/plan/task_plan.py": "a model's folder, and a new folder",
    "preprocess/plan/model_files.py": "a model's folder",
    "preprocess/plan/saved_tokenizer.py": "a model's folder, scratch folders",
    "preprocess/plan/tokenizer.py": "the cache of tokenizers, scratch folders",
    "preprocess/read/chat.py": "the user's template",
    "preprocess/read/compressed.py": "decompression, from memory",
    "preprocess/read/code_files.py": "the user's function",
    "preprocess/read/user_code.py": "the user's function",
    "preprocess/train_tokenizer.py": "a new folder for a tokenizer",
    "shardprep/child_process.py": "a pipe",
    "shardprep/command_line.py": "/proc",
    "shardprep/console.py": "/dev/null",
    "shardprep/format/documents.py": "a list that the user names",
    "shardprep/format/attempts.py": "/proc",
    "shardprep/limited_process.py": "/proc and a pipe",
    "slurm/log_ends.py": "logs, whose paths are compared with the data set's first",
    "slurm/report.py": "the report, at a name that the user gives",
    "slurm/scripts.py": "our own batch script",
}


def touches_paths(path: Path) -> bool:
    """Return whether a module calls a function that touches a file by its path."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if not isinstance(node, ast.Call):
            continue
        called = node.func
        if isinstance(called, ast.Name) and called.id in _OF_FILES | {"open"}:
            return True
        if isinstance(called, ast.Attribute):
            owner = ast.unparse(called.value)
            if called.attr == "open" and owner.endswith("folder"):
                continue  # of a Folder
            wanted = _OF_OWNERS.get(owner, _OF_PATHS)
            if called.attr in wanted and owner not in ("re", "str"):
                return True
    return False


def test_files_are_touched_through_folders_or_where_the_table_says_why() -> None:
    """A new module reaches a data set, and an output folder, through ``Folder`` alone."""
    own = {"shardprep/files.py", "shardprep/publishing.py", "shardprep/folders.py"}
    names = {path.relative_to(ROOT).as_posix() for path in FILES if touches_paths(path)}
    assert names - own == AROUND_FOLDERS.keys()


# A sitecustomize: each process that makes shards reports its imported modules when it exits.
REPORTING = """
import atexit, json, multiprocessing.util, os, sys
def tell(*_):
    if "preprocess.make.writer" in sys.modules:
        with open(os.environ["REPORT"], "a") as file:
            file.write(json.dumps(sorted(sys.modules)) + "\\n")
atexit.register(tell)
multiprocessing.util.Finalize(None, tell, exitpriority=0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("form", ["shard of a plan", "plain form", "run"])
def test_a_process_that_makes_a_shard_imports_no_heavy_library(tmp_path: Path, form: str) -> None:
    world = World(tmp_path).raw({"a.txt": "a line of text\n" * 90})
    words = ["shard", "--shard_id", "0", "--output_dir", world.data_dir]
    if form == "plain form":
        words += ["--input_dir", world.raw_dir, "--model_id", world.tokenizer]
    else:
        world.plan(num_shards=2)
    if form == "run":
        words = ["run", world.data_dir, "--num_proc", "2"]
    (tmp_path / "sitecustomize.py").write_text(REPORTING)
    report = tmp_path / "modules.jsonl"
    environ = environ_of_children(PYTHONPATH=f"{tmp_path}:{ROOT}", REPORT=str(report))
    run_child(shardprep(*words), env=environ)
    lists = [set(json.loads(line)) for line in report.read_text().splitlines()]
    assert any({"gigatoken", "tokenizers"} & names for names in lists), "one of them has an engine"
    for names in lists:
        assert not HEAVY & {name.split(".")[0] for name in names}


# The recipes of CONTRIBUTING.md, carried out in a copy of the packages.

CSV_MODULE = '''
"""``.psv`` with a header, a record a document. Line breaks within quotes end none. Offsets are bytes."""

import csv
import io

import numpy as np

from preprocess.read.formats import InputRecords, Inspected, Start


def begins_of(data):
    """The byte where each record begins: behind a line end with an even number of quotes before it."""
    letters = np.frombuffer(data, np.uint8)
    ends = np.flatnonzero((letters == 10) & (np.cumsum(letters == 34) % 2 == 0)) + 1
    return [0, *ends[ends < len(data)].tolist()]


class Csv:
    def inspect(self, file, options):
        return Inspected(text_bytes=file.stamp.num_bytes, is_whole=False)

    def starts(self, file, ranges, options):
        size = file.stamp.num_bytes
        places = [*begins_of(file.read_all(0, size)), size]
        found = [next(place for place in places if place >= min(byte, size)) for byte, _ in ranges]
        return [
            Start(place) if place < end or place == size else None
            for place, (_, end) in zip(found, ranges)
        ]

    def read(self, reader, fields, batch_bytes):
        byte_range, size = reader.byte_range, reader.file.stamp.num_bytes
        reader.hash_rest()
        data = reader.file.read_all(0, size)
        begins = begins_of(data)
        ends = [*begins[1:], size]
        cells = [next(csv.reader(io.StringIO(data[a:b].decode(), newline=""))) for a, b in zip(begins, ends)]
        rows = [row for row in range(1, len(begins)) if byte_range.start <= begins[row] < byte_range.end]
        yield InputRecords(
            records=[dict(zip(cells[0], cells[row])) for row in rows],
            starts=np.array([begins[row] for row in rows], np.int64),
            sizes=np.array([ends[row] - begins[row] for row in rows], np.int64),
            num_bytes=byte_range.end - byte_range.start,
        )
'''
# (file, text, replacement)
CHANGES = [
    (
        "shardprep/format/inputs.py",
        ")\nPLAIN_TEXT =",
        """    InputFormat((".psv",)),
)
PLAIN_TEXT =""",
    ),
    (
        "preprocess/read/formats.py",
        """_READERS = {
""",
        """_READERS = {
    ".psv": Reader("preprocess.read.quoted_csv", "Csv"),
""",
    ),
    (
        "shardprep/format/plan_options.py",
        "    limit: int = _text(",
        """
    lowercase: bool = option(False, "make the text lower-case", group=TEXT, )
    limit: int = _text(""",
    ),
    (
        "preprocess/read/documents.py",
        "        if template is not None:\n",
        """        if self._fields.options.lowercase:
            lower = [text.lower() for text in documents.texts]
            documents = replace(documents, texts=Texts(lower))
        if template is not None:
""",
    ),
]
# Runs commands in one process.
DRIVER = """
import json, sys
from shardprep.__main__ import main
for words in json.load(sys.stdin):
    print("=====")
    code = main(words)
    assert code == 0, (code, words)
"""


@pytest.mark.processes
@pytest.mark.slow
def test_the_recipes_add_an_input_format_and_a_plan_option(tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    for name in PACKAGES:
        shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
    (copy / "preprocess/read/quoted_csv.py").write_text(CSV_MODULE, encoding="utf-8")
    for path, old, new in CHANGES:
        text = (copy / path).read_text(encoding="utf-8")
        assert text.count(old) == 1, (path, old)
        (copy / path).write_text(text.replace(old, new), encoding="utf-8")
    texts = [f'RECORD {number}:\nthe "kettle" sings, twice' for number in range(40)]
    with io.StringIO() as file:
        table = [(f"no. {number}", "ab"[number % 2], text) for number, text in enumerate(texts)]
        csv.writer(file, lineterminator="\n").writerows([("id", "from", "text"), *table])
        world = World(tmp_path).raw({"a.psv": file.getvalue(), "b.txt": "one line\nanother line\n"})
    data, other = world.data_dir, World(tmp_path / "other").raw({"a.txt": "a line\n"})
    function = tmp_path / "function.py"
    function.write_text("def transform(record): return record['text'].removesuffix(', twice')\n")
    of_fields = {"id_field": "id", "source_field": "from", "transform": function}
    commands: list[list[object]] = [
        ["plan", *world.words_of_plan(num_shards=4, **of_fields), "--lowercase"],
        *(["shard", "--shard_id", n, "--output_dir", data, "--transform", function] for n in range(4)),
        ["verify", data, "--deep", "--transform", function],
        ["plan", *other.words_of_plan(num_shards=1)],
        ["peek", data, "--num", 99, "--chars", 0],
    ]
    asked = json.dumps([[str(word) for word in words] for words in commands])
    environ = environ_of_children(PYTHONPATH=str(copy))
    done = run_child([sys.executable, "-c", DRIVER], stdin=asked, cwd=copy, env=environ)
    shown = done.stdout.rpartition("=====\n")[2]
    plan = world.plan_json()
    inside = [plan["inputs"][number][0] for number, place, *_ in plan["cuts"][1:-1] if place]
    assert "a.psv" in inside
    assert sum(each["counts"]["num_documents"] for each in world.manifests()) == len(texts) + 2
    for number in range(len(texts)):
        byte = (world.raw_dir / "a.psv").read_bytes().index(f"no. {number},".encode())
        assert f"from a.psv byte {byte}\n  ⟦<|begin_of_text|>⟧record {number}:\n" in shown
    assert "sings" in shown
    assert "twice" not in shown, "the function took it out"
    kept = b"".join(path.read_bytes() for path in data.glob("ids/*")).decode()
    assert all(f'"no. {number}"' in kept for number in range(len(texts)))
    sources = Counter[str]()
    for each in world.manifests():
        for name, counts in each["counts"]["sources"].items():
            sources[name] += counts["num_documents"]
    assert (sources["a"], sources["b"]) == (20, 20)
    call_main("verify", data).ends(78, "lowercase")  # the original packages do not know the option
    twin = World(tmp_path / "twin", raw_dir=other.raw_dir).plan(num_shards=1)
    ids = [each.plan_json()["plan_id"] for each in (twin, other)]
    assert ids[0] == ids[1], "an unused option does not change a plan"


def test_the_docs_list_all_suffixes_of_input_formats(tmp_path: Path) -> None:
    error = World(tmp_path).try_plan().error
    assert error is not None
    page = (ROOT / "docs/inputs.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in page.splitlines() if line.startswith("| `.")]
    known = set(re.findall(r"\.\w+", re.sub("each also with [^;]*", "", str(error.expected))))
    assert {suffix for row in rows for suffix in re.findall(r"`(\.\w+)`", row)} >= known
    assert len(known) == 8
