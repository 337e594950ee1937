"""A document in a packed row gets the logits that it gets alone, with every kind of attention."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.nn.attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention
from transformers import LlamaConfig, LlamaForCausalLM, modeling_flash_attention_utils

from loader import get_llama3_dataloader
from loader.boundaries import block_mask, sdpa_mask
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.slow

SEQ_LEN = 160  # more than a block of flex_attention, and than most documents


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text in packed rows of both kinds, and as documents."""
    forms: dict[str, dict[str, Any]] = {
        "json": {},
        "concat": {"record": "packed", "seq_len": SEQ_LEN},
        "best_fit": {"record": "packed", "seq_len": SEQ_LEN, "pack": "best_fit"},
    }
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("made"), forms, num_shards=3)


def reference_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """What ``flash_attn_varlen_func`` computes, a sequence after the other: [tokens, heads, size]."""
    assert cu_seqlens_q.dtype == torch.int32
    assert torch.equal(cu_seqlens_q, cu_seqlens_k)
    sizes = cu_seqlens_q.diff()
    assert (int(sizes.max()), int(cu_seqlens_q[-1])) == (max_seqlen_q, len(q))
    assert max_seqlen_k == max_seqlen_q
    parts = [tensor.split(sizes.tolist()) for tensor in (q, k, v)]
    return torch.cat(
        [
            reference(q, k, v, causal, softmax_scale)
            for q, k, v in zip(parts[0], parts[1], parts[2], strict=True)
        ]
    )


def reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float | None
) -> torch.Tensor:
    heads = q.shape[-2] // k.shape[-2]
    k, v = k.repeat_interleave(heads, -2), v.repeat_interleave(heads, -2)
    q, k, v = (tensor.transpose(-3, -2) for tensor in (q, k, v))
    return scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale).transpose(-3, -2)


def reference_flash(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
) -> torch.Tensor:
    """What ``flash_attn_func`` computes: [batch, seq, heads, size]."""
    return reference(q, k, v, causal, softmax_scale)


@pytest.fixture
def flash_kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """transformers' own FlashAttention 2 path with kernels that run anywhere; gives the calls."""
    called: list[str] = []
    own = modeling_flash_attention_utils

    def flash(*args: Any, **options: Any) -> torch.Tensor:
        called.append("flash")
        return reference_flash(*args, **options)

    def varlen(
        q: Any,
        k: Any,
        v: Any,
        cu_seqlens_q: Any,
        cu_seqlens_k: Any,
        max_seqlen_q: Any,
        max_seqlen_k: Any,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
    ) -> torch.Tensor:
        called.append("varlen")
        edges = cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k
        return reference_varlen(q, k, v, *edges, dropout_p, softmax_scale, causal)

    kernels = flash, varlen, None, own._pad_input, own._unpad_input
    monkeypatch.setattr(own, "_lazy_imports", lambda *args, **options: kernels)
    monkeypatch.setattr(own, "_loaded_implementation", None)
    yield called
    own._loaded_implementation = None


@pytest.fixture(autouse=True)
def flex_uncompiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """torch's own flex_attention, line by line: compiled, a shape takes half a minute."""
    monkeypatch.setattr(flex_attention, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)
    with torch.compiler.set_stance("force_eager"):
        yield


def tiny_llama(size: int, attention: str) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=size, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = LlamaForCausalLM(config).train()  # with use_cache True, as models are made
    model.config._attn_implementation = attention  # set_attn_implementation would look for flash_attn
    return model


def num_wrong(model: Any, batch: Any, logits: torch.Tensor) -> tuple[int, int]:
    """Tokens whose logits are not those of their document alone, and tokens compared."""
    attention, model.config._attn_implementation = model.config._attn_implementation, "eager"
    wrong = compared = 0
    for row, ids in enumerate(batch["input_ids"]):
        segments = batch["segment_ids"][row]
        for number in segments.unique().tolist():
            own = segments == number
            if number:  # 0 is padding
                alone = model(ids[own][None], use_cache=False).logits[0]
                wrong += int((logits[row, own] - alone).abs().amax(1).gt(1e-4).sum())
                compared += int(own.sum())
    model.config._attn_implementation = attention
    return wrong, compared


