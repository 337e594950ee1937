"""``python -m tests.mutants``: break the product in many small ways, and see whether the oracle notices.

A mutant is one change of one file: a comparison swapped, a constant one higher, ``+`` for ``-``, ``and`` for
``or``, a condition negated, a statement removed. They are made from the source as it is, chosen by a seed.
For each of them a process that has imported the libraries already is forked, which loads the changed module
and runs the files of tests that ran the changed line: first the tests that caught its neighbours, then the
oracle, then the tests of the rooms. The first failing test kills the mutant. Standing still, or taking far
longer than all these tests, kills it, too.

Survivors are printed as a diff; the end is the share of them. ``equivalent_mutants.py`` lists changes that no
test can notice, each with its reason.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import functools
import importlib
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from multiprocessing.connection import wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.checkout import ROOT
from tests.equivalent_mutants import EQUIVALENT

# What is broken: the order of samples, how they are read and laid out, how shards are made, which are done.
TARGETS = (
    "loader/order.py",
    "loader/run.py",
    "loader/chunks.py",
    "loader/reading.py",
    "preprocess/make/shard_writer.py",
    "shardprep/format/manifest.py",
    "preprocess/verify.py",
)
TESTS = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "oracle").glob("test_*.py")),
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
STANDS_STILL_S = 120  # one test, of which none takes 6 s
LIMITS = {  # 240 s for all tests, which take 60 s of CPU time
    resource.RLIMIT_CPU: 240, resource.RLIMIT_AS: 12 << 30, resource.RLIMIT_FSIZE: 1 << 30,
}  # fmt: skip

# Not part of what the product promises: what it says, and how fast it is.
SAYING = {"debug", "info", "warning", "error", "exception", "log", "say", "warn", "print", "progress"}
SPEED = {
    "copy", "max_workers", "buffering", "maxsize", "chunksize", "num_threads", "prefetch_factor", "timeout",
}  # fmt: skip
GUARDS = {"strict"}  # of zip(): what it would catch is no wrong input, but a wrong program
QUIET = {"__repr__", "__str__", "_short", "opening_order"}  # functions: messages, and what is opened first
RELEASING = {"close", "flush", "cache_clear", "collect"}  # what memory and files are given back by
LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.Import, ast.ImportFrom, ast.Delete)
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line_numbers: range
    was: str  # the changed lines, on one line
    made: str
    source: str  # of the whole file, changed

    def __str__(self) -> str:
        return f"{self.path}:{self.line_numbers[0]}\n    - {self.was}\n    + {self.made}"


def mutants_of(path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (ROOT / path).read_bytes()
    line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found = []
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # which grows
        if is_left_alone(node):
            continue
        nodes += parts_of(node)
        for changed, text in changes_of(node):
            first, last = changed.lineno, changed.end_lineno
            start = line_starts[first - 1] + changed.col_offset
            end = line_starts[last - 1] + changed.end_col_offset
            new = source[:start] + text.encode() + source[end:]
            begin, stop = line_starts[first - 1], line_starts[last]
            was, made = (
                " ".join(line.partition("  # ")[0].strip() for line in each.decode().splitlines())
                for each in (source[begin:stop], new[begin : stop + len(new) - len(source)])
            )
            found.append(Mutant(path, range(first, last + 1), was, made, new.decode()))
    return found


def is_left_alone(node: ast.AST) -> bool:
    """Return whether nothing of a node is changed."""
    match node:
        case ast.FunctionDef(name=name):
            return name in QUIET
        case ast.Call(func=function):
            name = name_of(function)
            is_progress = getattr(getattr(function, "value", None), "id", "") == "progress"
            return name in SAYING or is_progress or name.endswith(("Error", "Exception"))
        case ast.Expr(value=ast.Call() as call):
            return is_left_alone(call) or name_of(call.func) in RELEASING
        case ast.Expr(value=ast.Constant()):  # a docstring
            return True
        case ast.If(test=ast.Name(id="TYPE_CHECKING")):
            return True
    return isinstance(node, LEFT_ALONE)


def parts_of(node: ast.AST) -> Iterable[ast.AST]:
    """Return the parts of a node that have something to change."""
    match node:
        case ast.FunctionDef(args=arguments, body=body):
            return [*arguments.defaults, *filter(None, arguments.kw_defaults), *body]
        case ast.ClassDef(body=body):  # its decorators are no logic
            return body
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
        case ast.Call(func=function) if name_of(function) == "reshape":
            return [function]  # numpy takes any number below 0 for the length that is left
        case ast.Call(func=function, args=values, keywords=keywords):
            return [function, *values, *(each.value for each in keywords if each.arg not in SPEED | GUARDS)]
    return ast.iter_child_nodes(node)


def changes_of(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield what can be changed of a node itself: it or its condition, and the text in its place."""
    match node:
        case ast.Compare(left=left, ops=operators, comparators=others):
            for number, operator in enumerate(operators):
                swapped = [*operators[:number], SWAPS[type(operator)](), *operators[number + 1 :]]
                yield node, f"({ast.unparse(ast.Compare(left, swapped, others))})"
        case ast.BinOp(op=operator) | ast.BoolOp(op=operator) if type(operator) in SWAPS:
            other: Any = copy.copy(node)
            other.op = SWAPS[type(operator)]()
            yield node, f"({ast.unparse(other)})"
        case ast.UnaryOp(op=ast.Not() | ast.USub(), operand=operand):
            if not isinstance(operand, ast.Constant):
                yield node, f"({ast.unparse(operand)})"
        case ast.Constant(value=bool() as value):
            yield node, str(not value)
        case ast.Constant(value=int() | float() as value):
            yield node, f"({value + 1})"
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test):
            if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.BoolOp)):  # others are swapped
                yield test, f"(not ({ast.unparse(test)}))"
        case ast.Assign(targets=targets):
            if all(isinstance(target, (ast.Attribute, ast.Subscript)) for target in targets):
                yield node, "pass"
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Continue() | ast.Break():
            yield node, "pass"


