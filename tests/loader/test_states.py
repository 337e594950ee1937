"""The state of a run: of a loop that stops anywhere, peeks, jumps or is copied, and of an amended run.

tests/oracle tests that a run resumes with the same batches on any number of ranks and workers, and that an
amended run neither repeats nor loses a sample.
"""

from __future__ import annotations

import copy
import json
import os
import pickle
import random
import re
import shutil
from collections.abc import Mapping, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch

from loader import OtherRun, OtherTokenizer, TokenLoader, UsageError
from tests.external_tars import write_numbered_tars
from tests.forged import checksum_of_state
from tests.word_tokenizers import save_word_tokenizer
from tests.world import ids_of, open_loader, refuses

pytestmark = pytest.mark.long

Sources = dict[str, Path]
STEPS, MICRO = 13, 4  # global batches of 8 in an epoch of 107 samples; batches of 2 in a global batch
WORKERS: list[Any] = [
    {},
    pytest.param({"num_workers": 2}, marks=pytest.mark.processes),
    pytest.param({"num_workers": 2, "persistent_workers": False}, marks=pytest.mark.processes),
]


def load(data: Path, batch_size: int = 8, **options: Any) -> TokenLoader:
    return open_loader(data, batch_size, **{"model_id": data, "global_batch_size": 8, "seed": 3, **options})


