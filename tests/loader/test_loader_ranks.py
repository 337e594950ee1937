"""Real process groups: equal batches per rank, each sample once, the same global batches everywhere."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.children import run_child
from tests.external_tars import write_numbered_data

NUM_SAMPLES, GLOBAL_BATCH = 107, 8
NUM_SHARDS = 3  # fewer than ranks x workers
STEPS = NUM_SAMPLES // GLOBAL_BATCH
STOP = 17  # of 26 steps in two epochs

# The libraries are imported once, then each world is forked. No RANK or WORLD_SIZE is set, so the process
# group alone tells the ranks, and spawned workers know nothing of it.
SCRIPT = """
import datetime, hashlib, json, multiprocessing, sys
import torch
import torch.distributed as dist
from loader import get_llama3_dataloader

torch.set_num_threads(1)
DATA, OUT = sys.argv[1:3]

def rank_of_a_world(rank, world, name, workers, method, first, last, state, options):
    limit = datetime.timedelta(seconds=600)
    dist.init_process_group(
        "gloo", init_method=f"file://{OUT}/store-{name}", rank=rank, world_size=world, timeout=limit
    )
    multiprocessing.set_start_method(method or "fork", force=True)
    loader = get_llama3_dataloader(
        DATA, 8 // world, DATA, num_workers=workers, seed=5, **options
    )
    assert loader.process_rank.source == "torch.distributed", loader.process_rank
    if state:
        loader.load_state_dict(state)
    parts, step = [], first
    while step < last:
        for batch in loader:
            dist.all_reduce(torch.ones(1))  # hangs, and fails after the limit, where ranks are uneven
            pairs = zip(batch["input_ids"], batch["attention_mask"])
            parts.append([ids[:mask.sum()].tolist() for ids, mask in pairs])
            step += 1
            if step == last:
                break
    saved = loader.state_dict()
    loader.close()
    everyone = [None] * world
    dist.all_gather_object(everyone, (parts, saved))
    if rank == 0:
        steps = [[ids for part in step for ids in part] for step in zip(*(each[0] for each in everyone))]
        digests = [hashlib.sha256(json.dumps(step).encode()).hexdigest() for step in steps]
        with open(f"{OUT}/{name}.json", "w") as file:
            json.dump({"digests": digests, "steps": steps, "states": [each[1] for each in everyone]}, file)
    dist.destroy_process_group()

