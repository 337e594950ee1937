"""The tables of ``make mutants`` match the source."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_mutants_compile_and_each_listed_change_matches_one_line_of_the_source() -> None:
    from tests import mutants  # reads the whole source
    from tests.equivalent_mutants import EQUIVALENT

    found = {path: mutants.mutants_of(path) for path in mutants.TARGETS}
    named = {
        (entry, each.was, each.made)
        for of_file in found.values()
        for each in of_file
        for entry in mutants.equivalents_of(each)
    }
    for path, entries in EQUIVALENT.items():
        for entry in entries:
            num_lines = sum(each == entry for each, *_ in named)
            assert num_lines == 1, f"{path}: {num_lines} lines have mutants of {entry}"
    mutants.mutants_by_hand()  # exits if a text is not in the source
    for of_file in found.values():
        assert of_file
        for each in of_file[::7]:
            compile(each.source, each.path, "exec")
