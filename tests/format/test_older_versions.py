"""Data sets as older versions of the format wrote them: refused with what to type, and left as they are."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from loader.__main__ import main as loader_main
from shardprep.errors import UnknownVersion
from slurm.__main__ import main as slurm_main

if TYPE_CHECKING:
    from tests.conftest import Prep

DATA = Path(__file__).parents[1] / "data"
REMEDY = "make the data set anew in a new folder: shardprep plan --input_dir RAW --output_dir NEW"


def test_every_command_and_the_loader_refuse_a_data_set_of_version_1_with_what_to_type(
    prep: Prep, sample_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch", reason="the loader needs it")
    from loader import get_llama3_dataloader

    old_dir = Path(shutil.copytree(DATA / "version_1" / "documents_json", tmp_path / "data"))
    shutil.copytree(DATA / "golden" / "tokenizer", old_dir / "tokenizer")
    before = prep.contents(old_dir)
    plan = ["plan", "--input_dir", sample_dir, "--output_dir", old_dir, "--model_id", prep.model_dir]
    export = ["export", old_dir, "--to", "hf", "--output_dir", tmp_path / "exported"]
    commands = (
        ["verify", old_dir],
        ["run", old_dir],
        ["--shard_id", 0, "--output_dir", old_dir],
        plan,
        export,
    )
    for words in (*commands, ["peek", old_dir], ["clean", old_dir]):
        ended = prep.command(*words)
        assert ended.code == 78, ended.text
        assert REMEDY in ended.text
    for main, words in (
        (slurm_main, ["status", old_dir]),
        (slurm_main, ["submit", old_dir]),
        (slurm_main, ["report", old_dir]),
        (loader_main, ["stage", old_dir, "--to", tmp_path / "staged"]),
    ):
        assert main([*map(str, words)]) == 78
        assert REMEDY in capsys.readouterr().err
    assert prep.contents(old_dir) == before
    for name in ("index.json", "plan.json", ""):
        with pytest.raises(UnknownVersion) as refused:
            get_llama3_dataloader(old_dir, 2, num_workers=0)
        assert REMEDY in str(refused.value)
        if name:
            (old_dir / name).unlink()