def main():
    from transformers import AutoTokenizer

    AutoTokenizer.from_pretrained(DATA)  # else each rank would import what it takes: 3 s
    fork = multiprocessing.get_context("fork")
    for run in json.loads(sys.argv[3]):
        state = None
        if run["after"]:
            with open(f"{OUT}/{run['after']}.json") as file:
                state = json.load(file)["states"][0]
        rest = [run[key] for key in ("world", "name", "workers", "method", "first", "last")]
        ranks = [
            fork.Process(target=rank_of_a_world, args=(rank, *rest, state, run["options"]))
            for rank in range(run["world"])
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        assert [process.exitcode for process in ranks] == [0] * run["world"], run

if __name__ == "__main__":
    main()
"""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tars by webdataset, a sample's first id its number, with the tokenizer beside them."""
    return write_numbered_data(tmp_path_factory.mktemp("data"), NUM_SAMPLES, NUM_SHARDS)


def run_of(name: str, world: int, workers: int = 0, method: str | None = None, **more: Any) -> dict[str, Any]:
    run = {"first": 0, "last": 2 * STEPS, "after": "", "options": {}, **more}
    return {"name": name, "world": world, "workers": workers, "method": method, **run}


def lone_environ() -> dict[str, str]:
    """The environment, without what launchers set."""
    launchers = ("SLURM_", "OMPI_", "PMI_", "PMIX_")
    environ = {
        name: value
        for name, value in os.environ.items()
        if name not in {"RANK", "WORLD_SIZE"} and not name.startswith(launchers)
    }
    return environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TOKENIZERS_PARALLELISM": "false"}


def run_worlds(data: Path, folder: Path, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """What each run gave: sha256 of every global batch, its samples, and each rank's last state."""
    script = folder / "ranks.py"
    script.write_text(SCRIPT)
    command = [sys.executable, str(script), str(data), str(folder), json.dumps(runs)]
    run_child(command, env=lone_environ())
    return {run["name"]: json.loads((folder / f"{run['name']}.json").read_text()) for run in runs}


@pytest.mark.processes
def test_worlds_of_1_2_4_and_8_get_equal_batches_each_sample_once_and_the_same_global_batches(
    data: Path, tmp_path: Path
) -> None:
    """A run that stops in its second epoch on world 4 goes on alike on 2 and 8, workers or not."""
    runs = [
        run_of("one", 1),
        run_of("two, as Python 3.14 starts workers", 2, 1, "forkserver"),
        run_of("four with workers", 4, 2, "fork"),
        run_of("eight", 8),
        run_of("stopped on four", 4, 1, "fork", last=STOP),
        run_of("resumed on two", 2, 2, "fork", first=STOP, after="stopped on four"),
        run_of("resumed on eight", 8, first=STOP, after="stopped on four"),
    ]
    found = run_worlds(data, tmp_path, runs)
    unbroken = found["one"]["digests"]
    assert len(unbroken) == 2 * STEPS
    assert len(set(unbroken)) == 2 * STEPS
    for run in runs:
        assert found[run["name"]]["digests"] == unbroken[run["first"] : run["last"]], run["name"]
        states = found[run["name"]]["states"]
        assert all(state == states[0] for state in states), "every rank may save its state, or one for all"
    ends = [{**found[name]["states"][0], "layout": None} for name in ("resumed on two", "one")]
    assert ends[0] == ends[1]
    steps = found["eight"]["steps"]
    for first in (0, STEPS):
        seen = [sample[0] for step in steps[first : first + STEPS] for sample in step]
        assert len(seen) == len(set(seen)) == NUM_SAMPLES - 3
        assert set(seen) < set(range(NUM_SAMPLES))


# A loader made where there is one process yet, and handed to ranks, as notebook launchers and mp.spawn do.
EARLY = """
import json, os, sys
import torch.distributed as dist
import torch.multiprocessing as mp
from loader import get_llama3_dataloader
from shardprep.errors import UsageError

DATA, OUT = sys.argv[1:3]

def rank_of_a_world(rank, method, loader):
    dist.init_process_group("gloo", init_method=f"file://{OUT}/store-{method}", rank=rank, world_size=2)
    try:
        said = len(list(loader))
    except UsageError as error:
        said = str(error)
    late = get_llama3_dataloader(DATA, 4, DATA, num_workers=0)
    numbers = [int(ids[0]) for batch in late for ids in batch["input_ids"]]
    with open(f"{OUT}/{method}-{rank}.json", "w") as file:
        json.dump([said, numbers], file)
    dist.destroy_process_group()

if __name__ == "__main__":
    loader = get_llama3_dataloader(DATA, 4, DATA, num_workers=0)
    for method in ("spawn", "fork"):
        mp.start_processes(rank_of_a_world, (method, loader), nprocs=2, start_method=method)
    assert len(list(loader)) == len(loader)  # where it was made, it is right
    os.environ |= {"RANK": "0", "WORLD_SIZE": "2"}
    try:
        iter(loader)
    except UsageError as error:
        print(error)
"""


@pytest.mark.processes
def test_a_loader_made_before_the_process_group_refuses_instead_of_giving_all_ranks_the_same(
    data: Path, tmp_path: Path
) -> None:
    script = tmp_path / "early.py"
    script.write_text(EARLY)
    command = [sys.executable, str(script), str(data), str(tmp_path)]
    done = run_child(command, env=lone_environ())
    assert "this process is rank 0 of 2 (from RANK/WORLD_SIZE)" in done.stdout
    for method in ("spawn", "fork"):
        ranks = [json.loads((tmp_path / f"{method}-{rank}.json").read_text()) for rank in range(2)]
        for rank, (said, _) in enumerate(ranks):
            assert (
                f"made as rank 0 of 1 (from nothing set: one process), but this process is rank {rank}"
                in said
            )
            assert "(from torch.distributed)" in said
            assert "after init_process_group, or pass rank= and world_size=" in said
        assert not set(ranks[0][1]) & set(ranks[1][1])
