"""Document boundaries in packed rows, and whether a model respects them (docs/training_attention.md).

In transformers a 2-D ``attention_mask`` or a cache makes a model ignore ``position_ids``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import combinations
from math import comb
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from loader.order.hashes import Int64s
from loader.read.chunks import Edges
from shardprep.errors import Refused, UsageError

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask
    from torch.utils.hooks import RemovableHandle

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
    if unknown := [name for name in names if name not in get_args(Boundary)]:
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
        ends[:-1], ends[-1] = edges.begins, num_places
        edge_tensor, longest = torch.from_numpy(ends), HostNumber(edges.sizes.max())
        if "cu_seqlens" in names:
            fields |= {"cu_seqlens": edge_tensor, "max_seqlen": longest}
        if "transformers" in names:
            fields |= {"cu_seq_lens_q": edge_tensor, "cu_seq_lens_k": edge_tensor}
            fields |= {"max_length_q": longest, "max_length_k": longest, "use_cache": HostNumber(0)}
    return fields


def sdpa_mask(batch: Mapping[str, Any], *, window: int | None = None) -> torch.Tensor:
    """Return the causal mask inside documents, bool[batch, 1, seq, seq]: True where a query sees a key.

    For a model of your own and a batch with ``segment_ids``. The mask is on the batch's device and takes
    batch x seq x seq bytes. ``window``: how many tokens a token sees, itself included. Raises UsageError
    without segment_ids. For transformers models call ``mask_documents`` instead: they use a given mask
    unchanged, without the windows of their layers.
    """
    sees, (rows, seq_len) = _mask_function(batch, window), batch["segment_ids"].shape
    places = torch.arange(seq_len, device=batch["segment_ids"].device)
    row = torch.arange(rows, device=places.device)[:, None, None, None]
    return sees(row, row, places[:, None], places)


def block_mask(batch: Mapping[str, Any], *, window: int | None = None) -> BlockMask:
    """Return the mask of ``sdpa_mask`` as a BlockMask for ``flex_attention``.

    It takes a few bytes per 128 x 128 places. Raises UsageError without segment_ids.
    """
    from torch.nn.attention.flex_attention import create_block_mask

    sees, segments = _mask_function(batch, window), batch["segment_ids"]
    num_rows, seq_len = segments.shape
    return create_block_mask(sees, num_rows, None, seq_len, seq_len, device=str(segments.device))


def _mask_function(batch: Mapping[str, Any], window: int | None) -> Callable[..., torch.Tensor]:
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

    Call it once before training, for the families that docs/training_attention.md lists (gpt_oss, opt ...):

        mask_documents(model)
        loss = model(**batch).loss  # a batch with boundaries="transformers"

    A call with ``position_ids`` and without ``attention_mask`` then gets the mask that transformers makes for
    other families: one per kind of layer, with its window, in the form that the model's attention needs. That
    is batch x seq x seq values for sdpa and eager, a BlockMask for flex, and nothing for FlashAttention.
    ``check_boundaries`` checks whether it helps: not with layers without attention (Mamba, convolutions).
    Returns a handle whose ``remove()`` undoes it. Raises UsageError for a model of another library.
    """
    model = _unwrapped(model)
    if not hasattr(getattr(model, "config", None), "get_text_config"):
        raise UsageError(f"the model is a {type(model).__name__}, expected a transformers model")

    def add_mask(_: Any, args: tuple[Any, ...], fields: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if fields.get("attention_mask") is None and fields.get("position_ids") is not None:
            fields = {**fields, "attention_mask": _transformers_masks(model, fields["position_ids"])}
        return args, fields

    handle: RemovableHandle = model.register_forward_pre_hook(add_mask, with_kwargs=True)
    return handle


def _transformers_masks(model: Any, position_ids: torch.Tensor) -> Any:
    """Return transformers' mask for these ``position_ids``, or a dict of masks by kind of layer."""
    from transformers.masking_utils import create_masks_for_generate

    make = getattr(model, "create_masks_for_generate", create_masks_for_generate)
    weights = next(model.parameters())
    like = torch.empty(*position_ids.shape, 0, dtype=weights.dtype, device=position_ids.device)
    return make(model.config.get_text_config(), like, None, None, position_ids=position_ids)


def _unwrapped(model: Any) -> Any:
    """Return the model inside DistributedDataParallel, FSDP, DeepSpeed's engine or torch.compile."""
    while isinstance(inner := getattr(model, "module", getattr(model, "_orig_mod", None)), torch.nn.Module):
        model = inner
    return model


# How far logits may move, as a part of their standard deviation. Without a leak they repeat exactly, except
# with experts: if other tokens change, their matrices have other sizes, and bfloat16 rounds by percents.
NOISE, NOISE_OF_EXPERTS = 1e-4, 0.02
_ONE_DOCUMENT = "no row of the batch has two documents; pass another batch, or make longer rows"
_ONE_TOKEN = "each document of the batch has one token, which has none before it; pass another batch"
_NOTHING_BEFORE = "no token's logits depend on the tokens before it; check again after the first steps"


def check_boundaries(model: Any, batch: Mapping[str, Any], *, noise: float | None = None) -> None:
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
    if reason := why_unchecked(model, batch, noise):
        raise UsageError(f"the boundaries could not be checked: {reason}", found=reason)


def why_unchecked(model: Any, batch: Any, noise: float | None = None, documents: Any = None) -> str:
    """Do the work of ``check_boundaries``. Returns why no rank could check anything, or "" after a check.

    ``documents``: the batch with the document boundaries, if ``batch`` has none.
    """
    from torch.nn.attention.flex_attention import BlockMask

    if noise is None:
        parts = model.named_modules() if isinstance(model, torch.nn.Module) else ()
        noise = NOISE_OF_EXPERTS if any("expert" in name for name, _ in parts) else NOISE
    fields = {name: value for name, value in batch.items() if name not in ("labels", "origins")}
    if "input_ids" not in fields:
        raise UsageError(found=f"a batch of {sorted(fields)}", expected="input_ids, by that name")
    ids = fields["input_ids"]
    numbers = document_numbers(batch if documents is None else documents).to(ids.device)
    has_two = bool(((numbers[:, 1:] != numbers[:, :-1]) & (numbers[:, 1:] >= 0)).any())
    is_distributed = dist.is_available() and dist.is_initialized()
    inner = _unwrapped(model)
    is_real = numbers >= 0
    most = torch.stack([numbers.max() + 1, ids.max()])  # documents, and the largest id
    if is_distributed:  # all ranks make equally many passes, or raise together
        dist.all_reduce(most, dist.ReduceOp.MAX)
    num_documents, largest_id = most.tolist()
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
    largest, looks_back, num_changed = 0.0, False, 0
    with _evaluated(model):
        before = _some_logits(model, fields)
        spread = before.std(-1).clamp_min(torch.finfo(before.dtype).tiny)

        def moved_by(**changed: Any) -> torch.Tensor:
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
            moved = moved_by(attention_mask=_transformers_masks(inner, positions))
            num_changed = int((~(moved <= noise))[is_real.to(moved.device)].sum())
    found = before.new_tensor([has_two, has_second, looks_back, has_leak.sum(), largest, num_changed])
    if is_distributed:
        dist.all_reduce(found, dist.ReduceOp.MAX)
    has_several, has_seconds, does_look_back, num_leaks, largest, num_changed = found.tolist()
    name, num_tokens = type(inner).__name__, int(is_real.sum())
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


def _check_vocabulary(model: Any, largest_id: int) -> None:
    """Raise UsageError if the model has no embedding of an id, which torch reports as an IndexError."""
    if not hasattr(model, "get_input_embeddings"):
        return
    num_embeddings = getattr(model.get_input_embeddings(), "num_embeddings", None)
    if isinstance(num_embeddings, int) and largest_id >= num_embeddings:
        remedy = "model.resize_token_embeddings(len(loader.tokenizer))"
        found = f"id {largest_id} in the batch, for a model with {num_embeddings} embeddings"
        expected = f"the model whose tokenizer made the data, or {remedy} before training"
        raise UsageError(found=found, expected=expected, remedy=remedy)


def document_numbers(batch: Mapping[str, Any]) -> torch.Tensor:
    """Number the documents of the whole batch from 0: int64[batch, seq]. Known padding is -1."""
    starts = torch.zeros_like(batch["input_ids"], dtype=torch.bool)
    segments, edges = batch.get("segment_ids"), batch.get("cu_seqlens", batch.get("cu_seq_lens_q"))
    if segments is not None:
        starts[:, 1:] = segments.diff() != 0
    elif (positions := batch.get("position_ids")) is not None:
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


@contextmanager
def _evaluated(model: Any) -> Iterator[None]:
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


def _some_logits(model: Any, batch: Mapping[str, Any]) -> torch.Tensor:
    """Return every n-th logit, float32[batch, seq, at most 1023], since all of them take gigabytes."""
    device = batch["input_ids"].device
    is_cpu = device.type == "cpu"
    with torch.random.fork_rng([] if is_cpu else [device], device_type="cuda" if is_cpu else device.type):
        output = model(**batch)
    logits = getattr(output, "logits", output)
    if not isinstance(logits, torch.Tensor) or logits.shape[:2] != batch["input_ids"].shape:
        advice = "pass a function of the fields that returns them (LoaderMixin: or check_boundaries=False)"
        expected = f"logits of shape {[*batch['input_ids'].shape, 'vocabulary']}; {advice}"
        raise UsageError(found=f"a model that returned {type(output).__name__}", expected=expected)
    return logits[..., :: max(logits.shape[-1] // 512, 1)].to(torch.float32, copy=True)
