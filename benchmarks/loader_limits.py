"""Measure the numbers that the loader promises, and print each beside its limit.

    python benchmarks/loader_limits.py [--mb 10] [--core N] [--only resume,first,...]

Measured are: resuming, first batch, opening, memory over epochs, bytes read, padding, mixing, weights of
sources, and the cost of mixing and of origins. The first three and the last two are times on one core; the
others do not depend on the machine or its load. It takes seven minutes, and always exits with 0.
"""

from __future__ import annotations

import argparse
import itertools
import multiprocessing
import os
import random
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from loader_data_sets import LimitData, make_limit_data
from loader_footprint import NUM_SHARDS, first_batch, footprints, make_index, opening
from loader_shares import (
    mixed_differences,
    mixed_tokens,
    mixing_costs,
    source_variances,
    useful_share,
    weighted_variances,
)
from measured_run import machine_line

from loader import get_llama3_dataloader
from shardprep.format.data_folder import DataFolder
from shardprep.format.index import read_index

NUM_RESUMES, NUM_FRESH = 50, 9
MIXED_STEPS = 2000
MIXING_TURNS = 15
WORLD, WORKERS, BATCH = 8, 2, 8
MODES: dict[str, dict[str, Any]] = {
    "padded, batch 32": {"batch_size": 32, "max_length": 2048},
    "grouped by length, batch 32": {"batch_size": 32, "max_length": 2048, "group_by_length": True},
    "packed at load, batch 8": {"batch_size": BATCH, "seq_len": 2048},
}


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A line of the table."""

    what: str
    measured: str
    asked: str
    kept: bool


@contextmanager
def pinned(core: int) -> Iterator[None]:
    """Pin this process and its children to one core."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def resume_delays(given: LimitData, core: int) -> Iterator[Finding]:
    """Measure load_state_dict to the first batch, minus a fresh loader's first batch.

    There are no workers, and the cache is warm. Fresh: the median of NUM_FRESH loaders. Resumed: one loader
    that is moved to random steps, with its memory already allocated. Another NUM_FRESH loaders resume once
    each when they are fresh; median and maximum are shown of both. Times are CPU time of one core, which is
    the wall time if nothing else runs.
    """
    korean = next(iter(given.documents.values()))
    cases = {"packed rows, batch 8": (given.large, {"batch_size": BATCH})}
    with pinned(core):
        for label, (data, options) in (
            cases | {name: (korean, each) for name, each in MODES.items()}
        ).items():
            draw = random.Random(0)
            fresh: list[float] = []
            fresh_resumed: list[float] = []
            for _ in range(NUM_FRESH):
                for times, resumes in ((fresh, False), (fresh_resumed, True)):
                    with get_llama3_dataloader(data, num_workers=0, **options) as loader:
                        num_steps = 3 * loader.run.steps_in(0)
                        times.append(_first_batch_s(loader, draw.randrange(num_steps) if resumes else 0))
            with get_llama3_dataloader(data, num_workers=0, **options) as loader:
                _first_batch_s(loader, 0)
                steps = draw.choices(range(num_steps), k=NUM_RESUMES)
                resumed = [_first_batch_s(loader, step) for step in steps]
            first_ms = statistics.median(fresh) * 1e3
            delay_ms = float(np.quantile(resumed, 0.95)) * 1e3 - first_ms
            yield Finding(
                what=f"resume, {label}: 95th percentile of {NUM_RESUMES}, less a fresh first batch",
                measured=f"{delay_ms:.0f} ms (median, most: fresh {_ms(fresh)}; resumed {_ms(resumed)}; "
                f"each resumed in a fresh loader {_ms(fresh_resumed)})",
                asked="< 50 ms",
                kept=delay_ms < 50,
            )


def _ms(times_s: list[float]) -> str:
    """Format median and maximum."""
    return f"{statistics.median(times_s) * 1e3:.0f}, {max(times_s) * 1e3:.0f}"


