"""``tokens_per_batch``: batches of whole documents within a number of tokens, equally many on every rank."""

from __future__ import annotations

import json
import random
from collections import Counter
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import OtherRun, TokenLoader, get_llama3_dataloader
from loader.chunks import IGNORED
from loader.where import SeenDocuments
from shardprep.errors import UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

if TYPE_CHECKING:
    from tests.conftest import Prep

NUM_DOCUMENTS, BATCH_TOKENS = 500, 64


def length_of(number: int) -> int:
    return 1 + random.Random(number).randrange(20)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 20 tokens; the first id says which document it is."""
    folder = tmp_path_factory.mktemp("data")
    save_word_tokenizer(folder, 3000)
    write_numbered_tars(folder, NUM_DOCUMENTS, 3, ids_of=lambda n: [n, *range(2900, 2900 + length_of(n) - 1)])
    return folder


def load(data: Path, world: int = 1, rank: int = 0, **options: Any) -> TokenLoader:
    made: dict[str, Any] = {
        "tokens_per_batch": BATCH_TOKENS,
        "num_workers": 0,
        "seed": 3,
        "global_batch_size": 8,
    }
    return get_llama3_dataloader(data, model_id=data, rank=rank, world_size=world, **{**made, **options})


def documents_of(batch: Any) -> list[list[int]]:
    pairs = zip(batch["input_ids"], batch["attention_mask"], strict=True)
    return [ids[: mask.sum()].tolist() for ids, mask in pairs]


def batches_of(loader: TokenLoader, num_batches: int) -> list[list[list[int]]]:
    found: list[list[list[int]]] = []
    while True:
        for batch in loader:
            found.append(documents_of(batch))
            if len(found) == num_batches:
                return found


FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "multiple": {"pad_to_multiple_of": 8},
    "split": {"max_length": 7, "long_documents": "split"},
    "truncated": {"max_length": 7},
    "shifted": {"targets": "shifted"},
}


@pytest.mark.parametrize("form", FORMS)
def test_batches_hold_no_more_than_the_tokens_and_an_epoch_has_every_document_once(
    data: Path, form: str
) -> None:
    seen: Counter[tuple[int, ...]] = Counter()
    with load(data, global_batch_size=1, **FORMS[form]) as loader:
        for batch in loader:
            assert batch["input_ids"].numel() <= BATCH_TOKENS
            if form == "multiple":
                assert batch["input_ids"].shape[1] % 8 == 0
            labels = batch["labels"]
            if form != "shifted":
                assert (labels == batch["input_ids"].where(batch["attention_mask"] == 1, IGNORED)).all()
            if form == "shifted":  # what is learnt of each document, behind its first id
                firsts = batch["input_ids"][:, 0].tolist()
                learnt = [
                    [first, *row[row != IGNORED].tolist()] for first, row in zip(firsts, labels, strict=True)
                ]
            seen.update(map(tuple, learnt if form == "shifted" else documents_of(batch)))
        assert loader.order.num_left_out == 0
        padding = loader.metrics.padding_share
    expected: Counter[tuple[int, ...]] = Counter()
    for number in range(NUM_DOCUMENTS):
        ids = (number, *range(2900, 2900 + length_of(number) - 1))
        if form == "split":
            expected.update(ids[first : first + 7] for first in range(0, len(ids), 7))
        else:
            expected[ids[:7] if form == "truncated" else ids] += 1
    assert seen == expected
    assert padding < (0.3 if form == "multiple" else 0.06), "of like length"


@pytest.mark.processes
@pytest.mark.parametrize(("world", "workers"), [(2, 2), (4, 0), (8, 0)])
def test_global_batches_are_the_same_on_every_world_and_after_a_resume_on_another(
    data: Path, world: int, workers: int
) -> None:
    with load(data) as loader:
        num_steps = loader.order.steps_per_epoch
        whole = batches_of(loader, 8 * (num_steps + 3))
        assert len({len(batch) for batch in whole}) > 2, "as many documents as fit"
        draw = random.Random(world)
        for place in (0, num_steps - 1, num_steps, draw.randrange(num_steps)):
            loader.load_state_dict(json.loads(json.dumps(loader.state_at(place))))
            assert batches_of(loader, 8) == whole[8 * place : 8 * place + 8]
        state = loader.state_at(place)
    ranks = []
    for rank in range(world):
        with load(data, world, rank, num_workers=workers) as loader:
            loader.load_state_dict(state)
            assert len(loader) == num_steps * 8 // world, "equally many for every rank"
            ranks.append(batches_of(loader, 3 * 8 // world))
    share = 8 // world
    found = [
        batch
        for step in range(3)
        for of_rank in ranks
        for batch in of_rank[step * share : (step + 1) * share]
    ]
    assert found == whole[8 * place : 8 * place + 24]


def test_a_validation_loader_gives_every_document_once_and_fills_up_without_labels(data: Path) -> None:
    with load(data, split="validation") as loader:
        assert loader.order.num_fillers > 0
        found = [
            ids[0]
            for batch in loader
            for ids, labels in zip(documents_of(batch), batch["labels"], strict=True)
            if (labels != IGNORED).any()
        ]
    assert sorted(found) == list(range(NUM_DOCUMENTS))


@pytest.mark.slow
def test_token_batches_are_mixed_ramped_and_collated_as_samples_are(data: Path, tmp_path: Path) -> None:
    write_numbered_tars(tmp_path, 90, 1, ids_of=lambda n: [1000 + n, 2900, 2901])
    options: dict[str, Any] = {
        "weights": {"one": 0.5, "other": 0.5}, "global_batch_size": None, "num_workers": 0, "seed": 3,
        "batch_size_schedule": [(0, 4), (3, 8)], "tokens_per_batch": BATCH_TOKENS, "collate_fn": list,
    }  # fmt: skip
    sources = {"one": data, "other": tmp_path}
    tokens: Counter[bool] = Counter()
    sizes = []
    with get_llama3_dataloader(sources, model_id=data, rank=0, world_size=1, **options) as loader:
        num_batches = 0
        batches: Any = chain.from_iterable(loader for _ in range(9))
        for samples in batches:
            num_batches += 1
            ids = [sample["input_ids"] for sample in samples]
            assert len({each[0] >= 1000 for each in ids}) == 1, "a batch is of one source"
            assert len(ids) * max(map(len, ids)) <= BATCH_TOKENS
            tokens[ids[0][0] >= 1000] += sum(map(len, ids))
            if loader.ends_step:
                sizes.append(num_batches)
                num_batches = 0
    assert sizes[:5] == [4, 4, 4, 8, 8]
    assert tokens[True] / tokens.total() == pytest.approx(0.5, abs=0.06)


@pytest.mark.slow
def test_our_own_shards_make_token_batches(prep: Prep, sample_dir: Path, tmp_path: Path) -> None:
    prep.plan(sample_dir, tmp_path, num_shards=3)
    prep.make(tmp_path)
    options: dict[str, Any] = {"num_workers": 0, "max_length": 512, "rank": 0, "world_size": 1}
    with get_llama3_dataloader(tmp_path, tokens_per_batch=2048, **options) as loader:
        found = [tuple(ids) for batch in loader for ids in documents_of(batch)]
        assert loader.metrics.padding_share < 0.1
    with get_llama3_dataloader(tmp_path, 1, **options) as loader:
        assert Counter(found) == Counter(tuple(documents_of(batch)[0]) for batch in loader)


def test_a_state_of_other_token_batches_is_refused(data: Path) -> None:
    with load(data) as loader:
        state = loader.state_at(2)
    with (
        load(data, tokens_per_batch=65) as other,
        pytest.raises(OtherRun, match="batch_tokens 64 in the state, 65"),
    ):
        other.load_state_dict(state)
    with (
        load(data, pad_to_multiple_of=4) as other,
        pytest.raises(OtherRun, match="pad_to_multiple_of 1 in the"),
    ):
        other.load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"batch_size": 4}, "batch_size is 4 and tokens_per_batch 64; pass one of them"),
        ({"tokens_per_batch": None}, "batch_size is None and tokens_per_batch None"),
        ({"tokens_per_batch": 0}, "tokens_per_batch is 0, expected at least 1"),
        (
            {"tokens_per_batch": 19},
            r"sample 5 of .*part-000.tar has 20 tokens, more than .*tokens_per_batch=19",
        ),
        ({"tokens_per_batch": 20, "pad_to_multiple_of": 8}, "more than a batch of tokens_per_batch=20"),
        ({"seq_len": 16}, "seq_len, which packs them, and group_by_length"),
        ({"group_by_length": 2}, "seq_len, which packs them, and group_by_length"),
        ({"max_padded_tokens": 64}, "leave out max_padded_tokens"),
        ({"padding": "max_length", "max_length": 8}, "padding='max_length'"),
    ],
)
def test_what_makes_no_token_batches_is_refused(data: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        load(data, **options)


def test_what_token_batches_saw_is_not_told_wrongly(data: Path) -> None:
    with load(data) as loader, pytest.raises(UsageError, match="batches of tokens_per_batch"):
        SeenDocuments(loader)
