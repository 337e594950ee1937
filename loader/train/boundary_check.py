"""Whether a model keeps attention inside the documents of packed rows (docs/training_checks.md).

In transformers a 2-D ``attention_mask`` or a cache makes a model ignore ``position_ids``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import combinations
from math import comb
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from loader.batch.boundaries import document_numbers
from loader.batch.fields import inputs_of
from loader.train.document_masks import masks_of_transformers, unwrapped
from shardprep.errors import Refused, UsageError

Model: TypeAlias = Callable[..., Any]  # a torch module, or a function that returns logits
# How far logits may move, as a part of their standard deviation. Without a leak they repeat exactly, except
# with experts: if other tokens change, their matrices have other sizes, and bfloat16 rounds by percents.
NOISE = 1e-4
NOISE_OF_EXPERTS = 0.02
_ONE_DOCUMENT = "no row of the batch has two documents; pass another batch, or make longer rows"
_ONE_TOKEN = "each document of the batch has one token, which has none before it; pass another batch"
_NOTHING_BEFORE = "no token's logits depend on the tokens before it; check again after the first steps"


def check_boundaries(model: Model, batch: Mapping[str, Any], *, noise: float | None = None) -> None:
    """Raise Refused (exit code 78) if a document of a packed batch changes the logits of another document.

        check_boundaries(model, loader.peek().to(device))

    Each pass changes all tokens of some documents and compares the logits of the others. For any two
    documents of the batch there is a pass that changes the first and not the second, and one the other way
    round, so a leak between any two of them is found, in the same row or not. Another pass checks that
    the model uses earlier tokens at all. The price, once: forward passes without gradients, under the current
    autocast: 8 for 20 documents, 12 for 250, 15 for 1,700. Training mode and random state stay. If the batch
    has a 4-D ``attention_mask`` or a BlockMask, one more compares it with the masks of
    ``mask_documents``. ``loader.trainer.LoaderMixin`` calls this itself.

    It proves nothing about what this batch does not show: a leak below ``noise``, one that only other tokens,
    longer rows or more documents cause, one in training mode alone, and errors without the tokens of another
    document, such as wrong positions. Experts that drop tokens beyond a capacity, and 8-bit products with one
    scale for all tokens, do couple documents. With torch.distributed all ranks must call it, each with its
    batch; all raise if one finds a leak.

    Args:
        model: a transformers model, wrapped (DDP, FSDP, torch.compile) or not, or any function that takes
            the fields of the batch by name and returns logits[batch, seq, vocabulary] or an object with them.
        batch: the model's arguments, on its device, with your own mask if you add one; ``labels`` are not
            passed. ``segment_ids``, ``position_ids`` or ``cu_seqlens`` tell the documents apart.
        noise: how far logits may move, as a part of their standard deviation. Default: 0.0001, or 0.02 for a
            model with experts, whose sums are rounded differently when other tokens change.

    Raises:
        Refused: documents leak, or a mask disables windows. The message says how much, and what to do.
        UsageError: no row has two known documents, each document has one token, no token's logits depend on
            earlier tokens, or the batch has ids that the model has no embeddings for.
    """
    reason = why_unchecked(model, batch, noise)
    if reason:
        raise UsageError(f"the boundaries could not be checked: {reason}", found=reason)


def why_unchecked(
    model: Model,
    batch: Mapping[str, Any],
    noise: float | None = None,
    documents: Mapping[str, Any] | None = None,
) -> str:
    """Do the work of ``check_boundaries``. Returns why no rank could check anything, or "" after a check.

    ``documents``: the batch with the document boundaries, if ``batch`` has none.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if noise is None:
        parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        noise = NOISE_OF_EXPERTS if any("expert" in name for name, _ in parts) else NOISE
    fields = inputs_of(batch)
    if "input_ids" not in fields:
        raise UsageError(found=f"a batch of {sorted(fields)}", expected="input_ids, by that name")
    ids = fields["input_ids"]
    if documents is None:
        documents = batch
    # numbers: int64[batch, seq], of documents in the whole batch; padding is -1
    numbers = document_numbers(documents).to(ids.device)
    has_two = bool(((numbers[:, 1:] != numbers[:, :-1]) & (numbers[:, 1:] >= 0)).any())
    is_distributed = dist.is_available() and dist.is_initialized()
    inner = unwrapped(model)
    is_real = numbers >= 0
    most = torch.stack(
        [numbers.max() + 1, ids.max(), -ids.min()]
    )  # documents, and the largest and smallest id
    if is_distributed:  # all ranks make equally many passes, or raise together
        dist.all_reduce(most, dist.ReduceOp.MAX)
    num_documents, largest_id, minus_smallest_id = most.tolist()
    if minus_smallest_id > 0:
        negative = f"id {-minus_smallest_id} in input_ids"
        raise UsageError(found=negative, expected="ids of tokens; only labels have -100")
    _check_vocabulary(inner, largest_id)
    if not has_two and not is_distributed:
        return _ONE_DOCUMENT
    known = ids.unique()
    other_ids = known[(torch.searchsorted(known, ids) + 1) % len(known)]  # each id's successor
    places = torch.arange(numbers.shape[1], device=numbers.device).expand(numbers.shape)
    is_start = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) != 0
    positions = places - torch.where(is_start, places, 0).cummax(1).values  # of tokens in their documents
    is_second = is_real & (positions == 1)
    has_second = bool(is_second.any())
    has_leak = torch.zeros_like(is_real)
    largest = 0.0
    looks_back = False
    num_changed = 0
    with _evaluated(model):
        before = _some_logits(model, fields)
        spread = before.std(-1).clamp_min(torch.finfo(before.dtype).tiny)

        def moved_by(**changed: object) -> torch.Tensor:
            return (_some_logits(model, {**fields, **changed}) - before).abs().amax(-1) / spread

        for changes in _changed_documents(num_documents):
            is_changed = is_real & torch.from_numpy(changes).to(ids.device)[numbers.clamp_min(0)]
            moved = moved_by(input_ids=torch.where(is_changed, other_ids, ids)).to(ids.device)
            is_other = is_real & ~is_changed
            if has_two and is_other.any():
                has_leak |= is_other & ~(moved <= noise)  # NaN has moved, too
                largest = max(largest, float(moved[is_other].amax()))
        # The logits of a second token must move with the first one, if the model uses earlier tokens at all.
        moved = moved_by(input_ids=torch.where(is_real & (positions == 0), other_ids, ids)).to(ids.device)
        looks_back = bool((moved[is_second] > noise).any())
        mask = fields.get("attention_mask")
        has_mask = isinstance(mask, BlockMask | dict) or (isinstance(mask, torch.Tensor) and mask.ndim == 4)
        if has_mask and hasattr(getattr(inner, "config", None), "get_text_config"):
            # A transformers model uses such a mask unchanged.
            moved = moved_by(attention_mask=masks_of_transformers(inner, positions))
            num_changed = int((~(moved <= noise))[is_real.to(moved.device)].sum())
    found = before.new_tensor([has_two, has_second, looks_back, has_leak.sum(), largest, num_changed])
    if is_distributed:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    has_several, has_seconds, does_look_back, num_leaks, largest, num_changed = found.tolist()
    name = type(inner).__name__
    num_tokens = int(is_real.sum())
    remedy = "loader.mask_documents(model)"
    if num_leaks:
        attention = getattr(getattr(inner, "config", None), "_attn_implementation", "of its own")
        raise Refused(
            f"documents of a packed row see each other in {name} (attention {attention}): when others "
            f"changed, logits of {int(num_leaks)} of {num_tokens} tokens moved, by up to {largest:.2%} of "
            'their spread. Make the loader with boundaries="transformers" and pass its batches without an '
            f"attention_mask, or call {remedy} once before training, or choose another attn_implementation. "
            "If none of these helps, leave out seq_len= and boundaries=",
        )
    if num_changed:
        raise Refused(
            f"the attention_mask of the batch is not the one of {name}, whose layers may have windows: with "
            f"the model's mask {int(num_changed)} of {num_tokens} tokens have other logits. Pass batches of "
            f'boundaries="transformers" without a mask, and call {remedy} once before training',
            remedy=remedy,
        )
    if not has_several:
        return _ONE_DOCUMENT
    if not has_seconds:
        return _ONE_TOKEN
    return "" if does_look_back else _NOTHING_BEFORE


