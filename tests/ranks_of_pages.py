"""Ranks that run examples of docs/training_own_loop.md: context parallelism, and rows dealt by their work.

    python -m tests.ranks_of_pages CASES DATA OUT

``CASES`` is what torch saved: batches by name. Each is split over one group of four ranks and two groups of
two, whose keys a small model gathers; one process says what should come out. Rows of steps of
``DATA`` are dealt on 2 and 4 ranks; each rank writes OUT/WORLD-RANK.pt. torch is imported once for all.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import start_processes
from torch.nn.functional import cross_entropy

from loader import get_llama3_dataloader, split_for_context_parallel
from loader.boundaries import sdpa_mask
from tests.documented import example

PAGE = "training_own_loop.md"
WORLD, VOCABULARY, HEADS, WIDTH = 4, 900, 2, 16
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Model(nn.Module):
    """Two layers of attention; ``attend`` gets q, k and v of [batch, heads, tokens, size]."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, input_ids: Tensor, position_ids: Tensor, attend: Attend) -> Tensor:
        hidden = self.tokens(input_ids) + self.positions(position_ids)
        for layer in self.layers:
            q, k, v = layer(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            hidden = hidden + attend(q, k, v).transpose(1, 2).flatten(2)
        logits: Tensor = self.head(hidden)
        return logits


def attend_to(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """Attention of ``q`` to keys and values that bool[queries, keys] says: which sees which."""
    return (q @ k.transpose(-1, -2) * 2).masked_fill(~sees, -torch.inf).softmax(-1) @ v


class Gather(torch.autograd.Function):
    """The blocks of all ranks of a group; each rank gets the gradients of all for its own."""

    @staticmethod
    def forward(ctx: Any, block: Tensor, group: Any) -> Tensor:
        ctx.group = group
        blocks = [torch.empty_like(block) for _ in range(dist.get_world_size(group))]
        dist.all_gather(blocks, block.contiguous(), group=group)
        return torch.stack(blocks)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].contiguous()
        dist.all_reduce(total, group=ctx.group)
        return total[dist.get_rank(ctx.group)], None


def over_ranks(group: Any, where: list[Tensor]) -> Attend:
    """Attention to the keys of a group; ``where``: of each rank's places int64[2, tokens], sequence and
    position."""
    sequence, position = where[dist.get_rank(group)][:, :, None]
    of_keys, at_keys = torch.cat(where, 1)
    sees = (sequence == of_keys) & (position >= at_keys)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = Gather.apply(torch.stack([k, v]), group)  # type: ignore[no-untyped-call]
        keys, values = torch.cat([*blocks], -2)
        return attend_to(q, keys, values, sees)

    return attend


def kernel_places(padded: Tensor, size: int) -> Iterator[Tensor]:
    """What a ring kernel takes each rank's places to be, by the edges of padded sequences alone."""
    local = padded // size
    assert torch.equal(local * size, padded)
    for rank in range(size):
        parts = []
        for number, tokens in enumerate(local.diff().tolist()):
            half = tokens // 2
            assert tokens == 2 * half
            head, tail = rank * half, (2 * size - 1 - rank) * half
            at = torch.cat([torch.arange(head, head + half), torch.arange(tail, tail + half)])
            parts.append(torch.stack([torch.full_like(at, number), at]))
        yield torch.cat(parts, 1)


def losses(logits: Tensor, labels: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")


def gradients(model: Model, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def one_process(model: Model, batch: dict[str, Any], sees: Tensor) -> tuple[Tensor, list[Tensor]]:
    logits = model(batch["input_ids"], batch["position_ids"], lambda q, k, v: attend_to(q, k, v, sees))
    return logits.detach(), gradients(model, losses(logits, batch["labels"]))


def each_document_alone(model: Model, batch: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    whole = torch.zeros(*batch["input_ids"].shape, VOCABULARY, dtype=torch.float64)
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for row, segments in enumerate(batch["segment_ids"]):
        for number in range(1, int(segments.max()) + 1):
            of_document = segments == number
            size = int(of_document.sum())
            fields = {name: batch[name][row, of_document][None] for name in ("input_ids", "labels")}
            fields["position_ids"] = torch.arange(size)[None]
            logits, found = one_process(model, fields, torch.ones(size, size).tril().bool())
            whole[row, of_document] = logits[0]
            for total, gradient in zip(sums, found, strict=True):
                total += gradient
    return whole, sums


def split_and_joined(
    model: Model, batch: dict[str, Any], group: Any, form: dict[str, Any], kernel: str
) -> tuple[Tensor, list[Tensor]]:
    """Logits and gradients of the whole batch, of what this group's ranks make of their parts."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    names: dict[str, Any] = {"batch": batch, "cp_rank": rank, "cp_size": size, "cp_group": group}
    names |= {"torch": torch, "dist": dist}
    if form == {"by": "document"}:
        exec(example(PAGE, "## Context parallelism", 0), names)
        part: Any = names["part"]
    else:
        part = split_for_context_parallel(batch, rank, size, **form)
    if kernel == "edges":
        where = list(kernel_places(part["cu_seqlens_padded"], size))
    elif kernel == "rows":
        where = list(kernel_places(torch.tensor([0, batch["input_ids"].shape[1]]), size))
    else:
        own = torch.stack([part["segment_ids"][0], part["position_ids"][0]])
        where = [torch.empty_like(own) for _ in range(size)]
        dist.all_gather(where, own, group=group)
    logits = model(part["input_ids"], part["position_ids"], over_ranks(group, where))
    found = gradients(model, losses(logits, part["labels"]))
    for gradient in found:
        dist.all_reduce(gradient, group=group)
    if kernel == "rows":
        parts: list[Any] = [None] * size
        dist.all_gather_object(parts, (part["place_ids"], logits.detach()), group=group)
        order = torch.cat([places for places, _ in parts]).argsort()
        return torch.cat([each for _, each in parts], 1)[:, order], found
    names |= {"part": part, "logits": logits.detach()}
    exec(example(PAGE, "## Context parallelism", 1), names)
    whole: Any = names["whole"]
    return whole, found


def start(rank: int, world: int, store: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=600)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world, timeout=limit)


def end() -> None:
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)


def split_batches(rank: int, cases: str, out: str) -> None:
    start(rank, WORLD, f"{out}/store")
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    groups = [pairs[rank // 2], dist.group.WORLD]
    model = Model()
    for name, batch in torch.load(cases).items():
        is_real = batch["segment_ids"] > 0
        alone = each_document_alone(model, batch)
        masked = one_process(model, batch, sdpa_mask(batch))
        torch.testing.assert_close(masked[1], alone[1])
        torch.testing.assert_close(masked[0][is_real], alone[0][is_real])
        width = batch["input_ids"].shape[1]
        crossing = one_process(model, batch, torch.ones(width, width).tril().bool())
        assert not torch.allclose(crossing[0][is_real], alone[0][is_real]), "documents change nothing here"
        for group in groups:
            for form, kernel in (
                ({"by": "document"}, "edges"),
                ({"by": "document"}, "positions"),
                ({"by": "document", "pad_documents": False}, "positions"),
            ):
                logits, found = split_and_joined(model, batch, group, form, kernel)
                torch.testing.assert_close(logits[is_real], alone[0][is_real])
                torch.testing.assert_close(found, alone[1])
            logits, found = split_and_joined(model, batch, group, {}, "rows")
            torch.testing.assert_close(logits, crossing[0])
            torch.testing.assert_close(found, crossing[1])
        if rank == 0:
            print(name, "is equal", flush=True)
    end()


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


def deal_rows(rank: int, data: str, out: str, world: int) -> None:
    start(rank, world, f"{out}/store-{world}")
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
    cases, data, out = sys.argv[1:]
    start_processes(split_batches, (cases, out), WORLD, start_method="fork")
    for world in (2, 4):
        start_processes(deal_rows, (data, out, world), world, start_method="fork")
