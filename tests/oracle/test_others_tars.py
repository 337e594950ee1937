"""Tars of others: however their lists of ids are spelled, and nothing stays open behind a loader."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import webdataset

from shardprep.errors import BrokenShard
from tests.world import ids_of, open_loader, tokenizer_dir

LISTS = [[7], [1, 20, 300], [0, 0, 5], list(range(90)), [65535, 3, 70000 % 250]]
SPELLINGS: dict[str, Callable[[list[int], int], str]] = {
    "no white space": lambda ids, _: json.dumps(ids, separators=(",", ":")),
    "a number a line": lambda ids, _: json.dumps(ids, indent=1),
    "white space around it": lambda ids, _: f" \t{json.dumps(ids)} \r\n",
    "white space before commas": lambda ids, _: json.dumps(ids, separators=(" , ", ":")),
    "another one each time": lambda ids, n: json.dumps(ids, separators=((", ", ",", " ,")[n % 3], ":")),
    "all equal": lambda ids, _: json.dumps(ids, separators=(",", ":")),
}


def open_tar(folder: Path, suffix: str, contents: list[Any], **options: Any) -> Any:
    """Write members of samples as webdataset does; returns a loader that reads them in order."""
    with webdataset.TarWriter(str(folder / "part-0.tar")) as writer:
        for number, content in enumerate(contents):
            writer.write({"__key__": f"s{number}", suffix: content})
    return open_loader(str(folder / "part-0.tar"), model_id=tokenizer_dir(), shuffle=False, **options)


@pytest.mark.parametrize("spelling", SPELLINGS)
def test_the_spelling_of_a_list_makes_no_difference_and_a_closed_loader_holds_no_tar_open(
    tmp_path: Path, spelling: str
) -> None:
    lists = [[7], [7, 7]] if spelling == "all equal" else LISTS
    lists = [[number % 250 for number in ids] for ids in lists] * 4
    texts = [SPELLINGS[spelling](ids, number).encode() for number, ids in enumerate(lists)]
    with open_tar(tmp_path, "token_ids.json", texts) as loader:
        assert [ids for batch in loader for ids in ids_of(batch)] == lists
    still_open = [path.resolve() for path in Path("/proc/self/fd").iterdir() if path.exists()]
    assert not [path for path in still_open if path.is_relative_to(tmp_path)]
    assert loader.metrics.num_batches == len(lists) // 4  # it is still there


WRONG = [
    "[1,,2]", "[1,]", "[,]", "[1 2]", "[1, 2", "[-1]", "[1.5]", "[true]", "[[1]]", "[000000001]",
    "[12345678901]", -1, 2**31 - 1, 2**31, 2**32 + 1,
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_no_list_of_ids_or_no_id_of_int32_is_refused(tmp_path: Path, wrong: str | int) -> None:
    contents: list[Any] = [b"[1,2]", str(wrong).encode(), b"[3,4]"]
    suffix = "token_ids.json"
    if isinstance(wrong, int):
        suffix, contents = "token_ids.npy", [np.array(ids) for ids in ([1, 2], [3, wrong], [4])]
    with (
        open_tar(tmp_path, suffix, contents, batch_size=3) as loader,
        pytest.raises(BrokenShard) as found,
    ):
        next(iter(loader))
    assert found.value.path == str(tmp_path / "part-0.tar")
