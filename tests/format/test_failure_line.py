"""The line that tells ``slurm status`` which shard failed."""

from __future__ import annotations

import pytest

from shardprep.errors import Failure, failure_line, parse_failure_line


@pytest.mark.parametrize("message", ["disk full", 'a "quoted"\nsecond line\r\u2028', "", "댓글 \udcff"])
def test_what_was_written_is_read_back_from_one_line(message: str) -> None:
    line = failure_line(17, 65, message)
    assert line.splitlines() == [line]
    assert line.isascii()
    assert parse_failure_line(line) == Failure(shard_id=17, exit_code=65, reason=message)
    assert parse_failure_line(line + "\n") is not None, "a line end does no harm"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "shard 00017 failed (65): disk full",
        "shardprep-failure ",
        'shardprep-failure {"shard_id": 17, "exit_code": 65',
        'shardprep-failure {"shard_id": "17", "exit_code": 65, "reason": ""}',
        'shardprep-failure {"shard_id": 17, "exit_code": 65}',
        "shardprep-failure [17]",
    ],
)
def test_any_other_line_is_none(line: str) -> None:
    assert parse_failure_line(line) is None
