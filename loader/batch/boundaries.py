"""The fields of a batch that say where documents begin in packed rows (docs/training_attention.md)."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from loader.order.hashes import Int64s
from loader.read.chunks import Edges
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


class HostNumber(int):
    """A number in a batch. ``to`` returns it unchanged, since kernels need it on the CPU as an int."""

    def to(self, *_: Any, **__: Any) -> HostNumber:
        return self


Boundary = Literal["transformers", "position_ids", "segment_ids", "cu_seqlens"]


def boundary_names(boundaries: Boundary | Sequence[Boundary]) -> tuple[str, ...]:
    """Return the names as a tuple. Raises UsageError for an unknown one."""
    is_one = isinstance(boundaries, str) or not isinstance(boundaries, Iterable)
    names: tuple[Any, ...] = (boundaries,) if is_one else tuple(boundaries)
    unknown = [name for name in names if name not in get_args(Boundary)]
    if unknown:
        raise UsageError(found=f"boundaries={unknown}", expected=f"some of {', '.join(get_args(Boundary))}")
    if set(names) == {"position_ids"}:
        problem = "boundaries='position_ids' has no effect on a model that gets an attention_mask or a cache"
        logger.warning(f"{problem}; for model(**batch) of transformers pass boundaries='transformers'")
    return names


@lru_cache(maxsize=4)
def _places(number: int) -> Int64s:
    """Return 0, 1, ..., ``number`` - 1. The array is cached: do not write to it."""
    return np.arange(number)


def boundary_fields(
    names: tuple[str, ...], edges: Edges, shape: tuple[int, int], lengths: npt.NDArray[Any] | None
) -> dict[str, Any]:
    """Return the fields that ``boundaries=`` names, in 20 us for an (8, 2048) batch.

    ``position_ids``, int64[batch, seq], count from 0 in each document. ``segment_ids``, int64[batch, seq],
    number the documents of each row from 1; padding is 0. ``cu_seqlens``, int32[documents + 1], are the edges
    of documents and of padding in the flattened batch; ``max_seqlen`` is the greatest length, an int. The
    fields of ``"transformers"`` are ``position_ids``, and these edges and lengths by transformers' names.

    Args:
        names: one or several of ``Boundary``.
        edges: where documents, and padding, begin.
        shape: of the batch.
        lengths: tokens of each row; None: all rows are full.
    """
    num_places = shape[0] * shape[1]
    fields: dict[str, Any] = {}
    if "position_ids" in names or "transformers" in names:
        positions = np.repeat(edges.begins, edges.sizes)
        np.subtract(_places(num_places), positions, out=positions)
        fields["position_ids"] = torch.from_numpy(positions.reshape(shape))
    if "segment_ids" in names:
        rows, within = np.divmod(edges.begins, shape[1])
        numbers = np.arange(len(rows))
        numbers -= np.maximum.accumulate(np.where(within == 0, numbers, 0)) - 1  # from 1 in each row
        if lengths is not None:
            numbers[within >= lengths[rows]] = 0
        fields["segment_ids"] = torch.from_numpy(np.repeat(numbers, edges.sizes).reshape(shape))
    if "cu_seqlens" in names or "transformers" in names:
        ends = np.empty(len(edges.begins) + 1, np.int32)
        ends[:-1] = edges.begins
        ends[-1] = num_places
        edge_tensor = torch.from_numpy(ends)
        longest = HostNumber(edges.sizes.max())
        if "cu_seqlens" in names:
            fields |= {"cu_seqlens": edge_tensor, "max_seqlen": longest}
        if "transformers" in names:
            fields |= {"cu_seq_lens_q": edge_tensor, "cu_seq_lens_k": edge_tensor}
            fields |= {"max_length_q": longest, "max_length_k": longest, "use_cache": HostNumber(0)}
    return fields


def document_numbers(batch: Mapping[str, Any]) -> torch.Tensor:
    """Number the documents of the whole batch from 0: int64[batch, seq]. Known padding is -1."""
    starts = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    segments = batch.get("segment_ids")
    positions = batch.get("position_ids")
    edges = batch.get("cu_seqlens", batch.get("cu_seq_lens_q"))
    if segments is not None:
        starts[:, 1:] = segments.diff() != 0
    elif positions is not None:
        starts |= positions == 0
    elif edges is not None:
        starts.view(-1)[edges[:-1].long()] = True
    else:
        expected = "segment_ids, position_ids or cu_seqlens; make the loader with boundaries="
        raise UsageError(found=f"a batch of {sorted(batch)}", expected=expected)
    starts[:, 0] = True
    numbers = starts.view(-1).cumsum(0).view(starts.shape) - 1
    mask = batch.get("attention_mask") if segments is None else segments
    if isinstance(mask, torch.Tensor) and mask.ndim == 2:
        return numbers.masked_fill(mask == 0, -1)
    return numbers