def _changed_documents(num_documents: int) -> npt.NDArray[np.bool_]:
    """Return which documents each pass changes: bool[passes, num_documents].

    A document is changed in one half of the passes, each in other ones. So of any two documents, each is
    changed in a pass in which the other one is not.
    """
    num_passes = 2
    while comb(num_passes, num_passes // 2) < num_documents:
        num_passes += 1
    changes = np.zeros((num_passes, num_documents), np.bool_)
    for document, passes in enumerate(combinations(range(num_passes), num_passes // 2)):
        if document == num_documents:
            break
        changes[list(passes), document] = True
    return changes


def _check_vocabulary(model: Model, largest_id: int) -> None:
    """Raise UsageError if the model has no embedding of an id, which torch reports as an IndexError."""
    if not hasattr(model, "get_input_embeddings"):
        return
    num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if isinstance(num_embeddings, int) and largest_id >= num_embeddings:
        remedy = "model.resize_token_embeddings(len(loader.tokenizer))"
        found = f"id {largest_id} in the batch, for a model with {num_embeddings} embeddings"
        expected = f"the model whose tokenizer made the data, or {remedy} before training"
        raise UsageError(found=found, expected=expected, remedy=remedy)


@contextmanager
def _evaluated(model: Model) -> Iterator[None]:
    """Disable gradients and dropout, and restore the training mode of each module at the end."""
    modes = [(part, part.training) for part in model.modules()] if isinstance(model, torch.nn.Module) else []
    try:
        for part, _ in modes:
            part.training = False
        with torch.no_grad():
            yield
    finally:
        for part, mode in modes:
            part.training = mode


def _some_logits(model: Model, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return every n-th logit, float32[batch, seq, at most 1023], since all of them take gigabytes."""
    device = batch["input_ids"].device
    is_cpu = device.type == "cpu"
    devices = [] if is_cpu else [device]
    device_type = "cuda" if is_cpu else device.type
    with torch.random.fork_rng(devices, device_type=device_type):
        output = model(**batch)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.shape[:2] != batch["input_ids"].shape:
        advice = "pass a function of the fields that returns them (LoaderMixin: or check_boundaries=False)"
        expected = f"logits of shape {[*batch['input_ids'].shape, 'vocabulary']}; {advice}"
        raise UsageError(found=f"a model that returned {type(output).__name__}", expected=expected)
    return logits[..., :: max(logits.shape[-1] // 512, 1)].to(torch.float32, copy=True)
