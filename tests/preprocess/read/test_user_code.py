"""A function of ``--transform``: which errors count for a document, and which code may run.

Many cases share a plan: each is a shard, and the function does something only once a file beside it exists.
"""

from __future__ import annotations

import json
import os
import py_compile
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.children import fork_functions
from tests.world import Ended, World

pytestmark = pytest.mark.processes  # plan tries a function in a process, too


def write(folder: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


class Cases:
    """A plan with a shard for each case. ``statements``: of the function, by the name of the case."""

    def __init__(self, folder: Path, statements: Mapping[str, str], names: str = "", top: str = "") -> None:
        self.numbers = {name: number for number, name in enumerate(statements)}
        self.function = folder / "clean.py"
        code = [f"from pathlib import Path\nFOLDER, STATE = Path(__file__).parent, []\n{top}\n"]
        for number, lines in enumerate(statements.values()):
            code.append(f"def case_{number}(record):\n  {lines}\n  return MARK\n")
        code.append("def transform(record):\n  if not (FOLDER / 'on').exists(): return 'off'\n")
        code.append("  return globals()['case_' + record['case']](record)\n")
        write(folder, {"clean.py": "".join(code)})
        raw = {f"{n:02d}.jsonl": [{"case": str(n), "meta": {"n": 1}}] for n in range(len(statements))}
        self.world = World(folder).raw(raw)
        options = {"transform_files": names} if names else {}
        with pytest.MonkeyPatch.context() as patch:
            fork_functions(patch)
            self.world.plan(num_shards=None, transform=self.function, max_bad_fraction=1, **options)
        (folder / "on").touch()

    def make(self, name: str) -> Ended:
        """Make the shard of a case."""
        return self.world.try_shard(self.numbers[name], transform=self.function)

    def result(self, name: str) -> str:
        """Return the text of a case, or the reason and detail of its document that was left out."""
        self.make(name).ends(0)
        path = self.world.data_dir / "quarantine" / f"shard-{self.numbers[name]:05d}.jsonl"
        if path.exists():
            entry: dict[str, Any] = json.loads(path.read_bytes())
            return f"{entry['reason']}: {entry['detail']}"
        with tarfile.open(self.world.data_dir / f"shard-{self.numbers[name]:05d}.tar") as tar:
            (text,) = (tar.extractfile(each) for each in tar if each.name.endswith(".text.txt"))
            assert text is not None
            return text.read().decode()


# Statements of a function whose error may pass.
PASSING = {
    "memory": "raise MemoryError",
    "memory of an array": "import numpy; numpy.empty(1 << 50)",
    "a stale handle": "raise OSError(116, 'Stale file handle')",
    "a missing file": "open('/nowhere/words.txt')",
    "an OSError without a number": "raise OSError('the server is gone')",
    "a timeout": "raise TimeoutError",
    "a connection": "raise ConnectionResetError",
    "would block": "raise BlockingIOError(11, 'Resource temporarily unavailable')",
    "raised from it": "try: open('/nowhere')\n  except OSError as error: raise ValueError('no') from error",
    "raised while it is handled": "try: open('/nowhere')\n  except OSError: raise KeyError('words')",
    "its cause hidden": "try: raise MemoryError\n  except MemoryError: raise ValueError('big') from None",
    "left out for it": (
        "from shardprep import LeaveOut\n  try: raise MemoryError\n  except Exception: raise LeaveOut('bad')"
    ),
    "left out for a system error": (
        "from shardprep import LeaveOut\n  try: open('/nowhere')\n  except Exception: raise LeaveOut('bad')"
    ),
    "no thread": "raise RuntimeError(\"can't start new thread\")",
    "a panic for want of threads": (
        "class Panic(BaseException): pass\n  raise Panic('code: 11, Resource temporarily unavailable')"
    ),
    "a child that is slow": "import subprocess; raise subprocess.TimeoutExpired('sleep', 9)",
    "a pool that died": "from concurrent.futures.process import BrokenProcessPool as B; raise B('x')",
    "a locked database": "import sqlite3; raise sqlite3.OperationalError('database is locked')",
    "memory of a GPU": "class OutOfMemoryError(RuntimeError): pass\n  raise OutOfMemoryError('CUDA')",
    "the keyboard": "raise KeyboardInterrupt",
}  # fmt: skip


# A second call that ends in another way than the first one.
NOT_AGAIN = {
    f"called again: {second}": f"STATE.append(1)\n  if len(STATE) > 1: {second}\n  1 / 0"
    for second in ("return 'a text'", "raise KeyError('other')", "raise MemoryError")
}
# Statements that would end the task, also if the function catches what they raise.
ENDINGS = {
    call: f"import os, posix\n  {call}"
    for call in (
        "os._exit(0)",
        "posix._exit(0)",
        "os.execv('/bin/true', ['true'])",
        "os.execl('/bin/true', 'true')",
    )
}
CAUGHT = {
    f"{call}, caught": f"import os, posix\n  try: {call}\n  except BaseException: MARK = 1"
    for call in ENDINGS
}


@pytest.fixture(scope="module")
def passing(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("passing"), PASSING | NOT_AGAIN | ENDINGS | CAUGHT)


@pytest.mark.parametrize("case", [*PASSING, *NOT_AGAIN])
def test_an_error_that_may_pass_ends_the_task_and_leaves_out_no_document(passing: Cases, case: str) -> None:
    passing.make(case).ends(74, f"{passing.numbers[case]:02d}.jsonl:0")
    assert not list(passing.world.data_dir.glob("shard-*"))


@pytest.mark.parametrize("case", [*ENDINGS, *CAUGHT])
def test_a_function_cannot_end_its_process(passing: Cases, case: str) -> None:
    passing.make(case).ends(2, "clean.py", f"{passing.numbers[case]:02d}.jsonl:0")
    assert not list(passing.world.data_dir.glob("shard-*"))
    assert {os._exit.__module__, os.execv.__module__} == {"posix"}, "the real ones are back"


# Statements whose error is the document's, and a part of what is said about it.
LASTING = {
    "a wrong number": ("int(record['case'] + 'x')", "transform_error: ValueError: invalid literal"),
    "a deep recursion": ("return transform(record)", "transform_error: RecursionError"),
    "the end of data": ("raise EOFError('truncated')", "EOFError: truncated (clean.py line"),
    "a panic": ("class Panic(BaseException): pass\n  raise Panic('None')", "transform_error: Panic: None"),
    "an exit": ("raise SystemExit(0)", "transform_error: SystemExit: 0"),
    "half of a pair": ("raise ValueError('\\ud800')", "transform_error: ValueError: \\ud800"),
    "an error whose text ends the program": (
        "class E(Exception):\n    def __str__(self): raise SystemExit(0)\n  raise E()", "transform_error: E: "
    ),
    "a record that it changed": (
        "if record.pop('meta').pop('n'): raise ValueError('one')", "transform_error: ValueError: one"
    ),
    "left out for bad bytes": (
        "from shardprep import LeaveOut\n  try: raise OSError('bad')\n  except OSError: raise LeaveOut('a')",
        "transform: a: a",
    ),
    "an object in its text": ("raise ValueError(f'no {object()}')", "at 0x...>"),
}  # fmt: skip


@pytest.fixture(scope="module")
def lasting(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    return Cases(tmp_path_factory.mktemp("lasting"), {name: lines for name, (lines, _) in LASTING.items()})


@pytest.mark.parametrize("case", LASTING)
def test_an_error_that_comes_again_counts_for_its_document(lasting: Cases, case: str) -> None:
    assert LASTING[case][1] in lasting.result(case)


# Code. --------------------------------------------------------------------------------------------------

HELPERS = {
    "helpers.py": "MARK = 'own'\n",
    "rules/__init__.py": "from rules.words import MARK\n",
    "rules/words.py": "MARK = 'own'\n",
    "parts/more.py": "MARK = 'own'\n",  # without __init__.py
    "lib/inner.py": "MARK = 'own'\n",
    "rules.txt": "MARK = 'own'\n",
    "words.txt": "",
}
# How a function gets a module, and the flag that names it.
IMPORTS = {
    "import": ("import helpers; MARK = helpers.MARK", "helpers.py"),
    "by its name": ("MARK = import_module('helpers').MARK", "helpers.py"),
    "a package": ("import rules; MARK = rules.MARK", "rules"),
    "a module of a package": ("from rules.words import MARK", "rules"),
    "a folder": ("from parts.more import MARK", "parts"),
    "through sys.path": ("sys.path.append(str(FOLDER / 'lib')); from inner import MARK", "lib/inner.py"),
    "from a file": (
        "s = util.spec_from_file_location('a', FILE)\n  a = util.module_from_spec(s); MARK = run(s, a)",
        "helpers.py",
    ),
    "as a program": ("import runpy; MARK = runpy.run_path(str(FOLDER / 'helpers.py'))['MARK']", "helpers.py"),
    "by a thread": ("with T(1) as a: MARK = a.submit(import_module, 'helpers').result().MARK", "helpers.py"),
}  # fmt: skip
TOP = """
import sys
from concurrent.futures import ThreadPoolExecutor as T
from importlib import import_module, util
FILE = FOLDER / "helpers.py"

def run(spec, module):
    spec.loader.exec_module(module)
    return module.MARK
"""
IMPORTS |= {
    "as text": ("names = {}; exec(FILE.read_text(), names); MARK = names['MARK']", "helpers.py"),
    "as text of another kind": (
        "names = {}; exec((FOLDER / 'rules.txt').read_text(), names); MARK = names['MARK']",
        "rules.txt",
    ),
    "as bytes that are compiled": (
        """code = compile((FOLDER / 'rules.txt').read_bytes(), '<rules>', 'exec')
  names = {}; exec(code, names); MARK = names['MARK']""",
        "rules.txt",
    ),
    "from a zip file": ("sys.path.append(str(FOLDER / 'all.zip')); from zipped import MARK", "all.zip"),
    "without its source": ("sys.path.append(str(FOLDER / 'old')); from bare import MARK", "old/bare.pyc"),
}
CATCHING = ("through sys.path", "from a file", "as a program")


@pytest.fixture
def own_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])


