"""``shardprep where --blanked``: the steps that saw documents that are blanked by now, beside the batches."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import TokenLoader
from tests.oracle.forms import DataSets
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, call_main, open_loader

pytestmark = pytest.mark.processes  # blank makes shards as run does

NUM_DOCUMENTS, PAD, EOS, VOCAB_SIZE = 400, 500, 501, 502  # every id of document 7 is 7
L = 12
FORMS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "parquet": {},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": False},
    "best fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": False},
    "sides": {"validation_fraction": 0.3},
    "sides of rows": {"record": "packed", "seq_len": 16, "validation_fraction": 0.3},
    # Of these two each has a half of the documents.
    "low": {},
    "high": {"token_format": "npy"},
}
Steps = dict[int, dict[str, int]]  # step -> source -> samples


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


# Twenty words are enough to be found in an evaluation.
LONG = [number for number in range(1, NUM_DOCUMENTS + 1) if len(text_of(number).split()) >= 20]
NAMED = random.Random(1).sample(LONG, 24)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form, and FORM.new, in which the documents NAMED are blanked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root / "model", VOCAB_SIZE, splits=True)
    halves = {"low": range(1, 201), "high": range(201, NUM_DOCUMENTS + 1)}
    for form, options in FORMS.items():
        numbers = halves.get(form, range(1, NUM_DOCUMENTS + 1))
        world = World(root / form, tokenizer=root / "model", data_dir=root / form)
        records = [{"id": f"d{number}", "text": text_of(number)} for number in numbers]
        if form == "parquet":
            pq.write_table(pa.Table.from_pylist(records), world.raw_dir / "a.parquet", row_group_size=30)
        else:
            world.raw({f"{form}.jsonl": records})
        world.make(num_shards=5, id_field="id", digests=True, **options)
        names = root / f"{form}.ids"
        names.write_text("".join(f"d{number}\n" for number in NAMED if number in numbers))
        if form == "json":  # what is found in an evaluation is blanked
            (root / "evals.txt").write_text("\n".join(map(text_of, NAMED)))
            assert call_main("overlap", root / form, "--against", root / "evals.txt").code == 0
            names = root / form / "overlap" / "names.txt"
        words = ["--ids", names, "--output", root / f"{form}.new", "--num_proc", 1]
        assert call_main("blank", root / form, *words).code == 0
    return root


def load(data: Path, form: str | list[str], suffix: str = "", **options: Any) -> TokenLoader:
    folders: Any = data / f"{form}{suffix}"
    if isinstance(form, list):
        folders = {name: data / f"{name}{suffix}" for name in form}
    made = {"global_batch_size": L, "seed": 3, "origins": True, **options}
    return open_loader(folders, L, **made)


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


def where(*words: object) -> Any:
    ended = call_main("where", *words, "--blanked", "--json")
    assert ended.code == 0, ended.text
    return json.loads(ended.out.splitlines()[-1])


def told(*words: object) -> Steps:
    return {each["step"]: each["sources"] for each in where(*words)["steps"]}


CASES: dict[str, tuple[str | list[str], dict[str, Any]]] = {
    "documents": ("json", {}),
    "of a table": ("parquet", {}),
    "cut": ("npy", {"max_length": 5}),
    "grouped": ("json", {"group_by_length": 4}),
    "not shuffled": ("json", {"shuffle": False}),
    "packed at load": ("json", {"seq_len": 16}),
    "packed at load with an EOS of the shards": ("npy", {"seq_len": 24}),
    "packed": ("concat", {}),
    "best fit": ("best fit", {}),
    "a side": ("sides", {"split": "train"}),
    "the other side": ("sides", {"split": "validation"}),
    "a side of rows": ("sides of rows", {"split": "train"}),
    "a side packed at load": ("sides", {"split": "train", "seq_len": 16}),
    "batches grow": ("json", {"global_batch_size": [(0, L), (7, 3 * L), (50, 2 * L)]}),
    "mixed": (
        ["low", "high"],
        {"weights": [(0, {"low": 0.7, "high": 0.3}), (40, {"low": 0.1, "high": 0.9})], "max_length": 9},
    ),
    "mixed and packed at load": (["low", "high"], {"weights": {"low": 1, "high": 3}, "seq_len": 16}),
}


@pytest.mark.parametrize("case", CASES)
def test_the_steps_are_those_whose_batches_would_be_others_now(data: Path, tmp_path: Path, case: str) -> None:
    form, options = CASES[case]
    with load(data, form, **options) as loader, load(data, form, ".new", **options) as new:
        num_steps = 2 * len(loader) + 7
        expected = differing(loader, new, num_steps)
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    folders = [data / f"{form}.new"]
    if isinstance(form, list):
        folders = [f"{name}={data / name}.new" for name in form]  # type: ignore[misc]
    answer = where(*folders, "--state", tmp_path / "state.json")
    assert {each["step"]: each["sources"] for each in answer["steps"]} == expected
    assert (answer["num_steps"], len(expected) > 10) == (num_steps, True)
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
    for number, (names, options) in enumerate(plans, 1):
        options = {"amend": True, "max_length": 9, **options}
        with load(data, names, **options) as loader, load(data, names, ".new", **options) as new:
            if state is not None:
                loader.load_state_dict(state)
                new.load_state_dict(state)
            expected |= differing(loader, new, 80 * number)
            state = json.loads(json.dumps(loader.state_dict()))
    assert len(state["stages"]) == 3
    (tmp_path / "state.json").write_text(json.dumps(state))
    folders = [f"{name}={data / name}.new" for name in ("low", "high")]
    assert told(*folders, "--state", tmp_path / "state.json") == expected
    assert {name for of in expected.values() for name in of} == {"low", "high"}
    # A source of which nothing is blanked has no steps.
    of_low = told(folders[0], f"high={data / 'high'}", "--state", tmp_path / "state.json")
    assert of_low == {step: {"low": of["low"]} for step, of in expected.items() if "low" in of}
    words = ["where", folders[1], "--state", tmp_path / "state.json", "--blanked"]
    assert call_main(*words).code == 2  # without low


def test_the_steps_are_printed_a_line_each(data: Path, tmp_path: Path) -> None:
    with load(data, "json") as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_at(20)))
    words = [data / "json.new", "--state", tmp_path / "state.json"]
    ended = call_main("where", *words, "--blanked")
    assert ended.code == 0
    lines = [line for line in ended.out.splitlines() if line.startswith("step ")]
    assert lines == [f"step {step}, epoch 0: all {of['all']}" for step, of in sorted(told(*words).items())]
    assert len(lines) > 3


def test_data_of_which_nothing_is_blanked_and_a_step_besides_are_refused(
    data: Path, sets: DataSets, tmp_path: Path
) -> None:
    with load(data, "json") as loader:
        (tmp_path / "state.json").write_text(json.dumps(loader.state_at(9)))
    words = ["--state", tmp_path / "state.json", "--blanked"]
    assert call_main("where", data / "json", *words).code == 66
    assert call_main("where", data / "json.new", *words, "--step", 3).code == 2
