"""Names of files are UTF-8, whatever the locale says: a plan is the same, and every command works by it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from loader import UsageError, get_llama3_dataloader
from tests.children import environ_of_children, run_child, shardprep
from tests.world import World, call_main, tokenizer_dir


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("charset", ["ASCII", "EUC-KR"])
def test_in_a_locale_that_is_not_utf8_a_plan_is_the_same_and_commands_work_by_it(
    tmp_path: Path, charset: str
) -> None:
    environ = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    if charset != "ASCII":
        path = tmp_path / "ko_KR.euckr"
        if localedef := shutil.which("localedef"):
            words = [localedef, "-c", "-i", "ko_KR", "-f", charset, str(path)]
            subprocess.run(words, capture_output=True, check=False)
        if not path.is_dir():
            pytest.skip("localedef, or what it makes a locale of, is not installed here")
        environ = {"LOCPATH": str(tmp_path), "LC_ALL": path.name}
    model = Path(shutil.copytree(tokenizer_dir(), tmp_path / "모델"))
    world = World(tmp_path, tokenizer=model, raw_dir=tmp_path / "원문é", data_dir=tmp_path / "expected")
    world.raw({"글.txt": "하늘과 바다\n"}).plan(num_shards=1)
    data = tmp_path / "자료é"
    commands = [["plan", *world.words_of_plan(output_dir=data, num_shards=1)]]
    if charset != "ASCII":  # the others' way is the same
        commands.append(["shard", "--shard_id", "0", "--output_dir", str(data)])
        commands.append(["report", str(data), "--output", str(data / "r.html")])
    for words in commands:
        run_child(shardprep(*words), env=environ_of_children(**environ))
    assert (data / "plan.json").read_bytes() == (world.data_dir / "plan.json").read_bytes()


def test_in_another_locale_a_program_is_told_what_to_type_and_the_loader_reads_names_of_ascii_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(tmp_path).raw({"a.txt": "a line\n" * 9}).make(num_shards=1)
    monkeypatch.setattr(sys, "getfilesystemencoding", lambda: "iso8859-1")
    ended = call_main("verify", world.data_dir)
    assert (ended.code, "export PYTHONUTF8=1" in ended.err) == (2, True), ended.text
    with world.loader(batch_size=2) as loader:
        next(iter(loader))
    (tmp_path / "자료").mkdir()
    for name in ("자료", "missing é"):
        with pytest.raises(UsageError) as found:
            get_llama3_dataloader(tmp_path / name, 2, num_workers=0, rank=0, world_size=1)
        assert "export PYTHONUTF8=1" in str(found.value)


def test_an_input_folder_whose_name_is_not_utf8_is_refused_also_where_it_is_the_current_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / os.fsdecode(b"caf\xe9")
    (folder / "raw").mkdir(parents=True)
    monkeypatch.chdir(folder)
    Path("raw/a.txt").write_text("a\n")
    ended = call_main("plan", "--input_dir", "raw", "--output_dir", "data", "--model_id", tokenizer_dir())
    assert (ended.code, r"caf\xe9" in ended.err) == (2, True), ended.text
