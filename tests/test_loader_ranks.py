"""Real process groups: every rank gets equally many batches, and together they see each sample once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
import webdataset
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

NUM_SAMPLES, GLOBAL_BATCH = 107, 8
NUM_SHARDS = 3  # fewer than ranks x workers
EPOCHS = 2

# No RANK or WORLD_SIZE is set, so the process group alone tells the ranks; spawned workers have none.
SCRIPT = """
import datetime, json, sys
import torch.distributed as dist

def main():
    rank, world, store, data, out = int(sys.argv[1]), int(sys.argv[2]), *sys.argv[3:6]
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)
    import torch
    from loader import get_llama3_dataloader

    found = {}
    for workers in (0, 2):
        method = "spawn" if workers and world == 2 else "fork" if workers else None
        loader = get_llama3_dataloader(
            data, 8 // world, data, num_workers=workers, multiprocessing_context=method, seed=5
        )
        assert loader.process_rank.source == "torch.distributed", loader.process_rank
        epochs = []
        for epoch in range(2):
            steps = []
            for batch in loader:
                dist.all_reduce(torch.ones(1))  # hangs, and fails after the limit, where ranks are uneven
                steps.append(batch["input_ids"][:, 0].tolist())
            assert len(steps) == len(loader)
            epochs.append(steps)
        loader.close()
        found[workers] = epochs
    everyone = [None] * world
    dist.all_gather_object(everyone, found)
    if rank == 0:
        with open(out, "w") as file:
            json.dump(everyone, file)
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars by webdataset, a sample's first id its number, with the tokenizer beside them."""
    folder = tmp_path_factory.mktemp("data")
    vocab = {f"w{number}": number for number in range(200)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocab, "w0")), pad_token="w198", eos_token="w199"
    ).save_pretrained(folder)
    for shard, numbers in enumerate(np.array_split(np.arange(NUM_SAMPLES), NUM_SHARDS)):
        with webdataset.TarWriter(str(folder / f"shard-{shard:05d}.tar")) as writer:
            for number in numbers.tolist():
                writer.write({"__key__": f"s{number}", "token_ids.json": [number, *range(number % 5)]})
    return folder


def run_world(world: int, data: Path, folder: Path) -> list[dict[str, list[list[list[int]]]]]:
    """What each rank of a gloo group of ``world`` processes got: [rank][workers][epoch][step] -> samples."""
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in {"RANK", "WORLD_SIZE"} and not name.startswith("SLURM_")
    }
    environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(script)]
    paths = [str(folder / f"store-{world}"), str(data), str(folder / f"out-{world}.json")]
    processes = [
        subprocess.Popen([*command, str(rank), str(world), *paths], env=environ, stderr=subprocess.PIPE)
        for rank in range(world)
    ]
    errors = [process.communicate(timeout=200)[1].decode() for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    found: list[dict[str, list[list[list[int]]]]] = json.loads(Path(paths[2]).read_text())
    return found


def test_worlds_of_1_2_and_4_get_equal_batches_each_sample_once_and_the_same_global_batches(
    data: Path, tmp_path: Path
) -> None:
    steps = NUM_SAMPLES // GLOBAL_BATCH
    global_batches = set()
    for world in (1, 2, 4):
        ranks = run_world(world, data, tmp_path)
        assert len(ranks) == world
        for workers in ("0", "2"):
            joined = []
            for epoch in range(EPOCHS):
                per_rank = [rank[workers][epoch] for rank in ranks]
                assert [len(each) for each in per_rank] == [steps] * world
                assert {len(batch) for each in per_rank for batch in each} == {GLOBAL_BATCH // world}
                seen = [sample for each in per_rank for batch in each for sample in batch]
                assert len(seen) == len(set(seen)) == steps * GLOBAL_BATCH == NUM_SAMPLES - 3
                assert set(seen) < set(range(NUM_SAMPLES))
                joined.append([list(chain(*parts)) for parts in zip(*per_rank, strict=True)])
            assert joined[0] != joined[1]
            global_batches.add(str(joined))
    assert len(global_batches) == 1
