"""Where the documents of a batch come from: ``origins=True``, ``shardprep where``, losses by source.

And ``where --blanked``: the steps that saw documents that are blanked by now. Each document is one word again
and again, in files of all formats side by side, so whatever is printed or loaded of it tells which one it is.
"""

from __future__ import annotations

import bz2
import dataclasses
import gzip
import json
import lzma
import math
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
import torch
import zstandard
from pyarrow import ipc

from loader import SourceLosses, TokenLoader, UsageError, source_ids, split_for_context_parallel
from loader.trainer import LoaderMixin
from tests.attention_families import small_model
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, call_main, open_loader, refuses

NUM_DOCUMENTS, EOS, VOCAB_SIZE = 400, 501, 502  # every id of document 7 is 7
L = 12
SETS: dict[str, dict[str, Any]] = {
    "mixed": {"max_bad_fraction": 1.0},  # of files of all formats
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": False},
    "best fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": False},
    "sides": {"validation_fraction": 0.3},
    "sides of rows": {"record": "packed", "seq_len": 16, "validation_fraction": 0.3},
    # Of these two each has a half of the documents.
    "low": {},
    "high": {"token_format": "npy"},
}
SUFFIXES = ("txt", "txt.gz", "txt.xz", "jsonl", "jsonl.gz", "jsonl.bz2", "jsonl.zst", "parquet", "arrow")
COMPRESSED: dict[str, Callable[[bytes], bytes]] = {
    "": bytes, "gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress,
    "zst": zstandard.ZstdCompressor().compress,
}  # fmt: skip
HALVES = {"low": range(1, 201), "high": range(201, NUM_DOCUMENTS + 1)}
Form = str | list[str]
Options = dict[str, Any]
Steps = dict[int, dict[str, int]]  # step -> source -> samples


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


# Twenty words are enough to be found in an evaluation.
LONG = [number for number in range(1, NUM_DOCUMENTS + 1) if len(text_of(number).split()) >= 20]
NAMED = random.Random(1).sample(LONG, 24)


def write_mixed(raw: Path) -> None:
    """Write all documents in files of all formats, beside lines that hold none."""
    chance = random.Random(0)
    for part, suffix in enumerate(SUFFIXES):
        numbers = range(1 + NUM_DOCUMENTS * part // 9, 1 + NUM_DOCUMENTS * (part + 1) // 9)
        records: list[dict[str, Any]] = [{"text": text_of(number), "id": f"d{number}"} for number in numbers]
        path = raw / f"{part}.{suffix}"
        kind, _, compression = suffix.partition(".")
        if kind in ("parquet", "arrow"):
            table = pa.Table.from_pylist([*records[:9], {"text": None, "id": "none"}, *records[9:]])
            if kind == "parquet":
                pyarrow.parquet.write_table(table, path, row_group_size=5)
                continue
            with ipc.new_stream(str(path), table.schema) as writer:
                writer.write_table(table, max_chunksize=4)
            continue
        lines = []
        for record in records:
            lines.append(f" {record['text']} " if kind == "txt" else json.dumps(record))
            bad = [] if kind == "txt" else ["{no JSON", '{"text": null}']
            lines += chance.choice([[], [], ["", " "], bad])
        path.write_bytes(COMPRESSED[compression]("\n".join(lines).encode()))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root / "model", VOCAB_SIZE, splits=True)
    for form, options in SETS.items():
        numbers = HALVES.get(form, range(1, NUM_DOCUMENTS + 1))
        world = World(root / form, tokenizer=root / "model", data_dir=root / form)
        if form == "mixed":
            write_mixed(world.raw_dir)
        else:
            records = [{"id": f"d{number}", "text": text_of(number)} for number in numbers]
            world.raw({f"{form}.jsonl": records})
        world.make(num_shards=5, id_field="id", digests=True, **options)
    return root