def name_of(function: Any) -> str:
    """Return ``c`` of ``a.b.c``."""
    return str(getattr(function, "attr", getattr(function, "id", "")))


def equivalents_of(mutant: Mutant) -> list[tuple[str, str, str]]:
    """Return the entries of EQUIVALENT that are this mutant."""
    return [
        each
        for each in EQUIVALENT.get(mutant.path, ())
        if each[0] in mutant.was and mutant.was.replace(each[0], each[1], 1) == mutant.made
    ]


def import_libraries() -> None:
    """Import what the oracle needs, but for the product: forked processes have it already."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)


def import_changed(path: str, source: str) -> None:
    """Let one module of the product be imported from changed source, in a process that has not done it."""
    own_code = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> Any:
        if Path(loader.path) != ROOT / path:
            return own_code(loader, fullname)
        return compile(source, loader.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def run_pytest(folder: Path, tests: Iterable[str], plugin: object = None) -> int:
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
        f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", f"--timeout={STANDS_STILL_S}",
        "--exitfirst", "--quiet", "--tb=short",
        "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'tests'}",
        "--hypothesis-profile=mutants",
    ]  # fmt: skip
    return int(pytest.main([*words, *(str(ROOT / test) for test in tests)], plugins=[plugin or object()]))


def fork(folder: Path, work: Callable[[], int]) -> multiprocessing.process.BaseProcess:
    """Start a forked process that works and prints into ``folder/output``."""

    def start() -> None:
        os.setsid()
        output = os.open(folder / "output", os.O_WRONLY | os.O_CREAT)
        os.dup2(output, 1)
        os.dup2(output, 2)
        for limit, most in LIMITS.items():
            resource.setrlimit(limit, (most, most))
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        code = work()
        sys.stdout.flush()
        os._exit(code)  # no thread is waited for

    folder.mkdir(parents=True)
    process = multiprocessing.get_context("fork").Process(target=start)
    process.start()
    return process


def end(process: multiprocessing.process.BaseProcess) -> None:
    """End all that a process has started, and it as well."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid or 0, signal.SIGKILL)
    process.join()


