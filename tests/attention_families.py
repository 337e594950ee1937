"""Find out which families of transformers' language models keep the documents of a packed row apart.

Each model has two small layers with random weights. The logits of each document in a packed batch are
compared with those of the document alone, and ``check_boundaries`` must agree. test_boundaries.py checks a
part of docs/attention_families.json, and with ``FAMILIES=all`` all of it, in 5 minutes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from loader import check_boundaries, mask_documents
from shardprep.errors import Refused
from tests.checkout import ROOT
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer
from tests.world import open_loader

FAMILIES = ROOT / "docs" / "attention_families.json"
VOCABULARY, SEQ_LEN, WINDOW = 200, 48, 8

# Small sizes for all names that families use. Windows are shorter than documents.
_NUMBERS = {
    "hidden_size d_model n_embd n_embed intermediate_size ffn_dim n_inner ffn_hidden_size": 32,
    "decoder_ffn_dim shared_intermediate_size linear_num_heads": 32,
    "num_hidden_layers n_layer n_layers num_layers decoder_layers": 2,
    "num_attention_heads n_head n_heads num_heads decoder_attention_heads mamba_n_heads": 4,
    "num_key_value_heads num_kv_heads": 2,
    "head_dim kv_channels qk_rope_head_dim qk_nope_head_dim v_head_dim mamba_d_state state_size": 8,
    "linear_key_head_dim linear_value_head_dim hidden_size_per_layer_input": 8,
    "max_position_embeddings n_positions n_ctx max_seq_len": 128,
    "num_experts num_local_experts n_routed_experts moe_num_experts linear_num_value_heads rotary_dim": 4,
    "num_experts_per_tok num_experts_per_token linear_num_key_heads mamba_expand expand moe_k": 2,
    "moe_intermediate_size shared_expert_intermediate_size q_lora_rank kv_lora_rank mamba_d_head": 16,
    "mamba_chunk_size chunk_size": 16,
    "n_group topk_group first_k_dense_replace n_shared_experts num_shared_experts mamba_n_groups n_groups": 1,
    "max_window_layers bos_token_id": 1,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "sliding_window sliding_window_size attention_chunk_size window_size": WINDOW,
    "vocab_size vocab_size_per_layer_input unpadded_vocab_size": VOCABULARY,
    "use_sliding_window": True,
    "initializer_range": 0.1,
}
_SMALL: dict[str, Any] = {name: number for names, number in _NUMBERS.items() for name in names.split()}
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "falcon_h1": {"mamba_d_ssm": 64},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "zaya": {"num_experts_per_tok": 1},
}
# Families with latent attention, which have as many key heads as query heads.
_LATENT = (
    "axk1 axk2 deepseek_v2 deepseek_v3 deepseek_v32 dots3_note_text glm4_moe_lite glm_moe_dsa minicpm3 "
    "sarvam_mla youtu"
)
_FIRST_LAYER = {  # type of the first layer, followed by full_attention; two default layers lack the pair
    "afmoe cohere2 cohere2_moe exaone4 gemma3_text ministral olmo3": "sliding_attention",
    "granitemoehybrid qwen3_next qwen3_5_text qwen3_5_moe_text": "linear_attention",
    "lfm2 lfm2_moe": "conv",
    "llama4_text": "chunked_attention",
}

VERDICTS = {
    "safe": "stay_apart",
    "masked": "stay_apart_with_mask_documents",
    "leaks": "refused_by_check_boundaries",
    "raises": "refused_by_the_model",
}


def small_model(family: str, attention: str) -> Any:
    """Return a model whose tokens depend strongly on each other, like a trained one.

    Raises ValueError if the family does not have this attention.
    """
    kind = CONFIG_MAPPING[family]
    known = {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}
    sizes = {name: value for name, value in _SMALL.items() if name in known}
    sizes |= _OWN.get(family, {})
    if family in _LATENT.split():
        sizes["num_key_value_heads"] = sizes["num_attention_heads"]
    for families, layer in _FIRST_LAYER.items():
        if family in families.split():
            sizes["layer_types"] = [layer, "full_attention"]
    torch.manual_seed(0)
    config = kind(**sizes)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    size = model.num_parameters()
    assert size < 4_000_000, f"{family} has {size:,} parameters: name its sizes in _NUMBERS or _OWN"
    with torch.no_grad():
        for weights in model.parameters():
            if weights.dim() > 1:
                weights.copy_(torch.randn_like(weights) * 0.2 if not weights.any() else weights * 2)
    return model.eval()


def packed_batch(folder: Path) -> Any:
    """Return a batch of a loader for transformers, and with ``segment_ids`` for ``num_wrong``."""
    save_word_tokenizer(folder, VOCABULARY)
    rng = np.random.default_rng(1)
    write_numbered_tars(
        folder, 40, 1, lambda _: rng.integers(10, VOCABULARY - 10, rng.integers(5, 30)).tolist()
    )
    options = {"model_id": folder, "seq_len": SEQ_LEN, "boundaries": ("transformers", "segment_ids")}
    batch = open_loader(folder, 2, **options).peek()
    assert (batch["segment_ids"].amax(1) > 1).all()
    return batch


@torch.no_grad()
def num_wrong(model: Any, batch: Mapping[str, Any], logits: Any = None) -> int:
    """Return the number of tokens of packed rows whose logits differ from those of their document alone.

    ``logits``: those of the batch, if the model's attention has changed since.
    """
    segments = batch["segment_ids"]
    logits = model(**fields_of(batch)).logits if logits is None else logits
    wrong = 0
    for row, ids in enumerate(batch["input_ids"]):
        for number in segments[row].unique()[segments[row].unique() > 0]:  # 0 is padding
            own = segments[row] == number
            alone = model(input_ids=ids[own][None], use_cache=False).logits[0]
            wrong += int((logits[row, own] - alone).abs().amax(1).gt(1e-3 * alone.abs().max()).sum())
    return wrong


def fields_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in batch.items() if name not in ("segment_ids", "labels")}


def verdict(family: str, batch: Mapping[str, Any]) -> str:
    """Return the key of VERDICTS for a family, which must be the same for all its attentions."""
    kind: Any = AutoModelForCausalLM._model_mapping[CONFIG_MAPPING[family]]
    attentions = ["eager", "sdpa"] if kind._supports_sdpa else ["eager"]
    found = {attention: _verdict(family, attention, batch) for attention in attentions}
    assert len({*found.values()}) == 1, f"{family}: {found}"
    return found["eager"]


def _verdict(family: str, attention: str, batch: Mapping[str, Any]) -> str:
    """Return a key of VERDICTS, and assert that ``check_boundaries`` agrees."""
    model = small_model(family, attention)
    unpacked = {"input_ids": batch["input_ids"], "segment_ids": batch["segment_ids"], "use_cache": False}
    assert num_wrong(model, unpacked), f"{family}: documents do not influence each other"
    for masked in (False, True):
        try:
            if masked:
                mask_documents(model)
            wrong = num_wrong(model, batch)
        except Exception as error:
            if not masked and "packed" in str(error):
                return "raises"
            if not masked:
                raise
            return "leaks"  # the model takes no mask of documents
        try:
            check_boundaries(model, fields_of(batch))
            refused = False
        except Refused:
            refused = True
        assert refused == bool(wrong), f"{family}: {wrong} tokens are wrong, check_boundaries said {refused}"
        if not wrong:
            return "masked" if masked else "safe"
    return "leaks"


def verdicts_of_page() -> dict[str, str]:
    """Return family -> key of VERDICTS. To test another family, write it into any list."""
    listed = json.loads(FAMILIES.read_text("utf-8"))
    found = {}
    for verdict, key in VERDICTS.items():
        found.update(dict.fromkeys(listed[key], verdict))
    return found
