"""What the order promises beyond its law: samples are mixed as by a full shuffle, and reads are bounded.

tests/oracle/law.py says the order number by number, and tests/oracle/test_law.py that the loader has it. So
what is a matter of chance is tried on the law.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.checkout import ROOT
from tests.forged import rewrite_json
from tests.oracle.forms import DataSets
from tests.oracle.law import Order, Run, Source
from tests.world import open_loader


@pytest.mark.slow
def test_mixing_of_shards_sorted_by_source_stays_near_a_full_permutations() -> None:
    """Variance of a source's share, against a full permutation's, over one step and over 64."""
    num_samples, size, num_sources = 20 * 25_600, 64, 20
    order = Order(Source([1] * num_samples, num_samples * 8192), size, 1, 1)
    steps = [Counter(n * num_sources // num_samples for n in order.samples(0, tick)) for tick in range(512)]
    for span, most in ((1, 1.2), (64, 6.0)):
        shares = [sum(steps[first : first + span], Counter()) for first in range(0, 512, span)]
        expected = span * size / num_sources
        deviations = [(share[source] - expected) ** 2 for share in shares for source in range(num_sources)]
        assert sum(deviations) / len(deviations) <= most * expected * (1 - 1 / num_sources)


@pytest.mark.slow
def test_a_sources_share_of_a_tick_varies_as_in_a_full_shuffle() -> None:
    sources = {name: Source([1] * 30_000, 30_000) for name in ("a", "b")}
    run = Run(sources, sizes=[(0, 16)], weights=[(0, {"a": 0.7, "b": 0.3})], seed=5)
    counts = [sum(sample.source == "b" for sample in run.tick(tick)) for tick in range(30 * 64)]
    mean = sum(counts) / len(counts)
    assert mean == pytest.approx(0.3 * 16, rel=0.02)
    variance = sum((count - mean) ** 2 for count in counts) / len(counts)
    assert 0.8 < variance / (16 * 0.7 * 0.3) < 1.1


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
    sets: DataSets, tmp_path: Path, num_samples: int, size: int, group: int, block: int, window: int
) -> None:
    """Of an index.json of other numbers, which is all that a loader opens to begin with."""
    folder = Path(shutil.copytree(sets["documents"], tmp_path / "huge"))
    idx_bytes = 64 + 28 * num_samples + 4 * -(-num_samples // 512)
    tar_bytes = num_samples * 4096 - 2 * 10240
    (*_, of_first), *rest = json.loads((folder / "index.json").read_bytes())["shards"]
    shards = [[num_samples, num_samples, 100 * num_samples, tar_bytes, idx_bytes, 0, of_first]]
    shards += [[0, 0, 0, 10240, 64, 0, each[-1]] for each in rest]
    rewrite_json(folder / "index.json", shards=shards)
    with open_loader(folder, size, rank=0, world_size=1, group_by_length=group if group > 1 else 0) as loader:
        assert loader.state_dict()["sources"][0][3:5] == [block, window]


def test_the_loader_draws_nothing_from_generators_whose_streams_may_change_with_a_version() -> None:
    modules = sorted((ROOT / "loader").rglob("*.py"))
    assert len(modules) > 20
    drawing = re.compile(
        r"np\.random|numpy\.random|torch\.rand(?!om\.fork_rng)|^\s*(import|from) random", re.MULTILINE
    )
    assert not [path.name for path in modules if drawing.search(path.read_text(encoding="utf-8"))]
