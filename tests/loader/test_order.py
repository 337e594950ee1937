"""What the order promises beyond its law: even chances, bounded reads, and steps that count through epochs.

tests/oracle/law.py says the order number by number, and tests/oracle/test_law.py that the loader has it. So
what is a matter of chance is tried on the law.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.checkout import ROOT
from tests.forged import rewrite_json
from tests.oracle.forms import DataSets
from tests.oracle.law import CYCLE, Order, Run, Source, spread
from tests.world import open_loader


def order_of(num_samples: int, size: int, sample_bytes: int = 8192, seed: int = 1) -> Order:
    return Order(Source([1] * num_samples, num_samples * sample_bytes), size, 1, seed)


@pytest.mark.slow
def test_each_epoch_leaves_out_other_samples_and_none_more_often_than_chance() -> None:
    order, num_epochs = order_of(53, 10), 400
    left_out: Counter[int] = Counter()
    for epoch in range(num_epochs):
        seen = {sample for tick in range(order.ticks_per_epoch) for sample in order.samples(epoch, tick)}
        left_out.update(set(range(53)) - seen)
    assert left_out.total() == 3 * num_epochs
    expected = num_epochs * 3 / 53
    sigma = math.sqrt(expected * (1 - 3 / 53))
    assert max(abs(left_out[sample] - expected) for sample in range(53)) < 4.5 * sigma


@pytest.mark.slow
def test_mixing_of_shards_sorted_by_source_stays_near_a_full_permutations() -> None:
    """Variance of a source's share, against a full permutation's, over one step and over 64."""
    num_samples, size, num_sources = 20 * 25_600, 64, 20
    order = order_of(num_samples, size)
    steps = [Counter(n * num_sources // num_samples for n in order.samples(0, tick)) for tick in range(512)]
    for span, most in ((1, 1.2), (64, 6.0)):
        shares = [sum(steps[first : first + span], Counter()) for first in range(0, 512, span)]
        expected = span * size / num_sources
        deviations = [(share[source] - expected) ** 2 for share in shares for source in range(num_sources)]
        assert sum(deviations) / len(deviations) <= most * expected * (1 - 1 / num_sources)


@pytest.mark.parametrize("counts", [(32768, 19661, 13100, 7), (65535, 1), (1, 0, 65535)])
def test_a_source_of_a_mixture_is_never_two_ticks_from_its_share(counts: tuple[int, ...]) -> None:
    taken = [0] * len(counts)
    for tick, source in enumerate(spread(counts, 4000)):
        taken[source] += 1
        for number, count in zip(taken, counts, strict=True):
            assert abs(number - (tick + 1) * count / CYCLE) < 2


@pytest.mark.slow
def test_a_sources_share_of_a_tick_varies_as_in_a_full_shuffle() -> None:
    sources = {name: Source([1] * 30_000, 30_000) for name in ("a", "b")}
    run = Run(sources, sizes=[(0, 16)], weights=[(0, {"a": 0.7, "b": 0.3})], seed=5)
    counts = [sum(sample.source == "b" for sample in run.tick(tick)) for tick in range(30 * 64)]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(0.3 * 16, rel=0.02)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert 0.8 < variance / (16 * 0.7 * 0.3) < 1.1


@pytest.fixture
def huge(sets: DataSets, tmp_path: Path) -> Any:
    """Give a data set an index.json of other numbers, which is all that a loader opens to begin with."""
    folder = Path(shutil.copytree(sets["documents"], tmp_path / "huge"))

    def forge(num_samples: int, num_bytes: int) -> Path:
        idx_bytes = 64 + 28 * num_samples + 4 * -(-num_samples // 512)
        row = [num_samples, num_samples, 100 * num_samples, num_bytes - 2 * 10240, idx_bytes, 0, None]
        index = json.loads((folder / "index.json").read_bytes())
        row[-1] = index["shards"][0][-1]
        rest = [[0, 0, 0, 10240, 64, 0, each[-1]] for each in index["shards"][1:]]
        rewrite_json(folder / "index.json", shards=[row, *rest])
        return folder

    return forge


# samples of 4 KiB, global batch, group; samples of a block and of a slot's window
WINDOWS = [
    (10**7, 8, 1, 128, 16 * 128),
    (10**7, 64, 1, 32, 16 * 32),
    (10**7, 256, 1, 32, 4 * 32),
    (10**7, 512, 1, 64, 4 * 64),
    (10**9, 2048, 1, 256, 4 * 256),
    (10**9, 32_768, 1, 256, 4 * 256),
    (16 * 64 * 3, 64, 1, 3, 48),
    (100, 10, 1, 1, 16),
    (10**7, 64, 32, 128, 8192),
]


@pytest.mark.parametrize(("num_samples", "size", "group", "block", "window"), WINDOWS)
def test_blocks_and_windows_are_as_large_as_the_memory_of_all_slots_allows(
    huge: Any, num_samples: int, size: int, group: int, block: int, window: int
) -> None:
    folder = huge(num_samples, num_samples * 4096)
    with open_loader(folder, size, rank=0, world_size=1, group_by_length=group if group > 1 else 0) as loader:
        assert loader.state_dict()["sources"][0][3:5] == [block, window]


def test_the_place_of_a_step_of_a_billion_samples_costs_no_memory(huge: Any) -> None:
    folder = huge(10**9, 8192 * 10**9)
    tracemalloc.start()
    try:
        with open_loader(folder, 8, rank=0, world_size=8) as loader:
            assert loader.state_at(40_000_000)["epoch"] == 40_000_000 // (10**9 // 64)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_the_loader_draws_nothing_from_generators_whose_streams_may_change_with_a_version() -> None:
    modules = sorted((ROOT / "loader").rglob("*.py"))
    assert len(modules) > 20
    drawing = re.compile(
        r"np\.random|numpy\.random|torch\.rand(?!om\.fork_rng)|^\s*(import|from) random", re.MULTILINE
    )
    assert not [path.name for path in modules if drawing.search(path.read_text(encoding="utf-8"))]
