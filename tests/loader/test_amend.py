"""A run that is amended: what may change, from which step on, what is refused, and what a loader says of it.

That no sample is repeated or lost is tried by tests/oracle/test_law.py, on random histories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest

from loader import OtherRun, TokenLoader, UsageError
from tests.external_tars import write_numbered_tars
from tests.word_tokenizers import save_word_tokenizer
from tests.world import open_loader, refuses

L = 12
SIZES = {"web": 700, "code": 130, "books": 90}
MIXED: dict[str, Any] = {"weights": {"web": 1, "code": 1}}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The first id of a document is its number."""
    root = tmp_path_factory.mktemp("data")
    save_word_tokenizer(root, 1000)
    for name, size in SIZES.items():
        (root / name).mkdir()
        write_numbered_tars(root / name, size, 3)
    return {name: root / name for name in SIZES}


def load(data: Mapping[str, Any], sources: str = "web code", **options: Any) -> TokenLoader:
    """Return a loader of a mixture, or of web alone if there are no weights."""
    folders: Any = {name: data[name] for name in sources.split()} if "weights" in options else data["web"]
    made = {"batch_size": L, "global_batch_size": L, "weights_in": "samples", **options}
    return open_loader(folders, model_id=data["code"].parent, rank=0, world_size=1, **made)


def state_at(data: Mapping[str, Any], step: int, **options: Any) -> dict[str, Any]:
    with load(data, **options) as loader:
        state: dict[str, Any] = json.loads(json.dumps(loader.state_at(step)))
        return state


def steps(loader: TokenLoader, num_steps: int) -> list[list[int]]:
    """Return the first ids of each of the next steps, of one batch each."""
    return [batch["input_ids"][:, 0].tolist() for batch in islice(chain(loader, loader), num_steps)]


def stages(loader: TokenLoader) -> list[tuple[int, int, str]]:
    """Return what holds: from which step on, the global batch, and the shares of samples."""
    lines = re.findall(r"from step (\d+): (.*), global_batch_size (\d+)", loader.describe())
    return [(int(step), int(size), shares) for step, shares, size in lines]


HALVES, WHOLE = "web 0.5, code 0.5", "web 1"
# What is passed behind a state of step 70, and the stages of the run then.
AMENDED: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "weights": ({"weights": {"web": 1}}, [(0, L, HALVES), (128, L, WHOLE)]),
    "weights and sizes": (
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
        [(0, L, HALVES), (400, L, "books 1")],
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
        caplog.clear()
        loader.load_state_dict(state)
        assert stages(loader) == expected
        assert [" 128" in record.getMessage() for record in caplog.records] == [True] * (name != "nothing")
        assert loader.num_steps_delivered == 70
        again = loader.state_dict()
    with load(data, **options) as loader:  # what the run has become needs no word
        loader.load_state_dict(again)
        assert loader.state_dict() == again


@pytest.mark.parametrize(("step", "amend"), [(5, False), (0, True), (5, True)])
def test_the_order_in_which_sources_are_named_does_not_matter(
    data: dict[str, Path], step: int, amend: bool
) -> None:
    """Shares are rounded to whole ticks in the order of the run, and a source keeps its seed."""
    weights = {"web": 2, "code": 0.3, "books": 7}
    with load(data, "web code books", weights=weights) as loader:
        state = loader.state_at(step)
    with load(data, "books web code", weights=weights, amend=amend) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state


@pytest.mark.parametrize("folders", [["web", "books"], ["books", "web"], ["books"]])
def test_the_folders_of_a_source_are_part_of_what_it_is(data: dict[str, Path], folders: list[str]) -> None:
    state = state_at(data, 70, **MIXED)
    other: Any = {**data, "web": [data[name] for name in folders]}
    for options in (MIXED, {"weights": {"web": 3, "code": 1}}):
        with load(other, amend=True, **options) as loader, refuses(OtherRun, remedy="web_2"):
            loader.load_state_dict(state)


# Arguments behind a state of step 70, and what the error says.
REFUSED: dict[str, tuple[dict[str, Any], type[UsageError] | type[OtherRun], dict[str, str]]] = {
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
    "without a source before it is dropped": (
        {"sources": "web", "amend": True, "weights": {"web": 1}},
        OtherRun,
        {"expected": "code"},
    ),
    "a step larger than an epoch": ({**MIXED, "global_batch_size": 120 * L, "amend": True}, UsageError, {}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_run_cannot_go_on_with_is_refused(data: dict[str, Path], name: str) -> None:
    options, kind, fields = REFUSED[name]
    state = state_at(data, 70, **MIXED)
    with refuses(kind, **fields), load(data, **options) as loader:
        loader.load_state_dict(state)


def test_a_run_is_amended_between_two_steps_alone(data: dict[str, Path]) -> None:
    with load(data, global_batch_size=2 * L) as loader:
        next(iter(loader))
        state = loader.state_dict()
    with load(data, global_batch_size=4 * L, amend=True) as loader, refuses(UsageError):
        loader.load_state_dict(state)


def test_an_epoch_that_was_over_stays_so(data: dict[str, Path]) -> None:
    # An epoch of web has 58 ticks: 11 steps of 5, and three ticks that no step of 5 fits into.
    state = state_at(data, 11, global_batch_size=[(0, 5 * L), (900, L)])
    assert (state["epoch"], state["step"]) == (1, 0)
    with load(data, global_batch_size=L, amend=True) as loader:
        loader.load_state_dict(state)
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (1, 0)


def test_states_of_an_amended_run_are_short_and_have_the_keys_of_a_fresh_one(data: dict[str, Path]) -> None:
    """torch.distributed.checkpoint reads the keys that it is given, and takes a list without dicts as one
    value."""
    state: Any = state_at(data, 0, **MIXED)
    fresh = state
    for number in range(15):
        with load(data, amend=True, weights={"web": 2 + number % 7, "code": 1}) as loader:
            loader.load_state_dict(state)
            state = loader.state_at(stages(loader)[-1][0] + 1)
    assert len(state["stages"]) == 15
    assert len(json.dumps(state["stages"])) < 100 * 15
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
