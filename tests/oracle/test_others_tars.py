"""Tars of others: however their lists of ids are spelled, and nothing stays open behind a loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from loader import get_llama3_dataloader
from shardprep.errors import BrokenShard
from tests.world import tokenizer_dir

LISTS = [[7], [1, 20, 300], [0, 0, 5], list(range(90)), [65535, 3, 70000 % 250]]
SPELLINGS: dict[str, Callable[[list[int], int], str]] = {
    "no white space": lambda ids, _: json.dumps(ids, separators=(",", ":")),
    "a number a line": lambda ids, _: json.dumps(ids, indent=1),
    "white space around it": lambda ids, _: f" \t{json.dumps(ids)} \r\n",
    "white space before commas": lambda ids, _: json.dumps(ids, separators=(" , ", ":")),
    "another one each time": lambda ids, n: json.dumps(ids, separators=((", ", ",", " ,")[n % 3], ":")),
}


def read_spelled(folder: Path, spell: Callable[[list[int], int], str]) -> Any:
    """Write LISTS four times over, read them in order, and return the loader, closed."""
    lists = [[number % 250 for number in ids] for ids in LISTS] * 4
    with webdataset.TarWriter(str(folder / "part-0.tar")) as writer:
        for number, ids in enumerate(lists):
            writer.write({"__key__": f"s{number}", "token_ids.json": spell(ids, number).encode()})
    loader = get_llama3_dataloader(
        str(folder / "part-0.tar"), 4, model_id=str(tokenizer_dir()), shuffle=False, num_workers=0
    )
    rows = [
        row[mask.bool()].tolist()
        for batch in loader
        for row, mask in zip(batch["input_ids"], batch["attention_mask"], strict=True)
    ]
    loader.close()
    assert rows == lists
    return loader


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_spelling_of_a_list_makes_no_difference(tmp_path: Path, spelling: str) -> None:
    read_spelled(tmp_path, SPELLINGS[spelling])


@pytest.mark.parametrize(
    "text",
    [
        "[1,,2]",
        "[1,]",
        "[,]",
        "[1 2]",
        "[1, 2",
        "[-1]",
        "[1.5]",
        "[true]",
        "[[1]]",
        "[000000001]",
        "[12345678901]",
    ],
)
def test_a_text_that_is_no_list_of_ids_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "part-0.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number, ids in enumerate(["[1,2]", text, "[3,4]"]):
            writer.write({"__key__": f"s{number}", "token_ids.json": ids.encode()})
    loader = get_llama3_dataloader(str(path), 3, model_id=str(tokenizer_dir()), shuffle=False, num_workers=0)
    with loader, pytest.raises(BrokenShard) as found:
        next(iter(loader))
    assert found.value.path == str(path)


@pytest.mark.parametrize("token", [-1, 2**31, 2**32 + 1])
def test_an_array_of_ids_that_int32_does_not_hold_is_refused(tmp_path: Path, token: int) -> None:
    path = tmp_path / "part-0.tar"
    with webdataset.TarWriter(str(path)) as writer:
        for number, ids in enumerate([[1, 2], [3, token], [4]]):
            writer.write({"__key__": f"s{number}", "token_ids.npy": np.array(ids, np.int64)})
    loader = get_llama3_dataloader(str(path), 3, model_id=str(tokenizer_dir()), shuffle=False, num_workers=0)
    with loader, pytest.raises(BrokenShard) as found:
        next(iter(loader))
    assert found.value.path == str(path)


def test_a_closed_loader_holds_no_tar_open(tmp_path: Path) -> None:
    loader = read_spelled(tmp_path, SPELLINGS["no white space"])
    still_open = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [path for path in still_open if path.is_relative_to(tmp_path)]
    assert loader.metrics.num_batches == 5  # it is still there
