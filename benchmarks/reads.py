"""Count what ranks ask of a parallel file system per step: reads, bytes, opens, calls of the metadata server.

    python benchmarks/reads.py [--worlds 1 8 64 512 4096] [--batch_size 8] [--num_workers 4]
    python benchmarks/reads.py --mixing

The counts are computed from the loader's sampling order, so they do not depend on the machine. A few workers
are followed through some windows, as ``ShardReader`` reads them: the latest 128 shards stay open, adjacent
samples of a shard are one read, a small idx is read when the shard is opened, and a large one by chunks. An
open is one call of the metadata server, and its close another one. File sizes come with the open, and names
of folders stay in the client's cache.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import Counter, OrderedDict
from dataclasses import dataclass
from itertools import islice

import numpy as np
import numpy.typing as npt
from loader_shares import NUM_SOURCES, SAMPLE_BYTES, source_variances

from loader.order.order import Order, choose_windows, share
from loader.read.reading import HELD_IDX_BYTES, MAX_OPEN_SHARDS
from shardprep.format.idx import CHUNK_CRC, CHUNK_RECORDS, HEADER_BYTES, IDX_DTYPES

SPANS = (1, 16, 64, 256)  # batches over which shares are counted
NUM_FOLLOWED = 4  # workers
NUM_WINDOWS = 40  # per worker; the first one is the start of the job, and is left out


@dataclass(frozen=True, kw_only=True)
class Shards:
    """A data set of equal shards."""

    kind: str  # of the idx
    num_shards: int
    shard_samples: int
    sample_bytes: int

    @property
    def num_samples(self) -> int:
        """Return the samples of all shards."""
        return self.num_shards * self.shard_samples

    def describe(self) -> str:
        """Return a description for the table's head."""
        sample = "packed rows" if self.kind == "packed" else "documents"
        return (
            f"{self.num_shards:,} shards of {self.shard_samples:,} {sample} of {self.sample_bytes:,} bytes "
            f"({self.shard_samples * self.sample_bytes / 1e9:.1f} GB, idx of "
            f"{self.shard_samples * IDX_DTYPES[self.kind].itemsize / 1e6:.1f} MB)"
        )


DATA_SETS = (
    Shards(kind="packed", num_shards=10_000, shard_samples=30_720, sample_bytes=32_768),
    Shards(kind="npy", num_shards=10_000, shard_samples=250_000, sample_bytes=4_096),
    Shards(kind="packed", num_shards=10_000, shard_samples=4_096, sample_bytes=32_768),
    Shards(kind="packed", num_shards=100, shard_samples=30_720, sample_bytes=32_768),
)


