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
import hashlib
import importlib.abc
import importlib.util
import json
import multiprocessing
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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
STANDS_STILL_S = 300  # without 0.1 s of CPU time, its workers apart: it waits for something that never comes
TIMES_AS_LONG = 3  # as without the change, in CPU time
STARTING_S = 20  # CPU time besides
MOST_MEMORY_BYTES = 12 << 30
MOST_FILE_BYTES = 1 << 30

# Not part of what the product promises: what it says, and how fast it is.
SAYING = {"debug", "info", "warning", "error", "exception", "log", "say", "warn", "print", "progress"}
SPEED = {
    "copy", "max_workers", "buffering", "maxsize", "chunksize", "num_threads", "prefetch_factor", "timeout",
}  # fmt: skip
GUARDS = {"strict"}  # of zip(): what it would catch is no wrong input, but a wrong program
QUIET = {"__repr__", "__str__", "_short", "opening_order"}  # functions: messages, and what is opened first
RELEASING = {"close", "flush", "cache_clear", "collect"}  # what memory and files are given back by
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Delete)
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
    first_line: int
    last_line: int
    start: int
    end: int
    text: str
    is_in_function: bool  # or is run when its module is imported

    def __str__(self) -> str:
        old, new = self.lines()
        return f"{self.path}:{self.first_line}\n    - {old}\n    + {new}"

    def source(self) -> str:
        old = (ROOT / self.path).read_bytes()
        return (old[: self.start] + self.text.encode() + old[self.end :]).decode()

    def lines(self) -> tuple[str, str]:
        """Return the changed lines as they were and as they are, each on one line."""
        old = (ROOT / self.path).read_bytes()
        begin = old.rfind(b"\n", 0, self.start) + 1
        end = old.index(b"\n", self.end)
        new = old[begin : self.start] + self.text.encode() + old[self.end : end]
        was, made = (
            " ".join(line.partition("  # ")[0].strip() for line in each.decode().splitlines())
            for each in (old[begin:end], new)
        )
        return was, made


