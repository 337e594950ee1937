"""Origins of the documents in a batch: ``origins=True``, ``shardprep where``, losses by source.

``where --blanked`` lists the steps that saw documents which are now blanked. Each document repeats one word,
so any part that is printed or loaded shows which document it is. The inputs have all formats.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import SourceLosses, TokenLoader, UsageError, source_ids, split_for_context_parallel
from tests.input_writers import write_every_format
from tests.word_tokenizers import save_word_tokenizer
from tests.world import World, call_main, open_loader, refuses

NUM_DOCUMENTS, EOS, VOCAB_SIZE = 400, 501, 502  # every id of document 7 is 7
L = 12
SETS: dict[str, dict[str, Any]] = {
    "mixed": {"max_bad_fraction": 1.0},  # with files of all formats
    "npy": {"token_format": "npy", "keep_text": False, "append_eos": True},
    "concat": {"record": "packed", "seq_len": 16, "append_eos": False},
    "best fit": {"record": "packed", "seq_len": 16, "pack": "best_fit", "append_eos": False},
    "sides": {"validation_fraction": 0.3},
    "sides of rows": {"record": "packed", "seq_len": 16, "validation_fraction": 0.3},
    "validation": {},
    "low": {},
    "high": {"token_format": "npy"},
}
Form = str | list[str]
Options = dict[str, Any]
Steps = dict[int, dict[str, int]]  # step -> source -> samples


def text_of(number: int) -> str:
    return " ".join([f"w{number}"] * random.Random(number).choice([1, 2, 5, 9, 20, 50]))


# Documents of 20 words are long enough for overlap to find them in an evaluation.
LONG = [number for number in range(1, NUM_DOCUMENTS + 1) if len(text_of(number).split()) >= 20]
NAMED = random.Random(1).sample(LONG, 24)


def numbers_of(form: str) -> Sequence[int]:
    """Return the numbers of the documents in a data set."""
    if form == "mixed":  # each of its eleven files has them
        return sorted({*NAMED[:4], *range(5, NUM_DOCUMENTS, 10)})
    halves = {"low": range(1, 201), "high": range(201, NUM_DOCUMENTS + 1)}
    return halves.get(form, range(1, NUM_DOCUMENTS + 1))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A data set of each form."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root / "model", VOCAB_SIZE, splits=True)
    for form, options in SETS.items():
        world = World(root / form, tokenizer=root / "model", data_dir=root / form)
        records = [{"id": f"d{number}", "text": text_of(number)} for number in numbers_of(form)]
        if form == "mixed":
            world.raw({"a.txt": "".join(f" {each['text']} \n\n" for each in records)})
            write_every_format(world.raw_dir)
        else:
            world.raw({f"{form}.jsonl": records})
        world.make(num_shards=5, id_field="id", digests=True, **options)
    return root


@pytest.fixture(scope="module")
def blanked(data: Path) -> Path:
    """The same folder, with a data set FORM.new for each form in which the documents NAMED are blanked."""
    for form in SETS:
        names = data / f"{form}.ids"
        names.write_text("".join(f"d{number}\n" for number in NAMED if number in numbers_of(form)))
        if form == "mixed":  # blank what overlap finds in an evaluation
            (data / "evals.txt").write_text("\n".join(map(text_of, NAMED)))
            call_main("overlap", data / form, "--against", data / "evals.txt").ends(0)
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
WHOLE = {"all documents as validation": ("validation", {"split": "validation"})}
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
    """Return the arguments of ``where`` for the data of a loader."""
    if isinstance(form, str):
        return [data / f"{form}{suffix}"]
    return [f"{name}={data / name}{suffix}" for name in form]


def answer(*words: object) -> Any:
    return json.loads(call_main("where", *words, "--json").ends(0).out.splitlines()[-1])


def pieces_of(batch: Any) -> Iterator[tuple[list[int], set[int]]]:
    """Yield the origin (source, shard, sample, document) and the set of ids of each document in a batch."""
    origins, ids = batch["origins"].tolist(), batch["input_ids"]
    is_real = batch["attention_mask"].bool()
    for number, (row, place, *origin) in enumerate(origins):
        later = origins[number + 1] if number + 1 < len(origins) else [row + 1]
        end = later[1] if later[0] == row else ids.shape[1]
        yield origin, {*ids[row, place:end][is_real[row, place:end]].tolist()} - {EOS}
    assert [row for row, *_ in origins] == sorted(row for row, *_ in origins)
    learnt = set((batch["labels"] >= 0).any(dim=1).nonzero().flatten().tolist())
    assert learnt <= {row for row, *_ in origins}, "each row with labels has a document"


@pytest.mark.parametrize(("form", "options"), params_of(CASES | SHIFTED))
def test_origins_name_the_places_of_documents(data: Path, form: Form, options: Options) -> None:
    """The other fields do not depend on origins."""
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
    assert {len(words) for words in found.values()} <= {0, 1}, "an address names one document"
    for source, address, place in random.Random(0).sample(sorted(found), 15):
        words = found[source, address, place]
        folder = data / (form if isinstance(form, str) else source)
        path, _, unit = place.partition(" ")
        addresses = [address] if "record" in SETS[folder.name] else [address, f"{path}:{unit.split()[-1]}"]
        for each in addresses:
            shown = call_main("peek", folder, each, "--chars", 0).out
            assert words <= {int(word) for word in re.findall(r"\bw(\d+)\b", shown)}, each


def test_peek_shows_the_reason_for_a_document_that_was_left_out(data: Path) -> None:
    left_out = World(data, data_dir=data / "mixed").lines("quarantine")
    assert len({each["input"] for each in left_out}) == 9
    for each in left_out:
        ended = call_main("peek", data / "mixed", f"{each['input']}:{each['input_offset']}")
        assert each["reason"] in ended.text


# shardprep where

RANKS, STEP = 2, 8


@pytest.mark.parametrize(("form", "options"), params_of(CASES | WHOLE | SHIFTED))
def test_where_names_the_documents_of_a_step_on_two_ranks(
    data: Path, tmp_path: Path, form: Form, options: Options
) -> None:
    """By default of the last step before a checkpoint. Origins, tested above, give the expected documents."""
    got: list[dict[str, Any]] = []
    for rank in range(RANKS):
        with load(data, form, batch_size=3, rank=rank, world_size=RANKS, **options) as loader:
            state = loader.state_at(STEP)
            loader.load_state_dict(state)
            for number, batch in enumerate(loader):
                for row, token, *numbers in batch["origins"].tolist():
                    place = {"rank": rank, "batch": number, "row": row, "token": token}
                    origin = dataclasses.asdict(loader.origin(*numbers))
                    got.append({**place, **origin, "tar": str(origin["tar"])})
                if loader.ends_step:
                    break
            checkpoint = {
                "model": {"weight": torch.ones(1)},
                "extra": [{"loader": loader.state_at(STEP + 1)}],
            }
            (tmp_path / "later.json").write_text(json.dumps({"loader": loader.state_at(STEP + 3)}))
    torch.save(checkpoint, tmp_path / "checkpoint.pt")
    words = [*words_of(data, form), "--state", tmp_path / "checkpoint.pt"]
    told = answer(*words)
    assert sorted(told["documents"], key=str) == sorted(got, key=str)
    assert (told["step"], told["epoch"], told["step_of_epoch"]) == (STEP, state["epoch"], state["step"])
    assert told == answer(*words[:-1], tmp_path / "later.json", "--step", STEP)
    shown = call_main("where", *words).out
    assert all(each["address"] in shown and each["place"] in shown for each in got)
    num_rows = len({(each["rank"], each["batch"], each["row"]) for each in got})
    assert num_rows == (3 * L if isinstance(options.get("global_batch_size"), list) else L)


# Runs of weights that differ from equal ones: first, and from a step on.
UNEVEN: list[tuple[dict[str, float], int, dict[str, float]]] = [
    ({"low": 0.9, "high": 0.1}, 9, {"low": 1, "high": 1}),
    ({"low": 0.1, "high": 0.9}, 70, {"low": 0.1, "high": 0.9}),
]


@pytest.mark.parametrize(("first", "later", "weights"), UNEVEN)
def test_where_reads_the_run_of_a_state_and_amends_nothing(
    blanked: Path, tmp_path: Path, first: dict[str, float], later: int, weights: dict[str, float]
) -> None:
    """Also at steps that begin a round, and if a schedule ends with equal weights."""
    form: Form = ["low", "high"]
    seen = []
    with load(blanked, form, weights=[(0, first), (later, weights)]) as loader:
        for batch in islice(endless(loader), 75):
            origins = [loader.origin(*origin) for origin in batch["origins"][:, 2:].tolist()]
            seen.append([(each.source, each.address) for each in origins])
        (tmp_path / "state.json").write_text(json.dumps(loader.state_dict()))
    words = ["--state", tmp_path / "state.json"]
    for step in (0, 1, later - 1, later, 63, 64, 74):
        documents = answer(*words_of(blanked, form), *words, "--step", step)["documents"]
        assert [(each["source"], each["address"]) for each in documents] == seen[step], step
    assert "amended" not in call_main("where", *words_of(blanked, form, ".new"), *words, "--blanked").text


def test_where_refuses_files_without_a_state_and_invalid_steps(data: Path, tmp_path: Path) -> None:
    torch.save({"model": 1}, tmp_path / "a.pt")
    (tmp_path / "b.pt").write_bytes(b"not a file of torch")
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
        ("mixed", "state.json", ["--blanked"], 66),  # nothing is blanked
        ("mixed", "state.json", ["--blanked", "--step", 3], 2),
        ("concat", "state.json", [], 78),
    ):
        assert call_main("where", data / form, "--state", tmp_path / file, *words).code == code, (file, words)


# where --blanked


def endless(loader: TokenLoader) -> Iterator[Any]:
    while True:
        yield from loader


def differing(before: TokenLoader, now: TokenLoader, num_steps: int) -> Steps:
    """Advance both loaders, and return for each step how many rows of each source differ between them."""
    steps: Steps = {}
    both = zip(endless(before), endless(now), strict=False)
    while before.num_steps_delivered < num_steps:
        step = before.num_steps_delivered
        one, other = next(both)
        source_of = {row: source for row, _, source, *_ in one["origins"].tolist()}
        is_other = one["input_ids"] != other["input_ids"]
        is_named = torch.isin(one["input_ids"], torch.tensor(NAMED))
        assert torch.equal(is_other | is_named, is_other), "each id of a named document is replaced"
        assert {*one["input_ids"][is_other & ~is_named].tolist()} <= {EOS}
        rows = is_other.any(dim=1).nonzero().flatten().tolist()
        if rows:
            counts = Counter(before.source_names[source_of[row]] for row in rows)
            steps[step] = dict(Counter(steps.get(step, {})) + counts)
    return steps


# Amendments that add a source, change weights, and enlarge steps; each resumes from the state before.
AMENDED: list[tuple[list[str], Options]] = [
    (["low"], {"weights": {"low": 1}}),
    (["low", "high"], {"weights": {"low": 1, "high": 1}}),
    (["low", "high"], {"weights": {"low": 0, "high": 1}, "global_batch_size": 2 * L}),
]
RUNS: dict[str, Any] = {name: [case] for name, case in CASES.items()}
RUNS["amended"] = [(names, {"amend": True, "max_length": 9, **options}) for names, options in AMENDED]


@pytest.mark.processes
@pytest.mark.parametrize("run", RUNS)
def test_where_blanked_lists_steps_with_blanked_documents(blanked: Path, tmp_path: Path, run: str) -> None:
    state: Any = None
    expected: Steps = {}
    for number, (form, options) in enumerate(RUNS[run], 1):
        with load(blanked, form, **options) as loader, load(blanked, form, ".new", **options) as new:
            if state is not None:
                loader.load_state_dict(state)
                new.load_state_dict(state)
            num_steps = 80 * number if run == "amended" else 2 * len(loader) + 7
            expected |= differing(loader, new, num_steps)
            state = json.loads(json.dumps(loader.state_dict()))
    (tmp_path / "state.json").write_text(json.dumps(state))
    words = ["--state", tmp_path / "state.json", "--blanked"]
    told = answer(*words_of(blanked, form, ".new"), *words)
    assert {each["step"]: each["sources"] for each in told["steps"]} == expected
    assert (told["num_steps"], len(expected) > 10) == (num_steps, True)
    epochs = [each["epoch"] for each in told["steps"]]
    assert {*epochs} == {*range(max(epochs) + 1)}
    assert max(epochs) >= 2
    if run == "amended":
        assert len(state["stages"]) == 3
        low, high = words_of(blanked, form, ".new")
        # A source without blanked documents has no steps.
        of_low = answer(low, f"high={blanked / 'high'}", *words)["steps"]
        low_steps = {step: {"low": of["low"]} for step, of in expected.items() if "low" in of}
        assert {each["step"]: each["sources"] for each in of_low} == low_steps != expected
        assert call_main("where", high, *words).code == 2  # without low


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


def test_losses_by_source_work_with_context_parallelism(data: Path) -> None:
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