def signed(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return an edited state with the checksum of its values."""
    return {**state, "checksum": checksum_of_state(state)}


def numbers(batch: Any) -> list[int]:
    """Return the numbers of a batch's samples."""
    return [ids[0] for ids in ids_of(batch)]


@pytest.fixture(scope="module")
def parts(numbered: Path) -> list[list[int]]:
    """The samples of each batch of 2, for five epochs."""
    with load(numbered, 2) as loader:
        return [numbers(batch) for batch in chain(*5 * [loader])]


@pytest.fixture(scope="module")
def whole(parts: list[list[int]]) -> list[list[int]]:
    """The samples of each step."""
    return [[*chain(*parts[first : first + MICRO])] for first in range(0, len(parts), MICRO)]


@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_continues_with_the_next_batch_after_a_stop_a_jump_a_copy_or_a_refused_state(
    numbered: Path, parts: list[list[int]], options: dict[str, Any]
) -> None:
    """Also inside a step and across epochs. Batches that were only prefetched do not count."""
    chance, at = random.Random(3), 0
    with load(numbered, seed=4) as loader:
        of_another_run = loader.state_at(3)
    with load(numbered, 2, **options) as loader:
        for number in range(8):
            if number % 4 == 3:
                at = MICRO * chance.randrange(2 * STEPS)
                loader.load_state_dict(loader.state_at(at // MICRO))
            iter(loader)
            before, num_batches = loader.state_dict(), loader.metrics.num_batches
            assert numbers(loader.peek()) == numbers(loader.peek()) == parts[at]
            assert (loader.state_dict(), loader.metrics.num_batches) == (before, num_batches)
            batches = iter(loader)
            for most in (chance.choice([1, 3, 10, 60]), 2):
                for batch in islice(batches, most):
                    assert numbers(batch) == parts[at]
                    at += 1
                assert (loader.num_steps_delivered, loader.state_dict()["num_micro"]) == divmod(at, MICRO)
                if number % 2:
                    with refuses(OtherRun):
                        loader.load_state_dict(of_another_run)
                else:
                    copied = pickle.loads(pickle.dumps(loader)) if number % 4 else copy.deepcopy(loader)
                    with copied as other:
                        assert other.state_dict() == loader.state_dict()
                        assert numbers(next(iter(other))) == parts[at]


@pytest.mark.parametrize("options", WORKERS)
def test_set_epoch_continues_the_current_epoch_or_starts_another_one(
    numbered: Path, whole: list[list[int]], options: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    """Also after a resume. tests/oracle/test_states.py tests how steps are counted then."""
    with load(numbered, **options) as loader:
        batches = iter(loader)
        for _ in range(3):
            next(batches)
        caplog.clear()
        loader.set_epoch(0)  # the current epoch
        assert numbers(next(batches)) == whole[3]
        assert not caplog.records
        loader.set_epoch(2)
        with refuses(UsageError):
            next(batches)
        with refuses(UsageError):
            loader.state_at(3)  # in an epoch that was left
        assert numbers(next(iter(loader))) == whole[2 * STEPS]
        assert loader.num_steps_delivered == 5
        wrong: Any
        for wrong in (-1, "1", 1.5, 2**70):
            with refuses(UsageError):
                loader.set_epoch(wrong)
        state = loader.state_dict()
    with load(numbered, **options) as loader:
        loader.load_state_dict(state)
        assert numbers(next(iter(loader))) == whole[2 * STEPS + 1]
    with load(numbered) as loader:
        loader.set_epoch(2)  # without loading the state
        assert [record.levelname for record in caplog.records] == ["WARNING"]


def test_states_are_few_numbers_and_no_path(numbered: Path, whole: list[list[int]], tmp_path: Path) -> None:
    """Keys never change: torch.distributed.checkpoint reads only the keys of the state that it is given."""
    with load(numbered, 2) as loader:
        fresh = loader.state_dict()
        next(iter(loader))
        inside = loader.state_dict()
        state = loader.state_at(3)
        with refuses(OtherTokenizer):
            loader.load_state_dict(
                signed({**state, "fingerprint": {**state["fingerprint"], "tokenizer": "0" * 64}})
            )
    assert inside["num_micro"] == 1
    assert fresh.keys() == inside.keys()
    for name in ("fingerprint", "layout"):
        assert fresh[name].keys() == inside[name].keys()
    torch.save(state, tmp_path / "state.pt")
    assert torch.load(tmp_path / "state.pt", weights_only=True) == state
    assert len(json.dumps(state)) < 800
    assert str(numbered) not in json.dumps(state)
    with load(Path(shutil.copytree(numbered, tmp_path / "moved"))) as loader:
        loader.load_state_dict(state)
        assert numbers(loader.peek()) == whole[3]
        assert (loader.first_batch, len(loader), len([*loader])) == (3, STEPS, STEPS - 3), "for a tqdm bar"


def test_the_batches_before_a_state_are_never_read(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    real = os.preadv
    monkeypatch.setattr(os, "preadv", lambda *args: reads.append(real(*args)) or reads[-1])
    with load(numbered) as loader:
        num_bytes = []
        for step in range(STEPS):
            reads.clear()
            loader.load_state_dict(loader.state_at(step))
            next(iter(loader))
            num_bytes.append(sum(reads))
    assert 0 < max(num_bytes) <= 1.2 * num_bytes[0]


# Amendments

L = 12
SIZES = {"web": 700, "code": 130, "books": 90}
MIXED: dict[str, Any] = {"weights": {"web": 1, "code": 1}}


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Sources:
    """Numbered tars of three sources; the first id of a document is its number."""
    root = tmp_path_factory.mktemp("sources")
    save_word_tokenizer(root, 1000)
    for name, size in SIZES.items():
        (root / name).mkdir()
        write_numbered_tars(root / name, size, 3)
    return {name: root / name for name in SIZES}


def mix(
    sources: Sources, names: str = "web code", web: Sequence[str] = ("web",), **options: Any
) -> TokenLoader:
    """Return a loader of a mixture, or of web only if there are no weights. ``web``: the folders of web."""
    named: Any = {**sources, "web": [sources[name] for name in web]}
    folders: Any = {name: named[name] for name in names.split()} if "weights" in options else named["web"]
    made = {"batch_size": L, "global_batch_size": L, "weights_in": "samples", **options}
    return open_loader(folders, model_id=sources["code"].parent, **made)


def state_at(sources: Sources, step: int, **options: Any) -> dict[str, Any]:
    with mix(sources, **options) as loader:
        state: dict[str, Any] = json.loads(json.dumps(loader.state_at(step)))
        return state


def stages(loader: TokenLoader) -> list[tuple[int, int, str]]:
    """Return (first step, global batch size, shares of samples) of each stage."""
    lines = re.findall(r"from step (\d+): global_batch_size (\d+) \((.*?)\)", loader.describe())
    return [(int(step), int(size), shares) for step, size, shares in lines]


FIRST = (0, L, "50% web, 50% code")
# Arguments when resuming from a state of step 70, and the stages of the amended run.
AMENDED: list[tuple[dict[str, Any], list[Any]]] = [
    ({"weights": {"web": 1}, "global_batch_size": 3 * L}, [FIRST, (128, 3 * L, "100% web")]),
    ({"weights": [(0, {"web": 1, "code": 1}), (75, {"web": 1})]}, [FIRST, (128, L, "100% web")]),
    ({"weights": [(0, {"web": 1, "code": 1}), (150, {"web": 1})]}, [FIRST, (150, L, "100% web")]),
    ({**MIXED, "global_batch_size": [(0, L), (130, 2 * L)]}, [FIRST, (130, 2 * L, FIRST[2])]),
    ({"names": "web code books", "weights": [(0, {"web": 1, "code": 1}), (400, {"books": 1})]},
     [FIRST, (400, L, "100% books")]),
    ({"weights": {"web": 5, "code": 5}}, [FIRST]),
    ({"weights": {"web": 9, "code": 1}}, [FIRST, (128, L, "90% web, 10% code")]),
    ({"weights": {"web": 1e5, "code": 2}}, [FIRST, (128, L, "99.99847% web, 0.001525879% code")]),
]  # fmt: skip


@pytest.mark.parametrize(("options", "expected"), AMENDED)
def test_an_amendment_takes_effect_at_the_next_border_and_the_loader_logs_it(
    sources: Sources, options: dict[str, Any], expected: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    state = state_at(sources, 70, **MIXED)
    with mix(sources, amend=True, **options) as loader:
        caplog.clear()
        loader.load_state_dict(state)
        assert stages(loader) == expected
        assert [" 128" in record.getMessage() for record in caplog.records] == [True] * (len(expected) > 1)
        assert loader.num_steps_delivered == 70
        again = loader.state_dict()
    with mix(sources, **options) as loader:  # afterwards amend=True is not needed
        loader.load_state_dict(again)
        assert loader.state_dict() == again


HALF = {"web": 1, "code": 1}
THIRD = {"web": 2, "code": 1}
# Steps before and after the amendment, the arguments of the run, and those that equal what it has planned.
EQUAL: list[tuple[int, int, dict[str, Any], dict[str, Any]]] = [
    # The border is step 64 or 128, after the planned step.
    (10, 20, {**MIXED, "global_batch_size": [(0, L), (40, 2 * L)]}, {**MIXED, "global_batch_size": 2 * L}),
    (10, 20, {"weights": [(0, HALF), (40, THIRD)]}, {"weights": THIRD}),
    # The planned step is over.
    (50, 55, {"weights": [(0, HALF), (40, THIRD)]}, {"weights": THIRD}),
    (50, 50, {**MIXED, "global_batch_size": [(0, L), (40, 2 * L)]}, {**MIXED, "global_batch_size": 2 * L}),
]


@pytest.mark.parametrize(("before", "after", "options", "equal"), EQUAL)
def test_an_amendment_that_equals_what_is_planned_is_recorded(
    sources: Sources, before: int, after: int, options: dict[str, Any], equal: dict[str, Any]
) -> None:
    """Later arguments count from it on: without amend=True, and from every step of the run."""
    with mix(sources, **options) as loader:
        state = loader.state_at(before)
        taken = [numbers(batch) for batch in islice(loader, 3)]
    with mix(sources, amend=True, **equal) as loader:
        loader.load_state_dict(state)
        state = loader.state_at(after)
        loader.load_state_dict(loader.state_at(0))
        assert [numbers(batch) for batch in islice(loader, 3)] == taken, "state_at(0) of this loader"
    for amend in (False, True):
        with mix(sources, amend=amend, **equal) as loader:
            loader.load_state_dict(state)
            assert loader.state_dict() == state
            loader.load_state_dict(loader.state_at(0))
            assert [numbers(batch) for batch in islice(loader, 3)] == taken


@pytest.mark.parametrize(("step", "amend"), [(5, False), (0, True), (5, True)])
def test_sources_may_be_named_in_any_order(sources: Sources, step: int, amend: bool) -> None:
    """The run's own order of sources decides how shares are rounded and which seed a source has."""
    weights = {"web": 2, "code": 0.3, "books": 7}
    state = state_at(sources, step, names="web code books", weights=weights)
    with mix(sources, "books web code", weights=weights, amend=amend) as loader:
        loader.load_state_dict(state)
        assert loader.state_dict() == state


# Arguments when resuming from a state of step 70, and fields of the error. More: tests/oracle/test_states.py.
REFUSED: list[tuple[dict[str, Any], dict[str, str]]] = [
    ({"weights": {"web": 1}}, {"remedy": "amend=True"}),
    ({"weights": {"web": 1, "code": 2}, "weights_in": "tokens"}, {}),
    ({"global_batch_size": 30, "batch_size": 6, **MIXED, "amend": True}, {"expected": "a multiple of 12"}),
    # a batch larger than the order's global batch
    ({"global_batch_size": 24, "batch_size": 24, **MIXED, "amend": True}, {"found": "global_batch_size=12"}),
    ({**MIXED, "amend": True, "seed": 4}, {"expected": "seed 4"}),
    ({**MIXED, "amend": True, "seq_len": 16}, {"expected": "seq_len 16"}),
    ({"amend": True}, {"found": "is_mixture True"}),
    # without a source that is needed up to the border
    ({"names": "web", "amend": True, "weights": {"web": 1}}, {"expected": "code"}),
    # other folders for a source
    ({**MIXED, "amend": True, "web": ["web", "books"]}, {"remedy": "web_2"}),
    ({"weights": {"web": 3, "code": 1}, "amend": True, "web": ["books", "web"]}, {"remedy": "web_2"}),
    ({**MIXED, "amend": True, "web": ["books"]}, {"remedy": "web_2"}),
]


@pytest.mark.parametrize(("options", "fields"), REFUSED)
def test_states_of_other_runs_are_refused(
    sources: Sources, options: dict[str, Any], fields: dict[str, str]
) -> None:
    state = state_at(sources, 70, **MIXED)
    with mix(sources, **options) as loader, refuses(OtherRun, **fields):
        loader.load_state_dict(state)
    with refuses(UsageError), mix(sources, **MIXED, global_batch_size=120 * L, amend=True) as loader:
        loader.load_state_dict(state)  # a step would be larger than an epoch


def test_states_of_an_amended_run_are_short_and_have_the_keys_of_a_fresh_one(sources: Sources) -> None:
    """torch.distributed.checkpoint reads only the keys of the state that it is given, and treats a list
    without dicts as one value."""
    state: Any = state_at(sources, 0, **MIXED)
    fresh = state
    for number in range(15):
        with mix(sources, amend=True, weights={"web": 2 + number % 7, "code": 1}) as loader:
            loader.load_state_dict(state)
            state = loader.state_at(stages(loader)[-1][0] + 1)
    assert len(state["stages"]) == 15
    assert len(json.dumps(state["stages"])) < 100 * 15
    assert state.keys() == fresh.keys()
    assert state["fingerprint"].keys() == fresh["fingerprint"].keys()
    assert not any(isinstance(value, dict) for value in chain(*state["sources"], *state["stages"]))


def test_a_run_keeps_its_initial_block_sizes_after_an_amendment(sources: Sources) -> None:
    """Another version may choose other sizes. A source that is added later has those of this version."""
    state = state_at(sources, 0, **MIXED)
    with mix(sources, **MIXED) as loader:
        usual = [numbers(batch) for batch in islice(loader, 8)]
    for row in state["sources"]:
        row[3:5] = [2, 6]
    with mix(sources, **MIXED) as loader:
        loader.load_state_dict(signed(state))
        whole = [numbers(batch) for batch in islice(loader, 8)]
        assert whole != usual
        state = loader.state_at(5)
    with mix(sources, "web code books", amend=True, weights={"web": 1, "books": 1}) as loader:
        loader.load_state_dict(state)
        assert [numbers(batch) for batch in islice(loader, 3)] == whole[5:]
        blocks = [row[3:5] for row in loader.state_dict()["sources"]]
        assert [each == [2, 6] for each in blocks] == [True, True, False]


FORMS: dict[str, dict[str, Any]] = {
    "documents": {},
    "truncated documents": {"max_length": 4},
    "rows packed at load": {"seq_len": 4},
    "rows packed by plan": {},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("was", "now"), [("same", "shifted"), ("shifted", "same")])
def test_a_run_is_not_resumed_with_other_targets(
    form: str, was: str, now: str, rows: Path, numbered: Path
) -> None:
    """Its labels would be one place off, without a word where both have the same samples."""
    data = rows if form == "rows packed by plan" else numbered
    options = {"model_id": None if data == rows else numbered, **FORMS[form]}
    with open_loader(data, 2, targets=was, **options) as loader:
        state = loader.state_at(3)
    with open_loader(data, 2, targets=now, **options) as other:
        with refuses(OtherRun, found=f'targets="{now}"', remedy=f'targets="{was}"'):
            other.load_state_dict(state)
        with refuses(OtherRun, remedy=f'targets="{was}"'):
            other.load_run(state)


def test_a_refused_state_of_shifted_targets_shows_the_length_that_was_typed(numbered: Path) -> None:
    with load(numbered, 2, targets="shifted", seq_len=4) as loader:
        state = loader.state_at(3)
    with load(numbered, 2, targets="shifted", seq_len=5) as other, refuses(OtherRun, found="seq_len 4"):
        other.load_state_dict(state)
