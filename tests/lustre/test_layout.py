"""lustre/layout.py: what a user types as a layout, as options of ``lfs setstripe``."""

from __future__ import annotations

import pytest

from lustre.layout import parse_stripe, size_text
from shardprep.errors import UsageError


@pytest.mark.parametrize(
    ("typed", "options"),
    [
        ("1", "-c 1"),
        ("8", "-E 64M -c 1 -S 4M -E -1 -c 8 -S 4M"),
        ("8,1M", "-E 64M -c 1 -S 1M -E -1 -c 8 -S 1M"),
        ("-1,4M,flash", "-E 64M -c 1 -S 4M -p flash -E -1 -c -1 -S 4M -p flash"),
        ("-c 4 -S 2M", "-c 4 -S 2M"),
    ],
)
def test_a_layout_is_typed_as_numbers_or_as_options(typed: str, options: str) -> None:
    assert parse_stripe(typed).text() == options


@pytest.mark.parametrize("typed", ["0", "2001", "8,3M", "8,128M", "8,4M,inherit", "-c 4 /a/path", "--delete"])
def test_what_sets_no_layout_is_refused(typed: str) -> None:
    with pytest.raises(UsageError):
        parse_stripe(typed)


def test_a_size_is_written_with_the_largest_unit_that_divides_it() -> None:
    assert [size_text(size) for size in (0, 1000, 64 << 10, 3 << 20, 1 << 40)] == [
        "0",
        "1000",
        "64K",
        "3M",
        "1T",
    ]
