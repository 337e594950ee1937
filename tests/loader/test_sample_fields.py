"""``sample_fields``: what a collate_fn of one's own gets of each sample beside its ids."""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from loader import get_llama3_dataloader
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

FIELDS = ("num_tokens", "doc_starts", "lengths")


@pytest.fixture(scope="module")
def sets(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sets")
    forms: dict[str, dict[str, Any]] = {
        "documents": {},
        "concat": {"record": "packed", "seq_len": 256},
        "best_fit": {"record": "packed", "seq_len": 256, "pack": "best_fit"},
    }
    for name, options in forms.items():
        prep.plan(sample_dir, root / name, num_shards=1, **options)
        prep.make(root / name)
    return {name: root / name for name in forms}


def samples_of(folder: Path, **options: Any) -> list[dict[str, Any]]:
    made: dict[str, Any] = {"num_workers": 0, "shuffle": False, "collate_fn": list, "batch_size": 2}
    made |= {"sample_fields": FIELDS, "rank": 0, "world_size": 1, **options}
    with get_llama3_dataloader(folder, **made) as loader:
        batches: Any = list(loader)
    return list(chain.from_iterable(batches))


@pytest.mark.processes
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("documents", {}),
        ("documents", {"num_workers": 2}),
        ("documents", {"seq_len": 128}),
        ("concat", {}),
        ("best_fit", {"num_workers": 2}),
    ],
)
def test_each_field_is_what_the_ids_say(sets: dict[str, Path], name: str, options: dict[str, Any]) -> None:
    found = samples_of(sets[name], **options)
    with get_llama3_dataloader(sets[name], 1, num_workers=0, rank=0, world_size=1) as loader:
        first_id = loader.tokenizer.bos_token_id
    num_cut = 0
    for sample in found:
        ids = sample["input_ids"]
        assert list(sample) == ["input_ids", *FIELDS]
        assert sample["num_tokens"] == len(ids)
        begins = [place for place, token in enumerate(ids) if token == first_id]
        assert sample["doc_starts"] == begins
        edges = [*([] if begins[:1] == [0] else [0]), *begins, len(ids)]
        assert sample["lengths"] == [end - begin for begin, end in pairwise(edges)]
        num_cut += begins[:1] != [0]
    assert len(found) > 5
    assert (num_cut > 0) == (name != "documents" or "seq_len" in options), "rows that go on with a document"


def test_only_the_fields_that_were_asked_for_are_given(sets: dict[str, Path]) -> None:
    found = samples_of(sets["concat"], sample_fields=["lengths"])
    assert {tuple(sample) for sample in found} == {("input_ids", "lengths")}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"sample_fields": ["length"]}, "expected a list of some of num_tokens, doc_starts, lengths"),
        ({"sample_fields": "lengths"}, "sample_fields is 'lengths', expected a list"),
        ({"collate_fn": None}, "what a collate_fn of your own gets"),
    ],
)
def test_fields_that_nobody_would_get_are_refused(
    sets: dict[str, Path], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        samples_of(sets["concat"], **options)
