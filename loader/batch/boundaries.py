"""Document boundaries of packed rows: the argument that asks for them, and documents numbered by them."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence

import torch

from loader.batch.fields import Boundary, known_boundaries
from shardprep.errors import UsageError

logger = logging.getLogger(__name__)


def boundary_names(boundaries: Boundary | Sequence[Boundary]) -> tuple[str, ...]:
    """Return the names as a tuple. Raises UsageError for an unknown one."""
    if isinstance(boundaries, str) or not isinstance(boundaries, Iterable):
        boundaries = (boundaries,)
    names: tuple[str, ...] = tuple(boundaries)
    known = known_boundaries()
    unknown = [name for name in names if name not in known]
    if unknown:
        raise UsageError(found=f"boundaries={unknown}", expected=f"some of {', '.join(known)}")
    if set(names) == {"position_ids"}:
        problem = "boundaries='position_ids' has no effect on a model that gets an attention_mask or a cache"
        logger.warning(f"{problem}; for model(**batch) of transformers pass boundaries='transformers'")
    return names


def document_numbers(batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
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
