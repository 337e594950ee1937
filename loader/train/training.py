"""Helpers for training loops: setup, mean losses per label, even work, context parallelism.

Losses are weighted by labels, since a mean of batch means depends on how samples are batched.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.functional import cross_entropy

from loader.batch.batches import Batch, PadToken, Targets, choose_pad_token, log_pad_token
from loader.batch.boundaries import HostNumber, document_numbers
from loader.dataloader import TokenLoader
from loader.order.hashes import Int64s
from loader.read.chunks import IGNORED
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class TrainingSetup:
    """The settings that ``set_up_training`` made."""

    bf16: bool
    num_threads: int  # of torch in this process
    pad: PadToken
    model_options: Mapping[str, Any]  # for from_pretrained, or a model's configuration

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Return the context manager for the forward pass: bfloat16 if ``bf16``, else no change."""
        device = "cuda" if torch.cuda.is_available() else "cpu"
        return torch.autocast(device, torch.bfloat16, enabled=self.bf16)


def set_up_training(
    loader: TokenLoader | Any, *, bf16: bool = False, tf32: bool = True, num_threads: int | None = None
) -> TrainingSetup:
    """Set threads, precision and padding for this process and its child processes.

    Sets OMP_NUM_THREADS, MKL_NUM_THREADS and TOKENIZERS_PARALLELISM unless they are set. Rank 0 logs the
    settings at INFO. Raises UsageError for ``bf16`` on a GPU without bfloat16.

        setup = set_up_training(loader, bf16=True)
        model = AutoModelForCausalLM.from_pretrained("MODEL", **setup.model_options)
        with setup.autocast():
            loss = model(**batch).loss

    Args:
        loader: a TokenLoader or a transformers tokenizer. The tokenizer then pads to the right.
        bf16: let ``autocast`` compute in bfloat16; weights stay float32.
        tf32: compute float32 matrix products in TF32 on CUDA.
        num_threads: torch's threads in this process. Default: OMP_NUM_THREADS, unless torchrun set it to 1;
            else this process's share of the CPUs, minus one for each worker.
    """
    if bf16 and torch.cuda.is_available() and not torch.cuda.is_bf16_supported():
        raise UsageError(f"{torch.cuda.get_device_name()} has no bfloat16; leave out bf16, keep tf32")
    is_loader = isinstance(loader, TokenLoader)
    tokenizer: Any = loader.tokenizer if is_loader else loader
    pad = choose_pad_token(tokenizer)
    tokenizer.padding_side, tokenizer.pad_token = "right", pad.token
    if not is_loader:  # a loader has already logged it
        log_pad_token(pad, tokenizer.eos_token_id)
    torch.set_float32_matmul_precision("high" if tf32 else "highest")
    if num_threads is None:
        given = os.environ.get("OMP_NUM_THREADS", "")
        is_guess = given == "1" and "TORCHELASTIC_RUN_ID" in os.environ  # torchrun sets it for several ranks
        # Ranks of torchrun see all CPUs of the node; ranks of srun see only their own.
        num_ranks = max(int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)
        num_workers = loader.num_workers if is_loader else 0
        num_threads = max(len(os.sched_getaffinity(0)) // num_ranks - num_workers, 1)
        if given.isdigit() and int(given) and not is_guess:
            num_threads = int(given)
    if num_threads < 1:
        raise UsageError.of_value("num_threads", num_threads, "1 or more")
    torch.set_num_threads(num_threads)
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, str(num_threads))
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # a fork while its threads run may hang
    options = {"attn_implementation": "sdpa"}
    setup = TrainingSetup(bf16=bf16, num_threads=num_threads, pad=pad, model_options=options)
    if not is_loader or loader.process_rank.rank == 0:
        logger.info(f"set up for training: {setup}, tf32={tf32}")
    return setup


class _LossSums:
    """Sums of losses and counts of labels on this rank."""

    def __init__(self, num_means: int, targets: Targets) -> None:
        self._first = int(targets == "same")  # a model that shifts labels ignores the first one of a row
        self._sums = torch.zeros(2, num_means, dtype=torch.float64)

    def _all_means(self) -> list[float]:
        """Return the means over the labels of all ranks; NaN without labels."""
        sums = self._sums.clone()
        if dist.is_available() and dist.is_initialized():
            dist.all_reduce(sums)
        return [loss / count if count else math.nan for loss, count in sums.T.tolist()]