def with_helpers(folder: Path) -> Path:
    write(folder, HELPERS)
    (folder / "old").mkdir()
    py_compile.compile(str(folder / "helpers.py"), str(folder / "old" / "bare.pyc"))
    # A .pyc of other code, which is valid for Python: the sources have one size and time.
    inner = folder / "lib" / "inner.py"
    inner.write_text("MARK = 'old'\n")
    py_compile.compile(str(inner))
    time_ns = inner.stat().st_mtime_ns
    inner.write_text(HELPERS["lib/inner.py"])
    os.utime(inner, ns=(time_ns, time_ns))
    with zipfile.ZipFile(folder / "all.zip", "w") as file:
        file.writestr("zipped.py", "MARK = 'own'")
    return folder


@pytest.fixture(scope="module")
def unnamed(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = with_helpers(tmp_path_factory.mktemp("unnamed"))
    statements = {name: lines for name, (lines, _) in IMPORTS.items()}
    for name in CATCHING:
        lines = IMPORTS[name][0].replace("\n  ", "\n    ")
        statements[f"{name}, caught"] = f"try:\n    {lines}\n  except BaseException: MARK = 'other'"
    return Cases(folder, statements, "words.txt", TOP)


@pytest.mark.usefixtures("own_path")
@pytest.mark.parametrize("case", [*IMPORTS, *(f"{name}, caught" for name in CATCHING)])
def test_a_module_that_is_not_named_is_refused_with_the_flag_that_names_it(unnamed: Cases, case: str) -> None:
    error = unnamed.make(case).ends(2).error
    assert error is not None
    assert error.remedy == f"--transform_files words.txt,{IMPORTS[case.partition(',')[0]][1]}"
    assert not list(unnamed.world.data_dir.glob("shard-*"))


@pytest.fixture(scope="module")
def named(tmp_path_factory: pytest.TempPathFactory) -> Cases:
    folder = with_helpers(tmp_path_factory.mktemp("named"))
    statements = {name: lines for name, (lines, _) in IMPORTS.items()}
    # Bytes on the disk that differ only while they are imported.
    statements["hashed bytes"] = """FILE = FOLDER / 'rules' / 'words.py'
  before = FILE.read_text()
  FILE.write_text("MARK = 'new'")
  from rules import MARK
  FILE.write_text(before)"""
    return Cases(
        folder, statements, "helpers.py,rules,rules.txt,parts,lib/inner.py,all.zip,old/bare.pyc", TOP
    )


@pytest.mark.usefixtures("own_path")
@pytest.mark.parametrize("case", [*IMPORTS, "hashed bytes"])
def test_a_named_module_runs_as_it_was_hashed(named: Cases, case: str) -> None:
    assert named.result(case) == "own"


def test_a_table_that_is_read_in_a_call_and_not_named_is_told_once(tmp_path: Path) -> None:
    statement = "MARK = [(FOLDER / 'table.txt').read_text() for _ in range(2)][0]"
    write(tmp_path, {"table.txt": "one", "words.txt": ""})
    ended = Cases(tmp_path, {"reads": statement}, "words.txt").make("reads").ends(0)
    assert ended.err.count("--transform_files words.txt,table.txt") == 1


@pytest.mark.usefixtures("own_path")
def test_modules_that_python_finds_in_the_current_folder_or_by_its_path_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "current", {"found_in_current.py": "MARK = 'current'\n"})
    write(tmp_path / "code", {"found_by_path.py": "MARK = 'beside'\n"})
    names = ("found_in_current", "found_by_path")
    cases = Cases(
        tmp_path / "code",
        {name: f"try: from {name} import MARK\n  except ImportError: MARK = ''" for name in names},
    )
    sys.path[:0] = ["", str(tmp_path / "code")]
    monkeypatch.chdir(tmp_path / "current")
    for name in names:
        cases.make(name).ends(2, f"--transform_files {name}.py")


