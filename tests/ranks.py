"""Run loaders and examples of docs/training_own_loop.md on ranks of real process groups.

    python -m tests.ranks NUMBERED ROWS OUT

``NUMBERED`` is a folder of numbered tars, ``ROWS`` a packed data set. Rank r of a run writes OUT/RUN-r.pt.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import sys
from collections.abc import Sequence
from datetime import timedelta
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes

from loader import SourceLosses, UsageError, source_ids
from tests.children import free_port
from tests.documented import example
from tests.world import open_loader

PAGE = "training_own_loop.md"
STEPS, STOP = 13, 17  # an epoch has 107 samples, so 13 global batches of 8; STOP is in the second epoch
NUM_STEPS, ROWS_OF_STEP = 3, 16  # of packed rows
Run = dict[str, Any]  # name, function of a rank ("how"), number of ranks ("world"), and its arguments


class Seen:
    """Results of the ranks of all runs."""

    def __init__(self, out: Path) -> None:
        self.out = out

    def __getitem__(self, name: str) -> list[Any]:
        """Return the results of a run by rank. If a rank failed, fail with the output of all ranks."""
        logs = sorted(self.out.glob(f"{name}-?.log"))
        for error in self.out.glob(f"{name}.error"):
            raise AssertionError("\n--- next rank\n".join(path.read_text() for path in [error, *logs]))
        assert logs, f"no rank of {name} started"
        return [torch.load(path.with_suffix(".pt")) for path in logs]


def start_ranks(runs: Sequence[Run], out: Path) -> None:
    """Execute the runs one after the other; the ranks of each are forks of this process.

    The ranks are in a process group. If a run ``is_launched``, they get a launcher's variables and create it.
    """
    for run in runs:
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        try:
            start_processes(_rank, (run, out), run["world"], start_method="fork")
        except Exception as error:  # a rank's
            (out / f"{run['name']}.error").write_text(str(error))


def _rank(rank: int, run: Run, out: Path) -> None:
    with Path(out, f"{run['name']}-{rank}.log").open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    torch.set_num_threads(1)
    if run.get("is_launched"):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(run["world"]), "LOCAL_RANK": str(rank)}
    else:
        store, limit = f"file://{out}/store of {run['name']}", timedelta(seconds=600)
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=run["world"], timeout=limit)
    torch.save(run["how"](rank, run, out), out / f"{run['name']}-{rank}.pt")
    if dist.is_initialized():
        dist.barrier()
        dist.destroy_process_group()


def global_batches(_: int, run: Run, out: Path) -> Any:
    multiprocessing.set_start_method(run["method"], force=True)
    options = {"model_id": run["data"], "num_workers": run["workers"], "seed": 5}
    loader = open_loader(run["data"], 8 // run["world"], **options)
    assert loader.process_rank.source == "torch.distributed", loader.process_rank
    if "after" in run:
        loader.load_state_dict(Seen(out)[run["after"]][0]["state"])
    parts = []
    while loader.num_steps_delivered < run["last"]:
        for batch in loader:
            dist.all_reduce(torch.ones(1))  # hangs until the time limit if ranks get unequal batches
            parts.append(batch["input_ids"][:, 0].tolist())
            if loader.num_steps_delivered == run["last"]:
                break
    loader.close()
    return {"parts": parts, "state": loader.state_dict()}


def made_before_the_group(_: int, run: Run, __: Path) -> Any:
    refused = []
    for loader in (run["early"], pickle.loads(pickle.dumps(run["early"]))):  # inherited by fork, by spawn
        try:
            iter(loader)
        except UsageError:
            refused.append(True)
    late = open_loader(run["data"], model_id=run["data"])
    return {"refused": refused, "late": [int(ids[0]) for batch in late for ids in batch["input_ids"]]}


def losses_by_source(_: int, run: Run, __: Path) -> Any:
    sources = {"web": f"{run['data']}/part-00.tar", "code": f"{run['data']}/part-0[12].tar"}
    options: Any = {"weights": {"web": 0.5, "code": 0.5}, "seq_len": 16, "origins": True}
    loader = open_loader(sources, model_id=run["data"], **options)
    losses, kept = SourceLosses.of_loader(loader), []
    for batch in islice(loader, 5):
        values = torch.rand(batch["input_ids"][:, 1:].shape, dtype=torch.float64)
        kept.append((values, batch["labels"][:, 1:], source_ids(batch["origins"], values.shape)))
        losses.add_losses(*kept[-1])
    return {"means": losses.means(), "kept": kept}


def split_and_join(rank: int, run: Run, _: Path) -> Any:
    """Split a batch over two groups of two ranks and one of four, and join it again.

    A token's id and position stand for its logits.
    """
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    options: Any = {"targets": "shifted", "boundaries": ("position_ids", "segment_ids")}
    batch = open_loader(run["rows"], rank=0, world_size=1, **options).peek()
    expected = torch.stack([batch["input_ids"], batch["position_ids"]], -1)
    is_real = batch["segment_ids"] > 0
    for group in (pairs[rank // 2], dist.group.WORLD):
        names: dict[str, Any] = {"batch": batch, "cp_group": group, "dist": dist, "torch": torch}
        names |= {"cp_rank": dist.get_rank(group), "cp_size": dist.get_world_size(group)}
        exec(example(PAGE, "## Context parallelism", 0), names)
        part: Any = names["part"]
        names["logits"] = torch.stack([part["input_ids"], part["position_ids"]], -1)
        exec(example(PAGE, "## Context parallelism", 1), names)
        whole: Any = names["whole"]
        assert torch.equal(whole[is_real], expected[is_real])
    return "joined"


def work_of(segments: torch.Tensor) -> torch.Tensor:
    """Return the sum of the squared document lengths of each row."""
    lengths = torch.stack([(segments == number).sum(-1) for number in range(1, int(segments.max()) + 1)])
    return (lengths**2).sum(0)


def deal_rows(_: int, run: Run, __: Path) -> Any:
    """Check that dealt steps have the loaders' rows, and that their work is more even."""
    options: Any = {"global_batch_size": ROWS_OF_STEP, "boundaries": "segment_ids", "seed": 3}
    loader, again = (open_loader(run["rows"], 2, **options) for _ in range(2))
    num_batches = ROWS_OF_STEP // run["world"] // 2  # of a rank in a step
    read, got = [*islice(again, NUM_STEPS * num_batches)], list[Any]()

    def stop_after_the_last_step() -> None:
        if len(got) == len(read):
            raise EOFError

    optimizer = SimpleNamespace(step=lambda: None, zero_grad=stop_after_the_last_step)
    names = {"loader": loader, "device": "cpu", "dp_group": dist.group.WORLD, "optimizer": optimizer}
    with contextlib.suppress(EOFError):
        exec(example(PAGE, "## Even work", 0), names | {"train": got.append})
    ranks: list[Any] = [None] * run["world"]
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
    return f"even on {len(read)} batches"


GLOBAL_BATCHES: list[Run] = [
    {"name": "as Python 3.14 starts", "world": 2, "workers": 1, "method": "forkserver", "last": STEPS},
    {"name": "workers inherit nothing", "world": 1, "workers": 1, "method": "spawn", "last": STOP},
    {"name": "stopped", "world": 4, "workers": 2, "method": "fork", "last": STOP},
    {"name": "resumed", "world": 8, "workers": 0, "method": "fork", "last": 2 * STEPS, "after": "stopped"},
]
OTHERS: list[Run] = [
    {"name": "made before the group", "world": 2, "how": made_before_the_group},
    {"name": "losses by source", "world": 2, "how": losses_by_source},
    {"name": "context parallelism", "world": 4, "how": split_and_join},
    *({"name": f"even work of {world}", "world": world, "how": deal_rows} for world in (2, 4)),
]


if __name__ == "__main__":
    numbered, rows, out = sys.argv[1:]
    early = open_loader(numbered, model_id=numbered)
    given = {"how": global_batches, "data": numbered, "rows": rows, "early": early}
    start_ranks([given | run for run in (*GLOBAL_BATCHES, *OTHERS)], Path(out))
