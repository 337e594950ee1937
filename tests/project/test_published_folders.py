"""A folder appears whole or not at all, and every file in it is synced before it has its name."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from shardprep.errors import CannotWrite
from shardprep.files import PublishedFolder, names_in


def fill(folder: PublishedFolder, text: str) -> None:
    (folder.temporary / "inner").mkdir()
    (folder.temporary / "a").write_text(text)
    (folder.temporary / "inner" / "b").write_text(text)


def test_what_is_not_published_leaves_nothing(tmp_path: Path) -> None:
    with PublishedFolder(tmp_path / "x") as folder:
        fill(folder, "new")
    assert not list(tmp_path.iterdir())


def test_every_file_and_folder_is_synced_before_the_name_is_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    target, seen = tmp_path / "x", os.fsync

    def fsync(fd: int) -> None:
        path = Path(f"/proc/self/fd/{fd}").readlink()
        synced.append("parent" if path == tmp_path else f"{path.name}:{target.exists()}")
        seen(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    with PublishedFolder(target) as folder:
        fill(folder, "new")
        assert folder.publish_first()
    assert synced == ["b:False", "inner:False", "a:False", f"{folder.temporary.name}:False", "parent"]


def test_a_full_folder_is_kept_by_publish_first_and_replaced_by_publish(tmp_path: Path) -> None:
    target = tmp_path / "x"
    target.mkdir()
    (target / "old").write_text("old")
    with PublishedFolder(target) as folder:
        fill(folder, "new")
        assert not folder.publish_first()
        assert names_in(target) == ["old"]
        folder.publish()
    assert names_in(target) == ["a", "inner"]
    assert names_in(tmp_path) == ["x"]


def test_a_folder_that_cannot_be_replaced_stands_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, rename = tmp_path / "x", Path.rename
    target.mkdir()
    (target / "old").write_text("old")

    def failing(path: Path, other: Path) -> Path:
        if other == target and not target.exists() and not path.name.endswith(".old.tmp"):
            raise OSError(errno.EIO, "failed", str(path))
        return rename(path, other)

    monkeypatch.setattr(Path, "rename", failing)
    with PublishedFolder(target) as folder:
        fill(folder, "new")
        with pytest.raises(CannotWrite):
            folder.publish()
    assert names_in(target) == ["old"]
    assert names_in(tmp_path) == ["x"]


def test_a_file_of_that_name_is_replaced_and_an_empty_folder_is_free(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("old")
    (tmp_path / "empty").mkdir()
    for name, is_free in (("file", False), ("empty", True)):
        with PublishedFolder(tmp_path / name) as folder:
            fill(folder, "new")
            assert folder.publish_first() == is_free
            if not is_free:
                folder.publish()
    assert names_in(tmp_path) == ["empty", "file"]
    assert (tmp_path / "file" / "a").read_text() == "new"


def test_where_nothing_can_be_made_the_error_names_the_folder(tmp_path: Path) -> None:
    with pytest.raises(CannotWrite, match=f"{tmp_path}/none cannot be written to: No such file"):
        PublishedFolder(tmp_path / "none" / "x").__enter__()
