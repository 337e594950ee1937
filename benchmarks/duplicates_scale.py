"""``PYTHONPATH=. python benchmarks/duplicates_scale.py [MILLIONS]``: measure ``shardprep duplicates``.

The documents have some 100 bytes, and one in ten occurs twice.
"""

from __future__ import annotations

import json
import random
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from measured_run import machine_line, run_pinned

from tests.world import World


def lay_out(folder: Path, num_documents: int) -> None:
    """Make a data set of ``num_documents``, of which one in ten is a copy."""
    words = "some words that stand in each of the documents and make it as long as a short one is mostly"
    texts = [f"document {number} has {words}" for number in range(num_documents - num_documents // 10)]
    texts += random.Random(0).sample(texts, num_documents // 10)
    World(folder).raw({"a.txt": "\n".join(texts)}).make(num_shards=10, digests=True)


def main() -> None:
    num_documents = int(float(sys.argv[1] if len(sys.argv) > 1 else 1) * 1_000_000)
    with tempfile.TemporaryDirectory() as name, ProcessPoolExecutor(1) as other:
        # In another process, because a child's peak memory is at least its parent's at the fork.
        other.submit(lay_out, Path(name), num_documents).result()
        words = ["duplicates", f"{name}/data", "--output", f"{name}/names.txt", "--json"]
        log = Path(name, "log")
        usage = run_pinned([sys.executable, "-m", "shardprep", *words], cwd=Path.cwd(), log=log)
        found = json.loads(log.read_text())["num_duplicates"]
    assert found == num_documents // 10, found
    print(f"{num_documents:,} documents, {found:,} of them go: {usage.cpu_s:.1f} s of CPU, ", end="")
    print(f"{usage.wall_s:.1f} s, {usage.max_rss_bytes / 1e6:.0f} MB")
    print(machine_line())


if __name__ == "__main__":
    main()
