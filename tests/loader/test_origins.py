"""Where the documents of a batch come from: ``origins=True``, ``shardprep where``, and losses by source."""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import tarfile
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from loader import SourceLosses, TokenLoader, UsageError, source_ids, split_for_context_parallel
from loader.trainer import LoaderMixin
from tests.attention_families import small_model
from tests.oracle.forms import SEQ_LEN, DataSets
from tests.world import call_main, open_loader, refuses

LEAST_PLACES = 10_000 if os.environ.get("ORIGINS") == "all" else 1  # of each form, in whole epochs


@cache
def stored_ids(tar: Path) -> list[list[int]]:
    """The ids of each sample of a tar, by tarfile and numpy alone, without padding."""
    with tarfile.open(tar) as archive:
        members = {item.name: archive.extractfile(item).read() for item in archive}  # type: ignore[union-attr]
    found: list[list[int]] = []
    for name, data in members.items():
        if name.endswith(".token_ids.json"):
            found.append(json.loads(data))
        elif name.endswith(".token_ids.npy"):
            ids = np.load(io.BytesIO(data))
            rows = members.get(name.replace("token_ids", "row_tokens"))
            lengths = [None] * len(ids) if rows is None else np.load(io.BytesIO(rows))
            found += (
                [ids.tolist()]
                if ids.ndim == 1
                else [row[:length].tolist() for row, length in zip(ids, lengths, strict=True)]
            )
    return found


def pieces_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """(source, shard, sample, document) and the ids of each document's part in a batch, padding left out."""
    origins, ids = batch["origins"].tolist(), batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    found = []
    for number, (row, place, *origin) in enumerate(origins):
        later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
        end = later[1] if later[0] == row else ids.shape[1]
        found.append((origin, ids[row, place:end][is_real[row, place:end]].tolist()))
    assert [row for row, *_ in origins] == sorted(row for row, *_ in origins)
    learnt = set((batch["labels"] >= 0).any(dim=1).nonzero().flatten().tolist())
    assert learnt <= {row for row, *_ in origins}, "each row that is no padding has a document"
    return found


def whole_of(origin: list[int], loader: TokenLoader) -> list[int]:
    """The ids of a stored document, or of its part in a row, cut where another begins: by its first id."""
    where, bos = loader.origin(*origin), loader.tokenizer.bos_token_id
    ids = stored_ids(where.tar)[where.sample]
    begins = [0, *(place for place, token in enumerate(ids) if token == bos and place)]
    return ids[begins[where.document] : [*begins[1:], len(ids)][where.document]]


def is_part(ids: list[int], whole: list[int]) -> bool:
    return str(ids)[1:-1] in str(whole)[1:-1]


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("documents", {"num_workers": 2}),
    ("documents", {"max_length": 10}),
    ("documents", {"targets": "shifted"}),
    ("documents", {"group_by_length": 4}),
    ("documents_npy", {"seq_len": SEQ_LEN}),
    ("documents_npy", {"seq_len": SEQ_LEN, "num_workers": 2, "boundaries": "segment_ids"}),
    ("documents_npy", {"seq_len": SEQ_LEN, "targets": "shifted"}),
    ("concat", {}),
    ("concat", {"boundaries": "segment_ids", "num_workers": 2}),
    ("best_fit", {"boundaries": "position_ids"}),
    ("split_packed", {"split": "validation"}),
    ("split_packed", {"split": "train"}),
]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_each_document_of_a_batch_is_the_one_that_lies_where_its_origin_says(
    sets: DataSets, name: str, options: dict[str, Any]
) -> None:
    """And the other fields are as they are without origins."""
    num_places = 0
    with (
        open_loader(sets[name], origins=True, **options) as loader,
        open_loader(sets[name], **{**options, "num_workers": 0}) as plain,
    ):
        while num_places < LEAST_PLACES:
            for batch, without in zip(loader, plain, strict=True):
                for origin, part in pieces_of(batch):
                    assert is_part(part, whole_of(origin, loader)), origin
                    assert part or name == "documents", "a document has tokens"
                    num_places += 1
                assert {*batch} - {*without} == {"origins"}
                assert all(torch.equal(batch[field], without[field]) for field in without)
        for wrong in ((1, 0, 0), (0, 3, 0), (0, 0, 10**6), (-1, 0, 0), (0, 0, -1)):
            with refuses(UsageError):
                loader.origin(*wrong)


