"""A bit that flips in a file of the contract is refused by an error of ours, or changes nothing that is read.

One bit in every byte of each small file; what a reader makes of it is compared with what it made before.
"""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shardprep.errors import ShardprepError
from shardprep.format.idx import read_idx
from shardprep.format.index import read_index
from shardprep.format.manifest import read_manifest
from shardprep.format.plan import need_plan, plan_json
from shardprep.format.tokenizer_files import check_tokenizer_files

if TYPE_CHECKING:
    from tests.conftest import Prep

KINDS: dict[str, dict[str, Any]] = {
    "json": {},
    "npy": {"token_format": "npy", "keep_text": False},
    "packed": {"record": "packed", "seq_len": 64},
}


@pytest.fixture(scope="module")
def folders(
    prep: Prep, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Path]:
    """A verified data set of two small shards for each kind of record."""
    raw = tmp_path_factory.mktemp("raw")
    (raw / "a.txt").write_text("".join(f"line {number} of a small file\n" for number in range(30)))
    (raw / "b.txt").write_bytes(b"\xff\nthe second file\n" * 3)
    found = {}
    for kind, options in KINDS.items():
        found[kind] = tmp_path_factory.mktemp(kind)
        prep.plan(raw, found[kind], num_shards=2, max_bad_fraction=0.9, **options)
        prep.make(found[kind])
        assert prep.command("verify", found[kind]).code == 0
    return found


