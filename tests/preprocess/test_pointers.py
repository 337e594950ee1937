"""What git-lfs and git-annex leave in the place of a file is no text, no table and no tokenizer."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.conftest import Prep

OID = "4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393"
POINTERS = {
    "git lfs pull": f"version https://git-lfs.github.com/spec/v1\noid sha256:{OID}\nsize 12345\n",
    "git annex get": f"/annex/objects/SHA256E-s12345--{OID}.txt\n",
}


@pytest.mark.parametrize("command", POINTERS)
@pytest.mark.parametrize("name", ["b.txt", "b.jsonl", "b.parquet", "b.arrow", "b.txt.zst"])
def test_an_input_that_was_not_fetched_is_refused_with_what_fetches_it(
    prep: Prep, raw: Path, tmp_path: Path, name: str, command: str
) -> None:
    (raw / "a.txt").write_text("a document\n")
    (raw / name).write_text(POINTERS[command])
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", prep.model_dir)
    ended = prep.command("plan", *flags)
    assert ended.code == 65, ended.text
    assert str(raw / name) in ended.text
    assert command in ended.text
    assert not (tmp_path / "data").exists()


def test_a_tokenizer_that_was_not_fetched_is_refused_with_what_fetches_it(
    prep: Prep, raw: Path, tmp_path: Path
) -> None:
    (raw / "a.txt").write_text("a document\n")
    model = shutil.copytree(prep.model_dir, tmp_path / "model")
    (model / "tokenizer.json").write_text(POINTERS["git lfs pull"])
    flags = ("--input_dir", raw, "--output_dir", tmp_path / "data", "--model_id", model)
    ended = prep.command("plan", *flags)
    assert ended.code == 66, ended.text
    assert str(model / "tokenizer.json") in ended.text
    assert "git lfs pull" in ended.text


def test_a_text_about_pointers_is_an_input(prep: Prep, raw: Path, tmp_path: Path) -> None:
    (raw / "a.txt").write_text("A pointer begins with:\n" + POINTERS["git lfs pull"])
    (raw / "b.txt").write_text(POINTERS["git lfs pull"] * 20)
    plan = prep.plan(raw, tmp_path / "data")
    assert [item.path for item in plan.inputs] == ["a.txt", "b.txt"]
