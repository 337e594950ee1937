"""Rows packed at load, and where documents begin in packed rows."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
import webdataset
from transformers import AutoTokenizer

from loader import TokenLoader, get_llama3_dataloader
from loader.boundaries import boundary_fields
from loader.chunks import Edges
from loader.external_tars import scan_tar
from shardprep.errors import UsageError

if TYPE_CHECKING:
    from tests.conftest import Prep

SEQ_LEN = 48
ALL = ("position_ids", "segment_ids", "cu_seqlens")


@pytest.fixture(scope="module")
def made(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sample text in five forms."""
    forms: dict[str, dict[str, Any]] = {
        "json": {},
        "npy": {"token_format": "npy"},
        "with_eos": {"append_eos": True},
        "concat": {"record": "packed", "seq_len": SEQ_LEN},
        "best_fit": {"record": "packed", "seq_len": SEQ_LEN, "pack": "best_fit"},
    }
    return prep.make_forms(sample_dir, tmp_path_factory.mktemp("made"), forms, num_shards=3)


@pytest.fixture(scope="module")
def stream(made: Path, prep: Prep) -> list[int]:
    """All documents joined in the order of the shards, EOS behind each."""
    eos = AutoTokenizer.from_pretrained(prep.model_dir).eos_token_id
    with load(made / "json", 1, shuffle=False) as loader:
        return [number for batch in loader for number in (*batch["input_ids"][0].tolist(), eos)]


def load(shards: Any, batch_size: int = 4, **options: Any) -> TokenLoader:
    return get_llama3_dataloader(shards, batch_size, **{"num_workers": 0, **options})


