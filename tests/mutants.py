"""``python -m tests.mutants``: break the product in many small ways, and see whether the oracle notices.

A mutant is one change of one file: a comparison swapped, a constant one higher, ``+`` for ``-``, ``and`` for
``or``, a condition negated, a statement removed. They are made from the source as it is, chosen by a seed.
For each of them a process that has imported the libraries already is forked, which loads the changed module
and runs the tests of the oracle that ran the changed line, those first that caught its neighbours. The first
failing test kills the mutant. Standing still, or taking far longer than the whole oracle, kills it, too.

What survives the oracle is tried once more, with the tests of the rooms. Survivors of both are printed as a
diff; the end is the share of them. ``equivalent_mutants.py`` lists changes that no test can notice, each with
its reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import hashlib
import importlib.abc
import importlib.util
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

from tests.checkout import ROOT
from tests.equivalent_mutants import EQUIVALENT

# What is broken: the order of samples, how they are read and laid out, how shards are made, which are done.
TARGETS = (
    "loader/order.py",
    "loader/run.py",
    "loader/state.py",
    "loader/chunks.py",
    "loader/reading.py",
    "preprocess/make/members.py",
    "preprocess/make/shard_writer.py",
    "shardprep/format/manifest.py",
    "preprocess/verify.py",
)
ORACLE = ("tests/oracle",)  # files and folders of tests
ROOMS = (  # what tries survivors of the oracle
    "tests/loader/test_amend.py",
    "tests/loader/test_external_tars.py",
    "tests/loader/test_order.py",
    "tests/loader/test_reading.py",
    "tests/loader/test_states.py",
    "tests/preprocess/test_verify.py",
)
LIBRARIES = (
    "hypothesis.stateful", "numpy", "orjson", "pyarrow", "pytest", "tokenizers", "torch", "torch.utils.data",
    "transformers", "webdataset", "coverage", "_pytest.assertion.rewrite",
)  # fmt: skip
STANDS_STILL_S = 90  # without 0.1 s of CPU time: it waits for something that never comes
TIMES_AS_LONG = 3  # as without the change, in CPU time
STARTING_S = 20  # CPU time besides
MOST_MEMORY_BYTES = 12 << 30
MOST_FILE_BYTES = 1 << 30

# Not part of what the product promises: what it says, and how fast it is.
SAYING = {"debug", "info", "warning", "error", "exception", "log", "say", "warn", "print", "progress"}
SPEED = {
    "copy",
    "max_workers",
    "buffering",
    "maxsize",
    "chunksize",
    "num_threads",
    "prefetch_factor",
    "timeout",
}
GUARDS = {"strict"}  # of zip(): what it would catch is no wrong input, but a wrong program
QUIET = {"__repr__", "__str__", "_short", "opening_order"}  # functions: messages, and what is opened first
RELEASING = {"close", "flush", "cache_clear", "collect"}  # what memory and files are given back by
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file, as bytes of its source."""

    path: str
    line: int
    operator: str
    start: int
    end: int
    text: str
    is_in_function: bool  # or is run when its module is imported

    def __str__(self) -> str:
        return f"{self.path}:{self.line} {self.operator}"

    @property
    def module(self) -> str:
        return self.path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")

    def source(self) -> str:
        old = (ROOT / self.path).read_bytes()
        return (old[: self.start] + self.text.encode() + old[self.end :]).decode()

    def lines(self) -> tuple[str, str]:
        """Return the changed lines as they were and as they are, each on one line."""
        old = (ROOT / self.path).read_bytes()
        begin = old.rfind(b"\n", 0, self.start) + 1
        end = old.index(b"\n", self.end)
        new = old[begin : self.start] + self.text.encode() + old[self.end : end]
        was, made = (each.decode().splitlines() for each in (old[begin:end], new))
        return " ".join(map(without_comment, was)), " ".join(map(without_comment, made))

    def diff(self) -> str:
        old, new = (ROOT / self.path).read_text("utf-8").splitlines(), self.source().splitlines()
        return "\n".join([*difflib.unified_diff(old, new, lineterm="", n=1)][2:])


def without_comment(line: str) -> str:
    return line.partition("  # ")[0].strip()


