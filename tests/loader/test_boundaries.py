"""Attention within documents: in a packed row each document has its own logits, or the model is refused."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import modeling_flash_attention_utils

from loader import UsageError, check_boundaries, mask_documents
from loader.boundaries import block_mask, sdpa_mask
from shardprep.errors import Refused
from tests.attention_families import (
    VERDICTS,
    WINDOW,
    fields_of,
    num_wrong,
    packed_batch,
    small_model,
    verdict,
    verdicts_of_page,
)
from tests.oracle.forms import DataSets
from tests.world import open_loader, refuses

PAGE = verdicts_of_page()
FAMILIES = ["llama", "llama4_text", "gpt_oss", "opt", "bloom", "mamba2", "qwen3_next"]
MASKS = [("sdpa", sdpa_mask), ("flex_attention", block_mask)]


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Two rows of several documents, with the fields of transformers and segment_ids."""
    return packed_batch(tmp_path_factory.mktemp("batch"))


def batch_of(sets: DataSets, *boundaries: str) -> Any:
    """Return a batch of four rows of documents with padding."""
    with open_loader(sets["best_fit"], 4, boundaries=boundaries) as loader:
        return loader.peek()


@pytest.fixture(autouse=True)
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run flex_attention uncompiled: compiling takes half a minute per shape."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"):
        yield


def attend(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None) -> Tensor:
    heads = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(heads, -2), v.repeat_interleave(heads, -2)
    q, k, v = (tensor.transpose(-3, -2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(-3, -2)


@pytest.fixture
def flash_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Run transformers' FlashAttention 2 path with kernels in plain torch, and return their calls."""
    called: list[str] = []
    own = modeling_flash_attention_utils

    def varlen(
        q: Tensor, k: Tensor, v: Tensor,
        cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, max_seqlen_q: int, max_seqlen_k: int,
        dropout_p: float = 0.0, softmax_scale: float | None = None, causal: bool = False,
    ) -> Tensor:  # fmt: skip
        """Replace ``flash_attn_varlen_func``, one sequence after the other: [tokens, heads, size]."""
        called.append("varlen")
        assert cu_seqlens_q.dtype == torch.int32
        assert torch.equal(cu_seqlens_q, cu_seqlens_k)
        sizes = cu_seqlens_q.diff().tolist()
        assert (max(sizes), sum(sizes)) == (max_seqlen_q, len(q))
        assert max_seqlen_k == max_seqlen_q
        parts = zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True)
        return torch.cat([attend(*part, causal, softmax_scale) for part in parts])

    kernels = pytest.fail, varlen, None, own._pad_input, own._unpad_input  # the first ignores documents
    monkeypatch.setattr(own, "_lazy_imports", lambda *args, **options: kernels)
    monkeypatch.setattr(own, "_loaded_implementation", None)
    yield called
    own._loaded_implementation = None


def llama(attention: str) -> Any:
    """Return a small model with this attention, without set_attn_implementation, which needs flash_attn."""
    model = small_model("llama", "eager")
    model.resize_token_embeddings(400)
    model.config._attn_implementation = attention
    return model


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_a_batch_for_transformers_gives_each_document_its_own_logits(
    sets: DataSets, flash_calls: list[str], attention: str
) -> None:
    """For sdpa and eager attention, see the tests of all families below."""
    with open_loader(sets["concat"], 4, boundaries=("transformers", "segment_ids")) as loader:
        each = loader.peek()
    model = llama(attention)
    with torch.no_grad():
        logits = model(**fields_of(each)).logits
    assert {*flash_calls} == ({"varlen"} if attention == "flash_attention_2" else set())
    model.config._attn_implementation = "eager"
    assert num_wrong(model, each, logits) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "mask_of"), MASKS)
