"""What ``make mutants`` breaks is there, and its table of equivalent changes is of this source."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import mutants
from tests.equivalent_mutants import EQUIVALENT


@pytest.mark.slow
def test_each_file_has_mutants_that_compile_and_each_equivalent_one_is_a_mutant() -> None:
    found = {path: mutants.mutants_of(path) for path in mutants.TARGETS}
    named = {
        (entry, each.lines())
        for of_file in found.values()
        for each in of_file
        for entry in mutants.equivalents_of(each)
    }
    for path, entries in EQUIVALENT.items():
        for entry in entries:
            num_lines = sum(each == entry for each, _ in named)
            assert num_lines == 1, f"{path}: {num_lines} lines have mutants of {entry}"
    for of_file in found.values():
        assert of_file
        for each in of_file[::7]:
            compile(each.source(), each.path, "exec")


def test_a_small_file_has_the_mutants_that_are_expected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    (tmp_path / "small.py").write_text(
        '''def f(a: int = 1) -> int | None:
    """Nothing in 1 docstring is changed."""
    if a and not a < 3:
        raise ValueError(f"{a + 1} is too much")
    for b in a:
        b.told = a + 5
        b.close()
        continue
'''
    )
    lines = [each.lines() for each in mutants.mutants_of("small.py")]
    assert [new for _, new in lines] == [
        "def f(a: int = (2)) -> int | None:",
        "if (not (a and (not a < 3))):",
        "if (a or not a < 3):",
        "if a and (a < 3):",
        "if a and not (a <= 3):",
        "if a and not a < (4):",
        "pass",
        "b.told = (a - 5)",
        "b.told = a + (6)",
        "pass",
    ]
