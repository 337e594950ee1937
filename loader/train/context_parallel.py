"""The part of a batch that a context-parallel rank computes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import torch

from loader.batch.boundaries import document_numbers
from loader.batch.fields import HostNumber, field_of, moves_by_token
from loader.order.hashes import Int64s
from loader.read.chunks import IGNORED
from shardprep.errors import UsageError


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
    fields = {name: value for name, value in batch.items() if field_of(name).moves != "whole"}
    for name, value in fields.items():
        if not moves_by_token(name, value, ids.shape):
            expected = f"a tensor of {list(ids.shape)}; boundaries other than 'transformers'"
            raise UsageError(found=f"{name}, which cannot be split over ranks", expected=expected)
    labels = fields.get("labels")
    if labels is not None:
        is_ignored = labels == IGNORED
        if not is_ignored.all() and (is_ignored | (labels == ids)).all():
            found = "labels that equal input_ids, although the next token may be on another rank"
            raise UsageError(found=found, expected='a loader with targets="shifted"')
    if by == "document":
        return _split_documents(batch, fields, rank, size, multiple=2 * size if pad_documents else 1)
    width = ids.shape[1]
    num_parts = 2 * size
    if width % num_parts:
        found = f"rows of {width} tokens, which {size} ranks would cut into {num_parts} equal parts"
        expected = f"a seq_len, or a pad_to_multiple_of, that is a multiple of {num_parts}; or by='document'"
        raise UsageError(found=found, expected=expected)
    places = torch.from_numpy(_places_of_rank(np.array([width]), rank, size)[1])
    whole = {name: value for name, value in batch.items() if field_of(name).moves == "whole"}
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
            moved = value.flatten()[place_ids.clamp_min(0)]
            part[name] = moved.masked_fill(place_ids < 0, field_of(name).padding)[None]
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
    part_sizes = sizes[own].T.flatten()
    begin = begins[own].T.flatten()
    sequence = np.repeat(np.arange(len(lengths)).repeat(2), part_sizes)
    first = np.cumsum(part_sizes) - part_sizes
    return sequence, np.arange(len(sequence)) + np.repeat(begin - first, part_sizes)