def test_a_mask_passes_if_the_model_really_applies_it(sets: DataSets, attention: str, mask_of: Any) -> None:
    each = batch_of(sets, "position_ids", "segment_ids")
    assert each["segment_ids"].amin() == 0 < 2 < each["segment_ids"].amax()
    model, eager = llama(attention), llama("eager")
    masked = {**each, "attention_mask": mask_of(each)}
    assert num_wrong(model, masked) == 0
    check_boundaries(model, masked)
    if attention == "sdpa":  # eager attention adds a boolean mask to its scores, which hides nothing
        with refuses(Refused):
            check_boundaries(eager, masked)
    positions = {"input_ids": each["input_ids"], "position_ids": each["position_ids"], "use_cache": False}
    assert num_wrong(model, {**positions, "segment_ids": each["segment_ids"]}) == 0
    check_boundaries(model, positions)
    with refuses(Refused):  # with a mask, transformers ignores position_ids
        check_boundaries(model, {**positions, "attention_mask": torch.ones_like(each["input_ids"])})
    for field in each.keys() - {"segment_ids"}:
        with refuses(UsageError):
            mask_of({field: each[field]})


# Findings of check_boundaries


@pytest.mark.slow
@pytest.mark.parametrize("family", PAGE if os.environ.get("FAMILIES") == "all" else FAMILIES)
def test_a_family_keeps_documents_apart_as_the_training_page_says(batch: Any, family: str) -> None:
    """By comparing logits, and by check_boundaries. FAMILIES=all tests the whole page."""
    assert verdict(family, batch) == PAGE[family]


def test_the_training_page_has_at_least_forty_families_and_each_verdict() -> None:
    assert {PAGE[family] for family in FAMILIES} == set(VERDICTS)
    assert len(PAGE) >= 40


class LeakyModel(nn.Module):
    """A causal model of one layer, in which ``number`` numbers the documents, and ``mix`` mixes tokens.

    ``number``: segments, int64[batch, seq] from 1 in each row -> the segments that the model uses.
    ``mix``: tokens, float32[batch, seq, size], and places in documents -> what is added to the tokens.
    """

    def __init__(self, number: Any = None, mix: Any = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.number, self.mix = number, mix
        self.embedding, self.head = nn.Embedding(400, 16), nn.Linear(16, 400)

    def forward(self, input_ids: Tensor, position_ids: Tensor, **_: Any) -> Tensor:
        segments = (position_ids == 0).cumsum(1)
        if self.number is not None:
            segments = self.number(segments)
        tokens = self.embedding(input_ids)
        if self.mix is not None:
            tokens = tokens + self.mix(tokens, position_ids)
        sees = (segments[:, :, None] == segments[:, None, :]).tril().float()
        logits: Tensor = self.head(tokens + sees @ tokens / sees.sum(-1, keepdim=True))
        return logits


def row_of(lengths: list[int], num_rows: int = 1) -> Any:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 400, (num_rows, sum(lengths)), generator=generator)
    positions = torch.cat([torch.arange(length) for length in lengths])
    return {"input_ids": ids, "position_ids": positions.expand(num_rows, -1).contiguous()}


def only(place: int) -> Any:
    """Add the last earlier token at this place of a document to each token after it, across documents."""

    def mix(tokens: Tensor, positions: Tensor) -> Tensor:
        last = torch.where(positions == place, torch.arange(positions.shape[1]), -1).cummax(1).values
        earlier = last.roll(1, 1)
        earlier[:, 0] = -1
        found = tokens.gather(1, earlier.clamp_min(0)[..., None].expand_as(tokens))
        return found * (earlier >= 0)[..., None]

    return mix


def of_row_above(tokens: Tensor, _: Tensor) -> Tensor:
    return torch.cat([torch.zeros_like(tokens[:1]), tokens[:-1]])


