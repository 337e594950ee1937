"""How often commands ask the file system; on a parallel one each call is a round trip to a server."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from preprocess.make.worker import finished_manifest, missing_shards
from shardprep.files import read_regular
from shardprep.format.manifest import check_shard
from shardprep.format.names import manifest_path, tar_path
from shardprep.format.plan import need_plan
from tests.conftest import forge_shard

if TYPE_CHECKING:
    from tests.conftest import Prep


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each folder was listed."""
    found: Counter[str] = Counter()
    for name in ("listdir", "scandir"):
        original = getattr(os, name)

        def counting(path: Any = ".", original: Any = original) -> Any:
            found[str(path)] += 1
            return original(path)

        monkeypatch.setattr(os, name, counting)
    return found


def test_what_is_missing_is_found_with_one_look_at_the_folder_however_many_shards_are_done(
    prep: Prep, sample_dir: Path, tmp_path: Path, listed: Counter[str]
) -> None:
    out = tmp_path / "out"
    prep.plan(sample_dir, out, num_shards=6)
    prep.make(out)
    plan = need_plan(out)
    manifest_path(out, 3).unlink()
    for name in (".shard-00001.tar.host-1-00000000.tmp", ".shard-00003.tar.host-1-00000000.tmp"):
        (out / name).touch()
    listed.clear()
    assert missing_shards(plan, out, range(6)) == [3]
    assert listed[str(out)] == 1
    left = [path.name for path in out.glob(".shard-*.tmp")]
    assert left == [".shard-00003.tar.host-1-00000000.tmp"], "only what belongs to done shards goes"


def test_a_task_lists_no_folder_of_the_data_set_but_the_tokenizer(
    prep: Prep, sample_dir: Path, tmp_path: Path, listed: Counter[str]
) -> None:
    out = tmp_path / "out"
    prep.plan(sample_dir, out, num_shards=6)
    plan = need_plan(out)
    listed.clear()
    prep.make(out, 1)
    assert finished_manifest(plan, out, 1)
    ours = {folder for folder in listed if Path(folder).is_relative_to(out)}
    assert ours == {str(out / "tokenizer")}
    left = out / ".shard-00001.tar.host-1-00000000.tmp"
    for path in (left, out / ".shard-00001.begun.tmp"):
        path.touch()
    assert finished_manifest(plan, out, 1)
    assert listed[str(out)] == 1, "an attempt that was killed has left its mark"
    assert not left.exists()


def count_calls(monkeypatch: pytest.MonkeyPatch, most: int = 1 << 20) -> Counter[str]:
    calls = Counter[str]()
    for name in ("open", "fstat", "stat", "read"):
        original = getattr(os, name)

        def counting(*args: Any, name: str = name, original: Any = original, **kwargs: Any) -> Any:
            calls[name] += 1
            if name == "read":
                args = (args[0], min(args[1], most))
            return original(*args, **kwargs)

        monkeypatch.setattr(os, name, counting)
    return calls


def test_a_shard_is_found_done_by_one_open_one_read_and_three_looks_at_sizes(
    data_dir: Path, prep: Prep, monkeypatch: pytest.MonkeyPatch
) -> None:
    prep.make(data_dir)
    plan = need_plan(data_dir)
    calls = count_calls(monkeypatch)
    check_shard(data_dir, 0, plan.plan_id)
    assert calls == {"open": 1, "fstat": 1, "read": 1, "stat": 2}


@pytest.mark.parametrize(("most", "num_reads"), [(1, 100), (7, 15), (1000, 1)])
def test_a_file_is_read_whole_though_reads_are_short(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, num_reads: int
) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(range(100)))
    calls = count_calls(monkeypatch, most)
    assert read_regular(path, max_bytes=100) == bytes(range(100))
    assert calls["read"] == num_reads


def test_a_tar_without_its_end_is_still_found_by_verify(data_dir: Path, prep: Prep) -> None:
    prep.make(data_dir)
    good = tar_path(data_dir, 0).read_bytes()
    forge_shard(data_dir, 0, tar=good)
    assert prep.command("verify", data_dir).code == 0
    forge_shard(data_dir, 0, tar=good[:-1] + b"x")
    ended = prep.command("verify", data_dir)
    assert ended.code == 65
    assert "two zero blocks" in ended.text
