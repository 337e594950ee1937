"""plan.json: a task reads the head and its own rows, whatever the plan's size; damage is refused by name."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import pytest

from shardprep.errors import BrokenShard, ShardprepError, UnknownVersion
from shardprep.format.json_files import content_sha256
from shardprep.format.plan import Cut, Plan, need_plan, plan_id, plan_json, read_input_names
from tests.conftest import seal

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
        "inputs": [*plan.inputs, *(msgspec.structs.replace(plan.inputs[0], path=name) for name in names)],
        "cuts": [Cut(first, 0) for first in range(0, num_inputs + 1, INPUTS_PER_SHARD)],
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


def test_a_task_opens_a_plan_once_and_reads_its_own_rows_of_a_plan_of_any_size(
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
    assert 60_000 < found[0]["bytes"] < 250_000 < (tmp_path / "72000/plan.json").stat().st_size / 20
    assert made[0] == made[1]


def test_a_flipped_bit_in_the_head_or_in_the_rows_of_the_shard_is_refused_and_the_file_named(
    prep: Prep, few_dir: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "data"
    cuts = [Cut(first, 5 * (0 < first < 9_000), 7, "ab" * 32) for first in range(0, 9_001, 3)]
    enlarged(folder, few_dir, 9_000, cuts=cuts)
    path = folder / "plan.json"
    good = path.read_bytes()
    behind = good.index(b"\n") + 1
    tables = json.loads(good)["tables"]
    places = list(range(1, behind, 31))
    for name in ("inputs", "cuts"):
        offset, num_bytes = tables[name]["offset"], tables[name]["blocks"][0][0]
        assert len(tables[name]["blocks"]) > 4
        places += range(behind + offset, behind + offset + num_bytes, num_bytes // 20)
    assert len(places) > 100
    for place in places:
        path.write_bytes(good[:place] + bytes([good[place] ^ 1 << place % 8]) + good[place + 1 :])
        with pytest.raises(ShardprepError) as caught:
            need_plan(folder).shard(1)
        assert str(path) in str(caught.value), place


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
        assert str(path) in ended.text


# What stands in the head, and what takes its place: as a script that edits plans and their hash might do.
EDITS: dict[str, tuple[bytes, bytes]] = {
    "an option": (b'"encoding":"utf-8"', b'"encoding":"cp949"'),
    "an option that is no choice": (b'"doc":"line"', b'"doc":"page"'),
    "options that do not go together": (b'"seq_len":0', b'"seq_len":7'),
    "the tokenizer": (b'"vocab_size":', b'"vocab_size":1'),
    "the hash of the inputs": (b'"inputs_sha256":"', b'"inputs_sha256":"%064x' % 7),
    "a tokenizer's file outside": (b'"tokenizer_files":{"', b'"tokenizer_files":{"../'),
    "more rows than blocks": (b'"num_rows":2', b'"num_rows":2000'),
}


@pytest.mark.parametrize("edit", EDITS)
def test_a_head_that_does_not_agree_with_itself_is_refused_though_its_hash_is_right(
    few_dir: Path, tmp_path: Path, edit: str
) -> None:
    folder = Path(shutil.copytree(few_dir, tmp_path / "data"))
    old, new = EDITS[edit]
    raw = (folder / "plan.json").read_bytes()
    assert old in raw
    raw = raw.replace(old, new, 1)
    (folder / "plan.json").write_bytes(raw)
    if edit == "the hash of the inputs":  # 64 digits and what stood there
        text = raw.decode()
        start = text.index('"inputs_sha256":"') + len('"inputs_sha256":"') + 64
        (folder / "plan.json").write_text(text[:start] + text[start + 64 :])
    seal(folder / "plan.json")
    with pytest.raises(BrokenShard) as caught:
        need_plan(folder)
    assert caught.value.path == str(folder / "plan.json")


PATHS_OUTSIDE = ["/etc/passwd", "../a.txt", "a/../b.txt", "./a.txt", "a//b.txt", "a\0b", ""]


@pytest.mark.parametrize("path", PATHS_OUTSIDE)
def test_no_input_of_a_plan_lies_outside_of_the_input_folder(
    few_dir: Path, tmp_path: Path, path: str
) -> None:
    folder = Path(shutil.copytree(few_dir, tmp_path / "data"))
    plan = need_plan(folder)
    raw = plan_json(plan)
    tables = json.loads(raw)
    head, _, body = raw.partition(b"\n")
    name = json.dumps(path).encode()
    rows = msgspec.json.encode(list(plan.inputs))[1:-1].replace(b'"0.txt"', name, 1)

    old = tables["tables"]["inputs"]["blocks"][0]
    head = head.replace(
        json.dumps(old, separators=(",", ":")).encode(),
        json.dumps([len(rows), hashlib.sha256(rows).hexdigest()], separators=(",", ":")).encode(),
    )
    body = body.replace(msgspec.json.encode(list(plan.inputs))[1:-1], rows)
    (folder / "plan.json").write_bytes(head + b"\n" + body)
    seal(folder / "plan.json")
    with pytest.raises(BrokenShard) as caught:
        list(need_plan(folder).inputs)
    assert caught.value.path == str(folder / "plan.json")


@pytest.mark.parametrize(
    "cuts", [[Cut(0, 0), Cut(4, 0)], [Cut(0, 0), Cut(0, 99)], [Cut(0, 2), Cut(0, 1)], [Cut(1, 0), Cut(3, 0)]]
)
def test_cuts_that_do_not_divide_the_inputs_are_refused(
    few_dir: Path, tmp_path: Path, cuts: list[Cut]
) -> None:
    enlarged(tmp_path / "data", few_dir, 3, cuts=cuts)
    with pytest.raises(BrokenShard):
        need_plan(tmp_path / "data").shard_bytes()


@pytest.mark.parametrize(("value", "is_refused"), [(False, False), ("", False), (True, True), ("all", True)])
def test_an_option_that_is_not_known_here_is_refused_where_it_is_used(
    few_dir: Path, tmp_path: Path, value: Any, is_refused: bool
) -> None:
    folder = Path(shutil.copytree(few_dir, tmp_path / "data"))
    raw = (folder / "plan.json").read_bytes()
    (folder / "plan.json").write_bytes(
        raw.replace(b'"options":{', b'"options":{"lowercase":%s,' % json.dumps(value).encode(), 1)
    )
    seal(folder / "plan.json")
    if is_refused:
        with pytest.raises(UnknownVersion) as caught:
            need_plan(folder)
        assert "'lowercase'" in str(caught.value.found)
    else:
        assert need_plan(folder).options == need_plan(few_dir).options


def test_mtimes_and_left_out_names_count_in_no_plan_id_and_are_read_back(
    few_dir: Path, tmp_path: Path
) -> None:
    planned = enlarged(tmp_path / "one", few_dir, 9_000)
    touched = [msgspec.structs.replace(item, mtime_ns=-item.mtime_ns) for item in planned.inputs]
    names = [("hidden", ".a"), ("unknown suffix", "b.md")] * 400
    other = enlarged(tmp_path / "other", few_dir, 9_000, inputs=touched, names_left_out=names)
    assert planned.plan_id == other.plan_id
    read = need_plan(tmp_path / "other")
    assert list(read.inputs) == touched
    assert read.left_out == {"hidden": [".a"] * 400, "unknown suffix": ["b.md"] * 400}
    assert read.shard_bytes() == other.shard_bytes()
    assert read.inputs[-1] == touched[-1]
    assert read.inputs[510:515] == touched[510:515]
    assert read_input_names(tmp_path / "other") == [item.path for item in touched]


def test_the_file_is_json_whose_first_line_is_the_head(few_dir: Path, tmp_path: Path) -> None:
    planned = enlarged(tmp_path / "data", few_dir, 9_000)
    raw = (tmp_path / "data/plan.json").read_bytes()
    data, head = json.loads(raw), json.loads(raw.split(b"\n")[0] + b"}")
    assert (data["version"], data["plan_id"]) == (3, planned.plan_id)
    assert head["content_sha256"] == content_sha256(head)
    assert [item[0] for item in data["inputs"]] == [item.path for item in planned.inputs]
    assert [item[:2] for item in data["cuts"]] == [[cut.input_number, cut.byte] for cut in planned.cuts]
    # As prep_array.sh reads it.
    assert raw[:400].startswith(b'{"format":"shardprep-plan","version":3,"plan_id":"')
