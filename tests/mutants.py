"""``python -m tests.mutants``: break the product in many small ways, and check whether the oracle notices.

A mutant is one change of one file: a comparison swapped, a constant incremented, ``+`` for ``-``, ``and`` for
``or``, a condition negated, a statement removed. Mutants are made from the current source and chosen by a
seed. For each one, a process with the libraries already imported is forked. It loads the changed module and
runs the test files that run the changed line: first the tests that killed other mutants of the file, then the
oracle, then the tests of the packages. The first failing test kills the mutant. A hang, or a run far longer
than all these tests, kills it, too.

Survivors are printed as a diff, and their share at the end. ``equivalent_mutants.py`` lists changes that no
test can notice, each with a reason. ``--by_hand`` tries the changes of BY_HAND, which break promises.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.checkout import ROOT
from tests.equivalent_mutants import EQUIVALENT

# Files to break: the order of samples, how they are read and laid out, how shards are made, which are done.
TARGETS = (
    "loader/order/hashes.py",
    "loader/order/order.py",
    "loader/order/mixture.py",
    "loader/order/amendment.py",
    "loader/order/state.py",
    "loader/order/resume.py",
    "loader/read/chunks.py",
    "loader/read/json_ids.py",
    "loader/batch/run_reader.py",
    "loader/read/reading.py",
    "preprocess/make/attempt.py",
    "preprocess/make/counts.py",
    "preprocess/make/json_ids.py",
    "preprocess/make/members.py",
    "preprocess/make/packing.py",
    "preprocess/make/rows.py",
    "preprocess/make/tar_headers.py",
    "preprocess/make/writer.py",
    "shardprep/format/done.py",
    "shardprep/format/manifest.py",
    "preprocess/remade_shards.py",
    "preprocess/shard_checks.py",
    "preprocess/verify.py",
)
TESTS = (
    *sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests" / "oracle").glob("test_*.py")),
    "tests/loader/test_external_tars.py",
    "tests/loader/test_order.py",
    "tests/loader/test_reading.py",
    "tests/loader/test_states.py",
    "tests/preprocess/test_blank.py",
    "tests/preprocess/test_verify.py",
)
LIBRARIES = (
    "hypothesis.stateful", "numpy", "orjson", "pyarrow", "pytest", "tokenizers", "torch", "torch.utils.data",
    "transformers", "webdataset", "coverage", "_pytest.assertion.rewrite",
)  # fmt: skip
HANG_S = 120  # for one test, each of which takes less than 6 s
LIMITS = {  # 240 s of CPU time for all tests, which take 60 s
    resource.RLIMIT_CPU: 240, resource.RLIMIT_AS: 12 << 30, resource.RLIMIT_FSIZE: 1 << 30,
}  # fmt: skip

# Changes by hand: a promise that is broken, a file, a text in it, and its replacement.
BY_HAND = [
    ("labels are the ids of their places", "loader/batch/batches.py",
     "np.where(is_real, ids, IGNORED)", "np.where(is_real, np.roll(ids, -1, 1), IGNORED)"),
    ("padding has no label", "loader/batch/batches.py", "np.where(is_real, ids, IGNORED)", "ids.copy()"),
    ("what the user says in a conversation has no label", "loader/batch/batches.py",
     "labels[labels < 0] = IGNORED", "labels &= ID_BITS"),
    ("the last document of a block is there", "preprocess/read/lines.py",
     "data[:cut]]), num_bytes", 'data[: data[: cut - 1].rfind(b"\\n") + 1]]), num_bytes'),
    ("documents for validation are those with the least hashes", "shardprep/format/documents.py",
     "np.asarray(firsts < np.uint64(", "np.asarray(firsts >= np.uint64("),
    ("a document ends with EOS where it is asked for", "preprocess/make/engine.py",
     "(tokens.ids, tokens.offsets[1:], end_id),", "(tokens.ids, tokens.offsets[:-1], end_id),"),
    ("a manifest is written last", "preprocess/make/writer.py",
     "for key, file in written.items():\n            file.rename_into_place()",
     "self._folder.publish(names.manifest_name(self._shard_id), manifest.to_json())\n"
     + 8 * " " + "for key, file in written.items():\n            file.rename_into_place()"),
    ("a state counts the step that the loop holds", "loader/order/state.py",
     "position.step - run.first_step(epoch),", "max(position.step - 1 - run.first_step(epoch), 0),"),
    ("rank r has the r-th part of a global batch", "loader/token_loader.py",
     "num_slots), process_rank.rank,", "num_slots), (process_rank.rank + 1) % process_rank.world_size,"),
    ("a resumed run keeps its schedule of weights", "loader/order/resume.py",
     "stages=tuple(stages), batches_per_tick", "stages=tuple(stages[:1]), batches_per_tick"),
    ("positions begin at 0 in each document", "loader/batch/fields.py",
     "np.subtract(_places(num_places), positions", "np.remainder(_places(num_places), at.shape[1]"),
    ("each epoch has an order of its own", "loader/order/order.py",
     "hash_ints(self.seed, epoch, _WINDOWS", "hash_ints(self.seed, 0, _WINDOWS"),
    ("a schedule of batch sizes holds to its last stage", "loader/order/planned.py",
     "size_at = dict(sizes)", "size_at = dict(sizes[:2])"),
]  # fmt: skip

# Names that are not mutated: functions for messages, arguments for speed, checks of the program itself
# (strict of zip), the function that chooses which file is opened first, and methods that release resources.
SAYING = {"say", "warning", "progress"}
SPEED = {"copy", "max_workers", "maxsize", "timeout"}
GUARDS = {"strict"}
QUIET = {"opening_order"}
RELEASING = {"close", "flush"}
SWAPS: dict[type[ast.AST], Any] = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.Div: ast.Mult, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr,
    ast.And: ast.Or, ast.Or: ast.And,
}  # fmt: skip
FORK = multiprocessing.get_context("fork")
KILLS = Counter[tuple[str, str]]()  # (file, test) -> number of mutants killed in this process


@dataclass(frozen=True)
class Mutant:
    """One change of one file."""

    path: str
    line_numbers: range
    was: str  # the changed lines, joined to one line
    made: str
    source: str  # the whole changed file

    def __str__(self) -> str:
        return f"{self.path}:{self.line_numbers[0]}\n    - {self.was}\n    + {self.made}"


def mutants_of(path: str) -> list[Mutant]:
    """Return all mutants of a file."""
    source = (ROOT / path).read_bytes()
    line_starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    found = []
    nodes: list[ast.AST] = [ast.parse(source)]
    for node in nodes:  # the list grows
        parts = parts_of(node)
        if parts is None:
            continue
        nodes += parts
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


def mutants_by_hand() -> list[Mutant]:
    """Return the mutants of BY_HAND. Raises SystemExit if a text is not found; then update the table."""
    found = []
    for promise, path, old, new in BY_HAND:
        source = (ROOT / path).read_text(encoding="utf-8")
        if source.count(old) != 1:
            sys.exit(f"{promise}: {path} has its text {source.count(old)} times, expected once")
        first = source[: source.index(old)].count("\n") + 1
        line_numbers = range(first, first + old.count("\n") + 1)
        found.append(Mutant(path, line_numbers, promise, new, source.replace(old, new)))
    return found


def parts_of(node: ast.AST) -> Iterable[ast.AST] | None:
    """Return the parts of a node that may be changed, or None if the node must not be changed at all."""
    match node:
        case ast.FunctionDef(name=name, args=arguments, body=body):
            parts = [*arguments.defaults, *filter(None, arguments.kw_defaults), *body]
            return None if name in QUIET else parts
        case ast.ClassDef(body=body):  # without decorators
            return body
        case ast.AnnAssign(value=value):
            return [] if value is None else [value]
        case ast.Call(func=function, args=values, keywords=keywords):
            name = name_of(function)
            if name in SAYING or name.endswith("Error") or ast.unparse(function) == "progress.add":
                return None
            if name == "reshape":
                return [function]  # for numpy any negative number means the remaining length
            return [function, *values, *(each.value for each in keywords if each.arg not in SPEED | GUARDS)]
        case ast.Expr(value=ast.Call() as call):
            return None if name_of(call.func) in RELEASING or parts_of(call) is None else [call]
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Name(id="TYPE_CHECKING")):  # a docstring
            return None
        case ast.Raise() | ast.Assert() | ast.JoinedStr() | ast.Import() | ast.ImportFrom() | ast.Delete():
            return None
    return ast.iter_child_nodes(node)


def changes_of(node: ast.AST) -> Iterator[tuple[Any, str]]:
    """Yield (node, replacement) for each change of a node itself or of its condition."""
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
            if isinstance(test, (ast.Name, ast.Attribute, ast.Call, ast.BoolOp)):  # others get swaps
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
    """Return the entries of EQUIVALENT that describe this mutant."""
    return [
        each
        for each in EQUIVALENT.get(mutant.path, ())
        if each[0] in mutant.was and mutant.was.replace(each[0], each[1], 1) == mutant.made
    ]


def import_libraries() -> None:
    """Import the libraries of the oracle, but not the product, for forked processes."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RAYON_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"
    for name in LIBRARIES:
        importlib.import_module(name)