@pytest.mark.parametrize("beside", ["link", "target"])
def test_helpers_may_be_beside_a_link_or_beside_its_target(tmp_path: Path, beside: str) -> None:
    write(tmp_path / "target", {"real.py": "import helpers\ndef transform(record): return helpers.MARK"})
    (tmp_path / "link").mkdir()
    link = tmp_path / "link" / "clean.py"
    link.symlink_to(tmp_path / "target" / "real.py")
    write(tmp_path / beside, HELPERS)
    world = World(tmp_path).raw({"a.txt": "one\n"})
    world.try_plan(transform=link).ends(2, "--transform_files helpers.py")
    world.plan(transform=link, transform_files="helpers.py", num_shards=1).run(transform=link)
    assert world.texts() == ["own"]


def test_every_file_of_a_named_folder_is_in_the_hash(tmp_path: Path) -> None:
    write(tmp_path, HELPERS | {"rules/words.txt": "1"})
    cases = Cases(tmp_path, {"import": "from rules import MARK"}, "rules")
    for name in ("rules/words.txt", "rules/words.py", "rules/inner/new.py"):
        path = tmp_path / name
        before = path.read_text() if path.exists() else None
        write(tmp_path, {name: "2"})
        cases.make("import").ends(78)
        path.unlink() if before is None else path.write_text(before)
    write(tmp_path, {"rules/__pycache__/words.pyc": "2", "rules/.words.swp": "2", "helpers.py": "2"})
    assert cases.result("import") == "own"


