"""``clean``: temporaries of done shards go, and those older than a day; nothing else does."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardprep.files import PublishedFile, PublishedFolder

if TYPE_CHECKING:
    from tests.conftest import Prep

DAY_S = 24 * 3600


def left(folder: Path, name: str, *, hours: float = 0, host: str = "node-1.site") -> Path:
    """A temporary as an attempt on another node leaves it."""
    path = folder / f".{name}.{host}-123-0a1b2c3d.tmp"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(b"half of it")
    then = time.time() - hours * 3600
    os.utime(path, (then, then))
    return path


def test_temporaries_of_done_shards_go_and_those_of_others_stay_for_a_day(prep: Prep, data_dir: Path) -> None:
    prep.make(data_dir, 0)
    before = prep.contents(data_dir)
    gone = [
        left(data_dir, "shard-00000.tar"),
        left(data_dir / "quarantine", "shard-00000.jsonl"),
        left(data_dir, "shard-00001.tar", hours=25),
        left(data_dir, "index.json", hours=25),
        left(data_dir / "jobs", "0000.json", hours=25),
    ]
    kept = [
        left(data_dir, "shard-00001.idx", hours=23),
        left(data_dir, "shard-00010.tar"),
        left(data_dir, "index.json", hours=1, host="other"),
        left(data_dir / "jobs", "0001.json"),
    ]
    ended = prep.command("clean", data_dir, "--dry_run")
    assert ended.code == 0
    assert "would remove 5 files, 50 B" in ended.text
    assert all(path.exists() for path in gone)
    ended = prep.command("clean", data_dir)
    assert ended.code == 0
    assert "removed 5 files, 50 B" in ended.text
    assert "kept 4 of shards that are not done" in ended.text
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)
    assert prep.contents(data_dir) == before


def test_a_folder_that_is_no_data_set_is_66(prep: Prep, tmp_path: Path) -> None:
    (tmp_path / "raw.txt").write_text("a line\n")
    ended = prep.command("clean", tmp_path)
    assert ended.code == 66
    assert (tmp_path / "raw.txt").exists()


def test_what_no_attempt_made_is_never_removed(prep: Prep, data_dir: Path) -> None:
    names = [
        ".shard-00000.tar.tmp",
        ".notes.tmp",
        "shard-00000.tar.h-1-0a1b2c3d.tmp",
        ".a.h-1-0A1B2C3D.tmp",
        ".x.swp",
    ]
    others = [data_dir / name for name in names]
    for path in others:
        path.touch()
        os.utime(path, (0, 0))
    link = data_dir / ".shard-00001.tar.h-1-0a1b2c3d.tmp"
    precious = data_dir.parent / "precious"
    precious.mkdir()
    (precious / "file").write_bytes(b"precious")
    link.symlink_to(precious)
    os.utime(link, (0, 0), follow_symlinks=False)
    assert prep.command("clean", data_dir).code == 0
    assert all(path.exists() for path in others)
    assert not link.is_symlink()
    assert (precious / "file").read_bytes() == b"precious"


def test_the_names_are_those_that_attempts_give(prep: Prep, data_dir: Path) -> None:
    file, folder = PublishedFile(data_dir / "shard-00001.tar"), PublishedFolder(data_dir / "tokenizer2")
    with folder:
        (folder.temporary / "inside").write_bytes(b"12345")
        for path in (file.temporary, folder.temporary, folder.temporary / "inside"):
            os.utime(path, (0, 0))
        text = prep.command("clean", data_dir, "--dry_run").text
        assert f"would remove {file.temporary} (0 B)" in text
        assert f"would remove {folder.temporary} (5 B)" in text
        os.utime(folder.temporary / "inside")
        assert str(folder.temporary) not in prep.command("clean", data_dir, "--dry_run").text, (
            "it is written to"
        )
    file.discard()


def test_a_shard_of_another_plan_or_a_broken_one_is_not_done(prep: Prep, data_dir: Path) -> None:
    prep.make(data_dir, 0)
    (data_dir / "shard-00000.tar").write_bytes(b"cut")
    path = left(data_dir, "shard-00000.tar")
    assert prep.command("clean", data_dir).code == 0
    assert path.exists(), "it may be what will mend the shard"


def test_without_a_plan_only_what_is_old_goes_and_without_a_folder_nothing(
    prep: Prep, tmp_path: Path
) -> None:
    old, young = left(tmp_path, "plan.json", hours=25), left(tmp_path, "shard-00000.tar")
    assert prep.command("clean", tmp_path).code == 0
    assert (old.exists(), young.exists()) == (False, True)
    assert prep.command("clean", tmp_path / "absent").code == 66


def test_what_cannot_be_removed_is_named_and_all_others_go(
    prep: Prep, data_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, others = (left(data_dir, f"shard-0000{number}.tar", hours=25) for number in (2, 1))
    unlink = Path.unlink

    def refuse(self: Path, missing_ok: bool = False) -> None:
        if self == others:
            raise PermissionError(1, "Operation not permitted", str(self))
        unlink(self, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", refuse)
    ended = prep.command("clean", data_dir)
    assert ended.code == 73
    assert f"{others} cannot be removed: Operation not permitted" in ended.text
    assert (mine.exists(), others.exists()) == (False, True)


@pytest.mark.parametrize(("call", "code"), [("lstat", 73), ("listdir", 74)])
def test_what_cannot_be_looked_at_is_named_and_never_passed_over(
    prep: Prep, data_dir: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    path = left(data_dir / "quarantine", "shard-00000.jsonl", hours=25)
    hidden = path if call == "lstat" else path.parent
    owner: Any = Path if call == "lstat" else os
    real = getattr(owner, call)

    def refuse(wanted: os.PathLike[str], *args: Any, **options: Any) -> Any:
        if Path(wanted) == hidden:
            raise PermissionError(13, "Permission denied", str(wanted))
        return real(wanted, *args, **options)

    monkeypatch.setattr(owner, call, refuse)
    ended = prep.command("clean", data_dir)
    assert ended.code == code
    assert str(hidden) in ended.text
    assert "Permission denied" in ended.text