def import_changed(path: str, source: str) -> None:
    """Make a module of the product load from changed source. It must not be imported yet."""
    own_code = SourceFileLoader.get_code

    def get_code(loader: SourceFileLoader, fullname: str) -> Any:
        if Path(loader.path) != ROOT / path:
            return own_code(loader, fullname)
        return compile(source, loader.path, "exec")

    SourceFileLoader.get_code = get_code  # type: ignore[assignment, method-assign]


def run_pytest(folder: Path, tests: Iterable[str], plugin: object = None) -> int:
    """Run tests in this process, with all their files below a folder."""
    import hypothesis
    import pytest

    for name in ("TMPDIR", "HOME", "XDG_CACHE_HOME"):
        os.environ[name] = str(folder)
    tempfile.tempdir = None
    os.chdir(folder)
    # A failure is enough, so do not shrink it.
    phases = [hypothesis.Phase.explicit, hypothesis.Phase.generate]
    hypothesis.settings.register_profile("mutants", deadline=None, phases=phases, database=None)
    words = [
        f"--rootdir={ROOT}", f"--config-file={ROOT / 'pyproject.toml'}", f"--timeout={HANG_S}",
        "--exitfirst", "--quiet", "--tb=short",
        "-p", "no:cacheprovider", "-p", "no:xdist", f"--basetemp={folder / 'tests'}",
        "--hypothesis-profile=mutants",
    ]  # fmt: skip
    return int(pytest.main([*words, *(str(ROOT / test) for test in tests)], plugins=[plugin or object()]))