class Finder(ast.NodeVisitor):
    """Finds all mutants of a file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.found: list[Mutant] = []
        self._is_in_function = False
        self._source = (ROOT / path).read_bytes()
        self._line_starts = [0]
        for line in self._source.splitlines(keepends=True):
            self._line_starts.append(self._line_starts[-1] + len(line))
        self.visit(ast.parse(self._source))

    def _add(self, node: Any, operator: str, text: str) -> None:
        start = self._line_starts[node.lineno - 1] + node.col_offset
        end = self._line_starts[node.end_lineno - 1] + node.end_col_offset
        self.found.append(Mutant(self.path, node.lineno, operator, start, end, text, self._is_in_function))

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in QUIET:
            return
        for default in [*node.args.defaults, *filter(None, node.args.kw_defaults)]:
            self.visit(default)
        is_nested, self._is_in_function = self._is_in_function, True
        for statement in node.body:
            self.visit(statement)
        self._is_in_function = is_nested

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:  # its decorators are no logic
            self.visit(statement)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def _leave_alone(self, node: ast.AST) -> None:
        """Do not change what is in a node."""

    visit_Raise = visit_Assert = visit_JoinedStr = visit_Import = visit_ImportFrom = _leave_alone  # noqa: N815
    visit_Delete = _leave_alone  # noqa: N815  memory that is given back

    def visit_Call(self, node: ast.Call) -> None:
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if is_said(node) or name.endswith(("Error", "Exception")):
            return
        self.visit(node.func)
        if name == "reshape":  # numpy takes any number below 0 for the length that is left
            return
        for argument in node.args:
            self.visit(argument)
        for keyword in node.keywords:
            if keyword.arg not in SPEED | GUARDS:
                self.visit(keyword.value)

    def visit_Compare(self, node: ast.Compare) -> None:
        for number, operator in enumerate(node.ops):
            other: Any = SWAPS[type(operator)]()
            operators = [*node.ops[:number], other, *node.ops[number + 1 :]]
            new = ast.Compare(node.left, operators, node.comparators)
            self._add(node, f"{name_of(operator)} to {name_of(other)}", f"({ast.unparse(new)})")
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_type = isinstance(node.op, ast.BitOr) and is_union(node)
        if type(node.op) in SWAPS and not is_type:
            other: Any = SWAPS[type(node.op)]()
            new = ast.BinOp(node.left, other, node.right)
            self._add(node, f"{name_of(node.op)} to {name_of(other)}", f"({ast.unparse(new)})")
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        other: Any = SWAPS[type(node.op)]()
        new = ast.unparse(ast.BoolOp(other, node.values))
        self._add(node, f"{name_of(node.op)} to {name_of(other)}", f"({new})")
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not):
            self._add(node, "not removed", f"({ast.unparse(node.operand)})")
        elif isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
            self._add(node, "minus removed", f"({ast.unparse(node.operand)})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, bool):
            self._add(node, f"{node.value} to {not node.value}", str(not node.value))
        elif isinstance(node.value, (int, float)):
            self._add(node, f"{node.value} to {node.value + 1}", f"({node.value + 1})")

    def _negate(self, node: Any) -> None:
        if not (isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"):
            if isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.BoolOp)):  # others are swapped
                self._add(node.test, "condition negated", f"(not ({ast.unparse(node.test)}))")
            self.generic_visit(node)

    visit_If = visit_While = visit_IfExp = _negate  # noqa: N815

    def visit_Expr(self, node: ast.Expr) -> None:
        value = node.value
        if isinstance(value, ast.Call):
            name = getattr(value.func, "attr", getattr(value.func, "id", ""))
            if name not in RELEASING and not is_said(value):
                self._add(node, "statement removed", "pass")
        if not isinstance(value, ast.Constant):  # no docstring
            self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self._add(node, "statement removed", "pass")
        self.generic_visit(node)

    def visit_Assign(self, node: ast.Assign) -> None:
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            self._add(node, "statement removed", "pass")
        self.generic_visit(node)

    def visit_Continue(self, node: ast.Continue) -> None:
        self._add(node, "statement removed", "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self._add(node, "statement removed", "pass")


def is_said(call: ast.Call) -> bool:
    """Return whether a call tells a person something, a bar of progress included."""
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in SAYING or getattr(getattr(call.func, "value", None), "id", "") == "progress"


def name_of(operator: ast.AST) -> str:
    return type(operator).__name__


def is_union(node: ast.expr) -> bool:
    """Return whether this is a type such as ``int | None``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return is_union(node.left) or is_union(node.right)
    return isinstance(node, ast.Constant) and node.value is None