def _first_batch_s(loader: Any, step: int) -> float:
    state, began = loader.state_at(step), time.process_time()
    loader.load_state_dict(state)
    next(iter(loader))
    return time.process_time() - began


def first_batches(given: LimitData, core: int) -> Iterator[Finding]:
    """Measure CPU seconds from ``import torch`` to a first batch of packed rows of 8 shards."""
    with pinned(core):
        runs = [first_batch(given.rows) for _ in range(NUM_FRESH)]
    torch_s, above_s = zip(*runs, strict=True)
    median_s = statistics.median(above_s)
    yield Finding(
        what="first batch of a fresh process, 8 shards, above import torch",
        measured=f"{median_s:.2f} s ({min(above_s):.2f}-{max(above_s):.2f}); import torch "
        f"{statistics.median(torch_s):.2f} ({min(torch_s):.2f}-{max(torch_s):.2f})",
        asked="< 1.0 s",
        kept=median_s < 1.0,
    )


def opening_of_many_shards(given: LimitData, core: int) -> Iterator[Finding]:
    """Measure time and memory, without imports, of get_llama3_dataloader for 99,999 and for 8 shards."""
    folder = given.rows.parent / "many"
    make_index(given.rows, folder)
    with pinned(core):
        few, many = zip(*[(opening(given.rows), opening(folder)) for _ in range(3)], strict=True)
    seconds = statistics.median(each.seconds for each in many)
    small = statistics.median(each.seconds for each in few)
    peak, small_peak = (max(each.peak_bytes for each in runs) / 1e6 for runs in (many, few))
    what = f"opening {NUM_SHARDS:,} shards"
    yield Finding(
        what=what,
        measured=f"{seconds:.2f} s (8 shards {small:.2f})",
        asked="< 2 s",
        kept=seconds < 2,
    )
    yield Finding(
        what=f"{what}, above torch and transformers",
        measured=f"{peak:.0f} MB (8 shards {small_peak:.0f})",
        asked="< 300 MB",
        kept=peak < 300,
    )


def growth_over_epochs(given: LimitData, _core: int) -> Iterator[Finding]:
    """Measure memory and handles of the process and two persistent workers after epochs 2 and 10."""
    korean = next(iter(given.documents.values()))
    cases = {"packed rows": (given.rows, {}), "packed at load": (korean, {"seq_len": 2048})}
    for label, (folder, options) in cases.items():
        second, tenth = footprints(folder, options, (2, 10))
        growth = tenth.resident_bytes - second.resident_bytes
        yield Finding(
            what=f"memory, {label}, 2 persistent workers, after epochs 2 and 10",
            measured=f"{second.resident_bytes / 2**20:.1f}, {tenth.resident_bytes / 2**20:.1f} MiB",
            asked="no growth (1 MiB an epoch)",
            kept=growth < 8 << 20,
        )
        yield Finding(
            what=f"handles, {label}, likewise",
            measured=f"{second.num_handles}, {tenth.num_handles}",
            asked="no growth",
            kept=tenth.num_handles <= second.num_handles,
        )


def bytes_read(given: LimitData, _core: int) -> Iterator[Finding]:
    """Measure the bytes that a rank's workers read in an epoch over the bytes of ids that it delivered.

    Bytes read are rchar of /proc/PID/io: the results of all read calls of a worker, for tars, idx files and
    torch's queues. It does not include memory maps, but there are none. Three quarters of the part above 1
    are the beginnings of idx files, because these shards have only 2 MB.
    """
    token_bytes = read_index(DataFolder(given.rows)).spec.dtype.itemsize
    ratios = []
    for rank in range(WORLD):
        options: dict[str, Any] = {
            "num_workers": WORKERS,
            "persistent_workers": False,
            "rank": rank,
            "world_size": WORLD,
        }
        with get_llama3_dataloader(given.large, BATCH, **options) as loader:
            read = 0
            for number, _ in enumerate(loader, start=1):
                if number == len(loader):  # the workers have read the whole epoch, and are still alive
                    workers = multiprocessing.active_children()
                    read = sum(_rchar(int(worker.pid or 0)) for worker in workers)
            ratios.append(read / (loader.metrics.num_tokens * token_bytes))
    yield Finding(
        what=f"bytes read over delivered, packed rows, world {WORLD} x {WORKERS} workers, each rank",
        measured=f"{min(ratios):.3f} to {max(ratios):.3f}",
        asked="<= 1.1",
        kept=1 <= max(ratios) <= 1.1,
    )