def load(folder: Path, batch_size: int, *boundaries: Any, **options: Any) -> Any:
    options = {"num_workers": 0, "seed": 1, **options}
    return get_llama3_dataloader(folder, batch_size, boundaries=boundaries, **options)


@pytest.mark.parametrize("attention", ["sdpa", "eager", "flex_attention", "flash_attention_2"])
@pytest.mark.parametrize(("form", "batch_size"), [("concat", 4), ("best_fit", 1)])
@torch.no_grad()
def test_a_batch_for_transformers_given_to_the_model_as_it_is_gives_each_document_its_own_logits(
    made: Path, flash_kernels: list[str], form: str, batch_size: int, attention: str
) -> None:
    with load(made / form, batch_size, "transformers", "segment_ids") as loader:
        model = tiny_llama(len(loader.tokenizer), attention)
        compared = several = 0
        for batch, _ in zip(loader, range(4), strict=False):
            fields = {name: value for name, value in batch.items() if name != "segment_ids"}
            wrong, count = num_wrong(model, batch, model(**fields).logits)
            assert wrong == 0
            compared += count
            several += int(batch["segment_ids"].max() > 1)
    assert compared > 2 * SEQ_LEN * batch_size
    assert several > 0, "no row had two documents"
    assert set(flash_kernels) == ({"varlen"} if attention == "flash_attention_2" else set())


@pytest.mark.parametrize(("attention", "mask_of"), [("sdpa", sdpa_mask), ("flex_attention", block_mask)])
@pytest.mark.parametrize("form", ["concat", "best_fit"])
@torch.no_grad()
def test_a_mask_made_of_segment_ids_gives_each_document_its_own_logits(
    made: Path, form: str, attention: str, mask_of: Any
) -> None:
    with load(made / form, 4, "position_ids", "segment_ids") as loader:
        model = tiny_llama(len(loader.tokenizer), attention)
        batch = next(iter(loader))
    logits = model(
        batch["input_ids"], attention_mask=mask_of(batch), position_ids=batch["position_ids"]
    ).logits
    wrong, compared = num_wrong(model, batch, logits)
    assert (wrong, compared) == (0, int(batch["attention_mask"].sum()))
    for name in batch.keys() - {"segment_ids"}:
        with pytest.raises(UsageError, match=r"expected segment_ids; make the loader with boundaries="):
            mask_of({name: batch[name]})


@pytest.mark.processes
def test_the_readmes_loop_over_packed_rows_trains_on_documents_that_see_only_themselves(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    for shown, here in (('"/lustre/data"', repr(str(made / "json"))), ("2048", str(SEQ_LEN))):
        assert shown in code
        code = code.replace(shown, here)
    with load(made / "json", 1) as loader:
        model = tiny_llama(len(loader.tokenizer), "sdpa")
    found: list[Any] = []

    class Seen(Exception):
        pass

    def called(**batch: Any) -> Any:
        output = model(**batch)
        if not found:
            starts = (batch["position_ids"] == 0).cumsum(1)
            compared = num_wrong(model, {**batch, "segment_ids": starts}, output.logits)
            found.append((compared, int(starts.max())))
        if scope["loader"].num_steps_delivered == 1 and not scope["loader"].ends_step:
            raise Seen
        return output

    monkeypatch.chdir(tmp_path)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scope: dict[str, Any] = {"model": called, "device": "cpu", "optimizer": optimizer}
    with pytest.raises(Seen):
        exec(code, scope)
    ((compared, num_documents),) = found
    assert compared == (0, 8 * SEQ_LEN)
    assert num_documents > 1
    assert optimizer.param_groups[0]["params"][0].grad is None, "a step was made, and cleared"
    exec(code.splitlines()[-1], scope)
    assert torch.load("loader.pt") == scope["loader"].state_dict()
    scope["loader"].close()
