"""What ``make mutants`` breaks is there, and its table of equivalent changes is of this source."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_each_file_has_mutants_that_compile_and_each_equivalent_one_is_a_mutant() -> None:
    from tests import mutants  # it reads the whole source
    from tests.equivalent_mutants import EQUIVALENT

    found = {path: mutants.Finder(path).found for path in mutants.find_mutants(mutants.TARGETS)}
    assert len(found) >= len(mutants.TARGETS)
    made = {(path, *each.lines()) for path, of_file in found.items() for each in of_file}
    for path, old, new, reason in EQUIVALENT:
        assert (path, old, new) in made, f"{path} has no such line any more: {old}"
        assert reason
    for of_file in found.values():
        assert of_file
        for each in of_file[::7]:
            compile(each.source(), each.path, "exec")