def _rchar(pid: int) -> int:
    found = re.search(r"^rchar: (\d+)", Path(f"/proc/{pid}/io").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1])


def useful_tokens(given: LimitData, _core: int) -> Iterator[Finding]:
    """Measure the share of tokens in an epoch's batches that are not padding."""
    cases = [("packed rows", given.rows, {"batch_size": BATCH}, 0.99)]
    limits = dict(zip(given.documents, (0.97, 0.95, 0.88), strict=True))
    for name, folder in given.documents.items():
        cases.append((f"{name}, packed at load", folder, MODES["packed at load, batch 8"], 0.99))
        cases.append((f"{name}, grouped", folder, MODES["grouped by length, batch 32"], limits[name]))
    for label, folder, options, limit in cases:
        useful = useful_share(folder, options)
        yield Finding(
            what=f"useful tokens, {label}",
            measured=f"{useful:.3f}",
            asked=f">= {limit}",
            kept=useful >= limit,
        )


def mixing(_given: LimitData, _core: int) -> Iterator[Finding]:
    """Measure the variance of a source's share over a full permutation's, for shards of 20 sorted sources."""
    limits = {1: 1.2, 64: 6.0}
    for span, ratio in source_variances(64, tuple(limits)).items():
        yield Finding(
            what=f"mixing of 20 sorted sources, global batch 64, over {span} steps",
            measured=f"{ratio:.2f} times a full permutation's variance",
            asked=f"<= {limits[span]}",
            kept=ratio <= limits[span],
        )