@pytest.mark.parametrize("name", ["queue.py", "numpy", "mypy.py"])
def test_a_module_that_hides_one_of_python_is_refused(tmp_path: Path, name: str) -> None:
    write(
        tmp_path,
        {
            "queue.py": "",
            "numpy/own.py": "",
            "mypy.py": "",
            "pytest.py": "",
            "clean.py": "def transform(record): return 'a'",
        },
    )
    ended = (
        World(tmp_path)
        .raw({"a.txt": "one\n"})
        .try_plan(transform=tmp_path / "clean.py", transform_files=name)
    )
    ended.ends(2, "--transform_files", name.removesuffix(".py"))


# Modules that ordinary Python takes.
WORKS = {
    "a dataclass": "from dataclasses import dataclass\n@dataclass\nclass Rule:\n  mark: str = 'own'\n"
    "def transform(record): return Rule().mark",
    "annotations that are evaluated": "def f(x: int) -> str: ...\n"
    "def transform(record): return 'own' if f.__annotations__['x'] is int else 'other'",
    "hints of a class": "import typing\nclass A:\n  b: 'A'\n"
    "def transform(record): return 'own' if typing.get_type_hints(A)['b'] is A else 'other'",
    "a pickle of its class": "import pickle\nclass A: mark = 'own'\n"
    "def transform(record): return pickle.loads(pickle.dumps(A())).mark",
    "a named tuple": "from typing import NamedTuple\nclass A(NamedTuple):\n  mark: str = 'own'\n"
    "def transform(record): return A().mark",
    "its own source": "import inspect\n"
    "def transform(record): return 'own' if 'inspect' in inspect.getsource(transform) else ''",
    "a database": "import sqlite3\nDB = sqlite3.connect(':memory:')\n"
    "def transform(record): return DB.execute(\"select 'own'\").fetchone()[0]",
    "a value of its thread": "import threading\nLOCAL = threading.local()\nLOCAL.mark = 'own'\n"
    "def transform(record): return LOCAL.mark",
    "a loop of its own": "import asyncio\nLOOP = asyncio.new_event_loop()\nasync def mark(): return 'own'\n"
    "def transform(record): return LOOP.run_until_complete(mark())",
    "threads of its own": "from concurrent.futures import ThreadPoolExecutor\nPOOL = ThreadPoolExecutor(2)\n"
    "def transform(record): return ''.join(POOL.map(str, 'own'))",
    "a resource of its package": "import pkgutil\n"
    "def transform(record): return pkgutil.get_data('rules', 'mark.txt').decode()",
    "a file of its package": "from importlib.resources import files\n"
    "def transform(record): return files('rules').joinpath('mark.txt').read_text()",
    "a str with methods of its own": "class S(str):\n  def encode(self, *_): return None\n"
    "def transform(record): return S('own')",
}  # fmt: skip


