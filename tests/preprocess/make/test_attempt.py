"""Attempts at one shard see each other by marks."""

from __future__ import annotations

from pathlib import Path

from preprocess.make.attempt import AttemptMark, end_other_attempts
from shardprep.format.data_folder import DataFolder

FIRST = ".shard-00003.begun.tmp"
SECOND = ".shard-00003.second.tmp"


def mark_in(folder: DataFolder) -> AttemptMark:
    mark = AttemptMark(folder, 3)
    mark.make()
    return mark


def test_two_attempts_learn_of_each_other_and_the_rival_leaves_the_first_mark(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    first = mark_in(folder)
    assert not first.others_came()
    rival = mark_in(folder)
    assert (first.is_rival, rival.is_rival) == (False, True)
    assert first.others_came()
    assert rival.others_came()
    rival.release()
    assert folder.names() == [FIRST, SECOND]
    end_other_attempts(folder, 3)
    assert folder.names() == []


def test_a_mark_goes_with_its_attempt_also_if_nobody_releases_it(tmp_path: Path) -> None:
    folder = DataFolder(tmp_path)
    mark = mark_in(folder)
    mark.release()
    assert folder.names() == []
    mark = mark_in(folder)
    del mark
    assert folder.names() == []


def test_a_mark_that_cannot_be_created_is_no_error_of_its_own(tmp_path: Path) -> None:
    assert not mark_in(DataFolder(tmp_path / "missing")).others_came()
