"""A plan of many inputs stands in parts: a task reads the head and its own; damage in them is refused."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from shardprep.errors import BrokenShard, ShardprepError
from shardprep.format.checked_json import content_sha256
from shardprep.format.dataset_spec import read_input_names
from shardprep.format.plan import Plan, need_plan, plan_id, plan_json
from slurm.__main__ import main as slurm

if TYPE_CHECKING:
    from tests.conftest import Prep

INPUTS_PER_SHARD = 3


@pytest.fixture(scope="module")
def few_dir(prep: Prep, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of three files in one shard. Never written to."""
    root = tmp_path_factory.mktemp("few")
    (root / "raw").mkdir()
    for number in range(INPUTS_PER_SHARD):
        (root / "raw" / f"{number}.txt").write_text(f"Line {number}.\nAnother.\n")
    prep.plan(root / "raw", root / "data", num_shards=1)
    return root / "data"


def enlarged(folder: Path, few_dir: Path, num_inputs: int, **changes: Any) -> Plan:
    """A folder with that plan and inputs that are names alone behind its own; shard 0 stays what it was."""
    shutil.copytree(few_dir, folder)
    plan = need_plan(folder)
    names = [f"crawl/part-{number:07d}.txt" for number in range(INPUTS_PER_SHARD, num_inputs)]
    changed = {
        "inputs": [*plan.inputs, *(dataclasses.replace(plan.inputs[0], path=name) for name in names)],
        "boundaries": [(first, 0) for first in range(0, num_inputs + 1, INPUTS_PER_SHARD)],
        **changes,
    }
    plan = dataclasses.replace(plan, **changed)
    plan = dataclasses.replace(plan, plan_id=plan_id(plan))
    (folder / "plan.json").write_bytes(plan_json(plan))
    return plan