def weights(given: LimitData, _core: int) -> Iterator[Finding]:
    """Measure two named sources with .7 and .3 of the tokens: shares, worlds, resumes and variance."""
    pair = dict(itertools.islice(given.documents.items(), 2))
    first, other = pair
    share = mixed_tokens(pair, {first: 0.7, other: 0.3}, MIXED_STEPS)
    yield Finding(
        what=f"sources {first} .7, {other} .3 by tokens: share of the first in {MIXED_STEPS:,} steps of 64",
        measured=f"{share:.4f}",
        asked=".693 to .707",
        kept=abs(share / 0.7 - 1) <= 0.01,
    )
    differing = mixed_differences(pair, (1, 2, 4, 8), MIXED_STEPS // 10, NUM_RESUMES)
    yield Finding(
        what=f"sources: of {MIXED_STEPS // 10} steps with a change of weights, and of {NUM_RESUMES} random "
        "resumes, those that are not as in the unbroken run of one rank",
        measured=", ".join(f"{name}: {count}" for name, count in differing.items()),
        asked="0",
        kept=not any(differing.values()),
    )
    for span, ratio in weighted_variances(0.7, 64, (1, 8, 32, 64)).items():
        yield Finding(
            what=f"sources .7, .3, global batch 64: share of the first over {span} steps",
            measured=f"{ratio:.2f} times a full shuffle's variance",
            asked="<= 1.1",
            kept=ratio <= 1.1,
        )


def mixing_cost(given: LimitData, core: int) -> Iterator[Finding]:
    """Measure what a batch of two sources costs more than one of each alone, in turns on one core."""
    half = len(given.large) // 2
    packed = {"one": given.large[:half], "other": given.large[half:]}
    documents = dict(itertools.islice(given.documents.items(), 2))
    # Enough batches for several windows of packed rows, or one window more or less would decide the result.
    cases: dict[str, tuple[dict[str, Any], dict[str, Any], int]] = {
        "packed rows, batch 8": (packed, {"batch_size": BATCH}, 4096),
        **{name: (documents, options, 300) for name, options in MODES.items()},
    }
    with pinned(core):
        for label, (sources, options, num_batches) in cases.items():
            ratios = sorted(mixing_costs(sources, options, MIXING_TURNS, num_batches)[MIXING_TURNS // 5 :])
            ratio = statistics.median(ratios)
            yield Finding(
                what=f"sources .7, .3, {label}: CPU of a batch, over that of one source",
                measured=f"{ratio:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})",
                asked="<= 1.1",
                kept=ratio <= 1.1,
            )


def origins_cost(given: LimitData, core: int) -> Iterator[Finding]:
    """Measure what the origins of documents in a batch cost, in turns on one core."""
    documents = next(iter(given.documents.values()))
    packed: dict[str, Any] = {"batch_size": BATCH}
    cases: dict[str, tuple[Any, dict[str, Any]]] = {
        "packed rows, batch 8": (given.large[:8], packed),
        "packed rows with boundaries, batch 8": (given.large[:8], {**packed, "boundaries": "segment_ids"}),
        **{name: (documents, options) for name, options in MODES.items()},
    }
    with pinned(core):
        for label, (data, options) in cases.items():
            pairs = [
                [_batch_cpu_s(data, options, origins=given) for given in (False, True)]
                for _ in range(MIXING_TURNS)
            ]
            ratios = sorted(having / lacking for lacking, having in pairs)
            ratio, added = statistics.median(ratios), statistics.median(b - a for a, b in pairs)
            yield Finding(
                what=f"origins, {label}: CPU of a batch, over that without",
                measured=f"{ratio:.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f}), {added * 1e6:.0f} us",
                asked="<= 1.1",
                kept=ratio <= 1.1,
            )


def _batch_cpu_s(data: Any, options: dict[str, Any], *, origins: bool, num_batches: int = 800) -> float:
    with get_llama3_dataloader(data, **options, num_workers=0, origins=origins) as loader:
        batches = itertools.islice(itertools.chain.from_iterable(itertools.repeat(loader)), num_batches)
        began = time.process_time()
        for _ in batches:
            pass
        return (time.process_time() - began) / num_batches


MEASURES: dict[str, Callable[[LimitData, int], Iterator[Finding]]] = {
    "resume": resume_delays,
    "first": first_batches,
    "opening": opening_of_many_shards,
    "epochs": growth_over_epochs,
    "reads": bytes_read,
    "padding": useful_tokens,
    "mixing": mixing,
    "weights": weights,
    "mixing_cost": mixing_cost,
    "origins": origins_cost,
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mb", type=float, default=10, help="of each text")
    parser.add_argument("--only", default=",".join(MEASURES), help=f"of {', '.join(MEASURES)}")
    parser.add_argument("--core", type=int, default=max(os.sched_getaffinity(0)), help="default: the last")
    args = parser.parse_args()
    names = args.only.split(",")
    if unknown := sorted(set(names) - set(MEASURES)):
        parser.error(f"no such measure: {', '.join(unknown)}; there are {', '.join(MEASURES)}")
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory(prefix="shardprep-bench-") as folder:
        given = make_limit_data(Path(folder), int(args.mb * 1e6))
        for name in names:
            for finding in MEASURES[name](given, args.core):
                findings.append(finding)
                print(f"{finding.what}: {finding.measured}", file=sys.stderr, flush=True)
    print("| | measured | asked | |\n|---|---|---|---|")
    for each in findings:
        print(f"| {each.what} | {each.measured} | {each.asked} | {'kept' if each.kept else 'MISSED'} |")
    print(f"\n{machine_line()}; {args.mb:g} MB of each text")
    return 0


if __name__ == "__main__":
    sys.exit(main())