def mutants_of(path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (ROOT / path).read_bytes()
    line_starts = [0]
    for line in source.splitlines(keepends=True):
        line_starts.append(line_starts[-1] + len(line))
    found = []

    def visit(node: ast.AST, is_in_function: bool) -> None:
        for changed, text in changes_of(node):
            start = line_starts[changed.lineno - 1] + changed.col_offset
            end = line_starts[changed.end_lineno - 1] + changed.end_col_offset
            lines = changed.lineno, changed.end_lineno
            found.append(Mutant(path, *lines, start, end, text, is_in_function))
        body = node.body if isinstance(node, ast.FunctionDef) else []
        for part in parts_of(node):
            visit(part, is_in_function or part in body)

    visit(ast.parse(source), is_in_function=False)
    return found


def parts_of(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of a node that have something to change."""
    if isinstance(node, LEFT_ALONE):
        return []
    if isinstance(node, ast.FunctionDef):
        defaults = [*node.args.defaults, *filter(None, node.args.kw_defaults)]
        return [] if node.name in QUIET else [*defaults, *node.body]
    if isinstance(node, ast.ClassDef):
        return node.body  # its decorators are no logic
    if isinstance(node, ast.AnnAssign):
        return [node.value] if node.value is not None else []
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return []  # a docstring
    if isinstance(node, (ast.If, ast.While)) and name_of(node.test) == "TYPE_CHECKING":
        return []
    if isinstance(node, ast.Call):
        name = name_of(node.func)
        if is_said(node) or name.endswith(("Error", "Exception")):
            return []
        if name == "reshape":  # numpy takes any number below 0 for the length that is left
            return [node.func]
        values = [keyword.value for keyword in node.keywords if keyword.arg not in SPEED | GUARDS]
        return [node.func, *node.args, *values]
    return ast.iter_child_nodes(node)


def changes_of(node: Any) -> Iterator[tuple[Any, str]]:
    """Yield what can be changed of a node itself: it or its condition, and the text in its place."""
    if isinstance(node, ast.Compare):
        for number, operator in enumerate(node.ops):
            operators: Any = [*node.ops[:number], SWAPS[type(operator)](), *node.ops[number + 1 :]]
            yield node, f"({ast.unparse(ast.Compare(node.left, operators, node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in SWAPS and not is_union(node):
        other: Any = SWAPS[type(node.op)]()
        yield node, f"({ast.unparse(ast.BinOp(node.left, other, node.right))})"
    elif isinstance(node, ast.BoolOp):
        other = SWAPS[type(node.op)]()
        yield node, f"({ast.unparse(ast.BoolOp(other, node.values))})"
    elif isinstance(node, ast.UnaryOp):
        is_minus = isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant)
        if is_minus or isinstance(node.op, ast.Not):
            yield node, f"({ast.unparse(node.operand)})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield node, str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, (int, float)):
        yield node, f"({node.value + 1})"
    elif isinstance(node, (ast.If, ast.While, ast.IfExp)):
        # Other conditions are swapped themselves.
        is_plain = isinstance(node.test, (ast.Name, ast.Attribute, ast.Call, ast.BoolOp))
        if is_plain and name_of(node.test) != "TYPE_CHECKING":
            yield node.test, f"(not ({ast.unparse(node.test)}))"
    elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        if name_of(node.value.func) not in RELEASING and not is_said(node.value):
            yield node, "pass"
    elif isinstance(node, ast.Assign):
        if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in node.targets):
            yield node, "pass"
    elif isinstance(node, (ast.AugAssign, ast.Continue, ast.Break)):
        yield node, "pass"


def name_of(function: Any) -> str:
    """Return ``c`` of ``a.b.c``."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def is_said(call: ast.Call) -> bool:
    """Return whether a call tells a person something, a bar of progress included."""
    return name_of(call.func) in SAYING or getattr(getattr(call.func, "value", None), "id", "") == "progress"


def is_union(node: ast.expr) -> bool:
    """Return whether this is a type such as ``int | None``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return is_union(node.left) or is_union(node.right)
    return isinstance(node, ast.Constant) and node.value is None


def equivalents_of(mutant: Mutant) -> list[tuple[str, str, str]]:
    """Return the entries of EQUIVALENT that are this mutant."""
    was, made = mutant.lines()
    entries = EQUIVALENT.get(mutant.path, ())
    return [each for each in entries if each[0] in was and was.replace(each[0], each[1], 1) == made]


def find_mutants(paths: Iterable[str]) -> dict[str, list[Mutant]]:
    """Return the mutants of each file, but for those that no test can notice."""
    return {path: [each for each in mutants_of(path) if not equivalents_of(each)] for path in paths}


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

    def __init__(self, path: str, source: str) -> None:
        self._module = path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")
        self._path = str(ROOT / path)
        self._code: CodeType = compile(source, self._path, "exec")

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        if fullname != self._module:
            return None
        return importlib.util.spec_from_file_location(fullname, self._path, loader=self)

    def exec_module(self, module: ModuleType) -> None:
        exec(self._code, module.__dict__)


@dataclass(frozen=True)
class Seen:
    """What a run of tests without any change has shown."""

    seconds: dict[str, float]  # CPU time of each test
    ran: dict[str, dict[str, list[str]]]  # path -> line -> tests, and files of tests whose fixtures ran it
    processes: list[str]  # tests that start processes

    def tests_of(self, mutant: Mutant) -> list[str]:
        """Return the tests that run the changed lines."""
        of_lines = self.ran.get(mutant.path, {})
        if mutant.is_in_function:
            changed = range(mutant.first_line, mutant.last_line + 1)
            of_lines = {line: names for line, names in of_lines.items() if int(line) in changed}
        # Others are run when the module is imported, before the tests: whoever runs any line may notice.
        ran = {name for names in of_lines.values() for name in names}
        tests = [test for test in self.seconds if test in ran or test.partition("::")[0] in ran]
        return tests or self.processes  # what runs in workers alone is not seen


class Observer:
    """A plugin of pytest that writes down what each test took and ran."""

    def __init__(self, report_path: Path, coverage: Any) -> None:
        self._report_path, self._coverage = report_path, coverage
        self._seen = Seen({}, {}, [])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._seen.seconds[nodeid] = -time.process_time()
        self._coverage.switch_context(nodeid.partition("::")[0])  # what a fixture made is of other tests, too

    def pytest_runtest_call(self, item: Any) -> None:
        self._coverage.switch_context(item.nodeid)
        if item.get_closest_marker("processes"):
            self._seen.processes.append(item.nodeid)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self._seen.seconds[nodeid] += time.process_time()
        self._coverage.switch_context("")

    def pytest_sessionfinish(self) -> None:
        self._coverage.stop()
        data = self._coverage.get_data()
        for path in data.measured_files():
            by_line = {str(line): names for line, names in data.contexts_by_lineno(path).items()}
            self._seen.ran[Path(path).relative_to(ROOT).as_posix()] = by_line
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


def import_libraries() -> None:
    """Import what the oracle needs, but for the product: forked processes have it already."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    os.environ["COVERAGE_CORE"] = "ctrace"  # the only one that tells tests apart
    for name in LIBRARIES:
        importlib.import_module(name)


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
    plugins = [plugin] if plugin is not None else []
    return int(pytest.main([*words, *(str(ROOT / test) for test in tests)], plugins=plugins))


class Child:
    """A forked process that runs tests in a folder of its own, and what it wrote there."""

    def __init__(self, folder: Path, work: Callable[[Path], int], most_s: float = 1e6) -> None:
        folder.mkdir(parents=True)
        self.folder = folder
        self.used_s = 0.0  # of CPU time
        self._moved_at = time.monotonic()  # when it last used some
        fork = multiprocessing.get_context("fork")
        self._process = fork.Process(target=self._run, args=(work, int(most_s)))
        self._process.start()

    def _run(self, work: Callable[[Path], int], most_s: int) -> None:
        os.setsid()
        output = os.open(self.folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for limit, most in (
            (resource.RLIMIT_AS, MOST_MEMORY_BYTES),
            (resource.RLIMIT_FSIZE, MOST_FILE_BYTES),
            (resource.RLIMIT_CPU, most_s),
        ):
            resource.setrlimit(limit, (most, most))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.exit(work(self.folder))

    def exit_code(self) -> int | None:
        """Return how it ended, below 0 where a signal did it; None while it runs."""
        if self._process.exitcode is None:
            stat = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
            used_s = sum(map(int, stat[11:15])) / os.sysconf("SC_CLK_TCK")
            if used_s > self.used_s + 0.1:
                self.used_s, self._moved_at = used_s, time.monotonic()
            if time.monotonic() - self._moved_at < STANDS_STILL_S:
                return None
        self.end()
        return self._process.exitcode

    def end(self) -> None:
        """End it and all that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.join()

    def wait(self) -> int:
        """Return how it ended, once it has."""
        while (code := self.exit_code()) is None:
            time.sleep(0.1)
        return code

    def output(self) -> str:
        return (self.folder / "output").read_text("utf-8", "replace")


def observe(folder: Path, tests: Sequence[str]) -> Seen:
    """Run tests on the product as it is. SystemExit where they are not green."""

    def work(inside: Path) -> int:
        import coverage

        files = [str(ROOT / path) for path in TARGETS]
        measured = coverage.Coverage(data_file=None, include=files, config_file=False)
        measured.start()
        return run_pytest(inside, Observer(inside / "seen", measured), tests)

    child = Child(folder, work)
    if code := child.wait():
        sys.exit(f"{tests} are not green on the product as it is ({code}):\n{child.output()[-5000:]}")
    return Seen(**json.loads((folder / "seen").read_text("utf-8")))


def survivors_of(mutants: Sequence[Mutant], seen: Seen, folder: Path, num_processes: int) -> list[Mutant]:
    """Try mutants, some side by side; print how each ended, and return those that no test noticed."""
    kills: dict[str, Counter[str]] = defaultdict(Counter)  # path -> test -> mutants that it caught
    survivors = []

    def start(number: int, mutant: Mutant) -> Child:
        # Those tests first that caught its neighbours or are quick.
        tests = seen.tests_of(mutant)
        tests.sort(key=lambda test: (-kills[mutant.path][test], seen.seconds[test]))

        def work(inside: Path) -> int:
            if not tests:
                return 0
            sys.meta_path.insert(0, ChangedModule(mutant.path, mutant.source()))
            files = dict.fromkeys(test.partition("::")[0] for test in tests)
            return run_pytest(inside, Killer(inside / "killed_by", tests), files)

        most_s = TIMES_AS_LONG * sum(seen.seconds[test] for test in tests) + STARTING_S
        return Child(folder / str(number), work, most_s)

    waiting = deque(enumerate(mutants))
    running: list[tuple[Mutant, Child]] = []
    num_tried = 0
    try:
        while waiting or running:
            while waiting and len(running) < num_processes:
                number, mutant = waiting.popleft()
                running.append((mutant, start(number, mutant)))
            for mutant, child in [*running]:
                if (code := child.exit_code()) is None:
                    continue
                running.remove((mutant, child))
                report = child.folder / "killed_by"
                how = f"ended: {code} {child.output()[-300:]}"
                if code == 0:
                    how = "SURVIVED"
                    survivors.append(mutant)
                elif report.exists():
                    killer = report.read_text("utf-8")
                    kills[mutant.path][killer] += 1
                    how = f"killed by {killer.removeprefix('tests/')}"
                num_tried += 1
                print(f"{num_tried}/{len(mutants)} {mutant}\n    {how} ({child.used_s:.0f} s)", flush=True)
                shutil.rmtree(child.folder, ignore_errors=True)
            time.sleep(0.05)
    finally:
        for _, child in running:
            child.end()
    return survivors


def main() -> int:
    """Return 0 where at most 5 % survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants to try (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--only", default="", help="files whose path has this in it")
    parser.add_argument("--at", default="", help="all mutants of one line instead: loader/order.py:84")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes of mutants are ended, too
    found = find_mutants(path for path in TARGETS if args.only in path)
    survivors = choose(found, args.num, args.seed)
    if args.at:
        every = [each for of_file in found.values() for each in of_file]
        survivors = [each for each in every if f"{each.path}:{each.first_line}" == args.at]
    num_tried = len(survivors)
    print(f"{num_tried} of {sum(map(len, found.values()))} mutants of {len(found)} files", flush=True)
    if args.list:
        print(*survivors, sep="\n")
        return 0
    import_libraries()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        for name, tests in (("oracle", ORACLE), ("rooms", ROOMS)):
            seen = observe(Path(folder) / name / "as_it_is", tests)
            total_s = sum(seen.seconds.values())
            print(f"the {name}: {len(seen.seconds)} tests, {total_s:.0f} s of CPU time", flush=True)
            survivors = survivors_of(survivors, seen, Path(folder) / name, args.processes)
            print(f"{len(survivors)} of {num_tried} mutants survived the {name}", flush=True)
    share = len(survivors) / max(num_tried, 1)
    print(f"\n{share:.1%} survived, in {(time.monotonic() - began) / 60:.0f} minutes", *survivors, sep="\n")
    return int(share > 0.05)


if __name__ == "__main__":
    sys.exit(main())
