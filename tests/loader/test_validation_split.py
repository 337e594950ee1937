"""A part of the documents is held out for validation, and a validation loader gives each of them once."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from loader.find_shards import DocumentSplit
from loader.order import Order
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_DOCUMENTS = 203


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 300)
    write_numbered_tars(folder, NUM_DOCUMENTS, 3, ids_of=lambda number: [number, *range(number % 5)])
    return folder


def load(
    data: Any, model: Path, batch_size: int = 4, rank: int = 0, world: int = 1, **more: Any
) -> TokenLoader:
    options = {"num_workers": 0, "seed": 3, "validation_fraction": 0.1, **more}
    return get_llama3_dataloader(data, batch_size, model, rank=rank, world_size=world, **options)


def labelled(batch: Any) -> list[list[int]]:
    """The samples of a batch that count for a loss."""
    triples = zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True)
    return [ids[: mask.sum()].tolist() for ids, mask, labels in triples if (labels != -100).any()]


def first_ids(loader: TokenLoader) -> list[int]:
    return [ids[0] for batch in loader for ids in labelled(batch)]


@pytest.mark.parametrize("group", [2, 3, 10, 200])
def test_each_document_is_on_one_side_and_of_each_group_one_is_for_validation(group: int) -> None:
    keys = np.array([3, 2**63 + 5, 77, 78], np.uint64)
    counts = np.array([0, 1, group * 7, group * 5 + group // 2])
    train, validation = (DocumentSplit(name=name, group=group) for name in ("train", "validation"))
    sizes = train.num_documents(keys, counts), validation.num_documents(keys, counts)
    for key, count, num_train, num_validation in zip(keys, counts, *sizes, strict=True):
        kept, held = train.rows(key, np.arange(num_train)), validation.rows(key, np.arange(num_validation))
        assert (np.diff(kept) > 0).all()
        assert sorted([*kept.tolist(), *held.tolist()]) == list(range(count))
        assert np.unique(held // group).tolist() == (held // group).tolist()
        assert num_validation - count // group in (0, 1)
    assert len(set(validation.rows(keys[2], np.arange(7)) % group)) > 1, "no fixed place of a group"


def test_a_document_stays_on_its_side_whatever_other_shards_there_are(data: Path) -> None:
    tars = sorted(data.glob("*.tar"))
    with load(data, data, split="validation") as whole, load(tars[:0:-1], data, split="validation") as some:
        held, fewer = first_ids(whole), first_ids(some)
    ids_of_first_tar = range(len(np.array_split(np.arange(NUM_DOCUMENTS), 3)[0]))
    assert sorted(fewer) == sorted(set(held) - set(ids_of_first_tar))
    assert len(held) == pytest.approx(NUM_DOCUMENTS / 10, abs=3)
    with load(data, data, batch_size=1, split="train") as train:
        assert sorted([*first_ids(train), *held]) == list(range(NUM_DOCUMENTS))


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
            with load(data, data, 8 // world, rank, world, num_workers=workers, **options) as loader:
                parts.append([labelled(batch) for batch in loader])
                if world == 1:
                    assert [labelled(batch) for batch in loader] == parts[0], "the next epoch is the same"
        assert len({len(part) for part in parts}) == 1, "each rank gets equally many batches"
        found.append([[ids for part in step for ids in part] for step in zip(*parts, strict=True)])
    assert all(each == found[0] for each in found)
    with load(data, data, 1, **{**options, "global_batch_size": 1}) as one_by_one:
        expected = [ids for batch in one_by_one for ids in labelled(batch)]
    assert [ids for step in found[0] for ids in step] == expected
    assert len(found[0][-1]) < 8, "the last batch is filled up here"


def test_packed_at_load_the_two_sides_have_all_tokens_and_the_tail_is_kept(data: Path) -> None:
    with load(data, data, 1, split="validation") as documents:
        stream = [*(ids for batch in documents for ids in [*labelled(batch)[0], 299])]
    with load(data, data, 4, split="validation", seq_len=16) as rows:
        found = [ids for batch in rows for ids in labelled(batch)]
    assert [token for ids in found for token in ids] == stream
    assert {len(ids) for ids in found[:-1]} == {16}
    assert 0 < len(found[-1]) == len(stream) % 16
    with (
        load(data, data, 1, split="train", seq_len=16) as train,
        load(data, data, 1, seq_len=16, validation_fraction=None) as every,
    ):
        assert train.plan.samples.offsets + len(stream) == every.plan.samples.offsets
        held = {row[0] for row in found}
        tokens = [token for batch in train for ids in labelled(batch) for token in ids]
        numbers = [token for token in tokens if token > 4 and token != 299]
        assert numbers
        assert not set(numbers) & {token for token in stream if token > 4 and token != 299}
        assert held


def test_a_set_smaller_than_one_batch_makes_one_batch_for_every_rank(data: Path) -> None:
    seen, batches = [], []
    for rank in range(4):
        with load(data, data, 16, rank, 4, split="validation") as loader:
            assert len(loader) == 1
            (batch,) = loader
            batches.append(batch["input_ids"].shape[0])
            seen += labelled(batch)
            assert loader.peek()["labels"].equal(batch["labels"])
    assert batches == [16] * 4
    with load(data, data, 1, split="validation") as one_by_one:
        assert [ids[0] for ids in seen] == first_ids(one_by_one)


@pytest.mark.parametrize(("world", "batch_size", "accumulated"), [(2, 8, 1), (4, 4, 1), (2, 4, 2), (5, 1, 3)])
def test_every_batch_of_every_rank_has_labels_where_there_are_samples_for_all(
    tmp_path: Path, world: int, batch_size: int, accumulated: int
) -> None:
    """53 samples: the last global batch of 16 has 5 of them for up to 4 batches, that of 15 has 8 for 15."""
    save_word_tokenizer(tmp_path, 100)
    write_numbered_tars(tmp_path, 53, 1, ids_of=lambda number: [number, 99])
    options = {"split": "validation", "validation_fraction": None}
    num_labelled: list[list[int]] = []
    for rank in range(world):
        size = world * batch_size * accumulated
        with load(tmp_path, tmp_path, batch_size, rank, world, global_batch_size=size, **options) as loader:
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
        num_samples=num_samples, global_batch_size=size, block_samples=1, window_samples=1, seed=0,
        shuffle=False, keeps_tail=True,
    )  # fmt: skip
    last = order.steps_per_epoch - 1
    is_filler = order.is_filler(last, range(size))
    samples = order.step_samples(0, last)
    is_real = np.ones(size, bool) if is_filler is None else ~is_filler
    assert samples[is_real].tolist() == list(range(last * size, num_samples))
    counts = is_real.reshape(num_batches, batch_size).sum(axis=1)
    assert counts.min() >= counts.sum() // num_batches
    for first in range(0, size, batch_size):
        part = order.is_filler(last, range(first, first + batch_size))
        assert (part is None) == (is_filler is None)
        assert part is None or is_filler is None or (part == is_filler[first : first + batch_size]).all()


def test_without_a_fraction_validation_is_all_of_a_folder(data: Path) -> None:
    with load(data, data, 8, split="validation", validation_fraction=None) as loader:
        assert first_ids(loader) == list(range(NUM_DOCUMENTS))


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["documents", "packed"])
def test_data_sets_of_ours_are_split_too_and_may_move(
    prep: Prep, sample_dir: Path, tmp_path: Path, kind: str
) -> None:
    packed: dict[str, Any] = {"record": "packed", "seq_len": 64} if kind == "packed" else {}
    prep.plan(sample_dir, tmp_path / "data", num_shards=3, append_eos=True, **packed)
    prep.make(tmp_path / "data")

    def samples(folder: Path, **options: Any) -> list[tuple[int, ...]]:
        with load(folder, prep.model_dir, 1, **{"shuffle": False, "num_workers": 1, **options}) as loader:
            return [tuple(ids) for batch in loader for ids in labelled(batch)]

    every = samples(tmp_path / "data", validation_fraction=None)
    sides = [samples(tmp_path / "data", split=name) for name in ("train", "validation")]
    assert sorted(sides[0] + sides[1]) == sorted(every)
    assert len(sides[1]) == pytest.approx(len(every) / 10, abs=3)
    moved = Path(shutil.copytree(tmp_path / "data", tmp_path / "moved"))
    assert samples(moved, split="validation") == sides[1]


def test_a_state_is_of_its_side_and_fraction(data: Path) -> None:
    with load(data, data, split="train") as loader:
        state = loader.state_at(2)
        loader.load_state_dict(state)
    for other in ({"split": "validation"}, {"split": "train", "validation_fraction": 0.2}):
        with load(data, data, **other) as loader, pytest.raises(OtherRun, match="split"):
            loader.load_state_dict(state)


@pytest.mark.processes
def test_a_collate_fn_of_ones_own_must_make_labels_where_a_last_batch_is_filled_up(data: Path) -> None:
    options: dict[str, Any] = {"split": "validation", "collate_fn": list, "num_workers": 1}
    with (
        load(data, data, 8, **options) as loader,
        pytest.raises(UsageError, match='makes no tensor "labels"'),
    ):
        list(loader)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"split": "train", "validation_fraction": None}, "needs validation_fraction"),
        ({"split": None}, "no split is named"),
        ({"split": "test"}, "split is 'test', expected 'train' or 'validation'"),
        (
            {"split": "train", "validation_fraction": 0.7},
            r"validation_fraction is 0.7, expected 1e-06 to 0.5",
        ),
        ({"split": "validation", "group_by_length": 2}, "group_by_length reorders samples"),
        ({"split": "validation", "validation_fraction": 1e-5}, "one of 100000 for validation"),
    ],
)
def test_what_makes_no_split_is_refused(data: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(data, data, **options)
