"""Names of files are UTF-8, whatever the locale says: a plan is the same, and every command works by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loader import UsageError, get_llama3_dataloader
from tests.children import run_child

if TYPE_CHECKING:
    from tests.conftest import Prep

_ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


@pytest.fixture(params=["ASCII", "ISO-8859-1", "EUC-KR"])
def other_locale(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """The environment of a locale that is not UTF-8."""
    charset: str = request.param
    if charset == "ASCII":
        return _ASCII
    path = tmp_path / f"ko_KR.{charset.lower().replace('-', '')}"
    localedef = shutil.which("localedef")
    if localedef:  # it warns of signs that ISO-8859-1 does not have
        subprocess.run(
            [localedef, "-c", "-i", "ko_KR", "-f", charset, path], capture_output=True, check=False
        )
    if not path.is_dir():
        pytest.skip("localedef, or what it makes a locale of, is not installed here")
    return {"LOCPATH": str(tmp_path), "LC_ALL": path.name}


@pytest.mark.slow
@pytest.mark.processes
def test_in_a_locale_that_is_not_utf8_a_plan_is_the_same_and_commands_work_by_it(
    prep: Prep, tmp_path: Path, other_locale: dict[str, str]
) -> None:
    raw, data = tmp_path / "원문é", tmp_path / "자료é"
    model = shutil.copytree(prep.model_dir, tmp_path / "모델")
    raw.mkdir()
    (raw / "글.txt").write_text("하늘과 바다\n", encoding="utf-8")
    prep.plan(raw, tmp_path / "expected", model_id=str(model))
    commands: list[tuple[object, ...]]
    commands = [("shardprep", "plan", "--input_dir", raw, "--output_dir", data, "--model_id", model)]
    if "euckr" in other_locale["LC_ALL"]:  # the others' way is the same
        commands += [
            ("preprocess", "--shard_id", 0, "--output_dir", data),
            ("slurm", "report", data, "--output", data / "report.html"),
        ]
    for command in commands:
        run_child([sys.executable, "-m", *map(str, command)], env={**prep.environ(), **other_locale})
    assert (data / "plan.json").read_bytes() == (tmp_path / "expected" / "plan.json").read_bytes()


@pytest.fixture
def latin_1(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")


@pytest.mark.usefixtures("latin_1")
def test_a_command_that_a_program_calls_in_another_locale_is_refused_with_what_to_type(
    prep: Prep, sample_dir: Path, tmp_path: Path
) -> None:
    ended = prep.command("plan", "--input_dir", sample_dir, "--output_dir", tmp_path / "data")
    assert (ended.code, "export PYTHONUTF8=1" in ended.text) == (2, True), ended.text


@pytest.mark.usefixtures("latin_1")
def test_in_another_locale_the_loader_reads_folders_of_ascii_names_alone(
    made_dir: Path, tmp_path: Path
) -> None:
    with get_llama3_dataloader(made_dir, 2, num_workers=0, rank=0, world_size=1) as loader:
        next(iter(loader))
    for name in ("자료", "missing é"):
        (tmp_path / "자료").mkdir(exist_ok=True)
        with pytest.raises(UsageError, match="export PYTHONUTF8=1"):
            get_llama3_dataloader(tmp_path / name, 2, num_workers=0, rank=0, world_size=1)


def test_an_input_folder_whose_name_is_not_utf8_is_refused_also_where_it_is_the_current_one(
    prep: Prep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("raw/a.txt").write_text("a\n")
    ended = prep.command("plan", "--input_dir", "raw", "--output_dir", "data", "--model_id", prep.model_dir)
    assert (ended.code, "is not UTF-8" in ended.text) == (2, True), ended.text
