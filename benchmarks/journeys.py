"""Count the modules that three journeys pass: text to a tar, samples to a batch, the command for one shard.

    python benchmarks/journeys.py [-v]

Each journey runs once under a profiler. For each one this prints the number of modules of this project that
it enters; its hops (pairs of modules of which one calls the other); how many of these end there, because the
called module calls no other (a name, a size, a check); and its returns, which are hops into a module that was
entered before. A thread has no caller's frame, so its first function counts as called by the module that
started the thread. -v lists the hops. The size of each package follows. Nothing here measures time.
"""

from __future__ import annotations

import ast
import contextlib
import io
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("shardprep", "preprocess", "loader", "slurm", "lustre")
TEXT = "".join(f"the quick brown fox number {number} jumps over the lazy dog\n" for number in range(64))


class Journey:
    """Collect the hops of all calls inside a ``with`` block."""

    def __init__(self) -> None:
        self.hops: list[tuple[str, str]] = []
        self._starters: dict[threading.Thread, str] = {}  # thread -> the module that started it

    def __enter__(self) -> Journey:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        if event != "call":
            return
        if frame.f_code is threading.Thread.start.__code__:
            self._starters[frame.f_locals["self"]] = self._caller_of(frame)
            return
        # An import runs a module, and the garbage collector __del__: nobody calls these.
        if frame.f_code.co_name in ("<module>", "__del__") or (callee := _module_of(frame)) is None:
            return
        hop = (self._caller_of(frame), callee)
        if hop[0] != hop[1] and hop not in self.hops:
            self.hops.append(hop)

    def _caller_of(self, frame: FrameType) -> str:
        """Return the nearest module of this project that led to a call, or "" outside of it."""
        caller = frame.f_back
        while caller is not None:
            if module := _module_of(caller):
                return module
            caller = caller.f_back
        return self._starters.get(threading.current_thread(), "")

    @property
    def modules(self) -> set[str]:
        return {callee for _, callee in self.hops}

    @property
    def num_ends(self) -> int:
        callers = {caller for caller, _ in self.hops}
        return sum(callee not in callers for _, callee in self.hops)

    @property
    def num_returns(self) -> int:
        return len(self.hops) - len(self.modules)


def _module_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return relative.as_posix() if relative.parts[0] in PACKAGES else None


def journeys(folder: Path) -> Iterator[tuple[str, Journey]]:
    """Make a small data set in ``folder``, load it, and yield each journey with its name."""
    from preprocess.__main__ import main as preprocess
    from preprocess.make import worker

    raw, model, data = folder / "raw", folder / "model", folder / "data"
    raw.mkdir()
    (raw / "a.txt").write_text(TEXT)
    (raw / "b.txt").write_text(TEXT)
    train = ["train_tokenizer", "--input_dir", str(raw), "--output_dir", str(model), "--vocab_size", "300"]
    plan = ["plan", "--input_dir", str(raw), "--output_dir", str(data), "--model_id", str(model)]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        for arguments in (train, plan):
            if preprocess(arguments):
                raise SystemExit(f"this failed: {' '.join(arguments)}")
        with Journey() as command:
            preprocess(["--shard_id", "0", "--output_dir", str(data)])
        text, run_shard = Journey(), worker.Worker.run_shard

        def traced(self: worker.Worker, *arguments: Any) -> Any:
            with text:
                return run_shard(self, *arguments)

        worker.Worker.run_shard = traced  # type: ignore[method-assign,assignment]  # same arguments
        preprocess(["--shard_id", "1", "--output_dir", str(data)])
    yield "text to tar members (Worker.run_shard)", text
    from loader import get_llama3_dataloader

    loader = get_llama3_dataloader(
        [str(data / f"shard-0000{number}.tar") for number in (0, 1)], 4, num_workers=0, rank=0, world_size=1
    )
    with Journey() as samples:
        next(iter(loader))
    yield "samples to a batch (next of a loader)", samples
    yield "the command that makes a shard (--shard_id 0)", command


def sizes() -> Iterator[tuple[str, int, int, int]]:
    """Yield (package, number of files, lines, import statements) of each package."""
    for package in PACKAGES:
        paths = sorted((ROOT / package).rglob("*.py"))
        texts = [path.read_text(encoding="utf-8") for path in paths]
        imports = sum(
            isinstance(node, (ast.Import, ast.ImportFrom))
            for text in texts
            for node in ast.walk(ast.parse(text))
        )
        yield package, len(paths), sum(len(text.splitlines()) for text in texts), imports


def main() -> None:
    sys.path.insert(0, str(ROOT))
    with tempfile.TemporaryDirectory() as folder:
        for name, journey in journeys(Path(folder)):
            print(f"{name}: {len(journey.modules)} modules, {len(journey.hops)} hops ", end="")
            print(f"({journey.num_ends} end there), {journey.num_returns} returns")
            if "-v" in sys.argv:
                for caller, callee in journey.hops:
                    print(f"    {caller or 'the caller'} -> {callee}")
    total = [0, 0, 0]
    for package, *numbers in sizes():
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        print(f"{package}: {numbers[0]} files, {numbers[1]} lines, {numbers[2]} import statements")
    print(f"all: {total[0]} files, {total[1]} lines, {total[2]} import statements")


if __name__ == "__main__":
    main()