def source_ids(origins: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """Return the source number of each token of a batch: int64[batch, seq].

    ``origins`` is ``batch["origins"]``, int64[documents, 6], and ``shape`` that of the labels. Values in
    padding have no meaning. In the batch, it is moved with the tokens by the functions of this module.
    """
    width = shape[1]
    kept = origins[origins[:, 1] < width]  # without the first label, a row is one place shorter
    first = kept[:, 0] * width + kept[:, 1]
    ends = torch.cat([first[1:], first.new_tensor([shape[0] * width])])
    return kept[:, 2].repeat_interleave(ends - first).reshape(shape)


class LossMean(_LossSums):
    """Sums this rank's batch losses, weighted by their labels; ``mean()`` covers all ranks."""

    def __init__(self, targets: Targets = "same") -> None:
        super().__init__(1, targets)

    @staticmethod
    def of_loader(loader: TokenLoader) -> LossMean:
        """Return a LossMean for the batches of a loader."""
        return LossMean(_targets_of(loader))

    def add(self, loss: torch.Tensor, labels: torch.Tensor) -> None:
        """Add a batch. ``loss`` is the mean over the labels, int64[batch, seq], that are not -100.
        Without such labels, where transformers returns NaN, it adds nothing."""
        num_labels = int((labels[:, self._first :] != IGNORED).sum())
        if num_labels:
            sums = [loss.detach().mean().double() * num_labels, loss.new_tensor(num_labels).double()]
            self._sums = self._sums.to(loss.device) + torch.stack(sums)[:, None]

    def mean(self) -> float:
        """Return the mean over the labels of all ranks, NaN without labels. All ranks must call it."""
        return self._all_means()[0]


class SourceLosses(_LossSums):
    """Sums this rank's losses by source; ``means()`` covers all ranks.

        losses = SourceLosses.of_loader(loader)  # made with origins=True
        origins = batch.pop("origins")
        losses.add(model(**batch).logits, batch["labels"], origins)

    ``targets``: as for the loader. A label counts for the document of the token that predicts it.
    """

    def __init__(self, names: tuple[str, ...], targets: Targets = "same") -> None:
        super().__init__(len(names), targets)
        self.names = names

    @staticmethod
    def of_loader(loader: TokenLoader) -> SourceLosses:
        """Return a SourceLosses for the batches of a loader."""
        return SourceLosses(loader.source_names, _targets_of(loader))

    def add(self, logits: torch.Tensor, labels: torch.Tensor, origins: torch.Tensor) -> None:
        """Add a batch: logits[batch, seq, vocabulary], int64[batch, seq] and int64[documents, 6]."""
        logits, labels = logits[:, : logits.shape[1] - self._first], labels[:, self._first :]
        with torch.no_grad():  # row by row: a float32 copy of all logits may not fit into memory
            losses = [
                cross_entropy(row_logits.float(), row_labels.to(row_logits.device), reduction="none")
                for row_logits, row_labels in zip(logits, labels, strict=True)
            ]
        self.add_losses(torch.stack(losses), labels, source_ids(origins, labels.shape))

    def add_losses(self, losses: torch.Tensor, labels: torch.Tensor, sources: torch.Tensor) -> None:
        """Add losses, labels and ``source_ids``, [batch, seq], at the places that predict the labels."""
        counts = (labels != IGNORED).to(losses.device)
        values = torch.stack([losses.detach().double() * counts, counts.double()]).flatten(1)
        self._sums = self._sums.to(losses.device).index_add(1, sources.to(losses.device).flatten(), values)

    def means(self, *, reset: bool = False) -> dict[str, float]:
        """Return each source's mean loss over the labels of all ranks, NaN without labels. All ranks must
        call it. ``reset``: count from 0 again."""
        means = self._all_means()
        if reset:
            self._sums.zero_()
        return dict(zip(self.names, means, strict=True))


def _targets_of(loader: TokenLoader) -> Targets:
    return "shifted" if loader.step_batches.shifts_targets else "same"


def evaluation_loss(model: Any, loader: TokenLoader) -> float:
    """Return the mean loss over all labels of a validation loader, on all ranks.

    All ranks must call it. It iterates one epoch of ``loader`` in evaluation mode without gradients.
    ``model(**batch).loss`` must be the mean over the labels of a batch. Raises UsageError if the loader has
    ``targets="shifted"`` and the model is of transformers.
    """
    inner = getattr(model, "module", model)  # inside DDP
    inner = inner.get_base_model() if hasattr(inner, "get_base_model") else inner  # inside PEFT
    if loader.step_batches.shifts_targets and type(inner).__module__.startswith("transformers."):
        found = f'a loader with targets="shifted" for {type(inner).__name__}, which shifts labels itself'
        raise UsageError(found=found, expected='targets="same"')
    losses = LossMean.of_loader(loader)
    device, was_training = next(model.parameters()).device, model.training
    model.eval()
    try:
        with torch.no_grad():
            for batch in loader:
                batch.pop("origins", None)
                losses.add(model(**batch.to(device)).loss, batch["labels"])
    finally:
        model.train(was_training)
    return losses.mean()


def deal_rows_evenly(batches: Sequence[Mapping[str, Any]], group: Any = None) -> list[Batch]:
    """Exchange the rows of a step between ranks, so that attention costs about the same on all of them.

    Attention inside documents costs the sum of their squared lengths. The step keeps its rows; the ranks
    distribute them by this cost. Each rank puts its most expensive rows first, so that the n-th batches of
    all ranks cost about the same, too. Returns as many batches, with the same fields and shape.

    Args:
        batches: this rank's batches of one step. Every field is int64[batch, seq], one of them
            ``segment_ids`` or ``position_ids``, on a device that the group's backend can send from.
        group: the data-parallel process group. All its ranks must call this with equally many batches.

    Raises:
        UsageError: a field has another type or shape, or no field says where documents begin.
    """
    shape, names = batches[0]["input_ids"].shape, list(batches[0])
    for name in names:
        value = batches[0][name]
        if not isinstance(value, torch.Tensor) or (value.shape, value.dtype) != (shape, torch.int64):
            expected = f"an int64 tensor of {list(shape)}; of boundaries 'position_ids' or 'segment_ids'"
            raise UsageError(found=f"{name}, which cannot be exchanged by rows", expected=expected)
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    rows = torch.cat([torch.stack([batch[name] for name in names], 1) for batch in batches])
    own_work = []
    for batch in batches:
        numbers = document_numbers(batch) + 1
        lengths = torch.bincount(numbers.flatten())
        lengths[0] = 0  # padding
        own_work.append(lengths[numbers].sum(1))  # each token counts the length of its document
    gathered = [torch.empty(len(rows), dtype=torch.int64, device=rows.device) for _ in range(size)]
    dist.all_gather(gathered, torch.cat(own_work), group=group)
    work = torch.cat(gathered).cpu().numpy()
    # Assign one row per rank at a time, by decreasing work; the first goes to the rank with the least work.
    owners, totals = np.empty(len(work), np.int64), np.zeros(size, np.int64)
    for next_rows in np.argsort(-work, kind="stable").reshape(-1, size):
        ranks = np.argsort(totals, kind="stable")
        owners[next_rows] = ranks
        totals[ranks] += work[next_rows]
    # Each rank sends its rows sorted by owner, so they arrive in the order of their numbers.
    new_owners, own = owners[rank * len(rows) : (rank + 1) * len(rows)], np.flatnonzero(owners == rank)
    num_sent = np.bincount(new_owners, minlength=size).tolist()
    num_received = np.bincount(own // len(rows), minlength=size).tolist()
    received, outgoing = torch.empty_like(rows), rows[np.argsort(new_owners, kind="stable")]
    dist.all_to_all_single(received, outgoing, num_received, num_sent, group=group)
    received = received[np.argsort(-work[own], kind="stable")]
    parts = (part.unbind(1) for part in received.split(shape[0]))
    return [Batch(zip(names, map(torch.Tensor.contiguous, fields), strict=True)) for fields in parts]


_UNSPLIT_FIELDS = ("cu_seqlens", "max_seqlen")  # kernels need the edges of whole documents


def split_for_context_parallel(
    batch: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    by: Literal["row", "document"] = "row",
    pad_documents: bool = True,
) -> dict[str, Any]:
    """Return the part of a batch that one of ``size`` context-parallel ranks computes.

    Each sequence is cut into 2 size parts, and rank r takes part r and part 2 size - 1 - r, which gives all
    ranks the same work under causal attention. The loader must have ``targets="shifted"``.

    Args:
        batch: a batch of the loader, the same on all ranks of the group.
        rank: of this process in the context-parallel group.
        size: number of ranks in that group.
        by: what a sequence is: ``"row"``, for attention that ignores documents, or ``"document"``.
        pad_documents: pad each document to a multiple of 2 size tokens, as ring attention over
            ``cu_seqlens`` needs. False: parts of a document differ by at most a token, and only the last
            document may be padded; for masks made from ``position_ids`` and ``segment_ids``.

    Returns:
        The fields of the batch, split, and ``place_ids``, the places that the tokens had.
        By row, fields are [batch, seq / size]; seq must be a multiple of 2 size. ``place_ids``,
        int64[seq / size], are places in a row. ``cu_seqlens`` are not changed.
        By document, fields are [1, tokens], equally many on all ranks, without the padding of rows.
        ``place_ids``, int64[tokens], are places in the flattened batch, -1 in padding. ``position_ids`` count
        from 0 in each document, ``segment_ids`` number the documents from 1, 0 in padding. ``cu_seqlens`` and
        ``cu_seqlens_padded``, int32[documents + 1], are the edges of whole documents without and with
        padding, ``max_seqlen`` is the greatest length with padding.

    Raises:
        UsageError: a field or a row cannot be split, labels are not shifted, or documents are not known.
    """
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise UsageError("the batch has no input_ids of [batch, seq]; pass a batch of the loader")
    if not 0 <= rank < size:
        raise UsageError(found=f"rank {rank} of {size}", expected="0 <= rank < size")
    if by not in ("row", "document"):
        raise UsageError.of_value("by", by, "'row' or 'document'")
    fields = {name: value for name, value in batch.items() if name not in _UNSPLIT_FIELDS}
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor) or value.shape != ids.shape:
            expected = f"a tensor of {list(ids.shape)}; boundaries other than 'transformers'"
            raise UsageError(found=f"{name}, which cannot be split over ranks", expected=expected)
    if (labels := fields.get("labels")) is not None:
        is_ignored = labels == IGNORED
        if not is_ignored.all() and (is_ignored | (labels == ids)).all():
            found = "labels that equal input_ids, although the next token may be on another rank"
            raise UsageError(found=found, expected='a loader with targets="shifted"')
    if by == "document":
        return _split_documents(batch, fields, rank, size, multiple=2 * size if pad_documents else 1)
    width, num_parts = ids.shape[1], 2 * size
    if width % num_parts:
        found = f"rows of {width} tokens, which {size} ranks would cut into {num_parts} equal parts"
        expected = f"a seq_len, or a pad_to_multiple_of, that is a multiple of {num_parts}; or by='document'"
        raise UsageError(found=found, expected=expected)
    places = torch.from_numpy(_places_of_rank(np.array([width]), rank, size)[1])
    whole = {name: batch[name] for name in _UNSPLIT_FIELDS if name in batch}
    parts = {name: value.index_select(1, places.to(value.device)) for name, value in fields.items()}
    return {"place_ids": places, **whole, **parts}


def _split_documents(
    batch: Mapping[str, Any], fields: Mapping[str, torch.Tensor], rank: int, size: int, multiple: int
) -> dict[str, Any]:
    numbers = document_numbers(batch).flatten().cpu().numpy()
    tokens = np.flatnonzero(numbers >= 0)
    lengths = np.unique(numbers[tokens], return_counts=True)[1]
    padded = -(-lengths // multiple) * multiple
    padded[-1:] += -padded.sum() % size  # equally many tokens for each rank
    edges, padded_edges = (np.cumsum([0, *sizes]) for sizes in (lengths, padded))
    document, positions = _places_of_rank(padded, rank, size)
    is_real = positions < lengths[document]
    places = np.full(len(positions), -1)
    places[is_real] = tokens[(edges[document] + positions)[is_real]]
    made = {
        "place_ids": places,
        "cu_seqlens": edges.astype(np.int32),
        "cu_seqlens_padded": padded_edges.astype(np.int32),
        "position_ids": positions[None],
        "segment_ids": np.where(is_real, document + 1, 0)[None],
    }
    device = batch["input_ids"].device
    part: dict[str, Any] = {name: torch.from_numpy(value).to(device) for name, value in made.items()}
    place_ids = part["place_ids"]
    for name, value in fields.items():
        if name not in part:
            padding = IGNORED if name == "labels" else 0
            part[name] = value.flatten()[place_ids.clamp_min(0)].masked_fill(place_ids < 0, padding)[None]
    return {**part, "max_seqlen": HostNumber(padded.max(initial=0))}


def _places_of_rank(lengths: Int64s, rank: int, size: int) -> tuple[Int64s, Int64s]:
    """Return the sequence number of each of a rank's places, and the places in their sequences.

    A rank gets two of the 2 size equal parts of each sequence: one from the front, one from the end. The rest
    goes to the ranks one place each, beginning after the rank that got the last place of the sequence before.
    So all ranks get equally many places if the lengths sum to a multiple of ``size``.
    """
    part_size, remainder = np.divmod(lengths, 2 * size)
    end = np.cumsum(remainder)
    ranks = np.arange(size)[:, None]
    extra = (end - 1 - ranks) // size - (end - remainder - 1 - ranks) // size  # 0, 1 or 2 places
    sizes = part_size + np.concatenate([extra > 0, (extra > 1)[::-1]])  # [2 size, sequences]
    begins = np.cumsum(sizes, axis=0) - sizes
    own = [rank, 2 * size - 1 - rank]
    part_sizes, begin = sizes[own].T.flatten(), begins[own].T.flatten()
    sequence = np.repeat(np.arange(len(lengths)).repeat(2), part_sizes)
    first = np.cumsum(part_sizes) - part_sizes
    return sequence, np.arange(len(sequence)) + np.repeat(begin - first, part_sizes)