def run_forked(folder: Path, work: Callable[[], int]) -> tuple[int, str]:
    """Call ``work`` in a fork. Returns its exit code (negative for a signal) and its output."""

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
        os._exit(code)  # without waiting for threads

    folder.mkdir(parents=True)
    process = FORK.Process(target=start)
    process.start()
    try:
        process.join()
    finally:  # kill it and all its children
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return process.exitcode or 0, (folder / "output").read_text("utf-8", "replace")


def lines_run_by(test_file: str, paths: Iterable[str], folder: Path) -> dict[str, set[int]]:
    """Return the lines of each path that a test file runs. Raises SystemExit if a test fails."""
    import coverage

    def work() -> int:
        files = [str(ROOT / path) for path in paths]
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
    return {path: {*(data.lines(str(ROOT / path)) or ())} for path in paths}


def ending_of(mutant: Mutant, files: Sequence[str], folder: Path) -> str:
    """Run test files on a mutant. Returns what killed it, or "" if it survived."""

    def sort_items(items: list[Any]) -> None:
        items.sort(key=lambda item: -KILLS[mutant.path, item.nodeid.partition("[")[0]])

    def work() -> int:
        import_changed(mutant.path, mutant.source)
        return run_pytest(folder, files, SimpleNamespace(pytest_collection_modifyitems=sort_items))

    code, output = run_forked(folder, work)
    shutil.rmtree(folder, ignore_errors=True)
    test = re.search(r"^(?:FAILED|ERROR) \S*(tests/\S+?::\w+)", output, re.MULTILINE)
    if code == 0:
        return ""
    if test:
        KILLS[mutant.path, test[1]] += 1
        return f"killed by {test[1]}"
    return f"ended: {code} {output[-300:]}"


def survivors_of(mutants: Sequence[Mutant], folder: Path, num_processes: int) -> list[Mutant]:
    """Try mutants in parallel, print how each ended, and return those that survived."""
    paths = {mutant.path for mutant in mutants}
    lines = {file: lines_run_by(file, paths, folder / file) for file in TESTS}
    survivors, files = [], []
    for mutant in mutants:
        some = [file for file in TESTS if lines[file][mutant.path].intersection(mutant.line_numbers)]
        files.append(some or TESTS)  # a line that no file runs may run in workers, which are not measured
    folders = [folder / str(number) for number in range(len(mutants))]
    with ProcessPoolExecutor(num_processes, FORK) as pool:
        endings = pool.map(ending_of, mutants, files, folders)
        for number, (mutant, ending) in enumerate(zip(mutants, endings, strict=True), 1):
            print(f"{number}/{len(mutants)} {mutant}\n    {ending or 'SURVIVED'}", flush=True)
            if not ending:
                survivors.append(mutant)
    return survivors


def main() -> int:
    """Return 0 if at most 5 % of the mutants survived, or with --by_hand none, else 1."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--num", type=int, default=200, help="number of mutants (default: 200)")
    parser.add_argument("--seed", type=int, default=0, help="seed of their choice (default: 0)")
    parser.add_argument(
        "--only", default="", help="places that contain this, such as loader/order/order.py:84"
    )
    parser.add_argument("--by_hand", action="store_true", help="try BY_HAND, of which none may survive")
    parser.add_argument("--processes", type=int, default=2, help="number of processes (default: 2)")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # so that processes of mutants end, too
    every = [each for path in TARGETS for each in mutants_of(path) if not equivalents_of(each)]
    found = [each for each in every if args.only in f"{each.path}:{each.line_numbers[0]}"]
    chosen = random.Random(args.seed).sample(found, min(args.num, len(found)))
    if args.by_hand:
        chosen = found = mutants_by_hand()
    print(f"{len(chosen)} of {len(found)} mutants", flush=True)
    import_libraries()
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        survivors = survivors_of(chosen, Path(folder), args.processes)
    share = len(survivors) / max(len(chosen), 1)
    print(f"\n{share:.1%} survived", *survivors, sep="\n")
    return int(share > (0 if args.by_hand else 0.05))


if __name__ == "__main__":
    sys.exit(main())
