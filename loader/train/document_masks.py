"""Masks that keep attention inside the documents of packed rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardprep.errors import UsageError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from torch.utils.hooks import RemovableHandle


def sdpa_mask(batch: Mapping[str, torch.Tensor], *, window: int | None = None) -> torch.Tensor:
    """Return the causal mask inside documents, bool[batch, 1, seq, seq]: True where a query sees a key.

    For a model of your own and a batch with ``segment_ids``. The mask is on the batch's device and takes
    batch x seq x seq bytes. ``window``: how many tokens a token sees, itself included. Raises UsageError
    without segment_ids. For transformers models call ``mask_documents`` instead: they use a given mask
    unchanged, without the windows of their layers.
    """
    sees = _mask_function(batch, window)
    rows, seq_len = batch["segment_ids"].shape
    places = torch.arange(seq_len, device=batch["segment_ids"].device)
    row = torch.arange(rows, device=places.device)[:, None, None, None]
    return sees(row, row, places[:, None], places)


def block_mask(batch: Mapping[str, torch.Tensor], *, window: int | None = None) -> BlockMask:
    """Return the mask of ``sdpa_mask`` as a BlockMask for ``flex_attention``.

    It takes a few bytes per 128 x 128 places. Raises UsageError without segment_ids.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    sees = _mask_function(batch, window)
    segments = batch["segment_ids"]
    num_rows, seq_len = segments.shape
    return create_block_mask(sees, num_rows, None, seq_len, seq_len, device=str(segments.device))


def _mask_function(batch: Mapping[str, torch.Tensor], window: int | None) -> Callable[..., torch.Tensor]:
    segments = batch.get("segment_ids")
    if not isinstance(segments, torch.Tensor):
        expected = 'segment_ids; make the loader with boundaries="segment_ids"'
        raise UsageError(found=f"a batch of {sorted(batch)}", expected=expected)

    def sees(row: torch.Tensor, _: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        inside = (query >= key) & (segments[row, query] == segments[row, key])
        return inside if window is None else inside & (query - key < window)

    return sees


def mask_documents(model: Any) -> RemovableHandle:
    """Add the masks of packed rows to the calls of a transformers model that does not make them itself.

    Call it once before training, for the families that docs/training_checks.md lists (gpt_oss, opt ...):

        mask_documents(model)
        loss = model(**batch).loss  # a batch with boundaries="transformers"

    A call with ``position_ids`` and without ``attention_mask`` then gets the mask that transformers makes for
    other families: one per kind of layer, with its window, in the form that the model's attention needs. That
    is batch x seq x seq values for sdpa and eager, a BlockMask for flex, and nothing for FlashAttention.
    ``check_boundaries`` checks whether it helps: not with layers without attention (Mamba, convolutions).
    Returns a handle whose ``remove()`` undoes it. Raises UsageError for a model of another library.
    """
    model = unwrapped(model)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UsageError(f"the model is a {type(model).__name__}, expected a transformers model")

    def add_mask(
        _: object, args: tuple[object, ...], fields: dict[str, Any]
    ) -> tuple[object, dict[str, Any]]:
        if fields.get("attention_mask") is None and fields.get("position_ids") is not None:
            fields = {**fields, "attention_mask": masks_of_transformers(model, fields["position_ids"])}
        return args, fields

    handle: RemovableHandle = model.register_forward_pre_hook(add_mask, with_kwargs=True)
    return handle


def masks_of_transformers(model: Any, position_ids: torch.Tensor) -> Any:
    """Return transformers' mask for these ``position_ids``, or a dict of masks by kind of layer."""
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    weights = next(model.parameters())
    like = torch.empty(*position_ids.shape, 0, dtype=weights.dtype, device=position_ids.device)
    return make(model.config.get_text_config(), like, None, None, position_ids=position_ids)


def unwrapped(model: Callable[..., object]) -> Any:
    """Return the model inside DistributedDataParallel, FSDP, DeepSpeed's engine or torch.compile."""
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), torch.nn.Module):
        model = inner
    return model
