"""``python benchmarks/forecast.py``: counts of ``forecast`` beside the readers of ``reads.py``; their price.

The first table has the opened shards and the bytes of a node's ranks in their first steps. The second one has
the time and the peak memory of all counts of 10^6 steps on 4,096 ranks, from 10^5 shards, each in a process
of its own. No shard exists: orders need only their sizes.
"""

from __future__ import annotations

import multiprocessing
import resource
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
from measured_run import machine_line
from reads import DATA_SETS, Shards, Worker

from loader.batch.reads_forecast import reads_of
from loader.order.forecast import Forecast
from loader.order.mixture import Run
from loader.order.order import share
from loader.order.planned import Sizes, Weights, choose_sizes, make_run
from loader.read.samples import PackedRows, Samples, facts_of
from loader.read.shards import DatasetShards, ShardSet
from shardprep.format.data_folder import DataFolder
from shardprep.format.spec import DatasetSpec, TokenizerSpec

NUM_WORKERS = 4  # of a rank
BATCH_SIZE = 8  # of a rank
RANKS_PER_NODE = 8
FOLLOWED_STEPS = 600
SEQ_LEN = 8192
SHARES = {"web": 0.7, "code": 0.2, "books": 0.1}
OTHER_SHARES = {"web": 0.2, "code": 0.2, "books": 0.6}
MANY_RANKS = 4096
STEP_SAMPLES = MANY_RANKS * BATCH_SIZE
MANY_STEPS = 1_000_000
MANY_SHARDS = Shards(kind="packed", num_shards=100_000, shard_samples=30_720, sample_bytes=32_768)
CASES: dict[str, tuple[Shards, Sizes, Weights | None]] = {
    "one source": (MANY_SHARDS, STEP_SAMPLES, None),
    "three sources": (MANY_SHARDS, STEP_SAMPLES, SHARES),
    "three small sources, 229 epochs": (replace(MANY_SHARDS, shard_samples=3_000), STEP_SAMPLES, SHARES),
    "three sources, two sizes, two mixtures": (
        MANY_SHARDS,
        [(0, STEP_SAMPLES), (100_000, 2 * STEP_SAMPLES)],
        [(0, SHARES), (500_000, OTHER_SHARES)],
    ),
}


def samples_of(shards: Shards, num_shards: int) -> Samples:
    """Return samples like those of a data set with equal shards."""
    tokenizer = TokenizerSpec(
        model_id="none",
        fingerprint="0" * 64,
        vocab_size=128_000,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    is_packed = shards.kind == "packed"
    spec = DatasetSpec(
        plan_id="0" * 64,
        num_shards=num_shards,
        record="packed" if is_packed else "documents",
        token_format="npy",
        seq_len=SEQ_LEN if is_packed else 0,
        append_eos=True,
        tokenizer=tokenizer,
    )
    counts = np.full(num_shards, shards.shard_samples)
    data = DatasetShards(
        folder=DataFolder(Path("/none")),
        spec=spec,
        shard_ids=np.arange(num_shards),
        num_samples=counts,
        num_tokens=counts * SEQ_LEN,
        tar_bytes=counts * shards.sample_bytes,
        tar_sha256=np.full(num_shards, "0" * 16),
        num_validation=counts,
    )
    if is_packed:
        return PackedRows(shards=ShardSet([data]), row_tokens=SEQ_LEN)
    return Samples(shards=ShardSet([data]))


def run_of(samples: dict[str, Samples], sizes: Sizes, weights: Weights | None, world_size: int) -> Run:
    """Return the run that a loader of such samples would have."""
    tick_samples, group, by_step = choose_sizes(sizes, False, batch_size=BATCH_SIZE, world_size=world_size)
    return make_run(
        {name: facts_of(each, counts_tokens=False) for name, each in samples.items()},
        by_step,
        weights,
        tick_samples=tick_samples,
        batches_per_tick=1,
        group=group,
        seed=1,
        shuffle=True,
        keeps_tail=False,
        settings={},
    )


def calls_of_readers(shards: Shards, run: Run, ranks: range, world_size: int) -> Counter[str]:
    """Return what the readers of ``reads.py`` ask for in the first steps of some ranks."""
    calls: Counter[str] = Counter()
    num_workers = world_size * NUM_WORKERS
    for number in range(ranks.start * NUM_WORKERS, ranks.stop * NUM_WORKERS):
        slots = share(range(run.order.num_slots), number, num_workers)
        worker = Worker(shards, slots.start, run.order.num_slots)
        for first, end in run.order.windows(0):
            if first >= FOLLOWED_STEPS:
                break
            worker.read(run.order.samples_of(0, slots, first, end).reshape(-1))
        calls += worker.calls
    return calls


def compare_reads() -> None:
    print(
        f"| shards, in the first {FOLLOWED_STEPS} steps of a node | ranks | opened: readers, forecast ",
        end="",
    )
    print("| bytes: readers, forecast |\n|---|---|---|---|")
    for shards in DATA_SETS:
        samples = {"all": samples_of(shards, shards.num_shards)}
        for world_size in (1, 8, 64):
            ranks = range(min(world_size, RANKS_PER_NODE))
            run = run_of(samples, BATCH_SIZE * world_size, None, world_size)
            found = reads_of(
                run,
                samples,
                ranks=ranks,
                world_size=world_size,
                num_workers=NUM_WORKERS,
                num_steps=FOLLOWED_STEPS,
            )
            calls = calls_of_readers(shards, run, ranks, world_size)
            num_bytes = round(found.step_bytes * FOLLOWED_STEPS)
            title = f"{shards.num_shards:,} of {shards.shard_samples:,} {shards.kind}"
            cells = f"{calls['opened']:,}, {found.num_opened:,} | {calls['tar bytes']:,}, {num_bytes:,}"
            print(f"| {title} | {world_size} | {cells} |", flush=True)


def price_of(case: str) -> str:
    """Count all of a case. Returns a line of the table."""
    shards, sizes, weights = CASES[case]
    names = ["all"] if weights is None else list(SHARES)
    samples = {name: samples_of(shards, shards.num_shards // len(names)) for name in names}
    run = run_of(samples, sizes, weights, MANY_RANKS)
    began = time.perf_counter()
    at_start = time.process_time()
    Forecast(run, MANY_STEPS, {}, {}).forecast()
    counted = time.process_time()
    for first in (0, MANY_RANKS - RANKS_PER_NODE):
        ranks = range(first, first + RANKS_PER_NODE)
        reads_of(run, samples, ranks=ranks, world_size=MANY_RANKS, num_workers=NUM_WORKERS, num_steps=60)
    ended = time.process_time()
    wall_s = time.perf_counter() - began
    peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6 * 1024
    return f"| {case} | {counted - at_start:.1f} | {ended - counted:.1f} | {wall_s:.1f} | {peak_mb:.0f} |"


def main() -> None:
    compare_reads()
    print(
        "\n| 10^5 shards, 4,096 ranks, 10^6 steps | CPU s: counts | reads of two nodes | wall s | peak MB |"
    )
    print("|---|---|---|---|---|")
    for case in CASES:
        # Peak memory is that of a process.
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as other:
            print(other.submit(price_of, case).result(), flush=True)
    print(machine_line())


if __name__ == "__main__":
    main()