def find_mutants(patterns: Iterable[str]) -> dict[str, list[Mutant]]:
    """Return the mutants of each file, but for those that no test can notice. SystemExit for no file."""
    known = {(path, old, new) for path, old, new, _ in EQUIVALENT}
    found: dict[str, list[Mutant]] = {}
    for pattern in patterns:
        paths = sorted(path.relative_to(ROOT).as_posix() for path in ROOT.glob(pattern))
        if not paths:
            sys.exit(f"{pattern} names no file below {ROOT}; correct TARGETS in tests/mutants.py")
        for path in paths:
            found[path] = [each for each in Finder(path).found if (path, *each.lines()) not in known]
    return found


def choose(found: dict[str, list[Mutant]], count: int, seed: int) -> list[Mutant]:
    """Choose mutants of all files, by their numbers; the same ones though other lines change."""
    total = sum(map(len, found.values()))

    def place(mutant: Mutant) -> str:
        return hashlib.sha256(f"{seed} {mutant.path} {mutant.lines()}".encode()).hexdigest()

    chosen = []
    for mutants in found.values():
        chosen += sorted(mutants, key=place)[: -(-count * len(mutants) // total)]
    return sorted(chosen, key=place)  # a campaign that is cut short has tried all files


class ChangedModule(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports one module from changed source."""

    def __init__(self, mutant: Mutant) -> None:
        self._module, self._path = mutant.module, str(ROOT / mutant.path)
        self._code: CodeType = compile(mutant.source(), self._path, "exec")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


@dataclass
class Seen:
    """What a run of the oracle without any change has shown."""

    seconds: dict[str, float] = field(default_factory=dict)  # CPU time of each test
    lines: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # path -> test -> lines that it ran
    in_setup: dict[str, dict[str, list[int]]] = field(default_factory=dict)  # likewise, in its fixtures
    forking: list[str] = field(default_factory=list)  # tests that start processes

    def tests_of(self, mutant: Mutant, last_line: int) -> list[str]:
        """Return the tests that run the changed lines."""
        changed = range(mutant.line, last_line + 1)

        def ran(by_test: dict[str, list[int]]) -> set[str]:
            return {test for test, lines in by_test.items() if any(line in changed for line in lines)}

        if not mutant.is_in_function:  # its module is imported before the tests: whoever runs that may notice
            changed = range(1, sys.maxsize)
        called, set_up = ran(self.lines[mutant.path]), ran(self.in_setup[mutant.path])
        files = {test.partition("::")[0] for test in set_up}  # what a fixture made is of other tests, too
        tests = {test for test in self.seconds if test in called or test.partition("::")[0] in files}
        return sorted(tests) or self.forking  # what runs in workers alone is not seen


class Observer:
    """A plugin of pytest that writes down what each test took and ran."""

    def __init__(self, report_path: Path, coverage: Any = None) -> None:
        self._report_path, self._coverage = report_path, coverage
        self._seen = Seen()
        self._test, self._began = "", 0.0
        self._is_watching = True
        sys.addaudithook(self._note)

    def _note(self, event: str, _: Any) -> None:
        if self._test and event in ("os.fork", "subprocess.Popen") and self._test not in self._seen.forking:
            self._seen.forking.append(self._test)

    def _switch(self, test: str, phase: str) -> None:
        self._test = test
        self._coverage.switch_context(f"{phase} {test}" if test else "")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._began = time.process_time()
        self._switch(nodeid, "setup")

    def pytest_runtest_call(self, item: Any) -> None:
        self._switch(item.nodeid, "call")

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._seen.seconds[nodeid] = time.process_time() - self._began
        self._switch("", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed:
            print(report.longreprtext)

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for path in data.measured_files():
            name = Path(path).relative_to(ROOT).as_posix()
            calls, setups = defaultdict[str, list[int]](list), defaultdict[str, list[int]](list)
            for line, contexts in data.contexts_by_lineno(path).items():
                for context in contexts:
                    phase, _, test = context.partition(" ")
                    if phase == "call":
                        calls[test].append(line)
                    else:
                        setups[test].append(line)
            self._seen.lines[name], self._seen.in_setup[name] = calls, setups
        self._report_path.write_text(json.dumps(vars(self._seen)), "utf-8")


class Killer:
    """A plugin of pytest that runs tests in an order, and writes down which one failed first."""

    def __init__(self, report_path: Path, order: Sequence[str]) -> None:
        self._report_path = report_path
        self._place = {test: number for number, test in enumerate(order)}

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self._place]
        items.sort(key=lambda item: self._place[item.nodeid])

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.failed and not self._report_path.exists():
            self._report_path.write_text(report.nodeid, "utf-8")


def run_pytest(folder: Path, plugin: Any, tests: Iterable[str]) -> int:
    """Run tests in this process, with all they write below a folder."""
    import hypothesis
    import pytest

    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None
    os.chdir(folder)
    # What fails is enough; the smallest case that fails is not asked for.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", deadline=None, phases=phases, database=None)
    words = [
        f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}",
        "--exitfirst", "--quiet", "--tb=short",
        "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'tests'}",
        "--hypothesis-profile=mutants",
    ]  # fmt: skip
    return int(pytest.main([*words, *(str(ROOT / test) for test in tests)], plugins=[plugin]))


@dataclass
class Child:
    """A forked process that runs the oracle."""

    folder: Path
    work: Callable[[Path], int]
    most_s: float = 1e6  # of CPU time
    pid: int = 0
    used_s: float = 0.0  # of CPU time
    moved_at: float = 0.0  # when it last used some

    def start(self) -> None:
        self.folder.mkdir(parents=True)
        sys.stdout.flush()
        self.pid = os.fork()
        self.moved_at = time.monotonic()
        if self.pid:
            return
        code = 99
        try:
            os.setsid()
            output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT)
            for target in (1, 2):
                os.dup2(output, target)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY_BYTES, MOST_MEMORY_BYTES))
            resource.setrlimit(resource.RLIMIT_FSIZE, (MOST_FILE_BYTES, MOST_FILE_BYTES))
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            code = self.work(self.folder)
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)

    def ended(self) -> int | str | None:
        """Return the exit code, or why it was ended; None while it runs."""
        pid, status = os.waitpid(self.pid, os.WNOHANG)
        if pid:
            self.end_group()
            return os.waitstatus_to_exitcode(status)
        ticks = sum(map(int, Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
        used_s = ticks / os.sysconf("SC_CLK_TCK")
        if used_s > self.used_s + 0.1:
            self.used_s, self.moved_at = used_s, time.monotonic()
        if used_s > self.most_s:
            why = f"it took more than {self.most_s:.0f} s of CPU time"
        elif time.monotonic() - self.moved_at > STANDS_STILL_S:
            why = f"it stood still for {STANDS_STILL_S} s"
        else:
            return None
        self.end_group()
        os.waitpid(self.pid, 0)
        return why

    def end_group(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    def output(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")


def observe(folder: Path, tests: Sequence[str]) -> Seen:
    """Run tests on the product as it is. SystemExit where they are not green."""

    def work(inside: Path) -> int:
        import coverage

        files = [str(path) for pattern in TARGETS for path in ROOT.glob(pattern)]
        measured = coverage.Coverage(data_file=None, include=files, config_file=False)
        measured.start()
        return run_pytest(inside, Observer(inside / "seen", measured), tests)

    child = Child(folder, work)
    child.start()
    while (ended := child.ended()) is None:
        time.sleep(0.2)
    if ended != 0:
        sys.exit(f"{tests} are not green on the product as it is ({ended}):\n{child.output()[-5000:]}")
    return Seen(**json.loads((folder / "seen").read_text("utf-8")))


def last_line(mutant: Mutant) -> int:
    before = (ROOT / mutant.path).read_bytes()[: mutant.end]
    return before.count(b"\n") + 1


class Campaign:
    """Mutants one after another, some side by side."""

    def __init__(self, folder: Path, seen: Seen, num_processes: int) -> None:
        self._folder, self._seen, self._num_processes = folder, seen, num_processes
        self._kills: dict[str, Counter[str]] = defaultdict(Counter)  # path -> test -> mutants that it caught
        self._num_mutants = 0
        self.survivors: list[Mutant] = []
        self.num_tried = 0

    def run(self, mutants: Sequence[Mutant]) -> None:
        self._num_mutants = len(mutants)
        waiting = deque(enumerate(mutants))
        running: list[tuple[Mutant, Child]] = []
        try:
            while waiting or running:
                while waiting and len(running) < self._num_processes:
                    number, mutant = waiting.popleft()
                    running.append((mutant, self._started(number, mutant)))
                for mutant, child in [*running]:
                    if (ended := child.ended()) is not None:
                        running.remove((mutant, child))
                        self._note(mutant, child, ended)
                        shutil.rmtree(child.folder, ignore_errors=True)
                time.sleep(0.05)
        finally:
            for _, child in running:
                child.end_group()

    def _started(self, number: int, mutant: Mutant) -> Child:
        """Start the tests that run the changed lines, those first that caught its neighbours or are quick."""
        tests, caught = self._seen.tests_of(mutant, last_line(mutant)), self._kills[mutant.path]
        tests.sort(key=lambda test: (-caught[test], self._seen.seconds[test]))

        def work(folder: Path) -> int:
            if not tests:
                return 0
            sys.meta_path.insert(0, ChangedModule(mutant))
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            return run_pytest(folder, Killer(folder / "killed_by", tests), files)

        most_s = TIMES_AS_LONG * sum(self._seen.seconds[test] for test in tests) + STARTING_S
        child = Child(self._folder / str(number), work, most_s)
        child.start()
        return child

    def _note(self, mutant: Mutant, child: Child, ended: int | str) -> None:
        self.num_tried += 1
        report = child.folder / "killed_by"
        how = f"ended: {ended}"
        if ended == 0:
            how = "SURVIVED"
            self.survivors.append(mutant)
        elif report.exists():
            killer = report.read_text("utf-8")
            self._kills[mutant.path][killer] += 1
            how = f"killed by {killer.rpartition('/')[2]}"
        print(f"{self.num_tried}/{self._num_mutants} {mutant}: {how} ({child.used_s:.0f} s)", flush=True)
        if ended == 0:
            print(mutant.diff(), flush=True)
        elif not report.exists():
            print("    " + child.output()[-300:].strip().replace("\n", "\n    "), flush=True)


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants to try (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--at", default="", help="all mutants of one line instead: loader/order.py:84")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    return parser.parse_args(words)


def main() -> int:
    """Return 0 where at most 5 % survived."""
    args = arguments()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes of mutants are ended, too
    found = {path: mutants for path, mutants in find_mutants(TARGETS).items() if args.only in path}
    mutants = choose(found, args.num, args.seed)
    if args.at:
        mutants = [
            each for of_file in found.values() for each in of_file if f"{each.path}:{each.line}" == args.at
        ]
    print(f"{len(mutants)} of {sum(map(len, found.values()))} mutants of {len(found)} files", flush=True)
    if args.list:
        for mutant in mutants:
            print(f"{mutant}\n{mutant.diff()}")
        return 0
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["COVERAGE_CORE"] = "ctrace"  # the only one that tells tests apart
    for name in LIBRARIES:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        began = time.monotonic()
        num_tried, survivors = len(mutants), mutants
        for name, tests in (("oracle", ORACLE), ("rooms", ROOMS)):
            seen = observe(Path(folder) / name / "as_it_is", tests)
            total_s = sum(seen.seconds.values())
            print(f"the {name}: {len(seen.seconds)} tests, {total_s:.0f} s of CPU time", flush=True)
            campaign = Campaign(Path(folder) / name, seen, args.processes)
            try:
                campaign.run(survivors)
            except KeyboardInterrupt:
                print("stopped")
                num_tried = num_tried if name == "rooms" else campaign.num_tried
            survivors = campaign.survivors
            print(f"{len(survivors)} of {num_tried} mutants survived the {name}", flush=True)
        share = len(survivors) / max(num_tried, 1)
        print(f"\n{share:.1%} survived, in {(time.monotonic() - began) / 60:.0f} minutes")
        for mutant in survivors:
            print(f"\n{mutant}\n{mutant.diff()}")
        return int(share > 0.05)


if __name__ == "__main__":
    sys.exit(main())