@pytest.fixture(scope="module")
def blanked(data: Path) -> Path:
    """The same folder, where FORM.new has the documents NAMED blanked."""
    for form in SETS:
        names = data / f"{form}.ids"
        names.write_text("".join(f"d{number}\n" for number in NAMED))
        if form in HALVES:
            names.write_text("".join(f"d{number}\n" for number in NAMED if number in HALVES[form]))
        if form == "mixed":  # what is found in an evaluation is blanked
            (data / "evals.txt").write_text("\n".join(map(text_of, NAMED)))
            assert call_main("overlap", data / form, "--against", data / "evals.txt").code == 0
            names = data / form / "overlap" / "names.txt"
        World(data / form, data_dir=data / form).blanked(names, data / f"{form}.new")
    return data


CASES: dict[str, tuple[Form, Options]] = {
    "documents": ("mixed", {}),
    "cut": ("npy", {"max_length": 5}),
    "grouped": ("mixed", {"group_by_length": 3}),
    "not shuffled": ("mixed", {"shuffle": False}),
    "packed at load": ("mixed", {"seq_len": 16, "boundaries": "segment_ids"}),
    "packed at load with an EOS of the shards": ("npy", {"seq_len": 24}),
    "packed": ("concat", {}),
    "packed, by workers": ("concat", {"num_workers": 2, "boundaries": "segment_ids"}),
    "best fit": ("best fit", {"boundaries": "position_ids"}),
    "a side": ("sides", {"split": "train"}),
    "the other side": ("sides", {"split": "validation"}),
    "a side of rows": ("sides of rows", {"split": "train"}),
    "a side packed at load, by workers": ("sides", {"split": "train", "seq_len": 16, "num_workers": 2}),
    "batches grow": ("mixed", {"global_batch_size": [(0, L), (7, 3 * L), (50, 2 * L)]}),
    "mixed": (
        ["low", "high"],
        {"weights": [(0, {"low": 0.7, "high": 0.3}), (40, {"low": 0.1, "high": 0.9})], "max_length": 9},
    ),
    "mixed and packed at load": (["low", "high"], {"weights": {"low": 1, "high": 3}, "seq_len": 16}),
}
SHIFTED: dict[str, tuple[Form, Options]] = {
    "shifted": ("mixed", {"targets": "shifted"}),
    "shifted rows": ("npy", {"seq_len": 16, "targets": "shifted"}),
}


def params_of(cases: dict[str, Any]) -> list[Any]:
    return [
        pytest.param(*value, id=name, marks=[pytest.mark.processes] * ("workers" in name))
        for name, value in cases.items()
    ]


def load(data: Path, form: Form, suffix: str = "", batch_size: int = L, **options: Any) -> TokenLoader:
    folders: Any = data / f"{form}{suffix}"
    if isinstance(form, list):
        folders = {name: data / f"{name}{suffix}" for name in form}
    made = {"global_batch_size": L, "seed": 3, "origins": True, **options}
    return open_loader(folders, batch_size, **made)


def words_of(data: Path, form: Form, suffix: str = "") -> list[object]:
    """What ``where`` is given for the data of a loader."""
    if isinstance(form, str):
        return [data / f"{form}{suffix}"]
    return [f"{name}={data / name}{suffix}" for name in form]


def answer(*words: object) -> Any:
    ended = call_main("where", *words, "--json")
    assert ended.code == 0, ended.text
    return json.loads(ended.out.splitlines()[-1])


def pieces_of(batch: Any) -> Iterator[tuple[list[int], set[int]]]:
    """(source, shard, sample, document) and the ids of each document's part in a batch, padding left out."""
    origins, ids = batch["origins"].tolist(), batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    for number, (row, place, *origin) in enumerate(origins):
        later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
        end = later[1] if later[0] == row else ids.shape[1]
        yield origin, {*ids[row, place:end][is_real[row, place:end]].tolist()} - {EOS}
    assert [row for row, *_ in origins] == sorted(row for row, *_ in origins)
    learnt = set((batch["labels"] >= 0).any(dim=1).nonzero().flatten().tolist())
    assert learnt <= {row for row, *_ in origins}, "each row that is no padding has a document"


