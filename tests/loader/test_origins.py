"""``origins=True``: where each document of a batch comes from, compared with inputs read another way."""

from __future__ import annotations

import io
import json
import os
import re
import sys
import tarfile
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from loader import SourceLosses, TokenLoader, get_llama3_dataloader, source_ids
from loader.context_parallel import split_for_context_parallel
from shardprep.errors import UsageError
from tests.checkout import ROOT
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

ROW = 128
LEAST_PLACES = 10_000 if os.environ.get("ORIGINS") == "all" else 1  # of each form, in whole epochs


@pytest.fixture(scope="module")
def sets(
    prep: Prep, sample_dir: Path, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("sets")
    if LEAST_PLACES > 1:
        sample_dir = root / "raw"
        sample_dir.mkdir()
        for path in request.getfixturevalue("corpora_dir").iterdir():
            lines = path.read_text().split("\n")[:8_000]
            (sample_dir / path.name).write_text("\n".join(line[:300] for line in lines))
    forms: dict[str, dict[str, Any]] = {
        "documents": {"append_eos": True},
        "concat": {"record": "packed", "seq_len": ROW},
        "best_fit": {"record": "packed", "seq_len": ROW, "pack": "best_fit"},
        "held_out": {"record": "packed", "seq_len": ROW, "validation_fraction": 0.2},
    }
    for name, options in forms.items():
        prep.plan(sample_dir, root / name, num_shards=3, **options)
        prep.make(root / name)
    return {name: root / name for name in forms}


@cache
def stored_ids(tar: Path) -> list[list[int]]:
    """The ids of each sample of a tar, by tarfile alone, padding of rows included."""
    found = []
    with tarfile.open(tar) as archive:
        for member in archive:
            content: Any = archive.extractfile(member)
            if member.name.endswith(".token_ids.json"):
                found.append(json.loads(content.read()))
            elif member.name.endswith(".token_ids.npy"):
                found += np.load(io.BytesIO(content.read())).reshape(-1, ROW).tolist()
    return found


def load(data: Any, **options: Any) -> TokenLoader:
    made = {"batch_size": 4, "num_workers": 0, "origins": True, "rank": 0, "world_size": 1, **options}
    return get_llama3_dataloader(data, **made)


def pieces_of(batch: Any) -> list[tuple[list[int], list[int]]]:
    """(source, shard, sample, document) and the ids of each document's part in a batch, padding left out."""
    origins, ids = batch["origins"].tolist(), batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    found = []
    for number, (row, place, *origin) in enumerate(origins):
        later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
        end = later[1] if later[0] == row else ids.shape[1]
        kept = is_real[row, place:end]
        found.append((origin, ids[row, place:end][kept].tolist()))
    assert [row for row, *_ in origins] == sorted(row for row, *_ in origins)
    learnt = set((batch["labels"] >= 0).any(dim=1).nonzero().flatten().tolist())
    assert learnt <= {row for row, *_ in origins}, "each row that is no padding has a document"
    return found


def whole_of(origin: list[int], loader: TokenLoader, starts_with: int) -> list[int]:
    """The ids of a stored document, or of its part in a row, cut where another begins: by its first id."""
    where = loader.origin(*origin)
    ids = stored_ids(where.tar)[where.sample]
    if where.document == 0 and starts_with not in ids[1:]:
        return ids
    begins = [0, *(place for place, token in enumerate(ids) if token == starts_with and place)]
    return ids[begins[where.document] : [*begins[1:], len(ids)][where.document]]


FORMS: list[tuple[str, dict[str, Any]]] = [
    ("documents", {}),
    ("documents", {"num_workers": 2}),
    ("documents", {"max_length": 40}),
    ("documents", {"targets": "shifted"}),
    ("documents", {"group_by_length": 4}),
    ("documents", {"seq_len": ROW}),
    ("documents", {"seq_len": ROW, "num_workers": 2, "boundaries": "segment_ids"}),
    ("documents", {"seq_len": ROW, "targets": "shifted"}),
    ("concat", {}),
    ("concat", {"boundaries": "segment_ids", "num_workers": 2}),
    ("best_fit", {}),
    ("best_fit", {"boundaries": "position_ids"}),
    ("held_out", {"split": "validation"}),
    ("held_out", {"split": "train", "num_workers": 2}),
]


@pytest.mark.processes
@pytest.mark.parametrize(("name", "options"), FORMS)
def test_each_document_of_a_batch_is_the_one_that_lies_where_its_origin_says(
    sets: dict[str, Path], name: str, options: dict[str, Any]
) -> None:
    seen: dict[tuple[int, ...], int] = defaultdict(int)
    num_batches = num_places = 0
    with load(sets[name], **options) as loader:
        first = loader.tokenizer.bos_token_id
        while num_places < LEAST_PLACES:
            for batch in loader:
                num_batches += 1
                for origin, part in pieces_of(batch):
                    whole = whole_of(origin, loader, first)
                    assert str(part)[1:-1] in str(whole)[1:-1], (origin, part[:9], whole[:9])
                    assert part or name == "documents", "a document has tokens"
                    seen[tuple(origin)] += len(part)
                    num_places += 1
    assert num_batches > 3


def test_the_address_of_an_origin_is_that_of_its_text(prep: Prep, sets: dict[str, Path]) -> None:
    for name in ("documents", "concat", "best_fit"):
        with load(sets[name], boundaries="segment_ids") as loader:
            pieces = pieces_of(next(iter(loader)))
            where = [loader.origin(*origin) for origin, _ in pieces]
            tokenizer = Tokenizer.from_file(str(sets[name] / "tokenizer" / "tokenizer.json"))
        for (_, ids), origin in list(zip(pieces, where, strict=True))[:6]:
            ended = prep.command("peek", sets[name], origin.address, "--chars", 0)
            text = tokenizer.decode(ids)
            assert ended.code == 0
            assert "".join(text.split()) in "".join(re.sub("⟦.*?⟧", "", ended.text).split())


def test_an_origin_names_the_input_and_the_byte_of_its_document(
    sets: dict[str, Path], sample_dir: Path
) -> None:
    num_seen = 0
    with load(sets["documents"]) as loader:
        tokenizer = Tokenizer.from_file(str(sets["documents"] / "tokenizer" / "tokenizer.json"))
        for batch in loader:
            for origin, part in pieces_of(batch):
                where = loader.origin(*origin)
                name, unit, offset = where.place.split(" ")
                line = (sample_dir / name).read_bytes()[int(offset) :].split(b"\n", 1)[0].decode().strip()
                assert unit == "byte"
                assert tokenizer.encode(line).ids[:9] == part[: min(9, len(part) - 1)][:9] or len(part) < 11
                assert tokenizer.decode(part) == tokenizer.decode(tokenizer.encode(line).ids)
                num_seen += 1
    assert num_seen > 50


@pytest.mark.processes
@pytest.mark.parametrize("workers", [0, 2])
def test_origins_of_a_mixture_have_the_number_of_their_source_and_are_those_after_a_resume(
    sets: dict[str, Path], workers: int
) -> None:
    sources = {"web": sets["documents"], "code": sets["concat"]}
    options = {"weights": {"web": 0.5, "code": 0.5}, "weights_in": "samples", "seq_len": ROW}
    with load(sources, num_workers=workers, global_batch_size=8, **options) as loader:
        assert loader.source_names == ("web", "code")
        first = loader.tokenizer.bos_token_id
        found, state = [], None
        for number, batch in enumerate(loader):
            for origin, part in pieces_of(batch):
                assert loader.origin(*origin).source == loader.source_names[origin[0]]
                assert str(part)[1:-1] in str(whole_of(origin, loader, first))[1:-1]
            if number == 5:
                state = loader.state_dict()
            if 5 < number < 20:
                found.append(batch["origins"].tolist())
            if number == 20:
                break
        assert {origin[2] for each in found for origin in each} == {0, 1}
    assert state is not None
    parts = []
    for rank in range(2):
        with load(sources, batch_size=2, rank=rank, world_size=2, global_batch_size=8, **options) as of_rank:
            of_rank.load_state_dict(state)
            parts.append([batch["origins"] for _, batch in zip(range(14), of_rank, strict=False)])
    whole = [[[*origin[1:]] for origin in each] for each in found]
    by_step = [sorted(chain(*whole[step : step + 2])) for step in range(0, 14, 2)]
    resumed = [
        sorted(row[1:] for of_rank in parts for batch in of_rank[step : step + 2] for row in batch.tolist())
        for step in range(0, 14, 2)
    ]
    assert resumed == by_step


def test_without_origins_batches_are_as_they_were_and_with_them_the_other_fields_are(
    sets: dict[str, Path],
) -> None:
    for name, options in FORMS:
        if options.get("num_workers"):
            continue
        with load(sets[name], **options) as having, load(sets[name], **options, origins=False) as lacking:
            for with_them, without in zip(having, lacking, strict=True):
                assert {*with_them} - {*without} == {"origins"}
                assert all(torch.equal(with_them[field], without[field]) for field in without)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"collate_fn": list}, "origins are told of the loader's own batches"),
        ({"origins": "yes"}, "origins is 'yes', expected True or False"),
        ({"origins": None}, "origins is None, expected True or False"),
    ],
)
def test_origins_that_nobody_would_get_are_refused(
    sets: dict[str, Path], options: dict[str, Any], said: str
) -> None:
    with pytest.raises(UsageError, match=said):
        load(sets["concat"], **options)