# shardprep where

BATCH, RANKS, STEP = 4, 2, 3
WHERE: dict[str, tuple[str, dict[str, Any]]] = {
    "truncated": ("documents", {"max_length": 30}),
    "grouped": ("documents", {"group_by_length": 4}),
    "not shuffled": ("documents", {"shuffle": False}),
    "packed at load": ("documents_npy", {"seq_len": 64}),
    "packed": ("concat", {}),
    "planned side": ("split_packed", {"split": "train"}),
    "batches grow": ("documents", {"global_batch_size": [(0, 16), (2, 32)]}),
}


def load(folder: Path, rank: int = 0, **options: Any) -> TokenLoader:
    given = {"world_size": RANKS, "rank": rank, "global_batch_size": 16, "seed": 5}
    return open_loader(folder, BATCH, **{**given, **options})


def answer(*args: object) -> Any:
    ended = call_main("where", *args, "--json")
    assert ended.code == 0, ended.err
    return json.loads(ended.out.splitlines()[-1])


@pytest.mark.parametrize("name", WHERE)
def test_where_names_the_documents_that_two_ranks_got(sets: DataSets, tmp_path: Path, name: str) -> None:
    """By their origins, which the tests above compare with the tars."""
    folder, options = sets[WHERE[name][0]], WHERE[name][1]
    got: list[dict[str, Any]] = []
    for rank in range(RANKS):
        with load(folder, rank, origins=True, **options) as loader:
            loader.load_state_dict(loader.state_at(STEP))
            for number, batch in enumerate(loader):
                for row, token, *numbers in batch["origins"].tolist():
                    place = {"rank": rank, "batch": number, "row": row, "token": token}
                    origin = dataclasses.asdict(loader.origin(*numbers))
                    got.append({**place, **origin, "tar": str(origin["tar"])})
                if loader.ends_step:
                    break
            (tmp_path / "state.json").write_text(json.dumps(loader.state_at(STEP + 2)))
    told = answer(folder, "--state", tmp_path / "state.json", "--step", STEP)["documents"]
    assert sorted(told, key=str) == sorted(got, key=str)
    num_rows = len({(each["rank"], each["batch"], each["row"]) for each in got})
    assert num_rows == (32 if name == "batches grow" else 16)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_state_is_found_in_a_checkpoint_and_the_last_step_before_it_is_told(
    sets: DataSets, tmp_path: Path, suffix: str
) -> None:
    folder, path = sets["documents"], tmp_path / f"checkpoint{suffix}"
    with load(folder, max_length=30) as loader:
        state = {"model": {"weight": [1.0]}, "extra": [{"loader": loader.state_at(4)}]}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_text(json.dumps(state))
    last = answer(folder, "--state", path)
    assert (last["step"], last["epoch"], last["step_of_epoch"]) == (3, 0, 3)
    assert last == answer(folder, "--state", path, "--step", 3)
    shown = call_main("where", folder, "--state", path).out
    assert all(each["address"] in shown and each["place"] in shown for each in last["documents"])


def test_what_cannot_be_answered_is_refused(sets: DataSets, tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"nothing that torch wrote")
    with load(sets["documents"]) as loader:
        state = loader.state_at(4)
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "damaged.json").write_text(json.dumps({**state, "layout": 3}))
    for name, file, words, code in (
        ("documents", "none.pt", [], 66),
        ("documents", "a.pt", [], 66),
        ("documents", "b.pt", [], 65),
        ("documents", "damaged.json", [], 65),
        ("documents", "state.json", ["--step", "-1"], 2),
        ("concat", "state.json", [], 78),
    ):
        assert call_main("where", sets[name], "--state", tmp_path / file, *words).code == code, (file, words)


