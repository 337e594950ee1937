"""Batches for loops that shift nothing themselves, and their split over ranks of context parallelism.

Megatron, nanoGPT and torchtitan give a model ``input_ids`` and compare its output with ``labels`` at the same
place, so rows hold one token more than they give. transformers shifts labels itself: leave ``targets`` out
there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, get_args

import numpy as np
import torch

from loader.chunks import Edges
from shardprep.errors import UsageError

Targets = Literal["same", "shifted"]
_OF_THE_WHOLE = ("cu_seqlens", "max_seqlen")  # a split keeps them: kernels want the edges of the whole rows


def check_targets(targets: str, boundaries: tuple[str, ...], *, has_collate_fn: bool) -> bool:
    """Whether labels are shifted. Raises UsageError where that does not go with the other arguments."""
    if targets not in get_args(Targets):
        raise UsageError(f"targets is {targets!r}, expected {' or '.join(map(repr, get_args(Targets)))}")
    if targets == "shifted" and "transformers" in boundaries:
        raise UsageError(
            "transformers' models shift labels themselves, so targets='shifted' would shift them twice; "
            "leave it out, or take other boundaries than 'transformers'"
        )
    if targets == "shifted" and has_collate_fn:
        raise UsageError("targets='shifted' is for the loader's own batches; leave out collate_fn or it")
    return targets == "shifted"


def shift(fields: dict[str, Any]) -> None:
    """``input_ids`` and mask without the last place, ``labels`` without the first; they stay contiguous."""
    for name in ("input_ids", "attention_mask"):
        fields[name] = fields[name][:, :-1].contiguous()
    fields["labels"] = fields["labels"][:, 1:].contiguous()


def without_last_place(edges: Edges) -> Edges:
    """The edges of the same rows, one place narrower."""
    num_rows, width = edges.shape
    row, within = np.divmod(edges.begins, width)
    kept = within < width - 1
    begins = row[kept] * (width - 1) + within[kept]
    sizes = np.diff(begins, append=num_rows * (width - 1))
    return Edges(begins=begins, sizes=sizes, longest=int(sizes.max()), shape=(num_rows, width - 1))


def split_for_context_parallel(batch: Mapping[str, Any], rank: int, size: int) -> dict[str, Any]:
    """The places of a batch that one of ``size`` ranks of context parallelism computes, in zig-zag order.

    Rows are cut into 2 size equal parts, and rank r takes part r and part 2 size - 1 - r: with causal
    attention all ranks then have the same work, and none of one part alone. All tensors of [batch, seq] are
    split alike, ``position_ids`` and ``segment_ids`` among them; ``cu_seqlens`` and ``max_seqlen`` stay those
    of the whole rows. Labels must be those of ``targets="shifted"``: a model that shifts them itself would
    lose those at the edges of parts. ``place_ids``, int64[seq / size], says where each place stood.

    Raises UsageError where rows cannot be cut so, or a field has another shape.
    """
    ids = batch.get("input_ids") if hasattr(batch, "get") else None
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        raise UsageError("the batch has no input_ids of [batch, seq]; pass what the loader gives")
    if not 0 <= rank < size:
        raise UsageError(f"rank {rank} of {size}: expected 0 <= rank < size")
    width, num_parts = ids.shape[1], 2 * size
    if width % num_parts:
        raise UsageError(
            f"rows of {width} tokens cannot be cut into {num_parts} equal parts for {size} ranks; choose a "
            f"seq_len, or with padding a pad_to_multiple_of, that is a multiple of {num_parts}"
        )
    part = width // num_parts
    first, last = rank * part, (num_parts - 1 - rank) * part
    places = torch.cat([torch.arange(first, first + part), torch.arange(last, last + part)])
    found: dict[str, Any] = {"place_ids": places}
    for name, value in batch.items():
        if name in _OF_THE_WHOLE:
            found[name] = value
        elif isinstance(value, torch.Tensor) and value.shape == ids.shape:
            found[name] = value.index_select(1, places.to(value.device))
        else:
            raise UsageError(
                f"the batch's {name} is no tensor of {list(ids.shape)}, and cannot be split over ranks; of "
                "boundaries take 'position_ids', 'segment_ids' or 'cu_seqlens'"
            )
    return found
