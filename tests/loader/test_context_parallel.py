"""Batches split over ranks of context parallelism, and rows dealt so that attention costs ranks the same."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import HashStore
from torch.nn.functional import cross_entropy

from loader import UsageError, deal_rows_evenly, split_for_context_parallel
from tests.children import run_child
from tests.oracle.forms import DataSets
from tests.ranks_of_pages import work_of
from tests.warm_python import WarmPython
from tests.world import World, open_loader, refuses

FIELDS = ("position_ids", "segment_ids", "cu_seqlens")
FORMS: list[dict[str, Any]] = [{}, {"by": "document"}, {"by": "document", "pad_documents": False}]
ROW = 96
Batch = dict[str, Any]


@pytest.fixture(scope="module")
def made(sets: DataSets, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packed rows of 96 places and the target of the last, of both kinds."""
    root, found = tmp_path_factory.mktemp("made"), {}
    for pack in ("concat", "best_fit"):
        world = World(root / pack, raw_dir=sets["documents"].parent / "raw")
        options: dict[str, Any] = {"record": "packed", "seq_len": ROW + 1, "pack": pack}
        found[pack] = world.make(num_shards=1, max_bad_fraction=1, **options).data_dir
    return found


def batch_of(data: Path, batch_size: int, **options: Any) -> Batch:
    """The batch of the first ten that has the row with the most documents."""
    with open_loader(data, batch_size, **{"targets": "shifted", "boundaries": FIELDS, **options}) as loader:
        return dict(max(islice(loader, 10), key=lambda batch: int(batch["segment_ids"].max())))


@pytest.mark.slow
@pytest.mark.processes
def test_the_pages_examples_join_parts_and_deal_rows_evenly_on_ranks(
    made: dict[str, Path], warm: WarmPython, tmp_path: Path
) -> None:
    batch = batch_of(made["best_fit"], 4)
    batch.pop("max_seqlen")  # torch.load refuses classes
    torch.save(batch, tmp_path / "batch.pt")
    words: list[Any] = ["-m", "tests.ranks_of_pages", tmp_path / "batch.pt", made["concat"], tmp_path]
    told = run_child([warm.python, *words], cwd=tmp_path).stdout.splitlines()
    assert told == [*8 * ["is joined"], *3 * (2 + 4) * ["is even"]]


# What a model makes of parts

VOCABULARY, HEADS, WIDTH = 900, 2, 16
Result = tuple[Tensor, list[Tensor]]  # logits, and gradients of the sum of all losses


