"""Where documents begin in a batch of packed rows, as attention kernels want to know it.

``boundaries="transformers"`` is all that ``model(**batch)`` of a transformers model needs, whatever its
attention (eager, sdpa, flex, FlashAttention) and batch size. The other names are for models and masks of
one's own: a transformers model that is given ``position_ids`` beside an ``attention_mask`` of two
dimensions, or that fills a cache, does not look for documents, and each one then sees those before it.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from loader.chunks import Edges
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

logger = logging.getLogger(__name__)

Boundary = Literal["transformers", "position_ids", "segment_ids", "cu_seqlens"]


def check_boundaries(boundaries: Boundary | Sequence[Boundary]) -> tuple[str, ...]:
    """The names as a tuple. Raises UsageError for an unknown one; warns of one that seldom suffices."""
    names = (boundaries,) if isinstance(boundaries, str) else tuple(boundaries)
    unknown = sorted(set(names) - set(get_args(Boundary)))
    if unknown:
        raise UsageError(f"boundaries has {unknown}, expected some of {', '.join(get_args(Boundary))}")
    if set(names) == {"position_ids"}:
        logger.warning(
            "boundaries='position_ids' alone keeps no document apart where a transformers model gets the "
            "attention_mask, too, or fills a cache; for model(**batch) pass boundaries='transformers'"
        )
    return names


@lru_cache(maxsize=4)
def _places(number: int) -> npt.NDArray[np.int64]:
    """0, 1 .. ``number`` - 1; never written to."""
    return np.arange(number)


def boundary_fields(
    names: tuple[str, ...], edges: Edges, lengths: npt.NDArray[Any] | None
) -> dict[str, torch.Tensor | int]:
    """What ``boundaries=`` asks for, ``lengths``: tokens of rows not all full. 20 us for an (8, 2048) batch.

    ``position_ids`` int64[batch, seq]: count from 0 in each document (padding: likewise).
    ``segment_ids`` int64[batch, seq]: 1, 2, .. in each row, 0 in padding; see ``sdpa_mask`` and
    ``block_mask``. ``cu_seqlens`` int32[documents + 1] over the flattened batch, padding a document of its
    own, and ``max_seqlen`` int: for ``flash_attn_varlen_func``. ``transformers``: ``position_ids``, the
    same edges as ``cu_seq_lens_q``, ``cu_seq_lens_k``, ``max_length_q`` and ``max_length_k``, and
    ``use_cache`` False.
    """
    num_places = edges.shape[0] * edges.shape[1]
    fields: dict[str, torch.Tensor | int] = {}
    if "position_ids" in names or "transformers" in names:
        positions = np.repeat(edges.begins, edges.sizes)
        np.subtract(_places(num_places), positions, out=positions)
        fields["position_ids"] = torch.from_numpy(positions.reshape(edges.shape))
    if "segment_ids" in names:
        segments = np.repeat(_segment_numbers(edges, lengths), edges.sizes)
        fields["segment_ids"] = torch.from_numpy(segments.reshape(edges.shape))
    if "cu_seqlens" in names or "transformers" in names:
        ends = np.empty(len(edges.begins) + 1, np.int32)
        ends[:-1], ends[-1] = edges.begins, num_places
        edge_tensor = torch.from_numpy(ends)
        if "cu_seqlens" in names:
            fields["cu_seqlens"], fields["max_seqlen"] = edge_tensor, edges.longest
        if "transformers" in names:
            fields |= {"cu_seq_lens_q": edge_tensor, "cu_seq_lens_k": edge_tensor}
            fields |= {"max_length_q": edges.longest, "max_length_k": edges.longest, "use_cache": False}
    return fields


def _segment_numbers(edges: Edges, lengths: npt.NDArray[Any] | None) -> npt.NDArray[np.int64]:
    """int64[edges]: the number of each document in its row, from 1; 0 for padding."""
    rows, within = np.divmod(edges.begins, edges.shape[1])
    numbers = np.arange(len(rows))
    numbers -= np.maximum.accumulate(np.where(within == 0, numbers, 0)) - 1
    if lengths is not None:
        numbers[within >= lengths[rows]] = 0
    return numbers


def sdpa_mask(batch: Mapping[str, Any]) -> torch.Tensor:
    """bool[batch, 1, seq, seq]: which places see which, causal and inside of a document.

    Of a batch with ``boundaries="segment_ids"``, on its device; for ``scaled_dot_product_attention``, or
    as the ``attention_mask`` of a transformers model with ``attn_implementation="sdpa"`` (pass
    ``position_ids``, too). Takes batch x seq x seq bytes. Raises UsageError without segment_ids.
    """
    segments = _segments(batch)
    alike = segments[:, None, :, None] == segments[:, None, None, :]
    return alike & torch.ones(alike.shape[-2:], dtype=torch.bool, device=segments.device).tril()


def block_mask(batch: Mapping[str, Any]) -> BlockMask:
    """The same as a BlockMask, for ``flex_attention`` or ``attn_implementation="flex_attention"``.

    Takes a few bytes for each 128 x 128 places. Raises UsageError without segment_ids.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    segments = _segments(batch)
    num_rows, seq_len = segments.shape

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return (query >= key) & (segments[row, query] == segments[row, key])

    return create_block_mask(sees, num_rows, None, seq_len, seq_len, device=str(segments.device))


def _segments(batch: Mapping[str, Any]) -> torch.Tensor:
    segments = batch.get("segment_ids")
    if not isinstance(segments, torch.Tensor):
        raise UsageError(
            f"the batch has {sorted(batch)}, expected segment_ids; make the loader with "
            'boundaries="segment_ids"'
        )
    return segments
