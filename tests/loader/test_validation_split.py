"""Documents that a plan holds out for validation; a validation loader gives each of them once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from loader.order import Order
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.ticks import samples_of_tick
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_DOCUMENTS = 203


@pytest.fixture(scope="module")
def data(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents whose first id is their number, of which a plan holds a tenth out."""
    root = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(300)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="w298", eos_token="w299").save_pretrained(
        root / "model"
    )
    (root / "raw").mkdir()
    lines = [
        " ".join(f"w{token}" for token in [number, *range(number % 5)]) for number in range(NUM_DOCUMENTS)
    ]
    (root / "raw" / "a.txt").write_text("\n".join(lines) + "\n")
    options: dict[str, Any] = {"model_id": str(root / "model"), "validation_fraction": 0.1}
    prep.plan(root / "raw", root / "data", num_shards=3, **options)
    prep.make(root / "data")
    return root / "data"


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same documents as tars of other tools."""
    folder = tmp_path_factory.mktemp("others")
    save_word_tokenizer(folder, 300)
    write_numbered_tars(folder, NUM_DOCUMENTS, 3, ids_of=lambda number: [number, *range(number % 5)])
    return folder


def load(data: Any, batch_size: int = 4, rank: int = 0, world: int = 1, **more: Any) -> TokenLoader:
    options = {"num_workers": 0, "seed": 3, **more}
    return get_llama3_dataloader(data, batch_size, rank=rank, world_size=world, **options)


def labelled(batch: Any) -> list[list[int]]:
    """The samples of a batch that count for a loss."""
    triples = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    return [ids[: mask.sum()].tolist() for ids, mask, labels in triples if (labels != -100).any()]


def first_ids(loader: TokenLoader) -> list[int]:
    return [ids[0] for batch in loader for ids in labelled(batch)]


def test_each_document_is_on_one_side_and_of_each_shard_training_has_the_first_ones(data: Path) -> None:
    with load(data, 1, split="validation") as loader:
        held = first_ids(loader)
    with load(data, 1, split="train", shuffle=False) as loader:
        trained = first_ids(loader)
    assert sorted([*trained, *held]) == list(range(NUM_DOCUMENTS))
    assert 8 < len(held) < 40
    stored = []
    for number in range(3):  # one shard alone, both sides of it
        with load(data / f"shard-0000{number}.tar", 1, shuffle=False) as loader:
            of_shard = first_ids(loader)
        num_train = len([each for each in of_shard if each not in held])
        assert of_shard[:num_train] == sorted(each for each in of_shard if each not in held)
        stored += of_shard
    assert [each for each in stored if each in held] == held
    assert [each for each in stored if each not in held] == trained


@pytest.mark.processes
@pytest.mark.parametrize("options", [{}, {"seq_len": 16}, {"max_length": 2}])
def test_a_validation_loader_gives_each_sample_once_in_one_order_on_every_world(
    data: Path, options: dict[str, Any]
) -> None:
    options = {"split": "validation", "global_batch_size": 8, **options}
    found = []
    for world, workers in ((1, 0), (1, 2), (2, 0), (4, 1), (8, 0)):
        parts = []
        for rank in range(world):
            with load(data, 8 // world, rank, world, num_workers=workers, **options) as loader:
                parts.append([labelled(batch) for batch in loader])
                if world == 1:
                    assert [labelled(batch) for batch in loader] == parts[0], "the next epoch is the same"
        assert len({len(part) for part in parts}) == 1, "each rank gets equally many batches"
        found.append([[ids for part in step for ids in part] for step in zip(*parts, strict=True)])
    assert all(each == found[0] for each in found)
    with load(data, 1, **{**options, "global_batch_size": 1}) as one_by_one:
        expected = [ids for batch in one_by_one for ids in labelled(batch)]
    assert [ids for step in found[0] for ids in step] == expected
    assert len(found[0][-1]) < 8, "the last batch is filled up here"


def test_packed_at_load_the_two_sides_have_all_tokens_and_the_tail_is_kept(data: Path) -> None:
    with load(data, 1, split="validation") as documents:
        stream = [*(ids for batch in documents for ids in [*labelled(batch)[0], 299])]
    with load(data, 4, split="validation", seq_len=16) as rows:
        found = [ids for batch in rows for ids in labelled(batch)]
    assert [token for ids in found for token in ids] == stream
    assert {len(ids) for ids in found[:-1]} == {16}
    assert 0 < len(found[-1]) == len(stream) % 16
    with (
        load(data, 1, split="train", seq_len=16) as train,
        load(data, 1, seq_len=16) as every,
    ):
        assert train.run.samples[0].offsets + len(stream) == every.run.samples[0].offsets
        held = {row[0] for row in found}
        tokens = [token for batch in train for ids in labelled(batch) for token in ids]
        numbers = [token for token in tokens if token > 4 and token != 299]
        assert numbers
        assert not set(numbers) & {token for token in stream if token > 4 and token != 299}
        assert held


def test_a_set_smaller_than_one_batch_makes_one_batch_for_every_rank(data: Path) -> None:
    seen, batches = [], []
    for rank in range(4):
        with load(data, 16, rank, 4, split="validation") as loader:
            assert len(loader) == 1
            (batch,) = loader
            batches.append(batch["input_ids"].shape[0])
            seen += labelled(batch)
            assert loader.peek()["labels"].equal(batch["labels"])
    assert batches == [16] * 4
    with load(data, 1, split="validation") as one_by_one:
        assert [ids[0] for ids in seen] == first_ids(one_by_one)


@pytest.mark.parametrize(("world", "batch_size", "accumulated"), [(2, 8, 1), (4, 4, 1), (2, 4, 2), (5, 1, 3)])
def test_every_batch_of_every_rank_has_labels_where_there_are_samples_for_all(
    tmp_path: Path, world: int, batch_size: int, accumulated: int
) -> None:
    """53 samples: the last global batch of 16 has 5 of them for up to 4 batches, that of 15 has 8 for 15."""
    save_word_tokenizer(tmp_path, 100)
    write_numbered_tars(tmp_path, 53, 1, ids_of=lambda number: [number, 99])
    options = {"split": "validation", "model_id": tmp_path}
    num_labelled: list[list[int]] = []
    for rank in range(world):
        size = world * batch_size * accumulated
        with load(tmp_path, batch_size, rank, world, global_batch_size=size, **options) as loader:
            num_labelled.append([len(labelled(batch)) for batch in loader])
    assert sum(map(sum, num_labelled)) == 53
    num_last = 53 % (world * batch_size * accumulated)
    num_without = sum(not count for of_rank in num_labelled for count in of_rank)
    assert num_without == max(world * accumulated - num_last, 0)


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 6), st.integers(1, 6))
def test_fillers_are_spread_over_batches_and_samples_keep_their_order(
    num_samples: int, world: int, accumulated: int, batch_size: int
) -> None:
    num_batches = world * accumulated
    size = num_batches * batch_size
    order = Order(
        num_samples=num_samples, tick_samples=size, block_samples=1, window_samples=1, seed=0,
        shuffle=False, keeps_tail=True,
    )  # fmt: skip
    last = order.ticks_per_epoch - 1
    is_filler = order.is_filler(last, range(size))
    samples = np.array(samples_of_tick(order, 0, last))
    is_real = np.ones(size, bool) if is_filler is None else ~is_filler
    assert samples[is_real].tolist() == list(range(last * size, num_samples))
    counts = is_real.reshape(num_batches, batch_size).sum(axis=1)
    assert counts.min() >= counts.sum() // num_batches
    for first in range(0, size, batch_size):
        part = order.is_filler(last, range(first, first + batch_size))
        assert (part is None) == (is_filler is None)
        assert part is None or is_filler is None or (part == is_filler[first : first + batch_size]).all()


def test_validation_is_all_of_a_folder_that_was_planned_without_a_fraction(others: Path) -> None:
    with load(others, 8, model_id=others, split="validation") as loader:
        assert first_ids(loader) == list(range(NUM_DOCUMENTS))


def test_a_state_is_of_its_side(data: Path) -> None:
    with load(data, split="train") as loader:
        state = loader.state_at(2)
        loader.load_state_dict(state)
    for split in ("validation", None):
        with load(data, split=split) as loader, pytest.raises(OtherRun, match="split"):
            loader.load_state_dict(state)


@pytest.mark.processes
def test_a_collate_fn_of_ones_own_must_make_labels_where_a_last_batch_is_filled_up(data: Path) -> None:
    options: dict[str, Any] = {"split": "validation", "collate_fn": list, "num_workers": 1}
    with (
        load(data, 8, **options) as loader,
        pytest.raises(UsageError, match='makes no tensor "labels"'),
    ):
        list(loader)


def test_what_makes_no_split_is_refused(data: Path, others: Path) -> None:
    with pytest.raises(UsageError, match="--validation_fraction"):
        load(others, model_id=others, split="train")
    with pytest.raises(UsageError, match="split is 'test', expected 'train' or 'validation'"):
        load(data, split="test")
    with pytest.raises(UsageError, match="group_by_length reorders samples"):
        load(data, split="validation", group_by_length=2)