@pytest.fixture
def reads_of(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """How often plan.json is opened, and how many bytes are read of it."""
    found, ours = {"opens": 0, "bytes": 0}, set[int]()
    real_open, real_preadv, real_close = os.open, os.preadv, os.close

    def open_(path: Any, *args: Any, **options: Any) -> int:
        handle = real_open(path, *args, **options)
        if str(path).endswith("plan.json"):
            ours.add(handle)
            found["opens"] += 1
        return handle

    def preadv(handle: int, *args: Any) -> int:
        count = real_preadv(handle, *args)
        found["bytes"] += count * (handle in ours)
        return count

    def close(handle: int) -> None:
        ours.discard(handle)
        real_close(handle)

    monkeypatch.setattr(os, "open", open_)
    monkeypatch.setattr(os, "preadv", preadv)
    monkeypatch.setattr(os, "close", close)
    return found


def test_a_task_reads_as_much_of_a_plan_whatever_the_number_of_inputs(
    prep: Prep, few_dir: Path, tmp_path: Path, reads_of: dict[str, int]
) -> None:
    found, made = [], []
    for num_inputs in (9_000, 72_000):
        folder = tmp_path / str(num_inputs)
        enlarged(folder, few_dir, num_inputs)
        reads_of |= {"opens": 0, "bytes": 0}
        ended = prep.command("--shard_id", 0, "--planned", "--output_dir", folder)
        assert ended.code == 0, ended.text
        found.append(dict(reads_of))
        made.append((folder / "shard-00000.tar").read_bytes())
    assert found[0] == found[1]
    assert found[0]["opens"] == 1
    assert 60_000 < found[0]["bytes"] < 200_000 < (tmp_path / "72000/plan.json").stat().st_size / 20
    assert made[0] == made[1]


def test_a_flipped_bit_in_the_head_or_in_a_block_of_the_shard_is_refused_in_words(
    prep: Prep, few_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    cuts = [(first, 5 * (0 < first < 9_000)) for first in range(0, 9_001, 3)]  # inside of a file
    hashes = ["ab" * 32] * 3_000
    enlarged(folder, few_dir, 9_000, boundaries=cuts, text_starts=[7] * 3_001, shard_sha256=hashes)
    path = folder / "plan.json"
    good = path.read_bytes()
    blocks = {name: of["blocks"] for name, of in json.loads(good)["parts"].items() if of["blocks"]}
    assert set(blocks) == {"inputs", "cuts", "mtimes_ns", "text_starts", "shard_sha256"}
    behind = good.index(b"\n") + 1
    places = list(range(1, behind, 31))
    for name, ((offset, num_bytes, _), *others) in blocks.items():
        assert len(others) > 4, name
        places += range(behind + offset, behind + offset + num_bytes, num_bytes // 20)
    assert len(places) > 300
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(ShardprepError) as caught:
            need_plan(folder).shard(1)
        assert str(path) in str(caught.value), place
    offset = blocks["inputs"][0][0] + behind + 20
    path.write_bytes(good[:offset] + b"#" + good[offset + 1 :])
    ended = prep.command("--shard_id", 0, "--output_dir", folder)
    assert ended.code == BrokenShard.exit_code, ended.text
    assert "were altered since they were written: sha256 " in ended.text
    assert "bring the file back as it was" in ended.text


def test_damage_elsewhere_is_refused_by_who_reads_the_whole_plan(
    prep: Prep, few_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    enlarged(folder, few_dir, 9_000)
    path = folder / "plan.json"
    path.write_bytes(path.read_bytes().replace(b"crawl/part-0008999", b"crawl/part-0008990", 1))
    assert prep.command("--shard_id", 0, "--output_dir", folder).code == 0
    for command in ("verify", "run"):
        ended = prep.command(command, folder)
        assert ended.code == BrokenShard.exit_code, ended.text
        assert "altered since they were written" in ended.text


def test_a_block_and_its_hash_that_were_both_altered_give_another_plan_id(
    few_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    planned = enlarged(folder, few_dir, 9_000)
    inputs = list(planned.inputs)
    inputs[0] = dataclasses.replace(inputs[0], num_bytes=inputs[0].num_bytes + 1)
    (folder / "plan.json").write_bytes(plan_json(dataclasses.replace(planned, inputs=inputs)))
    with pytest.raises(BrokenShard, match=r"plan_id is .* which options, tokenizer, inputs and cuts give"):
        need_plan(folder)


def test_mtimes_and_left_out_names_count_in_no_plan_id_and_are_read_back(
    few_dir: Path, tmp_path: Path
) -> None:
    planned = enlarged(tmp_path / "one", few_dir, 9_000)
    touched = [dataclasses.replace(item, mtime_ns=-item.mtime_ns) for item in planned.inputs]
    names = [("hidden", ".a"), ("unknown suffix", "b.md")] * 400
    other = enlarged(tmp_path / "other", few_dir, 9_000, inputs=touched, names_left_out=names)
    assert planned.plan_id == other.plan_id
    read = need_plan(tmp_path / "other")
    assert list(read.inputs) == touched
    assert read.left_out == {"hidden": [".a"] * 400, "unknown suffix": ["b.md"] * 400}
    assert read.shard_bytes() == other.shard_bytes()
    assert read.inputs[-1] == touched[-1]
    assert read.inputs[510:515] == touched[510:515]
    assert plan_id(dataclasses.replace(read, inputs=touched)) == read.plan_id


def test_the_file_is_json_whose_first_line_is_the_head(few_dir: Path, tmp_path: Path) -> None:
    planned = enlarged(tmp_path / "data", few_dir, 9_000)
    raw = (tmp_path / "data/plan.json").read_bytes()
    data, head = json.loads(raw), json.loads(raw.split(b"\n")[0] + b"}")
    assert (data["version"], data["plan_id"]) == (3, planned.plan_id)
    assert head["content_sha256"] == content_sha256(head)
    assert [item["path"] for item in data["inputs"]] == [item.path for item in planned.inputs]
    assert data["cuts"] == [list(cut) for cut in planned.boundaries]
    assert raw[:400].startswith(b'{"format":"shardprep-plan","version":3,"plan_id":"'), (
        "as prep_array.sh reads it"
    )


@pytest.fixture(scope="module")
def many_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """4,200 files of a line. Never written to."""
    raw = tmp_path_factory.mktemp("many")
    for number in range(4_200):
        (raw / f"{number:04d}.txt").write_text(f"Line {number}.\n")
    return raw


@pytest.mark.processes
def test_every_command_works_with_a_plan_in_parts(
    prep: Prep, many_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "data"
    prep.plan(many_dir, folder, num_shards=3)
    before = (folder / "plan.json").read_bytes()
    assert b'"version":3,' in before[:60]
    assert prep.names(folder) == ["plan.json", "tokenizer"]
    plan = prep.plan(many_dir, folder, num_shards=3)  # compared with the one that is there
    assert (folder / "plan.json").read_bytes() == before
    assert plan.num_shards == 3
    for words in (["run", folder], ["verify", folder, "--deep"], ["peek", folder], ["clean", folder]):
        ended = prep.command(*words)
        assert ended.code == 0, ended.text
    assert "0.txt" in prep.command("peek", folder, "0000.txt:0").text
    for words in (["status", folder], ["report", folder, "--json"]):
        assert slurm([str(word) for word in words]) == 0, capsys.readouterr()
    assert "4200" in capsys.readouterr().out.replace(",", "")
    assert read_input_names(folder) == [f"{number:04d}.txt" for number in range(4_200)]
