"""Labels of conversations: the assistant's tokens alone, however the rows are packed, read and mixed."""

from __future__ import annotations

import itertools
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

from loader import CausalLMCollator, get_llama3_dataloader
from shardprep.errors import BrokenShard
from shardprep.format.plan import need_plan
from shardprep.format.shards import ShardSamples
from tests.chat_sets import TAGGED, chat_model, conversations, write_chats

if TYPE_CHECKING:
    from tests.conftest import Prep

pytestmark = pytest.mark.processes  # what renders conversations is one

SEQ_LEN = 64
PACKINGS = ("concat", "best_fit")


@pytest.fixture(scope="module")
def sets(prep: Prep, sample_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Conversations packed in both ways, and plain text in rows of the same length, verified."""
    folder = tmp_path_factory.mktemp("sets")
    model = str(chat_model(prep.model_dir, folder / "model", TAGGED))
    raw = write_chats(folder / "raw", conversations(80))
    made = {name: folder / name for name in (*PACKINGS, "text")}
    for name in PACKINGS:
        options: dict[str, Any] = {"record": "chat", "pack": name, "seq_len": SEQ_LEN, "model_id": model}
        prep.plan(raw, made[name], num_shards=2, **options)
    prep.plan(sample_dir, made["text"], num_shards=1, record="packed", seq_len=SEQ_LEN, model_id=model)
    for out in made.values():
        prep.make(out)
        ended = prep.command("verify", out)
        assert ended.code == 0, ended.text
    return made


def rows_of(folder: Path, *, boundaries: bool = False) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every row, by what lies on disk: padding and others' words have no label."""
    plan, found = need_plan(folder), []
    for shard_id in range(plan.num_shards):
        with ShardSamples(folder, plan.spec, shard_id) as samples:
            for number in range(len(samples.records)):
                ids, mask = samples.ids(number).astype(int), samples.loss_mask(number)
                labels = np.where(mask, ids, -100)
                if boundaries:
                    labels[[0, *samples.starts(number)]] = -100
                num_padding = SEQ_LEN - len(ids)
                padding = [plan.tokenizer.pad_token_id] * num_padding
                found.append((ids.tolist() + padding, labels.tolist() + [-100] * num_padding))
    return found


def rows_in(batch: Any) -> list[tuple[list[int], list[int]]]:
    return list(zip(batch["input_ids"].tolist(), batch["labels"].tolist(), strict=True))


def loaded(folder: Any, batch_size: int = 2, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Ids and labels of every row of an epoch."""
    options = {"shuffle": False, "num_workers": 0, **options}
    with get_llama3_dataloader(folder, batch_size, **options) as loader:
        return [row for batch in loader for row in rows_in(batch)]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("boundaries", [(), "transformers"])
def test_labels_are_those_of_the_loss_mask(sets: dict[str, Path], packing: str, boundaries: Any) -> None:
    expected = rows_of(sets[packing], boundaries=bool(boundaries))
    assert loaded(sets[packing], boundaries=boundaries) == expected[: len(expected) // 2 * 2]
    num_labels = sum(label != -100 for _, labels in expected for label in labels)
    assert 0 < num_labels < len(expected) * SEQ_LEN


def test_workers_and_shuffled_epochs_keep_each_row_with_its_labels(sets: dict[str, Path]) -> None:
    expected = rows_of(sets["concat"], boundaries=True)
    options: dict[str, Any] = {"shuffle": True, "boundaries": "position_ids", "batch_size": 3}
    found = loaded(sets["concat"], **options, num_workers=2)
    assert found == loaded(sets["concat"], **options)
    assert all(row in expected for row in found)
    assert len(found) == len(expected) // 3 * 3


def test_a_collate_fn_gets_labels_beside_ids(sets: dict[str, Path]) -> None:
    def collate(samples: list[dict[str, list[int]]]) -> list[tuple[list[int], list[int]]]:
        return [(sample["input_ids"], sample["labels"]) for sample in samples]

    with get_llama3_dataloader(sets["concat"], 2, shuffle=False, num_workers=2, collate_fn=collate) as loader:
        batches: list[Any] = list(loader)
    found = [row for batch in batches for row in batch]
    expected = rows_of(sets["concat"])[: len(found)]
    assert len(found) > 10
    assert found == [
        (ids[: len(own)], labels[: len(own)]) for (ids, labels), (own, _) in zip(expected, found, strict=True)
    ]


class OwnCollator(CausalLMCollator):
    """As one that inherits, and is called with lists."""


def test_a_collator_that_inherits_makes_the_same_batches(sets: dict[str, Path]) -> None:
    from transformers import AutoTokenizer

    collator = OwnCollator(AutoTokenizer.from_pretrained(sets["concat"] / "tokenizer"))
    own = loaded(sets["concat"], collate_fn=collator)
    assert own == loaded(sets["concat"])


def test_without_idx_or_manifests_the_tars_alone_give_the_same_labels(
    sets: dict[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    expected = loaded(sets["best_fit"])
    without_idx = Path(shutil.copytree(sets["best_fit"], tmp_path / "without_idx"))
    for path in without_idx.glob("*.idx"):
        path.unlink()
    assert loaded(without_idx) == expected
    tars = tmp_path / "tars"
    tars.mkdir()
    for path in sets["best_fit"].glob("*.tar"):
        shutil.copy(path, tars)
    assert loaded(str(tars / "*.tar"), model_id=str(sets["best_fit"] / "tokenizer")) == expected


def test_conversations_mixed_with_text_have_labels_of_their_own_kind(sets: dict[str, Path]) -> None:
    sources = {"chat": sets["concat"], "text": sets["text"]}
    with get_llama3_dataloader(sources, 4, num_workers=0, weights={"chat": 0.5, "text": 0.5}) as loader:
        found = [row for batch in loader for row in rows_in(batch)]
    chat, text = rows_of(sets["concat"]), rows_of(sets["text"])
    assert all((row in chat) != (row in text) for row in found)
    assert any(row in chat for row in found)
    assert any(row in text for row in found)


def test_both_kinds_in_one_list_of_folders_keep_their_labels(sets: dict[str, Path]) -> None:
    found = loaded([sets["text"], sets["concat"]], 1)
    assert found == [*rows_of(sets["text"]), *rows_of(sets["concat"])]


def test_a_validation_loader_keeps_labels_and_its_tail_has_none_that_a_row_does_not_have(
    sets: dict[str, Path],
) -> None:
    expected = rows_of(sets["best_fit"])
    with get_llama3_dataloader(sets["best_fit"], 8, split="validation", num_workers=0) as loader:
        is_filler = loader.run.order.is_filler(len(loader) - 1, range(8))
        assert is_filler is not None
        held_out = [row for batch in loader for row in rows_in(batch)]
    fillers = [row for row, fills in zip(held_out[-8:], is_filler, strict=True) if fills]
    assert all(label == -100 for _, labels in fillers for label in labels)
    held_out = [
        *held_out[:-8],
        *(row for row, fills in zip(held_out[-8:], is_filler, strict=True) if not fills),
    ]
    assert any(label != -100 for _, labels in held_out for label in labels)
    assert sorted(held_out) == sorted(expected)


def test_a_mask_of_another_shape_is_refused(sets: dict[str, Path], tmp_path: Path) -> None:
    tar = tmp_path / "shard-00000.tar"
    raw = (sets["concat"] / "shard-00000.tar").read_bytes()
    shape = b"'descr': '|u1', 'fortran_order': False, 'shape': ("
    at = raw.index(shape) + len(shape)
    tar.write_bytes(raw[:at] + b"9" + raw[at + 1 :])
    with pytest.raises(BrokenShard, match=r"loss_mask\.npy"):
        loaded(str(tar), model_id=str(sets["concat"] / "tokenizer"))


def test_a_loss_of_these_labels_leaves_questions_out(sets: dict[str, Path]) -> None:
    with get_llama3_dataloader(sets["concat"], 2, shuffle=False, num_workers=0) as loader:
        batch = next(iter(loader))
    logits = torch.zeros(*batch["labels"].shape, len(loader.tokenizer), requires_grad=True)
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()).backward()
    assert logits.grad is not None
    has_gradient = logits.grad.abs().sum(-1) > 0
    assert torch.equal(has_gradient, batch["labels"] != -100)


@pytest.mark.parametrize("boundaries", [(), "segment_ids"])
def test_rows_on_disk_are_mixed_alike_on_every_world_and_after_every_resume(
    sets: dict[str, Path], boundaries: Any
) -> None:
    sources = {"chat": sets["best_fit"], "text": sets["text"]}
    options: dict[str, Any] = {
        "global_batch_size": 4,
        "weights": [(0, {"chat": 0.7, "text": 0.3}), (9, {"chat": 0.2, "text": 0.8})],
        "boundaries": boundaries,
    }

    def batches(world: int, rank: int, first: int, num_steps: int, workers: int = 0) -> list[Any]:
        with get_llama3_dataloader(
            sources, 4 // world, rank=rank, world_size=world, num_workers=workers, **options
        ) as loader:
            loader.load_state_dict(loader.state_at(first))
            return [rows_in(batch) for batch in itertools.islice(loader, num_steps)]

    whole = batches(1, 0, 0, 24)
    text = rows_of(sets["text"])
    if not boundaries:  # else labels at the edges of documents differ
        num_text = [sum(row in text for row in batch) for batch in whole]
        assert 0 < sum(num_text[:9]) < sum(num_text[9:18])
    for world, first, workers in ((2, 0, 2), (4, 7, 0), (1, 11, 2)):
        parts = [batches(world, rank, first, 24 - first, workers) for rank in range(world)]
        joined = [list(itertools.chain(*of_step)) for of_step in zip(*parts, strict=True)]
        assert joined == whole[first:], (world, first)


@pytest.fixture(scope="module")
def long_questions(prep: Prep, sets: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations whose questions fill whole rows, which have no label."""
    folder = tmp_path_factory.mktemp("long_questions")
    question = {"role": "user", "content": "why? " * SEQ_LEN}
    raw = write_chats(folder / "raw", [[question, {"role": "assistant", "content": "so."}]] * 6)
    out = folder / "out"
    model = str(sets["concat"] / "tokenizer")
    prep.plan(raw, out, num_shards=1, record="chat", seq_len=SEQ_LEN, model_id=model)
    prep.make(out)
    return out


@pytest.mark.parametrize("collates", ["itself", "by a collate_fn", "by a collate_fn in workers"])
def test_a_batch_without_any_label_is_told_once_for_a_loader(
    long_questions: Path, caplog: pytest.LogCaptureFixture, collates: str
) -> None:
    options: dict[str, Any] = {"num_workers": 0}
    if collates != "itself":
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(long_questions / "tokenizer")
        workers = 1 if collates.endswith("workers") else 0
        options = {"num_workers": workers, "collate_fn": OwnCollator(tokenizer)}
    for number in (1, 2):
        with get_llama3_dataloader(long_questions, 1, shuffle=False, **options) as loader:
            num_empty = sum(bool((batch["labels"] == -100).all()) for batch in loader)
        assert num_empty > 6
        assert caplog.text.count("a batch has no label left") == number


def test_nothing_is_told_of_batches_that_have_labels(
    sets: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    assert any(label != -100 for _, labels in loaded(sets["best_fit"], 8) for label in labels)
    assert "no label" not in caplog.text


def test_a_label_that_nothing_stands_before_is_none_to_a_model(
    prep: Prep, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "raw").mkdir()
    (tmp_path / "raw" / "a.txt").write_text("a\n" * 4)
    out = tmp_path / "out"
    prep.plan(tmp_path / "raw", out, num_shards=1, add_special_tokens=False)
    prep.make(out)
    assert all(sum(label != -100 for label in labels) == 1 for _, labels in loaded(out, 1))
    assert caplog.text.count("a batch has no label left") == 1
