"""A run that is amended: what may change, from which step on, what is refused, and what a loader says of it.

That no sample is repeated or lost is tried by tests/oracle/test_law.py, on random histories.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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


def load(
    data: Mapping[str, Any], sources: str = "web code", web: Sequence[str] = ("web",), **options: Any
) -> TokenLoader:
    """Return a loader of a mixture, or of web alone if there are no weights; ``web``: its folders."""
    named: Any = {**data, "web": [data[name] for name in web]}
    folders: Any = {name: named[name] for name in sources.split()} if "weights" in options else named["web"]
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


FIRST = (0, L, "web 0.5, code 0.5")
# What is passed behind a state of step 70, and the stages of the run then.
AMENDED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"weights": {"web": 1}, "global_batch_size": 3 * L}, [FIRST, (128, 3 * L, "web 1")]),
    ({"weights": [(0, {"web": 1, "code": 1}), (75, {"web": 1})]}, [FIRST, (128, L, "web 1")]),
    ({"weights": [(0, {"web": 1, "code": 1}), (150, {"web": 1})]}, [FIRST, (150, L, "web 1")]),
    ({**MIXED, "global_batch_size": [(0, L), (130, 2 * L)]}, [FIRST, (130, 2 * L, FIRST[2])]),
    ({"sources": "web code books", "weights": [(0, {"web": 1, "code": 1}), (400, {"books": 1})]},
     [FIRST, (400, L, "books 1")]),
    ({"weights": {"web": 5, "code": 5}}, [FIRST]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), AMENDED)
def test_an_amendment_holds_from_the_next_border_and_the_loader_says_so(
    data: dict[str, Path], options: dict[str, Any], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = state_at(data, 70, **MIXED)
    with load(data, amend=True, **options) as loader:
        caplog.clear()
        loader.load_state_dict(state)
        assert stages(loader) == expected
        assert [" 128" in record.getMessage() for record in caplog.records] == [True] * (len(expected) > 1)
        assert loader.num_steps_delivered == 70
        again = loader.state_dict()
    with load(data, **options) as loader:  # what the run has become needs no word
        loader.load_state_dict(again)
        assert loader.state_dict() == again


@pytest.mark.parametrize(("step", "amend"), [(5, False), (0, True), (5, True)])
def test_sources_may_be_named_in_any_order(data: dict[str, Path], step: int, amend: bool) -> None:
    """Shares are rounded to whole ticks in the order of the run, and a source keeps its seed."""
    weights = {"web": 2, "code": 0.3, "books": 7}
    state = state_at(data, step, sources="web code books", weights=weights)
    with load(data, "books web code", weights=weights, amend=amend) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state


# Arguments behind a state of step 70, and what the error says. More: tests/oracle/test_states.py.
REFUSED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"weights": {"web": 1}}, {"remedy": "amend=True"}),
    ({"weights": {"web": 1, "code": 2}, "weights_in": "tokens"}, {}),
    ({"global_batch_size": 30, "batch_size": 6, **MIXED, "amend": True}, {"expected": "a multiple of 12"}),
    # batches that the order cannot have
    ({"global_batch_size": 24, "batch_size": 24, **MIXED, "amend": True}, {"found": "global_batch_size=12"}),
    ({**MIXED, "amend": True, "seed": 4}, {"expected": "seed 4"}),
    ({**MIXED, "amend": True, "seq_len": 16}, {"expected": "seq_len 16"}),
    ({"amend": True}, {"found": "is_mixture True"}),
    # without a source before it is dropped
    ({"sources": "web", "amend": True, "weights": {"web": 1}}, {"expected": "code"}),
    # other folders of a source
    ({**MIXED, "amend": True, "web": ["web", "books"]}, {"remedy": "web_2"}),
    ({"weights": {"web": 3, "code": 1}, "amend": True, "web": ["books", "web"]}, {"remedy": "web_2"}),
    ({**MIXED, "amend": True, "web": ["books"]}, {"remedy": "web_2"}),
]


@pytest.mark.parametrize(("options", "fields"), REFUSED)
def test_other_runs_are_refused(
    data: dict[str, Path], options: dict[str, Any], fields: dict[str, str]
) -> None:
    state = state_at(data, 70, **MIXED)
    with load(data, **options) as loader, refuses(OtherRun, **fields):
        loader.load_state_dict(state)
    with refuses(UsageError), load(data, **MIXED, global_batch_size=120 * L, amend=True) as loader:
        loader.load_state_dict(state)  # a step larger than an epoch


def test_an_epoch_that_was_over_stays_so(data: dict[str, Path]) -> None:
    # An epoch of web has 58 ticks: 11 steps of 5, and three ticks that no step of 5 fits into.
    state = state_at(data, 11, global_batch_size=[(0, 5 * L), (900, L)])
    with load(data, amend=True) as loader:
        loader.load_state_dict(state)
        assert [(each["epoch"], each["step"]) for each in (state, loader.state_dict())] == 2 * [(1, 0)]


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
