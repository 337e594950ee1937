"""The arguments of ``get_llama3_dataloader``, declared once, and what a batch is to a script."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader
from transformers import DataCollatorForLanguageModeling, LlamaConfig, LlamaForCausalLM

import loader
import shardprep
from loader import get_llama3_dataloader
from loader.dataloader import arguments_by_group
from shardprep.errors import NotFound, UsageError
from shardprep.removed import ARGUMENTS
from tests import loader_reference
from tests.external_tars import write_numbered_data
from tests.waiting import HANG_S


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_numbered_data(tmp_path_factory.mktemp("data"), 64, 2)


def load(data: Path, batch_size: int = 4, **options: Any) -> Any:
    return get_llama3_dataloader(data, batch_size, data, num_workers=0, **options)


def test_each_argument_is_explained_in_one_group_in_the_order_of_the_signature() -> None:
    groups = arguments_by_group(get_llama3_dataloader.__doc__ or "")
    explained = [name for arguments in groups.values() for name in arguments]
    assert sorted(explained) == sorted(inspect.signature(get_llama3_dataloader).parameters)
    assert len(groups) == 6
    assert all(text.endswith((".", "``.")) for arguments in groups.values() for text in arguments.values())


def test_the_reference_page_says_what_the_code_declares() -> None:
    found = loader_reference.PAGE.read_text("utf-8")
    assert found == loader_reference.page(), "run: python -m tests.loader_reference"


def test_an_unknown_argument_is_answered_with_the_nearest_and_all_by_group(data: Path) -> None:
    with pytest.raises(
        TypeError, match=r"no argument 'seqlen', did you mean 'seq_len'; .*storage: cache_dir"
    ):
        load(data, 4, seqlen=16)


@pytest.mark.processes
def test_a_collate_fn_is_called_in_the_training_process(data: Path) -> None:
    made = get_llama3_dataloader(data, 4, data, num_workers=2, collate_fn=lambda _: os.getpid())
    with made as one:
        assert {*one} == {os.getpid()}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_went_is_answered_with_what_to_do_instead(data: Path, name: str) -> None:
    with pytest.raises(TypeError) as raised:
        load(data, 4, **{name: 1})
    assert name in str(raised.value)
    assert ARGUMENTS[name] in str(raised.value)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"input_shards": None}, "input_shards=None"),
        ({"input_shards": [3]}, "input_shards=3"),
        ({"model_id": 4}, "model_id is 4, expected a model's folder or its name"),
        ({"shuffle": "no"}, "shuffle is 'no', expected True or False"),
        ({"seed": "a"}, "seed is 'a', expected a whole number"),
        ({"seq_len": "16"}, "seq_len is '16', expected a whole number of at least 1"),
        ({"seq_len": 0, "targets": "shifted"}, "seq_len is 0, expected at least 1"),
        ({"max_length": 1.5}, "max_length is 1.5, expected a whole number of at least 1"),
        *(
            ({name: value}, f"{name} is {value!r}, expected {said}")
            for value, names, said in (
                ("x", ("shuffle", "amend", "pin_memory", "persistent_workers"), "True or False"),
                ("2", ("batch_size",), "a whole number"),
                (True, ("seq_len", "pad_to_multiple_of", "num_workers", "prefetch_factor"), "a whole number"),
                (1.0, ("rank", "world_size", "seed"), "a whole number"),
            )
            for name in names
        ),
        ({"boundaries": True}, r"boundaries has \[True\], expected some of transformers, position_ids"),
        ({"boundaries": None}, r"boundaries has \[None\], expected some of transformers"),
        ({"collate_fn": 5}, "collate_fn is 5, expected a function of a list of samples"),
        ({"global_batch_size": 6, "rank": 0, "world_size": 4}, "multiple of batch_size 2 x 4 ranks"),
    ],
)
def test_a_value_of_a_wrong_type_or_size_is_named_with_what_is_expected(
    data: Path, options: dict[str, Any], said: str
) -> None:
    given: dict[str, Any] = {"input_shards": data, "batch_size": 2, "model_id": data, **options}
    with pytest.raises(UsageError, match=said):
        loader.get_llama3_dataloader(**given)


def test_a_data_set_without_a_shard_is_answered_with_the_command_that_makes_them(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    with pytest.raises(NotFound, match=f"run: shardprep run {tmp_path}"):
        load(tmp_path, 2)


def test_a_path_given_as_the_state_is_answered_with_the_line_that_loads_it(data: Path) -> None:
    with load(data, 2) as one, pytest.raises(UsageError, match=r"load_state_dict\(torch\.load\(PATH\)\)"):
        one.load_state_dict("loader.pt")


def test_a_field_that_a_batch_has_not_is_answered_with_those_it_has(data: Path) -> None:
    with load(data, 2) as one:
        batch = next(iter(one))
    with pytest.raises(KeyError, match="the batch has input_ids, attention_mask, labels, but no inputs"):
        batch["inputs"]
    with pytest.raises(
        AttributeError, match="the batch has input_ids, attention_mask, labels, but no inputs"
    ):
        batch.inputs  # noqa: B018
    assert batch.get("inputs") is None


def test_the_function_is_a_name_of_shardprep_too() -> None:
    assert shardprep.get_llama3_dataloader is loader.get_llama3_dataloader


# What a batch is


@pytest.mark.parametrize("boundaries", ["transformers", ["position_ids", "segment_ids", "cu_seqlens"]])
def test_every_value_of_a_batch_moves_by_the_usual_line(data: Path, boundaries: Any) -> None:
    batch = next(iter(load(data, 4, seq_len=16, boundaries=boundaries)))
    moved = {name: value.to("meta", non_blocking=True) for name, value in batch.items()}
    assert moved["input_ids"].device.type == "meta"
    assert {type(value).__mro__[-2] for value in moved.values()} <= {int, torch._C.TensorBase}


@pytest.mark.slow
def test_a_model_takes_the_numbers_of_a_batch_for_ints_and_bools_also_compiled(data: Path) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=200, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    model = LlamaForCausalLM(config)
    batch = next(iter(load(data, 4, seq_len=16, boundaries="transformers")))
    plain = {name: value if isinstance(value, torch.Tensor) else int(value) for name, value in batch.items()}
    expected = model(**{**plain, "use_cache": False})
    moved = {name: value.to("cpu") for name, value in batch.items()}
    for found in (model(**moved), torch.compile(model, backend="eager", fullgraph=True)(**moved)):
        assert torch.equal(found.logits, expected.logits)
        assert found.past_key_values is None


@pytest.mark.slow
@settings(max_examples=30)
@given(
    st.integers(1, 6),
    st.sampled_from([None, 8]),
    st.sampled_from([{}, {"max_length": 7}]),
    st.integers(0, 3),
)
def test_batches_are_those_of_transformers_own_collator_for_the_same_samples(
    data: Path, batch_size: int, multiple: int | None, options: Any, seed: int
) -> None:
    made = load(data, batch_size, pad_to_multiple_of=multiple, seed=seed, **options)
    raw = load(data, batch_size, seed=seed, collate_fn=list, **options)
    assert isinstance(made.collate_fn, DataCollatorForLanguageModeling)
    own = DataCollatorForLanguageModeling(made.tokenizer, mlm=False, pad_to_multiple_of=multiple)
    for batch, samples in zip(made, raw, strict=True):
        for expected in (own(samples), made.collate_fn(samples)):
            assert list(batch) == list(expected)
            assert all(torch.equal(batch[name], expected[name]) for name in batch)
    assert raw.collate_fn is list


@pytest.mark.processes
def test_a_loader_imports_transformers_when_its_collator_is_looked_at(made_dir: Path) -> None:
    code = (
        "import sys; from loader import get_llama3_dataloader as get\n"
        "loader = get(sys.argv[1], 2, num_workers=0)\n"
        "next(iter(loader)); before = 'transformers' in sys.modules\n"
        "collator = loader.collate_fn; from transformers import DataCollatorForLanguageModeling as Known\n"
        "print(before, isinstance(collator, Known), loader.collate_fn is collator)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(made_dir)],
        capture_output=True, text=True, check=True, timeout=HANG_S,
    )  # fmt: skip
    assert done.stdout.split() == ["False", "True", "True"]


def test_a_data_loader_around_the_loader_is_told_what_to_do(data: Path) -> None:
    made: Any = DataLoader(load(data, 4))
    with pytest.raises(UsageError, match="state_dict"):
        next(iter(made))