def flipped(path: Path, *, step: int = 1) -> Iterator[int]:
    """Flip a bit of each byte, another one each time, and put it back; gives the byte's place."""
    good = path.read_bytes()
    assert good
    try:
        for place in range(0, len(good), step):
            damaged = bytearray(good)
            damaged[place] ^= 1 << (place * 5 + place // 8) % 8
            path.write_bytes(damaged)
            yield place
    finally:
        path.write_bytes(good)


def refused_or_equal(path: Path, read: Callable[[], Any], *, step: int = 1) -> int:
    """How many flips were refused; of all others the reader must give what it gave before."""
    before, num_refused, num_flips = read(), 0, 0
    unnamed: list[ShardprepError] = []
    for place in flipped(path, step=step):
        num_flips += 1
        try:
            found = read()
        except ShardprepError as error:
            unnamed += [error] * (str(path.parent) not in str(error))
            num_refused += 1
        else:
            assert found == before, place
    assert not unnamed
    assert num_refused > 0.6 * num_flips
    assert read() == before
    return num_refused


@pytest.mark.slow
def test_a_bit_of_plan_json(folders: dict[str, Path], tmp_path: Path) -> None:
    """Of its probe two texts, as there are 10 KB of them."""
    folder = tmp_path
    plan = need_plan(folders["packed"])
    (folder / "plan.json").write_bytes(plan_json(dataclasses.replace(plan, probe=plan.probe[2:4])))
    refused_or_equal(folder / "plan.json", lambda: plan_json(need_plan(folder)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_of_index_json(folders: dict[str, Path], kind: str) -> None:
    folder = folders[kind]
    refused_or_equal(folder / "index.json", lambda: read_index(folder).to_json())


@pytest.mark.slow
def test_a_bit_of_a_manifest(folders: dict[str, Path]) -> None:
    folder = folders["json"]
    path = folder / "shard-00001.json"
    manifest = read_manifest(folder, 1)
    assert manifest.quarantine is not None
    assert {"engine", "host", "slurm", "wall_s"} <= set(manifest.run)
    num_refused = refused_or_equal(path, lambda: read_manifest(folder, 1))
    assert num_refused == path.stat().st_size, "no bit of a manifest is without effect"


def test_verify_names_a_manifest_in_whose_run_a_bit_flipped(
    prep: Prep, folders: dict[str, Path], tmp_path: Path
) -> None:
    """``run`` varies between equal shards, so the hash of the rest leaves it out: it has one of its own."""
    folder = Path(shutil.copytree(folders["json"], tmp_path / "data"))
    path = folder / "shard-00001.json"
    good = path.read_bytes()
    for found, flipped_to in ((b'"engine": "t', b'"engine": "u'), (b'"run_sha256"', b'"rUn_sha256"')):
        assert good.count(found) == 1
        path.write_bytes(good.replace(found, flipped_to))
        for tier in ([], ["--fast"]):
            ended = prep.command("verify", folder, *tier)
            assert ended.code == 65, ended.text
            assert str(path) in ended.text
            assert "run_sha256" in ended.text
    path.write_bytes(good)
    assert prep.command("verify", folder).code == 0


@pytest.mark.parametrize("kind", KINDS)
def test_a_bit_of_an_idx(folders: dict[str, Path], kind: str) -> None:
    folder = folders[kind]
    spec = need_plan(folder).spec
    path = folder / "shard-00000.idx"
    num_refused = refused_or_equal(path, lambda: read_idx(folder, spec, 0).tolist())
    assert num_refused == path.stat().st_size, "no bit of an idx is without effect"


def test_a_bit_of_the_tokenizers_files(folders: dict[str, Path]) -> None:
    folder = folders["json"]
    stamps = need_plan(folder).tokenizer_files
    assert {"tokenizer.json", "tokenizer_config.json"} <= set(stamps)
    for name in stamps:
        path = folder / "tokenizer" / name
        step = max(1, path.stat().st_size // 500)
        num_refused = refused_or_equal(path, lambda: check_tokenizer_files(folder, stamps), step=step)
        assert num_refused == len(range(0, path.stat().st_size, step))


@pytest.mark.processes
@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_worker_run_and_both_tiers_of_verify_name_a_changed_file_of_the_tokenizer(
    prep: Prep, folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(folders["json"], tmp_path / "data"))
    path = folder / "tokenizer" / name
    path.write_bytes(path.read_bytes() + b" ")  # as good a JSON, of equal ids
    for tier in ([], ["--fast"]):
        ended = prep.command("verify", folder, *tier)
        assert ended.code == 78, ended.text
        assert str(path) in ended.text
    (folder / "shard-00000.json").unlink()
    for command in (["--shard_id", 0, "--output_dir", folder], ["run", folder, "--num_proc", 1]):
        ended = prep.command(*command)
        assert ended.code == 78, ended.text
        assert str(path) in ended.text
    path.write_bytes(path.read_bytes()[:-1])
    (folder / "tokenizer" / "added_tokens.json").write_text("{}")
    ended = prep.command("verify", folder)
    assert ended.code == 78
    assert str(folder / "tokenizer" / "added_tokens.json") in ended.text
    (folder / "tokenizer" / "added_tokens.json").unlink()
    assert prep.command("run", folder, "--num_proc", 1).code == 0
    path.unlink()
    assert prep.command("verify", folder).code == 66


def test_the_loader_refuses_an_idx_that_it_reads_in_parts(
    folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("torch", reason="the loader needs it")
    from loader import reading as open_shard
    from loader.find_shards import find_shards
    from loader.reading import ShardReader
    from shardprep.errors import BrokenShard
    from shardprep.format.idx import IDX_HEADER

    monkeypatch.setattr(open_shard, "HELD_IDX_BYTES", 0)
    for kind in KINDS:
        folder = Path(shutil.copytree(folders[kind], tmp_path / kind))
        shards = find_shards(folder)
        whole = ShardReader(shards)
        num_tokens = whole.read(np.arange(shards.num_samples)).num_tokens
        assert num_tokens.sum() == shards.datasets[0].num_tokens.sum()
        whole.close()
        for place in flipped(folder / "shard-00000.idx", step=7):
            if place < IDX_HEADER.itemsize:
                continue
            reader = ShardReader(shards)
            with pytest.raises(BrokenShard) as caught:
                reader.read(np.array([0]))
            assert caught.value.path == str(folder / "shard-00000.idx")
            reader.close()