@pytest.mark.parametrize(("form", "options"), params_of(CASES | SHIFTED))
def test_documents_lie_where_their_origins_say(data: Path, form: Form, options: Options) -> None:
    """And the other fields are as they are without origins."""
    found: dict[tuple[str, str, str], set[int]] = {}
    with (
        load(data, form, **options) as loader,
        load(data, form, origins=False, **{**options, "num_workers": 0}) as plain,
    ):
        for batch, without in zip(loader, plain, strict=True):
            for origin, words in pieces_of(batch):
                where = loader.origin(*origin)
                found.setdefault((where.source, where.address, where.place), set()).update(words)
            assert {*batch} - {*without} == {"origins"}
            assert all(torch.equal(batch[field], without[field]) for field in without)
        for wrong in ((2, 0, 0), (0, 10, 0), (0, 0, 10**6), (-1, 0, 0), (0, 0, -1)):
            with refuses(UsageError):
                loader.origin(*wrong)
    assert {len(words) for words in found.values()} <= {0, 1}, "an address is of one document"
    for source, address, place in random.Random(0).sample(sorted(found), 15):
        words = found[source, address, place]
        folder = data / (form if isinstance(form, str) else source)
        path, _, unit = place.partition(" ")
        addresses = [address] if "record" in SETS[folder.name] else [address, f"{path}:{unit.split()[-1]}"]
        for each in addresses:
            shown = call_main("peek", folder, each, "--chars", 0).out
            assert words <= {int(word) for word in re.findall(r"\bw(\d+)\b", shown)}, each


def test_what_was_left_out_is_shown_with_its_reason(data: Path) -> None:
    left_out = World(data, data_dir=data / "mixed").lines("quarantine")
    assert len({each["source"] for each in left_out}) == 6
    for each in left_out:
        ended = call_main("peek", data / "mixed", f"{each['source']}:{each['source_offset']}")
        assert each["reason"] in ended.text


# shardprep where

RANKS, STEP = 2, 8


