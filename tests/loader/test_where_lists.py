"""``shardprep where --ids``: the steps that saw documents of a list, beside the batches of that run."""

from __future__ import annotations

import hashlib
import json
import random
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from loader import TokenLoader
from tests.oracle.forms import DataSets
from tests.world import World, call_main, open_loader

NUM_DOCUMENTS, PAD, EOS, VOCAB_SIZE = 400, 500, 501, 502  # every id of document 7 is 7
NAMED = random.Random(1).sample(range(1, NUM_DOCUMENTS + 1), 24)
L = 12
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "parquet": {},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": False},
    "concat of parquet": {"record": "packed", "seq_len": 16, "append_eos": False},
    "best fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": False},
    "sides": {"validation_fraction": 0.3},
    "sides of rows": {"record": "packed", "seq_len": 16, "validation_fraction": 0.3},
    # Of these two each has a half of the documents.
    "low": {},
    "high": {"token_format": "npy"},
}
ALL = ("ids", "texts", "places", "addresses")
Steps = dict[int, dict[str, set[int]]]  # step -> source -> documents


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


def numbers_of(form: str) -> range:
    halves = {"low": range(1, 201), "high": range(201, NUM_DOCUMENTS + 1)}
    return halves.get(form, range(1, NUM_DOCUMENTS + 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form, and lists of the documents NAMED by id, text and place, also FORM.places."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    tokenizer = Tokenizer(models.WordLevel({f"w{number}": number for number in range(VOCAB_SIZE)}, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=f"w{PAD}", eos_token=f"w{EOS}"
    ).save_pretrained(root / "model")
    (root / "ids").write_text("".join(f"d{number}\n" for number in NAMED))
    digests = [hashlib.sha256(text_of(number).encode()).hexdigest() for number in NAMED]
    (root / "texts").write_text("".join(f"sha256:{digest}\n" for digest in digests))
    for form, options in FORMS.items():
        folder = root / form
        world = World(folder, tokenizer=root / "model", data_dir=folder)
        records = [{"id": f"d{number}", "text": text_of(number)} for number in numbers_of(form)]
        places: dict[int, str] = {}
        if "parquet" in form:
            pq.write_table(pa.Table.from_pylist(records), world.raw_dir / "a.parquet", row_group_size=30)
            places = {number: f"at:a.parquet:{number - 1}" for number in numbers_of(form)}
        else:
            lines = [json.dumps(record).encode() + b"\n" for record in records]
            ends = [sum(map(len, lines[:count])) for count in range(len(lines))]
            for begin, number in zip(ends, numbers_of(form), strict=True):
                places[number] = f"at:{form}.jsonl:{begin}"
            world.raw({f"{form}.jsonl": b"".join(lines)})
        (root / f"{form}.places").write_text("".join(f"{places[n]}\n" for n in NAMED if n in places))
        world.make(num_shards=5, id_field="id", digests=True, **options)
    return root


def load(data: Path, form: str | list[str], **options: Any) -> TokenLoader:
    folders: Any = {name: data / name for name in form} if isinstance(form, list) else data / form
    made = {"global_batch_size": L, "seed": 3, "origins": True, **options}
    return open_loader(folders, L, **made)


def seen_in(loader: TokenLoader, num_steps: int) -> tuple[Steps, dict[int, str]]:
    """Train so many steps: which documents each saw, by the ids in its batches, and each one's address.

    Of a document that ends with a row the next one may have the EOS alone: it is told by its origin.
    """
    steps: Steps = defaultdict(lambda: defaultdict(set))
    addresses: dict[int, str] = {}
    numbers: dict[tuple[str, str], int] = {}
    ends: list[tuple[int, Any]] = []
    step, batches = loader.num_steps_delivered, _all_batches(loader)
    while step < num_steps:
        batch = next(batches)
        rows = batch["input_ids"].tolist()
        told = set()
        for row, place, *origin in batch["origins"].tolist():
            number = rows[row][place] if place < len(rows[row]) else PAD
            if number == EOS:
                ends.append((step, loader.origin(*origin)))
            elif number in NAMED:
                where = loader.origin(*origin)
                steps[step][where.source].add(number)
                addresses[number] = where.address
                numbers[where.source, where.address] = number
                told.add(number)
        assert told == {number for row in rows for number in row} & {*NAMED}
        step += loader.ends_step
    for step, where in ends:
        if (where.source, where.address) in numbers:
            steps[step][where.source].add(numbers[where.source, where.address])
    return {step: dict(of) for step, of in steps.items() if of}, addresses


def _all_batches(loader: TokenLoader) -> Iterator[Any]:
    while True:
        yield from loader


def where(*words: object) -> Any:
    ended = call_main("where", *words, "--json")
    assert ended.code == 0, ended.text
    return json.loads(ended.out.splitlines()[-1])


# Data, arguments of the loader, and by which names documents can be found.
CASES: dict[str, tuple[str | list[str], dict[str, Any], tuple[str, ...]]] = {
    "documents": ("json", {}, ALL),
    "of a table": ("parquet", {}, ("places",)),
    "cut": ("npy", {"max_length": 5}, ("ids",)),
    "grouped": ("json", {"group_by_length": 4}, ("ids",)),
    "not shuffled": ("json", {"shuffle": False}, ("ids",)),
    "packed at load": ("json", {"seq_len": 16}, ALL),
    "packed at load with an EOS of the shards": ("npy", {"seq_len": 24}, ("texts",)),
    "packed": ("concat", {}, ALL),
    "packed, of a table": ("concat of parquet", {}, ("places",)),
    "best fit": ("best fit", {}, ("texts", "addresses")),
    "a side": ("sides", {"split": "train"}, ALL),
    "the other side": ("sides", {"split": "validation"}, ("ids",)),
    "a side of rows": ("sides of rows", {"split": "train"}, ("texts", "addresses")),
    "a side packed at load": ("sides", {"split": "train", "seq_len": 16}, ("ids",)),
    "batches grow": ("json", {"global_batch_size": [(0, L), (7, 3 * L), (50, 2 * L)]}, ("ids",)),
    "mixed": (
        ["low", "high"],
        {"weights": [(0, {"low": 0.7, "high": 0.3}), (40, {"low": 0.1, "high": 0.9})], "max_length": 9},
        ("ids", "texts"),
    ),
    "mixed and packed at load": (
        ["low", "high"], {"weights": {"low": 1, "high": 3}, "seq_len": 16}, ("ids",)
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_the_steps_are_those_whose_batches_hold_ids_of_named_documents(
    data: Path, tmp_path: Path, case: str
) -> None:
    form, options, kinds = CASES[case]
    with load(data, form, **options) as loader:
        num_steps = 2 * len(loader) + 7
        expected, addresses = seen_in(loader, num_steps)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    entries = [{"document": address, "shard": 0} for address in addresses.values()]
    (tmp_path / "addresses.jsonl").write_text("".join(f"{json.dumps(each)}\n" for each in entries * 2))
    names = {"ids": data / "ids", "texts": data / "texts", "places": data / f"{form}.places"}
    names["addresses"] = tmp_path / "addresses.jsonl"
    folders = [f"{name}={data / name}" for name in form] if isinstance(form, list) else [data / form]
    all_seen = {(name, number) for of in expected.values() for name in of for number in of[name]}
    for kind in kinds:
        answer = where(*folders, "--state", tmp_path / "state.json", "--ids", names[kind])
        found = {each["step"]: each["sources"] for each in answer["steps"]}
        assert found == {
            step: {name: len(numbers) for name, numbers in of.items()} for step, of in expected.items()
        }, kind
        assert answer["num_steps"] == num_steps
        assert sum(of["num_seen"] for of in answer["sources"].values()) == len(all_seen) > 5
        epochs = [each["epoch"] for each in answer["steps"]]
        assert {*epochs} == {*range(max(epochs) + 1)} >= {0, 1, 2}


def test_a_run_that_was_amended_is_gone_through_as_it_was(data: Path, tmp_path: Path) -> None:
    """Sources that come and go, other weights and larger steps, each behind a state."""
    plans: list[tuple[list[str], dict[str, Any]]] = [
        (["low"], {"weights": {"low": 1}}),
        (["low", "high"], {"weights": {"low": 1, "high": 1}}),
        (["low", "high"], {"weights": {"low": 0, "high": 1}, "global_batch_size": 2 * L}),
    ]
    state: Any = None
    expected: Steps = {}
    num_steps = 0
    for names, options in plans:
        with load(data, names, amend=True, max_length=9, **options) as loader:
            if state is not None:
                loader.load_state_dict(state)
            num_steps += 80
            expected |= seen_in(loader, num_steps)[0]
            state = json.loads(json.dumps(loader.state_dict()))
    assert len(state["stages"]) == 3
    (tmp_path / "state.json").write_text(json.dumps(state))
    folders = [f"{name}={data / name}" for name in ("low", "high")]
    answer = where(*folders, "--state", tmp_path / "state.json", "--ids", data / "ids")
    assert {each["step"]: each["sources"] for each in answer["steps"]} == {
        step: {name: len(numbers) for name, numbers in of.items()} for step, of in expected.items()
    }
    assert {name for of in expected.values() for name in of} == {"low", "high"}
    of_low = where(*folders, "--state", tmp_path / "state.json", "--ids", f"low={data / 'low.places'}")
    assert {each["step"]: each["sources"] for each in of_low["steps"]} == {
        step: {"low": len(of["low"])} for step, of in expected.items() if "low" in of
    }
    words = ["where", *folders, "--state", tmp_path / "state.json", "--ids", data / "low.places"]
    assert call_main(*words).code == 2  # a place of which data set?
    assert call_main("where", folders[1], *words[3:5], "--ids", data / "ids").code == 2  # without low


@pytest.mark.processes  # blank makes shards as run does
@pytest.mark.parametrize("form", ["json", "concat"])
def test_a_run_that_blanks_a_list_goes_on_and_is_told_the_steps_before_that_saw_it(
    data: Path, tmp_path: Path, form: str
) -> None:
    new, names = tmp_path / "new", data / f"{form}.places"
    with load(data, form) as loader:
        expected, _ = seen_in(loader, 20)
        (tmp_path / "20.json").write_text(json.dumps(loader.state_dict()))
        batches = [batch for _, batch in zip(range(30), _all_batches(loader), strict=False)]
    ended = call_main("blank", data / form, "--ids", names, "--output", new)
    assert ended.code == 0, ended.text
    for folder in (data / form, new):  # whose places are the same
        answer = where(folder, "--state", tmp_path / "20.json", "--ids", names)
        assert {each["step"] for each in answer["steps"]} == set(expected)
    num_gone = 0
    with load(tmp_path, "new") as loader:
        loader.load_state_dict(json.loads((tmp_path / "20.json").read_text()))
        for before, now in zip(batches, _all_batches(loader), strict=False):
            is_gone = torch.isin(before["input_ids"], torch.tensor(NAMED))
            assert torch.equal(now["input_ids"], before["input_ids"].masked_fill(is_gone, PAD))
            is_behind = torch.zeros_like(is_gone)  # what would be predicted from a blanked place
            is_behind[:, 1:] = is_gone[:, :-1]
            assert torch.equal(now["labels"], before["labels"].masked_fill(is_gone | is_behind, -100))
            num_gone += int(is_gone.sum())
    assert num_gone > 50
    assert len(expected) > 3


def test_the_steps_are_printed_a_line_each_and_names_that_are_nowhere_are_counted(
    data: Path, tmp_path: Path
) -> None:
    with load(data, "json") as loader:
        expected, _ = seen_in(loader, 20)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    (tmp_path / "names").write_text((data / "ids").read_text() + "nobody\nnor this one\n")
    ended = call_main("where", data / "json", "--state", tmp_path / "state.json", "--ids", tmp_path / "names")
    assert ended.code == 0
    lines = [line for line in ended.out.splitlines() if line.startswith("step ")]
    assert lines == [f"step {step}, epoch 0: all {len(of['all'])}" for step, of in sorted(expected.items())]
    assert f"2 of {len(NAMED) + 2} names" in ended.err


def test_lists_that_cannot_be_looked_up_are_refused(data: Path, sets: DataSets, tmp_path: Path) -> None:
    states = {}
    for form in ("json", "best fit", "sides of rows"):
        with load(data, form) as loader:
            states[form] = loader.state_at(9)
    with open_loader(sets["documents"]) as loader:
        states["plain"] = loader.state_at(9)
    for form, state in states.items():
        (tmp_path / f"{form}.state.json").write_text(json.dumps(state))
    lists = {"nobody": "nobody\n", "empty": "", "a.jsonl": "{}\n", "b.jsonl": '{"document": "9:9"}\n'}
    for name, text in lists.items():
        (tmp_path / name).write_text(text)
    for form, names, code in (
        ("json", tmp_path / "none", 66),
        ("json", tmp_path / "none.jsonl", 66),
        ("json", tmp_path / "nobody", 66),
        ("json", tmp_path / "empty", 65),
        ("json", tmp_path / "a.jsonl", 65),
        ("json", tmp_path / "b.jsonl", 66),
        ("best fit", data / "ids", 2),
        ("best fit", data / "best fit.places", 2),
        ("sides of rows", data / "ids", 2),
        ("plain", data / "ids", 2),  # it keeps none
        ("plain", data / "texts", 2),  # nor digests
    ):
        folder = sets["documents"] if form == "plain" else data / form
        ended = call_main("where", folder, "--state", tmp_path / f"{form}.state.json", "--ids", names)
        assert ended.code == code, (form, names, ended.text)
    words = ["--state", tmp_path / "json.state.json", "--ids", data / "ids", "--step", 3]
    assert call_main("where", data / "json", *words).code == 2
