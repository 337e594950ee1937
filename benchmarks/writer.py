"""Compare writing a shard with O_DIRECT and through the page cache.

    python benchmarks/writer.py [FOLDER] [--mb 200] [--repeats 7]

Each round writes the same bytes both ways, in pieces of 4 MiB with fsync, and removes the file. The order
alternates, because the first one to touch fresh pages of the page cache pays for them, which is expensive in
virtual machines. FOLDER (default: the system's scratch folder) should be on the file system of the shards. If
it has no O_DIRECT (tmpfs), this is printed.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from measured_run import machine_line

WRITE_BYTES = 4 << 20
FLAGS = {"page cache": 0, "O_DIRECT": os.O_DIRECT}


def write(path: Path, flags: int, source: memoryview, num_pieces: int) -> tuple[float, float]:
    """Write ``source`` by pieces as PublishedFile does. Return CPU and wall seconds."""
    piece = mmap.mmap(-1, WRITE_BYTES)
    cpu, wall = time.process_time(), time.monotonic()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags, 0o666)
    for number in range(num_pieces):
        start = number * WRITE_BYTES % (len(source) - WRITE_BYTES)
        piece[:] = source[start : start + WRITE_BYTES]
        os.write(fd, piece)
    os.fsync(fd)
    os.close(fd)
    spent = time.process_time() - cpu, time.monotonic() - wall
    path.unlink()
    return spent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--mb", type=int, default=200)
    parser.add_argument("--repeats", type=int, default=7)
    args = parser.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    source = memoryview(os.urandom(16 << 20))
    num_pieces = -(-args.mb * 1_000_000 // WRITE_BYTES)
    spent: dict[str, list[tuple[float, float]]] = {name: [] for name in FLAGS}
    with tempfile.TemporaryDirectory(dir=args.folder, prefix="shardprep-bench-") as folder:
        for repeat in range(args.repeats):
            for name in sorted(FLAGS, reverse=bool(repeat % 2)):
                try:
                    spent[name].append(write(Path(folder) / "shard", FLAGS[name], source, num_pieces))
                except OSError as error:
                    raise SystemExit(f"{name} cannot be used in {args.folder}: {error.strerror}") from None
    print(
        f"| {num_pieces * WRITE_BYTES / 1e6:.0f} MB, pieces of 4 MiB, fsync | CPU s | wall s |\n|---|---|---|"
    )
    for name, runs in spent.items():
        columns = zip(*runs, strict=True)
        cells = [f"{statistics.median(of):.3f} ({min(of):.3f}-{max(of):.3f})" for of in columns]
        print(f"| {name} | {cells[0]} | {cells[1]} |")
    print(f"\n{machine_line()}. Median of {args.repeats} (least-most), in turn.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
