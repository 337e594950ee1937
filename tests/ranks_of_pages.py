"""Ranks that run examples of docs/training_own_loop.md: context parallelism, and rows dealt by their work.

    python -m tests.ranks_of_pages BATCH DATA OUT

``BATCH`` is what torch saved: it is split over one group of four ranks and two groups of two, and joined
again. Rows of steps of ``DATA`` are dealt on 2 and 4 ranks; each rank writes OUT/WORLD-RANK.pt. torch is
imported once for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from datetime import timedelta
from pathlib import Path
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


class Optimizer:
    """Ends the loop after some steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1

    def zero_grad(self) -> None:
        if self.num_steps == NUM_STEPS:
            raise EOFError


def deal_rows(rank: int, data: str, out: str, world: int) -> None:
    start(rank, world, out)
    options: dict[str, Any] = {"num_workers": 0, "boundaries": "segment_ids", "seed": 3}
    loader = get_llama3_dataloader(data, 2, global_batch_size=ROWS_OF_STEP, **options)
    batches: dict[str, list[Any]] = {"read": [], "got": []}

    def seen() -> Any:
        for batch in loader:
            batches["read"].append(batch)
            yield batch

    class Seen:
        ends_step = property(lambda _: loader.ends_step)
        __iter__ = staticmethod(seen)

    names = {"loader": Seen(), "device": "cpu", "dp_group": dist.group.WORLD, "optimizer": Optimizer()}
    with contextlib.suppress(EOFError):
        exec(example(PAGE, "## Even work", 0), names | {"train": batches["got"].append})
    torch.save(
        {form: [dict(batch) for batch in each] for form, each in batches.items()},
        Path(out, f"{world}-{rank}.pt"),
    )
    end()


if __name__ == "__main__":
    path, data, out = sys.argv[1:]
    start_processes(split_and_join, (path, out), 4, start_method="fork")
    Path(out, "store-4").unlink()
    for world in (2, 4):
        start_processes(deal_rows, (data, out, world), world, start_method="fork")
