"""Compute how the costs of a loader grow with shards, samples, ranks and workers, without making such data.

    python benchmarks/scale_growth.py [--quick]

The index is built and read at each size; order and opens are computed. The largest size is 99,999 shards of
100,000 rows of 2,048 tokens, 4,096 ranks with 8 workers each, and one idx of 1,000,000 documents. Times are
CPU seconds of one core, memory is what the call leaves allocated, and opens do not depend on the machine.
scale.py measures commands at such sizes, and loader_limits.py a loader on disk.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import tracemalloc
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from measured_run import machine_line

from loader.order.order import Order, choose_windows, share
from loader.read.reading import HELD_IDX_BYTES, MAX_OPEN_SHARDS
from loader.read.shards import DatasetShards, ShardSet
from shardprep.format.data_folder import DataFolder
from shardprep.format.idx import ChunkCrcs, IdxFile, idx_header, idx_num_bytes, read_idx
from shardprep.format.index import DatasetIndex, read_index
from shardprep.format.names import idx_name
from shardprep.format.spec import DatasetSpec, TokenizerSpec

ROW_TOKENS, ROW_BYTES = 2048, 4 * 2048
ROWS = 100_000  # per shard: 0.8 GB
SIZES = ((1_000, 64), (10_000, 512), (99_999, 4_096))  # (shards, ranks)
WORKERS, BATCH = 8, 8
WINDOWS = 40  # windows followed per worker
NUM_FOLLOWED = 4


def spec_of(num_shards: int, *, is_packed: bool) -> DatasetSpec:
    """Return the spec of a plan for Llama 3."""
    return DatasetSpec(
        plan_id="0123456789abcdef" * 4,
        num_shards=num_shards,
        record="packed" if is_packed else "documents",
        token_format="npy",
        seq_len=ROW_TOKENS if is_packed else 0,
        append_eos=True,
        tokenizer=TokenizerSpec(
            model_id="M",
            fingerprint="0" * 64,
            vocab_size=128_256,
            bos_token_id=128_000,
            eos_token_id=128_001,
            pad_token_id=None,
        ),
    )


def taken(work: Callable[[], Any]) -> tuple[Any, float, float]:
    """Return the result of ``work``, its CPU seconds, and the MB that it leaves allocated in another run."""
    began = time.process_time()
    result = work()
    cpu_s = time.process_time() - began
    tracemalloc.start()
    again = work()
    held_mb = tracemalloc.get_traced_memory()[0] / 1e6
    tracemalloc.stop()
    del again
    return result, cpu_s, held_mb


def index_of(folder: Path, num_shards: int) -> int:
    """Write an index.json and return its bytes."""
    spec = spec_of(num_shards, is_packed=True)
    number = np.arange(num_shards)
    rows = np.full(num_shards, ROWS)
    tar_bytes = np.full(num_shards, ROWS * ROW_BYTES // 512 * 512)
    columns = [rows, rows, rows * ROW_TOKENS, tar_bytes, idx_num_bytes("packed", rows)]
    hashes = tuple(f"{each * 2**40:016x}" for each in number.tolist())
    index = DatasetIndex(spec=spec, columns=np.stack(columns, axis=1), tar_sha256=hashes, sources={})
    content = index.to_json()
    (folder / "index.json").write_bytes(content)
    return len(content)


def shards_of(folder: Path) -> ShardSet:
    """Return all shards of an index, as in the loader."""
    index = read_index(DataFolder(folder))
    source = DatasetShards(
        folder=DataFolder(folder),
        spec=index.spec,
        shard_ids=np.arange(index.spec.num_shards),
        num_samples=index.column("num_samples"),
        num_validation=index.column("num_samples"),
        num_tokens=index.column("num_tokens"),
        tar_bytes=index.column("tar_bytes"),
        tar_sha256=np.array(index.tar_sha256),
    )
    return ShardSet([source])


def opens_of(order: Order, shards: ShardSet, num_workers: int) -> tuple[float, float]:
    """Return the shards that a worker opens for its first window, and that all workers open per later step.

    Only some workers are followed. Each keeps the latest MAX_OPEN_SHARDS open, like ShardReader.
    """
    first, per_step = [], []
    for worker in range(0, num_workers, max(num_workers // NUM_FOLLOWED, 1)):
        slots = share(range(order.num_slots), worker, num_workers)
        held: OrderedDict[int, None] = OrderedDict()
        num_opened, num_steps = 0, 0
        for number, (start, end) in enumerate(islice(order.windows(0), WINDOWS)):
            opened = 0
            for shard in np.unique(shards.shard_of(order.samples_of(0, slots, start, end))).tolist():
                opened += shard not in held
                held[shard] = None
                held.move_to_end(shard)
                if len(held) > MAX_OPEN_SHARDS:
                    held.popitem(last=False)
            if number == 0:
                first.append(opened)
            else:
                num_opened, num_steps = num_opened + opened, num_steps + end - start
        per_step.append(num_opened / max(num_steps, 1))
    return float(np.mean(first)), float(np.mean(per_step)) * num_workers


def large_idx(folder: Path, num_documents: int) -> tuple[float, float, int]:
    """Return CPU ms to open a large idx and read a block of 16, and to read all of it; and its bytes."""
    spec = spec_of(1, is_packed=False)
    dtype = np.dtype([("all", "V28")])
    crcs, records = ChunkCrcs(dtype), np.zeros(num_documents, dtype).tobytes()
    crcs.add(records)
    path = folder / idx_name(0)
    path.write_bytes(idx_header(spec, 0) + records + crcs.table())

    def block() -> None:
        idx = IdxFile(DataFolder(folder), spec, 0)
        idx.read(slice(num_documents // 2, num_documents // 2 + 16))
        idx.file.close()

    _, block_s, _ = taken(block)
    _, whole_s, _ = taken(lambda: read_idx(DataFolder(folder), spec, 0))
    return block_s * 1e3, whole_s * 1e3, path.stat().st_size


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="leave out the largest size")
    args = parser.parse_args()
    sizes = SIZES[:-1] if args.quick else SIZES
    lines: dict[str, list[str]] = {}
    for num_shards, ranks in sizes:
        with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
            folder, world = Path(name), ranks * WORKERS
            num_bytes = index_of(folder, num_shards)
            shards, index_s, index_mb = taken(partial(shards_of, folder))
        block, window = choose_windows(
            num_samples=shards.num_samples, num_bytes=shards.tar_bytes, tick_samples=ranks * BATCH
        )
        order = Order(
            num_samples=shards.num_samples,
            tick_samples=ranks * BATCH,
            block_samples=block,
            window_samples=window,
            seed=1,
        )
        slots = share(range(order.num_slots), 0, world)
        middle = order.ticks_per_epoch // 2
        start, end = next(order.windows(middle))
        _, window_s, window_mb = taken(partial(order.samples_of, 0, slots, start, end))
        at_start, per_step = opens_of(order, shards, world)
        window_bytes = len(slots) * window * ROW_BYTES
        mb_per_open = order.tick_samples * ROW_BYTES / max(per_step, 1e-9) / 1e6
        row = {
            "samples": f"{shards.num_samples:.0e}",
            "global batch, samples": f"{order.tick_samples:,}",
            "index.json, MB": f"{num_bytes / 1e6:.2f}",
            "reading it, ms": f"{index_s * 1e3:.0f}",
            "shards in memory, per process, MB": f"{index_mb:.1f}",
            "order of a window in mid-epoch, ms": f"{window_s * 1e3:.2f}",
            "that order in memory, MB": f"{window_mb:.3f}",
            "samples of a window, per worker, MB": f"{window_bytes / 1e6:.1f}",
            "shards that a worker opens for its first batch": f"{at_start:.1f}",
            "shards that all open for the first batch": f"{at_start * world:,.0f}",
            "shards opened per step, all workers": f"{per_step:,.0f}",
            "MB read per shard opened": f"{mb_per_open:.2f}",
        }
        for what, value in row.items():
            lines.setdefault(what, []).append(value)
    heads = [f"{shards:,} shards, {ranks:,} x {WORKERS}" for shards, ranks in sizes]
    print(f"| | {' | '.join(heads)} |\n|---|{'---|' * len(heads)}")
    for what, values in lines.items():
        print(f"| {what} | {' | '.join(values)} |")
    print("\n| idx of | bytes | open, and one block, ms | all, ms | held at opening |\n|---|---|---|---|---|")
    for number in (1_000, 10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as name:
            block_ms, whole_ms, num_bytes = large_idx(Path(name), number)
        held = "yes" if number * 28 <= HELD_IDX_BYTES else "no"
        print(f"| {number:,} documents | {num_bytes:,} | {block_ms:.2f} | {whole_ms:.1f} | {held} |")
    print(f"\n{machine_line()}.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
