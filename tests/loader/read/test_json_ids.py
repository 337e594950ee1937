"""loader/read/json_ids.py: the numbers in lists like ``[1, 22]``."""

from __future__ import annotations

import json
import random

import pytest

from loader.read.json_ids import parse_id_lists


@pytest.mark.parametrize("separators", [(", ", ": "), (",", ":")])
def test_lists_of_ids_are_parsed_as_by_json(separators: tuple[str, str]) -> None:
    drawn = random.Random(0)
    lists = [
        [drawn.randrange(10 ** drawn.randint(1, 7)) for _ in range(drawn.randint(0, 9))] for _ in range(50)
    ]
    texts = [memoryview(json.dumps(each, separators=separators).encode()) for each in lists]
    parsed = parse_id_lists(texts)
    assert parsed is not None
    counts, ids = parsed
    assert counts.tolist() == [len(each) for each in lists]
    assert ids.tolist() == [number for each in lists for number in each]


@pytest.mark.parametrize(
    "text", ["[1,,2]", "[1, 2,3]", "{1}", "[1.5]", "[-1]", "[123456789]", "[1]]", "[", ""]
)
def test_other_texts_are_left_to_the_slower_parser(text: str) -> None:
    assert parse_id_lists([memoryview(text.encode())]) is None