def run_forked(folder: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Work in a forked process; returns its exit code, below 0 for a signal, and what it printed."""
    process = fork(folder, work)
    try:
        process.join()
    finally:
        end(process)
    return process.exitcode or 0, (folder / "output").read_text("utf-8", "replace")


def lines_run_by(test_file: str, folder: Path) -> dict[str, set[int]]:
    """Return the lines of each target that a file of tests runs. SystemExit where it is not green."""
    import coverage

    def work() -> int:
        files = [str(ROOT / path) for path in TARGETS]
        measured = coverage.Coverage(folder / "coverage", include=files, config_file=False)
        measured.start()
        code = run_pytest(folder, [test_file])
        measured.stop()
        measured.save()
        return code

    code, output = run_forked(folder, work)
    if code:
        sys.exit(f"{test_file} is not green on the product as it is ({code}):\n{output[-5000:]}")
    data = coverage.CoverageData(folder / "coverage")
    data.read()
    return {path: {*(data.lines(str(ROOT / path)) or ())} for path in TARGETS}


def survivors_of(mutants: Sequence[Mutant], folder: Path, num_processes: int) -> list[Mutant]:
    """Try mutants, some side by side; print how each ended, and return those that no test noticed."""
    lines = {file: lines_run_by(file, folder / file) for file in TESTS}
    kills = Counter[tuple[str, str]]()  # mutants of a file that a test has caught
    survivors: list[Mutant] = []

    def try_mutant(mutant: Mutant, inside: Path) -> int:
        files = [file for file in TESTS if lines[file][mutant.path].intersection(mutant.line_numbers)]

        def sort_items(items: list[Any]) -> None:
            items.sort(key=lambda item: -kills[mutant.path, item.nodeid.partition("[")[0]])

        import_changed(mutant.path, mutant.source)
        plugin = SimpleNamespace(pytest_collection_modifyitems=sort_items)
        # Where no file runs the line, it may be run in workers, which is not seen.
        return run_pytest(inside, files or TESTS, plugin)

    waiting = deque(mutants)
    running: dict[Any, tuple[Any, Mutant, Path]] = {}  # by what is ready when the process has ended
    try:
        while waiting or running:
            if waiting and len(running) < num_processes:
                mutant, inside = waiting.popleft(), folder / str(len(waiting))
                process = fork(inside, functools.partial(try_mutant, mutant, inside))
                running[process.sentinel] = process, mutant, inside
                continue
            (sentinel, *_) = wait(running)
            process, mutant, inside = running.pop(sentinel)
            end(process)
            output = (inside / "output").read_text("utf-8", "replace")
            shutil.rmtree(inside, ignore_errors=True)
            test = re.search(r"^(?:FAILED|ERROR) \S*(tests/\S+?::\w+)", output, re.MULTILINE)
            if process.exitcode == 0:
                survivors.append(mutant)
                how = "SURVIVED"
            elif test:
                kills[mutant.path, test[1]] += 1
                how = f"killed by {test[1]}"
            else:
                how = f"ended: {process.exitcode} {output[-300:]}"
            num_tried = len(mutants) - len(waiting) - len(running)
            print(f"{num_tried}/{len(mutants)} {mutant}\n    {how}", flush=True)
    finally:
        for process, _, _ in running.values():
            end(process)
    return survivors


def main() -> int:
    """Return 0 where at most 5 % survived."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="mutants to try (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="which ones (default: 0)")
    parser.add_argument("--only", default="", help="of places with this in them: loader/order.py:84")
    parser.add_argument("--processes", type=int, default=2, help="side by side (default: 2)")
    parser.add_argument("--list", action="store_true", help="print the mutants and try none")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # processes of mutants are ended, too
    every = [each for path in TARGETS for each in mutants_of(path) if not equivalents_of(each)]
    found = [each for each in every if args.only in f"{each.path}:{each.line_numbers[0]}"]
    chosen = random.Random(args.seed).sample(found, min(args.num, len(found)))
    print(f"{len(chosen)} of {len(found)} mutants", flush=True)
    if args.list:
        print(*chosen, sep="\n")
        return 0
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = survivors_of(chosen, Path(folder), args.processes)
    share = len(survivors) / max(len(chosen), 1)
    print(f"\n{share:.1%} survived", *survivors, sep="\n")
    return int(share > 0.05)


if __name__ == "__main__":
    sys.exit(main())
