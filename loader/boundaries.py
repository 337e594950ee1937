"""Where documents begin in a batch of packed rows, as attention kernels want to know it."""

from __future__ import annotations

from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch

from preprocess.shard_format import UsageError

Boundary = Literal["position_ids", "segment_ids", "cu_seqlens"]


def check_boundaries(names: tuple[str, ...]) -> None:
    """Raises UsageError for a name that is none."""
    unknown = sorted(set(names) - set(get_args(Boundary)))
    if unknown:
        raise UsageError(f"boundaries has {unknown}, expected some of {', '.join(get_args(Boundary))}")


def document_edges(
    starts: list[npt.NDArray[np.int32]], lengths: npt.NDArray[Any] | None, width: int
) -> npt.NDArray[np.bool_]:
    """bool[rows, width]: where a document, or a row's padding, begins. A row's first place always does."""
    edges = np.zeros((len(starts), width), np.bool_)
    edges[np.repeat(np.arange(len(starts)), list(map(len, starts))), np.concatenate(starts)] = True
    if lengths is not None:
        short = np.flatnonzero(lengths < width)
        edges[short, lengths[short]] = True
    edges[:, 0] = True
    return edges


def boundary_fields(
    names: tuple[str, ...], edges: npt.NDArray[np.bool_], lengths: npt.NDArray[Any] | None
) -> dict[str, torch.Tensor | int]:
    """What ``boundaries=`` asks for. 60 us for an (8, 2048) batch.

    ``position_ids`` int64[batch, seq]: count from 0 in each document (padding: likewise).
    ``segment_ids`` int64[batch, seq]: 1, 2, .. in each row, 0 in padding; a mask for SDPA is where they
    are equal. ``cu_seqlens`` int32[documents + 1] over the flattened batch, padding a document of its
    own, and ``max_seqlen`` int: for ``flash_attn_varlen_func``.
    """
    begins = np.flatnonzero(edges)
    sizes = np.diff(np.append(begins, edges.size))
    fields: dict[str, torch.Tensor | int] = {}
    if "position_ids" in names:
        positions = np.arange(edges.size, dtype=np.int64) - np.repeat(begins, sizes)
        fields["position_ids"] = torch.from_numpy(positions.reshape(edges.shape))
    if "segment_ids" in names:
        segments = np.cumsum(edges, axis=1, dtype=np.int64)
        if lengths is not None:
            segments[np.arange(edges.shape[1]) >= lengths[:, None]] = 0
        fields["segment_ids"] = torch.from_numpy(segments)
    if "cu_seqlens" in names:
        fields["cu_seqlens"] = torch.from_numpy(np.append(begins, edges.size).astype(np.int32))
        fields["max_seqlen"] = int(sizes.max())
    return fields
