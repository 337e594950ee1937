"""preprocess/read/json_lines.py: the text of each line of JSON."""

from __future__ import annotations

import numpy as np
import pytest

from preprocess.read.json_lines import JsonLines, is_too_deep, record_of_line, why_not_json
from preprocess.read.text_fields import TextFields, UnusableText
from shardprep.format.plan_options import PlanOptions

FIELDS = TextFields(PlanOptions())


def texts_of(*lines: bytes) -> list[object]:
    """Return the texts of a block of lines, which are read together."""
    block = b"".join(line + b"\n" for line in lines)
    starts = np.cumsum([0, *(len(line) + 1 for line in lines[:-1])])
    texts, _ = JsonLines(None).texts_of_lines(FIELDS, block, starts, 0, "utf-8")
    return [each.decode() if isinstance(each, bytes) else each for each in texts]


def test_a_scan_and_a_parser_take_the_same_texts() -> None:
    plain = [b'{"n": 1, "text": "a"}', rb'{"text": "b\"\u00e9"}', '{"text": "한"}'.encode()]
    assert texts_of(*plain) == ["a", 'b"é', "한"]
    # A line that is no JSON makes the whole block be read line by line.
    assert texts_of(*plain, b"{")[:3] == texts_of(*plain)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "bad_json"),
        (b'{"text": "a", "text": "b"}', "bad_json"),
        (b'{"text": NaN}', "bad_json"),
        (rb'{"text": "\ud800"}', "surrogate"),
        (b'{"text": "\xff"}', "undecodable"),
        (b'{"text": 1}', "wrong_type"),
        (b'{"other": "a"}', "no_field"),
    ],
)
def test_a_line_without_a_text_has_a_reason_alone_and_in_a_block(line: bytes, reason: str) -> None:
    _, text = record_of_line(line, FIELDS)
    assert isinstance(text, UnusableText)
    assert text.reason == reason
    assert texts_of(b'{"text": "a"}', line) == ["a", text]


def test_a_line_of_blanks_is_an_empty_text() -> None:
    assert record_of_line(b" \t", FIELDS) == (None, "")


def test_brackets_in_strings_do_not_nest() -> None:
    assert is_too_deep(b"[" * 2000 + b"]" * 2000)
    assert not is_too_deep(b'{"text": "' + b"[" * 5000 + b'"}')
    assert why_not_json(b"[" * 2000).reason == "bad_json"