@pytest.mark.parametrize(("form", "options"), params_of(CASES))
def test_where_names_what_two_ranks_got(data: Path, tmp_path: Path, form: Form, options: Options) -> None:
    """By their origins, which the test above compares with the data."""
    got: list[dict[str, Any]] = []
    for rank in range(RANKS):
        with load(data, form, batch_size=3, rank=rank, world_size=RANKS, **options) as loader:
            loader.load_state_dict(loader.state_at(STEP))
            for number, batch in enumerate(loader):
                for row, token, *numbers in batch["origins"].tolist():
                    place = {"rank": rank, "batch": number, "row": row, "token": token}
                    origin = dataclasses.asdict(loader.origin(*numbers))
                    got.append({**place, **origin, "tar": str(origin["tar"])})
                if loader.ends_step:
                    break
            (tmp_path / "state.json").write_text(json.dumps(loader.state_at(STEP + 2)))
    words = [*words_of(data, form), "--state", tmp_path / "state.json"]
    assert sorted(answer(*words, "--step", STEP)["documents"], key=str) == sorted(got, key=str)
    num_rows = len({(each["rank"], each["batch"], each["row"]) for each in got})
    assert num_rows == (3 * L if isinstance(options.get("global_batch_size"), list) else L)


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_checkpoint_tells_the_last_step_before_it(data: Path, tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"checkpoint{suffix}"
    with load(data, "mixed", max_length=30) as loader:
        state = {"model": {"weight": [1.0]}, "extra": [{"loader": loader.state_at(4)}]}
    if suffix == ".pt":
        torch.save(state, path)
    else:
        path.write_text(json.dumps(state))
    words = [data / "mixed", "--state", path]
    last = answer(*words)
    assert (last["step"], last["epoch"], last["step_of_epoch"]) == (3, 0, 3)
    assert last == answer(*words, "--step", 3)
    shown = call_main("where", *words).out
    assert all(each["address"] in shown and each["place"] in shown for each in last["documents"])


def test_what_cannot_be_answered_is_refused(data: Path, tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"nothing that torch wrote")
    with load(data, "mixed") as loader:
        state = loader.state_at(4)
    (tmp_path / "state.json").write_text(json.dumps(state))
    (tmp_path / "damaged.json").write_text(json.dumps({**state, "layout": 3}))
    for form, file, words, code in (
        ("mixed", "none.pt", [], 66),
        ("mixed", "a.pt", [], 66),
        ("mixed", "b.pt", [], 65),
        ("mixed", "damaged.json", [], 65),
        ("mixed", "state.json", ["--step", "-1"], 2),
        ("mixed", "state.json", ["--blanked"], 66),  # nothing is
        ("mixed", "state.json", ["--blanked", "--step", 3], 2),
        ("concat", "state.json", [], 78),
    ):
        assert call_main("where", data / form, "--state", tmp_path / file, *words).code == code, (file, words)


# where --blanked


def endless(loader: TokenLoader) -> Iterator[Any]:
    while True:
        yield from loader


def differing(before: TokenLoader, now: TokenLoader, num_steps: int) -> Steps:
    """Go on with both loaders: how many rows of each source differ between them, by step."""
    steps: Steps = {}
    both = zip(endless(before), endless(now), strict=False)
    while before.num_steps_delivered < num_steps:
        step = before.num_steps_delivered
        one, other = next(both)
        source_of = {row: source for row, _, source, *_ in one["origins"].tolist()}
        is_other = one["input_ids"] != other["input_ids"]
        is_named = torch.isin(one["input_ids"], torch.tensor(NAMED))
        assert torch.equal(is_other | is_named, is_other), "each id of a named document is gone"
        assert {*one["input_ids"][is_other & ~is_named].tolist()} <= {EOS}
        rows = is_other.any(dim=1).nonzero().flatten().tolist()
        if rows:
            counts = Counter(before.source_names[source_of[row]] for row in rows)
            steps[step] = dict(Counter(steps.get(step, {})) + counts)
    return steps


def told(*words: object) -> Steps:
    return {each["step"]: each["sources"] for each in answer(*words, "--blanked")["steps"]}


@pytest.mark.processes
@pytest.mark.parametrize(("form", "options"), params_of(CASES))
def test_steps_that_differ_are_told(blanked: Path, tmp_path: Path, form: Form, options: Options) -> None:
    with load(blanked, form, **options) as loader, load(blanked, form, ".new", **options) as new:
        num_steps = 2 * len(loader) + 7
        expected = differing(loader, new, num_steps)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    words = ["--state", tmp_path / "state.json", "--blanked"]
    answered = answer(*words_of(blanked, form, ".new"), *words)
    assert {each["step"]: each["sources"] for each in answered["steps"]} == expected
    assert (answered["num_steps"], len(expected) > 10) == (num_steps, True)
    epochs = [each["epoch"] for each in answered["steps"]]
    assert {*epochs} == {*range(max(epochs) + 1)} >= {0, 1, 2}


@pytest.mark.processes
def test_a_run_that_was_amended_is_gone_through_as_it_was(blanked: Path, tmp_path: Path) -> None:
    """Sources that come and go, other weights and larger steps, each behind a state."""
    plans: list[tuple[list[str], dict[str, Any]]] = [
        (["low"], {"weights": {"low": 1}}),
        (["low", "high"], {"weights": {"low": 1, "high": 1}}),
        (["low", "high"], {"weights": {"low": 0, "high": 1}, "global_batch_size": 2 * L}),
    ]
    state: Any = None
    expected: Steps = {}
    for number, (names, options) in enumerate(plans, 1):
        options = {"amend": True, "max_length": 9, **options}
        with load(blanked, names, **options) as loader, load(blanked, names, ".new", **options) as new:
            if state is not None:
                loader.load_state_dict(state)
                new.load_state_dict(state)
            expected |= differing(loader, new, 80 * number)
            state = json.loads(json.dumps(loader.state_dict()))
    assert len(state["stages"]) == 3
    (tmp_path / "state.json").write_text(json.dumps(state))
    words: list[object] = ["--state", tmp_path / "state.json"]
    low, high = words_of(blanked, ["low", "high"], ".new")
    assert told(low, high, *words) == expected
    assert {name for of in expected.values() for name in of} == {"low", "high"}
    # A source of which nothing is blanked has no steps.
    of_low = told(low, f"high={blanked / 'high'}", *words)
    assert of_low == {step: {"low": of["low"]} for step, of in expected.items() if "low" in of}
    assert call_main("where", high, *words, "--blanked").code == 2  # without low


@pytest.mark.processes
def test_the_steps_are_printed_a_line_each(blanked: Path, tmp_path: Path) -> None:
    with load(blanked, "mixed") as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_at(20)))
    words = [blanked / "mixed.new", "--state", tmp_path / "state.json"]
    lines = [line for line in call_main("where", *words, "--blanked").out.splitlines() if line[:5] == "step "]
    assert lines == [f"step {step}, epoch 0: all {of['all']}" for step, of in sorted(told(*words).items())]
    assert len(lines) > 3


