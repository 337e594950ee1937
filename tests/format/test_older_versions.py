"""Data sets as older versions of the format wrote them: refused with what to type, and left as they are."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from loader import UnknownVersion, get_llama3_dataloader
from tests.checkout import ROOT
from tests.world import World

DATA = ROOT / "tests" / "data"
REMEDY = "shardprep plan --input_dir RAW --output_dir NEW --model_id MODEL --num_shards N"


def test_every_command_and_the_loader_refuse_a_data_set_of_version_1_with_what_to_type(
    tmp_path: Path,
) -> None:
    world = World(tmp_path).raw({"a.txt": "a\n"})
    old = Path(shutil.copytree(DATA / "version_1" / "documents_json", world.data_dir))
    shutil.copytree(DATA / "golden" / "tokenizer", old / "tokenizer")
    before = world.contents()
    commands = ("verify", "run", "peek", "clean", "status", "submit", "report")
    endings = [world.try_plan(), world.try_shard(0), *(world.main(name, old) for name in commands)]
    endings.append(world.main("export", old, to="hf", output_dir=tmp_path / "exported"))
    endings.append(world.main("stage", old, to=tmp_path / "staged"))
    for ended in endings:
        assert ended.error is not None
        assert (ended.code, ended.error.remedy) == (78, REMEDY), ended.text
    assert world.contents() == before
    for name in ("index.json", "plan.json", ""):
        with pytest.raises(UnknownVersion) as refused:
            get_llama3_dataloader(old, 2, num_workers=0)
        assert refused.value.remedy == REMEDY
        if name:
            (old / name).unlink()