def test_numbers_that_are_no_origin_are_refused(sets: dict[str, Path]) -> None:
    with load(sets["documents"]) as loader:
        for wrong in ((1, 0, 0), (0, 3, 0), (0, 0, 10**6), (-1, 0, 0), (0, 0, -1)):
            with pytest.raises(UsageError, match=r"shard|source"):
                loader.origin(*wrong)


@pytest.mark.parametrize("targets", ["same", "shifted"])
def test_losses_by_source_equal_a_sum_by_hand(sets: dict[str, Path], targets: Any) -> None:
    sources = {"web": sets["documents"], "code": sets["concat"]}
    options = {"weights": {"web": 0.5, "code": 0.5}, "seq_len": ROW - (targets == "shifted")}
    torch.manual_seed(0)
    sums = {"web": [0.0, 0], "code": [0.0, 0]}
    with load(sources, global_batch_size=8, targets=targets, **options) as loader:
        losses = SourceLosses.of_loader(loader)
        vocab = loader.loader_tokenizer.vocab_size
        for _, batch in zip(range(6), loader, strict=False):
            logits = torch.randn(*batch["input_ids"].shape, vocab)
            losses.add(logits, batch["labels"], batch["origins"])
            ahead = 1 - (targets == "shifted")
            for row in range(len(logits)):
                of_row = [each for each in batch["origins"].tolist() if each[0] == row]
                for place in range(logits.shape[1] - ahead):
                    label = int(batch["labels"][row, place + ahead])
                    if label >= 0:
                        document = [each for each in of_row if each[1] <= place][-1]
                        name = loader.source_names[document[2]]
                        value = -torch.log_softmax(logits[row, place].double(), 0)[label].item()
                        sums[name] = [sums[name][0] + value, sums[name][1] + 1]
    by_hand = {name: total / count for name, (total, count) in sums.items()}
    assert losses.means(reset=True) == pytest.approx(by_hand, rel=1e-5)
    assert all(mean != mean for mean in losses.means().values()), "NaN: nothing was counted since"


