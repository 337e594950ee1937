"""How many doors are passed by text to its tar, by samples to a batch, and by the command that makes a shard.

    python benchmarks/journeys.py [-v]

Each journey is run once under a profiler. Printed are the modules of this project that it enters, its
hops (pairs of modules of which one calls the other), how many of them end there (the module called calls none
of ours: a name, a size, a check), and its returns: hops into a module that had been entered before. With -v
each hop is named. Below them stands the size of each package. Nothing here
measures time.
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
    """Collects the hops of the calls that are made within ``with``."""

    def __init__(self) -> None:
        self.hops: list[tuple[str, str]] = []

    def __enter__(self) -> Journey:
        threading.setprofile(self._see)
        sys.setprofile(self._see)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)

    def _see(self, frame: FrameType, event: str, _: Any) -> None:
        is_by_itself = frame.f_code.co_name in ("<module>", "__del__")  # an import, or the memory's
        if event != "call" or is_by_itself or (callee := _module_of(frame)) is None:
            return
        caller_frame = frame.f_back
        while caller_frame is not None and _module_of(caller_frame) is None:
            caller_frame = caller_frame.f_back
        hop = (_module_of(caller_frame) or "" if caller_frame else "", callee)
        if hop[0] != hop[1] and hop not in self.hops:
            self.hops.append(hop)

    @property
    def modules(self) -> set[str]:
        return {callee for _, callee in self.hops}

    @property
    def num_ends(self) -> int:
        callers = {caller for caller, _ in self.hops}
        return sum(callee not in callers for _, callee in self.hops)

    @property
    def num_returns(self) -> int:
        seen: set[str] = set()
        count = 0
        for _, callee in self.hops:
            count += callee in seen
            seen.add(callee)
        return count


def _module_of(frame: FrameType) -> str | None:
    path = Path(frame.f_code.co_filename)
    if not path.is_relative_to(ROOT):
        return None
    relative = path.relative_to(ROOT)
    return relative.as_posix() if relative.parts[0] in PACKAGES else None


def journeys(folder: Path) -> Iterator[tuple[str, Journey]]:
    """Make a small data set below ``folder`` and load it."""
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

        worker.Worker.run_shard = traced  # type: ignore[method-assign,assignment]  # it takes what the method takes
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
    """(package, files, lines, imported statements)."""
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
            counts = (
                f"{len(journey.modules)} modules, {len(journey.hops)} hops ({journey.num_ends} end there), "
                f"{journey.num_returns} returns"
            )
            print(f"{name}: {counts}")
            if "-v" in sys.argv:
                print(
                    "\n".join(f"    {caller or 'the caller'} -> {callee}" for caller, callee in journey.hops)
                )
    total = [0, 0, 0]
    for package, *numbers in sizes():
        total = [a + b for a, b in zip(total, numbers, strict=True)]
        print(f"{package}: {numbers[0]} files, {numbers[1]} lines, {numbers[2]} import statements")
    print(f"all: {total[0]} files, {total[1]} lines, {total[2]} import statements")


if __name__ == "__main__":
    main()