class Worker:
    """The reads and opens of one worker, reader ``number`` of ``num_readers``."""

    def __init__(self, shards: Shards, number: int, num_readers: int) -> None:
        self._shards = shards
        self._number = number
        self._num_readers = num_readers
        self._open: OrderedDict[int, set[int]] = OrderedDict()  # shard -> chunks of its idx that were read
        self.calls: Counter[str] = Counter()

    def read(self, samples: npt.NDArray[np.int64]) -> None:
        """Read the samples of a window."""
        samples = np.sort(samples)
        # As readers do, begin with another shard than the others.
        first = np.flatnonzero(np.diff(samples // self._shards.shard_samples, prepend=-1))
        samples = np.roll(samples, -first[len(first) * self._number // self._num_readers])
        shard, row = np.divmod(samples, self._shards.shard_samples)
        cut = np.flatnonzero((np.diff(samples) != 1) | (np.diff(shard) != 0)) + 1
        first, end = np.r_[0, cut], np.r_[cut, len(samples)]
        for number, begin, stop in zip(
            shard[first].tolist(), row[first].tolist(), row[end - 1] + 1, strict=True
        ):
            self._read_span(number, begin, int(stop))

    def _read_span(self, number: int, begin: int, end: int) -> None:
        record_bytes = IDX_DTYPES[self._shards.kind].itemsize
        idx_bytes = self._shards.shard_samples * record_bytes
        is_held = idx_bytes <= HELD_IDX_BYTES
        if number not in self._open:
            self.calls["opened"] += 1
            crcs_bytes = -(-self._shards.shard_samples // CHUNK_RECORDS) * CHUNK_CRC.itemsize
            self.calls["idx reads"] += 3 if is_held else 2
            self.calls["idx bytes"] += HEADER_BYTES + crcs_bytes + is_held * idx_bytes
            if len(self._open) >= MAX_OPEN_SHARDS:
                self._open.popitem(last=False)
                self.calls["closed"] += 1
            self._open[number] = set()
        self._open.move_to_end(number)
        self.calls["tar reads"] += 1
        self.calls["tar bytes"] += (end - begin) * self._shards.sample_bytes
        if not is_held:
            chunks = set(range(begin // CHUNK_RECORDS, -(-end // CHUNK_RECORDS)))
            is_new = not chunks <= self._open[number]
            num_rows = len(chunks) * CHUNK_RECORDS if is_new else end - begin
            self._open[number] |= chunks
            self.calls["idx reads"] += 1
            self.calls["idx bytes"] += num_rows * record_bytes


def counted(
    shards: Shards, order: Order, world: int, num_workers: int
) -> tuple[Counter[str], Counter[str], int]:
    """Return the calls of the followed workers in their first window and later, and the later steps."""
    count, at_start, later, steps = world * num_workers, Counter[str](), Counter[str](), 0
    for number in np.unique(np.linspace(0, count - 1, NUM_FOLLOWED).astype(int)).tolist():
        slots = share(range(order.num_slots), number, count)
        worker = Worker(shards, slots.start, order.num_slots)
        for window, (start, end) in enumerate(islice(order.windows(0), NUM_WINDOWS)):
            worker.read(order.samples_of(0, slots, start, end).reshape(-1))
            if window == 0:
                at_start += worker.calls
                worker.calls.clear()
            else:
                steps += end - start
        later += worker.calls
    return at_start, later, steps


def row(shards: Shards, world: int, batch_size: int, num_workers: int) -> dict[str, str]:
    """Return a line of the table."""
    block, window = choose_windows(
        num_samples=shards.num_samples,
        num_bytes=shards.num_samples * shards.sample_bytes,
        tick_samples=world * batch_size,
    )
    order = Order(
        num_samples=shards.num_samples,
        tick_samples=world * batch_size,
        block_samples=block,
        window_samples=window,
        seed=1,
    )
    num_workers = min(num_workers, batch_size)
    at_start, later, steps = counted(shards, order, world, num_workers)
    per_step = {name: later[name] * num_workers / steps for name in later}
    opened, closed = per_step.get("opened", 0.0), per_step.get("closed", 0.0)
    first = at_start["opened"] * world * num_workers / min(NUM_FOLLOWED, world * num_workers)
    return {
        "ranks": f"{world:,}",
        "block, KiB": f"{block * shards.sample_bytes / 1024:.0f}",
        "blocks of a window": f"{window // block}",
        "tar: KiB per read": f"{later['tar bytes'] / later['tar reads'] / 1024:.0f}",
        "tar: reads": f"{per_step['tar reads']:.2f}",
        "idx: KiB per read": f"{later['idx bytes'] / max(later['idx reads'], 1) / 1024:.1f}",
        "idx: reads": f"{per_step.get('idx reads', 0):.2f}",
        "opens": f"{2 * opened:.2f}",
        "metadata calls": f"{2 * (opened + closed):.2f}",
        "all ranks: opens per step": f"{2 * opened * world:,.0f}",
        "with one index": f"{opened * world:,.0f}",
        "all ranks: opens for the first batch": f"{2 * first:,.0f}",
    }


def mixing_table() -> str:
    """Return the table of the relative variation of one source's share of some batches."""
    small = 128 << 10
    lines = [f"| rows of a batch, blocks | {' | '.join(f'{span} batches' for span in SPANS)} |"]
    lines.append("|---" * (1 + len(SPANS)) + "|")
    for size, block_bytes in ((256, None), (2048, small), (2048, None)):
        block = small // SAMPLE_BYTES
        blocks = None if block_bytes is None else (block, 4 * block)
        found = source_variances(size, SPANS, source_samples=2_000_000, blocks=blocks)
        shares = [math.sqrt(found[span] * (NUM_SOURCES - 1) / (span * size)) for span in SPANS]
        name = "the loader's choice" if blocks is None else "128 KiB, 4 of a window"
        lines.append(f"| {size}, {name} | {' | '.join(f'{share:.1%}' for share in shares)} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--worlds", type=int, nargs="+", default=[1, 8, 64, 512, 4096])
    parser.add_argument("--batch_size", type=int, default=8, help="samples per rank and step")
    parser.add_argument("--num_workers", type=int, default=4, help="of a rank")
    parser.add_argument("--mixing", action="store_true", help="instead how evenly sources are mixed (4 GB)")
    args = parser.parse_args()
    if args.mixing:
        print(mixing_table())
        return 0
    for shards in DATA_SETS:
        rows = [row(shards, world, args.batch_size, args.num_workers) for world in args.worlds]
        print(f"\n{shards.describe()}; per rank and step, where nothing else is said:\n")
        print(f"| {' | '.join(rows[0])} |\n|{'---|' * len(rows[0])}")
        for each in rows:
            print(f"| {' | '.join(each.values())} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