@pytest.mark.slow
def test_trainer_logs_the_mean_loss_of_each_source(sets: dict[str, Path], tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

    from loader.trainer import LoaderMixin

    class OwnTrainer(LoaderMixin, Trainer):
        pass

    sources = {"web": sets["documents"], "code": sets["concat"]}
    options = {"weights": {"web": 0.5, "code": 0.5}, "seq_len": ROW, "boundaries": "transformers"}
    eval_loader = load(sets["held_out"], split="validation", boundaries="transformers")
    with load(sources, global_batch_size=8, **options) as loader, eval_loader:
        torch.manual_seed(0)
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=loader.loader_tokenizer.vocab_size,
                hidden_size=16,
                intermediate_size=32,
                num_hidden_layers=1,
                num_attention_heads=2,
            )
        )
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=2, learning_rate=0.0,
            save_strategy="no", eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        trainer: Any = OwnTrainer(model=model, args=arguments, train_loader=loader, eval_loader=eval_loader)
        trainer.train()
    history = trainer.state.log_history
    logged = [line for line in history if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    for number, line in enumerate(logged):  # the model does not change
        sums = {"web": [0.0, 0], "code": [0.0, 0]}
        with load(sources, global_batch_size=8, **options) as again:
            for batch in list(islice(again, 4 * number, 4 * number + 4)):
                of_place = source_ids(batch.pop("origins"), batch["labels"].shape)[:, :-1]
                labels = batch.pop("labels")[:, 1:]
                with torch.no_grad():
                    scores = model.eval()(**batch).logits[:, :-1].double().log_softmax(-1)
                values = -scores.gather(-1, labels.clamp_min(0)[..., None])[..., 0]
                for source, name in enumerate(sums):
                    chosen = (of_place == source) & (labels >= 0)
                    sums[name][0] += values[chosen].sum().item()
                    sums[name][1] += int(chosen.sum())
        for name, (total, count) in sums.items():
            assert line[f"loss/{name}"] == pytest.approx(total / count, rel=1e-4)
    (evaluated,) = [line for line in history if "eval_loss" in line]
    assert evaluated["eval_loss/all"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)


def test_sources_go_along_where_places_are_dealt_to_ranks(sets: dict[str, Path]) -> None:
    sources = {"web": sets["documents"], "code": sets["concat"]}
    options = {"weights": {"web": 0.5, "code": 0.5}, "seq_len": ROW - 1, "targets": "shifted"}
    with load(sources, global_batch_size=4, boundaries="segment_ids", **options) as loader:
        batch = next(each for each in loader if len(each["origins"][:, 2].unique()) == 2)
        losses, of_ranks = (SourceLosses.of_loader(loader) for _ in range(2))
    values = torch.rand(batch["labels"].shape, dtype=torch.float64)
    batch["source_ids"] = source_ids(batch.pop("origins"), batch["labels"].shape)
    losses.add_losses(values, batch["labels"], batch["source_ids"])
    for rank in range(2):
        part = split_for_context_parallel(batch, rank, 2, by="document")
        of_places = values.flatten()[part["place_ids"].clamp_min(0)][None]
        of_ranks.add_losses(of_places, part["labels"], part["source_ids"])
    assert of_ranks.means() == pytest.approx(losses.means())


RANKS = """
import sys
from pathlib import Path
import torch, torch.distributed as dist
from loader import SourceLosses, get_llama3_dataloader, source_ids
rank, out, *folders = sys.argv[1:]
dist.init_process_group("gloo", init_method=f"file://{out}/store", rank=int(rank), world_size=2)
sources = dict(zip(("web", "code"), folders))
loader = get_llama3_dataloader(
    sources, 4, weights={"web": .5, "code": .5}, seq_len=128, num_workers=0, origins=True
)
losses, kept = SourceLosses.of_loader(loader), []
for _, batch in zip(range(5), loader):
    values = torch.rand(batch["input_ids"][:, 1:].shape, dtype=torch.float64)
    losses.add_losses(values, batch["labels"][:, 1:], source_ids(batch["origins"], values.shape))
    kept.append((values, batch["labels"][:, 1:], batch["origins"]))
torch.save({"means": losses.means(), "kept": kept}, Path(out, f"{rank}.pt"))
dist.barrier()
dist.destroy_process_group()  # else threads of gloo may outlive the interpreter, and it aborts
"""


@pytest.mark.processes
def test_losses_by_source_on_two_ranks_are_those_of_all_labels(sets: dict[str, Path], tmp_path: Path) -> None:
    folders = tmp_path, sets["documents"], sets["concat"]
    with ThreadPoolExecutor() as pool:
        ended = list(
            pool.map(lambda rank: run_child([sys.executable, "-c", RANKS, rank, *folders], cwd=ROOT), "01")
        )
    assert [each.returncode for each in ended] == [0, 0], ended
    saved = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert saved[0]["means"] == saved[1]["means"]
    sums = [[0.0, 0], [0.0, 0]]
    for values, labels, origins in (each for of_rank in saved for each in of_rank["kept"]):
        of_place = source_ids(origins, labels.shape)
        for number in range(2):
            chosen = (of_place == number) & (labels >= 0)
            sums[number][0] += values[chosen].sum().item()
            sums[number][1] += int(chosen.sum())
    assert saved[0]["means"] == pytest.approx(
        {name: total / count for name, (total, count) in zip(("web", "code"), sums, strict=True)}
    )
