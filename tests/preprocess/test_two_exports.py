"""Two exports into one folder at once: one is refused, or both give the same bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from tests.conftest import Ended, Prep


def export(prep: Prep, data: Path, out: Path, *flags: str, to: str = "nanogpt") -> Ended:
    return prep.command("export", data, "--to", to, "--output_dir", out, *flags)


def files(folder: Path) -> dict[str, bytes]:
    """What an export holds, but its settings."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != "export.json"]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def at_open(number: int, folder: Path, meanwhile: Callable[[], object]) -> Callable[..., int]:
    """``os.open`` that does something else just before the ``number``-th file of a folder is opened."""
    real, left = os.open, [number]

    def opened(path: Any, *args: Any, **kwargs: Any) -> int:
        if str(path).startswith(str(folder)):
            left[0] -= 1
            if left[0] == 0:
                meanwhile()
        return real(path, *args, **kwargs)

    return opened


@pytest.mark.parametrize("to", ["nanogpt", "megatron"])
@pytest.mark.parametrize("flags", [["--no-put_eos"], ["--put_eos"]], ids=["other", "equal"])
def test_at_whatever_file_the_other_export_comes_none_ends_well_with_bytes_of_neither(
    made_dir: Path, tmp_path: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch, to: str, flags: list[str]
) -> None:
    alone = {}
    for name, own in (("first", ["--put_eos"]), ("other", flags)):
        assert export(prep, made_dir, tmp_path / name, *own, to=to).code == 0
        alone[name] = files(tmp_path / name)
    for number in range(1, 40):
        out = tmp_path / "out" / str(number)
        ended: list[Ended] = []

        def other(out: Path = out, ended: list[Ended] = ended) -> None:
            ended.append(export(prep, made_dir, out, *flags, to=to))

        with monkeypatch.context() as patch:
            patch.setattr(os, "open", at_open(number, out, other))
            first = export(prep, made_dir, out, "--put_eos", to=to)
        if not ended:
            break
        codes = (first.code, ended[0].code)
        assert codes in ({(0, 0)} if flags == ["--put_eos"] else {(0, 78), (78, 0)}), (number, ended[0].text)
        expected = alone["first"] if first.code == 0 else alone["other"]
        found = files(out)
        for name in ("data_args.txt",):  # it holds the paths
            expected, found = ({k: v for k, v in each.items() if k != name} for each in (expected, found))
        assert found == expected, number
    assert number > 3


def test_a_folder_with_one_side_of_a_split_is_refused_to_the_whole(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    prep.plan(sample_dir, tmp_path / "data", num_shards=1, validation_fraction=0.2)
    prep.make(tmp_path / "data")
    assert export(prep, tmp_path / "data", tmp_path / "out", "--split", "train").code == 0
    assert export(prep, tmp_path / "data", tmp_path / "out").code == 78


def test_an_export_whose_file_was_taken_away_is_made_whole_again(
    made_dir: Path, tmp_path: Path, prep: Prep
) -> None:
    """Also where the marks of its shards outlived it, as a kill leaves them."""
    assert export(prep, made_dir, tmp_path / "out").code == 0
    whole = (tmp_path / "out" / "train.bin").read_bytes()
    (tmp_path / "out" / "train.bin").unlink()
    (tmp_path / "out" / ".done").mkdir()
    for number in range(3):
        (tmp_path / "out" / ".done" / f"shard-{number:05d}").touch()
    assert export(prep, made_dir, tmp_path / "out").code == 0
    assert (tmp_path / "out" / "train.bin").read_bytes() == whole


@pytest.mark.parametrize("content", ["", "[]", "3", '{"to": 3}', "[" * 10**5, "\0"])
def test_settings_of_an_export_that_are_none_are_refused(
    made_dir: Path, tmp_path: Path, prep: Prep, content: str
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "export.json").write_text(content)
    assert export(prep, made_dir, tmp_path / "out").code == 78