def rows(loader: TokenLoader) -> list[list[int]]:
    return [row for batch in loader for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize("form", ["json", "npy", "with_eos"])
def test_unshuffled_rows_are_the_joined_documents_cut_at_every_row(
    made: Path, stream: list[int], form: str
) -> None:
    with load(made / form, 1, seq_len=SEQ_LEN, shuffle=False) as loader:
        found = rows(loader)
    assert len(found) == len(stream) // SEQ_LEN
    assert [number for row in found for number in row] == stream[: len(found) * SEQ_LEN]


@pytest.mark.slow
def test_shuffled_rows_are_parts_of_the_same_ring_from_another_token_each_epoch(
    made: Path, stream: list[int]
) -> None:
    with load(made / "json", 1, seq_len=SEQ_LEN) as loader:
        epochs = [rows(loader) for _ in range(2)]
        offsets = [loader.run.sources[0].order.offset(number, len(stream)) for number in range(2)]
    assert offsets[0] != offsets[1]
    for found, offset in zip(epochs, offsets, strict=True):
        turned = stream[offset:] + stream[:offset]
        cut = [tuple(turned[at : at + SEQ_LEN]) for at in range(0, len(stream) - SEQ_LEN + 1, SEQ_LEN)]
        assert Counter(map(tuple, found)) == Counter(cut)
        assert [tuple(row) for row in found] != cut


def test_rows_of_every_length_that_documents_can_have_are_right(made: Path, stream: list[int]) -> None:
    for seq_len in (1, 2, 7, 1000, len(stream)):
        with load(made / "json", 1, seq_len=seq_len, shuffle=False) as loader:
            assert len(loader) == len(stream) // seq_len
            assert next(iter(loader))["input_ids"][0].tolist() == stream[:seq_len]
    with pytest.raises(UsageError):
        load(made / "json", 1, seq_len=len(stream) + 1)


@pytest.mark.processes
def test_tars_of_others_are_packed_at_load_with_their_lengths_counted_first(
    made: Path, prep: Prep, tmp_path: Path
) -> None:
    documents = [list(range(number % 9)) for number in range(100)]
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number, ids in enumerate(documents):
            field, value = ("token_ids.json", ids) if number % 2 else ("token_ids.npy", np.array(ids, "<i4"))
            writer.write({"__key__": f"d{number}", field: value})
    eos = AutoTokenizer.from_pretrained(prep.model_dir).eos_token_id
    expected = [number for ids in documents for number in (*ids, eos)]
    options = {"seq_len": 10, "model_id": prep.model_dir, "shuffle": False, "num_workers": 2}
    with load(tmp_path / "a.tar", 1, **options) as loader:
        found = rows(loader)
    assert [number for row in found for number in row] == expected[: len(expected) // 10 * 10]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["json", "<u2", ">i8"])
def test_tars_of_others_get_an_eos_behind_those_documents_alone_that_end_without_one(
    made: Path, prep: Prep, tmp_path: Path, dtype: str
) -> None:
    eos = AutoTokenizer.from_pretrained(prep.model_dir).eos_token_id
    documents = [[5, 6, eos], [7, eos, 8], [], [eos], [9] * 40 + [eos], [500, 501]] * 5
    field = "token_ids.json" if dtype == "json" else "token_ids.npy"
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        for number, ids in enumerate(documents):
            writer.write({"__key__": f"d{number}", field: ids if dtype == "json" else np.array(ids, dtype)})
    with load(made / "with_eos", 1, shuffle=False) as loader:
        ours = [number for batch in loader for number in batch["input_ids"][0].tolist()]
    theirs = [number for ids in documents for number in (ids if ids[-1:] == [eos] else [*ids, eos])]
    expected = ours + theirs
    options = {"seq_len": 7, "model_id": prep.model_dir, "shuffle": False}
    with load([made / "with_eos", tmp_path / "a.tar"], 1, **options) as loader:
        found = rows(loader)
    assert [number for row in found for number in row] == expected[: len(expected) // 7 * 7]


@pytest.mark.parametrize(
    ("text", "counted"),
    [
        ("[]", (0, -1)),
        (" [ ] ", (0, -1)),
        ("[128001]", (1, 128001)),
        ("[1,2]", (2, 2)),
        ("[\n 1,\n 22\n]\n", (2, 22)),
        ("[1, x]", (2, -1)),
    ],
)
def test_a_json_documents_ids_are_counted_and_its_last_one_is_known(
    tmp_path: Path, text: str, counted: tuple[int, int]
) -> None:
    with webdataset.TarWriter(str(tmp_path / "a.tar")) as writer:
        writer.write({"__key__": "d", "token_ids.json": text.encode()})
    found = scan_tar(tmp_path / "a.tar", count_tokens=True)
    assert found.records[["num_tokens", "last_id"]].tolist() == [counted]


def batch_starts(batch: Any) -> list[set[int]]:
    """Where documents begin in each row of a batch, by its position_ids."""
    return [set(np.flatnonzero(row == 0).tolist()) for row in batch["position_ids"].numpy()]


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("form", ["json", "concat", "best_fit"])
def test_boundaries_stand_where_documents_begin_and_all_three_kinds_agree(
    made: Path, prep: Prep, form: str, workers: int
) -> None:
    bos = AutoTokenizer.from_pretrained(prep.model_dir).bos_token_id
    options = {"seq_len": SEQ_LEN, "boundaries": ALL, "num_workers": workers}
    num_padding = 0
    with load(made / form, 4, **options) as loader:
        for batch in loader:
            ids, mask = batch["input_ids"], batch["attention_mask"]
            edges = batch["cu_seqlens"].tolist()
            for row, starts in enumerate(batch_starts(batch)):
                length = int(mask[row].sum())
                documents = set(np.flatnonzero((ids[row] == bos) & (mask[row] == 1)).tolist())
                assert starts == documents | {0} | ({length} if length < SEQ_LEN else set())
                assert {edge - row * SEQ_LEN for edge in edges} >= starts
                num_padding += SEQ_LEN - length
            assert batch["cu_seqlens"].dtype == torch.int32
            assert len(edges) == sum(map(len, batch_starts(batch))) + 1
            assert edges[-1] == ids.numel()
            assert batch["max_seqlen"] == max(np.diff(edges))
            changes = batch["segment_ids"].diff(dim=1) != 0
            assert torch.equal(changes, (batch["position_ids"] == 0)[:, 1:])
            assert torch.equal(batch["segment_ids"] == 0, mask == 0)
            expected = torch.where((mask == 1) & (batch["position_ids"] > 0), ids, -100)
            assert torch.equal(batch["labels"], expected)
    assert (num_padding > 0) == (form == "best_fit" or form == "concat")


def test_boundaries_of_padded_documents_set_the_padding_apart(made: Path) -> None:
    with load(made / "json", 4, boundaries=ALL) as loader:
        batch = next(iter(loader))
    assert torch.equal(batch["segment_ids"], batch["attention_mask"])
    assert len(batch["cu_seqlens"]) == 1 + 4 + int((batch["attention_mask"][:, -1] == 0).sum())


def test_edges_and_fields_of_a_small_batch_by_hand() -> None:
    starts, num_starts, lengths = np.array([0, 3, 2], np.int32), np.array([2, 1, 0]), np.array([5, 4, 0])
    fields = boundary_fields(ALL, Edges.of_rows(starts, num_starts, lengths, 5), (3, 5), lengths)
    assert fields["position_ids"].tolist() == [[0, 1, 2, 0, 1], [0, 1, 0, 1, 0], [0, 1, 2, 3, 4]]
    assert fields["segment_ids"].tolist() == [[1, 1, 1, 2, 2], [1, 1, 2, 2, 0], [0] * 5]
    assert fields["cu_seqlens"].tolist() == [0, 3, 5, 7, 9, 10, 15]
    assert fields["max_seqlen"] == 5


@pytest.mark.parametrize(
    ("form", "options", "message"),
    [
        ("json", {"seq_len": 0}, "seq_len is 0, expected at least 1"),
        ("json", {"seq_len": 8, "max_length": 8}, "max_length=8"),
        ("json", {"seq_len": 8, "group_by_length": True}, "group_by_length"),
        (
            "json",
            {"boundaries": "rows"},
            r"boundaries has \['rows'\], expected some of transformers, position_ids",
        ),
        ("json", {"boundaries": "position_ids", "collate_fn": list}, "leave out collate_fn or them"),
        ("concat", {"seq_len": 49}, "seq_len=49 .*packed rows of 48 tokens"),
        ("concat", {"max_length": 8}, "packed rows of 48 tokens.*another --seq_len"),
        ("concat", {"group_by_length": True}, "packed rows of 48 tokens"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    made: Path, form: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        load(made / form, **options)


def test_packed_rows_take_their_own_seq_len(made: Path) -> None:
    with load(made / "concat", seq_len=SEQ_LEN) as one, load(made / "concat") as other:
        assert rows(one) == rows(other)