# Losses by source


def mixture(data: Path, **options: Any) -> TokenLoader:
    given = {"weights": {"low": 0.5, "high": 0.5}, "seq_len": 16, "global_batch_size": 8}
    return load(data, ["low", "high"], batch_size=4, **{**given, **options})


@pytest.mark.parametrize("targets", ["same", "shifted"])
def test_losses_by_source_equal_a_sum_by_hand(data: Path, targets: str) -> None:
    torch.manual_seed(0)
    sums, counts = [0.0, 0.0], [0, 0]
    with mixture(data, targets=targets) as loader:
        losses = SourceLosses.of_loader(loader)
        for batch in islice(loader, 6):
            logits, labels = torch.randn(4, 16, VOCAB_SIZE), batch["labels"]
            losses.add(logits, labels, batch["origins"])
            if targets == "same":
                logits, labels = logits[:, :-1], labels[:, 1:]
            values = -logits.double().log_softmax(-1).gather(2, labels.clamp_min(0)[..., None])[..., 0]
            is_high = batch["input_ids"].amin(1, keepdim=True) > 200  # a row is of one source
            for source in (0, 1):
                chosen = (labels >= 0) & (is_high == bool(source))
                sums[source] += values[chosen].sum().item()
                counts[source] += int(chosen.sum())
    expected = {name: sums[source] / counts[source] for source, name in enumerate(("low", "high"))}
    assert losses.means(reset=True) == pytest.approx(expected, rel=1e-5)
    assert all(map(math.isnan, losses.means().values())), "nothing was counted since"


def test_sources_go_along_where_places_are_dealt_to_ranks(data: Path) -> None:
    with mixture(data, targets="shifted", boundaries="segment_ids") as loader:
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
def test_trainer_logs_the_mean_loss_of_each_source(data: Path, tmp_path: Path) -> None:
    # These take 1.5 s to import, which the quick layer need not do.
    from transformers import Trainer, TrainingArguments

    class OwnTrainer(LoaderMixin, Trainer):
        pass

    model = small_model("llama", "sdpa")
    model.resize_token_embeddings(VOCAB_SIZE)
    options: dict[str, Any] = {"split": "validation", "boundaries": "transformers"}
    eval_loader = load(data, "sides of rows", batch_size=4, **options)
    with mixture(data, boundaries="transformers") as loader, eval_loader:
        arguments = TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, report_to=[], disable_tqdm=True, max_steps=4,
            per_device_train_batch_size=4, gradient_accumulation_steps=2, logging_steps=2, learning_rate=0.0,
            save_strategy="no", eval_strategy="steps", eval_steps=4,
        )  # fmt: skip
        trainer: Any = OwnTrainer(model=model, args=arguments, train_loader=loader, eval_loader=eval_loader)
        trainer.train()
    logged = [line for line in trainer.state.log_history if "loss" in line]
    assert [line["step"] for line in logged] == [2, 4]
    with mixture(data, boundaries="transformers") as again:  # the model does not change
        for line in logged:
            losses = SourceLosses.of_loader(again)
            for batch in islice(again, 4):
                fields: Any = {**batch, "origins": None}
                with torch.no_grad():
                    losses.add(model.eval()(**fields).logits, batch["labels"], batch["origins"])
            for name, mean in losses.means().items():
                assert line[f"loss/{name}"] == pytest.approx(mean, rel=1e-4)
    (evaluated,) = [line for line in trainer.state.log_history if "eval_loss" in line]
    assert evaluated["eval_loss/all"] == pytest.approx(evaluated["eval_loss"], rel=1e-4)
