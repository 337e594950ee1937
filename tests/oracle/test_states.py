"""A damaged state, or one of another run, is refused, or the run continues as it would have."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from loader import ShardprepError, UsageError
from tests.world import Ranks, World, hostile_text

pytestmark = pytest.mark.long

MIXED = {"weights": {"ko": 2, "en": 1}, "weights_in": "samples", "global_batch_size": 6}
FORMS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"global_batch_size": 6},
    "schedule": {"global_batch_size": [(0, 6), (5, 12)]},
    "mixture": MIXED,
    "amended": {**MIXED, "weights": {"ko": 1, "en": 3}},  # amends a mixture
}
WRONG: tuple[Any, ...] = (None, -1, 0, 10**6, 1.5, "", "x", "1; 2: 3", "\ud800", [], {}, True)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("states")
    for seed, name in enumerate(("ko", "en")):
        World(root / name).raw({"a.txt": hostile_text(160, seed)}).make()
    return root


def open_ranks(root: Path, form: str, **options: Any) -> Ranks:
    options = {**FORMS[form], **options}
    folders = {name: root / name / "data" for name in ("ko", "en")}
    return Ranks(folders if "weights" in options else folders["ko"], **options)


def state_of(root: Path, form: str) -> dict[str, Any]:
    with open_ranks(root, "mixture" if form == "amended" else form) as ranks:
        state: dict[str, Any] = json.loads(json.dumps(ranks.loaders[0].state_at(64)))
    if form == "amended":
        with open_ranks(root, form, amend=True, state=state) as ranks:
            ranks.take(2)
            state = ranks.state()
    return state


def damaged(state: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of the state, each with one value removed or replaced, and what was done."""
    for key in state if isinstance(state, dict) else range(len(state)):
        without = copy.deepcopy(state)
        del without[key]
        yield f"no {key}", without
        texts = [state[key][:-1], state[key] + "0"] if isinstance(state[key], str) else []
        for wrong in [*WRONG, *texts]:
            if wrong != state[key] or type(wrong) is not type(state[key]):
                other = copy.deepcopy(state)
                other[key] = wrong
                yield f"{key} {wrong!r}", other
        if isinstance(state[key], (dict, list)):
            for how, value in damaged(state[key]):
                other = copy.deepcopy(state)
                other[key] = value
                yield f"{key}: {how}", other


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_damaged_state_is_refused_or_makes_no_difference(data: Path, form: str) -> None:
    state = state_of(data, form)
    num_refused = 0
    with open_ranks(data, form) as ranks:
        (loader,) = ranks.loaders

        def next_step() -> Any:
            ids = next(iter(loader))["input_ids"].tolist()
            return ids, [loader.state_dict()[name] for name in ("epoch", "step", "num_micro")]

        loader.load_state_dict(state)
        expected = next_step()
        for how, other in damaged(state):
            try:
                loader.load_state_dict(other)
            except ShardprepError:
                num_refused += 1
                continue
            assert next_step() == expected, how
    assert num_refused > 100


def test_an_edited_past_of_a_state_is_refused(data: Path) -> None:
    """Shares, sizes and positions that are possible in themselves: the checksum is of other values."""
    state = state_of(data, "amended")
    half = copy.deepcopy(state)
    half["stages"][0][2] = [1 << 15, 1 << 15]
    old = {**state, "version": 4}
    del old["checksum"]
    with open_ranks(data, "amended") as ranks:
        (loader,) = ranks.loaders
        for wrong in (half, {**state, "epoch": 2**31 - 1}, {**state, "since": 1}, {**state, "step": 1}, old):
            with pytest.raises(ShardprepError) as raised:
                loader.load_state_dict(wrong)
            assert raised.value.exit_code == (78 if wrong is old else 65)
        loader.load_state_dict(state)


@pytest.mark.parametrize("form", ["plain", "mixture"])
def test_source_samples_counts_what_was_delivered_and_not_what_set_epoch_skipped(
    data: Path, form: str
) -> None:
    with open_ranks(data, form, origins=True) as ranks:
        (loader,) = ranks.loaders
        counts = dict.fromkeys(loader.source_names, 0)
        for epoch, num_steps in ((3, 5), (1, 4), (2**31 - 1, 2)):
            loader.set_epoch(epoch)
            assert loader.source_samples == counts
            for batch in islice(loader, num_steps):
                for source in batch["origins"][:, 2].tolist():
                    counts[loader.source_names[source]] += 1
            assert loader.source_samples == counts
            assert loader.num_steps_delivered == sum(counts.values()) // 6
            loader.load_state_dict(json.loads(json.dumps(loader.state_dict())))
            assert loader.source_samples == counts, "of a state"
            with pytest.raises(UsageError):
                loader.state_at(loader.num_steps_delivered - num_steps - 1)
            batch = next(iter(loader))
            for source in batch["origins"][:, 2].tolist():
                counts[loader.source_names[source]] += 1


def test_state_at_takes_whole_numbers_and_gives_states_that_can_be_loaded(data: Path) -> None:
    with open_ranks(data, "plain") as ranks:
        (loader,) = ranks.loaders
        state = loader.state_at(np.int64(4))
        assert json.loads(json.dumps(state)) == state == loader.state_at(4)
        wrong: Any
        for wrong in (-1, "4", None, 3.5, True, 2**40, np.float64(4)):
            with pytest.raises(UsageError):
                loader.state_at(wrong)
        for step in (0, 10**6, 2**31):
            loader.load_state_dict(loader.state_at(step))
            assert loader.num_steps_delivered == step
    with pytest.raises(UsageError):
        open_ranks(data, "plain", global_batch_size=[(0, 6), (2**31, 12)])


def test_a_state_inside_a_step_resumes_only_with_the_same_batch_size_and_ranks(data: Path) -> None:
    with open_ranks(data, "plain", batch_size=2) as ranks:
        (loader,) = ranks.loaders
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        assert not loader.ends_step
        with pytest.raises(ShardprepError):
            loader.load_state_dict({**state, "num_micro": 3})  # a step has 3 batches
    amended = {"batch_size": 2, "global_batch_size": 12, "amend": True}
    for others in ({"batch_size": 3}, {"batch_size": 2, "world_size": 3}, amended):
        with open_ranks(data, "plain", **others) as ranks, pytest.raises(UsageError):
            ranks.loaders[0].load_state_dict(state)


def test_set_epoch_keeps_a_loaded_state_and_does_not_count_skipped_steps(data: Path) -> None:
    state = state_of(data, "plain")
    with open_ranks(data, "plain") as ranks:
        (loader,) = ranks.loaders
        for step, epoch in ((1, 0), (2, 0), (3, 0), (4, 2), (5, 2)):
            loader.set_epoch(epoch)
            next(iter(loader))
            assert (loader.state_dict()["epoch"], loader.num_steps_delivered) == (epoch, step)
        assert not loader.has_loaded_state
        loader.load_state_dict(state)
        assert loader.has_loaded_state
        with pytest.raises(UsageError):
            loader.set_epoch(state["epoch"] + 1)
        loader.set_epoch(state["epoch"])
        assert loader.state_dict()["step"] == state["step"]
        next(iter(loader))
        assert not loader.has_loaded_state
        loader.set_epoch(state["epoch"] + 1)
        next(iter(loader))
        assert (loader.state_dict()["epoch"], loader.state_dict()["step"]) == (state["epoch"] + 1, 1)