# Losses by source


def mixture(sets: DataSets, **options: Any) -> TokenLoader:
    sources = {"web": sets["documents_npy"], "code": sets["concat"]}
    given = {"weights": {"web": 0.5, "code": 0.5}, "seq_len": SEQ_LEN, "global_batch_size": 8}
    return open_loader(sources, **{"origins": True, **given, **options})


@pytest.mark.parametrize("targets", ["same", "shifted"])
def test_losses_by_source_equal_a_sum_by_hand(sets: DataSets, targets: str) -> None:
    torch.manual_seed(0)
    sums: dict[str, list[float]] = {"web": [0.0, 0], "code": [0.0, 0]}
    ahead = int(targets == "same")
    with mixture(sets, targets=targets, seq_len=SEQ_LEN - 1 + ahead) as loader:
        losses, vocabulary = SourceLosses.of_loader(loader), len(loader.tokenizer)
        for batch in islice(loader, 6):
            logits = torch.randn(*batch["input_ids"].shape, vocabulary)
            losses.add(logits, batch["labels"], batch["origins"])
            for row in range(len(logits)):
                of_row = [each for each in batch["origins"].tolist() if each[0] == row]
                for place in range(logits.shape[1] - ahead):
                    label = int(batch["labels"][row, place + ahead])
                    if label >= 0:
                        document = [each for each in of_row if each[1] <= place][-1]
                        of_source = sums[loader.source_names[document[2]]]
                        of_source[0] -= torch.log_softmax(logits[row, place].double(), 0)[label].item()
                        of_source[1] += 1
    expected = {name: total / count for name, (total, count) in sums.items()}
    assert losses.means(reset=True) == pytest.approx(expected, rel=1e-5)
    assert all(map(math.isnan, losses.means().values())), "nothing was counted since"


def test_sources_go_along_where_places_are_dealt_to_ranks(sets: DataSets) -> None:
    with mixture(sets, seq_len=SEQ_LEN - 1, targets="shifted", boundaries="segment_ids") as loader:
        batch: Any = next(each for each in loader if len(each["origins"][:, 2].unique()) == 2)
        losses, of_ranks = (SourceLosses.of_loader(loader) for _ in range(2))
    values = torch.rand(batch["labels"].shape, dtype=torch.float64)
    batch["source_ids"] = source_ids(batch.pop("origins"), batch["labels"].shape)
    losses.add_losses(values, batch["labels"], batch["source_ids"])
    for rank in range(2):
        part = split_for_context_parallel(batch, rank, 2, by="document")
        of_places = values.flatten()[part["place_ids"].clamp_min(0)][None]
        of_ranks.add_losses(of_places, part["labels"], part["source_ids"])
    assert of_ranks.means() == pytest.approx(losses.means())


@pytest.mark.slow
def test_trainer_logs_the_mean_loss_of_each_source(sets: DataSets, tmp_path: Path) -> None:
    # These take 1.5 s to import, which the quick layer need not do.
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(LoaderMixin, Trainer):
        pass

    eval_loader = open_loader(
        sets["split_packed"], split="validation", boundaries="transformers", origins=True
    )
    with mixture(sets, boundaries="transformers") as loader, eval_loader:
        model = small_model("llama", "sdpa")
        model.resize_token_embeddings(len(loader.tokenizer))
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=2, learning_rate=0.0,
            save_strategy="no", eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        trainer: Any = OwnTrainer(model=model, args=arguments, train_loader=loader, eval_loader=eval_loader)
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    with mixture(sets, boundaries="transformers") as again:  # the model does not change
        for line in logged:
            losses = SourceLosses.of_loader(again)
            for batch in islice(again, 4):
                fields: Any = batch
                with torch.no_grad():
                    logits = model.eval()(**{**fields, "origins": None}).logits
                losses.add(logits, batch["labels"], batch["origins"])
            for name, mean in losses.means().items():
                assert line[f"loss/{name}"] == pytest.approx(mean, rel=1e-4)
    (evaluated,) = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated["eval_loss/all"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
