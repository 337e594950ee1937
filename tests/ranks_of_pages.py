"""Ranks that run examples of docs/training_own_loop.md: context parallelism, and rows dealt by their work.

    python -m tests.ranks_of_pages BATCH DATA OUT

``BATCH`` is what torch saved: it is split over one group of four ranks and two groups of two, and joined
again. Rows of steps of ``DATA`` are dealt on 2 and 4 ranks. torch is imported once for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from loader import get_llama3_dataloader
from tests.documented import example

PAGE = "training_own_loop.md"
NUM_STEPS, ROWS_OF_STEP = 3, 16


def start(rank: int, world: int, out: str) -> None:
    torch.set_num_threads(1)
    store, limit = f"file://{out}/store-{world}", timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=limit)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def split_and_join(rank: int, path: str, out: str) -> None:
    """What a model gives for a token is told here by its id and its position."""
    start(rank, 4, out)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    batch = torch.load(path)
    for group in (pairs[rank // 2], dist.group.WORLD):
        names: dict[str, Any] = {"batch": batch, "cp_group": group, "dist": dist, "torch": torch}
        names |= {"cp_rank": dist.get_rank(group), "cp_size": dist.get_world_size(group)}
        exec(example(PAGE, "## Context parallelism", 0), names)
        part: Any = names["part"]
        names["logits"] = torch.stack([part["input_ids"], part["position_ids"]], -1)
        exec(example(PAGE, "## Context parallelism", 1), names)
        expected = torch.stack([batch["input_ids"], batch["position_ids"]], -1)
        is_real = batch["segment_ids"] > 0
        whole: Any = names["whole"]
        assert torch.equal(whole[is_real], expected[is_real])
        print("is joined", flush=True)
    end()


def work_of(segments: torch.Tensor) -> torch.Tensor:
    """The sum of the squared lengths of each row's documents."""
    lengths = torch.stack([(segments == number).sum(-1) for number in range(1, int(segments.max()) + 1)])
    return (lengths**2).sum(0)


def deal_rows(rank: int, data: str, out: str, world: int) -> None:
    """Compare the rows of each step, and the work of each batch, with those that the loaders give."""
    start(rank, world, out)
    options: Any = {"global_batch_size": ROWS_OF_STEP, "num_workers": 0, "boundaries": "segment_ids"}
    loader, again = (get_llama3_dataloader(data, 2, seed=3, **options) for _ in range(2))
    num_batches = ROWS_OF_STEP // world // 2  # of a rank in a step
    read, got = [*islice(again, NUM_STEPS * num_batches)], list[Any]()

    def stop_behind_the_last_step() -> None:
        if len(got) == len(read):
            raise EOFError

    optimizer = SimpleNamespace(step=lambda: None, zero_grad=stop_behind_the_last_step)
    names = {"loader": loader, "device": "cpu", "dp_group": dist.group.WORLD, "optimizer": optimizer}
    with contextlib.suppress(EOFError):
        exec(example(PAGE, "## Even work", 0), names | {"train": got.append})
    ranks: list[Any] = [None] * world
    dist.all_gather_object(ranks, [[dict(batch) for batch in each] for each in (read, got)])
    for first in range(0, len(read), num_batches):
        rows, works = [], []
        for form in range(2):
            of_step = [each[form][first : first + num_batches] for each in ranks]
            stacked = [torch.stack([*batch.values()], 1) for each in of_step for batch in each]
            rows.append(sorted(map(str, torch.cat(stacked).tolist())))
            works.append(torch.tensor([[work_of(b["segment_ids"]).sum() for b in each] for each in of_step]))
        assert rows[0] == rows[1]
        assert len({*rows[0]}) == ROWS_OF_STEP
        before, after = works
        assert after.amax(0).sum() < before.amax(0).sum()  # each batch waits for the slowest rank
        assert after.sum(1).max() - after.sum(1).min() < before.sum(1).max() - before.sum(1).min()
        assert (after.diff() <= 0).all()
        print("is even", flush=True)
    end()


if __name__ == "__main__":
    path, data, out = sys.argv[1:]
    start_processes(split_and_join, (path, out), 4, start_method="fork")
    Path(out, "store-4").unlink()
    for world in (2, 4):
        start_processes(deal_rows, (data, out, world), world, start_method="fork")