SHORT = [7, 9, 12, 8, 3, 4, 2, 6, 5]
# Lengths of documents, number of rows, and the leak.
BROKEN: dict[str, tuple[list[int], int, Any, Any]] = {
    **{f"modulo {n}": (SHORT, 1, lambda s, n=n: s % n, None) for n in range(1, 9)},
    **{f"{n} before": (SHORT, 1, lambda s, n=n: torch.where(s == n + 1, 1, s), None) for n in range(1, 9)},
    **{f"divided by {n}": (SHORT, 2, lambda s, n=n: s // n, None) for n in (2, 3, 4)},
    **{f"at most {n}": (SHORT, 1, lambda s, n=n: s.clamp_max(n), None) for n in (1, 2, 5, 8)},
    **{f"only place {n}": (SHORT, 1, None, only(n)) for n in range(4)},
    "two documents": ([3, 3], 1, lambda s: s * 0, None),
    "two tokens each": ([2] * 6, 1, lambda s: s % 2, None),
    "one long, one of one token": ([20, 1, 1], 1, lambda s: s % 2, None),
    "the row above": (SHORT, 3, None, of_row_above),
    "two rows above": (SHORT, 4, None, lambda t, p: of_row_above(of_row_above(t, p), p)),
    "four rows above": (SHORT, 5, None, lambda t, _: torch.cat([torch.zeros_like(t[:4]), t[:1]])),
    "token shift": (SHORT, 1, None, lambda t, _: t.roll(1, 1)),
    "the mean of the batch": (SHORT, 2, None, lambda t, _: t.mean((0, 1), keepdim=True)),
    "uint8": ([3] * 300, 1, lambda s: s.to(torch.uint8), None),
    "int8": ([3] * 300, 1, lambda s: s.to(torch.int8), None),
    "float16": ([2] * 2100, 1, lambda s: s.to(torch.float16), None),
    "128 before": ([3] * 200, 1, lambda s: s % 128, None),
    "the first and the last": ([3] * 64, 1, lambda s: torch.where(s == 64, 1, s), None),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_leak_between_any_two_documents_is_refused_wherever_they_lie(name: str) -> None:
    lengths, num_rows, number, mix = BROKEN[name]
    each = row_of(lengths, num_rows)
    check_boundaries(LeakyModel(), each)
    with refuses(Refused):
        check_boundaries(LeakyModel(number, mix), each)


def test_advice_names_what_the_batch_or_the_model_lacks() -> None:
    with refuses(UsageError, found="one token"):
        check_boundaries(LeakyModel(), row_of([1, 1, 1]))
    with refuses(UsageError, found="tokens before it"):  # no attention: a token sees itself alone
        check_boundaries(LeakyModel(lambda s: torch.arange(s.shape[1])[None]), row_of([2, 2]))
    model = small_model("llama", "sdpa")
    with refuses(UsageError, found="id 399", remedy="resize_token_embeddings"):
        check_boundaries(model, {**row_of(SHORT), "input_ids": torch.full((1, sum(SHORT)), 399)})
    each = row_of(SHORT)
    each["input_ids"][0, 3] = -100  # padding of labels, in the wrong field
    with refuses(UsageError, found="id -100"):
        check_boundaries(model, each)


class OwnModel(nn.Module):
    """A model whose logits depend on the mean of all tokens that a token sees, with at most one ``leak``.

    Documents are given by ``segment_ids``, or by ``cu_seqlens`` over the flattened batch.
    """

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leak = leak
        self.embedding, self.head = nn.Embedding(400, 16), nn.Linear(16, 400)
        self.dropout = nn.Dropout(0.5)

    def forward(self, input_ids: Tensor, segment_ids: Any = None, cu_seqlens: Any = None, **_: Any) -> Tensor:
        tokens = self.dropout(self.embedding(input_ids))
        if segment_ids is None:
            places = torch.arange(input_ids.numel())
            segment_ids = torch.searchsorted(cu_seqlens, places, right=True).view(input_ids.shape)
        if self.leak == "token shift":
            tokens = tokens + self.embedding(input_ids.roll(1, 1))
        elif self.leak == "no boundary is kept":
            segment_ids = torch.zeros_like(segment_ids)
        elif self.leak == "only the first boundary is kept":
            segment_ids = segment_ids.clamp_max(2)
        elif self.leak == "only the last boundary is kept":
            segment_ids = segment_ids == segment_ids.amax(1, keepdim=True)
        elif self.leak == "the mask of row 0 for all rows":
            segment_ids = segment_ids[:1].expand_as(segment_ids)
        sees = (segment_ids[:, :, None] == segment_ids[:, None, :]).tril().float()
        logits: Tensor = self.head(sees @ tokens / sees.sum(-1, keepdim=True))
        return logits


LEAKS = ("token shift", "no boundary is kept", "only the first boundary is kept",
         "only the last boundary is kept", "the mask of row 0 for all rows")  # fmt: skip


@pytest.mark.parametrize("leak", LEAKS)
def test_a_leak_between_any_two_adjacent_documents_is_refused_with_78(batch: Any, leak: str) -> None:
    assert int(batch["segment_ids"].max()) > 2
    check_boundaries(OwnModel(), batch)
    with pytest.raises(Refused) as raised:
        check_boundaries(OwnModel(leak), batch)
    assert raised.value.exit_code == 78
    for named in ("OwnModel", 'boundaries="transformers"', "mask_documents(model)", "attn_implementation"):
        assert named in str(raised.value)


def test_a_custom_model_is_checked_and_left_unchanged(sets: DataSets) -> None:
    each = batch_of(sets, "cu_seqlens")
    check_boundaries(lambda **fields: SimpleNamespace(logits=OwnModel()(**fields)), each)
    with refuses(Refused):
        check_boundaries(OwnModel("no boundary is kept"), each)
    model = OwnModel().train()
    model.head.eval()
    calls: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda *_: calls.append((model.training, torch.is_grad_enabled())))
    state = torch.get_rng_state()
    check_boundaries(model, each)
    num_passes = len(calls)
    assert calls == [(False, False)] * num_passes
    assert num_passes <= 2 + 2 * math.ceil(math.log2(len(each["cu_seqlens"]) - 1))
    assert (model.training, model.dropout.training, model.head.training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weights.grad is None for weights in model.parameters())
    check_boundaries(lambda **fields: model(**fields), each)  # a function keeps its dropout
    assert calls[num_passes:] == [(True, False)] * num_passes
    assert torch.equal(torch.get_rng_state(), state)

    def noisy(**fields: Any) -> Tensor:
        logits: Tensor = model.eval()(**fields)
        return logits * (1 + 1e-3 * torch.sin(fields["input_ids"].sum()))

    with refuses(Refused):  # noise that depends on other tokens is a leak
        check_boundaries(noisy, each)
    check_boundaries(noisy, each, noise=0.05)


def test_a_batch_or_model_that_cannot_be_checked_is_refused(batch: Any) -> None:
    model = small_model("llama", "sdpa")
    first = int((batch["segment_ids"][0] == 1).sum())
    lonely = {name: batch[name][:1, :first] for name in ("input_ids", "position_ids")}
    with refuses(UsageError, found="two documents"):
        check_boundaries(model, lonely)
    with refuses(UsageError):  # no boundaries
        check_boundaries(model, {"input_ids": batch["input_ids"]})
    with refuses(UsageError):  # no logits
        check_boundaries(lambda **fields: torch.zeros(3), batch)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    with refuses(UsageError, found="tokens before it"):
        check_boundaries(model, batch)


# Windows, and mask_documents


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "attention", "mask_of"),
    [("mistral", *MASKS[0]), ("llama4_text", *MASKS[0]), ("mistral", *MASKS[1])],
)
def test_a_mask_needs_the_models_own_windows(batch: Any, family: str, attention: str, mask_of: Any) -> None:
    model = small_model(family, attention)
    masked = {**batch, "attention_mask": mask_of(batch)}
    assert num_wrong(model, masked), "a mask without windows changes nothing"
    with refuses(Refused):
        check_boundaries(model, masked)
    if family == "mistral":  # llama4's chunks are not windows
        windowed = {**batch, "attention_mask": mask_of(batch, window=WINDOW)}
        assert num_wrong(model, windowed) == 0
        check_boundaries(model, windowed)
    mask_documents(model)
    check_boundaries(model, batch)
    assert num_wrong(model, batch) == 0


@pytest.mark.slow
def test_each_kind_of_layer_gets_the_mask_of_its_name(batch: Any) -> None:
    both = {"full_attention": sdpa_mask(batch), "sliding_attention": sdpa_mask(batch, window=WINDOW)}
    qwen2 = small_model("qwen2", "sdpa")
    assert num_wrong(qwen2, {**batch, "attention_mask": both}) == 0
    check_boundaries(qwen2, {**batch, "attention_mask": both})
    swapped = {"full_attention": both["sliding_attention"], "sliding_attention": both["full_attention"]}
    for wrong in (swapped, both["sliding_attention"]):
        with refuses(Refused):
            check_boundaries(qwen2, {**batch, "attention_mask": wrong})


@pytest.mark.slow
def test_removing_the_handle_of_mask_documents_restores_the_model(batch: Any) -> None:
    model = small_model("gpt_oss", "eager")
    handle = mask_documents(torch.compile(model))
    assert num_wrong(model, batch) == 0
    handle.remove()
    assert num_wrong(model, batch)
    with refuses(UsageError):
        mask_documents(OwnModel())
