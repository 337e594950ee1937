"""One call sets precision, attention, threads and padding, and changes nothing that the user has set."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from loader import UsageError, get_llama3_dataloader, set_up_training
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 200)
    write_numbered_tars(root, 20, 1, ids_of=lambda n: list(range(n, n + 5)))
    return root


VARIABLES = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "TOKENIZERS_PARALLELISM"),
    *("LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
)


@pytest.fixture(autouse=True)
def environ(monkeypatch: pytest.MonkeyPatch) -> Iterator[MutableMapping[str, str]]:
    """The process's own variables, without those that count here; all is as before at the end."""
    monkeypatch.setattr(os, "environ", {k: v for k, v in os.environ.items() if k not in VARIABLES})
    threads, precision = torch.get_num_threads(), torch.get_float32_matmul_precision()
    yield os.environ
    torch.set_num_threads(threads)
    torch.set_float32_matmul_precision(precision)


@pytest.fixture
def tokenizer(data: Path) -> Any:
    return AutoTokenizer.from_pretrained(data)


def cpus(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(count)))


def test_a_loaders_tokenizer_pads_right_with_the_loaders_own_token(data: Path) -> None:
    with get_llama3_dataloader(data, 2, data, num_workers=0) as loader:
        loader.tokenizer.padding_side = "left"
        setup = set_up_training(loader, num_threads=1)
        assert loader.tokenizer.padding_side == "right"
        assert loader.tokenizer.pad_token_id == setup.pad.token_id == loader.collate_fn.pad.token_id


def test_a_pad_token_that_is_eos_is_a_warning(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    set_up_training(tokenizer, num_threads=1)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    tokenizer.pad_token = tokenizer.eos_token
    set_up_training(tokenizer, num_threads=1)
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert tokenizer.eos_token in record.getMessage()


@pytest.mark.parametrize(("tf32", "precision"), [(True, "high"), (False, "highest")])
def test_tf32_is_torchs_high_precision(tokenizer: Any, tf32: bool, precision: str) -> None:
    set_up_training(tokenizer, tf32=tf32, num_threads=1)
    assert torch.get_float32_matmul_precision() == precision


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, 12),
        ({"LOCAL_WORLD_SIZE": "4"}, 3),
        ({"LOCAL_WORLD_SIZE": "99"}, 1),
        ({"OMP_NUM_THREADS": "5"}, 5),
        ({"OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "none", "LOCAL_WORLD_SIZE": "2"}, 6),
        ({"OMP_NUM_THREADS": "1"}, 1),
    ],
)
def test_threads_are_the_users_or_the_ranks_share_of_the_cpus(
    tokenizer: Any,
    environ: MutableMapping[str, str],
    monkeypatch: pytest.MonkeyPatch,
    given: dict[str, str],
    expected: int,
) -> None:
    cpus(monkeypatch, 12)
    environ.update(given)
    assert set_up_training(tokenizer).num_threads == expected == torch.get_num_threads()
    assert {name: environ[name] for name in given} == given, "what a user set stays"
    assert environ["TOKENIZERS_PARALLELISM"] == "false"
    assert environ["MKL_NUM_THREADS"] == str(expected)


def test_each_worker_is_left_a_cpu(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cpus(monkeypatch, 8)
    with get_llama3_dataloader(data, 4, data, num_workers=3) as loader:
        assert set_up_training(loader).num_threads == 5


def test_no_number_of_threads_is_refused(tokenizer: Any) -> None:
    with pytest.raises(UsageError, match="num_threads"):
        set_up_training(tokenizer, num_threads=0)


def test_bf16_computes_in_bfloat16_and_leaves_weights_alone(tokenizer: Any) -> None:
    setup = set_up_training(tokenizer, bf16=True, num_threads=1)
    config = LlamaConfig(
        vocab_size=50, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1,
        **setup.model_options,
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    ids = torch.arange(8)[None]
    with setup.autocast():
        assert model(ids).logits.dtype == torch.bfloat16
    assert model(ids).logits.dtype == torch.float32
    assert model.config._attn_implementation == "sdpa"
    with set_up_training(tokenizer, num_threads=1).autocast():
        assert model(ids).logits.dtype == torch.float32


def test_bf16_on_a_gpu_without_it_is_refused(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "An old GPU")
    with pytest.raises(UsageError, match="An old GPU has no bfloat16"):
        set_up_training(tokenizer, bf16=True)
