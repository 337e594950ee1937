"""The part of a batch that one rank of context parallelism computes (docs/training_own_loop.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from loader.boundaries import HostNumber, document_numbers
from loader.chunks import IGNORED
from loader.order import Int64s
from loader.shards import check_choice
from shardprep.errors import UsageError

_OF_THE_WHOLE = ("cu_seqlens", "max_seqlen")  # kernels want the edges of whole documents


def split_for_context_parallel(
    batch: Mapping[str, Any],
    rank: int,
    size: int,
    *,
    by: Literal["row", "document"] = "row",
    pad_documents: bool = True,
) -> dict[str, Any]:
    """Return the places of a batch that one of ``size`` ranks of context parallelism computes.

    A sequence is cut into 2 size parts, and rank r takes part r and part 2 size - 1 - r: with causal
    attention all ranks have the same work. Labels must be ``targets="shifted"``.

    Args:
        batch: what the loader gives, the same on all ranks of the group.
        rank: of this process in its group of context parallelism.
        size: number of ranks in that group.
        by: ``"row"``: each row is a sequence, of a multiple of 2 size places. ``place_ids``
            int64[seq / size] say where each place stood in its row; ``cu_seqlens`` stay as they are. For
            attention that does not heed documents. ``"document"``: each document is a sequence, and the
            part is one row, [1, tokens], equally long on all ranks, without the padding of rows.
            ``place_ids`` int64[tokens] are places in the flattened batch, -1 in padding;
            ``position_ids`` count in each document, ``segment_ids`` documents in the batch from 1, 0 in
            padding; ``cu_seqlens`` and ``cu_seqlens_padded`` int32[documents + 1] are the edges of whole
            documents without and with padding, ``max_seqlen`` the longest with padding.
        pad_documents: pad each document to a multiple of 2 size, as ring attention over ``cu_seqlens``
            needs. False: parts of a document differ by a token, and only the last one may be padded. For
            masks made of ``position_ids`` and ``segment_ids``.

    Raises:
        UsageError: rows cannot be cut so, the batch does not say where documents begin, or labels are not
            shifted.
    """
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise UsageError("the batch has no input_ids of [batch, seq]; pass what the loader gives")
    if not 0 <= rank < size:
        raise UsageError(found=f"rank {rank} of {size}", expected="0 <= rank < size")
    check_choice("by", by, Literal["row", "document"])
    fields = {name: value for name, value in batch.items() if name not in _OF_THE_WHOLE}
    for name, value in fields.items():
        if not isinstance(value, torch.Tensor) or value.shape != ids.shape:
            raise UsageError(
                f"the batch's {name} is no tensor of {list(ids.shape)}, and cannot be split over ranks; of "
                "boundaries take 'position_ids', 'segment_ids' or 'cu_seqlens'"
            )
    if (labels := fields.get("labels")) is not None:
        is_ignored = labels == IGNORED
        if not is_ignored.all() and (is_ignored | (labels == ids)).all():
            raise UsageError(
                "the labels are the tokens themselves, and what follows a token may be on another rank; make "
                'the loader with targets="shifted"'
            )
    if by == "document":
        return _split_documents(batch, fields, rank, size, multiple=2 * size if pad_documents else 1)
    width, num_parts = ids.shape[1], 2 * size
    if width % num_parts:
        raise UsageError(
            f"rows of {width} tokens cannot be cut into {num_parts} equal parts for {size} ranks; choose a "
            f"seq_len, or with padding a pad_to_multiple_of, that is a multiple of {num_parts}; or pass "
            'by="document"'
        )
    places = torch.from_numpy(_places_of_rank(np.array([width]), rank, size)[1])
    whole = {name: batch[name] for name in _OF_THE_WHOLE if name in batch}
    parts = {name: value.index_select(1, places.to(value.device)) for name, value in fields.items()}
    return {"place_ids": places, **whole, **parts}


def _split_documents(
    batch: Mapping[str, Any], fields: Mapping[str, torch.Tensor], rank: int, size: int, multiple: int
) -> dict[str, Any]:
    numbers = document_numbers(batch).flatten().cpu().numpy()
    tokens = np.flatnonzero(numbers >= 0)
    lengths = np.unique(numbers[tokens], return_counts=True)[1]
    padded = -(-lengths // multiple) * multiple
    padded[-1:] += -padded.sum() % size
    edges, padded_edges = (np.cumsum([0, *sizes]) for sizes in (lengths, padded))
    document, positions = _places_of_rank(padded, rank, size)
    is_real = positions < lengths[document]
    places = np.full(len(positions), -1)
    places[is_real] = tokens[(edges[document] + positions)[is_real]]
    device = batch["input_ids"].device
    part = {
        name: torch.from_numpy(value[None]).to(device)
        for name, value in (("position_ids", positions), ("segment_ids", np.where(is_real, document + 1, 0)))
    }
    place_ids = torch.from_numpy(places).to(device)
    for name, value in fields.items():
        if name not in part:
            padding = IGNORED if name == "labels" else 0
            taken = value.flatten()[place_ids.clamp_min(0)].masked_fill(place_ids < 0, padding)
            part[name] = taken[None]
    return {
        "place_ids": place_ids,
        "cu_seqlens": torch.from_numpy(edges.astype(np.int32)).to(device),
        "cu_seqlens_padded": torch.from_numpy(padded_edges.astype(np.int32)).to(device),
        "max_seqlen": HostNumber(padded.max(initial=0)),
        **part,
    }


def _places_of_rank(lengths: Int64s, rank: int, size: int) -> tuple[Int64s, Int64s]:
    """Return the sequence of each of the rank's places, and its place in it: each head, then each tail.

    All ranks get equally many places if the lengths sum to a multiple of ``size``: what a sequence has over
    2 size equal parts is dealt a place each, on from the rank where the sequence before it stopped.
    """
    each, over = np.divmod(lengths, 2 * size)
    end = np.cumsum(over)
    ranks = np.arange(size)[:, None]
    extra = (end - 1 - ranks) // size - (end - over - 1 - ranks) // size  # 0, 1 or 2 places
    sizes = each + np.concatenate([extra > 0, (extra > 1)[::-1]])  # [2 size, sequences]
    begins = np.cumsum(sizes, axis=0) - sizes
    own = [rank, 2 * size - 1 - rank]
    of_part, begin = sizes[own].T.flatten(), begins[own].T.flatten()
    sequence = np.repeat(np.arange(len(lengths)).repeat(2), of_part)
    first = np.cumsum(of_part) - of_part
    return sequence, np.arange(len(sequence)) + np.repeat(begin - first, of_part)
