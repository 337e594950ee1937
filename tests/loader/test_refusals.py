"""Arguments of ``get_llama3_dataloader`` that cannot be, and misuses of a loader. More: tests/oracle."""

from __future__ import annotations

import inspect
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader

import loader
import shardprep
from loader import NotFound, UsageError, get_llama3_dataloader
from shardprep.removed import ARGUMENTS
from tests import loader_reference
from tests.world import ids_of, open_loader, refuses


def rows_of(values: dict[str, tuple[Any, ...]], expected: str) -> list[tuple[dict[str, Any], str, str]]:
    """The same for several arguments: name -> wrong values."""
    return [({name: value}, f"{name}={value!r}", expected) for name in values for value in values[name]]


# Arguments beside a data set, batch_size=2 and model_id; what was found, and what was expected.
WRONG: list[tuple[dict[str, Any], str, str]] = [
    *rows_of(
        dict.fromkeys(("shuffle", "amend", "pin_memory", "persistent_workers"), ("x",)), "True or False"
    ),
    *rows_of({"origins": ("yes", None)}, "True or False"),
    *rows_of({"batch_size": ("2", 0), "seq_len": ("16", True, 0), "max_length": (1.5,)}, "at least 1"),
    *rows_of({"prefetch_factor": (True,), "world_size": (1.0,), "global_batch_size": (8.0,)}, "at least 1"),
    *rows_of({"pad_to_multiple_of": (True,), "num_workers": (True, "2", -1), "rank": (1.0,)}, "at least 0"),
    *rows_of({"group_by_length": (-4, 2.5)}, "at least 0"),
    *rows_of({"seed": (1.0,)}, "a whole number"),
    *rows_of({"model_id": (4, b"x"), "collate_fn": (5,), "cache_dir": (b"x",)}, "a "),
    ({"input_shards": [3]}, "input_shards=3", "the path of a folder"),
    ({"num_workers": 2, "prefetch_factor": 0}, "prefetch_factor=0", "at least 1"),
    ({"seq_len": 0, "targets": "shifted"}, "seq_len=0", "at least 1"),
    ({"boundaries": True}, "boundaries=[True]", "position_ids"),
    ({"boundaries": None}, "boundaries=[None]", "position_ids"),
    ({"group_by_length": 8, "global_batch_size": 8, "rank": 0, "world_size": 4}, "4 ranks", "[1]"),
    ({"group_by_length": 50}, "50", "2"),
    ({"seq_len": 8, "group_by_length": True}, "seq_len=8", ""),
    ({"split": "validation", "global_batch_size": [(0, 4), (3, 8)]}, "global_batch_size=[", "one size"),
    # Arguments that do not go together; these errors have no fields.
    ({"boundaries": "position_ids", "seq_len": 8, "collate_fn": list}, "", ""),
    ({"origins": True, "collate_fn": list}, "", ""),
    ({"targets": "shifted", "seq_len": 8, "collate_fn": list}, "", ""),
    ({"group_by_length": 2, "shuffle": False}, "", ""),
    ({"group_by_length": 2, "split": "validation"}, "", ""),
]


def test_numbers_of_numpy_and_paths_of_bytes_are_taken_like_pythons_own(numbered: Path) -> None:
    def batches(*args: Any, **options: Any) -> tuple[list[Any], str]:
        with get_llama3_dataloader(*args, num_workers=0, **options) as made:
            return [ids_of(batch) for batch in made], json.dumps(made.state_dict())

    five, two, eight = np.int64(5), np.int64(2), np.int64(8)
    tars = [str(numbered / f"shard-0000{number}.tar") for number in range(3)]
    named = [os.fsencode(tars[0]), Path(tars[1]), tars[2]]
    given: dict[str, Any] = {"max_length": two, "pad_to_multiple_of": eight, "shuffle": np.bool_(True)}
    given |= {"seed": five, "global_batch_size": [(np.int64(0), two), (five, eight)]}
    plain: dict[str, Any] = {"max_length": 2, "pad_to_multiple_of": 8, "seed": 5}
    plain |= {"global_batch_size": [(0, 2), (5, 8)]}
    assert batches(named, two, numbered, **given) == batches(tars, 2, numbered, **plain)
    sources = {"a": tars[0], "b": tars[1:]}
    given = {"seq_len": eight, "weights": {"a": two, "b": np.float32(0.5)}}
    plain = {"seq_len": 8, "weights": {"a": 2, "b": 0.5}}
    assert batches(sources, two, numbered, **given) == batches(sources, 2, numbered, **plain)


@pytest.mark.parametrize(("options", "found", "expected"), WRONG, ids=[str(options) for options, *_ in WRONG])
def test_a_wrong_value_is_named(numbered: Path, options: dict[str, Any], found: str, expected: str) -> None:
    given: dict[str, Any] = {"input_shards": numbered, "batch_size": 2, "model_id": numbered, **options}
    with refuses(UsageError, found=found, expected=expected):
        get_llama3_dataloader(**{"num_workers": 0, **given})


@pytest.mark.parametrize("name", ARGUMENTS)
def test_an_argument_that_went_is_answered_with_what_to_do_instead(name: str) -> None:
    make: Any = get_llama3_dataloader
    with pytest.raises(TypeError) as raised:
        make("DATA", 4, **{name: 1})
    assert name in str(raised.value)
    assert ARGUMENTS[name] in str(raised.value)


def test_each_argument_is_explained_in_one_group_and_the_reference_page_says_it() -> None:
    groups = loader_reference.arguments_by_group()
    explained = [name for arguments in groups.values() for name in arguments]
    assert sorted(explained) == sorted(inspect.signature(get_llama3_dataloader).parameters)
    assert len(groups) == 5
    assert all(text.endswith((".", "``.")) for arguments in groups.values() for text in arguments.values())
    found = loader_reference.PAGE.read_text("utf-8")
    assert found == loader_reference.page(), "run: python -m tests.loader_reference"
    assert shardprep.get_llama3_dataloader is loader.get_llama3_dataloader


def test_a_model_that_cannot_be_had_is_named(numbered: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound) as raised:
        open_loader(numbered, model_id="nobody/nothing-at-all")
    assert "nobody/nothing-at-all" in str(raised.value)


@pytest.mark.processes
def test_who_makes_a_loader_of_the_loader_is_told_so(numbered: Path) -> None:
    """As accelerate's prepare, skip_first_batches and Lightning do, and who takes it for a data set."""
    with open_loader(numbered, model_id=numbered) as made:
        itself: Any = made
        names = ("run", "step_batches", "loader_tokenizer", "process_rank", "pin_memory")
        shown = {name: vars(made)[name] for name in names}
        assert len(type(made)(**shown)) == len(made)
        for remake in (
            lambda: DataLoader(itself),
            lambda: DataLoader(itself, batch_size=4, sampler=range(8)),
            lambda: DataLoader(made.dataset, batch_size=made.batch_size, num_workers=1),
            lambda: type(made)(**shown, sampler=None),
            lambda: itself.dataset[0],
        ):
            with refuses(UsageError):
                next(iter(remake()))
        assert len([*made]) == len(made)