def test_what_works_in_a_module_works_in_a_function(tmp_path: Path) -> None:
    modules = {f"case_{number}": name for number, name in enumerate(WORKS)}
    write(tmp_path, {f"{module}.py": WORKS[name] for module, name in modules.items()})
    write(tmp_path, {"rules/__init__.py": "", "rules/mark.txt": "own"})
    write(
        tmp_path,
        {
            "clean.py": "import importlib\n"
            "def transform(record):\n  module = importlib.import_module(record['text'])\n"
            "  return record['text'] + module.transform(record)"
        },
    )
    world = World(tmp_path).raw({"a.txt": "".join(f"{module}\n" * 2 for module in modules)})
    files = ",".join(["rules", *(f"{module}.py" for module in modules)])
    world.plan(num_shards=1, transform=tmp_path / "clean.py", transform_files=files)
    world.run(transform=tmp_path / "clean.py")
    assert world.texts() == [f"{module}own" for module in modules for _ in range(2)]


def test_what_a_function_prints_goes_to_standard_error(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    lines = """
  print("by print", file=sys.__stdout__)
  os.write(1, b"by a descriptor\\n")
  subprocess.run(["echo", "by a program"])
  MARK = 'a'"""
    cases = Cases(tmp_path, {"prints": lines}, top="import os, subprocess, sys")
    capfd.readouterr()
    cases.make("prints").ends(0)
    print("after it")
    out, err = capfd.readouterr()
    assert out == "after it\n"
    assert all(f"by {what}\n" in err for what in ("print", "a descriptor", "a program"))
