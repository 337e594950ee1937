"""Processes that deal the rows of a step, by the example of docs/training_own_loop.md.

    python -m tests.even_work_ranks DATA OUT WORLD

Each rank writes the rows of each step as it read them, as it got them, and their work.
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
from loader.even_work import attention_work
from tests.documented import example

NUM_STEPS, ROWS_OF_STEP = 3, 16


class Optimizer:
    """Ends the loop after some steps."""

    def __init__(self) -> None:
        self.num_steps = 0

    def step(self) -> None:
        self.num_steps += 1

    def zero_grad(self) -> None:
        if self.num_steps == NUM_STEPS:
            raise EOFError


def main(rank: int, data: str, out: str, world: int) -> None:
    torch.set_num_threads(1)
    store = f"file://{out}/store-{world}"
    dist.init_process_group(
        "gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(minutes=5)
    )
    loader = get_llama3_dataloader(
        data, 2, global_batch_size=ROWS_OF_STEP, num_workers=0, boundaries="segment_ids", seed=3
    )
    read: list[Any] = []
    got: list[Any] = []

    def seen() -> Any:
        for batch in loader:
            read.append(batch)
            yield batch

    class Seen:
        ends_step = property(lambda _: loader.ends_step)
        __iter__ = staticmethod(seen)

    names = {"loader": Seen(), "device": "cpu", "dp_group": dist.group.WORLD, "optimizer": Optimizer()}
    with contextlib.suppress(EOFError):
        exec(example("training_own_loop.md", "## Even work", 0), names | {"train": got.append})
    per_step = ROWS_OF_STEP // world // 2
    steps = [
        {
            form: {
                name: torch.cat([batch[name] for batch in batches[first : first + per_step]])
                for name in read[0]
            }
            | {"work": torch.stack([attention_work(batch) for batch in batches[first : first + per_step]])}
            for form, batches in (("read", read), ("got", got))
        }
        for first in range(0, NUM_STEPS * per_step, per_step)
    ]
    torch.save(steps, Path(out, f"{world}-{rank}.pt"))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


if __name__ == "__main__":
    world = int(sys.argv[3])
    start_processes(main, (sys.argv[1], sys.argv[2], world), world, start_method="fork")
