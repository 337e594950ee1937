"""What ``make mutants`` breaks is there, and its table of equivalent changes is of this source."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_each_file_has_mutants_that_compile_and_each_equivalent_one_is_a_mutant() -> None:
    from tests import mutants  # which reads the whole source
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
    mutants.mutants_by_hand()  # whose texts must be there
    for of_file in found.values():
        assert of_file
        for each in of_file[::7]:
            compile(each.source, each.path, "exec")