class Model(nn.Module):
    """Two layers of attention; bool[queries, keys] says which token sees which."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.tokens = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(512, WIDTH)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, 3 * WIDTH) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)
        self.double()

    def forward(self, fields: Batch, sees: Tensor) -> Result:
        hidden = self.tokens(fields["input_ids"]) + self.positions(fields["position_ids"])
        for layer in self.layers:
            q, k, v = layer(hidden).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
            weights = (q @ k.transpose(-1, -2) * 2).masked_fill(~sees, -torch.inf).softmax(-1)
            hidden = hidden + (weights @ v).transpose(1, 2).flatten(2)
        logits = self.head(hidden)
        loss = cross_entropy(logits.flatten(0, 1), fields["labels"].flatten(), reduction="sum")
        return logits.detach(), list(torch.autograd.grad(loss, list(self.parameters())))


def each_document_alone(model: Model, batch: Batch) -> Result:
    whole = torch.zeros(*batch["input_ids"].shape, VOCABULARY, dtype=torch.float64)
    sums = [torch.zeros_like(each) for each in model.parameters()]
    for row, segments in enumerate(batch["segment_ids"]):
        for number in range(1, int(segments.max()) + 1):
            of_document = segments == number
            fields = {name: batch[name][row, of_document][None] for name in ("input_ids", "labels")}
            size = int(of_document.sum())
            causal = torch.ones(size, size).tril().bool()
            logits, found = model({**fields, "position_ids": torch.arange(size)[None]}, causal)
            whole[row, of_document] = logits[0]
            sums = [total + gradient for total, gradient in zip(sums, found, strict=True)]
    return whole, sums


def kernel_places(padded: Tensor, size: int) -> Tensor:
    """What a ring kernel takes the places of all ranks to be, by the edges of padded sequences alone."""
    local = padded // size
    assert torch.equal(local * size, padded)
    places = []
    for rank in range(size):
        for number, tokens in enumerate(local.diff().tolist()):
            half = tokens // 2
            assert tokens == 2 * half
            head, tail = rank * half, (2 * size - 1 - rank) * half
            at = torch.cat([torch.arange(head, head + half), torch.arange(tail, tail + half)])
            places.append(torch.stack([torch.full_like(at, number), at]))
    return torch.cat(places, 1)


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(("pack", "batch_size"), [("concat", 1), ("best_fit", 4)])
def test_parts_learn_as_documents_alone(made: dict[str, Path], pack: str, batch_size: int, size: int) -> None:
    """Attention crosses ranks by the edges, as a ring kernel has it, and by the positions of the parts."""
    batch, model = batch_of(made[pack], batch_size), Model()
    alone, is_real = each_document_alone(model, batch), batch["segment_ids"] > 0
    rows = torch.tensor([0, ROW])
    crossing = model(batch, torch.ones(ROW, ROW).tril().bool())  # whole rows are split
    assert not torch.allclose(crossing[0][is_real], alone[0][is_real]), "documents change nothing here"
    for form, kernel in ((FORMS[0], "rows"), (FORMS[1], "edges"), (FORMS[1], "parts"), (FORMS[2], "parts")):
        parts = [split_for_context_parallel(batch, rank, size, **form) for rank in range(size)]
        fields = ("input_ids", "labels", "position_ids", "segment_ids", "place_ids")
        joined = {name: torch.cat([part[name] for part in parts], -1) for name in fields}
        if kernel == "parts":
            where = torch.cat([joined["segment_ids"], joined["position_ids"]])
        else:
            where = kernel_places(rows if kernel == "rows" else parts[0]["cu_seqlens_padded"], size)
        (sequence, position), places = where, joined["place_ids"]
        sees = (sequence[:, None] == sequence) & (position[:, None] >= position)
        logits, gradients = model(joined, sees)
        if form:
            found = logits[0, places >= 0]
            torch.testing.assert_close(found, alone[0].flatten(0, 1)[places[places >= 0]])
            torch.testing.assert_close(gradients, alone[1])
        else:
            torch.testing.assert_close(logits, crossing[0][:, places])
            torch.testing.assert_close(gradients, crossing[1])


# Where tokens go


@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("form", FORMS)
def test_each_token_is_on_one_rank_as_it_was(made: dict[str, Path], form: dict[str, Any], size: int) -> None:
    batch = batch_of(made["best_fit"], 4)
    parts = [split_for_context_parallel(batch, rank, size, **form) for rank in range(size)]
    # However documents are told.
    by_edges = {name: batch[name] for name in ("input_ids", "labels", "cu_seqlens", "attention_mask")}
    for rank, part in enumerate(parts):
        other = split_for_context_parallel(by_edges, rank, size, **form)
        assert torch.equal(other["place_ids"], part["place_ids"])
    assert len({part["place_ids"].shape for part in parts}) == 1
    places = torch.cat([part["place_ids"] for part in parts])
    real = places >= 0
    for name, padding in (("input_ids", 0), ("labels", -100), ("position_ids", 0), ("attention_mask", 0)):
        values = torch.cat([part[name] for part in parts], 1)
        if not form:
            assert torch.equal(values, batch[name][:, places]), name
        else:
            assert torch.equal(values[0, real], batch[name].flatten()[places[real]]), name
            assert name == "position_ids" or (values[0, ~real] == padding).all()
    if not form:
        assert sorted(places.tolist()) == [*range(ROW)]
        assert {int(part["place_ids"].sum()) * size for part in parts} == {sum(range(ROW))}, "even attention"
        return
    assert sorted(places[real].tolist()) == batch["segment_ids"].flatten().nonzero().flatten().tolist()
    edges, padded = parts[0]["cu_seqlens"], parts[0]["cu_seqlens_padded"]
    numbers = batch["segment_ids"] + ROW * torch.arange(4)[:, None]
    lengths = numbers[batch["segment_ids"] > 0].unique(return_counts=True)[1]
    assert torch.equal(edges.diff(), lengths)
    assert (len(places), int(parts[0]["max_seqlen"])) == (padded[-1], padded.diff().max())
    if "pad_documents" in form:
        assert (~real).sum() == -lengths.sum() % size
    else:
        assert torch.equal(padded.diff(), -(-lengths // (2 * size)) * 2 * size)


@pytest.mark.parametrize("form", FORMS[1:])
def test_each_document_is_even_work_for_all_ranks(form: dict[str, Any]) -> None:
    """A token sees all before it in its document; whole rows cut in parts would be uneven here."""
    lengths = torch.tensor([8000, 40000, 17, 3, 16001, 3])  # the last is padding
    segments = torch.tensor([1, 2, 3, 4, 5, 0]).repeat_interleave(lengths)
    ids = torch.arange(1, len(segments) + 1)[None]
    batch = {"input_ids": ids, "labels": ids + 1, "segment_ids": segments[None]}

    def spread(**form: Any) -> float:
        work = []
        for rank in range(4):
            places = split_for_context_parallel(batch, rank, 4, **form)["place_ids"]
            places = places[places >= 0]
            places = places[segments[places] > 0]
            first = torch.searchsorted(segments[:-3], segments[places])
            work.append(float((places - first + 1).sum()))
        return max(work) / min(work)

    assert spread(**form) < 1.002
    assert spread() > 1.2


SAME = torch.arange(16).view(2, 8)
REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # of a batch, and of arguments
    "labels that are not shifted": ({"labels": SAME}, {}),
    "labels that are not shifted, by document": ({"labels": SAME, "segment_ids": SAME}, {"by": "document"}),
    "another form": ({}, {"by": "token"}),
    "nothing that says documents": ({}, {"by": "document"}),
    "rows of another length": ({"input_ids": SAME[:, :6]}, {}),
    "another rank": ({}, {"rank": 2}),
    "numbers": ({"use_cache": False}, {}),
    "lists": ({"input_ids": [1]}, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_batch_that_cannot_be_split_is_refused(name: str) -> None:
    fields, form = REFUSED[name]
    assert split_for_context_parallel({"input_ids": SAME, "labels": SAME + 1}, 0, 2)
    with refuses(UsageError):
        split_for_context_parallel({"input_ids": SAME, **fields}, **{"rank": 0, "size": 2, **form})


# Even work


def test_rows_are_dealt_by_the_squared_lengths_of_their_documents() -> None:
    """Alone, a rank keeps its rows, the most expensive first."""
    segments = torch.tensor([[1, 1, 1, 2, 2, 0, 0, 0], [1, 2, 3, 4, 5, 6, 7, 8], [1] * 8, [0] * 8])
    assert work_of(segments).tolist() == [9 + 4, 8, 64, 0]
    batch = {"input_ids": torch.arange(32).view(4, 8), "segment_ids": segments}
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    try:
        (dealt,) = deal_rows_evenly([batch])
    finally:
        dist.destroy_process_group()
    assert dealt["input_ids"][:, 0].tolist() == [16, 0, 8, 24]
    for fields in ({"cu_seqlens": torch.zeros(3, dtype=torch.int32)}, {}):
        with refuses(UsageError):
            deal_rows_evenly([{"input_ids": batch["input_ids"][:, :4], "labels": SAME, **fields}])
