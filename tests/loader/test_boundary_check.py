"""``check_boundaries`` refuses a model that lets the documents of a packed row see each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import flex_attention

from loader import ShardprepError, UsageError, check_boundaries, get_llama3_dataloader, mask_documents
from loader.boundaries import block_mask, sdpa_mask
from tests.attention_families import (
    SEQ_LEN,
    VERDICTS,
    WINDOW,
    fields_of,
    num_wrong,
    packed_batch,
    small_model,
    verdict_of_all,
    verdicts_of_page,
)

FAMILIES = ["llama", "llama4_text", "gpt_oss", "opt", "bloom", "mamba2", "qwen3_next"]
WINDOWED = ("mistral", "llama4_text")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    packed_batch(folder)
    return folder


@pytest.fixture(scope="module")
def batch(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return packed_batch(tmp_path_factory.mktemp("batch"))


@pytest.fixture(autouse=True)
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own flex_attention, line by line: compiled, a shape takes half a minute."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"):
        yield


def load(folder: Path, *boundaries: Any, **options: Any) -> Any:
    options = {"seq_len": SEQ_LEN, "num_workers": 0, **options}
    return get_llama3_dataloader(folder, 2, folder, boundaries=boundaries, **options)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_keeps_documents_apart_as_the_training_page_says(batch: Any, family: str) -> None:
    """By the logits of each document alone, and by check_boundaries; of all: tests.attention_families."""
    assert verdict_of_all(family, batch) == verdicts_of_page()[family]


def test_the_training_page_has_each_verdict_and_forty_families_at_least() -> None:
    page = verdicts_of_page()
    assert {page[family] for family in FAMILIES} == set(VERDICTS)
    assert len(page) >= 40


def test_a_leak_is_refused_with_exit_code_78_and_the_models_name(batch: Any) -> None:
    with pytest.raises(ShardprepError, match=r"OPTForCausalLM \(attention sdpa\)") as caught:
        check_boundaries(small_model("opt", "sdpa"), batch)
    assert caught.value.exit_code == 78
    for advice in ('boundaries="transformers"', "loader.mask_documents(model)", "attn_implementation"):
        assert advice in str(caught.value)


class MeanOfSeen(nn.Module):
    """A token's logits are those of the mean of all tokens that it sees: right, but for one ``leak``."""

    def __init__(self, leak: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.leak = leak
        self.embedding, self.head = nn.Embedding(200, 16), nn.Linear(16, 200)

    def forward(self, input_ids: torch.Tensor, segment_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        before = input_ids.roll(1, 1)
        tokens = self.embedding(input_ids)
        if self.leak == "token shift":
            tokens = tokens + self.embedding(before)
        elif self.leak == "bigram embedding":
            tokens = self.embedding((before * 31 + input_ids) % 200)
        elif self.leak == "only the first boundary is kept":
            segment_ids = segment_ids.clamp_max(2)
        elif self.leak == "the mask of row 0 for all rows":
            segment_ids = segment_ids[:1].expand_as(segment_ids)
        elif self.leak == "only the last boundary is kept":
            segment_ids = segment_ids == segment_ids.amax(1, keepdim=True)
        sees = (segment_ids[:, :, None] == segment_ids[:, None, :]).tril().float()
        logits: torch.Tensor = self.head(sees @ tokens / sees.sum(-1, keepdim=True))
        return logits


@pytest.mark.parametrize(
    "leak",
    [
        "token shift",
        "bigram embedding",
        "only the first boundary is kept",
        "only the last boundary is kept",
        "the mask of row 0 for all rows",
    ],
)
def test_a_leak_between_any_two_neighbours_is_seen(data: Path, leak: str) -> None:
    batch = load(data, "segment_ids").peek()
    assert int(batch["segment_ids"].max()) > 2
    check_boundaries(MeanOfSeen(), batch)
    with pytest.raises(ShardprepError) as caught:
        check_boundaries(MeanOfSeen(leak), batch)
    assert caught.value.exit_code == 78


def test_position_ids_beside_an_attention_mask_are_refused(data: Path) -> None:
    model = small_model("llama", "sdpa")
    fields = load(data, "position_ids").peek()
    assert fields["attention_mask"].all()
    with pytest.raises(ShardprepError, match="see each other in LlamaForCausalLM"):
        check_boundaries(model, fields)
    del fields["attention_mask"]
    check_boundaries(model, {**fields, "use_cache": False})


@pytest.mark.parametrize(("attention", "mask_of"), [("sdpa", sdpa_mask), ("flex_attention", block_mask)])
def test_masks_of_segment_ids_pass_where_the_model_takes_them_and_are_refused_where_not(
    batch: Any, attention: str, mask_of: Any
) -> None:
    masked = {**fields_of(batch), "attention_mask": mask_of(batch)}
    check_boundaries(small_model("llama", attention), masked)
    if attention == "sdpa":  # eager attention adds a mask of booleans to its scores, and hides nothing
        with pytest.raises(ShardprepError, match=r"see each other in LlamaForCausalLM \(attention eager\)"):
            check_boundaries(small_model("llama", "eager"), masked)


class OwnModel(nn.Module):
    """Knows documents by ``cu_seqlens`` over the flattened batch, or ignores them."""

    def __init__(self, *, looks: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.head = nn.Embedding(200, 16), nn.Linear(16, 200)
        self.dropout = nn.Dropout(0.5)
        self.looks = looks

    def forward(self, input_ids: torch.Tensor, cu_seqlens: torch.Tensor, **_: Any) -> torch.Tensor:
        flat = self.dropout(self.embedding(input_ids).view(-1, 16))
        parts = flat.split(cu_seqlens.diff().tolist()) if self.looks else [flat]
        means = [part.cumsum(0) / torch.arange(1, len(part) + 1)[:, None] for part in parts]
        logits: torch.Tensor = self.head(torch.cat(means)).view(*input_ids.shape, -1)
        return logits


def test_a_model_of_ones_own_with_cu_seqlens_is_checked_like_any_other(data: Path) -> None:
    batch = load(data, "cu_seqlens").peek()
    check_boundaries(OwnModel(), batch)
    check_boundaries(lambda **fields: SimpleNamespace(logits=OwnModel()(**fields)), batch)
    with pytest.raises(ShardprepError, match="OwnModel"):
        check_boundaries(OwnModel(looks=False), batch)


def test_three_forward_passes_leave_modes_gradients_and_random_numbers_as_they_were(data: Path) -> None:
    batch = load(data, "cu_seqlens").peek()
    model = OwnModel().train()
    model.head.eval()
    calls: list[tuple[bool, bool]] = []
    model.register_forward_hook(lambda *_: calls.append((model.training, torch.is_grad_enabled())))
    state = torch.get_rng_state()
    check_boundaries(model, batch)
    assert calls == [(False, False)] * 3
    assert (model.training, model.dropout.training, model.head.training) == (True, True, False)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(weights.grad is None for weights in model.parameters())
    check_boundaries(lambda **fields: model(**fields), batch)  # a function keeps its dropout
    assert calls[3:] == [(True, False)] * 3
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize(("family", "is_safe"), [("mixtral", True), ("gpt_oss", False)])
def test_experts_in_bfloat16_are_judged_as_in_float32(batch: Any, family: str, is_safe: bool) -> None:
    model = small_model(family, "eager").train()
    with torch.autocast("cpu", torch.bfloat16):
        if is_safe:
            check_boundaries(model, batch)
        else:
            with pytest.raises(ShardprepError, match="see each other in GptOssForCausalLM"):
                check_boundaries(model, batch)
    assert model.training


def test_noise_that_other_tokens_make_is_a_leak_unless_it_is_allowed(data: Path) -> None:
    batch, model = load(data, "cu_seqlens").peek(), OwnModel().eval()

    def noisy(**fields: Any) -> torch.Tensor:
        logits: torch.Tensor = model(**fields)
        return logits * (1 + 1e-3 * torch.sin(fields["input_ids"].sum()))

    with pytest.raises(ShardprepError, match="see each other"):
        check_boundaries(noisy, batch)
    check_boundaries(noisy, batch, noise=0.05)


def test_what_cannot_be_checked_says_so_and_never_passes(data: Path, batch: Any) -> None:
    model = small_model("llama", "sdpa")
    short_rows = load(data, "transformers", seq_len=4)
    lonely = next(each for each in short_rows if (each["position_ids"] == torch.arange(4)).all())
    with pytest.raises(UsageError, match="no row of the batch has two documents"):
        check_boundaries(model, lonely)
    with pytest.raises(UsageError, match="expected segment_ids, position_ids or cu_seqlens"):
        check_boundaries(model, load(data).peek())
    with pytest.raises(UsageError, match="expected logits for each of the tokens"):
        check_boundaries(lambda **fields: torch.zeros(3), batch)
    for layer in model.model.layers:
        nn.init.zeros_(layer.self_attn.o_proj.weight)
    with pytest.raises(UsageError, match="do not depend on the tokens before it"):
        check_boundaries(model, batch)


@pytest.mark.slow
@pytest.mark.parametrize("attention", ["sdpa", "flex_attention"])
@pytest.mark.parametrize("family", WINDOWED)
def test_a_mask_made_without_the_models_windows_is_refused(batch: Any, family: str, attention: str) -> None:
    model = small_model(family, attention)
    mask = sdpa_mask(batch) if attention == "sdpa" else block_mask(batch)
    masked = {**batch, "attention_mask": mask}
    assert num_wrong(model, masked), "the mask does no harm"
    with pytest.raises(ShardprepError) as caught:
        check_boundaries(model, masked)
    assert caught.value.remedy == "loader.mask_documents(model)"
    mask_documents(model)
    check_boundaries(model, batch)
    assert num_wrong(model, batch) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("attention", "mask_of"), [("sdpa", sdpa_mask), ("flex_attention", block_mask)])
def test_a_mask_made_with_the_models_window_gives_each_document_its_own_logits(
    batch: Any, attention: str, mask_of: Any
) -> None:
    masked = {**batch, "attention_mask": mask_of(batch, window=WINDOW)}
    mistral = small_model("mistral", attention)
    assert num_wrong(mistral, masked) == 0
    check_boundaries(mistral, masked)
    both = {"full_attention": mask_of(batch), "sliding_attention": mask_of(batch, window=WINDOW)}
    qwen2 = small_model("qwen2", attention)
    assert num_wrong(qwen2, {**batch, "attention_mask": both}) == 0
    check_boundaries(qwen2, {**batch, "attention_mask": both})
    swapped = {"full_attention": both["sliding_attention"], "sliding_attention": both["full_attention"]}
    for wrong in (swapped, both["sliding_attention"]):
        with pytest.raises(ShardprepError) as caught:
            check_boundaries(qwen2, {**batch, "attention_mask": wrong})
        assert caught.value.remedy == "loader.mask_documents(model)"


def test_masks_of_documents_end_when_their_handle_is_removed(batch: Any) -> None:
    model = small_model("gpt_oss", "eager")
    handle = mask_documents(torch.compile(model))
    assert num_wrong(model, batch) == 0
    handle.remove()
    assert num_wrong(model, batch)
    with pytest.raises(UsageError, match="the model is a OwnModel, expected one of transformers"):
        mask_documents(OwnModel())
