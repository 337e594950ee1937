"""``PYTHONPATH=. python benchmarks/duplicates_scale.py [MILLIONS]``: the price of ``shardprep duplicates``.

The data set is forged: digests at random, one in ten of them twice, and an idx that has a place for each.
"""

from __future__ import annotations

import hashlib
import json
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
from measured_run import machine_line, run_pinned

from shardprep.format.index import IDX_DOCUMENT, ChunkCrcs, idx_header
from shardprep.format.plan import need_plan
from tests.forged import rewrite_json
from tests.world import World

NUM_SHARDS = 10


def forge(folder: Path, num_documents: int) -> int:
    """Make a data set of so many documents; return how many of them have an equal one before them."""
    texts = [{"text": f"document {number}"} for number in range(NUM_SHARDS * 2)]
    world = World(folder).raw({"a.jsonl": texts}).make(num_shards=NUM_SHARDS, digests=True)
    draw = np.random.default_rng(0)
    numbers = np.arange(num_documents, dtype=np.uint64)
    numbers[draw.permutation(num_documents)[: num_documents // 10]] = 7 + np.arange(num_documents // 10)
    digests = np.stack([numbers * np.uint64(0x9E3779B97F4A7C15), numbers], axis=1).astype(">u8")
    spec = need_plan(world.data_dir).spec
    for shard_id, of_shard in enumerate(np.array_split(digests, NUM_SHARDS)):
        records = np.zeros(len(of_shard), IDX_DOCUMENT)
        records["source_offset"], records["num_tokens"] = np.arange(len(of_shard)) * 100, 5
        crcs = ChunkCrcs(IDX_DOCUMENT)
        crcs.add(records.tobytes())
        stem = f"shard-{shard_id:05d}"
        changes: dict[str, object] = {}
        for name, path, content in (
            ("digests", f"digests/{stem}.digests", of_shard.tobytes()),
            ("idx", f"{stem}.idx", idx_header(spec, shard_id) + records.tobytes() + crcs.table()),
        ):
            (world.data_dir / path).write_bytes(content)
            changes[f"{name}.num_bytes"] = len(content)
            changes[f"{name}.sha256"] = hashlib.sha256(content).hexdigest()
        rewrite_json(world.data_dir / f"{stem}.json", **changes)
    return num_documents - len(np.unique(numbers))


def main() -> None:
    num_documents = int(float(sys.argv[1] if len(sys.argv) > 1 else 10) * 1_000_000)
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1) as other:
        # In another process, as a child's peak memory can never be below its parent's at the fork.
        expected = other.submit(forge, Path(name), num_documents).result()
        words = ["duplicates", f"{name}/data", "--output", f"{name}/names.txt", "--json"]
        log = Path(name, "log")
        usage = run_pinned([sys.executable, "-m", "shardprep", *words], cwd=Path.cwd(), log=log)
        found = json.loads(log.read_text())["num_duplicates"]
    assert found == expected, (found, expected)
    print(f"{num_documents:,} documents, {found:,} of them go: {usage.cpu_s:.1f} s of CPU, ", end="")
    print(f"{usage.wall_s:.1f} s, {usage.max_rss_bytes / 1e6:.0f} MB")
    print(machine_line())


if __name__ == "__main__":
    main()
