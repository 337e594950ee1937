"""A run that is amended: what may change, from which step on, what is refused, and what a loader says of it.

That no sample is repeated or lost is tried by tests/oracle/test_law.py, on random histories.
"""

from __future__ import annotations

import json
import pickle
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import webdataset

from loader import OtherRun, TokenLoader, UsageError, get_llama3_dataloader
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer

L = 12
SIZES = {"web": 700, "code": 130, "books": 90}
MIXED: dict[str, Any] = {"weights": {"web": 1, "code": 1}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """All ids of source k lie from 1000 k on; the first id of a document says which one it is."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 6000)
    for number, (name, size) in enumerate(SIZES.items()):
        (root / name).mkdir()
        first = 1000 * number + 1
        write_numbered_tars(root / name, size, 3, ids_of=lambda n, first=first: [first + n])  # type: ignore[misc]
    return {name: root / name for name in SIZES}


def load(data: Mapping[str, Any], sources: str = "web code", **options: Any) -> TokenLoader:
    """Return a loader of a mixture, or of web alone if there are no weights."""
    folders: Any = {name: data[name] for name in sources.split()} if "weights" in options else data["web"]
    made = {"batch_size": L, "global_batch_size": L, "num_workers": 0, "weights_in": "samples", **options}
    return get_llama3_dataloader(folders, model_id=data["code"].parent, rank=0, world_size=1, **made)


def steps(loader: TokenLoader, num_steps: int) -> list[list[int]]:
    """Return the first ids of each of the next steps."""
    found: list[list[int]] = []
    held: list[int] = []
    while len(found) < num_steps:
        for batch in loader:
            held += batch["input_ids"][:, 0].tolist()
            if loader.ends_step:
                found.append(held)
                held = []
                if len(found) == num_steps:
                    break
    return found


def sources_of(step: list[int]) -> set[str]:
    return {[*SIZES][number // 1000] for number in step}


def state_at(data: Mapping[str, Any], step: int, **options: Any) -> dict[str, Any]:
    with load(data, **options) as loader:
        return json.loads(json.dumps(loader.state_at(step)))  # type: ignore[no-any-return]


def stages(loader: TokenLoader) -> list[tuple[int, int, dict[str, int]]]:
    return [tuple(held) for held in loader.run.held_from(0)]  # type: ignore[misc]


HALVES, WHOLE = {"web": 32768, "code": 32768}, {"web": 65536}
# What is passed behind a state of step 70, and the stages of the run then.
AMENDED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "weights": ({"weights": {"web": 1}}, [(0, L, HALVES), (128, L, WHOLE)]),
    "sizes": ({**MIXED, "global_batch_size": 2 * L}, [(0, L, HALVES), (128, 2 * L, HALVES)]),
    "both": (
        {"weights": {"web": 1}, "global_batch_size": 3 * L},
        [(0, L, HALVES), (128, 3 * L, WHOLE)],
    ),
    "a change that comes later": (
        {"weights": [(0, {"web": 1, "code": 1}), (150, {"web": 1})]},
        [(0, L, HALVES), (150, L, WHOLE)],
    ),
    "a change that comes too soon": (
        {"weights": [(0, {"web": 1, "code": 1}), (75, {"web": 1})]},
        [(0, L, HALVES), (128, L, WHOLE)],
    ),
    "sizes by step": (
        {**MIXED, "global_batch_size": [(0, L), (130, 2 * L), (200, L)]},
        [(0, L, HALVES), (130, 2 * L, HALVES), (200, L, HALVES)],
    ),
    "a source that comes later by a longer schedule": (
        {"weights": [(0, {"web": 1, "code": 1}), (400, {"books": 1})], "sources": "web code books"},
        [(0, L, HALVES), (400, L, {"books": 65536})],
    ),
    "nothing": ({"weights": {"web": 5, "code": 5}}, [(0, L, HALVES)]),
}


@pytest.mark.parametrize("name", AMENDED)
def test_an_amendment_holds_from_the_next_border_and_the_loader_says_so(
    data: dict[str, Path], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    options, expected = AMENDED[name]
    state = state_at(data, 70, **MIXED)
    with load(data, amend=True, **options) as loader:
        loader.load_state_dict(state)
        assert stages(loader) == expected
        assert ("amended from step 128" in caplog.text) == (name != "nothing")
        assert loader.num_steps_delivered == 70
        again = loader.state_dict()
    with load(data, **options) as loader:  # what the run has become needs no word
        loader.load_state_dict(again)
        assert loader.state_dict() == again


def test_a_run_goes_on_by_its_old_weights_until_the_border(data: dict[str, Path]) -> None:
    state = state_at(data, 70, **MIXED)
    with load(data, amend=True, weights={"web": 1}) as loader:
        loader.load_state_dict(state)
        found = steps(loader, 60)
    with load(data, **MIXED) as loader:
        loader.load_state_dict(state)
        assert steps(loader, 58) == found[:58]
    assert [sources_of(step) for step in found[58:]] == [{"web"}] * 2


def test_an_amendment_that_has_not_begun_is_replaced_with_the_sources_that_it_added(
    data: dict[str, Path],
) -> None:
    state = state_at(data, 70, **MIXED)
    with load(data, "web code books", amend=True, weights={"books": 1}) as loader:
        loader.load_state_dict(state)
        assert loader.source_names == ("web", "code", "books")
        states = [loader.state_at(step) for step in (70, 100, 128, 129)]
    for state, border in zip(states, (128, 128, 128, 192), strict=True):
        with load(data, "web code books", amend=True, weights={"web": 1}) as loader:
            loader.load_state_dict(state)
            assert stages(loader)[-1] == (border, L, WHOLE)
            assert len(stages(loader)) == (2 if border == 128 else 3)


def test_before_its_first_step_a_run_begins_as_the_loader_says(data: dict[str, Path]) -> None:
    for options in ({"weights": {"web": 1}}, {**MIXED, "global_batch_size": 30, "batch_size": 30}):
        with load(data, **options) as fresh, load(data, amend=True, **options) as amended:
            amended.load_state_dict(state_at(data, 0, **MIXED))
            assert amended.run == fresh.run
            assert steps(amended, 3) == steps(fresh, 3)


def test_the_order_in_which_sources_are_named_does_not_matter(data: dict[str, Path]) -> None:
    """Shares are rounded to whole ticks in the order of the run."""
    weights = {"web": 2, "code": 0.3, "books": 7}
    with load(data, "web code books", weights=weights) as loader:
        state = loader.state_at(5)
    with load(data, "books web code", weights=weights) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state


def test_the_past_of_an_amended_run_comes_again_and_may_be_amended_anew(data: dict[str, Path]) -> None:
    with load(data, amend=True, weights={"web": 1}) as loader:
        loader.load_state_dict(state_at(data, 70, **MIXED))
        loader.load_state_dict(loader.state_at(120))
        assert [sources_of(step) for step in steps(loader, 16)] == [{"web", "code"}] * 8 + [{"web"}] * 8
        past = loader.state_at(3)
        again = pickle.loads(pickle.dumps(loader))
        assert again.state_dict() == loader.state_dict()
        assert steps(again, 2) == steps(loader, 2)
    with load(data, amend=True, weights={"code": 1}) as loader:
        loader.load_state_dict(past)
        assert stages(loader) == [(0, L, HALVES), (64, L, {"code": 65536})]


def test_a_schedule_counts_steps_whatever_their_sizes(data: dict[str, Path]) -> None:
    options: dict[str, Any] = {"weights": [(0, {"web": 1}), (80, {"code": 1})]}
    with load(data, amend=True, global_batch_size=[(0, L), (70, 2 * L)], **options) as loader:
        loader.load_state_dict(state_at(data, 60, **options))
        loader.load_state_dict(loader.state_at(68))
        found = steps(loader, 14)
    assert [sources_of(step) for step in found] == [{"web"}] * 12 + [{"code"}] * 2
    assert [len(step) for step in found] == [L] * 2 + [2 * L] * 12


def test_a_source_that_is_dropped_is_needed_until_the_border(data: dict[str, Path]) -> None:
    state = state_at(data, 70, **MIXED)
    with load(data, "web", amend=True, weights={"web": 1}) as loader, pytest.raises(OtherRun) as error:
        loader.load_state_dict(state)
    assert error.value.expected == "code"
    with load(data, "web code", amend=True, weights={"web": 1}) as loader:
        loader.load_state_dict(state)
        state = loader.state_at(128)
    with load(data, "web", weights={"web": 1}) as loader:
        loader.load_state_dict(state)
        assert sources_of(steps(loader, 1)[0]) == {"web"}
        assert "dropped" in loader.describe()
        assert loader.source_epochs["code"] > 4


@pytest.mark.parametrize("folders", [["web", "books"], ["books", "web"], ["books"]])
def test_the_folders_of_a_source_are_part_of_what_it_is(data: dict[str, Path], folders: list[str]) -> None:
    state = state_at(data, 70, **MIXED)
    other: Any = {**data, "web": [data[name] for name in folders]}
    for options in (MIXED, {"weights": {"web": 3, "code": 1}}):
        with load(other, amend=True, **options) as loader, pytest.raises(OtherRun) as error:
            loader.load_state_dict(state)
        assert "web_2" in str(error.value.remedy)


# Arguments behind a state of step 70, which the error says what about.
REFUSED: dict[str, tuple[dict[str, Any], type[Exception], dict[str, str]]] = {
    "other weights without the word": ({"weights": {"web": 1}}, OtherRun, {"remedy": "amend=True"}),
    "other sizes without the word": ({**MIXED, "global_batch_size": 2 * L}, OtherRun, {"found": "12"}),
    "weights in tokens": ({"weights": {"web": 1, "code": 2}, "weights_in": "tokens"}, OtherRun, {}),
    "no multiple": (
        {**MIXED, "amend": True, "global_batch_size": 30, "batch_size": 6},
        OtherRun,
        {"expected": "a multiple of 12"},
    ),
    "batches that the order cannot have": (
        {**MIXED, "amend": True, "global_batch_size": 24, "batch_size": 24},
        OtherRun,
        {"found": "global_batch_size=12"},
    ),
    "another seed": ({**MIXED, "amend": True, "seed": 4}, OtherRun, {"expected": "seed 4"}),
    "another row length": ({**MIXED, "amend": True, "seq_len": 16}, OtherRun, {"expected": "seq_len 16"}),
    "one set": ({"amend": True}, OtherRun, {"found": "is_mixture True"}),
    "a step larger than an epoch": ({**MIXED, "global_batch_size": 120 * L, "amend": True}, UsageError, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_cannot_go_on_with_is_refused(data: dict[str, Path], name: str) -> None:
    options, kind, fields = REFUSED[name]
    with pytest.raises(kind) as error, load(data, **options) as loader:
        loader.load_state_dict(state_at(data, 70, **MIXED))
    for field, words in fields.items():
        assert words in str(getattr(error.value, field)), (field, getattr(error.value, field))


def test_a_run_is_amended_between_two_steps_alone(data: dict[str, Path]) -> None:
    with load(data, global_batch_size=2 * L) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with load(data, global_batch_size=4 * L, amend=True) as loader, pytest.raises(UsageError):
        loader.load_state_dict(state)


def test_an_epoch_that_was_over_stays_so(data: dict[str, Path]) -> None:
    # An epoch of web has 58 ticks: 11 steps of 5, and three ticks that no step of 5 fits into.
    state = state_at(data, 11, global_batch_size=[(0, 5 * L), (900, L)])
    assert (state["epoch"], state["step"]) == (1, 0)
    with load(data, global_batch_size=L, amend=True) as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)
        assert loader.run.ticks_in(0) == 55


def test_an_amendment_takes_less_than_a_hundred_bytes_of_a_state(data: dict[str, Path]) -> None:
    state: Any = state_at(data, 70, **MIXED)
    for number in range(15):
        with load(data, amend=True, weights={"web": 2 + number % 7, "code": 1}) as loader:
            loader.load_state_dict(state)
            last, *_ = stages(loader)[-1]
            state = loader.state_at(last + 1)
    assert len(state["stages"]) == 16
    assert len(json.dumps(state["stages"])) < 100 * 16


def test_all_states_have_the_keys_of_a_fresh_one_and_lists_without_dicts(data: dict[str, Path]) -> None:
    """torch.distributed.checkpoint reads the keys that it is given, and takes such a list as one value."""
    with load(data, **MIXED) as loader:
        fresh = loader.state_dict()
    with load(data, "web code books", amend=True, weights={"books": 1}) as loader:
        loader.load_state_dict(state_at(data, 70, **MIXED))
        state = loader.state_dict()
    assert state.keys() == fresh.keys()
    assert state["fingerprint"].keys() == fresh["fingerprint"].keys()
    assert not any(isinstance(value, dict) for value in chain(*state["sources"], *state["stages"]))


def test_a_run_keeps_the_blocks_that_it_began_with_also_behind_an_amendment(data: dict[str, Path]) -> None:
    """Another version may choose others. A source that is added later has those of this version."""
    state = state_at(data, 0, **MIXED)
    with load(data, **MIXED) as loader:
        usual = steps(loader, 8)
    for row in state["sources"]:
        row[3:5] = [2, 6]
    with load(data, **MIXED) as loader:
        loader.load_state_dict(state)
        whole = steps(loader, 8)
        assert whole != usual
        state = loader.state_at(5)
    with load(data, "web code books", amend=True, weights={"web": 1, "books": 1}) as loader:
        loader.load_state_dict(state)
        assert steps(loader, 3) == whole[5:]
        blocks = [row[3:5] for row in loader.state_dict()["sources"]]
        assert [each == [2, 6] for each in blocks] == [True, True, False]


def test_origins_and_counts_are_those_of_what_an_amended_run_delivered(data: dict[str, Path]) -> None:
    """Origins of each step by its state, as webdataset reads the tars."""
    with load(data, "web code books", amend=True, weights={"web": 1, "books": 1}, origins=True) as loader:
        loader.load_state_dict(state_at(data, 50, **MIXED))
        steps(loader, 30)
        counts = {"web": 0, "code": 0, "books": 0}
        documents: dict[Path, list[list[int]]] = {}
        loader.load_state_dict(loader.state_at(0))
        for step, batch in enumerate(islice(chain(loader, loader), 80)):  # through the end of an epoch
            assert loader.num_steps_delivered == step + 1
            for row, _, *numbers in batch["origins"].tolist():
                origin = loader.origin(*numbers)
                if origin.tar not in documents:
                    samples = webdataset.WebDataset(str(origin.tar), shardshuffle=False)
                    documents[origin.tar] = [json.loads(sample["token_ids.json"]) for sample in samples]
                (first,) = documents[origin.tar][origin.sample]
                assert first == batch["input_ids"][row, 0]
                assert sources_of([first]) == {origin.source}
                counts[origin.source] += 1
        assert loader.source_samples == counts
        assert sum(counts.values()) == 80 * L


def test_a_loader_describes_its_sources_and_what_holds(data: dict[str, Path]) -> None:
    with load(data, "web code books", amend=True, weights={"web": 3, "books": 1}) as loader:
        loader.load_state_dict(state_at(data, 70, **MIXED))
        lines = loader.describe().splitlines()
        assert [line.split()[:2] for line in lines[4:7]] == [["source", f"{name}:"] for name in data]
        assert f"{loader.source_epochs['web']:.2f} epochs" in lines[4]
        assert loader.run.sources[0].data in lines[4]
        assert [line.split()[:3] for line in lines[7:]] == [["from", "step", "0:"], ["from", "step", "128:"]]


def test_a_trainer_accumulates_by_the_global_batches_that_come(data: dict[str, Path]) -> None:
    from loader.trainer import check_trainer_arguments

    arguments = [SimpleNamespace(train_batch_size=L, gradient_accumulation_steps=number) for number in (1, 2)]
    with load(data, global_batch_size=2 * L, amend=True) as loader:
        loader.load_state_dict(state_at(data, 9))
        check_trainer_arguments(arguments[0], loader, 55)
        with pytest.raises(UsageError):
            check_trainer_arguments(arguments[0], loader, 56)  # the size changes at step 64
        loader.load_state_dict(loader.state_at(64))
        check_trainer_arguments(arguments[1], loader, 99)


def test_more_workers_than_slots_of_the_first_global_batch_are_not_started(data: dict[str, Path]) -> None:
    state = state_at(data, 3, global_batch_size=2, batch_size=1)
    with load(data, batch_size=1, global_batch_size=8, amend=True, num_workers=4) as loader:
        loader.load_state_dict(state)
        assert loader._stream._num_workers == 2
